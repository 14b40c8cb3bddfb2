"""The ledger: what goes in comes out, once, in groups, with the rewards it has by then."""

import dataclasses

import numpy as np
import pytest

from solera.errors import SoleraError
from solera.records import Group, PolicyVersion, Reward, Rollout, Sampling, Sequence, Span, Use
from solera.store.database import open_for_reading
from solera.store.encoding import decode, encode
from solera.store.ledger import Ledger
from solera.store.queue import Queue
from solera.store.reading import reading
from tests.conftest import random_rollout

NOW = PolicyVersion("test", 5)


@pytest.fixture
def store(place):
    ledger = Ledger(place)
    yield ledger
    ledger.close()


def rollouts(keys: str, reward: float | None = 1.0) -> list[Rollout]:
    """One rollout for each letter, the letter being its prompt."""
    rng = np.random.default_rng(0)
    made = [random_rollout(rng, ord(key), (2, 3), 1.0 if reward is None else reward) for key in keys]
    made = [dataclasses.replace(r, prompt_key=key) for key, r in zip(keys, made, strict=True)]
    return [dataclasses.replace(r, rewards=()) for r in made] if reward is None else made


def drawn(store: Ledger, groups: int, size: int) -> list[tuple[str, list[int]]]:
    return [(group.prompt_key, [r.id for r in group.rollouts]) for group in store.draw(groups, size, NOW)]


def waiting(store: Ledger, size: int) -> int:
    return 99 - store.missing(90, size, 9, NOW)


def use(*ids: int) -> list[Use]:
    return [Use(id_, version=3, age=2, advantage=0.5) for id_ in ids]


def test_a_rollout_comes_back_as_it_went_in(store):
    original = dataclasses.replace(
        rollouts("a")[0], lineage="run", origin="model:other", finish_reason="length", sampling=Sampling(0.7, 9, 1.0),
        rewards=(Reward(1.0, "correct", "grader"), Reward(0.25, "format", "rule", position=1)), text="as it was",
    )  # fmt: skip
    (id_,) = store.add([original])
    back = store.draw(1, 1, NOW)[0].rollouts[0]
    assert back.id == id_
    store.record([Use(id_, 3, None, 0.5, back.revision)])
    store.close()
    with reading(store.place) as opened:
        ((again, _),), ((used,),) = opened.rollouts(), [group.uses for group in opened.used(3, 1)]
    assert (again.text, again.rewards, used.revision) == (original.text, original.rewards, 0)
    for name in (
        "prompt_key",
        "rewards",
        "lineage",
        "origin",
        "finish_reason",
        "sampling",
        "version",
        "reward",
        "text",
    ):
        assert getattr(back, name) == getattr(original, name), name
    (a,), (b,) = original.sequences, back.sequences
    assert a.spans == b.spans
    assert np.array_equal(a.token_ids_T, b.token_ids_T)
    assert np.array_equal(a.span_logp, b.span_logp)


def test_groups_form_when_drawn_first_in_first_out(store):
    store.add(rollouts("abab"))
    assert drawn(store, 5, 2) == [("a", [1, 3]), ("b", [2, 4])]
    store.add(rollouts("caa"))  # a second pair for a, half a pair for c
    assert waiting(store, 2) == 3
    assert drawn(store, 5, 2) == [("a", [1, 3]), ("b", [2, 4]), ("a", [6, 7])]
    assert drawn(store, 1, 2) == [("a", [1, 3])]
    store.add(rollouts("c"))
    assert drawn(store, 9, 2)[2:] == [("c", [5, 8]), ("a", [6, 7])]


def all_groups(unused: list[tuple[int, str, int | None]], size: int) -> list[tuple[str, list[int]]]:
    """Of each prompt and visit its ids cut into groups, those that are not full left out, in the order of first ids."""
    units = {(key, visit) for _, key, visit in unused}
    ids = {unit: [id_ for id_, *other in unused if tuple(other) == unit] for unit in units}
    cut = [(unit[0], ids[unit][start : start + size]) for unit in units for start in range(0, len(ids[unit]), size)]
    return sorted((group for group in cut if len(group[1]) == size), key=lambda group: group[1])


