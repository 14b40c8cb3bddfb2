"""Keeps the store supplied with rollouts: one group of attempts for each prompt, with their grades."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from solera.protocols import Engine, Store, SupplyState, Task
from solera.records import EpisodeFacts, Group, PolicyVersion, Prompt, Rollout, Sampling
from solera.streams import stream_seeds
from solera.tasks.episodes import STOP, Attempted, Failed, Guard, attempt_all, episodes
from solera.tasks.event_loop import Begun, EventLoop

ROUNDS = 4
"""How often one call replaces groups that got no reward."""
PATIENCE = 2.0
"""Seconds that a run waits at its end for a batch that it will not use."""


def attempt_seeds(seed: int, numbers: Sequence[int], members: int) -> list[list[int]]:
    """For each of these problems, the seeds of the members of its group."""
    return stream_seeds(stream_seeds(seed, np.array(numbers))[:, None], np.arange(members)).tolist()


def stored(attempted: Mapping[int, Sequence[Attempted]]) -> tuple[list[Rollout], int]:
    """The rollouts to store for the attempts at each problem, and the number of tokens generated for them."""
    rollouts = [
        (each.member() if isinstance(each, Failed) else each).admitted(number)
        for number, members in attempted.items()
        for each in members
    ]
    everyone = [each for members in attempted.values() for each in members]
    return rollouts, sum(each.tokens if isinstance(each, Failed) else each.length for each in everyone)


class Outcomes:
    """Counts failed episodes, and what episodes of several turns did."""

    def __init__(self) -> None:
        self._failed = 0
        self._in_a_row = 0
        self._several_turns: list[tuple[EpisodeFacts, int]] = []

    def count(self, attempted: Sequence[Attempted], batch: int) -> None:
        """Raise an error if all of these episodes failed, and at least `batch` in a row."""
        failed = [each for each in attempted if isinstance(each, Failed)]
        rollouts = [each for each in attempted if isinstance(each, Rollout)]
        self._several_turns += [(each.facts, len(each.sequences)) for each in rollouts if each.facts is not None]
        self._failed += len(failed)
        self._in_a_row = self._in_a_row + len(failed) if len(failed) == len(attempted) else 0
        if failed and self._in_a_row >= batch:
            raise failed[0].error

    def take(self) -> dict[str, float]:
        """Figures since the last call: `episodes/failed`, if there were any, and those of `turn_metrics`."""
        failed, self._failed = self._failed, 0
        facts, self._several_turns = self._several_turns, []
        return ({"episodes/failed": failed} if failed else {}) | turn_metrics(facts)


def turn_metrics(episodes: Sequence[tuple[EpisodeFacts, int]]) -> dict[str, float]:
    """Metrics of episodes, each given with its number of sequences: means per episode of turns and sequences, sums of
    everything else.

    >>> turn_metrics([(EpisodeFacts(3, "done", calls=2, errors=1, seconds=0.5), 1), (EpisodeFacts(2, "turns"), 2)])
    ... # doctest: +NORMALIZE_WHITESPACE
    {'turns/mean': 2.5, 'rollout/sequences': 1.5, 'tools/calls': 2, 'tools/errors': 1, 'tools/seconds': 0.5,
     'tokens/retokenised': 0, 'episodes/ended_done': 1, 'episodes/ended_turns': 1}
    """
    if not episodes:
        return {}
    facts = [each for each, _ in episodes]
    endings = Counter(each.ending for each in facts)
    return {
        "turns/mean": sum(each.turns for each in facts) / len(facts),
        "rollout/sequences": sum(sequences for _, sequences in episodes) / len(facts),
        "tools/calls": sum(each.calls for each in facts),
        "tools/errors": sum(each.errors for each in facts),
        "tools/seconds": math.fsum(each.seconds for each in facts),
        "tokens/retokenised": sum(each.retokenised for each in facts),
        **{f"episodes/ended_{ending}": count for ending, count in sorted(endings.items())},
    }


def grading_metrics(task: Task) -> dict[str, float]:
    """What the task's reward models did since the last call, if it has any."""
    take = getattr(task, "take_metrics", None)
    return {} if take is None else dict(take())


