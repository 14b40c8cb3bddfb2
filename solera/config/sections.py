"""The sections of a run's config: one frozen dataclass each. Every default is stated here, once."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from solera.config.cluster import ClusterConfig
from solera.config.fields import Text, short
from solera.config.objective import ObjectiveConfig

DivergenceName = Literal["tv_token", "tv_sequence", "kl", "ess"]
OrderName = Literal["uniform", "newest", "priority"]
InFlight = Literal["drain", "keep", "abort"]
Transport = Literal["auto", "file", "ipc", "group", "store"]
EMBEDDED_MODELS = ("embedded", "embedded_agent")
"""The models that come with Solera (`model.path`)."""


@dataclass(frozen=True)
class RunConfig:
    """Settings of the whole run."""

    name: str | None = None
    """Name of the run's folder under `root`. Default: date, time, objective and seed."""
    root: str = "runs"
    """Folder that holds all runs."""
    steps: int = 200
    """Number of batches to train on."""
    seed: int = 0
    """Seed for the choice of problems and for all sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the learner and the engine. `auto` uses a GPU if there is one."""
    threads: int = 0
    """CPU threads. 0 uses one thread for models under five million parameters, where more threads would only wait for
    each other, and all cores for larger models."""
    gpu_memory: float | None = None
    """GPU memory that the run may use, in GiB. Unset uses all free memory. The number of responses generated at once
    and the number of tokens in one forward pass depend on it."""


@dataclass(frozen=True)
class ModelConfig:
    """The model to train."""

    path: Annotated[str, short("model", "path")] = "embedded"
    """A Hugging Face model folder or hub name. Two small models come with Solera: `embedded` adds numbers,
    `embedded_agent` calls a tool (docs/agents.md)."""
    compute: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of forward passes and of the engine's weights. On a CPU, `auto` means float32. On a GPU, `auto`
    means float16 if the model's activations on a few prompts stay below half of float16's maximum of 65,504, and
    otherwise bfloat16. float16 is closer to float32 and faster than bfloat16. The learner keeps its own weights in
    float32. With `learn.memory = "lean"`, everything is bfloat16."""
    compile: bool = True
    """On a GPU with a 16-bit format, fuse the small operations of each layer with torch.compile. This adds some seconds
    at the start."""


@dataclass(frozen=True)
class LoraConfig:
    """Train low-rank adapters instead of all weights: W + (alpha / rank)·B·A, where A and B are trained (needs the
    extra `lora`). Checkpoints and syncs then contain only the adapters. The reference policy is the model with the
    adapters disabled."""

    rank: int = 0
    """Rank of the adapters. 0 disables LoRA and trains all weights."""
    alpha: float = 16.0
    """The adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Layers that get an adapter, by name, such as q_proj. `all-linear` means every linear layer except the head."""
    export: Literal["merged", "adapter"] = "merged"
    """What the run writes to `model/`: a complete model with the adapters `merged` into it, or only the `adapter`."""


@dataclass(frozen=True)
class TaskConfig:
    """Where problems come from and how responses are graded."""

    name: Annotated[str, short("task", "name")] = "arithmetic"
    """The task. `arithmetic`: generated sums of two numbers, graded exactly, no download. `countdown`: reach a target
    from given numbers. `gym:NAME`: any task of reasoning-gym. `gsm8k`, `math`: word problems and competition
    mathematics. `jsonl`: problems from your own file. `mixture`: several of these. `file.py:Class` or
    `package.module:Class`: your own task (docs/tasks.md). `env:file.py:Class`: an environment,
    `textarena:NAME`: a game of TextArena for one player, `verifiers:NAME`: an environment of verifiers
    (docs/agents.md)."""
    level: int | None = None
    """Difficulty of generated problems. `arithmetic`: maximum number of digits, 1 to 4; default 2, which the embedded
    model was taught. `countdown`: how many numbers, 2 to 6; default 3. `gym:NAME`: level of its curriculum, 0 or more;
    unset uses the task's own defaults."""
    path: str | None = None
    """Problems, one JSON object per line: a file, a folder with train.jsonl and test.jsonl, or a hub name (OWNER/NAME
    or OWNER/NAME:SUBSET), which Solera downloads (`jsonl`, `gsm8k`, `math`). For `env:file.py:Class`: the rows that
    `reset` is given. For `verifiers:NAME`: a TOML file with the environment's settings (docs/agents.md)."""
    prompt: str | None = None
    """Column with the prompt, which is text or chat messages. Default: `prompt` (`jsonl`), `question` (`gsm8k`),
    `problem` (`math`)."""
    answer: str | None = None
    """Column with the expected answer, for graders. Default: `answer` (`jsonl`, `gsm8k`, `math`)."""
    template: Text | None = None
    """Text around each problem; `{prompt}` marks where the problem goes. If the model has a chat template, the result
    is sent as the user's message, otherwise as plain text. Default: the task's own template; `jsonl` shows the prompt
    unchanged."""
    held_out_path: str | None = None
    """Problems for evaluation, in the same form as `path`. Training never uses them (`jsonl`, `gsm8k`, `math`)."""
    held_out_share: float | None = None
    """Share of the prompts to keep for evaluation if there is neither `held_out_path` nor a `test` split. Default: 0.1
    (`jsonl`, `gsm8k`, `math`). `solera generate` accepts 0; training needs some held-out prompts."""
    parts: tuple[str, ...] = ()
    """Tasks of a `mixture`: NAME, NAME@LEVEL for a task with levels, NAME=PATH for a task that reads data."""
    weights: tuple[float, ...] = ()
    """Relative frequency of each part of a `mixture`. Empty means equal."""


