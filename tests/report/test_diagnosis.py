"""What is said of a run at the top of its report, for runs made by hand. Numbers are counted by hand."""

import pytest

from solera.report.diagnosis import compared, diagnose
from solera.report.run_folder import RunFolder
from tests.report.runs import write_run

STEPS = 40
CONFIG = {"run": {"steps": STEPS}}


def made(
    tmp_path, *, finished=True, config=None, evaluations=(0.3, 0.9), width=0.02, every=None, **metrics
) -> RunFolder:
    """A run of 40 batches. `evaluations` are spread evenly; each value of `metrics` is one number, or one a batch."""
    rows = [{"step": step, "tokens/trained": 5} for step in range(STEPS)] + [{"step": STEPS}]
    gap = every or STEPS // max(len(evaluations) - 1, 1)
    for place, value in enumerate(evaluations):
        row = rows[place * gap]
        row["eval/pass@1"] = value
        if width is not None:
            row |= {"eval/pass@1_low": value - width, "eval/pass@1_high": value + width}
    for name, values in metrics.items():
        logged = values if isinstance(values, list) else [values] * STEPS
        for row, value in zip(rows, logged, strict=False):
            row[name.replace("__", "/")] = value
    if finished:
        (tmp_path / "model").mkdir(parents=True, exist_ok=True)
    return RunFolder(tmp_path, CONFIG if config is None else config, rows)


def test_accuracy_age_and_verdicts_in_one_sentence(tmp_path):
    run = made(tmp_path, evaluations=(0.29, 0.994), width=0.006, age__max=[k % 10 for k in range(STEPS)])
    for step, state in ((3, 1), (9, 1), (17, 0), (21, 1), (33, 1)):
        run.rows[step]["improvement/state"] = state
    assert diagnose(run).sentence == (
        "Held-out accuracy rose from 29 % to 99.4 % (95 % interval 98.8 to 100 %); data was at most 9 batches old; "
        "5 of 40 updates were judged: 4 certified, 1 inconclusive."
    )
    assert diagnose(run).attention == []


@pytest.mark.parametrize(
    ("evaluations", "width", "says"),
    [
        ((0.5, 0.55), 0.02, "Held-out accuracy rose from 50 % to 55 % (95 % interval 53 to 57 %)"),
        ((0.5, 0.53), 0.02, "Held-out accuracy did not change notably: 50 % at first, 53 % (95 % interval 51 to 55 %)"),
        ((0.5, 0.53), None, "Held-out accuracy did not change notably: 50 % at first, 53 % at the end"),
        ((0.5, 0.56), None, "Held-out accuracy rose from 50 % to 56 %"),
        ((0.5, 0.2), 0.02, "Held-out accuracy fell from 50 % to 20 % (95 % interval 18 to 22 %)"),
        ((0.5,), 0.02, "Held-out accuracy was 50 % (95 % interval 48 to 52 %) at step 0, the only evaluation"),
        ((), None, "Neither accuracy nor reward was logged"),
    ],
)
def test_how_the_accuracy_went(tmp_path, evaluations, width, says):
    assert diagnose(made(tmp_path, evaluations=evaluations, width=width)).sentence.startswith(says)


def test_without_an_evaluation_the_reward_is_told(tmp_path):
    """Mean of the first ten batches 4.5, of the last ten 34.5."""
    run = made(tmp_path, evaluations=(), reward__mean=[float(k) for k in range(STEPS)])
    assert diagnose(run).sentence == "Accuracy was not evaluated; reward went from 4.5 to 34.5."


@pytest.mark.parametrize(
    ("age", "config", "says"),
    [
        (0, CONFIG, "data was always fresh."),
        (1, CONFIG, "data was at most 1 batch old."),
        (12, CONFIG, "data was at most 12 batches old."),
        (0, {"draw": {"policy": "offline"}}, "nothing was generated, all data came from the store."),
    ],
)
def test_how_old_the_data_was(tmp_path, age, config, says):
    assert diagnose(made(tmp_path, age__max=age, config=config)).sentence.endswith(f"; {says}")


