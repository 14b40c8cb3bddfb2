"""The streaming supply: equal to lock-step at age 0, bounded in age, complete after kills, and clear when it fails."""

import asyncio
import itertools
import json
import os
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from io import StringIO
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from solera import open_store
from solera.cli import main
from solera.config import DrawConfig, check, parse
from solera.errors import SoleraError
from solera.protocols import Supplied, SupplyState
from solera.records import Completion, Group, PolicyVersion, Prompt, Reward, Rollout, Sampling
from solera.report.sinks import read_metrics
from solera.run import running
from solera.store.deferred import Deferred
from solera.store.ledger import Ledger
from solera.store.queue import Queue
from solera.store.selected import Selected
from solera.sync.rules import SyncState, never, within
from solera.tasks.episodes import Guard
from solera.tasks.event_loop import EventLoop
from solera.training.stream import OpenGroup, Stream
from tests.command import start
from tests.store.test_ledger import visit
from tests.test_supply import Counting, Echo

RUN = """
run = {{ root = "{root}", name = "{name}", steps = {steps}, device = "cpu" }}
collect = {{ prompts = 6, group_size = 4, {collect} }}
diagnose = {{ probe_prompts = 3, every = 2 }}
evaluate = {{ every = 5, problems = 20 }}
checkpoint = {{ every = 3 }}
report = {{ tensorboard = false, progress = false, page = false }}
{more}
"""


def settings(root: Path, name: str, collect: str, more: str = "", steps: int = 10) -> str:
    return RUN.format(root=root, name=name, collect=collect, more=more, steps=steps)


def train(text: str, **given) -> Path:
    config = parse(text, "test")
    running.train(config, Console(file=StringIO()), **given)
    assert config.run.name
    return Path(config.run.root) / config.run.name


def metrics_of(folder: Path) -> list[dict[str, float]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "stream/"))} for row in rows]


def used(folder: Path) -> list[tuple[int, Rollout]]:
    """Each rollout that was trained on, with the version that learned from it."""
    with closing(sqlite3.connect(folder / "store.db")) as store:
        uses = store.execute("select rollout_id, version from uses order by version, rollout_id").fetchall()
    with closing(open_store(folder)) as store:
        rollouts = {rollout.id: rollout for rollout in store.fetch([id_ for id_, _ in uses])}
    return [(version, rollouts[id_]) for id_, version in uses]


def texts(folder: Path) -> list[tuple[int, int | None, list[int]]]:
    return sorted((version, r.admission, r.sequences[0].token_ids_T.tolist()) for version, r in used(folder))


def sometimes_silent(prompts, completions, **_) -> list[float | None]:
    """A grader without an opinion about some answers."""
    marks = [crc32(f"{p}{c}".encode()) for p, c in zip(prompts, completions, strict=True)]
    return [None if mark % 23 == 3 else float(mark % 2) for mark in marks]


@pytest.mark.parametrize(
    ("more", "given"),
    [
        ("", {}),
        ('objective = { name = "dapo" }', {}),
        ('draw = { policy = "replay", fresh = 0.5 }', {}),
        ('reward = { errors = "missing" }', {"rewards": [sometimes_silent]}),
    ],
    ids=["plain", "refill", "replay", "missing rewards"],
)
def test_at_age_0_a_stream_equals_lock_step_bit_for_bit(tmp_path, more, given):
    more += "\nsync = { period = 1 }"
    locked = train(settings(tmp_path, "locked", 'mode = "lock_step"', more), **given)
    streamed = train(settings(tmp_path, "streamed", 'mode = "stream", max_age = 0', more), **given)
    assert metrics_of(streamed) == metrics_of(locked)
    assert texts(streamed) == texts(locked)
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (locked, streamed))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


class Unhurried:
    """Sums with a pause after each response. One response in forty takes twenty times as long as the others."""

    def __init__(self, codec) -> None:
        self.codec = codec
        self.numbers = itertools.count()

    def prompt(self, index: int) -> Prompt:
        return Prompt(f"sum/{index}", self.codec.encode(f"{index % 50}+{index % 37}="))

    def held_out(self, count: int) -> list[Prompt]:
        return [Prompt(f"held/{n}", self.codec.encode(f"{n + 50}+{n + 37}=")) for n in range(min(count, 10))]

    async def run(self, prompt, generate) -> Rollout:
        completion = await generate(prompt.token_ids)
        await asyncio.sleep(0.2 if next(self.numbers) % 40 == 7 else 0.01)
        return Rollout.of(prompt, completion, rewards=(Reward(float(completion.token_ids_T.sum() % 2)),))


