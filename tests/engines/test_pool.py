"""Several engines as one: real in-process engines, behind wrappers that fail in every way that a server can."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from solera.config import InFlight, LearnConfig, ObjectiveConfig
from solera.engines import pool as pooling
from solera.engines.faults import DivergedError, EngineError, NoEngineError, TakenError
from solera.engines.in_process import InProcessEngine
from solera.engines.member import Opened
from solera.engines.pool import EnginePool
from solera.errors import BadRequestError, SoleraError
from solera.learner.learner import Learner
from solera.models.language_model import LanguageModel
from solera.objectives.objective import compose
from solera.objectives.table import resolve
from solera.protocols import Weights, Work
from solera.records import Completion, Manifest, Prompt, Sampling
from solera.sync.proof import SyncFaultError
from solera.tasks.event_loop import EventLoop
from solera.training.delivery import Delivery
from tests.conftest import END
from tests.engines.test_in_flight import some_versions
from tests.engines.test_in_process import fresh_logp, ragged_requests

SAMPLING = Sampling(1.0, 12)
TIMEOUT = 1.0
"""Seconds for an answer in tests about late ones. In the others it may take a minute, because machines are busy."""
PROMPTS = [Prompt("a", (3, 4, 5)), Prompt("b", (6, 7))]


class Shaky:
    """A real engine that fails as soon as one of its fields says so. Opening it again heals it, unless `broken`."""

    def __init__(self, model: LanguageModel, slots: int = 64) -> None:
        self.engine = InProcessEngine(model.copy(torch.float32), (END,), slots, torch.float32, early=True)
        self.dtype, self.slots = self.engine.dtype, slots
        self.spoil: Callable[[Completion], Completion] | None = None
        self.raises: Exception | None = None
        self.refuses: Exception | None = None
        self.hangs = self.broken = False
        self.pretends = False
        """Says that it holds new weights, and keeps the old ones."""
        self.pause = 0.0
        self.waits: Callable[[], bool] = lambda: False
        self.asked = list[tuple[int, ...]]()
        self.at_once = self.most = 0
        self.closed = False

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def work(self) -> Work:
        return self.engine.work

    @property
    def sampled(self) -> int:
        return self.engine.sampled

    def load(self, weights: Weights, in_flight: InFlight = "drain") -> Manifest:
        if self.refuses is not None:
            raise self.refuses
        if not self.pretends:
            return self.engine.load(weights, in_flight)
        from solera.models.digest import describe

        self.engine.held = Manifest(weights.lineage, weights.version, describe(weights.tensors))
        return self.engine.held

    def weights(self) -> Weights:
        return self.engine.weights()

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        self.asked.append(token_ids)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            if self.raises is not None:
                raise self.raises
            if self.hangs:
                await asyncio.Event().wait()
            if self.pause:
                await asyncio.sleep(self.pause)
            while self.waits():
                await asyncio.sleep(0.001)
            completion = await self.engine.generate(token_ids, sampling, seed)
            return self.spoil(completion) if self.spoil else completion
        finally:
            self.at_once -= 1

    def close(self) -> None:
        self.closed = True


class Crowd:
    """A pool of shaky engines. `engines[i]` is the one that was opened last in place i."""

    def __init__(self, model: LanguageModel, count: int, slots: int = 64, ahead: int = 0) -> None:
        self.model = model
        self.ahead = ahead
        self.said = list[str]()
        self.engines: list[Shaky] = [None] * count  # type: ignore[list-item]
        self.opened = [0] * count
        self.broken = [False] * count
        self.slots = slots
        self.pool = EnginePool(
            [lambda place=place: self.open(place) for place in range(count)], timeout=60.0, say=self.said.append
        )
        self.events = EventLoop()

    def allow(self, seconds: float) -> None:
        for timed in (self.pool, *self.pool.members):
            timed.timeout = seconds

    def open(self, place: int) -> Opened:
        if self.broken[place]:
            raise EngineError(f"http://engine-{place}: ConnectError: refused")
        self.engines[place] = Shaky(self.model, self.slots)
        self.opened[place] += 1
        return Opened(f"http://engine-{place}", self.engines[place], self.ahead)

    def publish(self, version: int, model: LanguageModel | None = None, in_flight: InFlight = "drain") -> Manifest:
        tensors = (model or self.model).parameters()
        return self.pool.load(Weights("run", version, iter(tensors.items())), in_flight)

    def ask(self, requests) -> list[Completion]:
        async def gather() -> list[Completion]:
            return await asyncio.gather(*(self.pool.generate(*request) for request in requests))

        return self.events.run(gather())

    def until(self, holds: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)

    def close(self) -> None:
        self.pool.close()
        self.events.close()


@pytest.fixture
def model(tiny: LanguageModel) -> LanguageModel:
    return tiny.copy(torch.float32)


@pytest.fixture
def crowd(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    monkeypatch.setattr(pooling, "REOPEN", 0.02)
    made = Crowd(model, 3)
    made.publish(0)
    yield made
    made.close()


@pytest.fixture
def impatient(crowd: Crowd) -> Crowd:
    crowd.allow(TIMEOUT)
    return crowd


def requests(count: int = 6, group: int = 4):
    return ragged_requests(count, group, SAMPLING)


def all_right(asked, completions: list[Completion], model: LanguageModel, version: int = 0) -> None:
    """Each answer belongs to its own request: the tokens that this seed gives, by a forward pass of this model."""
    alone = InProcessEngine(model.copy(torch.float32), (END,), 64, torch.float32)
    alone.load(Weights("run", version, iter(())))

    async def gather() -> list[Completion]:
        return await asyncio.gather(*(alone.generate(*request) for request in asked))

    for (prompt, _, _), completion, expected in zip(asked, completions, asyncio.run(gather()), strict=True):
        assert completion.token_ids_T.tolist() == expected.token_ids_T.tolist()
        assert completion.versions == ((len(completion.token_ids_T), version),)
        expected_T = fresh_logp(model, prompt, completion, SAMPLING.temperature)
        assert np.abs(completion.behaviour_logp_T - expected_T).max() < 1e-4


def test_several_engines_answer_as_one(crowd: Crowd, model: LanguageModel) -> None:
    asked = requests()
    all_right(asked, crowd.ask(asked), model)
    assert crowd.pool.slots == 3 * 64 and crowd.pool.version == 0
    assert all(engine.asked for engine in crowd.engines)
    assert crowd.pool.work.tokens == sum(engine.work.tokens for engine in crowd.engines)
    assert crowd.said == []


def test_a_group_goes_to_one_engine_and_groups_are_spread(crowd: Crowd) -> None:
    crowd.ask(requests(count=9, group=8))
    where = [Counter(engine.asked) for engine in crowd.engines]
    prompts = {prompt for prompt, _, _ in requests(9, 8)}
    for prompt in prompts:
        assert sum(prompt in count for count in where) == 1
    assert max(map(Counter.total, where)) <= 2 * min(map(Counter.total, where))


def test_a_long_shared_prefix_goes_where_it_is_known(crowd: Crowd) -> None:
    """A second turn repeats the first and adds a little."""
    first = [tuple(int(t) for t in np.random.default_rng(n).integers(2, 11, 48)) for n in range(6)]
    crowd.ask([(text, SAMPLING, 0) for text in first])
    home = [next(n for n, engine in enumerate(crowd.engines) if text in engine.asked) for text in first]
    assert len(set(home)) == 3
    for text, place in zip(first, home, strict=True):
        crowd.ask([((*text, 4, 5, 6, 7), SAMPLING, 1)])
        assert (*text, 4, 5, 6, 7) in crowd.engines[place].asked


@pytest.mark.parametrize("ahead", [0, 2])
def test_no_engine_gets_more_than_its_slots_and_what_may_wait_there_and_none_stays_idle(
    model: LanguageModel, ahead: int
) -> None:
    crowd = Crowd(model, 2, slots=3, ahead=ahead)
    crowd.publish(0)
    for engine in crowd.engines:
        engine.pause = 0.02
    asked = requests(count=1, group=20)  # one group: where load allows, all to one engine
    all_right(asked, crowd.ask(asked), model)
    assert [engine.most for engine in crowd.engines] == [3 + ahead, 3 + ahead]
    assert crowd.pool.slots == 6
    crowd.close()


def test_requests_that_are_cancelled_while_they_wait_make_way(model: LanguageModel) -> None:
    crowd = Crowd(model, 1, slots=1)
    crowd.publish(0)
    crowd.engines[0].pause = 0.05
    asked = requests(count=4, group=2)

    async def some() -> list[Completion]:
        tasks = [asyncio.ensure_future(crowd.pool.generate(*request)) for request in asked]
        await asyncio.sleep(0.02)
        for task in tasks[1::2]:
            task.cancel()
        return await asyncio.gather(*tasks[::2])

    all_right(asked[::2], crowd.events.run(some()), model)
    assert crowd.pool.members[0].waiting == 0
    crowd.close()


def dead(engine: Shaky) -> None:
    engine.raises = ConnectionError("reset by peer")


def hanging(engine: Shaky) -> None:
    engine.hangs = True


def too_long(engine: Shaky) -> None:
    more = np.ones(20, np.int32)
    engine.spoil = lambda _: Completion(more, -more.astype(np.float32), ((20, 0),), "length", "run", SAMPLING)


def another_version(engine: Shaky) -> None:
    engine.spoil = lambda c: replace(c, versions=((len(c.token_ids_T), 7),))


def another_run(engine: Shaky) -> None:
    engine.spoil = lambda c: replace(c, lineage="other")


@pytest.mark.parametrize("fails", [dead, hanging, too_long, another_version, another_run])
def test_an_engine_that_fails_is_set_aside_and_comes_back(
    crowd: Crowd, model: LanguageModel, fails: Callable[[Shaky], None]
) -> None:
    fails(crowd.engines[1])
    if fails is hanging:
        crowd.allow(TIMEOUT)
    asked = requests()
    all_right(asked, crowd.ask(asked), model)
    crowd.until(lambda: any("is back" in sentence for sentence in crowd.said))
    assert crowd.opened == [1, 2, 1]
    assert crowd.said[0].startswith("http://engine-1 is set aside: ")
    assert crowd.said[1:] == ["http://engine-1 is back with the weights of version 0"]
    metrics = crowd.pool.take_metrics()
    assert (metrics["engine/1/set_aside"], metrics["engine/1/restarts"]) == (1, 1)
    assert metrics["engine/1/retries"] >= 1 and metrics["engine/0/retries"] == 0
    before = len(crowd.engines[1].asked)
    again = ragged_requests(12, 4, SAMPLING)
    all_right(again, crowd.ask(again), model)
    assert len(crowd.engines[1].asked) > before  # it works again


def test_a_slow_answer_does_not_set_the_engine_aside(impatient: Crowd, model: LanguageModel) -> None:
    """It answers the short request that follows."""
    slow = iter([True])
    plain = impatient.engines[0].generate

    async def once_slow(token_ids, sampling, seed):
        if next(slow, False):
            await asyncio.sleep(10 * TIMEOUT)
        return await plain(token_ids, sampling, seed)

    impatient.engines[0].generate = once_slow  # type: ignore[method-assign]
    asked = requests()
    all_right(asked, impatient.ask(asked), model)
    impatient.until(lambda: impatient.pool.members[0].state == "serving")
    metrics = impatient.pool.take_metrics()
    assert (metrics["engine/0/retries"], metrics["engine/0/set_aside"]) == (1, 0)
    assert impatient.opened == [1, 1, 1] and impatient.said == []


def test_a_request_that_no_engine_can_serve_concerns_only_itself(crowd: Crowd) -> None:
    with pytest.raises(BadRequestError, match="token id 99"):
        crowd.ask([((99,), SAMPLING, 0)])
    assert crowd.said == [] and all(member.state == "serving" for member in crowd.pool.members)


def test_weights_that_diverged_are_nobodys_fault(crowd: Crowd, model: LanguageModel) -> None:
    with torch.no_grad():
        spoiled = model.copy(torch.float32)
        for parameter in spoiled.parameters().values():
            parameter.mul_(torch.nan)
    crowd.publish(1, spoiled)
    with pytest.raises(DivergedError, match="have diverged"):
        crowd.ask(requests(1, 1))
    assert crowd.said == []


def test_a_request_that_always_fails_ends_with_its_error(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "BACK_OFF", 0.001)
    poison = (9, 9, 9)
    for engine in crowd.engines:
        plain = engine.generate

        async def picky(token_ids, sampling, seed, plain=plain):
            if token_ids == poison and sampling.max_tokens > 1:
                raise ValueError("a bug in the server")
            return await plain(token_ids, sampling, seed)

        engine.generate = picky  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"failed 5 times; the last time: http://engine-\d: ValueError: a bug"):
        crowd.ask([(poison, SAMPLING, 0)])


def test_none_left_is_one_line_that_names_every_engine(impatient: Crowd) -> None:
    impatient.broken = [True] * 3
    for engine in impatient.engines:
        dead(engine)
    start = time.monotonic()
    with pytest.raises(NoEngineError) as left:
        impatient.ask(requests())
    assert time.monotonic() - start > TIMEOUT  # it waits for a while
    said = str(left.value)
    assert said.startswith("no engine is left: ") and "\n" not in said
    assert all(said.count(f"http://engine-{place}: ConnectError: refused") == 1 for place in range(3))


def test_a_run_that_ends_while_its_requests_are_woken_is_no_error(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last engine is given up in a thread of its own. The run ends, and its event loop closes, at the same time."""
    for member in crowd.pool.members:
        member.waiting = member.limit
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(crowd.pool.roster.enter((3, 4, 5)))
    loop.run_until_complete(asyncio.sleep(0))

    def closed_right_after() -> bool:
        monkeypatch.undo()
        waiting.cancel()
        loop.run_until_complete(asyncio.gather(waiting, return_exceptions=True))
        loop.close()
        return False

    monkeypatch.setattr(loop, "is_closed", closed_right_after)
    crowd.pool.roster.wake()
    assert loop.is_closed() and waiting.cancelled()