class LockStep:
    """A `Supply` that generates when it is asked (`wait`), or one batch ahead of that (`drawn`). Episodes
    run in the thread of the run's event loop, which the supply closes at the end.

    `reserve` is how many groups stay in the store after a batch is drawn, for a constant lag. `members` is how many
    members of each group are generated here (default: all); others may be imported. `guard` decides what happens to
    episodes that fail. If a whole batch fails, the first error is raised. With `host_is_free` (a
    GPU decodes) the store is written while the engine decodes; otherwise before, since threads would slow each other.
    """

    def __init__(
        self,
        task: Task,
        engine: Engine,
        store: Store,
        *,
        sampling: Sampling,
        group_size: int,
        reserve: int,
        seed: int,
        members: int | None = None,
        guard: Guard = STOP,
        events: EventLoop | None = None,
        host_is_free: bool = False,
    ) -> None:
        self.events = events or EventLoop()
        self.host_is_free = host_is_free
        self.task = task
        self.engine = engine
        self.store = store
        self.sampling = sampling
        self.group_size = group_size
        self.members = group_size if members is None else members
        self.reserve = reserve
        self.seed = seed
        self.position = 0
        """Next problem of the task's stream."""
        self.guard = guard
        self._outcomes = Outcomes()
        self._decoding = 0.0
        """Seconds in which the engine wrote batches since `take_metrics` was called last."""
        self._begun: Begun[tuple[list[Attempted], float]] | None = None
        self._missing: int | None = None
        """Groups that the first `wait` since the last `drawn` found missing."""

    def wait(self, groups: int, now: PolicyVersion) -> int:
        """Generate until that many groups can be drawn and the reserve is left. Return the number of generated tokens.

        Where responses stay ungraded, or the store passes some over, others are written in their place, a few times
        over; what is still missing then is left to the next call.
        """
        generated, ahead = 0, list[Attempted]()
        if self._begun is not None:
            self.store.flush()
            (ahead, seconds), self._begun = self._begun.result(), None
            self.guard.tell(ahead)
            self._decoding += seconds
        for _ in range(ROUNDS):
            missing = self.store.missing(groups, self.group_size, self.reserve, now)
            self._missing = missing if self._missing is None else self._missing
            if missing <= 0:
                break
            attempted = self._attempted(missing, ahead)
            ahead = []
            self._outcomes.count(attempted, groups * self.members)
            by_problem = {self.position + p: attempted[p * self.members :][: self.members] for p in range(missing)}
            rollouts, tokens = stored(by_problem)
            self.store.add(rollouts)
            self.position += missing
            generated += tokens
            if not self.store.selective and all(rollout.rewards for rollout in rollouts):
                break
        self._discard(ahead)
        if not generated:
            self.store.flush()
        return generated

    def drawn(self, groups: Sequence[Group], ahead: int) -> None:
        """Attempt up to `ahead` of the next problems already, but no more than were missing this time, for the next
        `wait`.

        Until that call the engine must keep its weights, and nobody else use it or the task. Where another number is
        missing then, all are written anew: the last bits of a sample depend on what is decoded with it.
        """
        count, self._missing = min(ahead, self._missing or 0), None
        if count > 0:
            self._begun = self.events.begin(self._ahead(self.position, count))

    async def _ahead(self, first: int, groups: int) -> tuple[list[Attempted], float]:
        """Return attempts, and the seconds in which the engine generated them."""
        before, attempts = self.engine.work, self._attempts(first, groups)
        made = await episodes(self.task, self.engine, attempts, self.sampling, self.guard, self.events.in_rounds)
        return made, (self.engine.work - before).seconds

    def close(self) -> None:
        """Wait briefly for a batch in progress, which may never end. Then close the event loop."""
        if self._begun is not None:
            self._begun.wait(PATIENCE)
        self.events.close()

    @property
    def idle(self) -> bool:
        return self._begun is None

    def state(self) -> SupplyState:
        return SupplyState(self.position)

    def restore(self, state: SupplyState) -> None:
        self.position = state.position

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: `time/generate/decode`, seconds in which the engine wrote the batches that were taken,
        `episodes/failed`, where some did, and the figures of episodes of several turns."""
        seconds, self._decoding = self._decoding, 0.0
        return {"time/generate/decode": seconds} | self._outcomes.take() | grading_metrics(self.task)

    def _attempted(self, groups: int, ahead: list[Attempted]) -> list[Attempted]:
        """Attempt the next problems of the stream, one group each, unless exactly these were attempted ahead."""
        if len(ahead) == groups * self.members:
            return ahead
        self._discard(ahead)
        return self._attempt(self.position, groups)

    def _discard(self, ahead: list[Attempted]) -> None:
        """Count the tokens of attempts that were made ahead and are not needed."""
        self.guard.discard(sum(rollout.length for rollout in stored({0: ahead})[0] if rollout.lineage is not None))

    def _attempt(self, first: int, groups: int) -> list[Attempted]:
        if not self.host_is_free:
            self.store.flush()
        before = self.engine.work
        attempted = attempt_all(
            self.task, self.engine, self._attempts(first, groups), self.sampling,
            self.store.flush if self.host_is_free else None, self.guard, events=self.events,
        )  # fmt: skip
        self._decoding += (self.engine.work - before).seconds
        return attempted

    def _attempts(self, first: int, groups: int) -> list[tuple[Prompt, int]]:
        """Each problem of the stream with the seed of each member of its group."""
        numbers = range(first, first + groups)
        return [
            (prompt, seed)
            for index, seed_G in zip(numbers, attempt_seeds(self.seed, numbers, self.members), strict=True)
            for prompt in [self.task.prompt(index)]
            for seed in seed_G
        ]
