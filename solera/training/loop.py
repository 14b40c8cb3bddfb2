"""The algorithm. It names no concrete engine, learner, store or task.

Its parts have the settings v (batches between two syncs), i (passes over a batch) and the offset (batches that wait in
the store). Without an offset, `v=1, i=1` is on-policy GRPO, `v=1, i>1` is sample reuse, and `v>1, i=1` is off-policy
GRPO.
"""

from collections.abc import Callable
from dataclasses import dataclass

from solera.batch import Batch
from solera.config import CollectConfig
from solera.diagnosis.mismatch import Mismatch
from solera.evaluate.accuracy import Evaluator
from solera.folder.account import Account
from solera.folder.checkpoint import RunState, Saver
from solera.objectives.objective import Objective
from solera.protocols import Engine, Learner, Pooled, Sink, Store, Supply
from solera.records import Group, PolicyVersion
from solera.sync.rules import SyncRule, SyncState
from solera.training.accounting import Accounting
from solera.training.collation import collate, count_live_groups
from solera.training.delivery import Delivery
from solera.training.probe import Probe
from solera.training.step_metrics import StepMetrics, off_policy_metrics


@dataclass(frozen=True)
class Loop:
    """A run's parts, put together by `build.py`. `stop` asks, after every step, whether someone wants it to end."""

    steps: int
    seed: int
    collect: CollectConfig
    objective: Objective
    supply: Supply
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
    account: Accounting | None = None
    """What became of every token. It is taken at every checkpoint and at the end."""
    kept_for: float = 0
    """For how many batches after a sync the engine is certain to keep its weights. During these, the next batch is
    generated while the learner works on the current one. 0 turns this off."""

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
            metrics = StepMetrics()
            if self.evaluator.on_engine:  # it then has the newest weights, and at the first step any at all
                sync = self.synced(sync, metrics)
            if self.evaluator.due(step):
                with metrics.timed("evaluate"):
                    metrics.add(self.evaluator.evaluate())
            if step > start and self.saver.due(step):
                self.prove(metrics)
                self.save(sync, metrics.get("eval/pass@1"))
            sync = self.synced(sync, metrics)
            with metrics.timed("generate"):
                generated, groups = self.draw()
                metrics.add({"tokens/generated": generated})
            self.write_ahead(step, sync, groups)
            judged = self.probe.judges(step, last=step + 1 == self.steps)
            if not self.delivery.is_proved and (judged or self.wrote_any(groups)):
                self.prove(metrics)
            with metrics.timed("diagnose"):
                proximal = self.probe.score() if judged else None
            with metrics.timed("learn"):
                batch = self.collate(groups)
                update = learner.update(batch)
            if self.delivery.canary_has_come:
                self.prove(metrics)
            with metrics.timed("diagnose"):
                diagnosis = off_policy_metrics(batch, update, self.mismatch, step, learner.lineage)
                diagnosis |= self.probe.judge(proximal)
                metrics.add(diagnosis)
            with metrics.timed("store"):
                self.store.record(batch.uses)
            if isinstance(self.engine, Pooled):
                metrics.add(self.engine.take_metrics())
            self.sink.log(step, metrics.row(batch, update, sync, self.supply, self.store))
            sync = self.rule(sync, learner.version, diagnosis)
            if self.stop():
                self.save(sync, None)
                return False
        if self.evaluator.on_engine:
            sync = self.synced(sync, StepMetrics())
        self.delivery.finish()
        self.probe.finish()
        final = self.evaluator.evaluate()
        if self.steps > start and self.saver.every:  # whatever the step: a finished run can be extended
            self.save(sync, final["eval/pass@1"])
        else:
            self.take_account()
        self.sink.log(self.steps, final | self.probe.take_metrics())
        return True

    def synced(self, sync: SyncState, metrics: StepMetrics) -> SyncState:
        """Send the learner's weights to the engine if that is due."""
        if not sync.due:
            return sync
        with metrics.timed("diagnose"):
            self.probe.finish()  # one version writes all of it
        with metrics.timed("sync"):
            metrics.add(self.delivery.deliver())
        with metrics.timed("diagnose"):
            self.probe.renew(sync)
        return sync.done(self.learner.version)

    def wrote_any(self, groups: list[Group]) -> bool:
        """Whether the engine's present weights wrote a trained token of these groups."""
        now = self.engine.version
        rollouts = (rollout for group in groups for rollout in group.rollouts)
        return any(span.version == now for rollout in rollouts for text in rollout.sequences for span in text.spans)

    def prove(self, metrics: StepMetrics) -> None:
        """Finish the proof of the last sync, if it is not."""
        if self.delivery.is_proved:
            return
        with metrics.timed("sync"):
            for name, seconds in self.delivery.finish().items():
                metrics.add({name: (metrics.get(name) or 0.0) + seconds})

    def save(self, sync: SyncState, accuracy: float | None) -> None:
        """Write all that a resumed run needs: it goes on bit for bit as this one would."""
        self.delivery.finish()
        self.probe.finish()
        learner, supply = self.learner, self.supply.state()
        state = RunState(
            learner.lineage, learner.version, sync, supply.position, self.store.watermark(), accuracy,
            learner.compute, self.store.uses_before(learner.version), supply.running, supply.ready,
            self.take_account(), self.mismatch.engine,
        )  # fmt: skip
        tensors = {"learner": learner.state(), "engine": dict(self.engine.weights().tensors)}
        self.saver.save(state, tensors | {"probe": self.probe.state()})

    def take_account(self) -> Account | None:
        if self.account is None:
            return None
        return self.account.take(PolicyVersion(self.learner.lineage, self.learner.version), self.supply.idle)

    def collate(self, groups: list[Group]) -> Batch:
        """Advantages and ages as the learner's present version sees them."""
        return collate(
            groups, self.objective, now=self.learner.version, lineage=self.learner.lineage, seed=self.seed,
            mask_truncated=self.mask_truncated,
        )  # fmt: skip

    def draw(self) -> tuple[int, list[Group]]:
        """A batch of groups and the tokens generated for it; with refill, more groups in place of flat ones."""
        wanted = self.collect.prompts
        generated, groups = self.draw_groups(wanted)
        for _ in range(self.collect.refill_rounds if self.objective.refill else 0):
            missing = self.collect.prompts - count_live_groups(groups, self.mask_truncated)
            if missing <= 0:
                break
            wanted += missing
            more, groups = self.draw_groups(wanted)
            generated += more
        return generated, groups

    def draw_groups(self, wanted: int) -> tuple[int, list[Group]]:
        """That many groups, written as far as they are missing, and the tokens generated."""
        now = PolicyVersion(self.learner.lineage, self.learner.version)
        generated = self.supply.wait(wanted, now)
        return generated, self.store.draw(wanted, self.collect.group_size, now)

    def write_ahead(self, step: int, sync: SyncState, groups: list[Group]) -> None:
        """Let the next batch be written meanwhile, unless a sync or an evaluation comes before it."""
        kept = step + 1 < min(self.steps, sync.engine_version + self.kept_for)
        self.supply.drawn(groups, ahead=self.collect.prompts if kept and not self.evaluator.due(step + 1) else 0)
