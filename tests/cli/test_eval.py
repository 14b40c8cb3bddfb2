"""`solera eval` in a subprocess, on the embedded model and on a short run."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

import solera as package
from tests.command import ROOT, solera

ON_CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A finished run of 6 batches with checkpoints after 2, 4 and 6, on a task of its own."""
    root = tmp_path_factory.mktemp("runs")
    text = f"""
        run = {{ root = "{root}", name = "short", steps = 6, device = "cpu" }}
        collect = {{ prompts = 8, group_size = 8 }}
        learn = {{ lr = 3e-3, warmup = 0 }}
        task = {{ level = 1 }}
        sampling = {{ max_tokens = 12, temperature = 0.8 }}
        evaluate = {{ every = 0, problems = 7 }}
        checkpoint = {{ every = 2, keep = 5 }}
        report = {{ tensorboard = false, progress = false, page = false }}
    """
    from solera.config import parse

    return package.train(parse(text, "test")).folder


def test_the_embedded_model_by_itself(tmp_path):
    """145 of 500 problems; the limits are the roots of (p̂ − p)² = z²·p(1 − p)/n."""
    done = solera("eval", "embedded", *ON_CPU, "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "29.0%" in done.stdout
    told = json.loads((tmp_path / "out.json").read_text())
    (model,) = told["models"]
    found = model["estimates"]["pass@1 greedy"]
    assert (found["value"], found["problems"]) == (0.29, 500)
    for limit in (found["low"], found["high"]):
        assert (0.29 - limit) ** 2 == pytest.approx(1.96**2 * limit * (1 - limit) / 500, abs=1e-12)
    assert sum(problem["passed"] for problem in model["greedy"]["problems"]) == 145
    assert len({problem["key"] for problem in model["greedy"]["problems"]}) == 500
    assert model["sampled"] is None
    assert told["comparisons"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_several_tasks_in_one_table(tmp_path):
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(40)))
    parts = ("arithmetic@2", "arithmetic@3", "jsonl=sums.jsonl")
    done = solera(
        "eval", "embedded", "--task", "mixture", "--task.parts", *parts, "--problems", "30", *ON_CPU,
        "--json", "out.json", cwd=tmp_path, COLUMNS="200",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (model,) = json.loads((tmp_path / "out.json").read_text())["models"]
    passed = dict.fromkeys(("arithmetic@2", "arithmetic@3", "jsonl sums"), 0)
    counts = passed.copy()
    for problem in model["greedy"]["problems"]:
        name = problem["key"].partition("/")[0]
        counts[name] += 1
        passed[name] += problem["passed"]
    assert (counts["arithmetic@2"], counts["arithmetic@3"]) == (30, 30) and 0 < counts["jsonl sums"] < 20
    for name, count in counts.items():
        estimate = model["tasks"][name]["pass@1 greedy"]
        assert (estimate["value"], estimate["problems"]) == (pytest.approx(passed[name] / count), count)
        assert f"{name} ({count} problems)" in done.stdout
    assert model["estimates"]["pass@1 greedy"]["value"] == pytest.approx(sum(passed.values()) / sum(counts.values()))


def test_two_models_sampled_and_compared(tmp_path, run_folder):
    """All estimates again, from the counts of every problem."""
    done = solera(
        "eval", "embedded", str(run_folder / "model"), "--task.level", "2", "--problems", "60", "--samples", "4",
        "--k", "1", "3", *ON_CPU, "--json", "out.json", cwd=tmp_path, COLUMNS="200",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "out.json").read_text())
    first, second = told["models"]
    for model in (first, second):
        passed = [problem["passed"] for problem in model["sampled"]["problems"]]
        assert {problem["graded"] for problem in model["sampled"]["problems"]} == {4}
        assert model["estimates"]["avg@4"]["value"] == pytest.approx(sum(passed) / 240)
        assert model["estimates"]["pass@1"] == pytest.approx(model["estimates"]["avg@4"])
        pass_at_3 = [{0: 0, 1: 3 / 4}.get(c, 1) for c in passed]  # of 4 attempts, 3 miss a single success in one draw
        assert model["estimates"]["pass@3"]["value"] == pytest.approx(sum(pass_at_3) / 60)
    (comparison,) = told["comparisons"]
    difference = comparison["differences"]["pass@1 greedy"]
    pairs = list(zip(first["greedy"]["problems"], second["greedy"]["problems"], strict=True))
    assert all(a["key"] == b["key"] for a, b in pairs)
    changes = [b["passed"] - a["passed"] for a, b in pairs]
    mean = sum(changes) / 60
    half = 1.96 * math.sqrt(sum((change - mean) ** 2 for change in changes) / 59 / 60)
    assert (difference["value"], difference["low"], difference["high"]) == pytest.approx(
        (mean, mean - half, mean + half)
    )
    assert (difference["only_first"], difference["only_second"]) == (changes.count(-1), changes.count(1))
    assert difference["excludes_zero"] == (not mean - half <= 0 <= mean + half)
    assert f"{run_folder / 'model'} against embedded, problem by problem:" in done.stdout
    assert re.search(r"avg@4: [+-]\d+\.\d points \(", done.stdout)


def test_a_model_compared_with_itself_differs_nowhere():
    done = solera("eval", "embedded", "embedded", "--problems", "20", *ON_CPU)
    assert done.returncode == 0, done.stderr
    assert "+0.0 points on each of 20 problems: no spread, so no interval" in done.stdout


