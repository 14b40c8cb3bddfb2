"""Rewards: weights, missing values, whole batches for TRL's functions, length limits, and errors that name the row."""

import logging
import time

import pytest

from solera.config import RewardConfig
from solera.errors import SoleraError
from solera.tasks.rewards import check_functions
from tests.tasks.parts import Listed, grade_all, write_rewards

SUMS = Listed({"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}, {"prompt": "3+3=", "answer": "6"})
CHAT = Listed(
    {"prompt": [{"role": "user", "content": "hello"}], "answer": "hi", "mood": "good"}, {"prompt": "ask", "answer": 1}
)


def values(rewards) -> list[dict[str, float]]:
    return [{reward.part: reward.value for reward in several} for several in rewards]


def test_each_function_is_a_part_with_its_weight(tmp_path):
    path = write_rewards(
        tmp_path,
        "def length(rollout, row): return len(rollout.text)\n"
        "async def nice(rollout, row): return row['answer'] in rollout.text\n"
        "def tail(completions, answer, **kwargs): return [c[-1] == a for c, a in zip(completions, answer)]",
    )
    functions = ("exact", f"{path}:length", f"{path}:nice", f"{path}:tail", "number")
    graded = grade_all(SUMS, ["2", "is 4", "7"], functions=functions, weights=(1.0, -0.5, 2.0, 0.25, 10.0))
    assert values(graded) == [
        {"exact": 1.0, "number": 10.0, "length": -0.5, "nice": 2.0, "tail": 0.25},
        {"exact": 0.0, "number": 10.0, "length": -2.0, "nice": 2.0, "tail": 0.25},
        {"exact": 0.0, "number": 0.0, "length": -0.5, "nice": 0.0, "tail": 0.0},
    ]
    assert {reward.part: reward.source for reward in graded[0]}["length"] == f"{path}:length"


def test_without_functions_the_tasks_own_grader_gives_one_part():
    assert values(grade_all(SUMS, [" 2 ", "5", "6"])) == [{"reward": 1.0}, {"reward": 0.0}, {"reward": 1.0}]
    assert values(grade_all(SUMS, ["2", "4", "6"], finished=False)) == [{"reward": 0.0}] * 3


@pytest.mark.parametrize("grader", ["exact", "number", "math"])
def test_a_prompt_without_an_answer_to_compare_with_is_refused(grader):
    with pytest.raises(SoleraError, match=f"field 'answer' is missing, but the grader {grader} needs it"):
        grade_all(Listed({"prompt": "1+1=", "solution": "2"}), ["2"], functions=(grader,))


def test_a_grader_of_the_form_needs_no_answer():
    assert values(grade_all(Listed({"prompt": "1+1="}), ["\\boxed{2}"], functions=("boxed",))) == [{"boxed": 1.0}]


def test_a_function_sees_the_rollout_and_may_not_change_the_row(tmp_path):
    path = write_rewards(
        tmp_path,
        "def f(rollout, row):\n"
        "    assert rollout.finish_reason == 'stop' and rollout.rewards == () and rollout.version == 0\n"
        "    assert rollout.length == len(rollout.text) + 1\n"
        "    return len(row.pop('prompt'))",
    )
    for _ in range(2):
        assert values(grade_all(SUMS, ["a", "bc", "def"], functions=(f"{path}:f",))) == [{"f": 4.0}] * 3


def test_a_missing_value_leaves_its_part_out_and_all_missing_leave_no_reward(tmp_path):
    path = write_rewards(
        tmp_path,
        "def a(rollout, row): return None if rollout.text in 'xy' else 1\n"
        "def b(completions, **kwargs): return [None if c == 'y' else 2 for c in completions]",
    )
    graded = grade_all(SUMS, ["x", "y", "z"], functions=(f"{path}:a", f"{path}:b"), overlong_buffer=16)
    assert [set(part) for part in values(graded)] == [{"b", "overlong"}, set(), {"a", "b", "overlong"}]


def test_trl_functions_get_whole_batches_and_what_trl_would_give_them(tmp_path):
    path = write_rewards(
        tmp_path,
        "seen = []\n"
        "def f(prompts, completions, completion_ids, **columns):\n"
        "    seen.append((prompts, completions, completion_ids, columns))\n"
        "    return [len(seen)] * len(prompts)\n",
    )
    graded = grade_all(CHAT, ["hi", "so"], functions=(f"{path}:f",))
    assert values(graded) == [{"f": 1.0}, {"f": 1.0}]  # one call for both
    import sys

    (module,) = [m for name, m in sys.modules.items() if name.startswith("solera_own_") and m.__file__ == path]
    ((prompts, completions, ids, columns),) = module.seen
    assert prompts == [[{"role": "user", "content": "hello"}], "ask"]
    assert completions == [[{"role": "assistant", "content": "hi"}], "so"]
    assert ids == [[104, 105, 0], [115, 111, 0]]
    assert columns == {"answer": ["hi", 1], "mood": ["good", None]}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "return 1 / 0",
            r"data.jsonl:2: reward .*rewards.py:f raised ZeroDivisionError: division by zero \(rewards.py, line 3\)",
        ),
        ("raise KeyError('a\\nb')", "data.jsonl:2: reward .* raised KeyError: 'a"),
        (
            "return rollout.txt",
            r"jsonl:2: .* AttributeError: the rollout has no 'txt'; did you mean text\? \(rewards.py, line 3\)$",
        ),
        ("raise ValueError", r"data.jsonl:2: reward .* raised ValueError \(rewards.py, line 3\)"),
        ("return 'good'", "data.jsonl:2: reward .* returned 'good', which is not a number"),
        ("return [1]", r"data.jsonl:2: reward .* returned \[1\], which is not a number"),
        ("return float('nan')", "data.jsonl:2: reward .* returned nan; a reward must be finite"),
        ("return 10 ** 400", "data.jsonl:2: reward .*; a reward must be finite"),
        ("return -1e200", r"data.jsonl:2: reward .* returned -1e\+200; a reward must be .* at most 1e\+12 in size$"),
        ("import time; time.sleep(5)", r"data.jsonl:2: reward .* took longer than reward.timeout = 1 s"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_error_names_function_and_row_or_counts_as_missing(tmp_path, caplog, body, says, kind):
    path = write_rewards(tmp_path, f"{kind} f(rollout, row):\n  if row['answer'] != '4': return 1.0\n  {body}")
    settings = {"functions": (f"{path}:f",), "timeout": 1.0}
    with pytest.raises(SoleraError, match=says) as refusal:
        grade_all(SUMS, ["2", "4", "6"], **settings)
    assert "\n" not in str(refusal.value)
    with caplog.at_level(logging.WARNING):
        graded = grade_all(SUMS, ["2", "4", "6"], errors="missing", **settings)
    assert values(graded) == [{"f": 1.0}, {}, {"f": 1.0}]
    assert len(caplog.records) == 1
    assert "data.jsonl:2: reward" in caplog.text


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "return [1, 2]",
            "a list of 2 for a batch of 3 that starts here, but must return a list of 3, one for each response$",
        ),
        ("return 1.0", "returned 1.0 for a batch of 3 that starts here, but must return a list of 3"),
        ("return None", "returned None for a batch of 3"),
        ("return {'a': 1, 'b': 2, 'c': 3}", "must return a list of 3"),
        ("return 'abc'", "must return a list of 3"),
        ("return (x for x in [1, 2, 3])", "must return a list of 3"),
        ("return [1, 'x', 3]", "data.jsonl:2: reward .* returned 'x', which is not a number"),
        ("return [1, 2, float('inf')]", "data.jsonl:3: reward .* returned inf; a reward must be finite"),
        (
            "raise OSError('gone')",
            r"jsonl:1: .* raised OSError: gone \(rewards.py, line 2\), called for a batch of 3 that starts here$",
        ),
    ],
)
def test_what_a_batched_function_must_not_give(tmp_path, body, says):
    path = write_rewards(tmp_path, f"def f(completions, **columns):\n  {body}")
    with pytest.raises(SoleraError, match=says) as refusal:
        grade_all(SUMS, ["2", "4", "6"], functions=(f"{path}:f",))
    assert "\n" not in str(refusal.value)


