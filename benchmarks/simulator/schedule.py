"""Engines and a learner over time, event by event: synchronous, or streaming with a bound on the age of the data.

An engine adds one token to all of its rows at a time. Between two events (a response ends or begins, weights arrive)
the number of rows is constant, so time advances from event to event and not token by token.

Of many engines only `MOST_ENGINES` are simulated, with their part of each batch.
"""

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from benchmarks.simulator.costs import MOST_AT_ONCE, Costs

MOST_ENGINES = 8


@dataclass(frozen=True)
class Work:
    """A batch of responses. Lengths are log-normal with this mean and spread, cut off at `longest`."""

    responses: int
    prompt: int
    mean: float
    longest: int
    spread: float = 0.8
    """Standard deviation of the logarithm of lengths; 0 makes them equal."""

    def length(self, random: Random) -> int:
        # the mean of a log-normal variable is exp(mu + spread² / 2)
        drawn = self.mean * math.exp(random.gauss(0.0, self.spread) - self.spread**2 / 2)
        return max(1, min(self.longest, round(drawn)))


@dataclass(frozen=True)
class Split:
    """How many GPUs learn and how many generate, in engines of `engine_gpus`. In a synchronous run all do both."""

    learners: int
    engines: int
    engine_gpus: int = 1
    at_once: float = MOST_AT_ONCE
    """Tokens per micro-batch on each learner."""
    slow: float = 1.0
    """How many times as long as the others one of the learners computes. In a synchronous run its GPU still generates
    at full speed."""

    @property
    def gpus(self) -> int:
        return self.learners + self.engines * self.engine_gpus


@dataclass(frozen=True)
class Outcome:
    seconds: float
    """Per update."""
    learning: float
    """Share of the time in which the learner works."""
    generating: float
    """Share of the time in which engines work."""
    oldest: int = 0
    """Greatest age of a response when it is learned from, in updates."""


@dataclass
class Engine:
    """Rows that grow by one token at a time."""

    costs: Costs
    gpus: int
    slots: int
    prompt: int
    time: float = 0.0
    tokens: float = 0.0
    """Tokens that a row would have if it had been here from the start."""
    rows: list[tuple[float, float, int]] = field(default_factory=list)
    """`tokens` at which each row ends and began, and its number; a heap."""
    begun: float = 0.0
    """Sum of where the rows began."""
    busy: float = 0.0

    def add(self, number: int, length: int, now: float) -> None:
        self.time = max(self.time, now)
        heapq.heappush(self.rows, (self.tokens + length, self.tokens, number))
        self.begun += self.tokens
        seconds = self.costs.prefill(self.prompt, self.gpus)
        self.time, self.busy = self.time + seconds, self.busy + seconds

    @property
    def is_full(self) -> bool:
        return len(self.rows) >= self.slots

    @property
    def per_token(self) -> float:
        """Seconds per token until the next row ends. Meanwhile contexts grow; their mean counts."""
        grown = self.tokens - self.begun / len(self.rows) + (self.rows[0][0] - self.tokens) / 2
        return self.costs.token(len(self.rows), self.prompt + grown, self.gpus)

    @property
    def next_end(self) -> float:
        return self.time + (self.rows[0][0] - self.tokens) * self.per_token if self.rows else math.inf

    def finish(self) -> int:
        """Go on to where the next row ends, and return its number."""
        seconds = self.next_end - self.time
        self.time, self.busy = self.time + seconds, self.busy + seconds
        self.tokens, begun, number = heapq.heappop(self.rows)
        self.begun -= begun
        return number

    def pause(self, now: float, seconds: float) -> None:
        """Go on to this time, before which no row ends, then wait."""
        if self.rows and now > self.time:
            self.tokens += (now - self.time) / self.per_token
            self.busy += now - self.time
        self.time = max(self.time, now) + seconds