@dataclass(frozen=True)
class RewardConfig:
    """How responses are rewarded. The reward is the weighted sum of the functions' values."""

    functions: tuple[str, ...] = ()
    """Reward functions: `exact`, `verbatim`, `number`, `math`, `countdown`, the format checks `boxed`, `marked` and
    `think_answer`, or your own as `package.module:function` or `file.py:function`. Empty uses the task's own grader,
    which is `exact` for `jsonl`."""
    weights: tuple[float, ...] = ()
    """Weight of each function. Empty means 1 each."""
    timeout: float = 60.0
    """Time limit for one call of your own function, in seconds."""
    errors: Literal["stop", "missing"] = "stop"
    """What to do if your own function fails, times out or does not return a number: `stop` the run, or treat its value
    as `missing`."""
    truncated: Literal["grade", "mask", "penalise"] = "grade"
    """What to do with responses cut off at `sampling.max_tokens`: `grade` them as they are, `mask` them (remove them
    from their group before the baseline is computed), or `penalise` them with `truncated_reward`, which replaces all
    other rewards."""
    truncated_reward: float = -1.0
    """Reward of a truncated response, with `truncated = "penalise"`."""
    overlong_buffer: int = 0
    """Length, in tokens, of the soft-penalty window before `sampling.max_tokens`. In this window the penalty grows
    linearly from 0 to `overlong_penalty` (DAPO's soft overlong punishment). 0 disables it."""
    overlong_penalty: float = 1.0
    """Penalty of a response of full length, with `overlong_buffer`."""


@dataclass(frozen=True)
class SamplingConfig:
    """How the responses for training are sampled."""

    temperature: float = 1.0
    """Sampling temperature. All log-probabilities of the run are computed at this temperature."""
    max_tokens: int = 16
    """Maximum length of a response, including the end token."""
    top_p: float = 1.0
    """Must be 1. With nucleus sampling some tokens can never be drawn, and importance weights cannot correct for
    that."""


@dataclass(frozen=True)
class CollectConfig:
    """How responses are generated for training."""

    prompts: int = 32
    """Prompts per batch. Each prompt gets one group of responses."""
    group_size: int = 8
    """Responses per prompt. They are compared with each other."""
    mode: Literal["lock_step", "stream"] = "lock_step"
    """`lock_step` generates a batch when training needs it. `stream` generates all the time: new prompts take the place
    of finished responses while training goes on (docs/engines.md)."""
    max_age: int | None = None
    """With `stream`: maximum age, in batches, that a response may have when it is first drawn. Prompts are started only
    if this bound will hold, so no response is dropped for its age. Unset means `2 * sync.period`, or with the adaptive
    rule `2 * sync.v_max`."""
    offset: int = 0
    """Number of batches that wait in the store before training uses them. This adds a constant delay to the one from
    `sync.period`."""
    refill_rounds: int = 3
    """With `objective.refill`: how many times a batch may draw more groups to replace masked ones."""
    errors: Literal["stop", "missing"] | float = "stop"
    """What to do if an episode fails, because the task raises an error or its rollout does not match what the engine
    generated. `stop` ends the run. `missing` continues without the episode and trains on the rest of its group. A
    number becomes the reward of what the episode had generated. The metric `episodes/failed` counts failures. If every
    episode of a batch fails, the run stops."""
    retries: int = 0
    """How many times to retry a failed episode, with new random numbers, before `errors` applies."""
    overlap: bool | None = None
    """Generate the next batch while training on the current one, unless a sync comes between them. The results are
    identical, only faster. Unset enables it if a CPU core is free."""
    deterministic: bool = False
    """Advance multi-turn episodes in rounds: the engine starts when every episode is waiting for it. The same seed then
    gives the same run, however long tools take. It is slower: each round waits for the slowest tool. Single-turn
    tasks do not need it."""


