"""The course of a run, from its folder to its result, and models evaluated."""

import errno
import json
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from solera import config as configuration
from solera.beginning import Beginning, read_beginning
from solera.build import (
    build_exam,
    build_loop,
    build_task,
    compute_of,
    device_of,
    evaluation_sampling,
    line_reader,
    resolved,
    sinks_of,
)
from solera.checkpoint import UNFINISHED, Checkpoint, latest, publish, unreadable
from solera.config import Config, DrawConfig, alike
from solera.engines.absent import NoEngine
from solera.engines.in_process import refuse_too_long
from solera.errors import SoleraError, counted, one_line
from solera.evaluate.candidates import (
    OWN_CODE,
    Candidate,
    candidates,
    other_tasks,
    refuse_own_code,
    settings,
)
from solera.evaluate.evaluation import Evaluation, Examined, check_k
from solera.interruption import Interruption
from solera.learner.batch import need_behaviour
from solera.loop import Loop
from solera.models import loading
from solera.models.codec import TokenizerCodec
from solera.models.language_model import LanguageModel
from solera.models.loading import Reader
from solera.objectives.objective import Objective, compose
from solera.objectives.table import notices, resolve_config
from solera.own_code import OwnCode, own_code
from solera.process import alone, rare_garbage_collection, torch_for
from solera.protocols import Weights
from solera.records import Rollout, Sampling
from solera.report.html import write_report
from solera.report.plot import plot_run
from solera.report.sinks import Several, need_wandb, read_metrics
from solera.resuming import how_to_go_on, resumable
from solera.store.database import place_of, refuse_taken
from solera.store.drawing import absent, draws_from
from solera.store.exchange import read_lines
from solera.store.ledger import Ledger
from solera.sync.rules import SyncRule, SyncState
from solera.tasks.episodes import Guard
from solera.tasks.own import TaskFactory


class InterruptedRunError(SoleraError):
    """The run was asked to stop and did, with a checkpoint written."""


