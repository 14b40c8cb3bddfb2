"""The course of a run, from its folder to its result, and models evaluated."""

import errno
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console

from solera.config import Config, DrawConfig, ModelConfig, alike
from solera.engines.absent import NoEngine
from solera.engines.in_process import refuse_too_long
from solera.errors import SoleraError, counted, one_line
from solera.evaluate.candidates import (
    Candidate,
    candidates,
    other_tasks,
    refuse_own_code,
    settings,
)
from solera.evaluate.evaluation import Evaluation, Examined, check_k
from solera.folder.beginning import Beginning, make_run_folder, new_folder, read_beginning
from solera.folder.checkpoint import Checkpoint, UnreadableCheckpointError
from solera.folder.files import UNFINISHED, DamagedError, alone, publish
from solera.folder.paths import CONFIG, MODEL
from solera.models import loading
from solera.models.codec import TokenizerCodec
from solera.models.language_model import LanguageModel
from solera.models.loading import Reader
from solera.objectives.objective import Objective, compose
from solera.objectives.table import notices, resolve_config
from solera.protocols import Weights
from solera.records import Rollout, Sampling
from solera.report.result import Result, result_of
from solera.report.sinks import Several, need_wandb
from solera.run.build import (
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
from solera.run.interruption import Interruption
from solera.run.own_code import OwnCode, own_code
from solera.run.process import rare_garbage_collection, torch_for
from solera.run.resuming import (
    checkpoint_of,
    how_to_go_on,
    offering,
    resumable,
    say_if_lost,
    settings_of,
    take_back,
)
from solera.store.database import place_of, refuse_taken
from solera.store.drawing import absent, draws_from
from solera.store.exchange import COMPLAINTS, ReadLines, check_data_files, read_lines, set_aside
from solera.store.ledger import Ledger
from solera.sync.rules import SyncRule, SyncState
from solera.tasks.episodes import Guard
from solera.tasks.jsonl import row_digests
from solera.tasks.own import TaskFactory
from solera.training.collation import need_behaviour
from solera.training.loop import Loop


class InterruptedRunError(SoleraError):
    """The run was asked to stop and did, with a checkpoint written."""


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
    unset, config = config.learn.lr is None, resolved(config)
    remarks = notices(config) if own.objective is None else []
    if unset and config.model.path != ModelConfig.path:
        remarks.append(f"learn.lr is unset: {config.learn.lr:g} is used, which is safe for a pretrained model")
    return _run(config, console, own, remarks)


def resume(
    folder: Path | str,
    console: Console | None = None,
    *,
    changes: Mapping[str, Any] = MappingProxyType({}),
    start: int | None = None,
    task: TaskFactory | str | None = None,
    rewards: Sequence[Callable[..., Any] | str] = (),
    objective: Objective | str | None = None,
    rule: SyncRule | str | None = None,
) -> Result:
    """Go on with a run from its last checkpoint, with the code it was started with.

    `changes` holds settings to go on with, such as `{"run.steps": 500}`, which also extends a finished run. `start` is
    the step of an earlier checkpoint to go back to; later ones are removed. 0 begins the run again.
    """
    folder, (_, own) = Path(folder), own_code(Config(), task, rewards, objective, rule)
    console = console or Console(stderr=True)
    settings_of(folder)
    with alone(folder):  # first: what is read before may be out of date when the run is ours
        config = resumable(folder, own.names(), changes, start)
        if own_code(config, task, rewards, objective, rule)[0] != config:
            raise SoleraError(
                f"{folder}: a name that was given is not the one in the run's config.toml: leave it out, as the run "
                "goes on with its own"
            )
        with offering(folder, own.names()):
            checkpoint = checkpoint_of(folder, config, start, partial(_say, console))
            return _run(config, console, own, (), folder, checkpoint)


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
    examined = tuple(_examine_all(chosen, config, k, advance, own, guard))
    if not examined:
        raise SoleraError(f"{', '.join(models)}: every checkpoint was removed meanwhile: try again")
    result = Evaluation(config, examined)
    _say_if_fewer(console, config, min(len(model.greedy.problems) for model in result.models))
    return result


def _examine_all(
    chosen: list[Candidate],
    config: Config,
    k: tuple[int, ...],
    advance: Callable[[str, int, int], None],
    own: OwnCode,
    guard: Guard,
) -> Iterator[Examined]:
    for candidate in chosen:
        try:
            yield _examine(candidate, config, k, advance, own, guard)
        except SoleraError:
            if candidate.run is None or Path(candidate.path).exists():
                raise
            guard.say(
                f"{candidate.name} was removed meanwhile and is left out"
            )  # a running run keeps only its last ones


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
    try:
        return loading.load(str(checkpoint.model), device)
    except SoleraError as error:
        if checkpoint.sealed and not isinstance(error, DamagedError):  # a base model or a package that is missing
            raise SoleraError(f"{checkpoint.folder}: {error}") from error
        raise UnreadableCheckpointError(checkpoint.folder, str(error)) from error


def _run(
    config: Config,
    console: Console,
    own: OwnCode,
    remarks: Sequence[str] = (),
    folder: Path | None = None,
    checkpoint: Checkpoint | None = None,
) -> Result:
    """A new run where there is no folder yet, else the rest of the run in it, which is locked. `remarks` are made once
    nothing is left to refuse."""
    device, say = device_of(config), partial(_say, console)
    model, codec = _model_of(config, device, checkpoint)
    task = build_task(config, codec, model.max_length, own.rewards, own.task)
    beginning = Beginning.of(task, config, {} if own.task is not None else row_digests(config.task))
    refuse_too_long(len(task.prompt(0).token_ids), config.sampling.max_tokens, model.max_length)
    if config.report.wandb is not None:
        need_wandb()
    compute = compute_of(config, model, task, say, checkpoint.state.compute if checkpoint else None)
    check_data_files(config.store.data, config.store.skip_bad)
    read = [_read_data(config, Path(path), codec, model, say) for path in config.store.data]
    data = [lines.good for lines in read]
    objective = own.objective or compose(config.objective)
    _refuse_unknown(config, objective, data)
    begun, resumed, start = read_beginning(folder) if folder else None, folder is not None, time.perf_counter()
    with ExitStack() as locked:
        if folder is None:
            _check_shares(config.draw, {rollout.origin for rollouts in data for rollout in rollouts}, say)
            refuse_taken(place_of(config.store.url, new_folder(config)))
            folder = make_run_folder(config, beginning, own.names())
            locked.enter_context(alone(folder))
        for sentence in remarks:
            say(sentence)
        with _advised(folder, how_to_go_on(folder, own.names())), ExitStack() as closing:
            place = place_of(config.store.url, folder, config.run.name)
            if checkpoint is None:
                say_if_lost(place, folder, say)
            store = Ledger(place)
            closing.callback(store.close)
            if resumed:
                take_back(folder, config, store, checkpoint, say)
            _import(store, read, config.store.skip_bad, say)
            version = checkpoint.state.version if checkpoint else 0
            sink = Several(sinks_of(config, objective, folder, console, version, say))
            closing.callback(sink.close)
            with Interruption(say) as interruption, torch_for(model, config.run), rare_garbage_collection():
                stop = partial(_wants_to_stop, interruption, console)
                loop = build_loop(config, model, codec, task, store, sink, compute, folder, stop, own, say)
                closing.callback(loop.supply.close)
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
            publish(unfinished, folder / MODEL)
        with _advised(folder, f"solera report {folder}"):
            return result_of(folder, time.perf_counter() - start, say)


def _wants_to_stop(interruption: Interruption, console: Console) -> bool:
    return interruption.wanted() or getattr(console, "reader_left", False)


def _read_data(
    config: Config, path: Path, codec: TokenizerCodec, model: LanguageModel, say: Callable[[str], None]
) -> ReadLines[Rollout]:
    """A file's rollouts, or those of the store in a folder."""
    vocabulary, skip_bad = model.module.get_input_embeddings().num_embeddings, config.store.skip_bad
    reader = line_reader(config, Reader(codec, vocabulary, model.max_length), path)
    try:
        lines = read_lines(path, reader, skip_bad is not None)
    except SoleraError as error:
        if skip_bad is not None:
            raise
        raise SoleraError(
            f'{error}; correct it, or take the good lines and keep the bad ones in a file: store.skip_bad = "bad.jsonl"'
        ) from error
    if lines.held_out:
        total = len(lines.good) + lines.held_out
        say(f"{path}: {lines.held_out} of its {total} responses answer held-out problems of the task and are left out")
    return lines


def _import(
    store: Ledger, read: Sequence[ReadLines[Rollout]], skip_bad: str | None, say: Callable[[str], None]
) -> None:
    """Put the good lines of all files into the store, and the bad ones into a file of their own."""
    # Once a rollout is in the store, a reward that came since stays.
    store.add_imported(*(lines.good for lines in read), over=not store.watermark())
    if skip_bad is None:
        return
    target = Path(skip_bad)
    set_aside([line for lines in read for line in lines.bad], target)
    complaints = [complaint for lines in read for complaint in lines.complaints]
    for complaint in complaints[:COMPLAINTS]:
        say(complaint)
    if complaints:
        say(f"{counted(len(complaints), 'bad line')} of store.data written to {target}; the others were imported")


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


def restore(loop: Loop, checkpoint: Checkpoint | None) -> SyncState:
    """Put the loop's parts where the checkpoint has them; what `Loop.run` goes on from."""
    if checkpoint is None:
        return SyncState(due=not isinstance(loop.engine, NoEngine))
    state, tensors = checkpoint.state, checkpoint.tensors
    try:
        loop.learner.restore(state.lineage, state.version, tensors["learner"])
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise SoleraError(f"{checkpoint.folder}: does not fit the run: {one_line(error)}") from error
    loop.supply.restore(state.position)
    # A checkpoint from elsewhere may hold an engine's own weights; this engine's may be the learner's.
    own = {} if loop.delivery.shared else tensors["engine"]
    loop.engine.load(Weights(state.lineage, state.sync.engine_version, iter(own.items())))
    if "probe" in tensors:  # a run begun before there were probes gets its first at the next sync
        loop.probe.restore(tensors["probe"])
    return state.sync


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
        error.args = (f"{error}; {once} (settings are in {folder / CONFIG}), {then}",)
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