def test_a_runs_folder_brings_its_settings_and_its_checkpoints(tmp_path, run_folder):
    done = solera("eval", str(run_folder), "--checkpoints", "--json", "out.json", *ON_CPU, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["settings"]["task"]["level"] == 1
    assert told["settings"]["sampling"]["max_tokens"] == 12
    assert told["settings"]["evaluate"]["problems"] == 7
    names = [model["model"] for model in told["models"]]  # step-000006 is the finished model, so it is not there twice
    assert names == [str(run_folder / "checkpoints" / f"step-00000{step}") for step in (2, 4)] + [str(run_folder)]
    values = [model["estimates"]["pass@1 greedy"]["value"] for model in told["models"]]
    over = told["checkpoints"][str(run_folder)]["pass@1 greedy"]
    assert (over["max"], over["mean"]) == pytest.approx((max(values), sum(values) / 3))
    assert "max over 3 checkpoints of" in done.stdout
    last = json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert values[-1] == last["eval/pass@1"]


@pytest.mark.parametrize("more", [(), ("--samples", "2")], ids=["a row for each", "a column for each"])
def test_a_table_of_80_columns_breaks_no_step_and_no_line_of_a_comparison(run_folder, more):
    done = solera("eval", str(run_folder), "--checkpoints", *more, *ON_CPU, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    table, _, comparisons = done.stdout.partition("95 % intervals in brackets")
    assert max(map(len, table.splitlines())) <= 80
    for step in ("step-000002", "step-000004"):
        assert re.search(rf"[ /]{step} ", table)
    assert "pass@1 greedy: +" in comparisons
    for line in comparisons.splitlines():
        assert len(line) <= 80 or len(line.split()) == 1  # a path is one word, however long


def test_options_win_over_the_runs_settings(tmp_path, run_folder):
    done = solera(
        "eval", str(run_folder), "--task.level", "2", "--problems", "9", "--samples", "2", *ON_CPU, "--json", "o",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "was trained on another task" in done.stderr
    told = json.loads((tmp_path / "o").read_text())
    assert (told["settings"]["task"]["level"], told["settings"]["evaluate"]["problems"]) == (2, 9)
    assert told["models"][0]["sampled"]["sampling"]["temperature"] == 0.8  # what the run trained with
    assert told["settings"]["k"] == [2]


def test_a_runs_threshold_is_its_own_tasks(tmp_path, run_folder):
    copy = tmp_path / "copy"
    shutil.copytree(run_folder, copy)
    config = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(config.replace("threshold = 0.5", "threshold = 0.25"))
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(40)))
    for options, threshold in (((), 0.25), (("--task", "jsonl", "--task.path", "sums.jsonl"), 0.5)):
        done = solera("eval", "copy", *options, "--problems", "2", *ON_CPU, "--json", "o", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "o").read_text())["settings"]["evaluate"]["threshold"] == threshold


def test_the_same_from_python_and_the_seed_decides_the_samples():
    def sampled(seed: int) -> list[int]:
        config = package.Config(
            run=package.RunConfig(device="cpu", seed=seed),
            evaluate=package.EvaluateConfig(problems=40, samples=3, temperature=1.0),
        )
        (model,) = package.evaluate_models(["embedded"], config).models
        assert model.estimates().keys() == {"pass@1 greedy", "reward greedy", "avg@3", "pass@3", "reward sampled"}
        return [problem.passed for problem in model.sampled.problems]

    assert sampled(0) == sampled(0)
    assert sampled(0) != sampled(1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "put the models before the options"),
        (["--samples", "4", "embedded"], "put the models before the options"),
        (["embeded"], "did you mean embedded?"),
        (["embedded", "no/such/folder"], "no such folder"),
        (
            ["embedded", "--samples", "4", "--k", "8"],
            "from 4 attempts per problem: raise --samples (evaluate.samples)\n",
        ),
        (["embedded", "--k", "1"], "pass@k needs sampled attempts: set --temperature (evaluate.temperature) above 0\n"),
        (["embedded", "--samples", "4", "--temperature", "0"], "set evaluate.temperature above 0"),
        (["embedded", "--samples", "many"], "--samples"),
        (["embedded", "--problemz", "4"], "did you mean --problems?"),
        (["embedded", "--problems", "0"], "it must be at least 1"),
        (["embedded", "--task", "sums"], "sums"),
        (["embedded", "--checkpoints"], "but none was given"),
        (["embedded", "--json", "no/such/out.json"], "cannot write a file to no/such"),
        (["embedded", "--json", "."], "this is a folder"),
        (["embedded", "--task.level", "9"], "levels 1 to 4"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(tmp_path, arguments, says):
    done = solera("eval", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("solera: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout
    assert not list(tmp_path.rglob("*"))


def test_an_unfinished_run_is_told_from_a_finished_one(tmp_path, run_folder):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text((run_folder / "config.toml").read_text())
    for checkpoints in ((), ("--checkpoints",)):
        said = solera("eval", "run", *checkpoints, cwd=tmp_path).stderr
        assert "neither a checkpoint nor a finished model" in said
    (tmp_path / "run" / "checkpoints" / "step-000002" / "model").mkdir(parents=True)
    assert "no finished model yet; evaluate its checkpoints" in solera("eval", "run", cwd=tmp_path).stderr


def test_help_names_every_option():
    done = solera("eval", "--help", COLUMNS="160", cwd=ROOT)
    assert done.returncode == 0
    for option in ("task.level", "sampling.max_tokens", "samples", "temperature", "k", "problems", "seed", "device",
                   "threads", "json", "checkpoints"):  # fmt: skip
        assert re.search(rf"--{re.escape(option)}\b", done.stdout), option