def test_numbers_of_every_kind_are_taken(tmp_path):
    path = write_rewards(
        tmp_path,
        "import numpy, torch, fractions\n"
        "def one(rollout, row):\n"
        "    return {'2': numpy.float32(0.5), '4': torch.tensor(0.5), '6': fractions.Fraction(1, 2)}[row['answer']]\n"
        "def flag(rollout, row): return numpy.bool_(True)\n"
        "def array(completions, **columns): return numpy.array([1, 2, 3])\n"
        "def tensor(completions, **columns): return torch.tensor([1.0, 2.0, 3.0])\n",
    )
    graded = values(
        grade_all(SUMS, ["", "", ""], functions=tuple(f"{path}:{n}" for n in ("one", "flag", "array", "tensor")))
    )
    assert graded == [{"one": 0.5, "flag": 1.0, "array": float(i), "tensor": float(i)} for i in (1, 2, 3)]


def test_a_response_cut_off_is_graded_or_penalised():
    graded = grade_all(SUMS, ["2 it is. So", "4 it is. So", "7 it is. So"], finished=False, functions=("number",))
    assert values(graded) == [{"number": 1.0}, {"number": 1.0}, {"number": 0.0}]
    penalised = {"truncated": "penalise", "truncated_reward": -0.5, "overlong_buffer": 4}
    assert values(grade_all(SUMS, ["2"], finished=False, **penalised)) == [{"truncated": -0.5}]
    assert values(grade_all(SUMS, ["2"], finished=True, **penalised)) == [{"reward": 1.0, "overlong": 0.0}]


def test_the_overlong_penalty_is_dapos():
    """R(y) = 0 up to L−C, ((L−C)−|y|)/C up to L: equation 13 of DAPO, with L = 10, C = 4, times 0.8."""
    expected = {5: 0.0, 6: 0.0, 7: -0.2, 8: -0.4, 9: -0.6, 10: -0.8}
    for length, value in expected.items():  # the end token is one of them
        (graded,) = grade_all(SUMS, ["x" * (length - 1)], max_tokens=10, overlong_buffer=4, overlong_penalty=0.8)
        assert graded[-1].part == "overlong"
        assert graded[-1].value == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize(
    ("functions", "says"),
    [(("exact", "exact"), "reward/exact is listed twice"), (("a.b:f", "c:f"), "reward/f is listed twice"),
     (("a:mean",), "reward/mean already has this name"), (("a:overlong",), "reward/overlong already has this name")],
)  # fmt: skip
def test_parts_must_have_names_of_their_own(functions, says):
    with pytest.raises(SoleraError, match=says):
        check_functions(RewardConfig(functions))


def test_a_hang_does_not_outlast_its_timeout(tmp_path):
    path = write_rewards(tmp_path, "import threading\ndef f(completions, **columns): threading.Event().wait()")
    start = time.perf_counter()
    with pytest.raises(SoleraError, match=r"took longer than reward\.timeout = 0.3 s"):
        grade_all(SUMS, ["2", "4", "6"], functions=(f"{path}:f",), timeout=0.3)
    assert time.perf_counter() - start < 3
