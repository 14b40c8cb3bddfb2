"""Estimates, comparisons, and max and mean over checkpoints, from counts written down by hand."""

import io
import json
import math
import re

import pytest
from rich.console import Console

from solera.config import Config, override
from solera.errors import SoleraError
from solera.evaluate.attempts import Attempts, Problem
from solera.evaluate.candidates import Candidate
from solera.evaluate.evaluation import Evaluation, Examined, check_k
from solera.records import Sampling
from solera.report.evaluation import show


def attempts(samples, passed, graded=None, keys=None):
    graded = graded or [samples] * len(passed)
    keys = keys or [f"p{i}" for i in range(len(passed))]
    problems = tuple(Problem(k, g, c, c / g if g else None) for k, g, c in zip(keys, graded, passed, strict=True))
    return Attempts(Sampling(1.0 if samples > 1 else 0.0, 16), samples, problems, truncated=0.25, length=3.5, alike=0.5)


def examined(name, greedy, sampled=None, run=None, k=(), **fields):
    more = attempts(4, sampled, **fields) if sampled else None
    return Examined(Candidate(name, name, run), attempts(1, greedy), more, k)


WEAK = examined("weak", [1, 0, 0, 0], [2, 0, 0, 4], k=(2,))
STRONG = examined("strong", [0, 1, 1, 1], [4, 1, 0, 4], k=(2,))


def test_estimates_by_hand():
    """Shares of attempts ½, 0, 0, 1; pass@2 of 2 in 4 is 1 − 1/6."""
    found = WEAK.estimates()
    assert list(found) == ["pass@1 greedy", "reward greedy", "avg@4", "pass@2", "reward sampled"]
    assert found["pass@1 greedy"].value == 0.25
    assert found["pass@1 greedy"].low == pytest.approx(
        (0.25 + 0.4802 - 1.96 * math.sqrt(0.1875 / 4 + 3.8416 / 64)) / 1.9604
    )
    # s² = (0.125² + 2·0.375² + 0.625²)/3 = 11/48, as of 4·(15/64)/s² = 45/11 yes-or-no outcomes
    for limit in (found["avg@4"].low, found["avg@4"].high):
        assert (0.375 - limit) ** 2 == pytest.approx(1.96**2 * limit * (1 - limit) * 11 / 45)
    assert found["pass@2"].value == pytest.approx((5 / 6 + 1) / 4)


def test_a_comparison_by_hand():
    ((model, differences),) = Evaluation(Config(), (WEAK, STRONG)).comparisons()
    assert model is STRONG
    greedy = differences["pass@1 greedy"]  # −1, 1, 1, 1
    assert (greedy.estimate.value, greedy.only_first, greedy.only_second) == (0.5, 1, 3)
    assert greedy.estimate.high == pytest.approx(0.5 + 1.96 * math.sqrt((2.25 + 3 * 0.25) / 3 / 4))
    average = differences["avg@4"]  # ½, ¼, 0, 0
    assert (average.estimate.value, average.only_first, average.only_second) == (0.1875, 0, 1)
    assert differences["pass@2"].estimate.value == pytest.approx((1 / 6 + 1 / 2) / 4)  # 1 − 5/6, 1 − 3/6


def test_models_are_compared_on_the_problems_both_were_given():
    other = Examined(Candidate("other", "other"), attempts(1, [1, 1, 1], keys=["p3", "p9", "p1"]), None, ())
    ((_, differences),) = Evaluation(Config(), (examined("weak", [1, 0, 0, 0]), other)).comparisons()
    found = differences["pass@1 greedy"]
    assert (found.estimate.problems, found.estimate.value, found.only_second) == (2, 1.0, 2)


def test_max_and_mean_over_the_checkpoints_of_each_run():
    models = (
        examined("embedded", [1, 1, 1, 1]),
        examined("r/step-1", [0, 0, 0, 1], run="r"),
        examined("r/step-2", [1, 1, 0, 1], run="r"),
        examined("r", [1, 1, 0, 0], run="r"),
    )
    found = Evaluation(Config(), models).over_checkpoints()
    assert list(found) == ["r"]
    best = found["r"]["pass@1 greedy"]
    assert (best.max, best.at, best.mean) == (0.75, "r/step-2", 0.5)