@dataclass(frozen=True)
class Result:
    """What a finished run leaves behind."""

    folder: Path
    accuracy_before: float
    accuracy_after: float
    accuracy_max: float
    accuracy_mean: float
    """Over all evaluations of the run."""
    seconds: float
    plot: Path
    report: Path
    model: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One dictionary a step, as in `metrics.jsonl`."""
        return read_metrics(self.folder / "metrics.jsonl")


def train(
    config: Config,
    console: Console | None = None,
    *,
    task: TaskFactory | str | None = None,
    rewards: Sequence[Callable[..., Any] | str] = (),
    objective: Objective | str | None = None,
    rule: SyncRule | str | None = None,
) -> Result:
    """Train from a config to a finished model in a new folder, with parts of one's own in place of the config's.

    `task` is a class, or a function, that takes the model's codec; `rewards` are functions of the signatures that
    `reward.functions` may name; `objective` comes from `custom_objective`; `rule(state, version, diagnosis)` decides
    after each batch when the engine gets new weights. Each may also be a name, as the config has it: it takes the
    place of the config's, and rewards are added to the config's.
    """
    console = console or Console(stderr=True)
    config, own = own_code(config, task, rewards, objective, rule)
    config = resolved(config)
    for sentence in notices(config) if own.objective is None else ():
        _say(console, sentence)
    return _run(config, console, None, own)


def resume(
    folder: Path | str,
    console: Console | None = None,
    *,
    task: TaskFactory | str | None = None,
    rewards: Sequence[Callable[..., Any] | str] = (),
    objective: Objective | str | None = None,
    rule: SyncRule | str | None = None,
) -> Result:
    """Go on with a run that was interrupted or killed, from its last checkpoint, with the code it was started with."""
    folder, (_, own) = Path(folder), own_code(Config(), task, rewards, objective, rule)
    config = resumable(folder, own.names())
    if own_code(config, task, rewards, objective, rule)[0] != config:
        raise SoleraError(
            f"{folder}: a name that was given is not the one in the run's config.toml: leave it out, as the run goes "
            "on with its own"
        )
    return _run(config, console or Console(stderr=True), folder, own)


def evaluate_models(
    models: list[str],
    config: Config | None = None,
    k: tuple[int, ...] = (),
    checkpoints: bool = False,
    console: Console | None = None,
    advance: Callable[[str, int, int], None] = lambda model, made, total: None,
    *,
    task: TaskFactory | str | None = None,
    rewards: Sequence[Callable[..., Any] | str] = (),
) -> Evaluation:
    """Attempt the same held-out problems with every model: greedily and, at a temperature above 0, sampled as well.

    A model is a folder, a hub name, `embedded`, or a run's folder; `checkpoints` takes all that a run's folder holds.
    Without a config the settings are those of the first run among them; a run that was trained with a task or rewards
    of one's own needs them here too. `advance` hears after each turn which model, how many attempts were made now, and
    how many the model makes in all.
    """
    config, own = own_code(config or settings(models), task, rewards)
    if not own.names():
        refuse_own_code(models)
    console = console or Console(stderr=True)
    chosen = candidates(models, checkpoints)
    config = resolve_config(config)
    check_k(k, config)
    for run in other_tasks(models, config):
        _say(console, f"{run} was trained on another task; every model is given the same problems here")
    if not k and config.evaluate.samples > 1:
        k = (config.evaluate.samples,)
    guard = Guard(config.collect.errors, config.collect.retries, partial(_say, console))
    result = Evaluation(config, tuple(_examine(candidate, config, k, advance, own, guard) for candidate in chosen))
    _say_if_fewer(console, config, min(len(model.greedy.problems) for model in result.models))
    return result


def _examine(
    candidate: Candidate,
    config: Config,
    k: tuple[int, ...],
    advance: Callable[[str, int, int], None],
    own: OwnCode,
    guard: Guard,
) -> Examined:
    model, codec = loading.load(candidate.path, device_of(config))
    task = build_task(config, codec, model.max_length, own.rewards, own.task)
    compute = compute_of(config, model, task)
    exam = build_exam(config, model.for_compute(compute), codec, task, compute, own, guard)
    for prompt in exam.prompts[:1]:
        refuse_too_long(len(prompt.token_ids), config.sampling.max_tokens, model.max_length)
    greedy, sampled = Sampling(0.0, config.sampling.max_tokens), evaluation_sampling(config)
    samples = config.evaluate.samples if sampled.temperature > 0 else 0

    def made(attempts: int) -> None:
        advance(candidate.name, attempts, len(exam.prompts) * (1 + samples))

    with torch_for(model, config.run):
        try:
            first = exam.attempt(greedy, advance=made)
            more = exam.attempt(sampled, samples, config.run.seed, made) if samples else None
        except torch.OutOfMemoryError as error:
            raise SoleraError(f"{candidate.name}: the GPU's memory is full: free some, or use --device cpu") from error
    return Examined(candidate, first, more, k)


def _model_of(
    config: Config, device: torch.device, checkpoint: Checkpoint | None
) -> tuple[LanguageModel, TokenizerCodec]:
    """The checkpoint's, or the one to begin with."""
    if checkpoint is None:
        model, codec = loading.load(config.model.path, device)
        if config.lora.rank:
            model = loading.with_adapter(model, config.lora, config.model.path, config.run.seed)
        return model, codec
    folder, step = checkpoint.model.parent, checkpoint.state.version
    if step > config.run.steps:
        raise SoleraError(
            f"{folder}: this checkpoint is of step {step}, but run.steps in the run's config.toml is "
            f"{config.run.steps}: set it to {step} or more"
        )
    try:
        return loading.load(str(checkpoint.model), device)
    except SoleraError as error:
        raise unreadable(folder, str(error)) from error