@pytest.mark.parametrize(("max_age", "period", "steps"), [(1, 1, 10), (4, 2, 12), (16, 5, 20)])
@pytest.mark.parametrize("in_flight", ["keep", "drain"])
def test_no_response_is_older_than_max_age_even_behind_a_slow_one(tmp_path, max_age, period, steps, in_flight):
    more = f'sync = {{ period = {period}, in_flight = "{in_flight}" }}\nengine = {{ max_rows = 24 }}'
    folder = train(
        settings(tmp_path, "run", f'mode = "stream", max_age = {max_age}', more, steps), task=Unhurried
    )  # fmt: skip
    trained = used(folder)
    ages = [version - int(r.sequences[0].version_T[r.sequences[0].mask_T].min()) for version, r in trained]
    assert max(ages) <= max_age
    assert max(ages) > 0
    assert_every_problem_in_order(trained, group_size=4)
    assert max(row.get("age/max", 0) for row in metrics_of(folder)) == max(ages)


def assert_every_problem_in_order(trained: list[tuple[int, Rollout]], group_size: int) -> None:
    """Batches take the task's stream in its order: each problem once, with all of its attempts, and none is skipped."""
    problems = Counter(r.admission for _, r in trained)
    assert sorted(problems) == list(range(len(problems)))  # type: ignore[type-var]
    assert set(problems.values()) == {group_size}
    by_version = [(r.admission, version) for version, r in trained]
    assert [version for _, version in sorted(by_version)] == sorted(version for _, version in by_version)


class Equal(Unhurried):
    """Every group is masked, because all of its rewards are equal."""

    def __init__(self, codec) -> None:
        self.codec = codec

    async def run(self, prompt, generate) -> Rollout:
        return Rollout.of(prompt, await generate(prompt.token_ids), rewards=(Reward(1.0),))


def test_a_batch_may_need_more_groups_than_are_kept_ready(tmp_path):
    """With refill it draws up to four times as many; only two batches are written ahead."""
    more = 'objective = { name = "dapo" }\nsync = { period = 2 }\nengine = { max_rows = 24 }'
    folder = train(settings(tmp_path, "run", 'mode = "stream", max_age = 4', more), task=Equal)
    assert [row["groups/drawn"] for row in metrics_of(folder)[:10]] == [24] * 10
    assert max(row["age/max"] for row in metrics_of(folder)[:10]) <= 4


