"""Generates responses without training (`solera generate`). They are stored without rewards."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from hashlib import blake2b
from typing import Any

import torch

from solera import config as configuration
from solera.config import Config
from solera.engines.in_process import InProcessEngine, refuse_too_long
from solera.errors import SoleraError, counted
from solera.folder.files import alone, make_folder
from solera.folder.paths import CONFIG, GENERATED
from solera.models import loading
from solera.models.codec import TokenizerCodec
from solera.models.digest import describe
from solera.models.language_model import LanguageModel
from solera.objectives.table import resolve_config
from solera.protocols import Engine, Generate, Weights
from solera.records import Prompt, Rollout, Sampling
from solera.run.order import Order, Written, read_generated
from solera.run.parts import Parts, compute_of, device_of
from solera.run.process import torch_for
from solera.run.serving import serving
from solera.run.task import build_task, line_reader
from solera.store.database import place_of, refuse_taken
from solera.store.ledger import Ledger, open_store
from solera.store.lines import plain
from solera.store.reading import reading
from solera.streams import stream_seed
from solera.tasks.episodes import attempt_all
from solera.tasks.event_loop import EventLoop
from solera.tasks.jsonl import every_prompt

Say = Callable[[str], None]
SAME = ("model.path", "task", "sampling", "run.seed", "store.url")
"""Settings that all responses of a folder share. Continuing with other values is refused."""


class Unrewarded:
    """A task that responds to given prompts and grades nothing."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = prompts

    def prompt(self, index: int) -> Prompt:
        return self.prompts[index % len(self.prompts)]

    def held_out(self, count: int) -> list[Prompt]:
        return list(self.prompts[:count])

    async def run(self, prompt: Prompt, generate: Generate) -> Rollout:
        return Rollout.of(prompt, await generate(prompt.token_ids))


def generate(
    order: Order,
    say: Say,
    stop: Callable[[], bool] = lambda: False,
    advance: Callable[[int, int], None] = lambda made, total: None,
) -> Written:
    """Write what is still missing of the order, prompt by prompt, until it is done or `stop` says so.

    What was written stays, also where the process is killed; called again, it goes on. `advance` hears how many
    responses were made now, and how many there will be in all.
    """
    config = order.config
    model, codec = loading.load(order.author.path, device_of(config))
    task = Unrewarded(_different(_prompts(order, codec, model.max_length), say))
    longest = max(len(prompt.token_ids) for prompt in task.prompts)
    refuse_too_long(longest, config.sampling.max_tokens, model.max_length)
    lineage = order.author.lineage or _lineage(model)
    compute = compute_of(config, model, model.device, task, say)
    parts = Parts(config, model.for_compute(compute), codec, task, compute, say=say)
    with (
        _place(order, lineage, codec) as (ledger, add), torch_for(model, config.run),
        serving(parts, order.author.path, lineage, order.author.version) as server, EventLoop() as events,
    ):  # fmt: skip
        with reading(ledger.place) as store:
            there = store.written_by(order.origin, lineage, order.author.version)
        engine = server or _in_process(parts, lineage, order.author.version)
        before = sum(min(there.get(prompt.key, 0), order.samples) for prompt in task.prompts)
        further = sum(there.get(prompt.key, 0) for prompt in task.prompts) - before
        total, made = order.samples * len(task.prompts), 0
        advance(before, total)
        for chunk in _chunks(order, task.prompts, there):
            if stop():
                return Written(len(task.prompts), before, made, further, finished=False)
            made += len(chunk)
            add(_write(task, engine, chunk, order, events))
            advance(len(chunk), total)
    return Written(len(task.prompts), before, made, further, finished=True)


def _in_process(parts: Parts, lineage: str, version: int) -> InProcessEngine:
    engine = InProcessEngine(parts.model, parts.codec.end_token_ids, parts.config.engine.max_rows, parts.compute)
    engine.load(Weights(lineage, version, iter(())))  # which weights they are; they are in it already
    return engine


Attempt = tuple[Prompt, int]
"""A prompt, and the seed of one response to it."""


def _chunks(order: Order, prompts: Sequence[Prompt], there: dict[str, int]) -> Iterator[list[Attempt]]:
    """The missing responses, in chunks that the engine decodes at once. All responses to a prompt are in one chunk."""
    chunk: list[Attempt] = []
    for prompt in prompts:
        of_prompt = int.from_bytes(blake2b(prompt.key.encode(), digest_size=8).digest())
        missing = range(there.get(prompt.key, 0), order.samples)
        more = [(prompt, stream_seed(order.config.run.seed, of_prompt, member)) for member in missing]
        if chunk and len(chunk) + len(more) > order.config.engine.max_rows:
            yield chunk
            chunk = []
        chunk += more
    if chunk:
        yield chunk


