"""Trains and resumes runs, from the config to the result."""

import errno
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from solera.config import EMBEDDED_MODELS, Config
from solera.engines.absent import NoEngine
from solera.engines.in_process import refuse_too_long
from solera.errors import SoleraError, counted, one_line
from solera.folder.beginning import Beginning, make_run_folder, new_folder, read_beginning
from solera.folder.checkpoint import Checkpoint, checkpoints, step_of
from solera.folder.files import UNFINISHED, alone, publish
from solera.folder.paths import CHECKPOINTS, CONFIG, MODEL
from solera.models import loading
from solera.objectives.objective import Objective
from solera.objectives.table import notices
from solera.protocols import SupplyState, Weights
from solera.records import PolicyVersion, Rollout
from solera.report.console import Progressing
from solera.report.result import Result, result_of
from solera.report.run_folder import read_settings
from solera.report.sinks import TeeSink, need_wandb
from solera.run.build import build_loop, sinks_of, take_model
from solera.run.importing import check_shares, import_data, read_data
from solera.run.interruption import Interruption
from solera.run.own_code import own_code
from solera.run.parts import Parts, load_parts, resolved
from solera.run.process import rare_garbage_collection, torch_for
from solera.run.ranking import check_runtime
from solera.run.resuming import (
    checkpoint_of,
    how_to_go_on,
    offering,
    resumable,
    say_if_lost,
    settings_of,
    take_back,
)
from solera.run.saying import say, say_if_fewer
from solera.sharded.ranks import RankError
from solera.store.database import place_of, refuse_taken
from solera.store.exchange import ReadLines
from solera.store.ledger import Ledger
from solera.sync.rules import SyncRule, SyncState
from solera.tasks.jsonl import row_digests
from solera.tasks.own import TaskFactory
from solera.training.loop import Loop


@dataclass(frozen=True, eq=False)
class Resumption:
    """Where a resumed run continues: at a checkpoint or, without one, from the beginning."""

    checkpoint: Checkpoint | None
    changed: Sequence[str]
    """Notes about settings and data that have changed since the run began."""

    def tell(self, say: Callable[[str], None]) -> None:
        version = self.checkpoint.state.version if self.checkpoint else None
        say("no checkpoint: starting again" if version is None else f"resuming from step {version}")
        for sentence in self.changed:
            say(sentence)


class InterruptedRunError(SoleraError):
    """The run was interrupted and has written a checkpoint."""


def train(
    config: Config,
    console: Console | None = None,
    *,
    task: TaskFactory | str | None = None,
    rewards: Sequence[Callable[..., Any] | str] = (),
    objective: Objective | str | None = None,
    rule: SyncRule | str | None = None,
) -> Result:
    """Train a model in a new run folder. Parts passed as arguments replace those of the config.

    `task` is a class or function that takes the model's codec. `rewards` are functions with a signature that
    `reward.functions` allows; they are added to the config's rewards. `objective` comes from `custom_objective`.
    `rule(state, version, diagnosis)` decides after each batch whether the engine gets new weights. Each of them may
    also be a name, as in the config.
    """
    console = console or Console(stderr=True)
    config, own = own_code(config, task, rewards, objective, rule)
    unset, config = config.learn.lr is None, resolved(config, own)
    remarks = notices(config) if own.objective is None else []
    if unset and config.model.path not in EMBEDDED_MODELS:
        before = _lr_behind(config.model.path)
        remarks.append(
            f"learn.lr is unset: {config.learn.lr:g} is used, a safe value for a pretrained model"
            + (f"; the run that made this model used {before:g}" if before else "")
        )
    parts = load_parts(config, own, partial(say, console))
    beginning, read = _checked(parts)
    check_shares(config.draw, read, parts.say)
    refuse_taken(place_of(config.store.url, new_folder(config)))
    folder = make_run_folder(config, beginning, own.names())
    with alone(folder):
        if config.report.progress:
            console.print(Text(f"run    {folder}"), soft_wrap=True)
        for sentence in remarks:
            parts.say(sentence)
        return _train(parts, read, folder, console)


