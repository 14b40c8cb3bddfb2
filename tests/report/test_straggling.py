"""A rank for which all others wait is reported once."""

import pytest

from solera.report.straggling import Straggling


def row(*waiting: float) -> dict[str, float]:
    return {"time/learn": 4.0, **{f"rank/{rank}/waiting": seconds for rank, seconds in enumerate(waiting)}}


def told(*rows: dict[str, float], ranks: int) -> list[str]:
    said: list[str] = []
    sink = Straggling(ranks, said.append)
    for step, each in enumerate(rows):
        sink.log(step, each)
    return said


def test_a_slow_rank_is_named_once_after_ten_updates():
    assert told(*[row(2.0, 0.4, 2.4)] * 9, ranks=3) == []
    (said,) = told(*[row(2.0, 0.4, 2.4)] * 30, ranks=3)
    # the one that waits least of the others waits (2.0 - 0.4) / 4.0 of the time longer
    assert said == "step 9: rank 1 is slow: in the last 10 updates the others waited for it for 40 % of the time"


@pytest.mark.parametrize("waiting", [(2.0, 2.0), (1.0, 0.1), (2.0, 0.5, 0.6)])
def test_ranks_that_all_wait_or_wait_little_are_no_news(waiting):
    """In the last case one rank has little to do, but two work equally long."""
    assert told(*[row(*waiting)] * 30, ranks=len(waiting)) == []


def test_the_second_slow_rank_is_named_too():
    said = told(*[row(2.0, 0.0)] * 10, *[row(0.0, 2.0)] * 10, ranks=2)
    # with m of the last ten rows from the second half: (2 m - 2 (10 - m)) / 40 >= 1/4 from m = 8 on
    assert [sentence.partition(" is slow")[0] for sentence in said] == ["step 9: rank 1", "step 17: rank 0"]


def test_rows_without_ranks_are_passed_over():
    assert told(*[{"eval/pass@1": 0.5}] * 30, ranks=2) == []
