"""Drawing against a plain reading of each policy, written with dictionaries and lists, on random rows."""

import itertools
from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import pytest

from solera.config import DrawConfig, apportion
from solera.errors import SoleraError
from solera.store.drawing import NO_AGE, Rows, Selection, quotas_of, rank

ORIGINS = ("self", "model:a", "model:b", "human")


def random_rows(seed: int, count: int = 900) -> list[dict]:
    """In the order they came; a fifth without reward, foreign ones without an age."""
    rng = np.random.default_rng(seed)
    rows = []
    for id_ in range(1, count + 1):
        origin = ORIGINS[rng.choice(4, p=[0.55, 0.2, 0.15, 0.1])]
        rows.append({
            "id": id_ * 3, "key": int(rng.integers(0, 25)), "origin": origin, "uses": int(rng.integers(0, 4)),
            "version": int(rng.integers(0, 30)) if origin == "self" else None,
            "reward": None if rng.random() < 0.2 else float(rng.integers(0, 3)) / 2,
        })  # fmt: skip
    return rows


def as_arrays(rows: list[dict]) -> Rows:
    rows = sorted(rows, key=lambda row: (row["key"], row["id"]))
    return Rows(
        np.array([row["id"] for row in rows], np.int64),
        np.array([row["key"] for row in rows], np.int32),
        np.array([ORIGINS.index(row["origin"]) for row in rows], np.int16),
        np.array([NO_AGE if row["version"] is None else row["version"] for row in rows], np.int32),
        np.array([row["uses"] for row in rows], np.int32),
        np.array([np.nan if row["reward"] is None else row["reward"] for row in rows], np.float32),
        np.array([-1 if row.get("visit") is None else row["visit"] for row in rows], np.int32),
    )


def taken(rows: list[dict], draw: DrawConfig, groups: int, size: int = 4, now: int = 30) -> list[list[int]]:
    arrays = as_arrays(rows)
    chosen = rank(arrays, Selection(draw, size, now, 7, ORIGINS, groups)).take(groups)
    return [arrays.id_R[members].tolist() for members in chosen]


def by_key(rows: list[dict]) -> dict[int, list[dict]]:
    found = defaultdict(list)
    for row in rows:
        found[row["key"]].append(row)
    return found


def chunks(rows: list[dict], size: int, from_the_end: bool = False) -> list[list[dict]]:
    """Groups of one prompt after the other, each prompt's from its first row on, or back from its last."""
    cut = []
    for _, same in sorted(by_key(rows).items()):
        if from_the_end:
            backwards = [same[::-1][i : i + size] for i in range(0, len(same), size)]
            cut += [piece[::-1] for piece in reversed(backwards)]
        else:
            cut += [same[i : i + size] for i in range(0, len(same), size)]
    return cut


def ids(groups: list[list[dict]]) -> list[list[int]]:
    return [[row["id"] for row in group] for group in groups]


def whole(groups: list[list[dict]], least: int = 4) -> list[list[dict]]:
    return [group for group in groups if len(group) >= least]


def first(groups: list[list[dict]]) -> list[list[dict]]:
    return sorted(groups, key=lambda group: group[0]["id"])


def newest(groups: list[list[dict]]) -> list[list[dict]]:
    return sorted(groups, key=lambda group: -group[-1]["id"])


def priority(group: list[dict], now: int, half_life: float) -> float:
    age = Fraction(sum(0 if row["version"] is None else now - row["version"] for row in group), len(group))
    uses = Fraction(sum(row["uses"] for row in group), len(group))
    return 2.0 ** (-float(age) / half_life) / float(1 + uses)


@pytest.fixture(params=range(5))
def rows(request):
    return random_rows(request.param)


def graded(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["reward"] is not None]


def test_fresh_is_what_was_never_used_first_in_first_out(rows):
    new = [row for row in graded(rows) if row["uses"] == 0]
    assert taken(rows, DrawConfig(), 999) == ids(first(whole(chunks(new, 4))))


@pytest.mark.parametrize("least", [2, 3])
def test_groups_of_fewer_members_where_that_is_allowed(rows, least):
    new = [row for row in graded(rows) if row["uses"] == 0]
    expected = ids(first(whole(chunks(new, 4), least)))
    assert taken(rows, DrawConfig(min_rewarded=least), 999) == expected
    assert {len(group) for group in expected} > {4}


def test_offline_newest(rows):
    expected = ids(newest(whole(chunks(graded(rows), 4, from_the_end=True))))
    assert taken(rows, DrawConfig("offline", order="newest"), 999) == expected


def test_offline_by_priority(rows):
    groups = whole(chunks(graded(rows), 4, from_the_end=True))
    expected = sorted(groups, key=lambda group: (-priority(group, 30, 5.0), group[0]["id"]))
    assert taken(rows, DrawConfig("offline", order="priority", half_life=5.0), 999) == ids(expected)
    assert taken(rows, DrawConfig("offline", order="priority", half_life=5.0), 3) == ids(expected[:3])


