"""Builds the objects of a run. This is the only module that names concrete classes."""

import dataclasses
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from solera import config as configuration
from solera import protocols
from solera.batch import Scored
from solera.config import Config, DiagnoseConfig, DrawConfig, new_per_batch, staleness_of
from solera.diagnosis.mismatch import Mismatch
from solera.engines.absent import NoEngine
from solera.engines.in_process import InProcessEngine
from solera.engines.metered import Metered
from solera.engines.pool import EnginePool
from solera.evaluate.accuracy import Evaluator
from solera.evaluate.attempts import Exam
from solera.folder.checkpoint import Saver
from solera.folder.counts import UNSTORED, Counts
from solera.folder.paths import ACCOUNT, CHECKPOINTS, METRICS, TENSORBOARD, TOKENS
from solera.learner.learner import Learner
from solera.learner.reference import Reference
from solera.models import loading
from solera.models.language_model import LanguageModel
from solera.objectives.objective import Objective
from solera.protocols import Engine, OrderedStore, Sink, Supply, Task
from solera.records import Manifest, Prompt, Rollout, Sampling
from solera.report.console import Progressing
from solera.report.shortage import Shortage
from solera.report.sinks import JsonLines, TensorBoard, WeightsAndBiases
from solera.report.stalling import Stalling
from solera.report.straggling import Straggling
from solera.run.parts import Parts
from solera.run.ranking import open_engines, open_ranks
from solera.run.serving import open_servers
from solera.sharded.learner import ShardedLearner
from solera.sharded.rank import LearnerSpec
from solera.store.deferred import Deferred
from solera.store.drawing import quotas_of
from solera.store.ledger import Ledger
from solera.store.selected import Selected
from solera.sync.proof import tolerance
from solera.sync.rules import SyncRule, always_fresh, kept_for, never, sync_rule, within
from solera.tasks.episodes import Guard
from solera.tasks.event_loop import EventLoop
from solera.training.accounting import Accounting
from solera.training.delivery import Delivery
from solera.training.loop import Loop
from solera.training.probe import Probe
from solera.training.stream import Stream
from solera.training.supply import LockStep

CANARY_PROMPTS = 2
"""Number of training prompts that the engine continues to prove a sync."""


def build_loop(parts: Parts, store: Ledger, sink: Sink, folder: Path, stop: Callable[[], bool] = lambda: False) -> Loop:
    """Build the loop and everything it needs. After every step the loop asks `stop` whether to end."""
    with ExitStack() as opened:
        loop = _loop(parts, store, sink, folder, stop, opened)
        opened.pop_all()
    return loop