@pytest.mark.parametrize("visits", [False, True])
def test_the_first_groups_are_those_of_all_though_not_all_is_read(visits):
    rng = np.random.default_rng(0)
    short = 0
    for _ in range(400):
        keys = rng.integers(0, rng.integers(1, 12), rng.integers(0, 60))
        visit = np.sort(rng.integers(-1, 20, len(keys))).tolist() if visits else [-1] * len(keys)
        rows = zip(keys.tolist(), visit, strict=True)
        unused = [(id_, str(key), None if admission < 0 else admission) for id_, (key, admission) in enumerate(rows, 5)]
        size, most = int(rng.integers(1, 5)), int(rng.integers(0, 7))
        expected, rest = all_groups(unused, size), iter(unused)
        assert Queue(-1, 0).draw(rest, most, size) == expected[:most]
        short += bool(list(rest))
        assert Queue(-1, 0).missing(unused, most, size) == max(0, most - len(expected))
    assert short > 50


def visit(number: int, key: str, rewards: str, version: int = 0) -> list[Rollout]:
    """What a run writes for one visit of a prompt: a member for each digit, its reward, or for "-", which has none."""
    made = [rollouts(key, None if value == "-" else float(value))[0] for value in rewards]
    return [rollout.admitted(number) for rollout in made]


def ids_of(groups: list[Group]) -> list[list[int]]:
    return [[rollout.id for rollout in group.rollouts] for group in groups]


def learn(store, groups: int, size: int, version: int) -> list[list[int]]:
    """One step; the ids of each group."""
    drawn = store.draw(groups, size, NOW)
    store.record([Use(r.id, version, None, 0.5, r.revision) for group in drawn for r in group.rollouts])
    return ids_of(drawn)


def test_a_group_holds_one_visit_and_what_is_left_of_a_visit_is_dropped_and_counted(store):
    """Two members to a group. The second visit of `a` lacks a reward, so that its other member is left over."""
    store.add([*visit(0, "a", "10"), *visit(1, "a", "1-"), *visit(2, "b", "01")])
    assert learn(store, 2, 2, 0) == [[1, 2], [5, 6]]
    assert store.passed_over() == {"leftover": 1}
    store.add([*visit(3, "a", "11"), *visit(4, "c", "-0"), *visit(5, "a", "00")])
    assert store.missing(3, 2, 0, NOW) == 1
    assert learn(store, 9, 2, 1) == [[7, 8], [11, 12]]
    assert store.passed_over() == {"leftover": 2}
    store.add_reward(4, Reward(0.0))  # it comes after its batch
    assert store.draw(9, 2, NOW) == [] and store.missing(1, 2, 0, NOW) == 1


def test_visits_that_wait_their_turn_are_not_left_over(store):
    """A reserve of batches: the visit with a missing reward is only passed over when a later one is learned from."""
    store.add([*visit(0, "a", "10"), *visit(1, "b", "1-"), *visit(2, "c", "01"), *visit(3, "d", "01")])
    assert learn(store, 1, 2, 0) == [[1, 2]]
    assert store.passed_over() == {}
    store.add_reward(4, Reward(0.0))  # in time
    assert learn(store, 1, 2, 1) == [[3, 4]]
    assert learn(store, 1, 2, 2) == [[5, 6]]
    assert store.passed_over() == {}


def test_imported_rollouts_of_a_prompt_still_fill_groups_but_join_no_visit(store):
    people = [dataclasses.replace(r, origin="human", lineage=None) for r in rollouts("aaab")]
    store.add(people)
    store.add([*visit(0, "a", "10"), *visit(1, "b", "10")])
    assert ids_of(store.draw(9, 2, NOW)) == [[1, 2], [5, 6], [7, 8]]
    store.add(people[3:])
    assert ids_of(store.draw(9, 2, NOW)) == [[1, 2], [4, 9], [5, 6], [7, 8]]


