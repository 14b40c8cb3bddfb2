"""Run one attempt at a prompt (an episode), check it against what the engine generated, and contain its failures."""

import asyncio
import copy
import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar, overload

import numpy as np

from solera.errors import BadRequestError, SoleraError, StopRunError, one_line
from solera.protocols import Engine, Task
from solera.records import Completion, Prompt, Reward, Rollout, Sampling, Sequence, array_of
from solera.streams import stream_seed
from solera.tasks.company import Company
from solera.tasks.event_loop import EventLoop
from solera.tasks.rounds import Rounds, Seat
from solera.tasks.turns import turn_sampling
from solera.values import kind, token_ids_of

FAILED = "failed"
"""Name of the reward part of a failed episode."""
MOST_FULL = 100
"""Calls of `generate` that an episode may make after its context is full. The limit ends an endless loop in a task that
does not check for this."""


@dataclass(frozen=True, eq=False)
class Failed:
    """A failed episode: the reason, how many tokens it had generated, and its rollout, if it counts."""

    prompt: Prompt
    error: Exception
    tokens: int
    rollout: Rollout | None

    def member(self) -> Rollout:
        """The rollout that keeps the episode's place in its group. If none counts, it is an empty response, which takes
        no part in the baseline or the update."""
        return self.rollout or _rollout(self.prompt, (), 0.0)


Attempted = Rollout | Failed
T = TypeVar("T")


