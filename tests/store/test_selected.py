"""Policies over a real ledger: what is added, used, graded and revised meanwhile is seen at the next draw."""

import dataclasses

import pytest

from solera.config import DrawConfig
from solera.errors import SoleraError
from solera.records import PolicyVersion, Reward, Use
from solera.store.ledger import Ledger
from solera.store.selected import Selected
from tests.store.test_ledger import drawn, ids_of, learn, rollouts, use, visit

NOW = PolicyVersion("test", 5)


@pytest.fixture
def ledger(place):
    opened = Ledger(place)
    yield opened
    opened.close()


def selected(ledger: Ledger, **draw) -> Selected:
    return Selected(ledger, DrawConfig(**draw), 0)


def test_replay_follows_uses_and_new_rollouts(ledger):
    store = selected(ledger, policy="replay", fresh=0.5, order="newest")
    assert store.missing(2, 2, 0, NOW) == 2
    store.add(rollouts("aabb"))
    assert drawn(store, 2, 2) == [("a", [1, 2]), ("b", [3, 4])]
    store.record(use(1, 2, 3, 4))
    assert store.missing(2, 2, 0, NOW) == 1
    store.add(rollouts("cc"))
    assert store.missing(2, 2, 0, NOW) == 0
    assert drawn(store, 2, 2) == [("c", [5, 6]), ("b", [3, 4])]
    store.add(rollouts("aa"))
    assert drawn(store, 4, 2) == [("c", [5, 6]), ("a", [7, 8]), ("b", [3, 4]), ("a", [1, 2])]


def test_late_and_revised_rewards_from_elsewhere_are_seen(ledger, place):
    store, elsewhere = selected(ledger, policy="offline", order="newest", min_spread=0.5), Ledger(place)
    store.add(rollouts("aab", reward=None))
    with pytest.raises(SoleraError, match=r"no group can be drawn; rollouts skipped: 3 unrewarded \(relax"):
        store.draw(1, 2, NOW)
    elsewhere.add_reward(1, Reward(1.0))
    elsewhere.add_reward(2, Reward(1.0))
    with pytest.raises(SoleraError, match="1 unrewarded, 2 flat"):
        store.draw(1, 2, NOW)
    elsewhere.add_reward(2, Reward(0.25, revision=1))
    (group,) = store.draw(1, 2, NOW)
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.25]
    assert store.passed_over() == {"unrewarded": 1}
    elsewhere.add_reward(1, Reward(0.5, part="style"))  # parts add up
    assert [rollout.reward for rollout in store.draw(1, 2, NOW)[0].rollouts] == [1.5, 0.25]
    elsewhere.add_reward(2, Reward(1.25, part="style"))  # 1.5 and 1.5
    with pytest.raises(SoleraError, match="2 flat"):
        store.draw(1, 2, NOW)
    elsewhere.close()


def test_a_visit_that_is_rewarded_late_is_dropped_or_kept(ledger):
    """Three visits of `a`; the first gets its reward after the others were learned from."""
    ledger.add([*visit(0, "a", "1-"), *visit(1, "a", "10"), *visit(2, "a", "01")])
    kept, dropped = selected(ledger, leftovers="keep"), selected(ledger, max_age=9)
    assert learn(kept, 1, 2, 5) == [[3, 4]]
    assert kept.passed_over() == {"leftover": 1, "unrewarded": 1}
    ledger.add_reward(2, Reward(0.0))
    assert ids_of(dropped.draw(9, 2, NOW)) == [[5, 6]]
    assert dropped.passed_over() == {"leftover": 2}
    assert ids_of(kept.draw(9, 2, NOW)) == [[1, 2], [5, 6]]
    assert kept.passed_over() == {}
    too_old = selected(ledger, leftovers="keep", max_age=4)  # at version 5 all are of age 5
    assert too_old.draw(9, 2, NOW) == [] and too_old.passed_over() == {"too_old": 6}


@pytest.mark.parametrize("policy", [{"policy": "replay"}, {"policy": "mixed", "shares": ("self=1", "human=1")}])
def test_what_other_policies_draw_of_the_own_is_of_one_visit_too(ledger, policy):
    ledger.add([*visit(0, "a", "1-"), *visit(1, "a", "10"), *visit(2, "a", "-1"), *visit(3, "a", "11")])
    store = selected(ledger, **policy)
    assert store.missing(4, 2, 0, NOW) == 2
    assert learn(store, 2, 2, 5) == [[3, 4], [7, 8]]
    assert store.passed_over() == {"leftover": 2, "unrewarded": 2}
    ledger.add([*visit(4, "a", "1-"), *visit(5, "a", "00")])
    assert [9, 10] not in ids_of(store.draw(1, 2, NOW)) and [11, 12] in ids_of(store.draw(1, 2, NOW))


