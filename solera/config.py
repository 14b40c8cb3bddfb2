"""What a run is: frozen dataclasses, one for each room, every default stated once.

A run is described by a TOML file with one table for each class below, and by command-line overrides of the same
names (`--learn.lr 1e-4`). The string under a field is its help text. Nothing here imports torch.
"""

import dataclasses
import difflib
import itertools
import json
import math
import operator
import os
import re
import sys
import tomllib
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

import tyro

from solera.errors import SoleraError

AdvantageName = Literal["mean", "whiten", "whiten_bessel", "leave_one_out", "logavgexp", "shifted", "raw"]
AggregationName = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length", "group_sum"]
ClipName = Literal["none", "one_side", "two_side", "ring"]
WeightName = Literal["none", "importance", "exp_advantage"]
RegulariserName = Literal["none", "forward_kl", "k2_token", "k2_sequence"]
DropName = Literal["none", "random", "worst"]
KLName = Literal["k1", "k2", "k3"]
KLWeight = Literal["importance", "none"]
ClipCentre = Literal["one", "proximal"]
ClipLevel = Literal["token", "sequence"]
DivergenceName = Literal["tv_token", "tv_sequence", "kl", "ess"]
OrderName = Literal["uniform", "newest", "priority"]

Text = NewType("Text", str)
"""May have several lines."""

LARGEST = 10**18 - 1
"""Whole numbers beyond it do not fit into 64 bits, or not with what is added to them."""
MOST_THREADS = 1024
COLDEST = 1e-3
"""Lowest temperature: logits divided by much less are infinite."""
LONGEST_NAME = 200
"""Bytes: file systems allow 255, and an unfinished folder's name is longer than its own."""


def _short(room: str, field_name: str) -> Any:
    """A field whose option is also its room's name: `--model X` for `--model.path X`."""
    return tyro.conf.arg(name=room, prefix_name=False, aliases=(f"--{room}.{field_name}",))


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole."""

    name: str | None = None
    """Folder of the run under `root`. By default date and time, objective and seed."""
    root: str = "runs"
    """Folder that holds all runs."""
    steps: int = 200
    """Batches to learn from."""
    seed: int = 0
    """Seed of the problems drawn and of every response sampled."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where learner and engine compute; `auto` takes a GPU where there is one."""
    threads: int = 0
    """CPU threads; 0 takes one for models under five million parameters (more would wait for each other), else all."""


@dataclass(frozen=True)
class ModelConfig:
    """The model to train."""

    path: Annotated[str, _short("model", "path")] = "embedded"
    """A Hugging Face folder, or a hub name; `embedded` is the small model inside the package."""
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of forward passes and of the engine's weights; `auto` is bfloat16 on a GPU, float32 on a CPU. The
    learner's own weights are float32 always."""
    compile: bool = True
    """On a GPU in bfloat16, fuse the small operations of every layer (torch.compile): some seconds at the start."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters in place of all weights: W + (alpha / rank)·B·A with A and B trained (needs the extra `lora`).
    Only they are checkpointed and synced; the reference policy is the model with them switched off."""

    rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = 16.0
    """The adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names of the layers that get one, such as q_proj; `all-linear`: every linear layer but the head."""
    export: Literal["merged", "adapter"] = "merged"
    """What the run leaves in `model/`: an ordinary model with the adapters added in, or the adapters alone."""


@dataclass(frozen=True)
class TaskConfig:
    """Where problems and grades come from."""

    name: Annotated[str, _short("task", "name")] = "arithmetic"
    """`arithmetic`: sums of two numbers, generated, graded exactly, nothing to download. `countdown`: a target made
    from given numbers. `gym:NAME`: any task of reasoning-gym. `gsm8k`, `math`: word problems and competition
    mathematics. `jsonl`: your own file. `mixture`: several of these."""
    level: int | None = None
    """How hard generated problems are. `arithmetic`: largest number of digits, 1 to 4, 2 where unset, which the
    embedded model was taught; `countdown`: how many numbers, 2 to 6, 3 where unset; `gym:NAME`: level of its
    curriculum, 0 or more, where unset the task's own defaults."""
    path: str | None = None
    """Problems, one JSON object a line: a file, a folder with train.jsonl and test.jsonl, or a hub name, OWNER/NAME or
    OWNER/NAME:SUBSET, which is fetched (`jsonl`, `gsm8k`, `math`)."""
    prompt: str | None = None
    """Column that holds the prompt, text or chat messages; where unset `prompt` (`jsonl`), `question` (`gsm8k`),
    `problem` (`math`)."""
    answer: str | None = None
    """Column that graders compare with; `answer` where unset (`jsonl`, `gsm8k`, `math`)."""
    template: Text | None = None
    """What the model is shown, with `{prompt}` in the place of the problem: as the user's message where the model has a
    chat template, else as text. Where unset, the task's own; `jsonl` shows the prompt as it is."""
    held_out_path: str | None = None
    """Problems for evaluation, named as `path` is; they are left out of training (`jsonl`, `gsm8k`, `math`)."""
    held_out_share: float | None = None
    """Share of the prompts kept for evaluation where there is neither such a file nor a split `test`; 0.1 where unset
    (`jsonl`, `gsm8k`, `math`)."""
    parts: tuple[str, ...] = ()
    """Tasks of a `mixture`: NAME, NAME@LEVEL for one that has levels, NAME=PATH for one that reads data."""
    weights: tuple[float, ...] = ()
    """How often each part of a `mixture` has its turn; empty: equally often."""


