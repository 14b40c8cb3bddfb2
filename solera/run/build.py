"""From a config to objects: the one place that knows concrete classes."""

import dataclasses
import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from solera import config as configuration
from solera.config import GYM, Config, DrawConfig, kind_of_task, task_parts
from solera.diagnosis.mismatch import Mismatch
from solera.engines.absent import NoEngine
from solera.engines.in_process import InProcessEngine
from solera.errors import SoleraError
from solera.evaluate.accuracy import Evaluator
from solera.evaluate.attempts import Exam
from solera.folder.checkpoint import Saver
from solera.folder.paths import CHECKPOINTS, METRICS, TENSORBOARD
from solera.learner.learner import Learner
from solera.learner.reference import Reference
from solera.models import loading
from solera.models.codec import TokenizerCodec
from solera.models.extent import fits_float16, largest
from solera.models.language_model import LanguageModel
from solera.models.loading import Reader
from solera.objectives.objective import Objective, compose
from solera.objectives.table import resolve_config
from solera.protocols import Engine, Sink, Store, Task
from solera.records import Prompt, Sampling
from solera.report.console import Progressing
from solera.report.shortage import Shortage
from solera.report.sinks import JsonLines, TensorBoard, WeightsAndBiases
from solera.report.stalling import Stalling
from solera.run.own_code import NO_OWN_CODE, OwnCode
from solera.store.deferred import Deferred
from solera.store.drawing import quotas_of
from solera.store.ledger import Ledger
from solera.store.lines import LineReader
from solera.store.selected import Selected
from solera.sync.proof import tolerance
from solera.sync.rules import always_fresh, kept_for, never, sync_rule
from solera.tasks.arithmetic import Arithmetic
from solera.tasks.countdown import Countdown
from solera.tasks.episodes import Guard
from solera.tasks.gym import Gym
from solera.tasks.held_out import HeldOut
from solera.tasks.jsonl import Jsonl
from solera.tasks.keys import keys_of
from solera.tasks.mixture import Mixture
from solera.tasks.own import OwnTask, TaskFactory, load_task, make_task
from solera.tasks.rewards import build_rewards, graders
from solera.tasks.single_turn import Problems, SingleTurn
from solera.training.delivery import Delivery
from solera.training.loop import Loop
from solera.training.probe import Probe
from solera.training.supply import LockStep

CANARY_PROMPTS = 2
"""Problems of the training stream that the proof of a sync lets the engine continue."""
EXTENT_PROMPTS = 8
"""Held-out problems, which every task has, whose prompts tell how large the model's numbers grow."""


def resolved(config: Config) -> Config:
    """Every value checked, every unset objective field filled in, a name given."""
    config = resolve_config(config)
    if config.run.name is None:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.objective.name}-s{config.run.seed}"
        taken = (Path(config.run.root) / name).exists()
        config = configuration.override(config, "run", name=f"{name}-{uuid.uuid4().hex[:4]}" if taken else name)
    return config


def build_loop(
    config: Config,
    model: LanguageModel,
    codec: TokenizerCodec,
    task: Task,
    store: Ledger,
    sink: Sink,
    compute: torch.dtype,
    folder: Path,
    stop: Callable[[], bool] = lambda: False,
    own: OwnCode = NO_OWN_CODE,
    say: Callable[[str], None] = lambda sentence: None,
) -> Loop:
    """The parts of a resolved config, put together."""
    lineage = uuid.uuid4().hex
    objective = own.objective or compose(config.objective)
    sampling = Sampling(config.sampling.temperature, config.sampling.max_tokens)
    overlaps = config.collect.overlap
    if overlaps is None:  # a task of one's own may not be made for another thread
        overlaps = not own.has_task(config) and _has_room_beside(model)
    writes, reference = configuration.writes(config.draw), None
    guard = Guard(config.collect.errors, config.collect.retries, say)
    if objective.uses_reference:
        reference = Reference(model, objective.ref_period, objective.ref_ema, compute)
    learner = Learner(
        model, objective, config.learn, lineage=lineage, temperature=sampling.temperature,
        limit=sampling.max_tokens, steps=config.run.steps, compute=compute, reference=reference,
        compiled=config.model.compile, say=say,
    )  # fmt: skip
    drawn_from = store_of(config, store, learner)
    shared = own.rule is None and always_fresh(config.sync) and learner.compute_weights.model.module.dtype == compute
    engine: Engine = NoEngine(str(compute))
    if writes:
        engine = _engine(config, learner, codec, compute, overlaps, shared, _graded_alone(config, own))
    supply = LockStep(
        task, engine, drawn_from, sampling=sampling, group_size=config.collect.group_size,
        reserve=config.collect.offset * config.collect.prompts, seed=config.run.seed, members=_members(config),
        guard=guard,
    )  # fmt: skip
    delivery = Delivery(
        learner, engine, _canary_prompts(task, model.max_length), sampling,
        retry=config.sync.on_fault == "retry", say=say, shared=shared,
    )  # fmt: skip
    evaluator = Evaluator(
        build_exam(config, learner.compute_weights.model, codec, task, compute, own, guard),
        evaluation_sampling(config), config.evaluate.samples, config.evaluate.every,
    )  # fmt: skip
    diagnosed = config.diagnose
    if config.sync.rule == "adaptive" and own.rule is None:
        diagnosed = dataclasses.replace(diagnosed, every=1)
    if not writes:
        diagnosed = dataclasses.replace(diagnosed, every=0)
    probe = Probe(
        diagnosed, task, engine, store, learner, evaluator.exam.prompts, sampling=sampling, seed=config.run.seed,
        say=say, guard=guard,
    )  # fmt: skip
    return Loop(
        config.run.steps, config.run.seed, config.collect, objective, supply, engine, drawn_from, learner,
        delivery, probe, Mismatch(tolerance(engine.dtype, sampling.temperature), say),
        (own.rule or sync_rule(config.sync, say)) if writes else never, evaluator, sink,
        Saver(
            folder / CHECKPOINTS, config.checkpoint.every, config.checkpoint.keep,
            lambda target: loading.save(model, codec, target),
        ),
        stop, config.reward.truncated == "mask", kept_for(config.sync) if overlaps and own.rule is None else 0,
    )  # fmt: skip


