"""The rooms of a run, one frozen dataclass each, every default stated once."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from solera.config.fields import Text, short
from solera.config.objective import ObjectiveConfig

DivergenceName = Literal["tv_token", "tv_sequence", "kl", "ess"]
OrderName = Literal["uniform", "newest", "priority"]


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
    gpu_memory: float | None = None
    """Most memory of a GPU that the run takes, in GiB; unset: what is free. How many responses are written at once and
    how many tokens are learned from at once follow from it."""


@dataclass(frozen=True)
class ModelConfig:
    """The model to train."""

    path: Annotated[str, short("model", "path")] = "embedded"
    """A Hugging Face folder, or a hub name; `embedded` is the small model inside the package."""
    compute: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Arithmetic of forward passes and of the engine's weights; `auto` is float32 on a CPU; on a GPU float16, which is
    closer to float32 and faster, where the model's numbers on a few prompts stay below half of its end at 65,504, else
    bfloat16. The learner's own weights are float32 always."""
    compile: bool = True
    """On a GPU in 16 bits, fuse the small operations of every layer (torch.compile): some seconds at the start."""


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

    name: Annotated[str, short("task", "name")] = "arithmetic"
    """`arithmetic`: sums of two numbers, generated, graded exactly, nothing to download. `countdown`: a target made
    from given numbers. `gym:NAME`: any task of reasoning-gym. `gsm8k`, `math`: word problems and competition
    mathematics. `jsonl`: your own file. `mixture`: several of these. `file.py:Class` or `package.module:Class`: a task
    of your own (docs/tasks.md)."""
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
    (`jsonl`, `gsm8k`, `math`). 0 keeps none: `solera generate` takes it, training needs some."""
    parts: tuple[str, ...] = ()
    """Tasks of a `mixture`: NAME, NAME@LEVEL for one that has levels, NAME=PATH for one that reads data."""
    weights: tuple[float, ...] = ()
    """How often each part of a `mixture` has its turn; empty: equally often."""


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
    errors: Literal["stop", "missing"] | float = "stop"
    """When an episode fails, because the task raises an error or its rollout is not what the engine wrote: `stop` the
    run; go on without it (`missing`): the rest of its group is learned from; or a number: its reward, for what it had
    written. Failures are counted in `episodes/failed`. When all episodes of a batch fail, the run stops."""
    retries: int = 0
    """How often an episode that fails is tried again, with other random numbers, before `errors` applies."""
    overlap: bool | None = None
    """Write the next batch while the present one is learned from, where no sync comes between them: the same run,
    sooner. Unset: where a CPU core is left for it."""
    deterministic: bool = False
    """Advance episodes of several turns in rounds: the engine starts once every episode waits for it, so that the same
    seed gives the same run however long tools take. Slower: each round waits for the slowest tool. Episodes of one turn
    need no rounds."""


@dataclass(frozen=True)
class StoreConfig:
    """Where every rollout, its rewards and its uses are kept."""

    url: str | None = None
    """A PostgreSQL database, `postgresql+psycopg://USER@HOST/DATABASE`: the run's tables lie there in a schema of its
    name (needs the extra `postgres`). A password does not belong here: set PGPASSWORD, or write ~/.pgpass. Unset: the
    SQLite file `store.db` in the run's folder."""
    data: tuple[str, ...] = ()
    """Rollouts that are imported when the run begins: files, one JSON object a line (`solera data import --help` says
    what a line holds), or folders of other runs and of `solera generate`, whose stores are read."""
    skip_bad: str | None = None
    """Take the good lines of `data` and write the bad ones to this file. Unset: a bad line stops the run before it
    begins."""


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
    """What each origin contributes (`mixed`), in proportion: `self=0.5 model:teacher=0.5` is `self=1 model:teacher=1`.
    Of `self` what was never used is taken, of others anything; `model:*` is every other model."""
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
    leftovers: Literal["drop", "keep"] = "drop"
    """What happens to rollouts that the run generated but could not draw with their batch, because rewards of their
    group were missing. `drop`: they are not learned from, so `sync.period = 1` stays on-policy. `keep`: their group is
    drawn once its rewards have come, however old it is then; `max_age` sets a limit. A group never holds rollouts of
    two visits of a prompt. `draw/leftover` counts them."""


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
class LearnConfig:
    """The optimiser, and how a batch is cut."""

    lr: float | None = None
    """Peak learning rate of AdamW. Unset: 3e-4 for the embedded model, 1e-6 for any other, and 1e-5 for its adapters
    (`lora.rank`)."""
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
    """Most tokens, padding included, in one forward and backward; unset: what two thirds of a GPU's free memory
    hold, at most 32,768, and 16,384 on a CPU; half of it where memory ends all the same. Changes memory and speed,
    not the gradient."""
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
    """`adaptive` syncs when `metric` is nearer to this now than it is expected to be one batch later."""
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
    threshold: float | None = None
    """An attempt passes where its reward is at least this. Unset: 0.5, and 0.99 where a task is gym:NAME, whose scores
    for wrong answers may lie above a half."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What a resumed run goes on from (`solera train --resume FOLDER`)."""

    every: int = 50
    """Batches between two checkpoints; one more is written after the last batch. 0: only when interrupted."""
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
