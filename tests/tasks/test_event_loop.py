"""The event loop of a run: its thread, errors, cancellation, and episodes that advance in rounds."""

import asyncio
import gc
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from solera.engines.in_process import InProcessEngine
from solera.records import Completion, Prompt, Reward, Rollout, Sampling
from solera.tasks.episodes import Failed, Guard, attempt_all
from solera.tasks.event_loop import EventLoop, call_in
from tests.conftest import END

SAMPLING = Sampling(1.3, 6)


async def five() -> int:
    return 5


def test_coroutines_run_in_one_thread_also_where_a_loop_is_running_already():
    async def thread() -> threading.Thread:
        return threading.current_thread()

    async def notebook_cell(events: EventLoop) -> threading.Thread:
        return events.run(thread())

    with EventLoop() as events:
        first = events.run(thread())
        assert first is not threading.current_thread()
        assert events.run(thread()) is first
        assert asyncio.run(notebook_cell(events)) is first
    assert not first.is_alive()


def test_a_call_into_a_closed_loop_is_nothing_and_other_errors_are_raised():
    loop, called = asyncio.new_event_loop(), list[int]()
    call_in(loop, called.append, 1)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    call_in(loop, called.append, 2)
    assert called == [1]

    class Failing:
        def is_closed(self) -> bool:
            return False

        def call_soon_threadsafe(self, *_: object) -> None:
            raise RuntimeError("another")

    with pytest.raises(RuntimeError, match="another"):
        call_in(Failing(), called.append, 3)  # type: ignore[arg-type]


def test_the_thread_ends_when_nobody_has_the_loop_any_more():
    events = EventLoop()
    events.run(five())
    thread = events._thread
    del events
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_an_error_reaches_whoever_waits_and_the_loop_goes_on(error):
    async def failing():
        await asyncio.sleep(0)
        raise error

    with EventLoop() as events:
        for _ in range(2):
            with pytest.raises(type(error)) as raised:
                events.run(failing())
            assert raised.value is error
            assert events.run(five()) == 5


def test_ctrl_c_cancels_what_is_running_and_its_cleanup_is_waited_for():
    done, running = [], threading.Event()

    async def long():
        running.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            done.append("cleaned up")

    def interrupt():
        running.wait()
        time.sleep(0.1)  # until the main thread waits for the result
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        threading.Thread(target=interrupt).start()
        with EventLoop() as events, pytest.raises(KeyboardInterrupt):
            events.run(long())
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["cleaned up"]


def test_ctrl_c_while_the_thread_starts_is_no_other_error(monkeypatch):
    """A thread that never came to start cannot be joined."""

    def interrupted(self):
        raise KeyboardInterrupt

    work = five()
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), EventLoop() as events:
        events.run(work)
    work.close()


def test_closing_cancels_what_is_left_and_a_blocked_thread_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr("solera.tasks.event_loop.CLOSING", 0.2)
    cancelled, started, release = [], threading.Event(), threading.Event()

    async def waiting():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def blocking():
        started.set()
        release.wait(60)

    events = EventLoop()
    events.begin(waiting())
    events.run(five())
    events.close()
    assert cancelled == [True]
    events.begin(blocking())
    assert started.wait(10)
    start = time.monotonic()
    events.close()
    assert time.monotonic() - start < 5
    release.set()


class Slow:
    """A task of three turns, whose tool takes another time at every call. It fails now and then."""

    def __init__(self, seed: int) -> None:
        self.delays = np.random.default_rng(seed)

    async def run(self, prompt, generate):
        parts, text = [], prompt.token_ids
        for turn in range(3):
            written = await generate(text)
            await asyncio.sleep(self.delays.uniform(0, 0.02))
            if turn == 1 and written.token_ids_T[0] == 5:
                raise ValueError("no tool for this")
            parts += [written, (3,)]
            text = (*text, *written.token_ids_T.tolist(), 3)
        return Rollout.of(prompt, *parts[:-1], rewards=(Reward(1.0),))


class Batches:
    """An engine that notes which requests it was given before its event loop came round again."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.seen: list[list[tuple[tuple[int, ...], int]]] = []

    async def generate(self, token_ids, sampling, seed) -> Completion:
        if self.engine._asking is None:
            self.seen.append([])
        self.seen[-1].append((token_ids, seed))
        return await self.engine.generate(token_ids, sampling, seed)


def attempts(count: int) -> list[tuple[Prompt, int]]:
    rng = np.random.default_rng(1)
    prompts = [Prompt(f"p/{n}", tuple(rng.integers(2, 11, int(rng.integers(2, 9))).tolist())) for n in range(count)]
    return [(prompt, n) for n, prompt in enumerate(prompts)]


@pytest.fixture(params=["plain", "continuous"])
def engine(request, tiny) -> InProcessEngine:
    model = tiny.copy(torch.float32)
    model = model.with_plans() if request.param == "continuous" else model
    return InProcessEngine(model, (END,), 64, torch.float32, early=True)


def bits(attempted) -> list:
    return [
        (rollout.sequences[0].token_ids_T.tolist(), rollout.sequences[0].span_logp.tolist())
        if isinstance(rollout, Rollout)
        else str(rollout.error)
        for rollout in attempted
    ]


def test_in_rounds_every_batch_and_every_bit_is_the_same_however_long_tools_take(engine):
    """The engine starts once no tool is running: as many batches as turns, each in the order of the episodes."""
    runs = []
    for seed in (1, 2):
        watched = Batches(engine)
        with EventLoop(in_rounds=True) as events:
            made = attempt_all(Slow(seed), watched, attempts(16), SAMPLING, None, Guard("missing"), events=events)
        assert len(watched.seen) == 3
        assert [seed for _, seed in watched.seen[0]] == list(range(16))
        failed = sum(not isinstance(each, Rollout) for each in made)
        assert 0 < failed < 16
        assert [len(batch) for batch in watched.seen] == [16, 16, 16 - failed]
        runs.append((watched.seen, bits(made)))
    assert runs[0] == runs[1]


def test_without_rounds_the_batches_follow_the_tools(engine):
    watched = Batches(engine)
    with EventLoop() as events:
        attempt_all(Slow(1), watched, attempts(16), SAMPLING, None, Guard("missing"), events=events)
    assert len(watched.seen) > 3


def test_rounds_end_where_an_episode_is_cancelled_or_asks_twice_at_once(engine):
    class Twice:
        async def run(self, prompt, generate):
            if prompt.key == "p/3":
                await asyncio.sleep(0.01)
                raise ValueError("gone")
            both = await asyncio.gather(generate(prompt.token_ids), generate((*prompt.token_ids, 4)))
            return Rollout.of(prompt, both[0], rewards=(Reward(1.0),))

    watched = Batches(engine)
    with EventLoop(in_rounds=True) as events:
        made = attempt_all(Twice(), watched, attempts(6), SAMPLING, None, Guard("missing"), events=events)
        assert [isinstance(each, Failed) for each in made] == [n == 3 for n in range(6)]
        assert [len(batch) for batch in watched.seen] == [10]
        with pytest.raises(ValueError, match="gone"):  # the others are cancelled while they wait for their turn
            attempt_all(Twice(), engine, attempts(6), SAMPLING, events=events)
        assert events.run(five()) == 5
