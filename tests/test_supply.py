"""The lock-step supply: pacing, seeds, and one error where many attempts fail together."""

import asyncio
import threading
import time

import numpy as np
import pytest

from solera.protocols import Work
from solera.records import Completion, PolicyVersion, Prompt, Reward, Rollout, Sampling
from solera.streams import stream_seed
from solera.tasks.episodes import STOP, attempt_all
from solera.training.supply import LockStep, attempt_seeds

SAMPLING = Sampling(1.0, 4)

NOW = PolicyVersion("test", 0)


class Echo:
    """A task that answers at once, and an engine that notes what it was asked."""

    work = Work()

    def __init__(self):
        self.asked: list[tuple[tuple[int, ...], int]] = []

    def prompt(self, index: int) -> Prompt:
        return Prompt(f"p/{index}", (index + 2, 3))

    async def run(self, prompt, generate) -> Rollout:
        return Rollout.of(prompt, await generate(prompt.token_ids), rewards=(Reward(1.0),))

    async def generate(self, token_ids, sampling, seed) -> Completion:
        self.asked.append((token_ids, seed))
        return Completion(np.array([1], np.int32), np.zeros(1, np.float32), ((1, 0),), "stop", lineage="test")


class Counting:
    """A store that only counts."""

    selective = False

    def __init__(self, held: int):
        self.held = held
        self.added: list[Rollout] = []

    def missing(self, groups: int, group_size: int, reserve: int, now: PolicyVersion) -> int:
        return groups + reserve - self.held

    def add(self, rollouts: list[Rollout]) -> list[int]:
        self.added += rollouts
        self.held += len(rollouts) // 3
        return []

    def flush(self) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize(("held", "reserve", "generated"), [(0, 0, 5), (3, 0, 2), (5, 0, 0), (9, 0, 0), (4, 10, 11)])
def test_only_what_is_missing_is_generated(held, reserve, generated):
    task, store = Echo(), Counting(held)
    supply = LockStep(task, task, store, sampling=SAMPLING, group_size=3, reserve=reserve, seed=0)
    assert supply.wait(5, NOW) == 3 * generated
    assert [r.prompt_key for r in store.added] == [f"p/{i}" for i in range(generated) for _ in range(3)]
    assert [r.admission for r in store.added] == [i for i in range(generated) for _ in range(3)]
    assert supply.position == generated


@pytest.mark.parametrize(
    ("held", "written_ahead", "missing", "written"),
    [(0, 5, 5, 0), (3, 2, 2, 0), (3, 2, 5, 5), (0, 5, 2, 2), (0, 5, 7, 7), (0, 5, 0, 0)],
)
def test_what_was_begun_is_taken_whole_or_not_at_all(held, written_ahead, missing, written):
    """As many as were missing before are attempted ahead; the store gets the stream in its order, each problem once."""
    task, store = Echo(), Counting(held)
    supply = LockStep(task, task, store, sampling=SAMPLING, group_size=3, reserve=0, seed=0)
    supply.wait(5, NOW)
    before, store.held = len(task.asked), 0
    first = supply.position
    supply.drawn([], 9)
    store.held = 7 - missing
    supply.wait(7, NOW)
    assert [r.prompt_key for r in store.added][3 * first :] == [
        f"p/{i}" for i in range(first, first + missing) for _ in range(3)
    ]
    assert all(r.prompt_key == f"p/{r.admission}" for r in store.added)
    assert len(task.asked) - before == 3 * (written_ahead + written)
    assert supply.position == first + missing
    supply.close()


@pytest.mark.parametrize(("missing", "discarded"), [(5, 0), (3, 15), (7, 15), (0, 15)])
def test_tokens_written_ahead_and_not_needed_are_discarded_once(missing, discarded):
    """Five groups of three responses with one token each. Where none is missing, an import has filled the store."""
    task, store, told = Echo(), Counting(0), list[int]()
    guard = STOP.discarding(told.append)
    supply = LockStep(task, task, store, sampling=SAMPLING, group_size=3, reserve=0, seed=0, guard=guard)
    supply.wait(5, NOW)
    supply.drawn([], 5)
    store.held = 7 - missing
    supply.wait(7, NOW)
    assert sum(told) == discarded
    supply.close()


def test_nothing_is_begun_where_nothing_was_missing():
    task, store = Echo(), Counting(5)
    supply = LockStep(task, task, store, sampling=SAMPLING, group_size=3, reserve=0, seed=0)
    supply.wait(5, NOW)
    supply.drawn([], 5)
    supply.close()
    assert not task.asked


def test_attempts_begun_run_in_a_thread_of_their_own_and_their_error_comes_with_the_next_batch():
    task, store, threads = Echo(), Counting(0), []

    async def failing(prompt, generate):
        threads.append(threading.current_thread())
        raise ValueError("no answer")

    supply = LockStep(task, task, store, sampling=SAMPLING, group_size=3, reserve=0, seed=0)
    supply.wait(5, NOW)
    task.run = failing
    supply.drawn([], 5)
    supply.close()
    assert threading.main_thread() not in threads
    assert threads
    with pytest.raises(ValueError, match="no answer"):
        supply.wait(9, NOW)