def _canary_prompts(task: Task, max_length: int | None) -> list[Prompt]:
    """The first problems; one that fills the model's context has no continuation."""
    prompts = [task.prompt(index) for index in range(CANARY_PROMPTS)]
    return [prompt for prompt in prompts if max_length is None or len(prompt.token_ids) < max_length]


def _has_room_beside(model: LanguageModel) -> bool:
    """Whether a processor core is idle while the learner computes on others, or on a GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > (torch.get_num_threads() if model.device.type == "cpu" else 1)


def _graded_alone(config: Config, own: OwnCode) -> bool:
    """Whether each response is graded by itself: functions of one's own may be given a whole batch, to compare."""
    return not own.has_task(config) and not own.functions(config)


def _engine(
    config: Config,
    learner: Learner,
    codec: TokenizerCodec,
    compute: torch.dtype,
    overlaps: bool,
    shared: bool,
    early: bool,
) -> InProcessEngine:
    """With weights of its own, or with the learner's where its own would never be older."""
    model = learner.compute_weights.model.sharing() if shared else learner.model.for_compute(compute, copied=True)
    return InProcessEngine(
        model, codec.end_token_ids, config.engine.max_rows, compute, config.model.compile,
        beside=overlaps and not shared, shared=shared, early=early,
    )  # fmt: skip


def store_of(config: Config, ledger: Ledger, learner: Learner) -> Store:
    """First in, first out, everything once, unless `[draw]` says otherwise."""
    if config.draw == DrawConfig():
        return Deferred(ledger)
    return Selected(ledger, config.draw, config.run.seed, lambda: (learner.version, learner.lineage))


def _members(config: Config) -> int:
    """Members of each group that the run writes itself."""
    size = config.collect.group_size
    within = config.draw.policy == "mixed" and config.draw.mix == "within"
    return quotas_of(config.draw, size).get("self", size) if within else size


def build_task(
    config: Config,
    codec: TokenizerCodec,
    max_length: int | None = None,
    rewards: Sequence[Callable[..., Any]] = (),
    factory: TaskFactory | None = None,
) -> Task:
    """The task that a `factory` makes, or that of a resolved config; prompts of the config's own tasks that leave no
    room for a response in `max_length` tokens are refused."""
    if factory is None and kind_of_task(config.task.name) == "own":
        factory = load_task(config.task.name)
    if factory is not None:
        return _with_rewards(make_task(factory, codec), config, codec, rewards)
    parts = {
        name: SingleTurn(problems, build_rewards(part, codec, problems, rewards))
        for name, task in task_parts(config.task).items()
        for part in [dataclasses.replace(config, task=task)]
        for problems in [_problems(part, codec, max_length)]
    }
    if config.task.name != "mixture":
        return parts[config.task.name]
    weights = config.task.weights or (1.0,) * len(parts)
    return Mixture(dict(parts), dict(zip(parts, weights, strict=True)))