@dataclass(frozen=True)
class StoreConfig:
    """Where all rollouts, their rewards and their uses are stored."""

    url: str | None = None
    """URL of a PostgreSQL database, `postgresql+psycopg://USER@HOST/DATABASE` (needs the extra `postgres`). The run's
    tables go into a schema with the run's name. Do not put a password here: set PGPASSWORD or use ~/.pgpass. Unset uses
    the SQLite file `store.db` in the run's folder."""
    data: tuple[str, ...] = ()
    """Rollouts to import when the run starts: files with one JSON object per line (`solera data import --help`
    describes the fields), or folders of other runs or of `solera generate`, whose stores are read."""
    solutions: str | None = None
    """Column of the task's file with a written solution to each problem, such as `answer` for `gsm8k` or `solution` for
    `math`. The task `countdown` needs no file: `solution` stands for the expression that each problem was made from.
    When the run starts, Solera imports the solutions of the training problems as responses of origin `file:solutions`,
    and the task grades them. For `countdown`, Solera imports the solutions of the first `run.steps` × `collect.prompts`
    different training problems of the run's seed, at most 100,000. It never imports solutions of held-out problems."""
    skip_bad: str | None = None
    """Import the good lines of `data` and write the bad ones to this file. If unset, a bad line stops the run before it
    starts."""


@dataclass(frozen=True)
class DrawConfig:
    """Which rollouts of the store make up a batch. Groups are formed when they are drawn, from rollouts to the same
    prompt."""

    policy: Literal["fresh", "replay", "mixed", "offline"] = "fresh"
    """`fresh`: rollouts that were never used, first in, first out. `replay`: a share of the batch is fresh, the rest
    was used before. `mixed`: fixed shares per origin (`shares`). `offline`: everything in the store; the run generates
    nothing."""
    fresh: float = 0.5
    """Share of new groups in a batch (`replay`). If too few groups can be replayed, new ones fill the batch."""
    order: OrderName = "uniform"
    """Order in which stored groups are drawn, except those that the run has just generated: at random (`uniform`),
    `newest` first, or highest `priority` first. The priority is 2^(−age/half_life) / (1 + uses)."""
    half_life: float = 8.0
    """Age, in batches, at which a group's priority is halved (`order = "priority"`)."""
    shares: tuple[str, ...] = ()
    """Relative share of each origin (`mixed`): `self=0.5 model:teacher=0.5` is the same as `self=1 model:teacher=1`.
    Rollouts of `self` must be unused; those of other origins may be reused. `model:*` means all other models."""
    mix: Literal["between", "within"] = "between"
    """What the shares count: groups, each of one origin (`between`), or the members of every group (`within`)."""
    max_age: int | None = None
    """Maximum age of a rollout, in batches. Text without an age has no limit."""
    max_uses: int | None = None
    """How many times a rollout may be used for training. Unset means no limit besides the policy's own."""
    min_rewarded: int | None = None
    """Minimum number of rewarded members that make a group. Default: `collect.group_size`."""
    min_spread: float = 0.0
    """Minimum difference between the highest and the lowest reward of a group."""
    leftovers: Literal["drop", "keep"] = "drop"
    """What to do with leftovers: rollouts that the run generated but could not draw with their batch, because rewards
    of their group were missing. `drop` never trains on them, so `sync.period = 1` stays on-policy. `keep` draws their
    group once its rewards have arrived, at any age up to `max_age`. A group never combines rollouts from two visits
    to a prompt. The metric `draw/leftover` counts leftovers."""