def test_a_run_waits_for_its_only_engine(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "REOPEN", 0.05)
    crowd = Crowd(model, 1)
    crowd.publish(0)
    dead(crowd.engines[0])
    crowd.broken = [True]
    threading.Timer(0.4, lambda: crowd.broken.__setitem__(0, False)).start()
    asked = requests()
    all_right(asked, crowd.ask(asked), model)
    crowd.close()


def test_an_engine_that_somebody_else_uses_is_left_to_them(crowd: Crowd, model: LanguageModel) -> None:
    crowd.engines[2].raises = TakenError("http://engine-2: somebody else uses it")
    asked = requests()
    all_right(asked, crowd.ask(asked), model)
    crowd.until(lambda: bool(crowd.said))
    time.sleep(0.2)
    assert crowd.said == ["http://engine-2 is set aside: somebody else uses it"]
    assert crowd.opened == [1, 1, 1]


# -- weights ----------------------------------------------------------------------------------------------------------


def test_an_engine_that_misses_a_sync_gets_the_weights_before_it_serves_again(
    crowd: Crowd, model: LanguageModel
) -> None:
    versions = some_versions(model)
    crowd.engines[1].refuses = EngineError("http://engine-1: ReadTimeout")
    manifest = crowd.publish(1, versions[1])
    assert (manifest.version, crowd.pool.version) == (1, 1)
    asked = requests()
    all_right(asked, crowd.ask(asked), versions[1], 1)
    crowd.until(lambda: len(crowd.said) == 2)
    assert crowd.said == [
        "http://engine-1 is set aside: it missed the sync of version 1: ReadTimeout; trying to bring it back",
        "http://engine-1 is back with the weights of version 1",
    ]
    more = ragged_requests(12, 4, SAMPLING)
    all_right(more, crowd.ask(more), versions[1], 1)
    assert crowd.engines[1].asked


