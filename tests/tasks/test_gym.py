"""reasoning-gym: its problems and scores, in processes of their own; and what hostile answers do to those."""

import asyncio
import re
import time

import pytest

from solera.errors import SoleraError
from solera.tasks.graders import GRADERS
from solera.tasks.gym import Gym, canonical, check_gym, gym, is_held_out
from solera.tasks.gym import grader as in_process_grader
from solera.tasks.judges import MOST, NoVerdictError, judges
from solera.tasks.mathematics import math
from tests.tasks.parts import Letters

TEMPLATE = "{prompt}"
HOSTILE = [
    "9^{9^{9^{9}}}", "((10!)!)!", "1e999999999", "(" * 2000, "\\frac{" * 2000, "9" * 3_000_000, "{" * 3_000_000,
    "__import__('os').system('sleep 60')", "exec('while True: pass')", "10**10**8", "'a' * 10**10", "exit()", "\0",
    "x^{1000000}", "\\boxed{" * 1000, "raise SystemExit", "import os\nos.kill(os.getppid(), 9)", "1" * 4299, "\ud800",
]  # fmt: skip


def task(name="chain_sum", level=None, seed=0, longest=None) -> Gym:
    return Gym(name, level, Letters(), TEMPLATE, seed, longest)


def score(prompt, text, finished=True) -> float:
    return asyncio.run(gym(text, prompt.data["gym"], finished))


def test_training_and_held_out_problems_are_disjoint_and_the_same_every_time():
    problems = task()
    training = [problems.prompt(i) for i in range(60)]
    held_out = problems.held_out(20)
    assert not {p.data["prompt"] for p in training} & {p.data["prompt"] for p in held_out}
    assert len({p.data["prompt"] for p in held_out}) == 20
    assert all(is_held_out(p.data["prompt"]) for p in held_out)
    again = task()
    assert [again.prompt(i).token_ids for i in (59, 0, 7)] == [training[i].token_ids for i in (59, 0, 7)]
    assert [p.token_ids for p in task(seed=5).held_out(20)] == [p.token_ids for p in held_out]
    assert task(seed=5).prompt(0).token_ids != training[0].token_ids


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find the GCD of these numbers: 2, 412.", "Find the GCD of these numbers: 412, 2."),
        ("Find the GCD of 6, 12 and 9.", "Find the GCD of 9, 6 and 12."),
        ("Spell this word backward: dan", "Spell this word backward: Dan"),
        ("What is 31 + 7?", "What is 7 + 31?"), ("What is 31 * 7?", "What is 7 * 31?"),
        ("Sort: a  b", "Sort: a b"),
    ],
)  # fmt: skip
def test_near_duplicates_fall_on_the_same_side(one, other):
    assert canonical(one) == canonical(other)
    assert is_held_out(one) == is_held_out(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("7 - 31", "31 - 7"),
        ("2 + 3 * 4", "3 + 2 * 4"),
        ("10 / 5", "5 / 10"),
        ("spell dan", "spell nad"),
        ("1, 2", "1, 3"),
    ],
)
def test_other_questions_keep_their_own_form(one, other):
    assert canonical(one) != canonical(other)


@pytest.mark.parametrize(("name", "level"), [("gcd", None), ("lcm", 0), ("spell_backward", 0), ("number_sorting", 0)])
def test_no_training_problem_repeats_a_held_out_one_in_other_order_or_case(name, level):
    """Compared by the bag of their words and numbers, which the split does not know."""
    problems = task(name, level)

    def bag(prompt):
        return tuple(sorted(re.findall(r"[\w.-]+", prompt.data["prompt"].casefold())))

    held_out = {bag(prompt) for prompt in problems.held_out(40)}
    assert len(held_out) > 30
    assert not held_out & {bag(problems.prompt(index)) for index in range(600)}


def test_levels_make_problems_harder():
    short = [len(task(level=0).prompt(i).token_ids) for i in range(20)]
    long = [len(task(level=3).prompt(i).token_ids) for i in range(20)]
    assert sum(long) > sum(short) + 100


def test_a_sum_is_scored_by_reasoning_gym():
    prompt = task(level=0).prompt(0)
    expression = prompt.data["prompt"].rsplit(":", 1)[1].rstrip(" =")
    total = str(eval(expression))  # the test's own sum of numbers such as 5 + 3 - 2
    assert score(prompt, total) == 1.0
    assert score(prompt, f" {total}\n") == 1.0
    assert score(prompt, f"I think <answer>{total}</answer>, or 12345") == 1.0
    assert score(prompt, f"so \\boxed{{{total}}}") == 1.0
    assert score(prompt, str(int(total) + 1)) == 0.0
    assert score(prompt, total, finished=False) == 0.0
    assert score(prompt, f"<answer>{total}</answer> and", finished=False) == 1.0