def shares_of(draw: DrawConfig) -> dict[str, float]:
    """`shares` as a dict from origin to number; NaN if the text after `=` is not a number.

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


def staleness_of(config: "Config") -> float:
    """Maximum age of the run's own responses when they are first drawn; infinity if there is no bound.

    >>> streaming = CollectConfig(mode="stream")
    >>> staleness_of(Config()), staleness_of(Config(collect=streaming))
    (9, 20)
    >>> staleness_of(Config(sync=SyncConfig(rule="adaptive", v_max=8), collect=streaming))
    16
    """
    sync, collect = config.sync, config.collect
    if sync.rule == "never":
        return math.inf
    longest = sync.v_max if sync.rule == "adaptive" else sync.period
    if collect.mode == "stream":
        return 2 * longest if collect.max_age is None else collect.max_age
    return collect.offset + longest - 1


def writes(draw: DrawConfig) -> bool:
    """Whether a run generates responses. If not, it needs no engine.

    >>> writes(DrawConfig()), writes(DrawConfig("offline")), writes(DrawConfig("mixed", shares=("human=1",)))
    (True, False, False)
    """
    return draw.policy in ("fresh", "replay") or "self" in shares_of(draw)


@dataclass(frozen=True)
class LearnConfig:
    """The optimiser, and how a batch is split."""

    lr: float | None = None
    """Peak learning rate of AdamW. Default: 3e-4 for the embedded models, 1e-6 for any other model (also for one
    that a run has trained), 1e-5 for LoRA adapters of another model (`lora.rank`)."""
    warmup: int = 10
    """Batches over which the learning rate rises from zero."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up. `linear` and `cosine` reach zero just after the last batch."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    grad_clip: float = 1.0
    """Maximum norm of the gradient. Larger gradients are scaled down."""
    passes: int = 1
    """Passes over each batch (i in the papers)."""
    minibatches: int = 1
    """Optimiser steps per pass. Each step uses its share of the batch's groups."""
    micro_batch_tokens: int | None = None
    """Maximum number of tokens, including padding, in one forward and backward pass. Default on a GPU: what fits into
    two thirds of the free memory, at most 32,768; on a CPU: 16,384. If memory runs out anyway, activations are
    recomputed, and then the number is halved. It changes memory and speed, not the gradient."""
    pack_tokens: int = 128
    """Responses up to this length share a row with others to the same prompt, so that the prompt is computed once. 0
    disables it."""
    logit_chunk: int = 4096
    """Maximum number of tokens whose logits are in memory at the same time."""
    gradient_checkpointing: bool = False
    """Always recompute activations in the backward pass. This saves memory and takes a third more time. Without it,
    this happens only if the activations of a batch would not fit into a GPU's memory."""
    graphs: bool = False
    """Record the passes of an update as CUDA graphs and replay them. With a small model on a GPU, an update takes about
    half the time. A run that is resumed may differ in its last bits from one that was not stopped."""
    memory: Literal["full", "lean"] = "full"
    """`full` keeps weights, gradients and AdamW's moments in float32, and on a GPU a 16-bit copy of the weights. `lean`
    keeps weights and gradients in bfloat16 and the moments in 8 bits: 6 bytes per weight instead of 20, or 16 on a CPU.
    Weights and moments are rounded stochastically, from the run's seed. Use it for models that do not fit otherwise
    (docs/engines.md)."""


@dataclass(frozen=True)
class EngineConfig:
    """The engine that generates responses: inside this process, or a vLLM server (docs/engines.md)."""

    name: Annotated[Literal["in_process", "vllm"], short("engine", "name")] = "in_process"
    """`in_process` generates inside the training process. `vllm` uses vLLM servers; set `urls`, `launch`
    or `cluster.engines` as well."""
    max_rows: int = 1024
    """Maximum number of responses decoded at the same time. Other responses wait for a free place."""
    urls: tuple[str, ...] = ()
    """For `vllm`: the addresses of running servers, such as http://127.0.0.1:8000. An API key is read from the
    environment variable VLLM_API_KEY."""
    launch: int = 0
    """For `vllm`: number of servers to start on this machine. Solera stops them when it ends."""
    args: tuple[str, ...] = ()
    """With `launch` or `cluster.engines`: more arguments of `vllm serve`, such as --max-num-seqs=64. On the command
    line, write them as --engine.args=--max-num-seqs=64."""
    gpu_memory: float | None = None
    """With `launch` or `cluster.engines`: share of the GPU's memory that each server may use, between 0 and 1. Default:
    0.4 divided by `launch`, or 0.4 with `cluster.engines`, because the learner needs the rest."""
    timeout: float = 600.0
    """For `vllm` and `cluster.engines`: seconds to wait for an answer before another engine is asked. If no engine
    answers for this long, the run stops."""