def synchronous(costs: Costs, work: Work, split: Split, updates: int = 5, seed: int = 0) -> Outcome:
    """All GPUs generate a batch, then all learn from it, then all engines get the new weights."""
    random, decoding, learning = Random(seed), 0.0, 0.0
    everyone = max(1, split.gpus // split.engine_gpus)
    count = min(everyone, MOST_ENGINES)
    responses = round(work.responses * count / everyone)
    for _ in range(updates):
        engines = [_engine(costs, work, split) for _ in range(count)]
        tokens = 0
        for number in range(responses):
            engine = min(engines, key=_turn)
            if engine.is_full:
                engine.finish()
            length = work.length(random)
            engine.add(number, length, 0.0)
            tokens += length + work.prompt
        while any(engine.rows for engine in engines):
            min(engines, key=lambda one: one.next_end).finish()
        decoding += max(engine.time for engine in engines)
        learning += costs.learn(tokens * everyone / count, split.gpus, split.at_once, split.slow)
    total = decoding + learning + updates * costs.sync(split.gpus)
    return Outcome(total / updates, learning / total, decoding / total)


def _turn(engine: Engine) -> tuple[bool, float]:
    """The next response goes to the engine with the fewest rows. If all are full, to the one with a slot first."""
    return engine.is_full, engine.next_end if engine.is_full else len(engine.rows)


class Stream:
    """Engines generate while the learner learns.

    Responses are learned from in the order in which they began. One begins only if it will be used at most `max_age`
    updates after the version that writes its first token. Every `v` updates all engines stop for a sync.
    """

    def __init__(self, costs: Costs, work: Work, split: Split, v: int, max_age: int, seed: int) -> None:
        self.costs, self.work, self.split, self.v, self.max_age = costs, work, split, v, max_age
        self.random = Random(seed)
        self.engines = [_engine(costs, work, split) for _ in range(min(split.engines, MOST_ENGINES))]
        self.share = len(self.engines) / split.engines
        self.responses = max(1, round(work.responses * self.share))
        self.now = self.learning = 0.0
        self.learner_ends = math.inf
        self.started = self.updates = self.published = self.oldest = 0
        self.finished, self.tokens = Counter[int](), Counter[int]()
        """By batch."""

    def run(self, updates: int) -> Outcome:
        """Measure so many updates, after as many that fill the engines."""
        self._until(updates)
        before = self._spent()
        self._until(2 * updates)
        total, learning, busy = (now - then for now, then in zip(self._spent(), before, strict=True))
        return Outcome(total / updates, learning / total, min(1.0, busy / total), self.oldest)

    def _until(self, updates: int) -> None:
        while self.updates < updates:
            self._admit()
            self._learn()
            engine = min(self.engines, key=lambda one: one.next_end)
            if self.learner_ends <= engine.next_end:
                self._update()
            else:
                self.finished[engine.finish() // self.responses] += 1
                self.now = max(self.now, engine.time)

    def _spent(self) -> tuple[float, float, float]:
        """Seconds in all, of learning, and of an engine's work."""
        return self.now, self.learning, sum(engine.busy for engine in self.engines) / len(self.engines)

    def _admit(self) -> None:
        """Fill the emptiest engines first."""
        while self.started < (self.published + self.max_age + 1) * self.responses:
            engine = min(self.engines, key=lambda one: len(one.rows) / one.slots)
            if engine.is_full:
                return
            length, batch = self.work.length(self.random), self.started // self.responses
            engine.add(self.started, length, self.now)
            self.tokens[batch] += length + self.work.prompt
            self.oldest = max(self.oldest, batch - self.published)
            self.started += 1

    def _learn(self) -> None:
        if self.learner_ends == math.inf and self.finished[self.updates] == self.responses:
            tokens, split = self.tokens[self.updates] / self.share, self.split
            seconds = self.costs.learn(tokens, split.learners, split.at_once, split.slow)
            self.learner_ends = self.now + seconds
            self.learning += seconds

    def _update(self) -> None:
        self.now, self.learner_ends = self.learner_ends, math.inf
        self.updates += 1
        if self.updates % self.v == 0:
            self.published = self.updates
            seconds = self.costs.sync(self.split.engines * self.split.engine_gpus)
            for engine in self.engines:
                engine.pause(self.now, seconds)
            self.now += seconds


def streaming(
    costs: Costs, work: Work, split: Split, v: int = 1, max_age: int | None = None, updates: int = 10, seed: int = 0
) -> Outcome:
    """`max_age` is 2 v unless given."""
    return Stream(costs, work, split, v, 2 * v if max_age is None else max_age, seed).run(updates)


def _engine(costs: Costs, work: Work, split: Split) -> Engine:
    slots = costs.rows(work.prompt + work.mean, split.engine_gpus)
    return Engine(costs, split.engine_gpus, slots, work.prompt)