def test_ages_are_of_the_own_lineage(ledger):
    """`rollouts` are of version 0; at version 5 they have age 5, and those of another run have none."""
    own = rollouts("aa")
    ledger.add([*own, *(dataclasses.replace(rollout, lineage="another") for rollout in rollouts("bb"))])
    assert drawn(selected(ledger, max_age=5), 9, 2) == [("a", [1, 2]), ("b", [3, 4])]
    assert drawn(selected(ledger, max_age=4), 9, 2) == [("b", [3, 4])]


def test_a_rewound_store_is_drawn_from_as_before(ledger):
    ledger.add(rollouts("aabb"))
    ledger.record([Use(1, 3, 0, None), Use(2, 3, 0, None)])
    watermark = ledger.watermark()
    ledger.add(rollouts("cc"))
    ledger.record([Use(id_, 4, 0, None) for id_ in (1, 2, 3, 4)])
    ledger.rewind(watermark, version=4)
    assert drawn(selected(ledger, policy="replay", fresh=0.5, order="newest"), 2, 2) == [("b", [3, 4]), ("a", [1, 2])]


def test_an_empty_store_says_what_to_do(ledger):
    with pytest.raises(SoleraError, match=r"the store is empty: add rollouts with store\.data"):
        selected(ledger, policy="offline").draw(1, 2, NOW)


def test_shares_that_name_nobody_in_the_store_are_told_who_is(ledger):
    ledger.add([dataclasses.replace(rollout, origin="model:teacher") for rollout in rollouts("aa")])
    with pytest.raises(SoleraError, match=r"mixed: no rollouts of the origins in draw\.shares; .* has model:teacher$"):
        selected(ledger, policy="mixed", shares=("model:techer=1",)).draw(1, 2, NOW)


POLICIES = [
    'policy = "replay"\norder = "uniform"\nfresh = 0.5',
    'policy = "replay"\norder = "priority"\nfresh = 0.25\nmax_uses = 5',
    'policy = "fresh"\nmin_spread = 0.5\nmax_age = 9',
]


@pytest.mark.parametrize("draw", POLICIES)
def test_runs_draw_by_their_policy(short_run, draw):
    """Batches stay full, the share that is new is written, and the rest was used before."""
    result = short_run(f"[draw]\n{draw}\n[run]\nsteps = 8")
    rows = result.metrics[:8]
    if "replay" in draw:
        assert [row["groups/drawn"] for row in rows] == [8] * 8
        fresh = 4 if "0.5" in draw else 2
        written = [row["groups/drawn"] * bool(row["tokens/generated"]) for row in rows]
        assert all(written)
        store = Ledger(result.folder / "store.db")
        with store.transaction() as connection:
            new = connection.exec_driver_sql(
                "select version, count(*) from uses u where not exists (select 1 from uses e where e.rollout_id = "
                "u.rollout_id and e.version < u.version) group by version order by version"
            ).all()
        store.close()
        assert [count for _, count in new] == [64] + [8 * fresh] * 7
        assert max(row["age/max"] for row in rows) > 0
    else:
        assert all(row["reward/zero_variance_fraction"] == 0 for row in rows)
        assert any(row.get("draw/flat", 0) > 0 for row in rows)
        plain = short_run("[run]\nsteps = 8", name="plain").metrics[:8]
        live = sum(row["groups/drawn"] * (1 - row["reward/zero_variance_fraction"]) for row in plain)
        assert sum(row["groups/drawn"] for row in rows) > 1.2 * live  # others were written in place of flat ones


@pytest.mark.parametrize("policy", ["fresh", "offline"])
def test_a_probe_is_never_drawn(ledger, policy):
    store = selected(ledger, policy=policy, max_age=9) if policy == "fresh" else selected(ledger, policy=policy)
    store.add([dataclasses.replace(rollout, origin="probe") for rollout in rollouts("aa")])
    store.add(rollouts("bb"))
    assert drawn(store, 2, 2) == [("b", [3, 4])]
    assert [rollout.id for rollout in store.fetch([1, 2])] == [1, 2]