def test_a_run_that_is_not_finished_says_so_first(tmp_path):
    run = made(tmp_path, finished=False)
    del run.rows[25:]
    assert diagnose(run).sentence == (
        "Not finished, 25 of 40 steps; held-out accuracy was 30 % (95 % interval 28 to 32 %) at step 0, "
        "the only evaluation."
    )
    unknown = RunFolder(tmp_path, {"run": {"steps": "nan"}}, run.rows)
    assert diagnose(unknown).sentence.startswith("Not finished; held-out accuracy was 30 %")
    assert diagnose(RunFolder(tmp_path, {}, [])).sentence == "Nothing has been logged yet."


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"evaluations": (0.3, 0.8, 0.75)}, None),  # a small fall
        ({"evaluations": (0.3, 0.8, 0.1)}, "Collapse: accuracy fell from 80 % at step 20 to 10 %."),
        ({"evaluations": (0.3, 0.3)}, "No learning: accuracy is not notably higher after 40 steps than before."),
        ({"evaluations": (0.3, 0.32)}, "No learning: accuracy is not notably higher after 40 steps than before."),
        ({"evaluations": (0.3, 0.3), "finished": False}, "No learning yet: accuracy is not notably higher after 40"),
        ({"evaluations": (0.95, 0.95)}, None),  # nothing left to learn
        ({"evaluations": (0.3, 0.3), "every": 15}, None),  # too early to say
        ({"improvement__state": [1.0] * 7 + [-1.0, 1.0, -1.0]}, "2 updates judged harmful, the first at step 7"),
        ({"clip__fraction": [0.0] * 30 + [0.4] * 10}, "The clip removed 40 % of the tokens towards the end"),
        ({"clip__fraction": [0.9] * 30 + [0.1] * 10}, None),  # long ago
        ({"divergence__tv_sequence": 0.8}, "The policy is far from the policies that wrote its data: total"),
        ({"mismatch__logp": 0.5}, "Engine and learner disagree about fresh responses by 0.5 nats per token"),
        ({"mismatch__logp": 1e-4}, None),
        ({"reward__zero_variance_fraction": 0.8, "evaluations": (0.3, 0.5)}, "80 % of the groups had equal rewards"),
        ({"reward__zero_variance_fraction": 0.8, "evaluations": (0.3, 0.95)}, None),  # solved
        ({"response__truncated": 0.3}, "The token limit cut off 30 % of the responses"),
        ({"sync__faults": [0.0, 1.0, 0.0]}, "Weights had to be sent twice at 1 sync"),
        ({"evaluations": (0.3, 0.5), "eval__alike": 0.75}, "The model gives the same answer to 75 % of the held-out"),
    ],
)  # fmt: skip
def test_what_deserves_attention(tmp_path, metrics, says):
    attention = diagnose(made(tmp_path, **metrics)).attention
    assert len(attention) == (says is not None), attention
    assert says is None or attention[0].startswith(says)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model": {"compute": "float32"}}, True),
        ({"model": {"compute": "auto"}, "run": {"device": "cpu"}}, True),
        ({"model": {"compute": "auto"}, "run": {"device": "cuda"}}, False),
        ({"model": {"compute": "bfloat16"}, "run": {"device": "cpu"}}, False),
        ({"model": {"compute": "bfloat16"}, "sampling": {"temperature": 2.0}}, False),
        ({}, False),
    ],
)
def test_a_mismatch_is_measured_by_the_arithmetic_of_the_run(tmp_path, config, told):
    """0.01 nats are rounding in bfloat16 and an error in float32."""
    assert bool(diagnose(made(tmp_path, config=config, mismatch__logp=0.01)).attention) == told


def test_several_runs_are_compared_by_their_intervals(tmp_path):
    runs = {name: made(tmp_path / name, evaluations=(0.3, end)) for name, end in (("a", 0.7), ("b", 0.9), ("c", 0.88))}
    assert compared({"a": runs["a"]}) is None
    assert compared({name: runs[name] for name in "ab"}) == (
        "b ends highest, at 90 % (95 % interval 88 to 92 %); a follows with 70 % (95 % interval 68 to 72 %)."
    )
    assert compared(runs).startswith("b ends at 90 % (95 % interval 88 to 92 %) and c at 88 % ")
    assert "too close to tell" in compared(runs)


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        ({"task": {"name": "jsonl"}}, {"task": {"name": "arithmetic"}}, "task.name."),
        ({"evaluate": {"problems": 99, "every": 5}}, {"evaluate": {"problems": 100, "every": 7}}, "evaluate.problems."),
        (
            {"evaluate": {"every": 5}, "reward": {"timeout": 1}},
            {"evaluate": {"every": 7}, "reward": {"timeout": 2}},
            "",
        ),
        ({"task": {"name": "jsonl", "new": 1}}, {"task": {"name": "jsonl"}}, ""),
    ],
)
def test_runs_that_were_evaluated_differently_are_not_compared(tmp_path, one, other, says):
    runs = {
        str(n): made(tmp_path / str(n), config=config, evaluations=(0.3, 0.5 + n / 10))
        for n, config in enumerate((one, one, other))
    }
    assert compared({name: runs[name] for name in "01"}).startswith("1 ends highest")
    if says:
        assert compared(runs).startswith(
            f"These runs' accuracies do not compare, because these settings differ: {says}"
        )
    else:
        assert compared(runs).startswith("2 ends highest")


def test_the_sentence_stands_in_the_page(tmp_path):
    from solera.report.html import write_report
    from tests.report.pages import Page

    folder = write_run(tmp_path / "run", [{"step": 0, "eval/pass@1": 0.25}])
    (run,) = Page(write_report([folder], tmp_path / "report.html")).data["runs"]
    assert run["diagnosis"] == {
        "sentence": "Not finished; held-out accuracy was 25 % at step 0, the only evaluation.", "attention": [],
    }  # fmt: skip