def _lr_behind(model: str) -> float | None:
    """The learning rate of the run that made a model, if it is the model of a run and the run's config can be read."""
    written = Path(model).absolute().parent / CONFIG
    if Path(model).name != MODEL or not written.is_file():
        return None
    rate = read_settings(written, []).get("learn", {}).get("lr")
    return rate if isinstance(rate, float) else None


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
    """Resume a run from its last checkpoint, with the code that it was started with.

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
                f"{folder}: a name that was given differs from the run's config.toml: leave it out, because "
                "a resumed run keeps its own"
            )
        with offering(folder, own.names()):
            checkpoint = checkpoint_of(folder, config, start, partial(say, console))
            parts = load_parts(config, own, partial(say, console), checkpoint)
            beginning, read = _checked(parts)
            begun = read_beginning(folder)
            changed = beginning.changed_since(begun) if begun else []
            return _train(parts, read, folder, console, Resumption(checkpoint, changed))


def _checked(parts: Parts) -> tuple[Beginning, list[ReadLines[Rollout]]]:
    """Check what can be refused before anything is written. Return the record of the beginning, and the data."""
    config, task = parts.config, parts.task
    beginning = Beginning.of(task, config, {} if parts.own.task is not None else row_digests(config.task))
    refuse_too_long(len(task.prompt(0).token_ids), config.sampling.max_tokens, parts.model.max_length)
    if config.report.wandb is not None:
        need_wandb()
    check_runtime(config.cluster)
    return beginning, read_data(parts)


def _train(
    parts: Parts,
    read: Sequence[ReadLines[Rollout]],
    folder: Path,
    console: Console,
    resumption: Resumption | None = None,
) -> Result:
    """Train a run whose folder exists and is locked, from the beginning or from where it is resumed."""
    start, command = time.perf_counter(), how_to_go_on(folder, parts.own.names())
    with _advised(folder, command):
        parts, finished, version = _learn_to_the_end(parts, read, folder, console, resumption)
    if not finished:
        raise InterruptedRunError(f"stopped after batch {version}; continue with: {command}")
    with _advised(folder, command):
        unfinished = folder / f"{UNFINISHED}{MODEL}"
        if not unfinished.exists():
            loading.export(parts.model, parts.codec, unfinished, merge=parts.config.lora.export == "merged")
        publish(unfinished, folder / MODEL)
    with _advised(folder, f"solera report {folder}"):
        return result_of(folder, time.perf_counter() - start, parts.say, parts.config.report.page)


def _learn_to_the_end(
    parts: Parts, read: Sequence[ReadLines[Rollout]], folder: Path, console: Console, resumption: Resumption | None
) -> tuple[Parts, bool, int]:
    """Run the loop. If a rank is lost, resume from the last checkpoint with new ranks (`cluster.restarts`), unless the
    run was asked to stop.

    Returns the parts that the run ended with, whether it finished, and the version it reached.
    """
    interruption = Interruption(parts.say)
    for left in reversed(range(parts.config.cluster.restarts + 1)):
        try:
            return parts, *_learn(parts, read, folder, console, resumption, interruption)
        except RankError as error:
            if _wants_to_stop(interruption, console):
                parts.say(f"{error}; the run stops, because it was asked to")
                return parts, False, max(map(step_of, checkpoints(folder / CHECKPOINTS)), default=0)
            if not left:
                raise
            parts.say(f"{error}; starting all ranks again, {counted(left - 1, 'further restart')} allowed after this")
        checkpoint = checkpoint_of(folder, parts.config, None, parts.say)
        parts = load_parts(parts.config, parts.own, parts.say, checkpoint)
        resumption = Resumption(checkpoint, ())
    raise AssertionError("the last attempt returns or raises")


def _learn(
    parts: Parts,
    read: Sequence[ReadLines[Rollout]],
    folder: Path,
    console: Console,
    resumption: Resumption | None,
    interruption: Interruption,
) -> tuple[bool, int]:
    """Run the loop. Return whether it finished, and the version it reached."""
    config, checkpoint = parts.config, resumption.checkpoint if resumption else None
    with ExitStack() as closing:
        place = place_of(config.store.url, folder, config.run.name)
        if checkpoint is None:
            say_if_lost(place, folder, parts.say)
        store = Ledger(place)
        closing.callback(store.close)
        if resumption is not None:
            take_back(folder, config, store, checkpoint, parts.say)
        import_data(parts, read, store)
        progress = Progressing(config.run.steps, console) if config.report.progress else None
        sink = TeeSink(sinks_of(parts, folder, checkpoint.state.version if checkpoint else 0, progress))
        closing.callback(sink.close)
        with interruption, torch_for(parts.model, config.run), rare_garbage_collection():
            loop = build_loop(parts, store, sink, folder, partial(_wants_to_stop, interruption, console))
            closing.callback(loop.learner.close)
            closing.callback(loop.engine.close)
            closing.callback(loop.supply.close)
            if progress is not None:
                progress.watch(lambda: loop.engine.work.tokens)
            say_if_fewer(console, config, len(loop.evaluator.exam.prompts))
            sync = restore(loop, checkpoint)
            if resumption is not None:
                resumption.tell(parts.say)
            finished = loop.run(sync)
            if finished:
                take_model(parts, loop.learner, folder / f"{UNFINISHED}{MODEL}")
            return finished, loop.learner.version


def _wants_to_stop(interruption: Interruption, console: Console) -> bool:
    return interruption.wanted() or getattr(console, "reader_left", False)


def restore(loop: Loop, checkpoint: Checkpoint | None) -> SyncState:
    """Restore the loop's parts from the checkpoint. Return the sync state that `Loop.run` starts with."""
    _restore_account(loop, checkpoint)
    if checkpoint is None:
        return SyncState(due=not isinstance(loop.engine, NoEngine))
    state, tensors = checkpoint.state, checkpoint.tensors
    try:
        loop.learner.restore(state.lineage, state.version, checkpoint.learner)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise SoleraError(f"{checkpoint.folder}: does not match the run: {one_line(error)}") from error
    loop.supply.restore(SupplyState(state.position, state.running, state.ready))
    # A checkpoint from elsewhere may hold an engine's own weights; this engine's may be the learner's.
    own = {} if loop.delivery.shared else tensors["engine"]
    loop.engine.load(Weights(state.lineage, state.sync.engine_version, iter(own.items())))
    loop.mismatch.engine = state.engine_error
    if "probe" in tensors:  # a run begun before there were probes gets its first at the next sync
        loop.probe.restore(tensors["probe"])
    return state.sync


