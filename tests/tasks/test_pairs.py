"""Every grader on hand-written pairs, at least a hundred where it compares with an answer."""

import asyncio

import pytest

from solera.tasks.graders import GRADERS
from solera.tasks.mathematics import math
from tests.tasks.pairs import COUNTDOWN, FORMS, MATH, NUMBER


@pytest.mark.parametrize(("name", "pairs"), [("number", NUMBER), ("countdown", COUNTDOWN)])
def test_verdicts(name, pairs):
    assert len(pairs) >= 100
    wrong = [(text, answer, verdict) for text, answer, verdict in pairs if GRADERS[name](text, answer, True) != verdict]
    assert wrong == []


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    wrong = [(text, verdict) for text, verdict in FORMS[name] if GRADERS[name](text, "", True) != verdict]
    assert wrong == []


def test_mathematics():
    async def verdicts():
        return await asyncio.gather(*(math(text, answer, True) for text, answer, _ in MATH))

    assert len(MATH) >= 100
    wrong = [(pair, found) for pair, found in zip(MATH, asyncio.run(verdicts()), strict=True) if pair[2] != found]
    assert wrong == []


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