def _write(task: Unrewarded, engine: Engine, chunk: list[Attempt], order: Order, events: EventLoop) -> list[Rollout]:
    sampling = Sampling(order.config.sampling.temperature, order.config.sampling.max_tokens)
    try:
        written = attempt_all(task, engine, chunk, sampling, events=events)
    except torch.OutOfMemoryError as error:
        raise SoleraError("the GPU's memory is full: lower --engine.max_rows, or use --device cpu") from error
    return [dataclasses.replace(rollout, origin=order.origin) for rollout in written]


def _prompts(order: Order, codec: TokenizerCodec, max_length: int | None) -> list[Prompt]:
    """The requested problems, in order."""
    config, count = order.config, order.prompts
    if config.task.prompt is not None:
        longest = None if max_length is None else max_length - config.sampling.max_tokens
        found = every_prompt(config.task, codec, longest, order.held_out)[:count]
    else:
        task = build_task(config, codec, max_length)
        wanted = count or config.evaluate.problems
        found = task.held_out(wanted) if order.held_out else [task.prompt(index) for index in range(wanted)]
    if not found:
        raise SoleraError(f"{config.task.path}: it has no {'held-out' if order.held_out else 'training'} prompts")
    return found


def _different(prompts: list[Prompt], say: Say) -> list[Prompt]:
    """Remove duplicate prompts. `samples` is the number of responses to each."""
    distinct: dict[str, Prompt] = {}
    for prompt in prompts:
        distinct.setdefault(prompt.key, prompt)
    if len(distinct) < len(prompts):
        say(
            f"{len(prompts) - len(distinct)} of {counted(len(prompts), 'prompt')} are duplicates and are "
            "answered only once"
        )
    return list(distinct.values())


def _lineage(model: LanguageModel) -> str:
    """Name for weights that no run has trained: a digest of the weights, so a model has the same name everywhere."""
    specs = describe(model.parameters().items())
    return blake2b(repr(sorted(specs)).encode(), digest_size=16).hexdigest()


@contextmanager
def _place(
    order: Order, lineage: str, codec: TokenizerCodec
) -> Iterator[tuple[Ledger, Callable[[list[Rollout]], object]]]:
    """Open the store and return how to write to it: in a folder of its own, or in a run's folder."""
    out, config = order.out, order.config
    if (out / CONFIG).is_file() and not (out / GENERATED).is_file():
        with closing(open_store(out)) as ledger:
            yield ledger, _importing(order, ledger, codec)
        return
    if out.exists():
        _refuse_other(order, lineage)
    else:
        refuse_taken(place_of(config.store.url, out))
        make_folder(out, {CONFIG: configuration.dump(config), GENERATED: json.dumps(_marks(order, lineage), indent=1)})
    with alone(out, "writing into this store"), closing(Ledger(place_of(config.store.url, out))) as ledger:
        yield ledger, ledger.add


def _importing(order: Order, ledger: Ledger, codec: TokenizerCodec) -> Callable[[list[Rollout]], object]:
    """Write into a run's store as `solera data import` does. A resume keeps the rows; held-out problems are refused."""
    config = resolve_config(configuration.load(order.out / CONFIG))
    reader = loading.load_reader(config.model.path)
    if reader.codec.tokenizer.get_vocab() != codec.tokenizer.get_vocab():
        raise SoleraError(
            f"{order.out}: the run's model, {config.model.path}, has a different tokenizer than "
            f"{order.author.path}: choose another folder (--out), and export the text"
        )
    read = line_reader(config, reader, order.out, order.origin)

    def add(rollouts: list[Rollout]) -> None:
        lines = [json.dumps(plain(rollout, time.time())).encode() for rollout in rollouts]
        ledger.add_samples([one for line in lines for one in read(line, str(order.out))])

    return add


def _marks(order: Order, lineage: str) -> dict[str, Any]:
    return {
        "origin": order.origin, "lineage": lineage, "version": order.author.version, "held_out": order.held_out,
    }  # fmt: skip


def _refuse_other(order: Order, lineage: str) -> None:
    """Refuse a folder that holds responses of another model or to other prompts."""
    before = resolve_config(configuration.load(order.out / CONFIG))
    held, given = _values(before) | read_generated(order.out), _values(order.config) | _marks(order, lineage)
    for name, value in given.items():
        if held.get(name) != value:
            raise SoleraError(
                f"{order.out} was generated with {name} = {held.get(name)}, but now it is {value}: use the "
                "same settings, or choose another --out"
            )


def _values(config: Config) -> dict[str, Any]:
    """The values of the settings in `SAME`."""
    found: dict[str, Any] = {}
    for name in SAME:
        section, _, field = name.partition(".")
        part = getattr(config, section)
        named = (
            {name: getattr(part, field)} if field else {f"{section}.{key}": value for key, value in vars(part).items()}
        )
        found |= named
    return found