class Guard:
    """What happens when an episode fails: it stops the run, gets no reward (`missing`), or gets a fixed reward.

    Before that, it is retried `retries` times. The first failure is printed, later ones are only counted.
    """

    def __init__(
        self,
        errors: Literal["stop", "missing"] | float = "stop",
        retries: int = 0,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.errors = errors
        self.retries = retries
        self.say = say
        self.discard: Callable[[int], None] = lambda tokens: None
        """Called with the number of tokens that the engine wrote for an attempt and that ended in no rollout."""
        self._said = list[str]()
        """The failure that was printed, if there was one. Guards that were made of each other share it."""

    def discarding(self, discard: Callable[[int], None]) -> "Guard":
        """The same guard, with a function to call for tokens that end in no rollout. The first failure is printed by
        one of the two."""
        same = copy.copy(self)
        same.discard = discard
        return same

    def tell(self, attempted: Iterable[Attempted]) -> None:
        """Print the first failure of the run."""
        failed = next((each for each in attempted if isinstance(each, Failed)), None) if not self._said else None
        if failed is not None:
            self._said.append(complaint(failed))
            then = "it has no reward" if self.errors == "missing" else f"its reward is {self.errors:g}"
            self.say(
                f"an episode failed: {self._said[0]}; {then} (collect.errors); further failures are not "
                "shown, but counted in episodes/failed"
            )


STOP = Guard()


def complaint(failed: Failed) -> str:
    """The reason of a failure, in one line."""
    error = failed.error
    if isinstance(error, SoleraError):
        return str(error)
    return f"prompt {failed.prompt.key!r}: {type(error).__name__}: {one_line(error)}"


def rollouts_of(attempted: Iterable[Attempted]) -> list[Rollout]:
    """The rollouts that count: all successful ones, and failed ones with a fixed reward."""
    found = (each.rollout if isinstance(each, Failed) else each for each in attempted)
    return [rollout for rollout in found if rollout is not None]


async def attempt(
    task: Task, engine: Engine | Seat, prompt: Prompt, sampling: Sampling, seed: int, guard: Guard = STOP
) -> Attempted:
    """Run one episode. If it fails and the guard allows it, try again with new random numbers.

    An engine failure is not the fault of an episode, so it is always raised.
    """
    tried = 0
    while True:
        episode = Episode(engine, prompt, sampling, stream_seed(seed, 0, tried) if tried else seed)
        try:
            rollout = episode.checked(await task.run(prompt, episode.generate))
            guard.discard(episode.tokens - (rollout.length if rollout.lineage is not None else 0))
            return rollout
        except Exception as error:
            failure = episode.engine_error or error
            if not getattr(failure, "__notes__", None):  # an engine raises one error for all its requests
                failure.add_note(f"while attempting prompt {prompt.key!r}")
            if failure is not error:  # the task has replaced the engine's error by its own
                raise failure from None
            if episode.engine_error is not None or isinstance(error, StopRunError):
                raise
            if tried >= guard.retries:
                if guard.errors == "stop":
                    raise
                failed = episode.failed(error, guard.errors)
                guard.discard(failed.tokens - failed.member().length)
                return failed
        guard.discard(episode.tokens)
        tried += 1


@overload
def attempt_all(
    task: Task,
    engine: Engine,
    attempts: Iterable[tuple[Prompt, int]],
    sampling: Sampling,
    meanwhile: Callable[[], None] | None = None,
    *,
    events: EventLoop | None = None,
) -> list[Rollout]: ...


@overload
def attempt_all(
    task: Task,
    engine: Engine,
    attempts: Iterable[tuple[Prompt, int]],
    sampling: Sampling,
    meanwhile: Callable[[], None] | None,
    guard: Guard,
    *,
    events: EventLoop | None = None,
) -> list[Attempted]: ...


def attempt_all(
    task: Task,
    engine: Engine,
    attempts: Iterable[tuple[Prompt, int]],
    sampling: Sampling,
    meanwhile: Callable[[], None] | None = None,
    guard: Guard = STOP,
    *,
    events: EventLoop | None = None,
) -> list[Rollout] | list[Attempted]:
    """Run one episode for each (prompt, seed), all concurrently, so that the engine can batch them. `meanwhile` is
    called in this thread once all of them have sent their first request. By default, an episode that fails raises.

    Episodes run in the thread of `events`. Without it, an event loop is created for this call."""
    if events is None:
        with EventLoop() as own:
            return attempt_all(task, engine, attempts, sampling, meanwhile, guard, events=own)
    asked = threading.Event()
    begun = events.begin(episodes(task, engine, list(attempts), sampling, guard, events.in_rounds, asked.set))
    try:
        if meanwhile is not None:
            asked.wait()
            meanwhile()
    except BaseException:
        begun.cancel()
        raise
    attempted = begun.result()
    guard.tell(attempted)
    return attempted


async def episodes(
    task: Task,
    engine: Engine,
    attempts: list[tuple[Prompt, int]],
    sampling: Sampling,
    guard: Guard,
    in_rounds: bool,
    asked: Callable[[], None] = lambda: None,
) -> list[Attempted]:
    """Run all episodes. Call `asked` once each has sent its first request to the engine or waits for something else."""
    loop = asyncio.get_running_loop()
    rounds = Rounds(engine, len(attempts)) if in_rounds else None
    running = list[asyncio.Task[Attempted]]()
    try:
        groups = {id(prompt): Company() for prompt, _ in attempts}
        for number, (prompt, seed) in enumerate(attempts):
            writer, end = (rounds.seat(number), partial(rounds.end, number)) if rounds else (engine, _nothing)
            context = groups[id(prompt)].member(number, end)
            trying = attempt(task, writer, prompt, sampling, seed, guard)
            running.append(asyncio.Task(trying, loop=loop, context=context))
            running[-1].add_done_callback(partial(groups[id(prompt)].leave, number))
            if rounds:
                running[-1].add_done_callback(end)
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # lets all episodes send their first request
        asked()
        return await all_or_first_error(running)
    except BaseException:  # the first error cancels the other episodes
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise
    finally:
        asked()


async def all_or_first_error(running: Items["asyncio.Task[T]"]) -> list[T]:
    """The results of tasks, in order. If one fails, raise its error at once, whatever the others still do."""
    if running:
        await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
    for each in running:
        if each.done():
            each.result()
    return [await each for each in running]


def _nothing(_: object = None) -> None: ...


class Episode:
    """One run of a task. Passes its turns to the engine and remembers them."""

    def __init__(self, engine: Engine | Seat, prompt: Prompt, sampling: Sampling, seed: int) -> None:
        self.engine = engine
        self.prompt = prompt
        self.sampling = sampling
        self.seed = seed
        self.turns: list[tuple[tuple[int, ...], Completion]] = []
        self.engine_error: Exception | None = None
        self._asked = 0
        self._full = 0

    async def generate(
        self,
        token_ids: tuple[int, ...],
        *,
        max_tokens: int | None = None,
        stop: str | Items[str] = (),
        temperature: float | None = None,
        room: int | None = None,
    ) -> Completion:
        """The `Generate` that the task is given."""
        sampling = turn_sampling(self.sampling, max_tokens, stop, temperature, room)
        if token_ids is not self.prompt.token_ids:
            token_ids = token_ids_of(token_ids, "the input of generate")
        if not token_ids:
            raise SoleraError("the input of generate is empty: it needs at least one token")
        number, self._asked = self._asked, self._asked + 1
        seed = stream_seed(self.seed, number) if number else self.seed
        try:
            completion = await self.engine.generate(token_ids, sampling, seed)
        except BadRequestError:
            raise
        except Exception as error:
            self.engine_error = error
            raise
        if sampling.temperature == 0 < self.sampling.temperature:
            completion = replace(completion, trained=False)
        self.turns.append((token_ids, completion))
        if not len(completion.token_ids_T):
            self._count_full()
        return completion

    def _count_full(self) -> None:
        self._full += 1
        if self._full > MOST_FULL:
            raise SoleraError(
                f"the context is full, and generate was called {MOST_FULL} times since: end the episode "
                "when a completion's finish_reason is length"
            )

    @property
    def tokens(self) -> int:
        """Tokens that the engine has written for it."""
        return sum(len(completion.token_ids_T) for _, completion in self.turns)

    def checked(self, rollout: Rollout) -> Rollout:
        """Return the rollout; raise an error if it claims that the engine generated something else."""
        key = self.prompt.key
        if not isinstance(rollout, Rollout):
            gave = f"run returned {kind(rollout)}"
            raise SoleraError(f"prompt {key!r}: {gave}; it must return a solera.Rollout (Rollout.of)")
        if rollout.origin != "self" and rollout.lineage is None:  # text of another author
            return rollout
        if rollout.prompt_key != key:
            raise SoleraError(f"prompt {key!r}: run returned a rollout of another prompt, {rollout.prompt_key!r}")
        for sequence in rollout.sequences:
            if not self._wrote(sequence):
                raise SoleraError(f"prompt {key!r}: {self._difference(sequence)}")
        return rollout

    def _wrote(self, sequence: Sequence) -> bool:
        """Whether every token attributed to the policy comes from a completion that `generate` returned, whole, after
        the tokens it was given, and with its log-probabilities and versions."""
        if len(self.turns) == 1 and self._is_answer(sequence):
            return True
        mask_T, version_T, logp_T = sequence.mask_T, sequence.version_T, sequence.behaviour_logp_T
        covered_T = np.zeros_like(mask_T)
        for given, completion in self.turns:
            start, stop = len(given), len(given) + len(completion.token_ids_T)
            if stop > len(mask_T) or not mask_T[start:stop].any():
                continue  # most turns of a rewritten history: so that all of it is not compared for each of its turns
            written_by = [version for tokens, version in completion.versions for _ in range(tokens)]
            covered_T[start:stop] |= (
                np.array_equal(sequence.token_ids_T[start:stop], completion.token_ids_T)
                and np.array_equal(sequence.token_ids_T[:start], np.array(given, np.int32))
                and version_T[start:stop].tolist() == written_by
                and (logp_T is None or np.array_equal(logp_T[start:stop], completion.behaviour_logp_T))
            )
        return not (mask_T & ~covered_T).any()

    def _is_answer(self, sequence: Sequence) -> bool:
        """Check the usual case, a prompt and one response. This takes a tenth of the time of the full check."""
        ((given, completion),), spans = self.turns, sequence.spans
        return (
            sequence.span_logp is completion.behaviour_logp_T
            and bool(spans)
            and spans[0].start == len(given)  # they are as long as the rest of the text: nothing is between them
            and completion.versions == tuple([(stop - start, version) for start, stop, version in spans])
            and sequence.token_ids_T.tobytes() == array_of(given).tobytes() + completion.token_ids_T.tobytes()
        )

    def _difference(self, sequence: Sequence) -> str:
        ids, advice = sequence.token_ids_T.tolist(), "build it with Rollout.of from the inputs and results of generate"
        said = "the rollout does not match what the engine received and generated"
        texts = [[*given, *completion.token_ids_T.tolist()] for given, completion in self.turns]
        text = max(texts, key=lambda text: (_common(ids, text), len(text)), default=list[int]())
        same = _common(ids, text)
        if same < min(len(ids), len(text)):
            said += f" (token {same} of the rollout is {ids[same]}, the engine had {text[same]})"
        elif same == len(text):
            said += " (it differs in log-probabilities or versions, or holds more than was written)"
        else:
            said += f" (it ends after {len(ids)} tokens, the engine had {len(text)})"
        return f"{said}: {advice}"

    def failed(self, error: Exception, errors: Literal["stop", "missing"] | float) -> Failed:
        rollout = None if isinstance(errors, str) else _rollout(self.prompt, self._history(), errors)
        return Failed(self.prompt, error, self.tokens, rollout)

    def _history(self) -> tuple[tuple[int, ...] | Completion, ...]:
        """The input and output of the engine up to the last turn, in the form of `Sequence.turns`."""
        last = [*self.turns[-1][0], *self.turns[-1][1].token_ids_T.tolist()] if self.turns else []
        parts, end = list[tuple[int, ...] | Completion](), 0
        for given, completion in sorted(self.turns, key=lambda turn: len(turn[0])):
            whole = [*given, *completion.token_ids_T.tolist()]
            if end <= len(given) and whole == last[: len(whole)]:
                parts += [given[end:], completion]
                end = len(whole)
        return tuple(parts)


def _common(one: list[int], other: list[int]) -> int:
    """Number of leading tokens that both share."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _rollout(prompt: Prompt, parts: tuple[tuple[int, ...] | Completion, ...], reward: float) -> Rollout:
    """The rollout of a failed episode, from what was generated, if anything."""
    rewards = (Reward(reward, FAILED, "collect.errors"),)
    if parts:
        return Rollout.of_sequences(prompt, parts, rewards=rewards)
    return Rollout(prompt.key, (Sequence.turns((prompt.token_ids,)),), rewards)