def rows_in(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_a_stream_killed_several_times_skips_no_problem_and_repeats_none(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(settings(tmp_path, "run", 'mode = "stream", max_age = 6', "sync = { period = 3 }", steps=24))
    folder = tmp_path / "run"
    rng = np.random.default_rng(0)
    process = start("train", file)
    for kill in range(3):
        wanted, until = rows_in(folder) + int(rng.integers(2, 6)), time.monotonic() + 120
        while rows_in(folder) < min(wanted, 20) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        assert process.poll() is None, f"ended before kill {kill}"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process = start("train", "--resume", folder)
    assert process.wait() == 0
    trained = used(folder)
    assert sorted({version for version, _ in trained}) == list(range(24))
    assert_every_problem_in_order(trained, group_size=4)


class Failing(Unhurried):
    async def run(self, prompt, generate) -> Rollout:
        if prompt.key == "sum/40":
            raise ValueError("no such sum")
        return await super().run(prompt, generate)


def test_an_episode_that_fails_ends_the_run_or_costs_one_group(tmp_path):
    more = "sync = { period = 2 }"
    with pytest.raises(SoleraError, match="no such sum"):
        train(settings(tmp_path, "stops", 'mode = "stream"', more), task=Failing)
    folder = train(settings(tmp_path, "goes-on", 'mode = "stream", errors = "missing"', more), task=Failing)
    assert sum(row.get("episodes/failed", 0) for row in metrics_of(folder)) == 4


def test_waiting_times_of_slow_groups_are_logged(tmp_path):
    folder = train(settings(tmp_path, "run", 'mode = "stream"', "sync = { period = 2 }"), task=Unhurried)
    row = read_metrics(folder / "metrics.jsonl")[5]
    assert row["time/stream/write"] >= 0.01
    assert {"time/stream/wait", "stream/ready", "stream/running"} <= row.keys()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("collect = { max_age = 3 }", "collect.max_age has no effect"),
        ('sync = { in_flight = "drain" }', "sync.in_flight has no effect"),
        ('collect = { mode = "stream", offset = 1 }', "collect.offset cannot be combined"),
        ('collect = { mode = "stream", overlap = true }', "collect.overlap cannot be combined"),
        ('collect = { mode = "stream", deterministic = true }', "collect.deterministic cannot be combined"),
        ('collect = { mode = "stream", max_age = 8 }', "up to 9 batches old"),
        ('collect = { mode = "stream", max_age = -1 }', "at least 0"),
        ('collect = { mode = "stream", max_age = 9 }\nsync = { rule = "never" }', "older without limit"),
        ('collect = { mode = "stream" }\ndraw = { policy = "offline" }', "generates nothing"),
        ('collect = { mode = "stream" }\ndraw = { policy = "replay", fresh = 0.0 }', "draw.fresh is 0"),
        ('collect = { mode = "stream" }\ndraw = { policy = "replay", leftovers = "keep" }', "draw.leftovers = keep"),
        ('collect = { mode = "stream" }\nstore = { data = ["a.jsonl"] }', "store.data or store.solutions has rollouts"),
        ('collect = { mode = "stream" }\ndraw = { policy = "replay", max_age = 5 }', "reach age 20 .collect.max_age"),
    ],
)
def test_combinations_that_cannot_work_are_refused(text, complaint):
    with pytest.raises(SoleraError, match=complaint):
        check(parse(text, "test"))


@pytest.mark.parametrize(
    ("draw", "enough", "share"),
    [
        ('policy = "replay", fresh = 0.1', 5, "draw.fresh"),  # 5 x 0.1 is rounded up, 4 x 0.1 down
        ('policy = "mixed", shares = ["self=0.1", "model:*=0.9"]', 5, "the share of self in draw.shares"),
        ('policy = "mixed", shares = ["model:a=3", "self=1", "model:b=3"]', 3, "the share of self in draw.shares"),
    ],
)
def test_batches_without_a_new_group_are_refused(draw, enough, share):
    """Such a run would replay its first batch for ever."""

    def settings_of(prompts: int, mode: str = "stream") -> str:
        return f'collect = {{ mode = "{mode}", prompts = {prompts} }}\ndraw = {{ {draw} }}'

    check(parse(settings_of(enough), "test"))
    check(parse(settings_of(enough - 1, "lock_step"), "test"))
    complaint = f"^{share} is too low: of {enough - 1} groups .*: raise it, or collect.prompts$"
    with pytest.raises(SoleraError, match=complaint):
        check(parse(settings_of(enough - 1), "test"))


def test_a_rule_that_waits_too_long_is_overruled():
    """With max_age = 2, batch 3 after a sync could not be supplied any more."""
    rule = within(never, 2)
    assert [rule(SyncState(due=False, engine_version=4), version, {}).due for version in (5, 6, 7, 8)] == [
        False, False, True, True,
    ]  # fmt: skip


def test_groups_are_drawn_in_the_order_of_the_stream_without_imported_ones_and_those_left_out():
    def unused() -> Iterator[tuple[int, str, int | None]]:
        for number, admission in enumerate([7, None, 3, 9, 3, None, 7, 9]):
            yield number, f"p/{admission}", admission

    queue = Queue(-1, 0)
    assert queue.draw(unused(), 9, 2, by_admission=True) == [("p/3", [2, 4]), ("p/7", [0, 6]), ("p/9", [3, 7])]
    assert queue.ready(unused(), 2) == {3, 7, 9}
    queue.leave_out([3, 9])
    assert queue.ready(unused(), 2) == {7}
    assert queue.draw(unused(), 9, 2, by_admission=True) == [("p/7", [0, 6])]
    assert queue.leftover == 2  # those of 3; 9 comes after what was drawn