def test_prompts_that_do_not_fit_are_left_out():
    longest = max(len(task(level=2).prompt(i).token_ids) for i in range(30)) - 5
    assert all(len(task(level=2, longest=longest).prompt(i).token_ids) <= longest for i in range(30))
    with pytest.raises(
        SoleraError, match=r"accepts prompts of at most 3 tokens, but the shortest of 32 has [0-9]{2,}$"
    ):
        task(longest=3).prompt(0)


@pytest.mark.parametrize("longest", [None, 3])
def test_a_model_that_cannot_spell_the_problems_is_told_so_first(longest):
    class Digits(Letters):
        unknown_id = -1

        def encode(self, text):
            return tuple(ord(c) if c in "0123456789+-= ." else -1 for c in text)

    problems = Gym("chain_sum", None, Digits(), "{prompt} Go.", 0, longest)
    with pytest.raises(
        SoleraError,
        match=r"for training: the first holds 'S', which the model's tokenizer [a-z ]+: use another --model$",
    ):  # State the final answer …
        problems.prompt(0)
    with pytest.raises(SoleraError, match="no problem can be held out: the first holds 'S', which the model's"):
        problems.held_out(2)


def test_length_is_named_where_only_a_few_problems_cannot_be_spelt():
    class Nearly(Letters):
        unknown_id = -1

        def encode(self, text):
            return tuple(-1 if c == "7" else ord(c) for c in text)

    with pytest.raises(
        SoleraError, match=r"accepts prompts of at most 3 tokens, but the shortest of 32 has [0-9]{2,}$"
    ):
        Gym("chain_sum", None, Nearly(), "{prompt} Go.", 0, 3).prompt(0)


def test_what_reasoning_gym_does_not_have_is_refused():
    with pytest.raises(SoleraError, match="no such task; did you mean chain_sum"):
        check_gym("chain_sums", None)
    with pytest.raises(SoleraError, match="has no levels"):
        check_gym("gsm_symbolic", 1)
    check_gym("chain_sum", 1)


def test_hostile_answers_neither_hang_nor_crash_nor_are_rewarded():
    prompt = task("complex_arithmetic").prompt(0)

    async def verdicts():
        wrapped = [f"\\boxed{{{hostile}}}" for hostile in HOSTILE]
        return await asyncio.gather(
            *(math(text, "\\sqrt{7}", True) for text in wrapped),
            *(gym(text, prompt.data["gym"], True) for text in wrapped),
        )

    assert set(asyncio.run(verdicts())) <= {0.0}
    for text in HOSTILE:
        assert not GRADERS["number"](text, "7.5", True)
        assert not GRADERS["countdown"](text, "3 5 7 = 26", True)


def test_nonsense_does_not_pass_where_the_packages_own_grader_lets_it():
    name = "game_of_life_halting"
    from reasoning_gym import create_dataset

    problems = create_dataset(name, seed=0, size=500)
    assert problems.score_answer("nonsense", problems[0]) == 1.0
    other = {"True": "False", "False": "True"}
    truths = [problems[position]["answer"] for position in range(12)]
    assert set(truths) == set(other)
    for position, truth in enumerate(truths):
        for text in (truth, truth.lower()):
            assert in_process_grader(name, None, position)(text) == 1.0
        for text in (other[truth], "nonsense"):
            assert in_process_grader(name, None, position)(text) == 0.0


def hostile(function, *answer, limit=3):
    return judges("tests.tasks.slow", "none").grade("hostile", (function,), answer, True, limit)


def test_a_process_that_computes_or_sleeps_too_long_is_replaced():
    court = judges("tests.tasks.slow", "none")
    for function in ("compute", "compute_and_ignore_signals", "die", "fail", "leave", "forge"):
        with pytest.raises(NoVerdictError):
            hostile(function, limit=1)
        assert hostile("double", 21) == 42
    for _ in range(2 * MOST):
        with pytest.raises(NoVerdictError, match="PermissionError"):
            hostile("kill_the_parent")
        with pytest.raises(NoVerdictError):
            hostile("die")
    assert court.ask("double", 21) == 42
    start = time.monotonic()
    with pytest.raises(NoVerdictError, match="longer than"):
        hostile("sleep", limit=1)
    assert time.monotonic() - start < 60
    assert hostile("double", 4) == 8


@pytest.mark.parametrize("reply", ["null", "5", "[1]", '{"a": 1}', '{"value": 1, "token": 0}', "[" * 100_000, "word"])
def test_a_forged_reply_is_no_verdict_and_does_not_stop_the_run(reply):
    with pytest.raises(NoVerdictError):
        hostile("forge", reply)
    assert hostile("double", 21) == 42


def test_a_package_that_is_not_there_is_named():
    with pytest.raises(SoleraError, match=r"no_such_package is not installed: pip install 'solera\[wish\]'"):
        judges("tests.tasks.absent", "wish").ask("anything")
