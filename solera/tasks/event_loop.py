"""The event loop of a run, in its own thread."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
PATIENCE = 2.0
"""Seconds to wait for cancelled work. It may never end, because user code can block the thread."""
CLOSING = 5.0
"""The same, when the loop is closed. An MCP server that does not end by itself is killed within this time."""


class Begun(Generic[T]):
    """A coroutine running in the event loop's thread."""

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._ended = threading.Event()
        self._future: Future[T] = asyncio.run_coroutine_threadsafe(self._watched(work), loop)

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        finally:
            self._ended.set()

    def result(self) -> T:
        """Wait for the result. If the waiting thread is interrupted (Ctrl-C), cancel the coroutine."""
        try:
            return self._future.result()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel it if it is still running, and wait for its cleanup for up to `PATIENCE` seconds."""
        if self._future.cancel():
            self._ended.wait(PATIENCE)

    def wait(self, timeout: float) -> bool:
        """Wait for up to `timeout` seconds. Return whether it has ended."""
        return self._ended.wait(timeout)


class EventLoop:
    """Runs a run's coroutines: episodes and canaries. Any other thread can use it, even the main thread of a notebook,
    where another event loop is already running.

    The thread starts with the first work. It ends with `close`, or when the object is no longer used. With `in_rounds`,
    episodes advance together (`rounds.py`).
    """

    def __init__(self, in_rounds: bool = False) -> None:
        self.in_rounds = in_rounds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        return self.begin(work).result()

    def begin(self, work: Coroutine[Any, Any, T]) -> Begun[T]:
        """Start a coroutine without waiting for it."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), daemon=True, name="solera-event-loop"
                )
                weakref.finalize(self, _stop, self._loop)
                self._thread.start()
            assert threading.current_thread() is not self._thread, "it would wait for itself"
            return Begun(work, self._loop)

    def close(self) -> None:
        """Cancel what is still running and end the thread. The next coroutine starts a new thread."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            _stop(loop)
            if thread.is_alive():  # Ctrl-C may have come before it started
                thread.join(CLOSING)

    def __enter__(self) -> "EventLoop":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Call a function in the loop's thread. If the loop is closed, nobody waits for that any more."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:  # asking first whether it is closed would not do: it may be closed in between
        if not loop.is_closed():
            raise


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    call_in(loop, loop.stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """The thread's function: run the loop until it is stopped, then cancel what is left."""
    asyncio.set_event_loop(loop)
    stopped = False
    while not stopped:
        try:
            loop.run_forever()
            stopped = True
        except (SystemExit, KeyboardInterrupt):  # raised by user code; the thread that waits for the result gets it
            continue
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