class Ordered(Counting):
    """A store that says which of its groups could be drawn: those with rewards."""

    def __init__(self) -> None:
        super().__init__(0)
        self.left_out = set[int]()

    def supplied(self, groups: int, group_size: int, now: PolicyVersion) -> Supplied:
        graded = Counter(rollout.admission for rollout in self.added if rollout.rewards)
        return Supplied(groups, {number for number, count in graded.items() if count == group_size} - self.left_out)

    def leave_out(self, visits: Iterable[int]) -> None:
        self.left_out.update(visits)


def supply_of(task: Echo, events: EventLoop, max_age: int = 8) -> Stream:
    """Batches of two groups of three."""
    return Stream(
        task, task, Ordered(), sampling=Sampling(1.0, 4), group_size=3, members=3, new_per_batch=2, max_age=max_age,
        seed=0, guard=Guard(), events=events,
    )  # fmt: skip


class Synced(Echo):
    """An engine for four responses."""

    version, slots = 3, 4


def test_after_a_sync_that_let_all_responses_end_the_engine_begins_at_once():
    """Five batches of two groups are ready, one more than are usually kept. With the next weights the engine writes
    once: five responses are wanted for its four slots, which are two groups of three."""
    with EventLoop() as events:
        task = Synced()
        supply = supply_of(task, events)
        supply._last_version, supply._open = 3, {n: OpenGroup(0.0, ended=1.0) for n in range(10)}
        supply.position = 10

        def drawn() -> int:
            supply.drawn([], 0)
            while not supply.idle:
                time.sleep(0.01)
                supply._store_ended()
            return supply.position

        assert drawn() == 10
        task.version = 4
        assert drawn() == 12
        assert drawn() == 12


def test_slots_that_become_free_are_given_to_new_groups_until_enough_is_ready():
    """Two groups fit at once. The engine pauses when four batches of two groups are ready, and nobody asks meanwhile.
    Groups that have just ended may not count as ready yet when two more are admitted."""
    with EventLoop() as events:
        supply = supply_of(Synced(), events)
        supply.drawn([], 0)
        deadline = time.monotonic() + 10
        while supply.position < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert 8 <= supply.position <= 10


def test_the_lead_grows_if_the_learner_waits_after_the_engine_stood_still():
    """Batches of two groups. With four ready ones the engine stands still. When the learner has drawn them and waits,
    the engine may write six batches ahead before it stands still again, and at most eight in the end."""
    with EventLoop() as events:
        task = Synced()
        supply = supply_of(task, events, max_age=1000)

        def may_write(ready: int) -> bool:
            supply._open = {n: OpenGroup(0.0, ended=1.0) for n in range(ready)}
            supply._last_version, supply._need = task.version, 2

            async def admissible() -> int:
                return supply._admissible()

            return events.run(admissible()) > 0

        for most in (8, 12, 16, 16):
            assert may_write(most - 1)
            supply._note_that_the_learner_waits()  # the engine has not stood still: more would not help
            assert not may_write(most)
            supply._note_that_the_learner_waits()


class Silent(Synced):
    """Knows no reward for the first problem."""

    async def run(self, prompt, generate) -> Rollout:
        rewards = () if prompt.key == "p/0" else (Reward(1.0),)
        return Rollout.of(prompt, await generate(prompt.token_ids), rewards=rewards)


class Reversed(Synced):
    """The later a problem is, the sooner it is answered."""

    async def generate(self, token_ids, sampling, seed) -> Completion:
        await asyncio.sleep(0.05 * (10 - token_ids[0]))
        return await super().generate(token_ids, sampling, seed)


def test_at_age_0_groups_are_stored_in_the_order_of_the_stream():
    """As in lock-step: which old groups are drawn again depends on the order in the store."""
    with EventLoop() as events:
        supply = supply_of(Reversed(), events, max_age=0)
        supply.wait(2, PolicyVersion("test", 3))
        assert [rollout.admission for rollout in supply.store.added] == [0, 0, 0, 1, 1, 1]


