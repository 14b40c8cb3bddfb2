"""The algorithm. It names no concrete engine, store or task; `(v, i)` and the offset are settings of its parts.

`v=1, i=1` is on-policy GRPO, `v=1, i>1` reuses samples, `v>1, i=1` is off-policy GRPO: one loop.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from solera.config import CollectConfig
from solera.diagnosis.mismatch import Mismatch
from solera.evaluate.accuracy import Evaluator
from solera.folder.checkpoint import RunState, Saver
from solera.learner.batch import Batch, collate, count_live_groups
from solera.learner.learner import Learner
from solera.protocols import Engine, Sink, Store
from solera.records import Group, PolicyVersion
from solera.sync.rules import SyncRule, SyncState
from solera.training.collector import Collector
from solera.training.consumed import account
from solera.training.delivery import Delivery
from solera.training.probe import Probe


@dataclass(frozen=True)
class Loop:
    """A run's parts, put together by `build.py`. `stop` asks, after every step, whether someone wants it to end."""

    steps: int
    collect: CollectConfig
    refill: bool
    collector: Collector
    engine: Engine
    store: Store
    learner: Learner
    delivery: Delivery
    probe: Probe
    mismatch: Mismatch
    rule: SyncRule
    evaluator: Evaluator
    sink: Sink
    saver: Saver
    stop: Callable[[], bool]
    mask_truncated: bool
    kept_for: float = 0
    """Batches for which the engine surely keeps its weights after a sync: within them the next one is written while
    the present one is learned from. 0: never so."""

    def run(self, sync: SyncState) -> bool:
        """Learn from `steps` batches, or until stopped: then a checkpoint is written and False returned.

        Row k of the metrics is version k: its accuracy, and what batch k did to it. However it ends, what it has
        learned from is in the store afterwards.
        """
        try:
            return self._run(sync)
        finally:
            self.store.flush()

    def _run(self, sync: SyncState) -> bool:
        learner, start = self.learner, self.learner.version
        for step in range(start, self.steps):
            clock, metrics = Clock(), dict[str, float]()
            if self.evaluator.due(step):
                with clock("time/evaluate"):
                    metrics = self.evaluator.evaluate()
            if step > start and self.saver.due(step):
                self.save(sync, metrics.get("eval/pass@1"))
            if sync.due:
                with clock("time/sync"):
                    metrics |= self.delivery.deliver()
                with clock("time/diagnose"):
                    metrics |= self.probe.renew(sync)
                sync = sync.done(learner.version)
            with clock("time/generate"):
                generated, groups = self.draw()
            self.begin_next(step, sync)
            with clock("time/diagnose"):
                proximal = self.probe.score(step)
            with clock("time/learn"):
                batch = self.collate(groups)
                update = learner.update(batch)
            with clock("time/diagnose"):
                diagnosis = account(batch, update, self.mismatch, step, learner.lineage) | self.probe.judge(proximal)
            with clock("time/store"):
                self.store.record(batch.uses)
            metrics |= {"tokens/generated": generated, "sync/version": sync.engine_version, "sync/count": sync.count}
            metrics |= self.collector.take_metrics()
            metrics |= {f"draw/{reason}": count for reason, count in self.store.passed_over().items()}
            self.sink.log(step, {**metrics, **batch.metrics, **update.metrics, **diagnosis, **clock.seconds})
            sync = self.rule(sync, learner.version, diagnosis)
            if self.stop():
                self.save(sync, None)
                return False
        metrics = self.evaluator.evaluate()
        if self.steps > start and self.saver.every:  # whatever the step: a finished run can be extended
            self.save(sync, metrics["eval/pass@1"])
        self.sink.log(self.steps, metrics)
        return True

    def save(self, sync: SyncState, accuracy: float | None) -> None:
        """Write all that a resumed run needs: it goes on bit for bit as this one would."""
        learner = self.learner
        state = RunState(
            learner.lineage, learner.version, sync, self.collector.position, self.store.watermark(), accuracy,
            str(learner.working.compute).removeprefix("torch."), self.store.uses_before(learner.version),
        )  # fmt: skip
        tensors = {"learner": learner.state(), "engine": dict(self.engine.weights().tensors)}
        self.saver.save(state, tensors | {"probe": self.probe.state()})

    def collate(self, groups: list[Group]) -> Batch:
        """Advantages and ages as the learner's present version sees them."""
        learner = self.learner
        return collate(
            groups, learner.objective, now=learner.version, lineage=learner.lineage, seed=self.collector.seed,
            mask_truncated=self.mask_truncated,
        )  # fmt: skip

    def draw(self) -> tuple[int, list[Group]]:
        """A batch of groups and the tokens generated for it; with refill, more groups in place of flat ones."""
        wanted = self.collect.prompts
        generated, groups = self.supply(wanted)
        for _ in range(self.collect.refill_rounds if self.refill else 0):
            missing = self.collect.prompts - count_live_groups(groups, self.mask_truncated)
            if missing <= 0:
                break
            wanted += missing
            more, groups = self.supply(wanted)
            generated += more
        return generated, groups

    def begin_next(self, step: int, sync: SyncState) -> None:
        """Let the next batch be written meanwhile, where neither a sync nor an evaluation comes before it."""
        kept = step + 1 < min(self.steps, sync.engine_version + self.kept_for)
        self.collector.begin(self.collect.prompts if kept and not self.evaluator.due(step + 1) else 0)

    def supply(self, wanted: int) -> tuple[int, list[Group]]:
        """That many groups, written as far as they are missing, and the tokens generated."""
        now = PolicyVersion(self.learner.lineage, self.learner.version)
        generated = self.collector.ensure(wanted, now)
        return generated, self.store.draw(wanted, self.collect.group_size, now)


class Clock:
    """Seconds spent under each name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start