async def ungraded(prompt, generate) -> Rollout:
    return Rollout.of(prompt, await generate(prompt.token_ids))


def test_ungraded_groups_are_replaced_a_few_times_over():
    task, store = Echo(), Counting(0)
    store.add = store.added.extend  # nothing ever becomes drawable
    task.run = ungraded
    LockStep(task, task, store, sampling=SAMPLING, group_size=3, reserve=0, seed=0).wait(5, NOW)
    assert len(store.added) == 4 * 5 * 3


def test_groups_that_a_selective_store_passes_over_are_replaced():
    task, store = Echo(), Counting(0)
    store.selective = True
    real, kept = store.add, iter((2, 1, 9))
    store.add = lambda rollouts: real(rollouts[: 3 * next(kept)])  # of 5 groups 2 are drawable, of the next 3 one
    LockStep(task, task, store, sampling=SAMPLING, group_size=3, reserve=0, seed=0).wait(5, NOW)
    assert [r.prompt_key for r in store.added][::3] == ["p/0", "p/1", "p/5", "p/8", "p/9"]


def test_nobody_waits_long_at_the_end_for_a_batch_that_does_not_come(monkeypatch):
    task, store = Echo(), Counting(0)
    supply = LockStep(task, task, store, sampling=SAMPLING, group_size=3, reserve=0, seed=0)
    supply.wait(5, NOW)
    never = threading.Event()

    async def hanging(prompt, generate):
        never.wait(60)

    task.run = hanging
    monkeypatch.setattr("solera.training.supply.PATIENCE", 0.1)
    supply.drawn([], 5)
    start = time.monotonic()
    supply.close()
    assert time.monotonic() - start < 10
    never.set()


def test_text_given_between_turns_may_be_any_run_of_numbers():
    completion = Completion(np.array([7], np.int32), np.zeros(1, np.float32), ((1, 0),), "stop")
    for given in ((4, 5), [4, 5], np.array([4, 5])):
        rollout = Rollout.of(Prompt("p", (2, 3)), completion, given, completion)
        assert rollout.sequences[0].token_ids_T.tolist() == [2, 3, 7, 4, 5, 7]


def test_every_attempt_has_a_seed_of_its_own():
    task, store = Echo(), Counting(0)
    LockStep(task, task, store, sampling=SAMPLING, group_size=8, reserve=0, seed=1).wait(100, NOW)
    assert len({seed for _, seed in task.asked}) == 800
    assert len({stream_seed(a, b) for a in range(100) for b in range(100)}) == 10_000


def test_one_error_speaks_for_all(capfd):
    task = Echo()
    error = RuntimeError("out of memory")

    async def broken(token_ids, sampling, seed):
        await asyncio.sleep(0)
        raise error

    task.generate = broken
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        attempt_all(task, task, [(task.prompt(i), i) for i in range(300)], SAMPLING)
    assert raised.value.__notes__ == ["while attempting prompt 'p/0'"]
    assert capfd.readouterr() == ("", "")


def test_completions_are_told_apart_and_can_be_looked_up():
    """They hold arrays, which Python compares to arrays and not to yes or no."""
    first, second = (Completion(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), ((3, 0),), "stop") for _ in "ab")
    assert first != second
    assert [first, second].index(second) == 1
    assert [first, second].count(first) == 1
    assert {first: 1, second: 2}[second] == 2


@pytest.mark.parametrize(("host_is_free", "requests"), [(True, 15), (False, 0)])
def test_the_store_writes_while_a_gpu_decodes_and_before_a_cpu_does(host_is_free, requests):
    task, store, asked = Echo(), Counting(0), list[int]()
    store.flush = lambda: asked.append(len(task.asked))
    supply = LockStep(
        task, task, store, sampling=SAMPLING, group_size=3, reserve=0, seed=0, host_is_free=host_is_free
    )  # fmt: skip
    supply.wait(5, NOW)
    assert asked == [requests]
    supply.wait(5, NOW)  # enough is there: nothing is generated, and nothing is waited for
    assert asked == [requests, 15]


def test_the_store_writes_before_the_wait_for_what_was_begun():
    class Waiting(Echo):
        async def generate(self, token_ids, sampling, seed) -> Completion:
            assert flushed.wait(timeout=10)
            return await super().generate(token_ids, sampling, seed)

    flushed = threading.Event()
    flushed.set()
    task, store = Waiting(), Counting(0)
    supply = LockStep(task, task, store, sampling=SAMPLING, group_size=3, reserve=0, seed=0)
    supply.wait(5, NOW)
    flushed.clear()
    store.held, store.flush = 0, flushed.set
    supply.drawn([], 5)
    assert supply.wait(5, NOW) == 15


def test_the_seed_of_an_attempt_depends_on_run_problem_and_member_only():
    expected = [[stream_seed(stream_seed(7, number), member) for member in range(3)] for number in (4, 90)]
    assert attempt_seeds(7, [4, 90], 3) == expected
    assert attempt_seeds(7, [90], 2) == [expected[1][:2]]
    assert attempt_seeds(7, [], 3) == []
