"""All ranks of a learner: how they are called, and how a rank that died or hangs is found.

A rank that dies or hangs ends all ranks, and the error names it. Where the ranks run is the business of a `Host`.
"""

import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from solera.errors import SoleraError, one_line
from solera.sharded.rank import STARTING

GRACE = 3.0
"""Seconds after a rank's failure in which the others may report theirs, before all are ended. The first to report is
often not the one that caused it."""
BEAT = 1.0
"""Seconds between two looks at what the ranks do."""
SENDING = "sending weights to engines"
LARGE = 1 << 20
"""An array of so many bytes travels beside the pickle of a reply. Inside it, it would be copied on both sides."""
MEMORY = (
    "the GPU's memory is full: lower learn.micro_batch_tokens, set learn.gradient_checkpointing, or use more ranks "
    "(cluster.learners)"
)


class RankError(SoleraError):
    """A rank died, hangs, or failed. All ranks have ended."""


class SilentError(Exception):
    """A rank stopped in the middle of a call or of its answer."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class Reply(NamedTuple):
    """What a rank answers: a pickle, and the memory of the large arrays that belong to it."""

    pickled: bytes
    arrays: tuple[npt.NDArray[np.uint8], ...]

    @classmethod
    def of(cls, kind: str, value: Any) -> "Reply":
        """`kind` is `result`, or `failure`. No large array is copied.

        >>> pickled, arrays = reply = Reply.of("result", np.zeros(LARGE))
        >>> kind, value = reply.read()
        >>> len(pickled) < 200, len(arrays), kind, value.shape, float(value.sum())
        (True, 1, 'result', (1048576,), 0.0)
        """
        arrays = list[npt.NDArray[np.uint8]]()

        def stays_inside(buffer: pickle.PickleBuffer) -> bool:
            memory = buffer.raw()
            if memory.nbytes >= LARGE:
                arrays.append(np.frombuffer(memory, np.uint8))
            return memory.nbytes < LARGE

        pickled = pickle.dumps((kind, value), 5, buffer_callback=stays_inside)
        return cls(pickled, tuple(arrays))

    def read(self) -> tuple[str, Any]:
        """The kind and the value. It uses the memory of `arrays`."""
        return pickle.loads(self.pickled, buffers=self.arrays)


class Host(Protocol):
    """Where the ranks run. They were started, and each answers the first time when it is ready."""

    count: int

    def send(self, rank: int, call: bytes) -> None:
        """Give a rank its next call. Raises an `OSError` if it has ended, and a `SilentError` if it does not read."""
        ...

    def wait(self, ranks: Sequence[int], seconds: float | None) -> dict[int, Reply | None]:
        """Wait until one of these ranks answers or dies. Returns the answers; `None` for a rank that died. Raises a
        `SilentError` if one stops in the middle of its answer."""
        ...

    def pulses(self) -> dict[int, float]:
        """The last pulse of each rank that is known (`Served.pulse`). Does not wait for a rank."""
        ...

    def signal_of(self, rank: int) -> int | None:
        """The signal that ended a rank that died, if it is known."""
        ...

    def how_it_ended(self, rank: int) -> str:
        """How a rank that died ended, such as `was ended by signal 9`."""
        ...

    def where(self) -> str:
        """Where the ranks run, in words."""
        ...

    def close(self) -> None:
        """End all ranks."""
        ...


@runtime_checkable
class Passing(Protocol):
    """A `Host` whose rank 0 can send what it holds (`Rank.held`) to engines."""

    def pass_on(self, receivers: Sequence[Any], patience: float) -> Reply | None:
        """Returns rank 0's answer, which has an error or `None` for each engine; `None` if rank 0 died. Raises a
        `TimeoutError` if its process did not react for `patience` seconds."""
        ...


class Ranks:
    """The ranks of a host, called together."""

    def __init__(self, host: Host, timeout: float) -> None:
        self.host, self.count, self.timeout = host, host.count, timeout
        self._open = True
        self._answers("start", time.monotonic() + STARTING)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method on every rank, each with its own arguments; return what each returned."""
        if not self._open:
            raise RankError("the learner's ranks have ended: resume the run to start them again")
        for rank, given in enumerate(arguments):
            try:
                self.host.send(rank, pickle.dumps((method, given)))
            except OSError:
                self._fail(RankError(f"rank {rank} of {self.count} {self.host.how_it_ended(rank)} before {method}"))
            except SilentError:
                self._fail(self._blame(method, {}, {}, [rank]))
        return self._answers(method, None)

    def pass_on(self, receivers: Sequence[Any]) -> list[SoleraError | None]:
        """Let rank 0 send to engines what it holds. Returns what was wrong with each engine. Engines have time limits
        of their own, so rank 0 may wait for them longer than for a rank. But its process must react."""
        assert isinstance(self.host, Passing)
        try:
            answer = self.host.pass_on(receivers, self.timeout + 2 * GRACE)
        except TimeoutError:
            self._fail(self._blame(SENDING, {}, {}, [0]))
        if answer is None:
            self._fail(self._blame(SENDING, {}, {0: 0.0}, []))
        kind, value = answer.read()
        if kind != "result":
            self._fail(self._blame(SENDING, {0: value}, {}, []))
        return value

    def close(self) -> None:
        """End all ranks. Their work is lost."""
        if self._open:
            self._open = False
            self.host.close()

    def _answers(self, method: str, deadline: float | None) -> list[Any]:
        """Every rank's result. After the first result the other ranks have `timeout` seconds."""
        results: dict[int, Any] = {}
        failures: dict[int, tuple[str, str]] = {}
        died: dict[int, float] = {}  # after how many seconds
        began = time.monotonic()
        watch = Watch(self.host, self.timeout)
        while waiting := [rank for rank in range(self.count) if rank not in {*results, *failures, *died}]:
            left = BEAT if deadline is None else min(BEAT, deadline - time.monotonic())
            try:
                answers = self.host.wait(waiting, max(0.0, left))
            except SilentError as error:
                waiting = [error.rank]
                break
            if not answers:
                if left <= 0:
                    break
                if deadline is None and (still := watch.still(waiting)):
                    waiting = still
                    break
                continue
            for rank, answer in answers.items():
                if answer is None:
                    died[rank] = time.monotonic() - began
                    continue
                kind, value = answer.read()
                (results if kind == "result" else failures)[rank] = value
            soon = time.monotonic() + (min(GRACE, self.timeout) if failures or died else self.timeout)
            deadline = soon if deadline is None or failures or died else min(deadline, soon)
        if len(results) < self.count:
            self._fail(self._blame(method, failures, died, waiting))
        return [results[rank] for rank in range(self.count)]

    def _blame(
        self, method: str, failures: dict[int, tuple[str, str]], died: dict[int, float], silent: list[int]
    ) -> SoleraError:
        """What happened, as far as the ranks tell. A rank that lost contact to another is not the one to blame. Nor is
        one that torch ended because it had waited too long: with NCCL, torch does that with SIGABRT."""
        told = {}
        for rank, (cause, text) in failures.items():
            told[cause] = text if cause == "user" else f"rank {rank} of {self.count} failed in {method}: {text}"
        for cause in ("user", "memory"):  # the ranks would fail again
            if cause in told:
                return SoleraError(told[cause])
        if "own" in told:
            return RankError(told["own"])
        waited = [r for r, after in died.items() if after >= self.timeout and self.host.signal_of(r) == signal.SIGABRT]
        first = next((rank for rank in died if not silent or rank not in waited), None)
        named = " and ".join(f"rank {rank}" for rank in silent)
        if first is not None:
            also = f"; {named} did not answer" if silent else ""
            return RankError(f"rank {first} of {self.count} {self.host.how_it_ended(first)} in {method}{also}")
        if silent:
            return RankError(f"{named} of {self.count} did not answer in {method} (time limit {self.timeout:g} s)")
        return RankError(told["contact"])

    def _fail(self, error: SoleraError) -> NoReturn:
        self.close()
        raise error