def _loop(parts: Parts, store: Ledger, sink: Sink, folder: Path, stop: Callable[[], bool], opened: ExitStack) -> Loop:
    """`opened` closes the learner and the engine if a later part cannot be built."""
    config, objective = parts.config, parts.objective
    learner = learner_of(parts, objective)
    opened.callback(learner.close)
    sampling = Sampling(config.sampling.temperature, config.sampling.max_tokens)
    guard = Guard(config.collect.errors, config.collect.retries, parts.say)
    counts = Counts(folder / TOKENS)
    engine, shared = _engine(parts, learner, folder, counts)
    opened.callback(engine.close)
    drawn_from = store_of(config, store)
    events = EventLoop(in_rounds=config.collect.deterministic)
    served = isinstance(engine, EnginePool)
    if served:
        where = "engines" if config.cluster.engines else "server"
        parts.say(f"evaluation runs on the {where}, with the weights that were published last (eval/version)")
    examined = dataclasses.replace(parts, model=_own_model(parts, learner))
    examiner = engine if served else _examiner(examined, counting(counts, "examiner"))
    exam = build_exam(examined, guard, events, Metered(examiner, counts, "evaluation"))
    as_engine = _scores_as_engine(parts, learner, engine)
    delivery = Delivery(
        learner, engine, _canary_prompts(parts.task, parts.model.max_length), sampling,
        retry=config.sync.on_fault == "retry", say=parts.say, shared=shared, events=events,
        in_flight=config.sync.in_flight if config.collect.mode == "stream" else "drain",
        count=partial(counts.add, "canary"), score_as_engine=as_engine,
    )  # fmt: skip
    return Loop(
        steps=config.run.steps,
        collect=config.collect,
        objective=objective,
        seed=config.run.seed,
        supply=_supply(
            parts, Metered(engine, counts, "training"), drawn_from, sampling,
            guard.discarding(partial(counts.add, UNSTORED)), events,
        ),
        engine=engine,
        store=drawn_from,
        learner=learner,
        delivery=delivery,
        probe=Probe(
            _diagnosed(parts), parts.task, Metered(engine, counts, "probe"), drawn_from, learner, exam.prompts,
            sampling=sampling, seed=config.run.seed,
            interval=kept_for(config.sync) if parts.own.rule is None else config.diagnose.every,
            say=parts.say, guard=guard, events=events,
            score_as_sent=delivery.score if as_engine else None,
        ),
        mismatch=Mismatch(tolerance(engine.dtype, sampling.temperature), parts.say),
        rule=_rule(parts),
        evaluator=Evaluator(
            exam, evaluation_sampling(config), config.evaluate.samples, config.evaluate.every, on_engine=served,
            refresh=partial(fetch_weights, learner, parts.model),
        ),
        sink=sink,
        saver=Saver(
            folder / CHECKPOINTS, config.checkpoint.every, config.checkpoint.keep,
            partial(_save_model, parts, learner), learner.save if isinstance(learner, ShardedLearner) else None,
        ),
        stop=stop,
        mask_truncated=config.reward.truncated == "mask",
        account=Accounting(counts, (engine, examiner), drawn_from, folder / ACCOUNT, parts.say),
        kept_for=kept_for(config.sync) if _overlaps(parts) and parts.own.rule is None else 0,
    )  # fmt: skip


def learner_of(parts: Parts, objective: Objective) -> Learner | ShardedLearner:
    """The learner, in this process or over the ranks of `[cluster]`."""
    return _sharded(parts, objective) if parts.config.cluster.learners else _single(parts, objective)


def _sharded(parts: Parts, objective: Objective) -> ShardedLearner:
    config, cluster, source = parts.config, parts.config.cluster, parts.source
    assert source is not None, "load_parts says where the model came from"
    load = partial(source.absolute().pinned().for_rank, parts.model.takes_any_mask)
    spec = LearnerSpec(
        load, objective, config.learn, uuid.uuid4().hex, config.sampling.temperature, config.sampling.max_tokens,
        config.run.steps, parts.compute, parts.device.type,
    )  # fmt: skip
    return ShardedLearner(spec, open_ranks(cluster, spec, parts.say))


def fetch_weights(learner: protocols.Learner, model: LanguageModel) -> None:
    """Let `model`, which this process loaded, have the learner's weights. A learner in one process trains it."""
    if isinstance(learner, ShardedLearner):
        learner.copy_to(model)


def take_model(parts: Parts, learner: protocols.Learner, folder: Path) -> None:
    """Before ranks end, let them write the final model to `folder`. If they cannot, give their weights to the parts'
    model; then there is no folder."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    if not _exported_by_ranks(parts, learner, folder):
        fetch_weights(learner, parts.model)


def _save_model(parts: Parts, learner: Learner | ShardedLearner, folder: Path) -> None:
    if not _exported_by_ranks(parts, learner, folder):
        fetch_weights(learner, parts.model)
        loading.save(parts.model, parts.codec, folder)


def _exported_by_ranks(parts: Parts, learner: protocols.Learner, folder: Path) -> bool:
    """Let the ranks write the model without gathering it, if there are ranks and they can."""
    if not isinstance(learner, ShardedLearner) or not learner.export(folder):
        return False
    loading.save_without_weights(parts.model, parts.codec, folder)
    return True


def _own_model(parts: Parts, learner: Learner | ShardedLearner) -> LanguageModel:
    """The model of this process that has the learner's weights, if `fetch_weights` is called first."""
    return parts.model if isinstance(learner, ShardedLearner) else learner.compute_weights.model


