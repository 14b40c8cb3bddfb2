"""Evaluates models on held-out problems (`solera eval`)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from solera.config import Config
from solera.engines.in_process import refuse_too_long
from solera.errors import SoleraError
from solera.evaluate.attempts import Exam
from solera.evaluate.candidates import Candidate, candidates, other_tasks, refuse_own_code, settings
from solera.evaluate.evaluation import Evaluation, Examined, check_k
from solera.models import loading
from solera.objectives.table import resolve_config
from solera.records import Sampling
from solera.run.build import build_exam, evaluation_sampling
from solera.run.own_code import OwnCode, own_code
from solera.run.parts import Parts, compute_of, device_of
from solera.run.process import torch_for
from solera.run.saying import say, say_if_fewer
from solera.run.serving import serving
from solera.run.task import build_task
from solera.tasks.episodes import Guard
from solera.tasks.event_loop import EventLoop
from solera.tasks.own import TaskFactory


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
        say(console, f"{run} was trained on another task; all models get the same problems here")
    if not k and config.evaluate.samples > 1:
        k = (config.evaluate.samples,)
    guard = Guard(config.collect.errors, config.collect.retries, partial(say, console))
    examined = tuple(_examine_all(chosen, config, k, advance, own, guard))
    if not examined:
        raise SoleraError(f"{', '.join(models)}: all checkpoints were removed during the evaluation: try again")
    result = Evaluation(config, examined)
    say_if_fewer(console, config, min(len(model.greedy.problems) for model in result.models))
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
                f"{candidate.name} was removed during the evaluation and is skipped"
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
    compute = compute_of(config, model, model.device, task)
    events = EventLoop(in_rounds=config.collect.deterministic)
    parts = Parts(config, model.for_compute(compute), codec, task, compute, own, guard.say)
    with serving(parts, candidate.path) as engine, torch_for(model, config.run), events:
        return _attempt(candidate, build_exam(parts, guard, events, engine), parts, k, advance)


def _attempt(
    candidate: Candidate, exam: Exam, parts: Parts, k: tuple[int, ...], advance: Callable[[str, int, int], None]
) -> Examined:
    config = parts.config
    for prompt in exam.prompts[:1]:
        refuse_too_long(len(prompt.token_ids), config.sampling.max_tokens, parts.model.max_length)
    greedy, sampled = Sampling(0.0, config.sampling.max_tokens), evaluation_sampling(config)
    samples = config.evaluate.samples if sampled.temperature > 0 else 0

    def made(attempts: int) -> None:
        advance(candidate.name, attempts, len(exam.prompts) * (1 + samples))

    try:
        first = exam.attempt(greedy, advance=made)
        more = exam.attempt(sampled, samples, config.run.seed, made) if samples else None
    except torch.OutOfMemoryError as error:
        raise SoleraError(f"{candidate.name}: the GPU's memory is full: free some, or use --device cpu") from error
    return Examined(candidate, first, more, k)