class Watched:
    """A lock. Each time that the main thread has released it, something else happens first."""

    def __init__(self, lock: threading.Condition, then: Callable[[], object]) -> None:
        self.lock, self.then = lock, then

    def __getattr__(self, name: str):
        return getattr(self.lock, name)

    def __enter__(self) -> bool:
        return self.lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self.lock.__exit__(*error)
        if threading.current_thread() is threading.main_thread():
            self.then()


def test_groups_that_are_admitted_while_a_batch_is_drawn_keep_the_bound():
    """At any moment attempts may end, and others be admitted. The engine keeps version 0, and no response may be older
    than two batches: of two groups each, batches 0, 1 and 2 can be written, and no other."""
    with EventLoop() as events:
        task = Synced()
        task.version, task.slots = 0, 100
        supply = supply_of(task, events, max_age=2)
        supply._changed = Watched(supply._changed, lambda: events.run(supply._admit_some()))
        for version in range(3):
            supply.wait(2, PolicyVersion("test", version))
            batch = {2 * version, 2 * version + 1}
            members = {n: [r for r in supply.store.added if r.admission == n] for n in batch}
            supply.drawn([Group(f"p/{n}", tuple(found)) for n, found in members.items()], 0)
            assert supply.position == 6


def test_groups_that_are_not_drawn_are_counted_by_reason():
    """The third is drawn. The first has no rewards; the second was ready, so its rewards have changed since."""
    with EventLoop() as events:
        supply, now = supply_of(Silent(), events), PolicyVersion("test", 3)
        supply.wait(2, now)
        assert supply.store.left_out == {0}
        third = Group("p/2", tuple(rollout for rollout in supply.store.added if rollout.admission == 2))
        assert len(third.rollouts) == 3
        supply.drawn([third], 0)
        found = supply.take_metrics()
        assert {name: count for name, count in found.items() if "closed" in name} == {
            "stream/closed_ungraded": 1, "stream/closed_filtered": 1,
        }  # fmt: skip


def test_tokens_that_are_stored_with_a_checkpoint_are_counted_with_the_next_batch():
    with EventLoop() as events:
        task, now = Synced(), PolicyVersion("test", 3)
        supply = supply_of(task, events)
        supply.drawn([], 0)
        deadline = time.monotonic() + 10
        while not supply._anything_to_store() and time.monotonic() < deadline:
            time.sleep(0.01)
        supply.state()
        assert supply.store.added
        counted = supply.wait(2, now)
        assert counted == sum(rollout.length for rollout in supply.store.added) > 0


def test_a_group_that_ends_while_a_checkpoint_is_written_is_attempted_again_after_a_resume(monkeypatch):
    """It is not in the store yet, so the checkpoint must not count it as ready."""
    with EventLoop() as events:
        task = Echo()
        supply = supply_of(task, events)
        prompt = task.prompt(4)
        late = Rollout.of(prompt, asyncio.run(task.generate(prompt.token_ids, None, 0)), rewards=(Reward(1.0),))
        supply.position = 6
        supply._open = {3: OpenGroup(0.0, ended=1.0), 4: OpenGroup(0.0, [late], 1.0), 5: OpenGroup(0.0)}
        monkeypatch.setattr(supply, "_store_ended", lambda: 0)
        assert supply.state() == SupplyState(6, running=(4, 5), ready=(3,))
        supply.restore(supply.state())
        assert supply.state() == SupplyState(6, running=(4, 5), ready=(3,))
        assert supply.store.left_out == {0, 1, 2}


def test_a_resumed_stream_waits_for_earlier_groups_that_it_attempts_again():
    """Later ones are ready. Without the earlier ones, a batch of them would leave out what takes long."""
    with EventLoop() as events:
        task = Synced()
        supply = supply_of(task, events)
        for number in (4, 5, 6, 7):
            prompt = task.prompt(number)
            turn = asyncio.run(task.generate(prompt.token_ids, None, 0))
            supply.store.added += [Rollout.of(prompt, turn, rewards=(Reward(1.0),)).admitted(number)] * 3
        supply.restore(SupplyState(8, running=(2, 3), ready=(4, 5, 6, 7)))
        assert supply._drawable() == 0
        supply.max_age = 1  # had it been 1 before, these would not all be under way
        supply.wait(2, PolicyVersion("test", 4))
        assert supply.store.supplied(2, 3, PolicyVersion("test", 4)).ready >= {2, 3}