def test_json_holds_the_counts_of_every_problem():
    told = json.loads(json.dumps(Evaluation(override(Config(), "run", seed=3), (WEAK, STRONG)).as_json()))
    assert told["settings"]["seed"] == 3
    assert told["settings"]["task"]["name"] == "arithmetic"
    assert told["models"][0]["sampled"]["problems"][0] == {"key": "p0", "graded": 4, "passed": 2, "reward": 0.5}
    assert told["models"][0]["greedy"]["ungraded"] == 0
    assert told["models"][1]["estimates"]["pass@1 greedy"]["value"] == 0.75
    assert told["comparisons"][0]["differences"]["avg@4"]["value"] == 0.1875
    assert told["comparisons"][0]["differences"]["avg@4"]["excludes_zero"] is False
    assert (told["comparisons"][0]["first"], told["comparisons"][0]["second"]) == ("weak", "strong")


def test_attempts_without_a_reward_are_said_and_leave_gaps():
    gap = examined("gap", [1, 0], [3, 0], graded=[3, 0], k=(4,))
    assert gap.estimates()["pass@4"] is None
    assert gap.estimates()["avg@4"].low == pytest.approx(1 / 4.8416)  # Wilson, one of one
    assert gap.estimates()["reward sampled"].low is None
    text = shown_text(Evaluation(Config(), (gap,)))
    assert "gap: 5 attempts without a reward: not counted" in text
    assert "–" in text


def shown_text(evaluation, width=160):
    text = io.StringIO()
    show(evaluation, Console(width=width, file=text))
    return text.getvalue()


@pytest.mark.parametrize("width", [60, 160])
def test_names_with_brackets_are_shown_as_they_are(width):
    names = ["runs[a]/x", "m[/b]:cat:"]
    models = [examined(name, [1, 0], run=name.partition("/")[0]) for name in names]
    table = shown_text(Evaluation(Config(), tuple(models)), width)
    assert all(name in table for name in names)
    assert "runs[a]" in table.split()  # 1 checkpoint of it


@pytest.mark.parametrize("width", [44, 80, 160])
def test_no_number_and_no_short_name_is_broken_whatever_the_width(width):
    long = "runs/a-long-name/checkpoints/step-000005"
    models = [examined(name, [1, 0, 0, 0], [2, 0, 0, 4], k=(1, 2, 4)) for name in ("weak", "strong", long)]
    table = shown_text(Evaluation(Config(), tuple(models)), width).partition("4 held-out problems")[0]
    assert max(map(len, table.splitlines())) <= width
    estimates = WEAK.estimates()  # see test_estimates_by_hand
    for found in (estimates["pass@1 greedy"], estimates["avg@4"], estimates["pass@2"]):
        assert table.count(f"{found.value:.1%} ({100 * found.low:.1f}–{100 * found.high:.1f})") >= 3
    assert table.count("25.0% / 25.0%") == table.count("3.5 / 3.5") == table.count("50.0% / 50.0%") == 3
    words = re.split(r"[\s┃│]+", table)
    assert words.count("weak") == words.count("strong") == 1


def test_the_sentence_says_which_way_and_whether_it_is_sure():
    sure = examined("sure", [1, 1, 1, 0, 1, 1, 1, 1, 1, 1])
    none = examined("none", [0] * 10)
    up, down = shown_text(Evaluation(Config(), (none, sure))), shown_text(Evaluation(Config(), (sure, none)))
    assert "+90.0 points (+70.4 to +109.6), higher: the interval excludes 0; 9 problems solved only by sure" in up
    assert "-90.0 points (-109.6 to -70.4), lower: the interval excludes 0; 0 problems solved only by none" in down
    assert "only by sure, 0 only by none" in up and "only by none, 9 only by sure" in down
    sampled = shown_text(Evaluation(Config(), (WEAK, STRONG)))
    assert "undecided: the interval includes 0" in sampled
    # Greedy, one problem was lost and three gained. By sampling, the second problem was solved for the first time.
    assert sampled.count("solved") == 2
    assert "3 problems solved only by strong, 1 only by weak" in sampled
    assert "1 problem solved at least once only by strong, 0 only by weak" in sampled
    assert "too few for an interval" in shown_text(Evaluation(Config(), (examined("a", [1]), examined("b", [0]))))


def test_a_difference_without_spread_is_not_called_certain():
    text = shown_text(Evaluation(Config(), (examined("a", [0, 0]), examined("b", [1, 1]))))
    assert "pass@1 greedy: +100.0 points on each of 2 problems: no spread, so no interval" in text
    assert "excludes 0" not in text


@pytest.mark.parametrize(
    ("k", "samples", "temperature", "says"),
    [
        ((5,), 4, 1.0, "pass@5 cannot be computed from 4"),
        ((0,), 4, 1.0, "k must be at least 1"),
        ((1,), 1, 0.0, "needs sampled attempts"),
    ],
)
def test_an_impossible_k_is_refused(k, samples, temperature, says):
    with pytest.raises(SoleraError, match=says):
        check_k(k, override(Config(), "evaluate", samples=samples, temperature=temperature))