class Watch:
    """Finds ranks that neither compute nor wait for another rank, while one call lasts.

    A rank that waits for another fails by itself after `timeout` seconds, and knows more. So this waits longer.
    """

    def __init__(self, host: Host, timeout: float) -> None:
        self.host, self.patience = host, timeout + 2 * GRACE
        self._since = dict.fromkeys(range(host.count), time.monotonic())
        self._pulses: dict[int, float] = {}

    def still(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` whose pulse has not changed for too long."""
        now = time.monotonic()
        for rank, pulse in self.host.pulses().items():
            if self._pulses.get(rank) != pulse:
                self._pulses[rank], self._since[rank] = pulse, now
        return [rank for rank in ranks if now - self._since[rank] > self.patience]


class Served:
    """A rank's side: makes the rank at the first call and answers calls."""

    def __init__(self) -> None:
        self.rank: Any = None
        self._clock: int | None = None
        """Of the thread that runs the rank."""

    def start(self, make: Callable[[], Any]) -> Reply:
        def begin() -> None:
            self.rank = make()

        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        return answer(begin)

    def pulse(self) -> float:
        """Seconds that the rank has computed. It stands still while the rank waits, and if it hangs."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)

    def call(self, call: bytes) -> Reply:
        method, given = pickle.loads(call)
        return answer(getattr(self.rank, method), *given)


def answer(function: Callable[..., Any], *given: Any) -> Reply:
    """What a rank's function returns, or how it failed."""
    try:
        return Reply.of("result", function(*given))
    except torch.OutOfMemoryError:
        return Reply.of("failure", ("memory", MEMORY))
    except Exception as error:
        return Reply.of("failure", (_cause(error), one_line(error)))


def _cause(error: Exception) -> str:
    """`user` is an error with a message for users. `contact` means that another rank was not heard of in time."""
    if isinstance(error, SoleraError):
        return "user"
    of_group = isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
    return "contact" if of_group else "own"