def fails_half_way(engine: Shaky) -> None:
    engine.refuses = EngineError("http://engine-0: CUDA out of memory")


def holds_something_else(engine: Shaky) -> None:
    plain = engine.load

    def load(weights: Weights, in_flight: InFlight = "drain") -> Manifest:
        held = plain(weights, in_flight)
        first, *others = held.tensors
        return replace(held, tensors=(first._replace(digest=first.digest + 1), *others))

    engine.load = load  # type: ignore[method-assign]


def before_load(engine: Shaky, do: Callable[[], object]) -> None:
    plain = engine.load

    def load(weights: Weights, in_flight: InFlight = "drain") -> Manifest:
        do()
        return plain(weights, in_flight)

    engine.load = load  # type: ignore[method-assign]


@pytest.mark.parametrize("fails", [fails_half_way, holds_something_else])
def test_nothing_comes_from_an_engine_whose_load_failed_while_another_one_still_loads(
    crowd: Crowd, model: LanguageModel, fails: Callable[[Shaky], None]
) -> None:
    """Neither what it was writing at that moment nor what is asked later."""
    suspect, failing, go_on = crowd.engines[0], threading.Event(), threading.Event()
    fails(suspect)
    before_load(suspect, failing.set)
    before_load(crowd.engines[1], lambda: go_on.wait(20))
    suspect.pause = 0.8
    early = crowd.events.begin(crowd.pool.generate((3, 4, 5), SAMPLING, 1))
    crowd.until(lambda: suspect.asked == [(3, 4, 5)])
    syncing = threading.Thread(target=crowd.publish, args=(1, some_versions(model)[1]))
    syncing.start()
    assert failing.wait(20)
    crowd.until(lambda: any((3, 4, 5) in other.asked for other in crowd.engines[1:]))
    crowd.ask(requests(count=9))
    assert suspect.asked == [(3, 4, 5)] and early.result() and syncing.is_alive()
    go_on.set()
    syncing.join()
    crowd.until(lambda: len(crowd.said) == 2)
    assert crowd.said[0].startswith("http://engine-0 is set aside: it missed the sync of version 1: ")
    assert crowd.said[1] == "http://engine-0 is back with the weights of version 1"


