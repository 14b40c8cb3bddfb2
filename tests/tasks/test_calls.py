"""Calls that hang, block or raise hold nobody up."""

import asyncio
import contextlib
import threading
import time

import pytest

from solera.tasks.calls import TookTooLongError, call_each

HANG = threading.Event()


@pytest.fixture(autouse=True)
def _release():
    HANG.clear()
    yield
    HANG.set()


def call(function, items, timeout):
    async def gather():
        return [outcome async for outcome in call_each(function, [((item,), {}) for item in items], timeout)]

    outcomes = asyncio.run(gather())
    return [type(o.error) if o.error else o.value for o in outcomes]


def test_synchronous_calls_keep_their_order_and_go_on_after_one_that_hangs():
    seen = []

    def function(x):
        if x in (2, 4):
            HANG.wait()
        seen.append(x)
        return 10 * x

    start = time.perf_counter()
    expected = [0, 10, TookTooLongError, 30, TookTooLongError, 50]
    assert call(function, range(6), 0.2) == expected
    assert time.perf_counter() - start < 2
    assert seen == [0, 1, 3, 5]
    HANG.set()
    time.sleep(0.1)
    assert sorted(seen) == [0, 1, 2, 3, 4, 5]  # threads left behind end with their own call: nothing is called twice


def test_the_timeout_is_of_each_call_and_not_of_the_batch():
    def function(x):
        time.sleep(0.05)
        return x

    assert call(function, range(10), 0.3) == list(range(10))


def test_asynchronous_calls_run_together():
    async def function(x):
        await asyncio.sleep(0.2)
        return x

    start = time.perf_counter()
    assert call(function, range(50), 5) == list(range(50))
    assert time.perf_counter() - start < 2


def test_asynchronous_calls_that_wait_block_or_will_not_be_cancelled():
    async def function(x):
        if x == 1:
            await asyncio.sleep(60)
        if x == 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(60)
        return x

    assert call(function, range(4), 0.2) == [0, TookTooLongError, TookTooLongError, 3]

    async def blocking(x):
        if x == 1:
            HANG.wait()
        return x

    assert call(blocking, [1, 2], 0.2) == [TookTooLongError, 2]


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError, StopIteration])
def test_whatever_is_raised_is_an_outcome(error):
    def function(x):
        if x == 1:
            raise error
        return x

    async def later(x):
        return function(x)

    assert call(function, range(3), 5) == [0, error, 2]
    expected = RuntimeError if error is StopIteration else error  # Python does so inside any coroutine
    assert call(later, range(3), 5) == [0, expected, 2]


def test_an_object_that_is_called_asynchronously():
    class Judge:
        async def __call__(self, x):
            return x

    assert call(Judge(), [1, 2], 5) == [1, 2]


def test_who_has_seen_enough_waits_for_no_more():
    """Ten calls that all hang: the first tells, and the others are not waited for."""
    seen = []

    def function(x):
        seen.append(x)
        HANG.wait()

    async def first():
        async with contextlib.aclosing(call_each(function, [((x,), {}) for x in range(10)], 0.2)) as outcomes:
            async for outcome in outcomes:
                return outcome

    start = time.perf_counter()
    assert isinstance(asyncio.run(first()).error, TookTooLongError)
    assert time.perf_counter() - start < 1.5
    assert seen == [0]