def test_a_reopened_store_knows_what_was_left_over(store, place):
    store.add([*visit(0, "a", "1-"), *visit(1, "b", "01")])
    learn(store, 1, 2, 0)
    store.add([*visit(2, "c", "-1"), *visit(3, "a", "01")])
    learn(store, 1, 2, 1)
    again = Ledger(place)
    assert again.draw(9, 2, NOW) == []
    assert again.passed_over() == store.passed_over() == {"leftover": 2}
    again.rewind(4, version=1, lineage="test")  # the second step is undone, and what it learned from is set aside
    assert again.draw(9, 2, NOW) == []
    assert again.passed_over() == {"leftover": 1}
    again.add([*visit(2, "c", "11"), *visit(3, "a", "01")])
    assert learn(again, 9, 2, 1) == [[9, 10], [11, 12]]
    again.close()


def test_each_use_names_its_group(store, place):
    store.add([*visit(0, "a", "10"), *visit(1, "a", "01"), *visit(2, "b", "01")])
    learn(store, 3, 2, 7)
    with reading(place) as opened:
        groups = opened.used(7, group_size=4)
    assert ids_of([used.group for used in groups]) == [[1, 2], [3, 4], [5, 6]]
    assert [[use.group for use in used.uses] for used in groups] == [[0, 0], [1, 1], [2, 2]]


def test_what_was_used_is_not_drawn_again(store):
    store.add(rollouts("aabb"))
    store.record(use(1, 2))
    assert drawn(store, 5, 2) == [("b", [3, 4])]
    assert waiting(store, 2) == 1
    store.record([])
    store.record(use(3, 4))
    assert (drawn(store, 5, 2), waiting(store, 2)) == ([], 0)


def test_a_use_between_others_counts_only_itself(store):
    store.add(rollouts("ababab"))
    store.record(use(1, 5))  # 2, 3 and 4 lie between
    assert drawn(store, 5, 2) == [("b", [2, 4])]
    assert drawn(store, 5, 3) == [("b", [2, 4, 6])]


def test_members_far_apart_form_a_group(store):
    store.add(rollouts("a" + "b" * 50 + "a"))
    store.record(use(*range(2, 52)))
    assert drawn(store, 1, 2) == [("a", [1, 52])]


def test_a_rewound_store_forgets_later_uses_and_what_the_run_wrote_itself(store):
    store.add(rollouts("aabb"))
    store.record([Use(1, 4, 0, None), Use(2, 4, 0, None)])
    watermark = store.watermark()
    store.record([Use(3, 5, 0, None), Use(4, 5, 0, None)])
    people = (dataclasses.replace(rollout, origin="human", lineage=None) for rollout in rollouts("dd"))
    store.add([*rollouts("cc"), *people])
    store.add_reward(5, Reward(0.5, revision=1))
    store.rewind(watermark, version=5)
    assert drawn(store, 9, 2) == [("b", [3, 4]), ("d", [7, 8])]
    store.record([Use(3, 5, 0, None), Use(4, 5, 0, None)])  # the same version uses them again
    with open_for_reading(store.place) as database:
        assert database.exec_driver_sql("select count(*) from rewards where rollout_id = 5").scalar_one() == 2
        assert database.exec_driver_sql("select max(uses) from rollouts").scalar_one() == 1


@pytest.mark.parametrize("lineage", [None, "test"])
def test_a_rewound_store_keeps_what_was_imported(store, lineage):
    """Text without a lineage, what another run exported, and what this very run did; without a checkpoint too."""
    imported = [
        dataclasses.replace(rollout, origin="file:a", lineage=written)
        for rollout, written in zip(rollouts("aabbcc"), [None, None, "another", "another", "test", "test"], strict=True)
    ]
    store.add_imported(imported)
    own = [dataclasses.replace(rollout, origin="game") for rollout in rollouts("dd")]
    store.add([*rollouts("e"), *own, *rollouts("e")])
    store.revise([(1, Reward(0.25))])
    store.record(use(1, 2, 7, 10))
    store.rewind(0, version=0, lineage=lineage)
    assert drawn(store, 9, 2) == [("a", [1, 2]), ("b", [3, 4]), ("c", [5, 6])]
    assert store.fetch([1])[0].reward == 0.25