class Down(Unhurried):
    """A judge that has no opinion about the first 66 problems, eleven batches."""

    async def run(self, prompt, generate) -> Rollout:
        completion = await generate(prompt.token_ids)
        number = int(prompt.key.partition("/")[2])
        known = prompt.key.startswith("held") or number >= 66
        rewards = (Reward(float(completion.token_ids_T.sum() % 2)),) if known else ()
        return Rollout.of(prompt, completion, rewards=rewards)


@pytest.mark.parametrize("draw", ["", 'draw = { policy = "replay", fresh = 0.5 }'], ids=["plain", "replay"])
def test_a_stream_recovers_from_many_groups_without_rewards(tmp_path, draw):
    """Each step gives up after four batches of replacements. The third or fourth finds rewards again. What the earlier
    ones left to it is as young as it should be."""
    more = f"sync = {{ period = 2 }}\n{draw}"
    folder = train(settings(tmp_path, "run", 'mode = "stream", max_age = 4', more), task=Down)
    rows = metrics_of(folder)[:10]
    assert rows[0]["groups/drawn"] == 0
    assert [row["groups/drawn"] for row in rows[4:]] == [6] * 6
    trained = used(folder)
    assert min(r.admission for _, r in trained) == 66
    first = {r.id: version for version, r in reversed(trained)}
    assert max(first[r.id] - int(r.sequences[0].version_T[r.sequences[0].mask_T].min()) for _, r in trained) <= 4


@pytest.mark.parametrize("selective", [False, True])
def test_a_reward_that_comes_after_a_group_was_replaced_is_not_trained_on(place, selective):
    """Problem 0 had no reward when the batch was supplied. Another problem took its place."""
    ledger, now = Ledger(place), PolicyVersion("test", 0)
    store = Selected(ledger, DrawConfig(min_spread=0.1), 0, True) if selective else Deferred(ledger, True)
    store.add(visit(0, "a", "--") + visit(1, "b", "01"))
    assert store.supplied(1, 2, now) == (1, {1})
    store.leave_out([0])
    first = store.watermark() - 3
    ledger.revise([(first, Reward(0.0)), (first + 1, Reward(1.0))])
    assert store.supplied(1, 2, now) == (1, {1})
    assert [group.prompt_key for group in store.draw(2, 2, now)] == ["b"]
    assert store.passed_over() == {"leftover": 2}
    ledger.close()


def test_imported_rollouts_are_replayed_by_a_stream_and_make_its_own_no_older(tmp_path):
    teacher = tmp_path / "teacher.jsonl"
    lines = ({"prompt": f"{n}+{n}=", "response": str(2 * n + wrong), "model": "t", "reward": 1.0 - wrong}
             for n in range(20, 50) for wrong in (0, 1, 0, 1))  # fmt: skip
    teacher.write_text("".join(json.dumps(line) + "\n" for line in lines))
    more = (
        'sync = { period = 2 }\ndraw = { policy = "replay", fresh = 0.5 }\nobjective = { name = "red_weight" }\n'
        f'store = {{ data = ["{teacher}"], skip_bad = "{tmp_path / "held_out.jsonl"}" }}'
    )
    trained = used(train(settings(tmp_path, "run", 'mode = "stream", max_age = 2', more)))
    first = {r.id: version for version, r in reversed(trained)}
    own = [r for _, r in trained if r.admission is not None]
    assert max(first[r.id] - int(r.sequences[0].version_T[r.sequences[0].mask_T].min()) for r in own) <= 2
    assert {r.admission for r in own} == set(range(30))  # three new groups in each of ten batches, and none is lost
    assert sum(r.origin == "model:t" for _, r in trained) > 20


@pytest.mark.parametrize(("mode", "told"), [("stream", True), ("lock_step", False)])
def test_an_import_that_a_stream_does_not_train_on_says_so(tmp_path, capsys, mode, told):
    folder = train(settings(tmp_path, "run", f'mode = "{mode}"', "sync = { period = 2 }", steps=1))
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"prompt": "1+1=", "response": "2", "model": "t", "reward": 1.0}\n')
    assert main(["data", "import", str(folder), str(answers)]) == 0
    assert ("draw.policy = fresh does not train on imported rollouts" in capsys.readouterr().out) == told