@dataclass(frozen=True)
class SyncConfig:
    """When the engine receives the learner's weights (a sync)."""

    rule: Literal["every", "never", "adaptive"] = "every"
    """`every`: once every `period` batches. `never`: the engine keeps its first weights. `adaptive`: when `metric`
    reaches `set_point`. The metric is measured after every batch on a probe of `diagnose.probe_prompts` prompts."""
    period: int = 10
    """Batches between two syncs (v in the papers). 1 is on-policy."""
    metric: DivergenceName = "tv_token"
    """For `adaptive`: the divergence between the learner's policy and the engine's (docs/metrics.md, `probe/…`)."""
    set_point: float | None = None
    """For `adaptive`: the target value of `metric`. A sync happens when `metric` is closer to it now than it is
    expected to be one batch later."""
    v_min: int = 1
    """For `adaptive`: minimum number of batches between two syncs."""
    v_max: int = 50
    """For `adaptive`: maximum number of batches between two syncs."""
    transport: Transport = "auto"
    """How weights reach a vLLM server, or the engines of `cluster.engines`. `group`: from process to process, by NCCL
    between GPUs and by gloo between CPUs. `file` (servers only): through a file that both can read, in shared memory if
    Solera started the server. `ipc` (servers only): the server reads the learner's GPU memory, on the same GPU. `store`
    (engines only): through Ray's object store. For a server, `auto` means `ipc` if Solera starts it on a GPU, otherwise
    `file`. For an engine, `auto` uses CUDA handles on the learner's GPU, `group` between different GPUs, and otherwise
    `store`."""
    on_fault: Literal["stop", "retry"] = "stop"
    """What to do if the engine does not hold the weights that were sent: `stop` the run, or `retry` once and then
    stop."""
    in_flight: InFlight = "keep"
    """With `collect.mode = "stream"`: what happens at a sync to responses that are being written. `drain` finishes them
    with the old weights first. `keep` continues them with the new weights and computes their key-value cache again.
    `abort` does the same as `keep`, except with a vLLM server: it interrupts them and sends them again with what they
    have so far. The store records which version wrote each token."""


@dataclass(frozen=True)
class DiagnoseConfig:
    """Estimate whether an update helped. The estimate uses a probe: responses to held-out problems that are never used
    for training."""

    probe_prompts: int = 64
    """Held-out prompts of a probe, each with one group of responses. Confidence intervals count prompts. 0 disables
    probes."""
    probe_group: int = 4
    """Responses per prompt of the probe, 2 or more."""
    every: int = 80
    """Judge one batch out of this many. The seed chooses which one, so that data of every age is judged. 0 disables it.
    With `sync.rule = "adaptive"` every batch is judged."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Accuracy of the learner's current weights on held-out problems."""

    every: int = 20
    """Batches between two evaluations. The first and the last weights are always evaluated; 0 evaluates only those."""
    problems: int = 500
    """Number of held-out problems. Every evaluation uses the same ones."""
    temperature: float = 0.0
    """Sampling temperature. 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling: share of the probability to sample from."""
    samples: int = 1
    """Attempts per problem. More than one needs a temperature above 0."""
    threshold: float | None = None
    """An attempt passes if its reward is at least this. Default: 0.5, or 0.99 if a task is gym:NAME, which may score
    wrong answers above 0.5."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints, from which `solera train --resume FOLDER` continues a run."""

    every: int = 50
    """Batches between two checkpoints. Another one is written after the last batch. With 0, the run writes a checkpoint
    only when it is interrupted."""
    keep: int = 2
    """How many of the latest checkpoints to keep, in addition to the one with the best accuracy."""


@dataclass(frozen=True)
class ReportConfig:
    """Where metrics go in addition to `metrics.jsonl`."""

    tensorboard: bool = True
    """Write TensorBoard events to the run's folder."""
    wandb: str | None = None
    """Weights & Biases project to log to (needs the extra `wandb`)."""
    progress: bool = True
    """Show a progress bar. If the output is not a terminal, print a line at every evaluation instead."""
    page: bool = True
    """At the end of the run, draw `plot.png` and write the page `report.html`. Without them, a run ends half a second
    earlier. `solera report` writes the page at any time."""


@dataclass(frozen=True)
class Config:
    """The complete config of a run."""

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
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