def test_files_imported_again_add_rewards_and_change_none(store):
    def graded(value: float | None) -> list[Rollout]:
        return [dataclasses.replace(rollout, origin="human", lineage=None) for rollout in rollouts("ab", value)]

    waiting, known = graded(None)[0], graded(0.5)[1]
    assert store.add_imported([waiting, known], [dataclasses.replace(known, rewards=(Reward(0.75),))]) == (2, 1)
    store.revise([(2, Reward(1.0))])
    assert store.add_imported(graded(0.5), over=False) == (0, 1)
    assert [rollout.reward for rollout in store.fetch([1, 2])] == [0.5, 1.0]


def test_samples_are_stored_even_if_their_text_is_there_and_importing_them_again_adds_none(store):
    texts = dict(zip("ABCDE", rollouts("ppppp", None), strict=True))
    samples = [dataclasses.replace(texts[text], origin="model:m") for text in "AABCADBEAAAA"]
    assert store.add_imported(samples[:4]) == (4, 0)
    store.add_samples(samples[4:8])
    store.add_samples(samples[8:])
    with reading(store.place) as opened:
        ids = [rollout.sequences[0].token_ids_T.tolist() for rollout, _ in opened.rollouts()]
    assert ids == [rollout.sequences[0].token_ids_T.tolist() for rollout in samples]
    assert store.add_imported(samples[:8]) == store.add_imported(samples) == (0, 0)  # an older export, and a new one
    assert store.watermark() == 12


def test_rollouts_wait_for_their_rewards_and_revisions_count(store):
    store.add(rollouts("aa", reward=None))
    assert waiting(store, 2) == 0
    store.add_reward(1, Reward(1.0))
    assert drawn(store, 1, 2) == []
    store.add_reward(2, Reward(0.0))
    store.add_reward(2, Reward(0.75, revision=1))
    assert [r.reward for r in store.draw(1, 2, NOW)[0].rollouts] == [1.0, 0.75]


def test_a_reward_for_nobody_or_given_twice_is_refused(store):
    store.add(rollouts("a"))
    with pytest.raises(SoleraError, match=r"there is no rollout 99; the last is 1$"):
        store.add_reward(99, Reward(1.0))
    with pytest.raises(SoleraError, match=r"reward 'reward' of rollout 1 already has revision 0$"):
        store.add_reward(1, Reward(2.0))


def test_what_nothing_learns_from_is_given_no_reward(store):
    """A probe's, and what a resume set aside; what was written before the checkpoint, or imported after, is."""
    store.add([*rollouts("a"), *(dataclasses.replace(rollout, origin="probe") for rollout in rollouts("a"))])
    store.add(rollouts("a"))
    store.add_imported([dataclasses.replace(rollout, origin="human", lineage=None) for rollout in rollouts("b")])
    store.rewind(2, version=0, lineage="test")
    with pytest.raises(
        SoleraError, match="rollout 2 belongs to a probe, which training does not use; solera data export"
    ):
        store.add_reward(2, Reward(0.5, "style"))
    with pytest.raises(SoleraError, match="rollout 3 was generated after the checkpoint that the run resumed from"):
        store.add_reward(3, Reward(0.5, "style"))
    store.add_reward(1, Reward(0.5, "style"))
    store.add_reward(4, Reward(0.25, "style"))
    assert [rollout.reward for rollout in store.fetch([1, 2, 3, 4])] == [1.5, 1.0, 1.0, 1.25]


def test_adding_is_all_or_none(store):
    good, bad = rollouts("ab")
    object.__setattr__(bad, "prompt_key", None)
    with pytest.raises(Exception, match=r"(?i)not.null"):
        store.add([good, bad])
    assert waiting(store, 1) == 0
    assert store.add(rollouts("a")) == [1]


def test_a_file_that_is_no_store_is_refused_in_one_line(tmp_path):
    (tmp_path / "store.db").write_bytes(b"not a database at all, only some text that is long enough" * 20)
    with pytest.raises(SoleraError, match=r"store\.db: cannot be used as a store") as refusal:
        Ledger(tmp_path / "store.db")
    assert "\n" not in str(refusal.value)