_FILE_FIELDS: dict[str, Any] = {"path": None, "answer": "answer", "held_out_path": None, "held_out_share": 0.1}
TASK_FIELDS: dict[str, dict[str, Any]] = {
    "arithmetic": {"level": 2},
    "jsonl": {**_FILE_FIELDS, "prompt": "prompt", "template": None},
    "gsm8k": {
        **_FILE_FIELDS, "prompt": "question",
        "template": "{prompt}\nThink step by step, and end with a line that holds #### and the final number.",
    },
    "math": {
        **_FILE_FIELDS, "prompt": "problem",
        "template": "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    },
    "countdown": {
        "level": 3,
        "template": "{prompt} Use each number exactly once, with + - * / and brackets. Write the expression between "
        "<answer> and </answer>.",
    },
    "gym": {"level": None, "template": "{prompt}\nReply with the answer alone."},
    "mixture": {"parts": (), "weights": ()},
}  # fmt: skip
"""The fields each task uses, and the values they take where unset."""
GYM = "gym:"


def kind_of_task(name: str) -> str:
    """The row of TASK_FIELDS that a task's name belongs to.

    >>> kind_of_task("gym:gcd"), kind_of_task("math")
    ('gym', 'math')
    """
    return "gym" if name.startswith(GYM) else name


@dataclass(frozen=True)
class RewardConfig:
    """What a response is worth: the sum of its functions' values, each times its weight."""

    functions: tuple[str, ...] = ()
    """`exact`, `verbatim`, `number`, `math`, `countdown`, the forms `boxed`, `marked` and `think_answer`, or your own
    as `package.module:function` or `file.py:function`. Empty: the task's own grader, `exact` for `jsonl`."""
    weights: tuple[float, ...] = ()
    """A factor for each function; empty: 1 each."""
    timeout: float = 60.0
    """Seconds that one call of a function of your own may take."""
    errors: Literal["stop", "missing"] = "stop"
    """When a function of your own fails, takes too long or gives no number: `stop` the run, or count its value as
    `missing`."""
    truncated: Literal["grade", "mask", "penalise"] = "grade"
    """Responses cut off by `sampling.max_tokens`: `grade` them as they are, `mask` them (they leave their group before
    the baseline), or `penalise` them with `truncated_reward` in place of every other reward."""
    truncated_reward: float = -1.0
    """Reward of a response cut off, with `truncated = "penalise"`."""
    overlong_buffer: int = 0
    """Over the last so many tokens before `sampling.max_tokens` the reward falls linearly, by `overlong_penalty` at the
    limit (DAPO's soft overlong punishment); 0: not at all."""
    overlong_penalty: float = 1.0
    """How much a response of full length loses, with `overlong_buffer`."""


@dataclass(frozen=True)
class SamplingConfig:
    """How the responses to learn from are sampled."""

    temperature: float = 1.0
    """Divides the logits before sampling; every log-probability of the run is taken at it."""
    max_tokens: int = 16
    """Longest response, the end token included."""
    top_p: float = 1.0
    """Must stay 1: what a truncated sampler cannot draw has no probability to correct for."""


@dataclass(frozen=True)
class CollectConfig:
    """How the store is kept supplied."""

    prompts: int = 32
    """Prompts in a batch, each with one group of responses."""
    group_size: int = 8
    """Responses to a prompt that are compared with each other."""
    offset: int = 0
    """Whole batches that wait in the store before they are learned from: a constant lag on top of the sync period."""
    refill_rounds: int = 3
    """With `objective.refill`: how often a batch may be topped up in place of masked groups."""


@dataclass(frozen=True)
class StoreConfig:
    """Where every rollout, its rewards and its uses are kept."""

    url: str | None = None
    """A PostgreSQL database, `postgresql+psycopg://USER@HOST/DATABASE`: the run's tables lie there in a schema of its
    name (needs the extra `postgres`). Unset: the SQLite file `store.db` in the run's folder."""
    data: tuple[str, ...] = ()
    """Files of rollouts, one JSON object a line, that are imported when the run begins (`solera data import --help`
    says what a line holds)."""


@dataclass(frozen=True)
class DrawConfig:
    """Which rollouts of the store a batch is made of. Groups are formed when drawn, of rollouts to the same prompt."""

    policy: Literal["fresh", "replay", "mixed", "offline"] = "fresh"
    """`fresh`: what was never used, first in, first out. `replay`: a part of the batch is that, the rest was used
    before. `mixed`: by origin, in `shares`. `offline`: whatever the store holds; nothing is generated."""
    fresh: float = 0.5
    """Share of a batch's groups that are new (`replay`); more are where too few can be replayed."""
    order: OrderName = "uniform"
    """Which groups come first, of those that the run does not write anew: drawn at random (`uniform`), the `newest`,
    or those of highest `priority`, 2^(−age/half_life) / (1 + uses)."""
    half_life: float = 8.0
    """Batches after which age halves a group's priority (`order = "priority"`)."""
    shares: tuple[str, ...] = ()
    """What each origin contributes (`mixed`): `self=0.5 model:teacher=0.5`. Of `self` what was never used is taken, of
    others anything; `model:*` is every other model."""
    mix: Literal["between", "within"] = "between"
    """Whether the shares are of groups, each of one origin (`between`), or of the members of every group (`within`)."""
    max_age: int | None = None
    """Oldest age drawn, in batches; text without an age has no limit."""
    max_uses: int | None = None
    """How often a rollout may be learned from; unset: no limit beyond the policy's own."""
    min_rewarded: int | None = None
    """Fewest rewarded members that make a group; unset: `collect.group_size`."""
    min_spread: float = 0.0
    """Smallest difference between a group's highest and lowest reward."""


def shares_of(draw: DrawConfig) -> dict[str, float]:
    """`shares` as origin and number.

    >>> shares_of(DrawConfig(shares=("self=0.5", "model:a=b=1.5")))
    {'self': 0.5, 'model:a=b': 1.5}
    """
    shares = {}
    for text in draw.shares:
        origin, _, number = text.rpartition("=")
        try:
            shares[origin] = float(number)
        except ValueError:
            shares[origin] = math.nan
    return shares


def writes(draw: DrawConfig) -> bool:
    """Whether a run generates anything; else it has no engine.

    >>> writes(DrawConfig()), writes(DrawConfig("offline")), writes(DrawConfig("mixed", shares=("human=1",)))
    (True, False, False)
    """
    return draw.policy in ("fresh", "replay") or "self" in shares_of(draw)


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is minimised. A field left unset takes the objective's own value; a field that the objective does not use is
    refused. `solera algorithms` lists the objectives, `solera algorithms NAME` shows one with all its fields."""

    name: Annotated[str, _short("objective", "name")] = "rec_oneside_nois_wide"
    """One of the names that `solera algorithms` lists."""
    advantage: AdvantageName | None = None
    """`mean`: reward minus the group's mean; `whiten`: that, divided by the group's standard deviation
    (`whiten_bessel`: over G−1); `leave_one_out`: minus the mean of the others; `logavgexp`, `shifted`: minus another
    baseline; `raw`: the reward."""
    aggregation: AggregationName | None = None
    """`token_mean`: all tokens count alike; `sequence_mean`: all responses count alike; `sequence_sum`: mean over
    responses of their sums; `fixed_length`: that, divided by the response limit; `group_sum`: mean over groups of their
    sums."""
    zero_variance_mask: bool | None = None
    """Leave out groups whose rewards are all equal, before any forward pass."""
    refill: bool | None = None
    """Draw further groups in place of masked ones."""
    drop: DropName | None = None
    """RED-Drop: where negatives outnumber positives in a group, leave out as many, `random` ones or the `worst`."""
    keep_denominator: bool | None = None
    """Dropped responses keep their place in the loss's denominator."""
    clip: ClipName | None = None
    """Which tokens count by their ratio: up to the edge their advantage drives them to (`one_side`), within both edges
    (`two_side`), or there and far outside where they are pulled back (`ring`)."""
    weight: WeightName | None = None
    """What a token is multiplied with: its ratio (`importance`), or exp(A/T) (`exp_advantage`)."""
    epsilon: float | None = None
    """Half-width of the clip band around its centre."""
    epsilon_low: float | None = None
    """Lower clip: at ratios below 1 − this."""
    epsilon_high: float | None = None
    """Upper clip: at ratios above 1 + this."""
    ring_low: float | None = None
    """Ring clip: below 1 − this a token counts again where its advantage is positive."""
    ring_high: float | None = None
    """Ring clip: above 1 + this a token counts again where its advantage is negative."""
    centre: ClipCentre | None = None
    """Centre of the clip band: `one`, or `proximal`, the ratio of the policy before this batch."""
    level: ClipLevel | None = None
    """Whether ratios are of each token or of the whole response."""
    weight_temperature: float | None = None
    """T of the weight exp(A/T)."""
    adaptive_temperature: bool | None = None
    """Choose T for each minibatch so that good and bad tokens balance."""
    weight_low: float | None = None
    """Below this, the weight of the policy before this batch against who wrote a token counts as 0."""
    weight_high: float | None = None
    """Above this, that weight is cut down to it (`tis`) or counts as 0 (`mis`)."""
    cap: float | None = None
    """Largest ratio by which a token is weighted."""
    second_moment: float | None = None
    """Largest mean of (log ρ)² over the tokens that move away from who wrote them."""
    tolerance: float | None = None
    """Largest change of a token's probability before it is masked."""
    tau: float | None = None
    """Temperature of mirror descent."""
    tau_positive: float | None = None
    """Steepness of the soft gate where the advantage is positive."""
    tau_negative: float | None = None
    """Steepness of the soft gate where the advantage is negative."""
    threshold: float | None = None
    """Lowest reward of a response to imitate."""
    delta: float | None = None
    """Shift of the baseline in the advantage `shifted`; below 0 it leans towards imitation."""
    advantage_tau: float | None = None
    """Temperature of the advantage `logavgexp`."""
    regulariser: RegulariserName | None = None
    """Pull towards who wrote the data: `forward_kl` −ℓ, `k2_token` (ℓ−b)², `k2_sequence` ½(Σ(ℓ−b))²."""
    regulariser_weight: float | None = None
    """Weight of the regulariser."""
    beta: float | None = None
    """Weight of the KL divergence from the reference policy; 0 loads no reference."""
    kl: KLName | None = None
    """Estimator of that divergence."""
    kl_weight: KLWeight | None = None
    """`importance` corrects the estimator for who wrote the response; `none` is what older GRPO code does."""
    ref_period: int | None = None
    """Replace the reference by the current policy every so many batches; unset keeps it."""
    ref_ema: float | None = None
    """Mix this share of the current policy into the reference after every batch; unset keeps it."""
    entropy_bonus: float | None = None
    """Weight of the policy's entropy, subtracted from the loss."""
    unknown_behaviour: Literal["refuse", "proximal"] | None = None
    """Text whose author's probabilities nobody recorded: `refuse` it, or take those of the policy before the batch."""


@dataclass(frozen=True)
class LearnConfig:
    """The optimiser, and how a batch is cut."""

    lr: float = 3e-4
    """Peak learning rate of AdamW."""
    warmup: int = 10
    """Batches over which the learning rate rises from zero."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up; `linear` and `cosine` would reach zero after the last batch."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; longer ones are scaled down."""
    passes: int = 1
    """Passes over each batch: the papers' i."""
    minibatches: int = 1
    """Optimiser steps in a pass, each on its share of the groups."""
    micro_batch_tokens: int | None = None
    """Most tokens, padding included, in one forward and backward; unset: what half of a GPU's free memory holds, at
    most 49,152, and 16,384 on a CPU. Changes memory and speed, not the gradient."""
    pack_tokens: int = 128
    """Responses to the same prompt share a row up to this length, so that the prompt is computed once; 0: never."""
    logit_chunk: int = 4096
    """Most tokens whose logits exist at the same time."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""


@dataclass(frozen=True)
class EngineConfig:
    """The in-process engine that writes responses."""

    max_rows: int = 1024
    """Most responses decoded side by side; more are written in turns."""


@dataclass(frozen=True)
class SyncConfig:
    """When the engine gets the learner's weights."""

    rule: Literal["every", "never", "adaptive"] = "every"
    """`every`: once in `period` batches; `never`: the engine keeps the weights it started with; `adaptive`: when
    `metric` is at `set_point`, measured after every batch on a probe of `diagnose.probe_prompts`."""
    period: int = 10
    """Batches between two syncs: the papers' v. 1 is on-policy."""
    metric: DivergenceName = "tv_token"
    """Divergence of the learner's policy from the engine's that `adaptive` goes by (docs/metrics.md, `probe/…`)."""
    set_point: float | None = None
    """`adaptive` syncs where `metric` is nearer to this now than one batch later."""
    v_min: int = 1
    """Fewest batches between two syncs (`adaptive`)."""
    v_max: int = 50
    """Most batches between two syncs (`adaptive`)."""
    on_fault: Literal["stop", "retry"] = "stop"
    """Weights that did not arrive as they were sent: `stop` the run, or `retry` once and stop then."""


@dataclass(frozen=True)
class DiagnoseConfig:
    """Whether an update helped, judged on a probe: responses to held-out problems that are never learned from."""

    probe_prompts: int = 64
    """Held-out prompts of a probe, each with one group of responses; 0: no probe. They are what an interval counts."""
    probe_group: int = 4
    """Responses to each of them, 2 or more."""
    every: int = 80
    """One batch in so many is judged, at places drawn by the seed so that data of every age is met; 0: none. With
    `sync.rule = "adaptive"` every batch is."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Accuracy of the learner's current weights on held-out problems."""

    every: int = 20
    """Batches between two evaluations; the first and the last weights are always evaluated. 0: those only."""
    problems: int = 500
    """Held-out problems, the same at every evaluation."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Share of the probability that may be sampled from."""
    samples: int = 1
    """Attempts at each problem; more than one needs a temperature above 0."""
    threshold: float = 0.5
    """An attempt passes where its reward is at least this."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What a killed run goes on from (`solera train --resume FOLDER`)."""

    every: int = 50
    """Batches between two checkpoints; 0: only when interrupted."""
    keep: int = 2
    """How many of the last ones stay, besides the one with the best accuracy."""


@dataclass(frozen=True)
class ReportConfig:
    """Where metrics go besides `metrics.jsonl`."""

    tensorboard: bool = True
    """Write TensorBoard events into the run's folder."""
    wandb: str | None = None
    """Weights & Biases project to log to (needs the extra `wandb`)."""
    progress: bool = True
    """Show the progress bar, or a line at every evaluation where the output is not a terminal."""


@dataclass(frozen=True)
class Config:
    """A run, complete."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    draw: DrawConfig = field(default_factory=DrawConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    diagnose: DiagnoseConfig = field(default_factory=DiagnoseConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    report: ReportConfig = field(default_factory=ReportConfig)


Place = Callable[..., str]
"""From the path of a table or field to where it is written, such as `run.toml:12`."""
KEY = r"""(?:"[^"]*"|'[^']*'|[\w-]+)"""
DOTTED = rf"{KEY}(?:\s*\.\s*{KEY})*"
"""A key as TOML writes it: `period`, `sync.period`, `"v=20".sync`."""


def load(path: Path | str) -> Config:
    """Read a TOML file. Unknown keys and wrong types are refused with file, line and field."""
    text, tables = read_toml(Path(path))
    return overlay(Config(), tables, places(text, str(path)))


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SoleraError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SoleraError(f"{path}:{line}: cannot be read: not UTF-8 text") from error


def located(error: SoleraError, file: Path, config: Config) -> SoleraError:
    """The complaint with file and line, where the field that it begins with has its value in `config` from `file`."""
    named = re.match(r"(\w+)\.(\w+)\b", str(error))
    if named is None:
        return error
    room, key = named.groups()
    text = _text(file)
    if key not in tomllib.loads(text).get(room, {}):
        return error
    if getattr(getattr(load(file), room), key) != getattr(getattr(config, room), key):  # an option replaced it
        return error
    return SoleraError(f"{file}:{_line(text, (room, key))}: {error}")


def parse(text: str, source: str) -> Config:
    """A Config from TOML text; `source` names it in errors."""
    return overlay(Config(), tomllib.loads(text), places(text, source))


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """A file's text and its tables."""
    text = _text(path)
    try:
        return text, tomllib.loads(text)
    except RecursionError as error:
        raise SoleraError(f"{path}: not valid TOML: lists or tables are nested too deep") from error
    except ValueError as error:  # TOMLDecodeError, and Python's own about numbers with thousands of digits
        raise SoleraError(f"{path}: not valid TOML: {error}") from error


def places(text: str, source: str) -> Place:
    """Says where in a TOML text a table or field is written."""
    return lambda *path: f"{source}:{_line(text, path)}"


def overlay(config: Config, tables: dict[str, Any], place: Place) -> Config:
    """Fields of TOML tables over a config; `place(room, field)` says where each is written."""
    rooms = get_type_hints(Config)
    values = {}
    for name, table in tables.items():
        if name not in rooms:
            raise SoleraError(f"{place(name)}: unknown table [{name}]{perhaps(name, rooms)}")
        if not isinstance(table, dict):
            raise SoleraError(f"{place(name)}: {name} is a table: write [{name}] and its fields below")
        values[name] = dataclasses.replace(getattr(config, name), **typed_fields(rooms[name], name, table, place))
    return dataclasses.replace(config, **values)


def typed_fields(room: Any, name: str, table: dict[str, Any], place: Place) -> dict[str, Any]:
    """The fields of one table, known to the class `room` and of its types."""
    hints = get_type_hints(room)
    values = {}
    for key, value in table.items():
        if key not in hints:
            raise SoleraError(f"{place(name, key)}: unknown field {name}.{key}{perhaps(key, hints)}")
        try:
            values[key] = _typed(value, hints[key])
        except TypeError as error:
            raise SoleraError(f"{place(name, key)}: {name}.{key} is {_shown(value)} but must be {error}") from error
    return values


def _typed(value: Any, hint: Any) -> Any:
    """The value as the annotated type; TypeError with a description of that type where it is not one."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _typed(value, arguments[0])
    if origin in (Union, types.UnionType):
        return _typed(value, next(a for a in arguments if a is not type(None)))
    if origin is Literal:
        if value not in arguments:
            raise TypeError("one of " + ", ".join(map(str, arguments)))
        return value
    if origin is tuple:
        return _typed_items(value, arguments)
    if hint is Text:
        return value if isinstance(value, str) and "\n" in value else _typed(value, str)
    if type(value) is not hint and not (hint is float and type(value) is int):
        raise TypeError({int: "a whole number", float: "a number", str: "text", bool: "true or false"}[hint])
    if hint is int and abs(value) > LARGEST:
        raise TypeError("a whole number of at most 18 digits")
    if hint is float and not abs(value) <= sys.float_info.max:  # NaN compares with nothing
        raise TypeError("a finite number")
    if hint is str and not (value and value.isprintable()):
        raise TypeError("text, not empty and without control characters")
    return float(value) if hint is float else value


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number with thousands of digits
        return "too long a number"
    return text if len(text) <= 100 else f"{text[:100]}..."


def _typed_items(value: Any, hints: tuple[Any, ...]) -> tuple[Any, ...]:
    """Items of a tuple of fixed length, or of one kind and any number."""
    kind, any_number = {str: "texts", float: "numbers"}[hints[0]], hints[1] is Ellipsis
    if not isinstance(value, list) or not (any_number or len(value) == len(hints)):
        raise TypeError(f"a list of {kind}" if any_number else f"a list of {len(hints)} {kind}")
    return tuple(
        _typed(item, hints[0] if any_number else hint) for item, hint in zip(value, cycle(hints), strict=False)
    )


def _line(text: str, path: tuple[str, ...]) -> int:
    """Line on which a key is written, or the innermost table around it that has a line of its own."""
    best, found, table = 0, 1, tuple[str, ...]()
    for number, line in enumerate(text.split("\n"), 1):
        if header := re.match(rf"\s*\[{{1,2}}\s*({DOTTED})\s*\]", line):
            here = table = _keys(header[1])
        elif assignment := re.match(rf"\s*({DOTTED})\s*=", line):
            here = (*table, *_keys(assignment[1]))
        else:
            continue
        common = sum(1 for _ in itertools.takewhile(bool, map(operator.eq, here, path)))
        if common > best:
            best, found = common, number
    return found


def _keys(dotted: str) -> tuple[str, ...]:
    return tuple(key.strip("\"'") for key in re.findall(KEY, dotted))


def perhaps(word: str, known: Any) -> str:
    """What a wrong word may have been meant to be."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"


def dump(config: Config) -> str:
    """The config as TOML that `parse` reads back. Unset fields stand as comments, so that the file is complete."""
    lines = []
    for room in dataclasses.fields(config):
        lines.append(f"[{room.name}]")
        values = getattr(config, room.name)
        for key in dataclasses.fields(values):
            value = getattr(values, key.name)
            lines.append(f"# {key.name} is unset" if value is None else f"{key.name} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def help_of(room: type) -> dict[str, str]:
    """What stands under each field of a config class.

    >>> help_of(LearnConfig)["passes"]
    "Passes over each batch: the papers' i."
    """
    import ast
    import inspect

    (definition,) = ast.parse(inspect.getsource(room)).body
    assert isinstance(definition, ast.ClassDef)
    explained = {}
    for field_node, text_node in itertools.pairwise(definition.body):
        if isinstance(field_node, ast.AnnAssign) and isinstance(text_node, ast.Expr):
            assert isinstance(field_node.target, ast.Name) and isinstance(text_node.value, ast.Constant)
            explained[field_node.target.id] = " ".join(str(text_node.value.value).split())
    return explained


def override(config: Config, room: str, **values: Any) -> Config:
    """A copy with some fields of one room replaced.

    >>> override(Config(), "run", steps=5).run.steps
    5
    """
    return dataclasses.replace(config, **{room: dataclasses.replace(getattr(config, room), **values)})


def resolve_task(task: TaskConfig) -> TaskConfig:
    """Unset fields take the task's own values; a field that the task does not use is refused."""
    kind = kind_of_task(task.name)
    if kind not in TASK_FIELDS or task.name == "gym":
        known = [name if name != "gym" else f"{GYM}NAME" for name in TASK_FIELDS]
        raise SoleraError(f"task.name is {task.name!r}{perhaps(task.name, known)}")
    own = TASK_FIELDS[kind]
    unset = [key.name for key in dataclasses.fields(task) if getattr(task, key.name) in (None, ())]
    for key in dataclasses.fields(task):
        if key.name not in ("name", *own, *unset):
            owners = [name for name, fields in TASK_FIELDS.items() if key.name in fields]
            hint = f", or choose --task {owners[0].replace('gym', 'gym:NAME')}" if owners else ""
            raise SoleraError(f"task.{key.name} is not used by {task.name}: remove it{hint}")
    _check_task(task)
    chosen = {} if task.held_out_path is None else {"held_out_share": None}
    task = dataclasses.replace(task, **{key: value for key, value in (own | chosen).items() if key in unset})
    if task.template is not None and "{prompt}" not in task.template:
        raise SoleraError(f"task.template is {_shown(task.template)}, without {{prompt}}, the place of the problem")
    task_parts(task)
    return task


def _check_task(task: TaskConfig) -> None:
    if task.name == "jsonl" and not task.path:
        raise SoleraError("task.path is unset; jsonl needs a file of problems: --task.path FILE.jsonl")
    if task.name in ("gsm8k", "math") and not (task.path or task.held_out_path):
        known = {"gsm8k": "openai/gsm8k:main", "math": "HuggingFaceH4/MATH-500"}[task.name]
        raise SoleraError(
            "task.path is unset, and nothing is fetched unasked: name a folder with train.jsonl and test.jsonl, a file "
            f"or a hub name such as {known} (for evaluation alone: task.held_out_path)"
        )
    if task.held_out_path is not None and task.held_out_share is not None:
        raise SoleraError("task.held_out_path and task.held_out_share both say what is held out: choose one")
    lowest, highest = {"arithmetic": (1, 4), "countdown": (2, 6)}.get(task.name, (0, LARGEST))
    if task.level is not None and not lowest <= task.level <= highest:
        levels = f"levels {lowest} to {highest}" if highest < LARGEST else f"levels from {lowest}"
        raise SoleraError(f"task.level is {task.level}; {task.name} has {levels}")
    if task.name == "mixture" and not task.parts:
        raise SoleraError('task.parts is empty: name the tasks of the mixture, such as ["gsm8k=FOLDER", "gym:gcd@1"]')
    if task.weights and (len(task.weights) != len(task.parts) or not all(weight > 0 for weight in task.weights)):
        raise SoleraError(
            f"task.weights is {list(task.weights)} for {len(task.parts)} parts: give one number above 0 for each"
        )


def task_parts(task: TaskConfig) -> dict[str, TaskConfig]:
    """The resolved tasks of a mixture by the names they have in it; of any other task, itself.

    >>> list(task_parts(TaskConfig("mixture", parts=("gym:gcd@1", "gsm8k=data/gsm8k", "math=HuggingFaceH4/MATH-500"))))
    ['gym:gcd@1', 'gsm8k', 'math MATH-500']
    """
    if task.name != "mixture":
        return {task.name: task}
    parts: dict[str, TaskConfig] = {}
    for text in task.parts:
        name, _, path = text.partition("=")
        base, at, level = name.partition("@")
        stem = Path(path).stem.partition(":")[0]
        label = name if not path or stem == base else f"{base} {stem}"
        if at and not re.fullmatch("[0-9]{1,3}", level):
            raise SoleraError(f"task.parts: {text}: after @ stands a level, a whole number")
        if base == "mixture" or label in parts:
            raise SoleraError(
                f"task.parts: {text}: {'a mixture in a mixture' if base == 'mixture' else 'is there twice'}"
            )
        try:
            parts[label] = _part(base, int(level) if at else None, path or None)
        except SoleraError as error:
            raise SoleraError(f"task.parts: {text}: {error}") from None
    return parts


def _part(name: str, level: int | None, path: str | None) -> TaskConfig:

    return resolve_task(TaskConfig(name, level=level, path=path))


def new_folder(config: Config) -> Path:
    """Where the run will live; refused where something is there already."""
    assert config.run.name is not None
    folder = Path(config.run.root) / config.run.name
    if os.path.lexists(folder):
        raise SoleraError(f"{folder} exists already: choose another --run.name, or remove it")
    return folder


def check(config: Config) -> None:
    """Refuse values that cannot work, each with one line that says what to change."""
    if not isinstance(config, Config):
        raise SoleraError(f"a run is described by a solera.Config, not by {config!r} (solera.load reads a TOML file)")
    for name, room in get_type_hints(Config).items():
        check_types(getattr(config, name), name, room)
    for holds, complaint in _rules(config):
        if not holds:
            raise SoleraError(complaint)


def check_types(values: Any, name: str, room: Any) -> None:
    """The same types from Python as from a file."""
    if not isinstance(values, room):
        raise SoleraError(f"{name} is {values!r} but must be a solera.{room.__name__}")
    for key, hint in get_type_hints(room).items():
        value = getattr(values, key)
        try:
            if value is not None or type(None) not in get_args(hint):
                _typed(list(value) if isinstance(value, tuple) else value, hint)
        except TypeError as error:
            raise SoleraError(f"{name}.{key} is {_shown(value)} but must be {error}") from error


def _rules(config: Config) -> list[tuple[bool, str]]:
    c = config
    at_least = [
        ("run.steps", c.run.steps, 1), ("run.threads", c.run.threads, 0), ("run.seed", c.run.seed, 0),
        ("sampling.max_tokens", c.sampling.max_tokens, 1), ("collect.prompts", c.collect.prompts, 1),
        ("collect.offset", c.collect.offset, 0), ("collect.refill_rounds", c.collect.refill_rounds, 0),
        ("learn.lr", c.learn.lr, 0), ("learn.warmup", c.learn.warmup, 0), ("learn.passes", c.learn.passes, 1),
        ("learn.weight_decay", c.learn.weight_decay, 0), ("learn.minibatches", c.learn.minibatches, 1),
        ("learn.micro_batch_tokens", c.learn.micro_batch_tokens, 1), ("learn.pack_tokens", c.learn.pack_tokens, 0),
        ("learn.logit_chunk", c.learn.logit_chunk, 1), ("engine.max_rows", c.engine.max_rows, 1),
        ("sync.period", c.sync.period, 1), ("evaluate.every", c.evaluate.every, 0),
        ("diagnose.probe_prompts", c.diagnose.probe_prompts, 0), ("diagnose.every", c.diagnose.every, 0),
        ("diagnose.probe_group", c.diagnose.probe_group, 2),
        ("evaluate.problems", c.evaluate.problems, 1),
        ("evaluate.samples", c.evaluate.samples, 1),
        ("checkpoint.every", c.checkpoint.every, 0), ("checkpoint.keep", c.checkpoint.keep, 1),
        ("reward.overlong_buffer", c.reward.overlong_buffer, 0), ("lora.rank", c.lora.rank, 0),
    ]  # fmt: skip
    return [
        *((value is None or value >= least, f"{name} is {value}; it must be at least {least}")
          for name, value, least in at_least),
        (c.sampling.top_p == 1.0, f"sampling.top_p is {c.sampling.top_p}, but training needs the whole distribution: "
         "remove it (evaluate.top_p is free)"),
        (c.sampling.temperature >= COLDEST, f"sampling.temperature is {c.sampling.temperature}; training samples: use "
         f"a value above 0, {COLDEST} at least"),
        (c.collect.group_size >= (1 if c.objective.name == "sft" else 2), f"collect.group_size is "
         f"{c.collect.group_size}; a group of one has nothing to be compared with: use 2 or more"),
        (c.learn.minibatches <= c.collect.prompts, f"learn.minibatches is {c.learn.minibatches}, but a batch has only "
         f"{c.collect.prompts} groups and groups are never split: use at most that many"),
        (c.learn.grad_clip > 0, f"learn.grad_clip is {c.learn.grad_clip}; use a value above 0"),
        (all(0 <= b < 1 for b in c.learn.betas), f"learn.betas is {c.learn.betas}; both must be in [0, 1)"),
        *_sync_rules(c),
        (c.evaluate.top_p == 1 or c.evaluate.temperature > 0, "evaluate.top_p has no effect on greedy evaluation: set "
         "evaluate.temperature above 0 or remove it"),
        (c.evaluate.temperature == 0 or c.evaluate.temperature >= COLDEST, f"evaluate.temperature is "
         f"{c.evaluate.temperature}; use 0, which is greedy, or {COLDEST} at least"),
        (c.evaluate.samples == 1 or c.evaluate.temperature > 0, f"evaluate.samples is {c.evaluate.samples}, but greedy "
         "attempts at a problem are all alike: set evaluate.temperature above 0, or take one sample"),
        (0 < c.evaluate.top_p <= 1, f"evaluate.top_p is {c.evaluate.top_p}; it must be in (0, 1]"),
        *_reward_rules(c),
        (c.lora.rank > 0 or c.lora == LoraConfig(), "lora.alpha, targets and export act with lora.rank above 0 "
         "only: set that or remove them"),
        (c.lora.alpha > 0, f"lora.alpha is {c.lora.alpha}; use a value above 0"),
        (len(c.lora.targets) > 0, "lora.targets is empty: name layers, or all-linear"),
        *_store_rules(c),
        *_draw_rules(c),
        (c.run.threads <= MOST_THREADS, f"run.threads is {c.run.threads}; use at most {MOST_THREADS}, or 0"),
        (c.learn.lr < 1, f"learn.lr is {c.learn.lr}; AdamW diverges above 1"),
        (c.run.name is None or (re.fullmatch(r"[\w.+=-]+", c.run.name) is not None and c.run.name not in (".", "..")
         and len(c.run.name.encode()) <= LONGEST_NAME),
         f"run.name is {_shown(c.run.name)}; use letters, digits and . _ + = - only, {LONGEST_NAME} bytes at most "
         "(run.root is the folder above it)"),
    ]  # fmt: skip


def _sync_rules(config: Config) -> list[tuple[bool, str]]:
    sync, point, adapts = config.sync, config.sync.set_point, config.sync.rule == "adaptive"
    unused = [n for n in ("metric", "set_point", "v_min", "v_max") if getattr(sync, n) != getattr(SyncConfig, n)]
    return [
        (sync.rule == "every" or sync.period == SyncConfig.period, f"sync.period has no meaning with sync.rule = "
         f"{sync.rule}: remove one of them"),
        (adapts or not unused, f"sync.{'/'.join(unused)} acts with sync.rule = adaptive only: set that or remove it"),
        (not adapts or point is not None, "sync.set_point is unset; sync.rule = adaptive needs the divergence to sync "
         "at, such as --sync.set_point 0.03 for tv_token"),
        (point is None or 0 < point < (float("inf") if sync.metric == "kl" else 1), f"sync.set_point is {point}; "
         f"{sync.metric} needs a value {'above 0' if sync.metric == 'kl' else 'between 0 and 1'}"),
        (1 <= sync.v_min <= sync.v_max, f"sync.v_min is {sync.v_min} and sync.v_max {sync.v_max}; use 1 or more, and "
         "no v_max below v_min"),
        (not adapts or config.diagnose.probe_prompts > 0, "sync.rule = adaptive measures on a probe: set "
         "diagnose.probe_prompts above 0"),
    ]  # fmt: skip


def _reward_rules(config: Config) -> list[tuple[bool, str]]:
    reward, share, limit = config.reward, config.task.held_out_share, config.sampling.max_tokens
    return [
        (share is None or 0 < share < 1, f"task.held_out_share is {share}; it must be between 0 and 1, both excluded"),
        (len(reward.weights) in (0, len(reward.functions)), f"reward.weights has {len(reward.weights)} numbers for "
         f"{len(reward.functions)} in reward.functions: give one for each"),
        (reward.timeout > 0, f"reward.timeout is {reward.timeout}; use seconds above 0"),
        (reward.truncated == "penalise" or reward.truncated_reward == RewardConfig.truncated_reward,
         'reward.truncated_reward acts with reward.truncated = "penalise" only: set that or remove it'),
        (reward.overlong_buffer <= limit, f"reward.overlong_buffer is {reward.overlong_buffer}, more than "
         f"sampling.max_tokens = {limit}"),
        (reward.overlong_buffer > 0 or reward.overlong_penalty == RewardConfig.overlong_penalty,
         "reward.overlong_penalty acts with reward.overlong_buffer above 0 only: set that or remove it"),
        (reward.overlong_penalty > 0, f"reward.overlong_penalty is {reward.overlong_penalty}; use a value "
         "above 0"),
    ]  # fmt: skip


def _store_rules(config: Config) -> list[tuple[bool, str]]:
    url, name = config.store.url, config.run.name
    return [
        (url is None or url.startswith(("postgresql://", "postgresql+psycopg://")), f"store.url is {url!r}; use "
         "postgresql+psycopg://USER@HOST/DATABASE, or remove it for a SQLite file in the run's folder"),
        (url is None or not re.search(r"//[^/@]*:[^/@]*@|[?&]password=", url), "store.url holds a password, which "
         "would stand in the run's config and reports: give it in the environment, PGPASSWORD, or in ~/.pgpass"),
        (url is None or name is None or len(name.encode()) <= 63, f"run.name has {len((name or '').encode())} bytes; "
         "as the name of a PostgreSQL schema it may have 63"),
    ]  # fmt: skip


def _draw_rules(config: Config) -> list[tuple[bool, str]]:
    draw, size, sync = config.draw, config.collect.group_size, config.sync
    shares = shares_of(draw)
    reached = config.collect.offset + sync.period - 1 if sync.rule == "every" else math.inf
    acts_with = [
        ("fresh", draw.policy == "replay", 'policy = "replay"'), ("shares", draw.policy == "mixed", 'policy = "mixed"'),
        ("mix", draw.policy == "mixed", 'policy = "mixed"'),
        ("order", draw.policy != "fresh", "policy other than fresh"),
        ("half_life", draw.order == "priority", 'order = "priority"'),
        ("max_uses", draw.policy != "fresh", "policy other than fresh"),
    ]  # fmt: skip
    return [
        *((acts or getattr(draw, name) == getattr(DrawConfig, name), f"draw.{name} acts with draw.{other} only: set "
           "that or remove it") for name, acts, other in acts_with),
        (0 <= draw.fresh < 1, f"draw.fresh is {draw.fresh}; it must be at least 0 and below 1 (policy fresh is 1)"),
        (0 < draw.half_life < math.inf, f"draw.half_life is {draw.half_life}; use a value above 0"),
        (draw.policy != "mixed" or len(draw.shares) > 0, 'draw.shares is empty: say what each origin contributes, such '
         'as ["self=0.5", "model:teacher=0.5"]'),
        (len(shares) == len(draw.shares) and all(o and 0 < share < math.inf for o, share in shares.items()),
         f"draw.shares is {list(draw.shares)}; each must be ORIGIN=NUMBER with a number above 0, no origin twice"),
        (draw.mix == "between" or len(shares) <= size, f"draw.shares names {len(shares)} origins, more than "
         f"collect.group_size = {size} members"),
        (draw.max_age is None or not writes(draw) or draw.max_age >= reached, f"draw.max_age is {draw.max_age}, but "
         f"what the run writes reaches age {reached} (collect.offset + sync.period - 1) before it is drawn, and would "
         "be passed over: raise it, or sync more often"),
        (draw.max_uses is None or draw.max_uses >= 1, f"draw.max_uses is {draw.max_uses}; it must be at least 1"),
        (draw.min_rewarded is None or min(2, size) <= draw.min_rewarded <= size, f"draw.min_rewarded is "
         f"{draw.min_rewarded}; it must be at least {min(2, size)} and at most collect.group_size = {size}"),
        (0 <= draw.min_spread < math.inf, f"draw.min_spread is {draw.min_spread}; it must be at least 0"),
    ]  # fmt: skip