def _run(config: Config, console: Console, folder: Path | None, own: OwnCode) -> Result:
    """A new run where there is no folder yet, else the rest of the run in it."""
    device = device_of(config)
    checkpoint = latest(folder / "checkpoints") if folder else None
    model, codec = _model_of(config, device, checkpoint)
    task = build_task(config, codec, model.max_length, own.rewards, own.task)
    beginning = Beginning.of(task, config, own.task is not None)
    refuse_too_long(len(task.prompt(0).token_ids), config.sampling.max_tokens, model.max_length)
    if config.report.wandb is not None:
        need_wandb()
    used = checkpoint.state.compute if checkpoint else None
    compute = compute_of(config, model, task, partial(_say, console), used)
    data = [_read_data(config, Path(path), codec, model) for path in config.store.data]
    objective = own.objective or compose(config.objective)
    _refuse_unknown(config, objective, data)
    if folder is None:
        _check_shares(
            config.draw, {rollout.origin for rollouts in data for rollout in rollouts}, partial(_say, console)
        )
    version = checkpoint.state.version if checkpoint else 0
    resumed = folder is not None
    begun = read_beginning(folder) if folder else None
    folder = folder or make_folder(config, beginning, own)
    start = time.perf_counter()
    with alone(folder), _advised(folder, how_to_go_on(folder, own.names())), ExitStack() as closing:
        store = Ledger(place_of(config.store.url, folder, config.run.name))
        closing.callback(store.close)
        if resumed:
            state = checkpoint.state if checkpoint else None
            store.rewind(state.watermark if state else 0, version, state.lineage if state else None)
        store.add_imported(*data, over=not store.watermark())  # once it is in, a reward that came since stays
        sink = Several(sinks_of(config, objective, folder, console, version, partial(_say, console)))
        closing.callback(sink.close)
        with (
            Interruption(partial(_say, console)) as interruption,
            torch_for(model, config.run),
            rare_garbage_collection(),
        ):

            def stop() -> bool:
                return interruption.wanted() or getattr(console, "reader_left", False)

            loop = build_loop(
                config, model, codec, task, store, sink, compute, folder, stop, own, partial(_say, console)
            )
            closing.callback(loop.collector.close)
            _say_if_fewer(console, config, len(loop.evaluator.exam.prompts))
            sync = restore(loop, checkpoint)
            if resumed:
                _say_resumed(console, checkpoint, beginning.changed_since(begun) if begun else [])
            finished = loop.run(sync)
    if not finished:
        raise InterruptedRunError(
            f"stopped after batch {loop.learner.version}; go on with: {how_to_go_on(folder, own.names())}"
        )
    with _advised(folder, how_to_go_on(folder, own.names())):
        unfinished = folder / f"{UNFINISHED}model"
        loading.export(model, codec, unfinished, merge=config.lora.export == "merged")
        publish(unfinished, folder / "model")
    with _advised(folder, f"solera report {folder}"):
        return _result(folder, console, time.perf_counter() - start)


def _read_data(config: Config, path: Path, codec: TokenizerCodec, model: LanguageModel) -> list[Rollout]:
    vocabulary = model.module.get_input_embeddings().num_embeddings
    try:
        return read_lines(path, line_reader(config, Reader(codec, vocabulary, model.max_length), path), False).good
    except SoleraError as error:
        command = f"solera data import RUN {path} --skip-bad bad.jsonl"
        raise SoleraError(
            f"{error}; mend it, or begin without store.data and take the good lines: {command}"
        ) from error


def _check_shares(draw: DrawConfig, origins: set[str], say: Callable[[str], None]) -> None:
    """Refuse a share without text beside text without a share: a slip. Else the text may come while the run goes on."""
    if (missing := absent(draw, origins)) is None:
        return
    left_out = sorted(origin for origin in origins if not draws_from(draw, origin))
    if left_out:
        known = f"store.data has {', '.join(sorted(origins))}{alike(missing, left_out, 1)}"
        raise SoleraError(f"draw.shares: no rollouts of origin {missing}; {known}")
    say(f"draw.shares: no rollouts of origin {missing} yet; import them while the run goes on (solera data import)")


def _refuse_unknown(config: Config, objective: Objective, data: list[list[Rollout]]) -> None:
    """Text that the objective cannot learn from, before the run has a folder; what is drawn later is refused then."""
    for path, rollouts in zip(config.store.data, data, strict=True):
        try:
            need_behaviour([r for r in rollouts if draws_from(config.draw, r.origin)], objective)
        except SoleraError as error:
            raise SoleraError(f"{path}: {error}") from None