def random_sequence(rng: np.random.Generator) -> Sequence:
    """Several spans of several versions, adjacent or apart, with or without log-probabilities."""
    spans, end = [], 1
    for _ in range(int(rng.integers(0, 5))):
        start = end + int(rng.integers(0, 4))
        end = start + int(rng.integers(1, 6))
        spans.append(Span(start, end, int(rng.integers(-1, 1000))))
    length = end + int(rng.integers(0, 5))
    written = sum(span.stop - span.start for span in spans)
    logp = rng.normal(size=written).astype(np.float32) if rng.random() < 0.7 else None
    return Sequence(rng.integers(0, 50_000, length).astype(np.int32), tuple(spans), logp)


def test_encoding_is_exact_for_any_spans():
    rng = np.random.default_rng(1)
    for _ in range(300):
        original = tuple(random_sequence(rng) for _ in range(int(rng.integers(0, 4))))
        back = decode(encode(original))
        assert len(back) == len(original)
        for a, b in zip(original, back, strict=True):
            assert a.spans == b.spans
            assert np.array_equal(a.token_ids_T, b.token_ids_T)
            assert (a.span_logp is None) == (b.span_logp is None)
            assert a.span_logp is None or np.array_equal(a.span_logp, b.span_logp)


def test_encoding_is_compact():
    sequence = Sequence(np.zeros(200, np.int32), (Span(100, 200, 5),), np.zeros(100, np.float32))
    assert len(encode((sequence,))) <= 1.05 * (200 * 4 + 100 * 4)


def test_cut_off_bytes_are_refused():
    rng = np.random.default_rng(2)
    data = encode(tuple(random_sequence(rng) for _ in range(3)))
    for end in range(len(data)):
        with pytest.raises(SoleraError, match="damaged"):
            decode(data[:end])
    with pytest.raises(SoleraError, match="1 bytes too many"):
        decode(data + b"x")
    with pytest.raises(SoleraError, match="format 9"):
        decode(b"\x09" + data[1:])


def test_a_reward_that_came_between_writing_and_drawing_counts(store, place) -> None:
    """What this process wrote is drawn from memory, unless a reward came for it: here, or from another process."""
    other = Ledger(place)
    rng = np.random.default_rng(0)
    first = store.add([random_rollout(rng, 1, (3, 4), 0.0) for _ in range(2)])
    store.add_reward(first[0], Reward(0.5, part="style", source="person"))
    (group,) = store.draw(1, 2, NOW)
    assert [rollout.reward for rollout in group.rollouts] == [0.5, 0.0]
    store.record([Use(id_, 0, 0, None) for id_ in first])
    ids = store.add([random_rollout(rng, 0, (3, 4), 0.0) for _ in range(2)])
    other.add_reward(ids[1], Reward(0.25, part="style", source="person"))
    (group,) = store.draw(1, 2, NOW)
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 0.25]
    (again,) = other.draw(1, 2, NOW)
    for ours, theirs in zip(group.rollouts, again.rollouts, strict=True):
        assert ours.id == theirs.id and set(ours.rewards) == set(theirs.rewards)
        assert ours.sequences[0].token_ids_T.tolist() == theirs.sequences[0].token_ids_T.tolist()
        assert ours.sequences[0].span_logp.tobytes() == theirs.sequences[0].span_logp.tobytes()
    other.close()


def test_a_probe_is_kept_and_never_drawn(store):
    looked_at = [dataclasses.replace(rollout, origin="probe") for rollout in rollouts("aa")]
    assert store.add([*rollouts("a"), *looked_at, *rollouts("a"), *rollouts("c", reward=None)]) == [1, 2, 3, 4, 5]
    assert waiting(store, 2) == 1
    assert drawn(store, 5, 2) == [("a", [1, 4])]
    assert [(r.id, r.origin) for r in store.fetch([5, 4, 3])] == [(3, "probe"), (4, "self")]  # 5 has no reward
    assert store.fetch([]) == []
    store.rewind(watermark=2, version=0)
    with store.transaction() as connection:
        superseded = connection.exec_driver_sql("select id from rollouts where superseded = 1 order by id").all()
    assert superseded == [(3,), (4,), (5,)]