def _with_rewards(
    task: OwnTask, config: Config, codec: TokenizerCodec, rewards: Sequence[Callable[..., Any]]
) -> OwnTask:
    """A task of one's own grades by itself; the rewards that the config or the user names come on top."""
    reward = config.reward
    if rewards or reward.functions or reward.truncated == "penalise" or reward.overlong_buffer:
        task.regrade = build_rewards(config, codec, task, rewards, own_task=True).of_rollout
    return task


def _problems(config: Config, codec: TokenizerCodec, max_length: int | None) -> Problems:
    task, seed = config.task, config.run.seed
    longest = _longest_prompt(config, max_length)
    if task.prompt is not None:
        return Jsonl(task, codec, seed, longest, graders(config))
    if kind_of_task(task.name) == "gym":
        assert task.template is not None
        return Gym(task.name.removeprefix(GYM), task.level, codec, task.template, seed, longest)
    assert task.level is not None
    if task.name == "countdown":
        assert task.template is not None
        return Countdown(codec, task.level, task.template, seed)
    return Arithmetic(codec, task.level, seed)


def _longest_prompt(config: Config, max_length: int | None) -> int | None:
    return None if max_length is None else max_length - config.sampling.max_tokens


def build_exam(
    config: Config,
    model: LanguageModel,
    codec: TokenizerCodec,
    task: Task,
    compute: torch.dtype,
    own: OwnCode,
    guard: Guard | None = None,
) -> Exam:
    """The task's held-out problems, attempted with `model`'s own weights."""
    engine = InProcessEngine(model, codec.end_token_ids, config.engine.max_rows, compute)
    problems = task.held_out(config.evaluate.problems)
    assert config.evaluate.threshold is not None, "resolve the config first"
    return Exam(
        task, engine, problems, config.evaluate.threshold, config.engine.max_rows, own.functions(config),
        guard or Guard(config.collect.errors, config.collect.retries),
    )  # fmt: skip


def evaluation_sampling(config: Config) -> Sampling:
    return Sampling(config.evaluate.temperature, config.sampling.max_tokens, config.evaluate.top_p)


def line_reader(config: Config, reader: Reader, path: Path, origin: str | None = None) -> LineReader:
    """From a line of a file to a rollout that the run of a resolved config can learn from."""
    return LineReader(
        reader.codec,
        keys_of(config.task),
        HeldOut(config.task, reader.codec, config.evaluate.problems, _longest_prompt(config, reader.max_length)),
        reader.vocabulary,
        reader.max_length,
        origin or f"file:{path.stem}",
        config.task.template,
    )


def device_of(config: Config) -> torch.device:
    available = torch.cuda.is_available()
    if config.run.device == "cuda" and not available:
        raise SoleraError("run.device is cuda, but torch finds no GPU here: use cpu or auto")
    device = torch.device("cuda" if available and config.run.device != "cpu" else "cpu")
    if device.type == "cpu":
        configuration.refuse_without_gpu(config)
    return device


def compute_of(
    config: Config,
    model: LanguageModel,
    task: Task,
    say: Callable[[str], None] = lambda sentence: None,
    begun: str | None = None,
) -> torch.dtype:
    """The arithmetic that `model.compute` asks for; by itself, on a GPU, the one that the run has `begun` with, or the
    closest of 16 bits that has room for what the model computes on a few of the task's prompts."""
    if config.model.compute != "auto":
        return getattr(torch, config.model.compute)
    if model.device.type == "cpu":
        return torch.float32
    if begun is not None:
        say(f"{begun} is used, as when the run began")
        return getattr(torch, begun)
    if not model.can_take_plans:
        return torch.bfloat16
    number = largest(model, [prompt.token_ids for prompt in task.held_out(EXTENT_PROMPTS)])
    if fits_float16(number):
        say(f"float16 is used: the model's numbers reach {number:,.0f} of its 65,504")
        return torch.float16
    say(f"bfloat16 is used: the model's numbers reach {number:,.0f}, too near to float16's end")
    return torch.bfloat16


def sinks_of(
    config: Config,
    objective: Objective,
    folder: Path,
    console: Console,
    version: int,
    say: Callable[[str], None] = lambda sentence: None,
) -> list[Sink]:
    """Each goes on from `version`: what a resumed run logged after it is taken back."""
    assert config.run.name is not None
    sinks: list[Sink] = [JsonLines(folder / METRICS, version)]
    if config.report.tensorboard:
        sinks.append(TensorBoard(folder / TENSORBOARD, version))
    if config.report.wandb is not None:
        sinks.append(WeightsAndBiases(config.report.wandb, config.run.name, folder, dataclasses.asdict(config)))
    if config.report.progress:
        sinks.append(Progressing(config.run.steps, console))
        if objective.compares:
            sinks.append(Stalling(say))
        sinks.append(Shortage(config.draw, config.collect.prompts, say))
    return sinks