def test_replay_is_part_new_and_part_used_before(rows):
    new = ids(first(whole(chunks([row for row in graded(rows) if row["uses"] == 0], 4))))
    old = ids(newest(whole(chunks([row for row in graded(rows) if row["uses"] > 0], 4, from_the_end=True))))
    drawn = taken(rows, DrawConfig("replay", fresh=0.25, order="newest"), 8)
    assert drawn == new[:2] + old[:6]
    everything = taken(rows, DrawConfig("replay", fresh=0.25, order="newest"), 999)
    assert sorted(everything) == sorted(new + old)


def test_uniform_draws_every_group_alike_and_by_the_seed():
    rows = [{"id": i, "key": i // 2, "origin": "human", "uses": 1, "version": None, "reward": 1.0} for i in range(20)]
    counts = Counter()
    for now in range(2000):
        drawn = taken(rows, DrawConfig("offline"), 3, size=2, now=now)
        assert drawn == taken(rows, DrawConfig("offline"), 3, size=2, now=now)
        counts.update(group[0] for group in drawn)
    # 2000 draws of 3 out of 10: 600 each, with a standard deviation of √(2000·0.3·0.7) = 20.5.
    assert len(counts) == 10 and all(abs(count - 600) < 4.5 * 20.5 for count in counts.values())


def test_mixed_between_groups(rows):
    own = ids(first(whole(chunks([r for r in graded(rows) if r["origin"] == "self" and r["uses"] == 0], 4))))
    models = ids(newest(whole(chunks([r for r in graded(rows) if r["origin"][:5] == "model"], 4, from_the_end=True))))
    draw = DrawConfig("mixed", order="newest", shares=("self=0.5", "model:*=0.5"))
    assert taken(rows, draw, 6) == own[:3] + models[:3]
    assert len(models) > 3


@pytest.mark.parametrize("least", [4, 2])
@pytest.mark.parametrize("order", ["newest", "priority"])
def test_mixed_within_groups(rows, least, order):
    """Others' members have their turn: least used first, then the newest; by priority, without ages, the first."""
    shares = ("model:a=1", "self=3")
    draw = DrawConfig("mixed", shares=shares, mix="within", min_rewarded=least, order=order)
    expected = []
    for _, same in sorted(by_key(graded(rows)).items()):
        own = [row for row in same if row["origin"] == "self" and row["uses"] == 0]
        other = [row for row in same if row["origin"] == "model:a"]
        other.sort(key=lambda row: (row["uses"], -row["id"] if order == "newest" else row["id"]))
        parts = [(own[3 * i : 3 * i + 3], other[i : i + 1]) for i in range(len(same))]
        expected += [mine + theirs for mine, theirs in parts if mine and theirs]
    expected = ids(first(whole(expected, least)))
    assert expected and taken(rows, draw, 999) == expected
    ranking = rank(as_arrays(rows), Selection(draw, 4, 30, 7, ORIGINS, 8))
    own = [r for r in graded(rows) if r["origin"] == "model:a" or (r["origin"] == "self" and r["uses"] == 0)]
    assert ranking.passed["incomplete"] == len(own) - sum(map(len, expected))


@pytest.mark.parametrize("order", ["uniform", "newest", "priority"])
def test_within_a_group_everyones_answers_are_used_equally_often(order):
    """The run meets a prompt 12 times and takes 4 of 16 answers each time: 48 / 16 = 3 uses of each."""
    teacher = [{"id": i, "key": 0, "origin": "model:a", "uses": 0, "version": None, "reward": 1.0} for i in range(16)]
    draw = DrawConfig("mixed", shares=("self=0.5", "model:a=0.5"), mix="within", order=order)
    pairs = Counter()
    for visit in range(12):
        own = [{"id": 100 + 4 * visit + i, "key": 0, "origin": "self", "uses": 0, "version": visit, "reward": 0.0,
                "visit": visit} for i in range(4)]  # fmt: skip
        (group,) = taken(teacher + own, draw, 1, size=8, now=visit)
        assert group[:4] == [row["id"] for row in own]
        for row in teacher:
            row["uses"] += row["id"] in group
        pairs[tuple(sorted(group[4:]))] += 1
    assert [row["uses"] for row in teacher] == [3] * 16
    assert len(pairs) > 4 or order != "uniform"  # in other company each time


def visits(seed: int, reached: int, count: int = 60) -> list[dict]:
    """A run's own rows: 4 attempts at each visit, some without a reward; what was complete up to `reached` was used,
    some of the rest was completed too late. Among them imported rows of the same prompts."""
    rng, rows = np.random.default_rng(seed), []
    for visit in range(count):
        key, lacks = int(rng.integers(0, 8)), rng.random(4) < 0.12
        used = visit <= reached and not lacks.any()
        late = visit <= reached and rng.random() < 0.5
        for lack in lacks:
            reward = None if lack and not late else float(rng.integers(0, 2))
            rows.append({"key": key, "origin": "self", "uses": int(used), "version": visit // 5, "reward": reward,
                         "visit": visit})  # fmt: skip
        if rng.random() < 0.3:
            rows.append({"key": key, "origin": "human", "uses": 0, "version": None, "reward": 1.0, "visit": None})
    return [{"id": id_, **row} for id_, row in enumerate(rows, 1)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("leftovers", ["drop", "keep"])
@pytest.mark.parametrize("least", [4, 3])
def test_a_fresh_group_is_of_one_visit_and_what_is_left_is_counted(seed, leftovers, least):
    rows = visits(seed, reached=30)
    reached = max(row["visit"] for row in rows if row["uses"])
    new = [row for row in graded(rows) if not row["uses"]]
    late = [row for row in new if leftovers == "drop" and row["visit"] is not None and row["visit"] <= reached]
    groups = whole(chunks([row for row in new if row["visit"] is None], 4), least)
    for visit in range(60):
        groups += whole([[row for row in new if row["visit"] == visit and row not in late]], least)
    expected = first(groups)[:9]
    arrays = as_arrays(rows)
    ranking = rank(arrays, Selection(DrawConfig(leftovers=leftovers, min_rewarded=least), 4, 12, 7, ORIGINS, 9))
    chosen = ranking.take(9)
    assert [arrays.id_R[members].tolist() for members in chosen] == ids(expected)
    last = max([reached, *(row["visit"] for group in expected for row in group if row["visit"] is not None)])
    drawable = {row["id"] for group in groups for row in group}
    left = [row for row in new if row["visit"] is not None and row["visit"] <= last and row["id"] not in drawable]
    counts = ranking.skipped(arrays, chosen)
    assert counts["leftover"] == len(left) and (left or leftovers == "keep")
    assert counts["unrewarded"] == len(rows) - len(graded(rows))
    assert sum(counts.values()) - counts["unrewarded"] == len(new) - len(drawable)
    assert ranking.missing(100, 0) == 100 - len(groups)


def test_filters_count_what_they_pass_over(rows):
    draw = DrawConfig("offline", order="newest", max_age=12, max_uses=2, min_spread=0.75)
    rest = graded(rows)
    passed = {"unrewarded": len(rows) - len(rest)}
    for reason, out in (
        ("too_old", lambda row: row["version"] is not None and 30 - row["version"] > 12),
        ("used_up", lambda row: row["uses"] >= 2),
    ):
        passed[reason] = sum(map(out, rest))
        rest = [row for row in rest if not out(row)]
    groups = whole(chunks(rest, 4, from_the_end=True))
    passed["incomplete"] = len(rest) - 4 * len(groups)
    differing = [g for g in groups if max(r["reward"] for r in g) - min(r["reward"] for r in g) >= 0.75]
    passed["flat"] = 4 * (len(groups) - len(differing))
    ranking = rank(as_arrays(rows), Selection(draw, 4, 30, 7, ORIGINS, 8))
    assert taken(rows, draw, 999) == ids(newest(differing))
    assert ranking.passed == {reason: count for reason, count in passed.items() if count}


def test_what_is_missing_is_what_others_cannot_give():
    """4 new groups, 3 used before: of 8 half are to be new, and what cannot be replayed is written as well."""
    rows = [{"id": i, "key": i, "origin": "self", "uses": int(i // 2 > 3), "version": 0, "reward": 1.0}
            for i in range(14)]  # fmt: skip
    for row in rows:
        row["key"] = row["id"] // 2
    arrays = as_arrays(rows)

    def missing(draw: DrawConfig, groups: int, reserve: int = 0) -> int:
        return rank(arrays, Selection(draw, 2, 30, 0, ORIGINS, groups)).missing(groups, reserve)

    replay = DrawConfig("replay", fresh=0.5)
    assert [missing(replay, groups) for groups in (2, 6, 7, 8, 20)] == [0, 0, 0, 1, 13]
    assert [missing(replay, 6, reserve) for reserve in (1, 2, 5)] == [0, 1, 4]
    assert [missing(DrawConfig(), groups) for groups in (4, 5)] == [0, 1]
    assert missing(DrawConfig("offline"), 100) == 0
    assert missing(DrawConfig("mixed", shares=("human=1",)), 100) == 0


def test_no_rows_at_all():
    for policy, mix in itertools.product(("fresh", "replay", "offline", "mixed"), ("between", "within")):
        shares = ("self=1", "human=1") if policy == "mixed" else ()
        assert taken([], DrawConfig(policy, shares=shares, mix=mix), 3) == []


def test_apportioned_numbers_add_up_and_stay_near_the_shares():
    rng = np.random.default_rng(3)
    for _ in range(500):
        shares = rng.random(int(rng.integers(1, 6))).tolist()
        count = int(rng.integers(0, 50))
        numbers = apportion(count, shares)
        assert sum(numbers) == count
        assert all(abs(n - count * share / sum(shares)) < 1 for n, share in zip(numbers, shares, strict=True))


def test_a_share_too_small_for_a_member_of_the_group_is_refused():
    draw = DrawConfig("mixed", shares=("self=0.99", "model:teacher=0.01"), mix="within")
    with pytest.raises(SoleraError, match="model:teacher gets no member of a group of 8"):
        quotas_of(draw, 8)
    assert quotas_of(draw, 64) == {"self": 63, "model:teacher": 1}