def test_requests_wait_while_all_engines_refuse_weights_and_go_on_then(crowd: Crowd, model: LanguageModel) -> None:
    """Two have refused them already, and the third takes its time."""
    refusing, go_on = threading.Event(), threading.Event()
    for engine in crowd.engines:
        engine.refuses = SyncFaultError("tensor x has values that are not finite")
    before_load(crowd.engines[2], lambda: (refusing.set(), go_on.wait(20)))

    def sync() -> None:
        with pytest.raises(SyncFaultError, match="not finite"):
            crowd.publish(1)

    syncing = threading.Thread(target=sync)
    syncing.start()
    assert refusing.wait(20)
    asked = requests()
    begun = crowd.events.begin(crowd.pool.generate(*asked[0]))
    go_on.set()
    syncing.join()
    all_right(asked[:1], [begun.result()], model)
    all_right(asked, crowd.ask(asked), model)
    assert crowd.said == [] and all(engine.asked for engine in crowd.engines)


def test_an_engine_that_is_away_during_a_sync_comes_back_with_the_newest_weights(
    crowd: Crowd, model: LanguageModel
) -> None:
    versions = some_versions(model)
    crowd.broken[0] = True
    dead(crowd.engines[0])
    crowd.ask(requests())
    for version in (1, 2):
        crowd.publish(version, versions[version])
    crowd.broken[0] = False
    crowd.until(lambda: crowd.pool.members[0].state == "serving")
    assert crowd.engines[0].version == 2
    asked = ragged_requests(12, 4, SAMPLING)
    all_right(asked, crowd.ask(asked), versions[2], 2)
    assert crowd.engines[0].asked


