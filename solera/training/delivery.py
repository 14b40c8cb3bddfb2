"""Sends the learner's weights to the engine, and proves that the engine has them and generates with them."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence

from solera.batch import Scored
from solera.config import InFlight
from solera.protocols import Engine, Learner, Pooled, Writer
from solera.records import Completion, Manifest, Prompt, Rollout, Sampling
from solera.sync import proof
from solera.sync.proof import Canary, SyncFaultError
from solera.tasks.event_loop import Begun, EventLoop

CANARY_TOKENS = 2
"""Tokens generated after each canary prompt: one directly from the prompt, one from the engine's cache."""
CANARY_SHARE = 0.005
"""If the engine shares the learner's memory, canaries may take this share of the time. Otherwise every sync has one.
"""


class Delivery:
    """Sends weights and checks them: tensor by tensor against their digests, then by a canary.

    An engine computes the digests of what it holds. (A vLLM server is also told which ones to expect, and refuses
    weights with others.) The canary is a few fixed prompts that the engine continues with fixed seeds, in the way it
    writes data. The learner scores what came: an engine with other weights could not have written it with these
    log-probabilities, whatever it says it holds.

    `count` is told how many tokens the engine wrote for a canary.

    Where the engine has the learner's memory (`shared`) nothing is copied, what is compared is where it lies, and a
    canary comes only now and then.

    `deliver` waits for the canary, which an engine writes only after it has computed the cache of what is in flight
    again. But if `score_as_engine` can score with the engine's weights, the learner may go on, and `finish` waits. It
    has to come before anything that the new weights wrote is used or saved. Digests of what was scored with are
    compared with those of what was sent, so this proves as much.
    """

    def __init__(
        self,
        learner: Learner,
        engine: Engine,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        retry: bool,
        say: Callable[[str], None],
        shared: bool = False,
        in_flight: InFlight = "drain",
        events: EventLoop | None = None,
        count: Callable[[int], None] = lambda tokens: None,
        score_as_engine: Callable[[Sequence[Rollout]], tuple[Scored, Manifest]] | None = None,
    ) -> None:
        self.count = count
        self.score_as_engine = score_as_engine
        self.events = events or EventLoop()
        self.learner = learner
        self.engine = engine
        self.prompts = prompts
        self.sampling = Sampling(sampling.temperature, min(CANARY_TOKENS, sampling.max_tokens))
        self.retry = retry
        self.say = say
        self.shared = shared
        self.in_flight = in_flight
        self._sent: Manifest | None = None
        self._canaries: dict[Writer, Canary] = {}
        """The last canary of each engine."""
        self._begun: Begun[list[Completion]] | None = None
        """A canary under way, of the weights that were sent last."""
        self._next_canary = -math.inf
        """Time from which the next canary is allowed."""
        self._proving = 0.0
        """Seconds of the current delivery that were spent on its proof."""

    def deliver(self) -> dict[str, float]:
        """Send the learner's weights. A fault stops the run. With `retry`, the weights are sent once more first.

        `time/sync/proof` holds the seconds of the digests on both sides and of the canary. A learner that describes its
        weights while it gathers them needs no further time for its side.
        """
        self._proving, faults = sum(self.finish().values()), 0.0
        try:
            self._deliver()
        except SyncFaultError as fault:
            if not self.retry:
                raise
            self.say(f"{fault}; sending again")
            faults = 1.0
            self._deliver()
        return {"sync/faults": faults, "time/sync/proof": self._proving}

    def score(self, rollouts: Sequence[Rollout]) -> Scored:
        """Score with the weights that were sent last, which the learner may no longer have."""
        assert self._sent is not None
        return self._score(rollouts, self._sent)

    def _score(self, rollouts: Sequence[Rollout], sent: Manifest) -> Scored:
        if self.learner.version == sent.version or self.score_as_engine is None:
            return self.learner.score(rollouts)
        scored, held = self.score_as_engine(rollouts)
        if (wrong := proof.difference(sent, held, None)) is not None:
            raise SyncFaultError(f"sync of version {sent.version}: {wrong}")
        return scored

    @property
    def is_proved(self) -> bool:
        """Whether all checks of the last delivery are done."""
        return self._begun is None

    @property
    def canary_has_come(self) -> bool:
        """Whether a canary is under way that `finish` would not have to wait for."""
        return self._begun is not None and self._begun.wait(0)

    def finish(self) -> dict[str, float]:
        """Wait for the canary of the last delivery if one is under way, and check it. Returns the seconds that took."""
        if self._begun is None:
            return {}
        assert self._sent is not None
        start = time.perf_counter()
        fault = self._fault(self.engine, self._sent, None, self._begun.result())
        if fault is not None:
            raise SyncFaultError(fault)
        self._begun = None
        return {"time/sync/proof": time.perf_counter() - start}

    def _deliver(self) -> None:
        dtype, before = self.engine.dtype, self.engine.work
        held = self.engine.load(self.learner.weights(dtype), self.in_flight)
        self._proving += (self.engine.work - before).digesting
        start = time.perf_counter()
        sent = self.learner.manifest(dtype, self.shared)
        self._proving += time.perf_counter() - start
        wrong = proof.difference(sent, held, self._sent)
        if wrong is None and self.score_as_engine is not None and not self.retry:
            self._begin()
        elif wrong is not None or time.perf_counter() >= self._next_canary:
            self._prove(sent, wrong)
        self._sent = sent

    def _begin(self) -> None:
        """Ask for a canary, and go on. What is asked afterwards is not of the same batch, which would be a long one."""
        asked = threading.Event()
        self._begun = self.events.begin(self._write(self.engine, asked.set))
        asked.wait()

    def _prove(self, sent: Manifest, wrong: str | None) -> None:
        """Check a canary of the weights sent. After a fault, a second one tells late weights from lost ones."""
        start = time.perf_counter()
        if isinstance(self.engine, Pooled):
            self.engine.prove(lambda engine: self._fault(engine, sent, wrong))
        elif (fault := self._fault(self.engine, sent, wrong)) is not None:
            raise SyncFaultError(fault)
        now = time.perf_counter()
        self._proving += now - start
        self._next_canary = now + (now - start) / CANARY_SHARE if self.shared else -math.inf

    def _fault(
        self, engine: Writer, sent: Manifest, wrong: str | None, written: list[Completion] | None = None
    ) -> str | None:
        """Check a canary of one engine, which may be written already. Returns what is wrong with it, or `wrong`."""
        before, allowed = self._canaries.get(engine), proof.tolerance(self.engine.dtype, self.sampling.temperature)
        canary = self._canary(engine, sent, written)
        unlike = canary.fault(sent, before, allowed)
        if unlike is not None and self._canary(engine, sent).fault(sent, before, allowed) is None:
            wrong = f"the weights were delivered after the next generation had begun ({unlike})"
        elif unlike is not None and wrong is None:
            wrong = f"the engine says it holds these weights but does not write with them ({unlike})"
        if wrong is not None:
            return f"sync of version {sent.version}: {wrong}"
        # One that repeats the last is no new mark: steps too small to show must add up against the first.
        self._canaries[engine] = before if before is not None and canary.repeats(before) else canary
        return None

    async def _write(self, engine: Writer, asked: Callable[[], None] = lambda: None) -> list[Completion]:
        """Write a canary. Call `asked` once the engine has all requests."""
        requests = enumerate(self.prompts)
        writing = asyncio.gather(*(engine.generate(p.token_ids, self.sampling, n) for n, p in requests))
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # an engine takes what was asked in one turn of the event loop together
        finally:
            asked()
        return await writing

    def _canary(self, engine: Writer, sent: Manifest, written: list[Completion] | None = None) -> Canary:
        completions = self.events.run(self._write(engine)) if written is None else written
        self.count(sum(len(completion.token_ids_T) for completion in completions))
        rollouts = tuple(Rollout.of(p, c) for p, c in zip(self.prompts, completions, strict=True))
        scored = self._score(rollouts, sent)
        return Canary(
            tuple(tuple(completion.token_ids_T.tolist()) for completion in completions),
            frozenset((c.lineage, version) for c in completions for _, version in c.versions),
            scored.behaviour_logp_T,
            scored.logp_T,
        )