def _restore_account(loop: Loop, checkpoint: Checkpoint | None) -> None:
    """Before anything is generated: what is not in the store by now was lost when the run was killed."""
    if loop.account is None:
        return
    if checkpoint is None:
        loop.account.restore(None, PolicyVersion(loop.learner.lineage, 0), 0)
    else:
        state = checkpoint.state
        loop.account.restore(state.account, PolicyVersion(state.lineage, state.version), state.watermark)


@contextmanager
def _advised(folder: Path, command: str) -> Iterator[None]:
    """Add to an error that ends the run (such as a full disk) how to continue."""
    once, then = "once that is fixed", f"continue with: {command}"
    try:
        yield
    except BrokenPipeError:
        raise
    except KeyboardInterrupt as stop:
        stop.args = (f"interrupted; {then}",)
        raise
    except torch.OutOfMemoryError as error:
        said = (
            "the GPU's memory is full: in its config.toml lower engine.max_rows or "
            "learn.micro_batch_tokens, raise run.gpu_memory, or set learn.gradient_checkpointing, then "
            f"continue with: {command}"
        )
        raise OSError(errno.ENOMEM, said, str(folder)) from error
    except SoleraError as error:
        error.args = (f"{error}; {once} (settings are in {folder / CONFIG}), {then}",)
        raise
    except OSError as error:
        said = f"{error.strerror or error}; {once}, {then}"
        raise OSError(error.errno, said, error.filename or str(folder)) from error