def test_an_engine_catches_up_however_often_weights_are_published(crowd: Crowd, model: LanguageModel) -> None:
    """Loading takes longer than the time between two syncs."""
    plain = crowd.open

    def slow(place: int) -> Opened:
        opened = plain(place)
        load = opened.engine.load

        def later(weights: Weights, in_flight: InFlight = "drain") -> Manifest:
            time.sleep(0.1)
            return load(weights, in_flight)

        crowd.engines[place].load = later  # type: ignore[method-assign]
        return opened

    crowd.pool.opens = [lambda place=place: slow(place) for place in range(3)]
    dead(crowd.engines[0])
    crowd.ask(requests())
    for version in range(1, 60):
        crowd.publish(version)
        if crowd.pool.members[0].state == "serving":
            break
    assert version < 59
    crowd.publish(version + 1)
    assert crowd.engines[0].version == version + 1


def test_weights_of_long_ago_are_forgotten_and_a_response_may_still_have_newer_ones(
    crowd: Crowd, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response that began with version 2 and ends while version 7 is the last."""
    monkeypatch.setattr(pooling, "REMEMBERED", 3)
    for version in (1, 2):
        crowd.publish(version)
    first, claims = crowd.engines[0], [(1, 5), (1, 7)]
    syncing = [True]
    first.waits, first.spoil = lambda: bool(syncing), lambda completion: claiming(completion, claims)
    begun = crowd.events.begin(crowd.pool.generate((3, 4, 5), SAMPLING, 1))
    crowd.until(lambda: bool(first.asked))
    for version in range(3, 8):
        crowd.publish(version, in_flight="keep")
    syncing.clear()
    assert begun.result().versions == ((1, 5), (1, 7)) and crowd.said == []
    assert [each.version for each in crowd.pool._history] == [5, 6, 7]
    claims[:] = [(1, 6), (1, 7)]  # begun after version 7: it cannot have 6
    crowd.ask([((3, 4, 5), SAMPLING, 2)])
    crowd.until(lambda: bool(crowd.said))
    assert "it wrote with version 6, which it should not hold" in crowd.said[0]


def claiming(completion: Completion, versions: list[tuple[int, int]]) -> Completion:
    """The first tokens of an answer, with these versions."""
    tokens = len(versions)
    ids_T, logp_T = completion.token_ids_T[:tokens], completion.behaviour_logp_T[:tokens]
    return replace(completion, token_ids_T=ids_T, behaviour_logp_T=logp_T, versions=tuple(versions))


def test_weights_that_all_refuse_are_refused(crowd: Crowd, model: LanguageModel) -> None:
    for engine in crowd.engines:
        engine.refuses = SyncFaultError("tensor x has values that are not finite")
    with pytest.raises(SyncFaultError, match="not finite"):
        crowd.publish(1)
    asked = requests()
    all_right(asked, crowd.ask(asked), model)  # the old ones go on
    assert crowd.pool.version == 0 and crowd.said == []


def test_a_full_disk_or_a_wrong_setting_is_nobodys_fault(crowd: Crowd) -> None:
    for error in (OSError(28, "No space left on device"), SoleraError("sync.in_flight is keep")):
        crowd.engines[0].refuses = error
        with pytest.raises(type(error), match=str(error.args[-1])):
            crowd.publish(1)
    assert crowd.said == []


def test_weights_that_no_engine_takes_are_not_sent_for_ever(crowd: Crowd) -> None:
    """Each engine comes back with the old weights, and fails with the new ones."""

    def only_the_old(engine: Shaky) -> None:
        plain = engine.load

        def load(weights: Weights, in_flight: InFlight = "drain") -> Manifest:
            if weights.version:
                raise RuntimeError("cannot read version 1")
            return plain(weights, in_flight)

        engine.load = load  # type: ignore[method-assign]

    def reopen(place: int) -> Opened:
        opened = crowd.open(place)
        only_the_old(crowd.engines[place])
        return opened

    for engine in crowd.engines:
        only_the_old(engine)
    crowd.pool.opens = [lambda place=place: reopen(place) for place in range(3)]
    with pytest.raises(EngineError, match=r"sync of version 1 failed 5 times: http://engine-\d: cannot read version 1"):
        crowd.publish(1)


def test_the_weights_of_a_pool_survive_all_its_engines(crowd: Crowd, model: LanguageModel) -> None:
    for engine in crowd.engines:
        engine.close()
    kept = crowd.pool.weights()
    assert (kept.lineage, kept.version) == ("run", 0)
    assert all(torch.equal(tensor, model.parameters()[name]) for name, tensor in kept.tensors)


@pytest.mark.parametrize("in_flight", ["keep", "drain"])
def test_responses_that_cross_a_sync_are_accepted(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, in_flight: InFlight
) -> None:
    from tests.engines.test_in_flight import LONG, VERSIONS, assert_each_span_is_of_its_version, slowly

    versions, crowd = some_versions(model), Crowd(model, 2)
    for engine in crowd.engines:
        slowly(engine.engine)
    crowd.publish(0, versions[0])
    asked = ragged_requests(10, 4, LONG)

    async def gather() -> list[Completion]:
        return await asyncio.gather(*(crowd.pool.generate(*request) for request in asked))

    begun = crowd.events.begin(gather())
    for version in range(1, VERSIONS):
        time.sleep(0.05)
        crowd.publish(version, versions[version], in_flight)
    written = [(prompt, completion) for (prompt, _, _), completion in zip(asked, begun.result(), strict=True)]
    assert_each_span_is_of_its_version(written, versions)
    assert any(len(completion.versions) > 1 for _, completion in written) == (in_flight == "keep")
    assert crowd.said == []
    crowd.close()


# -- the proof of a sync ----------------------------------------------------------------------------------------------


@pytest.fixture
def learner(model: LanguageModel) -> Learner:
    return Learner(
        model, compose(resolve(ObjectiveConfig("grpo"))), LearnConfig(lr=3e-4), lineage="run", temperature=1.0,
        limit=12, steps=10, compute=torch.float32, reference=None,
    )  # fmt: skip


def learn(learner: Learner) -> None:
    generator = torch.Generator().manual_seed(learner.version)
    with torch.no_grad():
        for parameter in learner.model.parameters().values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    learner.version += 1


def delivery_to(crowd: Crowd, learner: Learner) -> Delivery:
    return Delivery(learner, crowd.pool, PROMPTS, SAMPLING, retry=False, say=print, events=crowd.events)


def test_every_engine_is_proven(crowd: Crowd, learner: Learner) -> None:
    delivery = delivery_to(crowd, learner)
    for _ in range(2):
        learn(learner)
        assert delivery.deliver()["sync/faults"] == 0
    for engine in crowd.engines:
        assert engine.asked == [prompt.token_ids for prompt in PROMPTS] * 2
    assert crowd.said == []


def test_an_engine_that_only_pretends_to_have_the_weights_is_set_aside(crowd: Crowd, learner: Learner) -> None:
    delivery = delivery_to(crowd, learner)
    crowd.engines[1].pretends = True
    learn(learner)
    delivery.deliver()
    crowd.until(lambda: len(crowd.said) == 2)
    assert crowd.said[0].startswith(
        "http://engine-1 is set aside: sync of version 1: the engine says it holds these weights but does not write "
        "with them (log-probabilities differ"
    )
    asked = ragged_requests(12, 4, SAMPLING)
    all_right(asked, crowd.ask(asked), learner.model, 1)


def test_if_all_only_pretend_the_run_stops(crowd: Crowd, learner: Learner) -> None:
    delivery = delivery_to(crowd, learner)
    for engine in crowd.engines:
        engine.pretends = True
    learn(learner)
    with pytest.raises(SyncFaultError, match=r"http://engine-0: sync of version 1: .*does not write with them"):
        delivery.deliver()


def test_an_engine_that_comes_back_must_pass_the_proof(
    crowd: Crowd, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is opened again with the model's first weights, says that it has taken the newest, and has not."""
    delivery = delivery_to(crowd, learner)
    learn(learner)
    delivery.deliver()
    crowd.model = some_versions(learner.model)[1]
    opened = crowd.open
    crowd.pool.opens = [crowd.pool.opens[0], lambda: pretending(opened(1)), crowd.pool.opens[2]]
    dead(crowd.engines[1])
    asked = requests()
    all_right(asked, crowd.ask(asked), learner.model, 1)
    crowd.until(lambda: crowd.opened[1] > 3)
    assert crowd.pool.members[1].state == "aside"
    assert "sync of version 1: it" in crowd.pool.members[1].fault
    crowd.pool.opens = [crowd.pool.opens[0], lambda: opened(1), crowd.pool.opens[2]]
    crowd.until(lambda: crowd.pool.members[1].state == "serving")
    more = ragged_requests(12, 4, SAMPLING)
    all_right(more, crowd.ask(more), learner.model, 1)
    assert len(crowd.engines[1].asked) > len(PROMPTS)


def pretending(opened: Opened) -> Opened:
    assert isinstance(opened.engine, Shaky)
    opened.engine.pretends = True
    return opened


def test_an_engine_that_dies_between_the_weights_and_their_proof_is_one(crowd: Crowd, learner: Learner) -> None:
    delivery = delivery_to(crowd, learner)
    dead(crowd.engines[2])
    learn(learner)
    delivery.deliver()
    crowd.until(lambda: len(crowd.said) == 2)
    assert crowd.said[0].startswith("http://engine-2 is set aside: ConnectionError: reset by peer")