def _single(parts: Parts, objective: Objective) -> Learner:
    config, reference = parts.config, None
    if objective.uses_reference:
        reference = Reference(
            parts.model, objective.ref_period, objective.ref_ema, parts.compute, compiled=config.model.compile
        )
    return Learner(
        parts.model, objective, config.learn, lineage=uuid.uuid4().hex, temperature=config.sampling.temperature,
        limit=config.sampling.max_tokens, steps=config.run.steps, compute=parts.compute, reference=reference,
        compiled=config.model.compile, say=parts.say, seed=config.run.seed,
    )  # fmt: skip


def _supply(
    parts: Parts, engine: Engine, store: OrderedStore, sampling: Sampling, guard: Guard, events: EventLoop
) -> Supply:
    config = parts.config
    collect, members = config.collect, _members(config)
    if collect.mode == "stream":
        return Stream(
            parts.task, engine, store, sampling=sampling, group_size=collect.group_size, members=members,
            new_per_batch=new_per_batch(config.draw, collect.prompts), max_age=staleness_of(config),
            seed=config.run.seed, guard=guard, events=events,
        )  # fmt: skip
    return LockStep(
        parts.task, engine, store, sampling=sampling, group_size=collect.group_size,
        reserve=collect.offset * collect.prompts, seed=config.run.seed, members=members, guard=guard, events=events,
        host_is_free=parts.device.type != "cpu",
    )  # fmt: skip


def counting(counts: Counts, name: str) -> Callable[[int], None]:
    """A function that an engine tells how much it has sampled. The sum over all processes of the run is kept."""
    before = counts[name]
    return lambda sampled: counts.raise_to(name, before + sampled)


def _engine(parts: Parts, learner: Learner | ShardedLearner, folder: Path, counts: Counts) -> tuple[Engine, bool]:
    """Return the engine, and whether it shares the learner's weights. It does if a copy would never be older."""
    config = parts.config
    if not configuration.writes(config.draw):
        return NoEngine(str(parts.compute)), False
    if config.cluster.engines:
        host = learner.ranks.host if isinstance(learner, ShardedLearner) else None
        return open_engines(parts, folder, counting(counts, "engine"), host), False
    if config.engine.name == "vllm":
        pool = open_servers(parts, config.model.path, len(parts.task.prompt(0).token_ids), folder, counts)
        counting(counts, "engine")(pool.sampled)  # what the servers sampled after the run was killed
        return pool, False
    fresh = parts.own.rule is None and always_fresh(config.sync) and (_waits(config) or staleness_of(config) == 0)
    own = _own_model(parts, learner)
    shared = fresh and not isinstance(learner, ShardedLearner) and own.module.dtype == parts.compute
    model = own.sharing() if shared else parts.model.for_compute(parts.compute, copied=True)
    engine = InProcessEngine(
        model, parts.codec.end_token_ids, config.engine.max_rows, parts.compute, config.model.compile,
        beside=_overlaps(parts) and not shared, shared=shared,
        # In lock-step on a CPU, decoding and grading would compete for it.
        early=(model.takes_plans and _graded_alone(parts)) or (staleness_of(config) > 0 and not _waits(config)),
        spell=parts.codec.decode, count=counting(counts, "engine"),
    )  # fmt: skip
    return engine, shared


def _examiner(parts: Parts, count: Callable[[int], None] = lambda sampled: None) -> InProcessEngine:
    """An engine that evaluates the parts' model."""
    return InProcessEngine(
        parts.model, parts.codec.end_token_ids, parts.config.engine.max_rows, parts.compute, spell=parts.codec.decode,
        count=count,
    )  # fmt: skip


def _waits(config: Config) -> bool:
    """Whether nothing is generated while the learner works, except with `collect.overlap`."""
    return config.collect.mode == "lock_step"


def _overlaps(parts: Parts) -> bool:
    """Whether the next batch is generated while the learner works on this one. By default a user's own task does not
    overlap, because it may not be safe to run beside the learner."""
    if parts.config.collect.mode == "stream":
        return staleness_of(parts.config) > 0
    if parts.config.collect.overlap is not None:
        return parts.config.collect.overlap
    return not parts.own.has_task(parts.config) and _has_room_beside(parts.device)


def _rule(parts: Parts) -> SyncRule:
    if not configuration.writes(parts.config.draw):
        return never
    rule = parts.own.rule or sync_rule(parts.config.sync, parts.say)
    return within(rule, staleness_of(parts.config)) if parts.config.collect.mode == "stream" else rule


