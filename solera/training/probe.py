"""The probe: groups that the engine's policy generated, that are never trained on, and on which updates are judged."""

import dataclasses
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from solera.batch import FloatArray, Scored
from solera.config import DiagnoseConfig
from solera.diagnosis.divergence import LogRatios
from solera.diagnosis.improvement import estimate_improvement
from solera.objectives.ratio import bounded_exp, response_sum
from solera.protocols import Engine, Learner, Store, Task
from solera.records import PROBE, Prompt, Rollout, Sampling
from solera.streams import stream_seed
from solera.sync.rules import SyncState
from solera.tasks.episodes import STOP, Attempted, Guard, episodes, rollouts_of
from solera.tasks.event_loop import Begun, EventLoop

TOKEN_ORDER = "rollouts"
"""Order of the tokens in a checkpoint's probe. In older checkpoints the order depended on micro-batches."""


class Probe:
    """One group for each of some held-out prompts, generated right after a sync, with the weights of the learner.

    The learner scores them with the same weights: that is `log α` of every later comparison, so no error of the
    engine's arithmetic is in it. A new sync ends a probe; there is one where a step to judge is expected before the
    next sync.

    The learner waits for the responses. But if `score_as_sent` can score them with the weights that were sent, it goes
    on. If a step is due for judging before they are there, the first one after that is judged instead. The last step
    before the sync that is expected next waits, and so does each one if all are judged. `interval` is how many batches
    are expected before the second sync; later ones are expected as far apart as the last two were.
    """

    def __init__(
        self,
        config: DiagnoseConfig,
        task: Task,
        engine: Engine,
        store: Store,
        learner: Learner,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling,
        seed: int,
        interval: float,
        say: Callable[[str], None],
        guard: Guard = STOP,
        events: EventLoop | None = None,
        score_as_sent: Callable[[Sequence[Rollout]], Scored] | None = None,
    ) -> None:
        self.events = events or EventLoop()
        self.score_as_sent = score_as_sent
        self.guard = guard
        self.task = task
        self.engine = engine
        self.store = store
        self.learner = learner
        self.prompts = prompts
        self.size = min(config.probe_prompts, len(prompts))
        self.every = config.every
        self.sampling = sampling
        self.group_size = config.probe_group
        self.seed = seed
        self.say = say
        self._warned = False
        self._begun: Begun[list[Attempted]] | None = None
        """Responses under way."""
        self._alpha_version = 0
        """The engine's, when they were begun."""
        self._interval = interval
        self._next_sync = 0.0
        """The step before which the next sync is expected."""
        self._owed = False
        """Whether a step was to be judged before its probe was written, and none has been judged since."""
        self._metrics: dict[str, float] = {}
        """What is in no row yet."""
        self._rollouts: tuple[Rollout, ...] = ()
        self._alpha_logp_T: FloatArray = np.zeros(0, np.float32)
        self._latest: tuple[int, Scored] | None = None
        """The latest scores of the probe, and their version. The scores after one step are those before the next."""

    def due(self, step: int) -> bool:
        """Whether this step is judged: one in `every`, chosen by the seed, so that data of every age is met."""
        if not self.size or not self.every:
            return False
        return step % self.every == stream_seed(self.seed, step // self.every, 2) % self.every

    def renew(self, sync: SyncState) -> None:
        """Begin a new probe after a sync. `sync` is the state before it."""
        self._rollouts, self._latest = (), None
        now = self.learner.version
        interval = now - sync.engine_version if sync.count else self._interval
        self._next_sync = now + interval
        if not self._owed and not any(map(self.due, range(now, now + int(min(interval, 2 * self.every))))):
            return  # one in every 2 · every steps is due, so no longer interval need be looked through
        chosen = Random(stream_seed(self.seed, now, 3)).sample(self.prompts, self.size)
        attempts = [
            (prompt, stream_seed(self.seed, now, 3, number, member))
            for number, prompt in enumerate(chosen)
            for member in range(self.group_size)
        ]
        self._alpha_version = now
        self._begun = self.events.begin(
            episodes(self.task, self.engine, attempts, self.sampling, self.guard, self.events.in_rounds)
        )
        if self.score_as_sent is None:
            self.finish()

    def finish(self) -> None:
        """Wait for the responses of a probe that was begun. Store and score them."""
        if self._begun is None:
            return
        begun, self._begun = self._begun, None
        attempted = begun.result()
        self.guard.tell(attempted)
        marked = [dataclasses.replace(rollout, origin=PROBE) for rollout in rollouts_of(attempted)]
        ids = self.store.add_at_once(marked)
        self._keep([rollout.numbered(id_) for id_, rollout in zip(ids, marked, strict=True)])
        if self._rollouts:
            self._alpha_logp_T = self._score_as_alpha().logp_T
        tokens = sum(rollout.length for rollout in marked)
        self._metrics["tokens/probe"] = self._metrics.get("tokens/probe", 0) + tokens

    def _score_as_alpha(self) -> Scored:
        if self.learner.version == self._alpha_version:
            return self._score()
        assert self.score_as_sent is not None
        return self.score_as_sent(self._rollouts)

    def take_metrics(self) -> dict[str, float]:
        """What is in no row yet. The caller puts it into one."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def judges(self, step: int, last: bool = False) -> bool:
        """Whether this step is judged: a due one, or the first after it that need not wait. `last`: none comes after
        it."""
        self._owed |= self.due(step)
        judged = self._owed and (last or not self._can_come_later(step))
        self._owed &= not judged
        return judged

    def _can_come_later(self, step: int) -> bool:
        under_way = self._begun is not None and not self._begun.wait(0)
        return under_way and self.score_as_sent is not None and self.every > 1 and step + 1 < self._next_sync

    def score(self) -> Scored | None:
        """Score the probe before the update of a step that is judged. `None` if there is no probe."""
        self.finish()
        return self._score() if self._rollouts else None

    def judge(self, proximal: Scored | None) -> dict[str, float]:
        """Estimate what the update did, and how far the policy now is from α. `proximal` is what `score` returned."""
        if self._begun is not None and self._begun.wait(0):
            self.finish()  # an error ends the run as soon as it is known
        metrics = self.take_metrics()
        if proximal is None:
            return metrics
        scored = self._score()
        ratios = LogRatios(scored.logp_T - self._alpha_logp_T, scored.response_T, np.ones(len(self._rollouts)))
        found = estimate_improvement(
            self._w(scored), self._w(proximal),
            torch.tensor([rollout.reward for rollout in self._rollouts], dtype=torch.float64), self._groups(),
        )  # fmt: skip
        if found is not None and not found.covered and not self._warned:
            self._warned = True
            self.say(
                f"version {self.learner.version}: importance weights on the probe average {found.mean_w:.2f}, not 1: "
                "the engine's policy hardly writes what the learner's would, so the improvement is a guess; sync sooner"
            )
        metrics |= {f"probe/{name}": value for name, value in ratios.divergences().items()}
        return metrics | (found.metrics() if found else {})

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, of a probe that is finished. The responses themselves are in the store."""
        ids = [rollout.id for rollout in self._rollouts]
        alpha_logp_T = torch.from_numpy(self._alpha_logp_T)
        return {"ids": ids, "alpha_logp_T": alpha_logp_T, "order": TOKEN_ORDER, "owed": self._owed}

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("order") != TOKEN_ORDER:
            self.say("an older Solera wrote this checkpoint's probe; updates are judged again after the next sync")
            return
        self._keep(self.store.fetch(state["ids"]))
        self._alpha_logp_T = state["alpha_logp_T"].numpy()
        self._owed = state.get("owed", False)

    def _keep(self, rollouts: list[Rollout]) -> None:
        self._rollouts = tuple(r for r in rollouts if r.reward is not None and r.length)

    def _score(self) -> Scored:
        if self._latest is None or self._latest[0] != self.learner.version:
            self._latest = self.learner.version, self.learner.score(self._rollouts)
        return self._latest[1]

    def _w(self, scored: Scored) -> Tensor:
        """`π(y)/α(y)` of each response."""
        log_ratio_T = torch.from_numpy(scored.logp_T - self._alpha_logp_T).double()
        return bounded_exp(response_sum(log_ratio_T, torch.from_numpy(scored.response_T), len(self._rollouts)))

    def _groups(self) -> Tensor:
        number: dict[str, int] = {}
        return torch.tensor([number.setdefault(rollout.prompt_key, len(number)) for rollout in self._rollouts])
