"""From a config to objects: the one place that knows concrete classes."""

import dataclasses
import gc
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from solera import config as configuration
from solera.collector import Collector
from solera.config import Config
from solera.engines.in_process import InProcessEngine
from solera.errors import SoleraError
from solera.evaluate.accuracy import Evaluator
from solera.learner.learner import Learner
from solera.learner.reference import Reference
from solera.loop import Loop
from solera.models import loading
from solera.models.codec import TokenizerCodec
from solera.models.language_model import LanguageModel
from solera.objectives.objective import compose
from solera.objectives.table import notices, resolve_config
from solera.protocols import Sink, Task
from solera.records import Sampling
from solera.report.console import Progressing
from solera.report.plot import plot_run
from solera.report.sinks import JsonLines, Several, TensorBoard, WeightsAndBiases, need_wandb, read_metrics
from solera.store.ledger import Ledger
from solera.sync.rules import sync_rule
from solera.tasks.arithmetic import Arithmetic

SMALL_MODEL = 5_000_000
"""Parameters below which a second CPU thread costs more than it brings."""


@dataclass(frozen=True)
class Result:
    """What a finished run leaves behind."""

    folder: Path
    accuracy_before: float
    accuracy_after: float
    seconds: float
    plot: Path
    model: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One dictionary a step, as in `metrics.jsonl`."""
        return read_metrics(self.folder / "metrics.jsonl")


def train(config: Config, console: Console | None = None) -> Result:
    """Train from a config to a finished model in the run's folder."""
    console = console or Console(stderr=True)
    config = resolved(config)

    def say(sentence: str) -> None:
        console.print(f"note: {sentence}", highlight=False, soft_wrap=True)

    for sentence in notices(config):
        say(sentence)
    device, compute = _device(config)
    model, codec = loading.load(config.model.path, device)
    task = build_task(config, codec)
    problems = len(task.held_out(config.evaluate.problems))
    if problems < config.evaluate.problems:
        say(f"evaluate.problems is {config.evaluate.problems}, but the task has {problems} held-out problems")
    set_cpu(config.run.threads, model)
    if config.report.wandb is not None:
        need_wandb()
    folder = make_folder(config)
    start = time.perf_counter()
    sink = Several(_sinks(config, folder, console))
    store = Ledger(folder / "store.db")
    try:
        with rare_garbage_collection():
            build_loop(config, model, codec, task, store, sink, compute).run()
    finally:
        sink.close()
        store.close()
    loading.save(model, codec, folder / "model")
    rows = read_metrics(folder / "metrics.jsonl")
    if not any(row.get("tokens/trained") for row in rows):
        say(
            "nothing was learned: in no batch did a group's rewards differ (an easier task.level, or longer responses?)"
        )
    accuracies = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    seconds = time.perf_counter() - start
    return Result(folder, accuracies[0], accuracies[-1], seconds, plot_run(folder), folder / "model")


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Look for reference cycles less often, and not among what was there before.

    Hundreds of small records are born and die at every step; at Python's own pace the collector walks through all of
    torch's and transformers' objects to find nothing, for a tenth of a small step's time.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def resolved(config: Config) -> Config:
    """Every value checked, every unset objective field filled in, a name given."""
    config = resolve_config(config)
    if config.run.name is None:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.objective.name}-s{config.run.seed}"
        config = configuration.override(config, "run", name=name)
    return config


def build_loop(
    config: Config,
    model: LanguageModel,
    codec: TokenizerCodec,
    task: Task,
    store: Ledger,
    sink: Sink,
    compute: torch.dtype,
) -> Loop:
    """The parts of a resolved config, put together."""
    lineage = uuid.uuid4().hex
    objective = compose(config.objective)
    sampling = Sampling(config.sampling.temperature, config.sampling.max_tokens)
    engine = InProcessEngine(model.copy(compute), codec.end_token_ids, config.engine.max_rows, compute)
    reference = None
    if objective.uses_reference:
        reference = Reference(model, config.objective.ref_period, config.objective.ref_ema)
    learner = Learner(
        model, objective, config.learn, lineage=lineage, temperature=sampling.temperature, steps=config.run.steps,
        compute=compute, reference=reference,
    )  # fmt: skip
    collector = Collector(
        task, engine, store, sampling=sampling, group_size=config.collect.group_size,
        reserve=config.collect.offset * config.collect.prompts, seed=config.run.seed,
    )  # fmt: skip
    evaluator = Evaluator(
        task,
        InProcessEngine(model, codec.end_token_ids, config.engine.max_rows, compute),
        task.held_out(config.evaluate.problems),
        Sampling(config.evaluate.temperature, config.sampling.max_tokens, config.evaluate.top_p),
        config.evaluate.every,
    )
    return Loop(
        config.run.steps, config.collect, bool(config.objective.refill), collector, engine, store, learner,
        sync_rule(config.sync), evaluator, sink,
    )  # fmt: skip


def build_task(config: Config, codec: TokenizerCodec) -> Task:
    if config.task.name != "arithmetic":
        raise SoleraError(f"task.name is {config.task.name!r}; known is arithmetic")
    return Arithmetic(codec, config.task.level, config.run.seed)


def make_folder(config: Config) -> Path:
    """A new folder for the run, with the resolved config in it."""
    assert config.run.name is not None
    folder = Path(config.run.root) / config.run.name
    try:
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(configuration.dump(config), encoding="utf-8")
    except FileExistsError as error:
        raise SoleraError(f"{folder} exists already: choose another --run.name, or remove it") from error
    except OSError as error:
        raise SoleraError(f"{folder}: the run's folder cannot be made: {error.strerror}") from error
    return folder


def _device(config: Config) -> tuple[torch.device, torch.dtype]:
    available = torch.cuda.is_available()
    if config.run.device == "cuda" and not available:
        raise SoleraError("run.device is cuda, but torch finds no GPU here: use cpu or auto")
    device = torch.device("cuda" if available and config.run.device != "cpu" else "cpu")
    automatic = "bfloat16" if device.type == "cuda" else "float32"
    chosen = automatic if config.model.compute == "auto" else config.model.compute
    return device, {"float32": torch.float32, "bfloat16": torch.bfloat16}[chosen]


def set_cpu(threads: int, model: LanguageModel) -> None:
    """Threads and kernels of torch that suit the model's size."""
    small = sum(parameter.numel() for parameter in model.parameters().values()) < SMALL_MODEL
    if threads or small:
        torch.set_num_threads(threads or 1)
    if small:
        torch.backends.mkldnn.set_flags(_enabled=False)  # its set-up takes longer than a small matrix product


def _sinks(config: Config, folder: Path, console: Console) -> list[Sink]:
    assert config.run.name is not None
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl")]
    if config.report.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard"))
    if config.report.wandb is not None:
        sinks.append(WeightsAndBiases(config.report.wandb, config.run.name, folder, dataclasses.asdict(config)))
    if config.report.progress:
        sinks.append(Progressing(config.run.steps, console))
    return sinks