def _scores_as_engine(
    parts: Parts, learner: Learner | ShardedLearner, engine: Engine
) -> Callable[[Sequence[Rollout]], tuple[Scored, Manifest]] | None:
    """Scores responses as a learner with the engine's weights would. Possible if both are in this process and compute
    with the same type, and useful if one learns while the other generates."""
    if parts.config.collect.mode == "lock_step" or not _overlaps(parts):
        return None
    if not (isinstance(learner, Learner) and isinstance(engine, InProcessEngine)):
        return None
    weights = learner.compute_weights
    if not weights.can_hold or weights.model.module.dtype != engine.model.module.dtype:
        return None
    return lambda rollouts: learner.score_as(engine.weights(), rollouts)


def _diagnosed(parts: Parts) -> DiagnoseConfig:
    """The adaptive rule needs a judged probe at every step. A run without an engine has no probe."""
    config = parts.config
    if not configuration.writes(config.draw):
        return dataclasses.replace(config.diagnose, every=0)
    if config.sync.rule == "adaptive" and parts.own.rule is None:
        return dataclasses.replace(config.diagnose, every=1)
    return config.diagnose


def _canary_prompts(task: Task, max_length: int | None) -> list[Prompt]:
    """The first training prompts. A prompt that fills the model's context is left out."""
    prompts = [task.prompt(index) for index in range(CANARY_PROMPTS)]
    return [prompt for prompt in prompts if max_length is None or len(prompt.token_ids) < max_length]


def _has_room_beside(device: torch.device) -> bool:
    """Whether a CPU core is left over while the learner computes on the other cores or on a GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > (torch.get_num_threads() if device.type == "cpu" else 1)


def _graded_alone(parts: Parts) -> bool:
    """Whether each response is graded by itself. A user's reward function may need the whole batch."""
    return not parts.own.has_task(parts.config) and not parts.own.functions(parts.config)


def store_of(config: Config, ledger: Ledger) -> OrderedStore:
    """The store that batches are drawn from: first in, first out, each rollout once, unless `[draw]` is set."""
    streams = config.collect.mode == "stream"
    if config.draw == DrawConfig():
        return Deferred(ledger, by_admission=streams)
    return Selected(ledger, config.draw, config.run.seed, by_admission=streams)


def _members(config: Config) -> int:
    """How many members of each group the run generates."""
    size = config.collect.group_size
    within = config.draw.policy == "mixed" and config.draw.mix == "within"
    return quotas_of(config.draw, size).get("self", size) if within else size


def build_exam(parts: Parts, guard: Guard, events: EventLoop, engine: Engine | None = None) -> Exam:
    """The task's held-out problems, attempted with the parts' model, or with an engine that has its weights."""
    config = parts.config
    engine = engine or _examiner(parts)
    problems = parts.task.held_out(config.evaluate.problems)
    assert config.evaluate.threshold is not None, "resolve the config first"
    return Exam(
        parts.task, engine, problems, config.evaluate.threshold, config.engine.max_rows, parts.own.functions(config),
        guard, events,
    )  # fmt: skip


def evaluation_sampling(config: Config) -> Sampling:
    return Sampling(config.evaluate.temperature, config.sampling.max_tokens, config.evaluate.top_p)


def sinks_of(parts: Parts, folder: Path, version: int, progress: Progressing | None) -> list[Sink]:
    """The sinks of the run. Rows that were logged after `version` are removed (a resumed run)."""
    config = parts.config
    assert config.run.name is not None
    sinks: list[Sink] = [JsonLines(folder / METRICS, version)]
    if config.report.tensorboard:
        sinks.append(TensorBoard(folder / TENSORBOARD, version))
    if config.report.wandb is not None:
        sinks.append(WeightsAndBiases(config.report.wandb, config.run.name, folder, dataclasses.asdict(config)))
    if progress is not None:
        sinks.append(progress)
        if parts.objective.compares:
            sinks.append(Stalling(parts.say))
        sinks.append(Shortage(config.draw, config.collect.prompts, parts.say))
    if config.cluster.learners > 1:
        sinks.append(Straggling(config.cluster.learners, parts.say))
    return sinks
