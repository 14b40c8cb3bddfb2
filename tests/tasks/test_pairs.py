"""Every grader on at least a hundred hand-written pairs."""

import asyncio

import pytest
from sympy.core import random
from sympy.core.cache import clear_cache

from solera.tasks.graders import GRADERS
from solera.tasks.gym import gym
from solera.tasks.mathematics import equal, math
from tests.tasks.pairs import examined_countdown, examined_forms, examined_gym, examined_math, examined_number
from tests.tasks.pairs.countdown import COUNTDOWN
from tests.tasks.pairs.cut import CUT
from tests.tasks.pairs.forms import FORMS
from tests.tasks.pairs.gym import GYM, RESULTS, SUMS
from tests.tasks.pairs.math import MATH
from tests.tasks.pairs.number import NUMBER
from tests.tasks.pairs.texts import TEXT

PAIRS = {
    "number": NUMBER + examined_number.NUMBER, "countdown": COUNTDOWN + examined_countdown.COUNTDOWN,
    "exact": [(text, answer, verdict) for text, answer, verdict, _ in TEXT] + examined_forms.EXACT,
    "verbatim": [(text, answer, verdict) for text, answer, _, verdict in TEXT] + examined_forms.VERBATIM,
    **{name: [(text, "", right) for text, right in FORMS[name] + examined_forms.FORMS[name]] for name in FORMS},
}  # fmt: skip
MATHEMATICS = MATH + examined_math.MATH


def test_there_are_a_hundred_different_pairs_for_every_grader():
    for pairs in (*PAIRS.values(), MATHEMATICS, GYM):
        assert len({pair[:2] for pair in pairs}) == len(pairs) >= 100
    assert len(set(examined_gym.GYM)) == len(examined_gym.GYM)
    assert PAIRS.keys() == GRADERS.keys()


@pytest.mark.parametrize("name", PAIRS)
def test_verdicts(name):
    wrong = [pair for pair in PAIRS[name] if GRADERS[name](pair[0], pair[1], True) != pair[2]]
    assert wrong == []


@pytest.mark.parametrize("name", ["exact", "verbatim", "marked", "think_answer"])
def test_a_response_cut_off_has_not_ended_as_it_should(name):
    assert not any(GRADERS[name](text, answer, False) for text, answer, _ in PAIRS[name])


def test_mathematics():
    async def verdicts():
        return await asyncio.gather(*(math(text, answer, True) for text, answer, _ in MATHEMATICS))

    wrong = [
        (pair, found) for pair, found in zip(MATHEMATICS, asyncio.run(verdicts()), strict=True) if pair[2] != found
    ]
    assert wrong == []


def test_the_grade_of_an_infinity_is_no_matter_of_chance():
    """sympy tries random numbers. With seven of these seeds, ∞/2 − 5 is 0 for it."""
    for seed in range(400):
        random.seed(seed)
        clear_cache()
        assert not equal(r"\frac{\infty}{2}", False, "5")
    assert equal(r"\frac{\infty}{2}", False, r"\infty") and not equal(r"-\infty", False, r"\infty")


def test_sympys_random_numbers_are_the_same_for_every_answer():
    def drawn_after(seed: int) -> float:
        random.seed(seed)
        equal("a+b", False, "a-b")
        return random.rng.random()

    assert drawn_after(1) == drawn_after(2)


def test_sums_of_reasoning_gym():
    assert {position: str(eval(terms)) for position, terms in SUMS.items()} == RESULTS

    async def scores():
        return await asyncio.gather(*(gym(text, ("chain_sum", None, position), True) for text, position, _ in GYM))

    wrong = [(pair, found) for pair, found in zip(GYM, asyncio.run(scores()), strict=True) if pair[2] != found]
    assert wrong == []


def test_twenty_tasks_of_reasoning_gym():
    async def scores():
        return await asyncio.gather(
            *(gym(text, (task, None, examined_gym.POSITION), True) for text, task, _ in examined_gym.GYM)
        )

    found = zip(examined_gym.GYM, asyncio.run(scores()), strict=True)
    assert [(pair, score) for pair, score in found if pair[2] != (score == 1)] == []


@pytest.mark.parametrize("name", CUT)
def test_responses_cut_off(name):
    async def verdicts():
        if name == "math":
            return await asyncio.gather(*(math(text, answer, False) for text, answer, _ in CUT[name]))
        return [GRADERS[name](text, answer, False) for text, answer, _ in CUT[name]]

    found = zip(CUT[name], asyncio.run(verdicts()), strict=True)
    assert [pair for pair, verdict in found if pair[2] != verdict] == []


@pytest.mark.parametrize(
    "text", ["\\boxed{42", "The answer is 42", "#### 42", "so 42", "<answer>42", "The answer is 42."]
)
def test_nothing_cut_off_counts_unless_it_is_complete(text):
    assert not asyncio.run(math(text, "42", False))
    assert not GRADERS["number"](text, "42", False)


@pytest.mark.parametrize("text", ["\\boxed{42} and", "The answer is 42. And", "#### 42\nand", "<answer>42</answer>"])
def test_what_is_complete_counts_though_the_text_is_cut_off(text):
    assert asyncio.run(math(text, "42", False))
    assert GRADERS["number"](text, "42", False)