def make_folder(config: Config, beginning: Beginning, own: OwnCode) -> Path:
    """A new folder for the run, with the resolved config in it from the first moment."""
    folder = configuration.new_folder(config)
    refuse_taken(place_of(config.store.url, folder))
    unfinished = folder.with_name(f"{UNFINISHED}{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        unfinished.mkdir(parents=True)
        (unfinished / "config.toml").write_text(configuration.dump(config), encoding="utf-8")
        beginning.write(unfinished)
        if own.names():
            (unfinished / OWN_CODE).write_text(json.dumps(own.names()), encoding="utf-8")
        publish(unfinished, folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        said = f"the run's folder cannot be made: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise OSError(error.errno, said, str(folder)) from error
        raise SoleraError(f"{folder}: {said}") from error
    return folder


def restore(loop: Loop, checkpoint: Checkpoint | None) -> SyncState:
    """Put the loop's parts where the checkpoint has them; what `Loop.run` goes on from."""
    if checkpoint is None:
        return SyncState(due=not isinstance(loop.engine, NoEngine))
    state, tensors = checkpoint.state, checkpoint.tensors
    loop.learner.lineage = state.lineage
    try:
        loop.learner.restore(state.version, tensors["learner"])
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise SoleraError(f"{checkpoint.model.parent}: does not fit the run: {one_line(error)}") from error
    loop.collector.position = state.position
    # A checkpoint from elsewhere may hold an engine's own weights; this engine's may be the learner's.
    own = {} if loop.delivery.shared else tensors["engine"]
    loop.engine.load(Weights(state.lineage, state.sync.engine_version, iter(own.items())))
    if "probe" in tensors:  # a run begun before there were probes gets its first at the next sync
        loop.probe.restore(tensors["probe"])
    return state.sync


def _result(folder: Path, console: Console, seconds: float) -> Result:
    rows = read_metrics(folder / "metrics.jsonl")
    if not any(row.get("tokens/trained") for row in rows):
        rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
        advice = "harder problems, or a reward that tells answers apart?" if any(rewards) else "easier problems?"
        _say(console, f"nothing was learned: in no batch did a group's rewards differ ({advice})")
    accuracies = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    return Result(
        folder, accuracies[0], accuracies[-1], max(accuracies), statistics.fmean(accuracies), seconds,
        plot_run(folder), write_report([folder], folder / "report.html"), folder / "model",
    )  # fmt: skip


@contextmanager
def _advised(folder: Path, command: str) -> Iterator[None]:
    """A full disk, say, or a reward function's error ends the run; what to do then is said with it."""
    once, then = "once that is put right", f"go on with: {command}"
    try:
        yield
    except BrokenPipeError:
        raise
    except KeyboardInterrupt as stop:
        stop.args = (f"interrupted; {then}",)
        raise
    except torch.OutOfMemoryError as error:
        said = (
            "the GPU's memory is full: in its config.toml lower engine.max_rows or learn.micro_batch_tokens, raise "
            f"run.gpu_memory, or set learn.gradient_checkpointing, and go on with: {command}"
        )
        raise OSError(errno.ENOMEM, said, str(folder)) from error
    except SoleraError as error:
        error.args = (f"{error}; {once} (settings are in {folder / 'config.toml'}), {then}",)
        raise
    except OSError as error:
        said = f"{error.strerror or error}; {once}, {then}"
        raise OSError(error.errno, said, error.filename or str(folder)) from error


def _say_resumed(console: Console, checkpoint: Checkpoint | None, changed: list[str]) -> None:
    _say(console, f"goes on from step {checkpoint.state.version}" if checkpoint else "no checkpoint: begins again")
    for sentence in changed:
        _say(console, sentence)


def _say_if_fewer(console: Console, config: Config, found: int) -> None:
    if found < config.evaluate.problems:
        _say(
            console,
            f"evaluate.problems is {config.evaluate.problems}; the task has {counted(found, 'held-out problem')}",
        )


def _say(console: Console, sentence: str) -> None:
    console.print(f"note: {sentence}", highlight=False, soft_wrap=True)
