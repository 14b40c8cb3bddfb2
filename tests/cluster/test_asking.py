"""Requests to an engine in a Ray actor, many in one call: what arrives, what comes back, and what does not."""

import asyncio
import itertools
import os
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from solera.cluster.answering import Answering
from solera.cluster.answers import packed, unpacked
from solera.cluster.engines import ActorPool, EngineSpec, RemoteEngine
from solera.engines.faults import DivergedError, EngineError
from solera.engines.in_process import InProcessEngine
from solera.engines.jobs import Job, Written
from solera.errors import BadRequestError, SoleraError
from solera.protocols import Weights, Work
from solera.records import Completion, Sampling
from tests.cluster.hosts import seconds_until
from tests.cluster.test_engines import SOURCE, moved

PROMPTS = [(4 + n % 5, 5, 6 + n // 5) for n in range(8)]
SLOW, FAULTY = 9, 10
"""Prompts that begin so are decoded slowly, or make the engine fail."""
LONGEST = 50


class Watched(InProcessEngine):
    """Writes down how many jobs its decoder is offered together. Slow or faulty if it is asked to be. No token ends a
    response."""

    folder: Path

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        if token_ids[:1] == (FAULTY,):
            raise RuntimeError("a kernel\nfailed")
        return await super().generate(token_ids, sampling, seed)

    def watch(self) -> "Watched":
        admit, advance, slow = self.decoder.admit, self.decoder.advance, []

        def admit_watched(jobs: list[Job]) -> int:
            with (self.folder / "admitted").open("a") as file:
                print(len(jobs), len({job.token_ids for job in jobs}), file=file)
            slow.extend(job for job in jobs if job.token_ids[0] == SLOW)
            return admit(jobs)

        def advance_watched() -> list[Written]:
            if any(not job.cancelled for job in slow):
                time.sleep(0.2)
            return advance()

        self.decoder.admit, self.decoder.advance = admit_watched, advance_watched
        return self


@dataclass(frozen=True)
class WatchedSpec(EngineSpec):
    folder: Path = Path()

    def open(self, number: int) -> InProcessEngine:
        torch.set_num_threads(1)
        model, codec = self.source.load(torch.device("cpu"))
        engine = Watched(model, (), self.max_rows, self.compute, early=True, spell=codec.decode)
        engine.folder = self.folder
        return engine.watch()


class Counting:
    """An actor whose calls are counted."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.calls = actor, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.actor, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("asked")


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[ActorPool]:
    said: list[str] = []
    opened = ActorPool(
        WatchedSpec(SOURCE, torch.float32, 512, 1, folder=folder), 1, cpus=1, address=None, timeout=60.0,
        tell=lambda sampled: None, say=said.append,
    )  # fmt: skip
    opened.load(Weights("run", 1, iter(moved(1).items())))
    yield opened
    opened.close()


@pytest.fixture
def engine(pool: ActorPool) -> RemoteEngine:
    found = pool.members[0].engine
    assert isinstance(found, RemoteEngine)
    return found


@pytest.fixture(scope="module")
def here() -> InProcessEngine:
    model, codec = SOURCE.load(torch.device("cpu"))
    engine = InProcessEngine(model, (), 512, torch.float32, early=True, spell=codec.decode)
    engine.load(Weights("run", 1, iter(moved(1).items())))
    return engine


def assert_equal(one: Completion, other: Completion) -> None:
    assert one.token_ids_T.dtype == np.int32 and one.behaviour_logp_T.dtype == np.float32
    assert one.token_ids_T.tolist() == other.token_ids_T.tolist()
    assert np.allclose(one.behaviour_logp_T, other.behaviour_logp_T, atol=1e-5)
    of_one, of_other = ((c.versions, c.finish_reason, c.lineage, c.sampling, c.trained) for c in (one, other))
    assert of_one == of_other


async def asked(engine: Any, requests: list[tuple[Any, ...]]) -> list[Any]:
    return await asyncio.gather(*(engine.generate(*each) for each in requests), return_exceptions=True)


REQUESTS = [
    (PROMPTS[number // 64], Sampling(number % 3 / 2, 1 + number % 9, stop=("1",) if number % 4 else ()), number)
    for number in range(512)
]
cluster = pytest.mark.cluster


@cluster
def test_many_requests_are_one_call_and_one_batch_of_the_engine_and_get_the_answers_of_an_engine_here(
    engine, here, folder, monkeypatch
):
    counting = Counting(engine._actor)
    monkeypatch.setattr(engine._asking, "_actor", counting)
    (folder / "admitted").unlink(missing_ok=True)
    there = asyncio.run(asked(engine, REQUESTS))
    for one, other in zip(there, asyncio.run(asked(here, REQUESTS)), strict=True):
        assert_equal(one, other)
    assert {each.finish_reason for each in there} == {"stop", "length"}
    assert counting.calls["ask"] == 1 and counting.calls["answers"] <= 20, counting.calls
    assert (folder / "admitted").read_text().splitlines()[0] == "512 8"


@cluster
def test_requests_of_several_event_loops_are_answered_each_in_its_own(engine, here):
    expected = asyncio.run(asked(here, REQUESTS[:64]))
    found: dict[int, list[Completion]] = {}

    def ask(number: int) -> None:
        for _ in range(5):  # one of the loops always ends while others wait
            # With debug, asyncio refuses a future that is set in another thread.
            found[number] = asyncio.run(asked(engine, REQUESTS[:64]), debug=True)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(found) == [0, 1, 2]
    for one, other in itertools.chain(*(zip(each, expected, strict=True) for each in found.values())):
        assert_equal(one, other)


@cluster
def test_a_request_that_fails_does_not_fail_the_others_and_keeps_the_kind_of_its_error(engine):
    requests = [*REQUESTS[:4], ((100000,), Sampling(1.0, 4), 0), ((FAULTY, 5), Sampling(1.0, 4), 0), *REQUESTS[4:8]]
    *found, last = asyncio.run(asked(engine, requests))
    bad, faulty = found.pop(4), found.pop(4)
    assert all(isinstance(each, Completion) for each in (*found, last))
    assert type(bad) is BadRequestError and "token id 100000 is not one of the model's" in str(bad)
    assert type(faulty) is EngineError and str(faulty) == "RuntimeError: a kernel failed"


@cluster
def test_weights_that_have_diverged_are_told_apart_from_a_fault_of_the_engine(engine):
    wrong = {name: torch.full_like(each, torch.nan) for name, each in moved(1).items()}
    engine.load(Weights("run", 2, iter(wrong.items())))
    failed = asyncio.run(asked(engine, REQUESTS[:3]))
    engine.load(Weights("run", 1, iter(moved(1).items())))
    assert [type(each) for each in failed] == [DivergedError] * 3


SLOWLY = [((SLOW, 5, seed % 5 + 4), Sampling(1.0, LONGEST), seed) for seed in range(64)]


@cluster
@pytest.mark.parametrize("who", ["caller", "pool"])
def test_what_is_cancelled_is_not_written_any_more(pool, engine, who):
    before = engine.sampled

    async def cancel() -> None:
        work = asyncio.ensure_future(asked(engine, SLOWLY))
        await asyncio.sleep(1.5)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    async def be_late() -> None:
        late = [pool.members[0].ask(*each, lambda: pool._history, 1.5) for each in SLOWLY]
        for error in await asyncio.gather(*late, return_exceptions=True):
            assert type(error) is EngineError and "no answer within 1.5 s" in str(error)

    async def begin_and_wait() -> list[Any]:
        await (cancel() if who == "caller" else be_late())
        return await asked(engine, REQUESTS[:8])

    assert all(isinstance(each, Completion) for each in asyncio.run(begin_and_wait()))
    sampled = engine.sampled
    assert 64 <= sampled - before < 64 * LONGEST / 2
    time.sleep(1.0)  # several times what a token of the others takes
    assert engine.sampled == sampled and not engine._asking._waiting


@cluster
def test_the_death_of_the_actor_fails_all_its_requests_at_once(pool, engine):
    """The last test of this engine."""
    pid = int(pool.members[0].name.split("process ")[1].split()[0])

    async def kill() -> list[Any]:
        work = asyncio.ensure_future(asked(engine, SLOWLY))
        await asyncio.sleep(1.0)
        os.kill(pid, signal.SIGKILL)
        return await work

    began = time.monotonic()
    failed = asyncio.run(kill())
    assert time.monotonic() - began < 8  # far less than the time limit of a request
    said = r"died or cannot be reached \(Actor\w+Error; process"
    for error in [*failed, *asyncio.run(asked(engine, REQUESTS[:3]))]:
        with pytest.raises(EngineError, match=said):
            raise error
    assert not engine._asking._waiting
    engine.close()
    with pytest.raises(EngineError, match=r"^closed"):
        asyncio.run(engine.generate(*REQUESTS[0]))
    seconds_until(lambda: all(t.name != "solera-answers" for t in threading.enumerate()), 10, "the thread ends")


# -- without Ray -------------------------------------------------------------------------------------------------


def written(tokens: list[int], versions: tuple[tuple[int, int], ...], lineage: str, sampling: Sampling) -> Completion:
    logp_T = -np.arange(len(tokens), dtype=np.float32)
    return Completion(np.array(tokens, np.int32), logp_T, versions, "stop", lineage, sampling)


def test_answers_survive_packing_and_pickling_and_hold_no_memory_of_others():
    one, other = Sampling(1.0, 4), Sampling(0.5, 9, stop=("x",))
    outcomes = {
        7: written([3, 1], ((1, 4), (1, 5)), "run", one),
        2: BadRequestError("no"),
        9: written([], ((0, 5),), "run", one),
        3: written([8, 8, 2], ((3, 5),), "else", other),
    }
    answers = pickle.loads(pickle.dumps(packed(outcomes, 99, Work(tokens=5)), protocol=5))
    assert (answers.sampled, answers.work) == (99, Work(tokens=5))
    found = unpacked(answers, {7: one, 9: one, 3: other})
    assert found.keys() == outcomes.keys() and type(found[2]) is BadRequestError and str(found[2]) == "no"
    for number in (7, 9, 3):
        assert_equal(found[number], outcomes[number])
        assert found[number].token_ids_T.base is None and found[number].behaviour_logp_T.base is None
    assert unpacked(answers, {9: one}).keys() == {2, 9}  # nobody waits for the others
    assert not unpacked(packed({}, 0, Work()), {})


class Freeing(InProcessEngine):
    freed = 0

    def free(self) -> None:
        super().free()
        self.freed += 1


@pytest.fixture
def freeing() -> Freeing:
    model, codec = SOURCE.load(torch.device("cpu"))
    return Freeing(model, codec.end_token_ids, 64, torch.float32, early=True, spell=codec.decode)


def requests_of(count: int, first: int = 0) -> list[Any]:
    return [(number, PROMPTS[0], Sampling(1.0, 5), number) for number in range(first, first + count)]


async def fetched(answering: Answering, count: int) -> dict[int, Completion | SoleraError]:
    found: dict[int, Completion | SoleraError] = {}
    while len(found) < count:
        found |= unpacked(await answering.answers(), dict.fromkeys(range(count), Sampling(1.0, 5)))
    return found


@pytest.mark.parametrize("frees", [True, False])
def test_the_engine_frees_its_memory_before_the_last_answer_and_after_cancellation(freeing, frees):
    async def ask() -> list[int]:
        answering, freed = Answering(freeing, frees), []
        answering.ask(requests_of(8), ())
        await fetched(answering, 8)
        freed.append(freeing.freed)
        answering.ask(requests_of(8, first=8), ())
        await asyncio.sleep(0)
        answering.ask((), range(8, 16))
        await asyncio.sleep(1)
        freed.append(freeing.freed)
        assert not answering._writing
        return freed

    assert asyncio.run(ask()) == ([1, 2] if frees else [0, 0])


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_engine_that_cannot_free_its_memory_says_so_to_this_request_and_to_later_ones(freeing, cancelled):
    def fail() -> None:
        raise RuntimeError("an illegal\nmemory access")

    async def ask() -> list[Any]:
        answering = Answering(freeing, True)
        freeing.free = fail
        answering.ask(requests_of(1), ())
        if cancelled:
            await asyncio.sleep(0)
            answering.ask((), (0,))
            while answering._writing:
                await asyncio.sleep(0.01)
            answering.ask(requests_of(1), ())
        first = await asyncio.wait_for(fetched(answering, 1), 30)
        del freeing.free  # it could free its memory again, but is not trusted until it is opened again
        answering.ask(requests_of(1), ())
        return [first[0], (await asyncio.wait_for(fetched(answering, 1), 30))[0]]

    for error in asyncio.run(ask()):
        with pytest.raises(EngineError, match=r"^could not free its memory: RuntimeError: an illegal memory access$"):
            raise error


def test_a_request_that_was_cancelled_before_it_came_is_not_begun(freeing):
    async def ask() -> dict[int, Any]:
        answering = Answering(freeing, False)
        answering.ask((), (0, 2))
        answering.ask(requests_of(4), ())
        assert answering._writing.keys() == {1, 3}
        answering.ask((), (3,))  # its task has not begun
        await asyncio.sleep(0.5)
        assert not answering._writing
        return unpacked(await answering.answers(), dict.fromkeys(range(4), Sampling(1.0, 5)))

    assert asyncio.run(ask()).keys() == {1}


def test_answers_go_to_the_call_that_came_last(freeing):
    """The controller calls again only if it has lost the connection of the call before."""

    async def ask() -> None:
        answering = Answering(freeing, False)
        lost = asyncio.ensure_future(answering.answers())
        await asyncio.sleep(0)
        answering.ask(requests_of(1), ())
        assert (await fetched(answering, 1)).keys() == {0}
        assert (await lost).numbers == []

    asyncio.run(ask())
