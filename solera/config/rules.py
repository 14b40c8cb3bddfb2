"""Values and combinations that cannot work. Each is refused with one line that says what to change."""

import math
import re

from solera.config.fields import LARGEST_REWARD, check_types, hints_of, shown
from solera.config.secrets import (
    NO_PASSWORD,
    NO_URL,
    SECRET_OPTIONS,
    has_option,
    holds_password,
    is_database_url,
    is_server_url,
)
from solera.config.sections import (
    EMBEDDED_MODELS,
    CollectConfig,
    Config,
    DrawConfig,
    EngineConfig,
    LoraConfig,
    RewardConfig,
    SyncConfig,
    shares_of,
    staleness_of,
    writes,
)
from solera.config.shares import new_per_batch
from solera.errors import SoleraError

MOST_THREADS = 1024
MOST_RESPONSES = 1_000_000
"""Of a batch. More would not fit into memory."""
COLDEST = 1e-3
"""Lowest temperature. Logits divided by a much smaller one are infinite."""
WITH_ROWS = ("gsm8k", "math", "jsonl")
"""Tasks whose problems are rows of a file, which may have a column with solutions."""
SOLUTION = "solution"
"""The solution of a problem that `countdown` generates, as if it were a column."""
LONGEST_NAME = 200
"""Maximum length in bytes. File systems allow 255, and the name of an unfinished folder is longer than its final
name."""

SAFE = (
    "run.steps", "run.device", "run.threads", "run.gpu_memory", "model.compute", "model.compile", "collect.overlap",
    "reward.timeout", "reward.errors", "learn.micro_batch_tokens", "learn.pack_tokens", "learn.logit_chunk",
    "learn.gradient_checkpointing", "learn.graphs", "engine.max_rows", "engine.urls", "engine.launch", "engine.args",
    "engine.gpu_memory", "engine.timeout", "sync.in_flight", "sync.transport", "sync.on_fault", "evaluate.every",
    "evaluate.temperature", "evaluate.top_p", "evaluate.samples", "evaluate.threshold", "checkpoint.every",
    "checkpoint.keep", "report.tensorboard", "report.wandb", "report.progress", "report.page",
    "cluster.learners", "cluster.engines", "cluster.runtime", "cluster.address", "cluster.timeout", "cluster.restarts",
    "cluster.gpus_per_learner", "cluster.gpus_per_engine",
)  # fmt: skip
"""Settings that a resumed run may change: its length, where and how fast it computes, what it measures and keeps. Any
other change would make it a different run."""


def check(config: Config) -> None:
    """Refuse values that cannot work, each with one line that says what to change."""
    if not isinstance(config, Config):
        raise SoleraError(f"the config must be a solera.Config, not {config!r} (solera.load reads a TOML file)")
    for name, section in hints_of(Config).items():
        check_types(getattr(config, name), name, section)
    for holds, complaint in _rules(config):
        if not holds:
            raise SoleraError(complaint)
    _refuse_batches_without_new_groups(config)
    if config.run.device == "cpu":
        refuse_without_gpu(config)


def default_lr(config: Config) -> float:
    """The learning rate if none is set. The embedded models are tiny and need a rate that would ruin a pretrained
    model. For pretrained models it is the usual rate for GRPO, and ten times that for LoRA, which has few parameters.

    >>> from solera.config import ModelConfig
    >>> default_lr(Config()), default_lr(Config(model=ModelConfig("owner/name")))
    (0.0003, 1e-06)
    """
    if config.model.path in EMBEDDED_MODELS:
        return 3e-4
    return 1e-5 if config.lora.rank else 1e-6


def refuse_without_gpu(config: Config) -> None:
    """Refuse settings that cannot work on a CPU, whether it was chosen or is the only device."""
    if config.run.gpu_memory is not None:
        raise SoleraError("run.gpu_memory is set, but this run is on a CPU: remove it")
    if config.model.compute == "float16":
        raise SoleraError("model.compute is float16, which needs a GPU: use float32 or auto")
    if config.engine.gpu_memory is not None:
        raise SoleraError("engine.gpu_memory is set, but this run is on a CPU: remove it")
    if config.sync.transport == "ipc":
        raise SoleraError("sync.transport is ipc, which needs a GPU: use file or auto")


def _refuse_batches_without_new_groups(config: Config) -> None:
    """A stream generates for the new groups of the batches, so without any the run would stay with its first batch."""
    groups = config.collect.prompts
    if config.collect.mode == "stream" and new_per_batch(config.draw, groups) == 0:
        share = "draw.fresh" if config.draw.policy == "replay" else "the share of self in draw.shares"
        raise SoleraError(
            f"{share} is too low: of {groups} groups in a batch none is new, but collect.mode = stream needs new ones "
            "in each: raise it, or collect.prompts"
        )


def _minimums(c: Config) -> list[tuple[bool, str]]:
    at_least = [
        ("run.steps", c.run.steps, 1), ("run.threads", c.run.threads, 0), ("run.seed", c.run.seed, 0),
        ("sampling.max_tokens", c.sampling.max_tokens, 1), ("collect.prompts", c.collect.prompts, 1),
        ("collect.offset", c.collect.offset, 0), ("collect.refill_rounds", c.collect.refill_rounds, 0),
        ("collect.retries", c.collect.retries, 0),
        ("learn.lr", c.learn.lr, 0), ("learn.warmup", c.learn.warmup, 0), ("learn.passes", c.learn.passes, 1),
        ("learn.weight_decay", c.learn.weight_decay, 0), ("learn.minibatches", c.learn.minibatches, 1),
        ("learn.micro_batch_tokens", c.learn.micro_batch_tokens, 1), ("learn.pack_tokens", c.learn.pack_tokens, 0),
        ("learn.logit_chunk", c.learn.logit_chunk, 1), ("engine.max_rows", c.engine.max_rows, 1),
        ("engine.launch", c.engine.launch, 0),
        ("sync.period", c.sync.period, 1), ("evaluate.every", c.evaluate.every, 0),
        ("diagnose.probe_prompts", c.diagnose.probe_prompts, 0), ("diagnose.every", c.diagnose.every, 0),
        ("diagnose.probe_group", c.diagnose.probe_group, 2),
        ("evaluate.problems", c.evaluate.problems, 1),
        ("evaluate.samples", c.evaluate.samples, 1),
        ("checkpoint.every", c.checkpoint.every, 0), ("checkpoint.keep", c.checkpoint.keep, 1),
        ("reward.overlong_buffer", c.reward.overlong_buffer, 0), ("lora.rank", c.lora.rank, 0),
        ("cluster.learners", c.cluster.learners, 0), ("cluster.engines", c.cluster.engines, 0),
        ("cluster.restarts", c.cluster.restarts, 0),
    ]  # fmt: skip
    return [
        (value is None or value >= least, f"{name} is {value}; it must be at least {least}")
        for name, value, least in at_least
    ]


def _rules(c: Config) -> list[tuple[bool, str]]:
    return [
        *_minimums(c),
        (c.sampling.top_p == 1.0,
         f"sampling.top_p is {c.sampling.top_p}, but training needs the whole distribution: remove it "
         "(evaluate.top_p may be below 1)"),
        (c.sampling.temperature >= COLDEST,
         f"sampling.temperature is {c.sampling.temperature}; training needs sampling: use at least {COLDEST}"),
        (c.collect.group_size >= (1 if c.objective.name == "sft" else 2),
         f"collect.group_size is {c.collect.group_size}; a single response cannot be compared with others: "
         "use 2 or more"),
        (c.collect.prompts * c.collect.group_size <= MOST_RESPONSES,
         f"collect.prompts is {c.collect.prompts} and collect.group_size {c.collect.group_size}; a batch has at most "
         f"{MOST_RESPONSES:,} responses"),
        (isinstance(c.collect.errors, str) or abs(c.collect.errors) <= LARGEST_REWARD,
         f"collect.errors is {c.collect.errors}; as a reward it must be between -{LARGEST_REWARD:g} and "
         f"{LARGEST_REWARD:g}"),
        (c.learn.minibatches <= c.collect.prompts, f"learn.minibatches is {c.learn.minibatches}, but a batch has only "
         f"{c.collect.prompts} groups and groups are never split: use at most that many"),
        (c.run.gpu_memory is None or c.run.gpu_memory > 0, f"run.gpu_memory is {c.run.gpu_memory}; it must be above 0"),
        (c.learn.grad_clip > 0, f"learn.grad_clip is {c.learn.grad_clip}; use a value above 0"),
        (all(0 <= b < 1 for b in c.learn.betas), f"learn.betas is {c.learn.betas}; both must be in [0, 1)"),
        *_sync_rules(c),
        *_stream_rules(c),
        *_engine_rules(c),
        (c.evaluate.top_p == 1 or c.evaluate.temperature > 0, "evaluate.top_p has no effect on greedy evaluation: set "
         "evaluate.temperature above 0 or remove it"),
        (c.evaluate.temperature == 0 or c.evaluate.temperature >= COLDEST,
         f"evaluate.temperature is {c.evaluate.temperature}; use 0 (greedy) or at least {COLDEST}"),
        (c.evaluate.samples == 1 or c.evaluate.temperature > 0,
         f"evaluate.samples is {c.evaluate.samples}, but greedy attempts at a problem are identical: set "
         "evaluate.temperature above 0, or use one sample"),
        (0 < c.evaluate.top_p <= 1, f"evaluate.top_p is {c.evaluate.top_p}; it must be in (0, 1]"),
        *_reward_rules(c),
        (c.lora.rank > 0 or c.lora == LoraConfig(),
         "lora.alpha, targets and export have no effect without lora.rank above 0: set that or remove them"),
        (c.lora.alpha > 0, f"lora.alpha is {c.lora.alpha}; use a value above 0"),
        (len(c.lora.targets) > 0, "lora.targets is empty: name layers, or use all-linear"),
        *_store_rules(c),
        *_cluster_rules(c),
        *_lean_rules(c),
        *_draw_rules(c),
        (c.run.threads <= MOST_THREADS, f"run.threads is {c.run.threads}; use at most {MOST_THREADS}, or 0"),
        (not c.learn.graphs or (c.model.compile and c.cluster.learners == 0),
         "learn.graphs needs model.compile and a learner in this process: remove it, or "
         + ("cluster.learners" if c.cluster.learners else "set model.compile")),
        (c.learn.lr is None or c.learn.lr < 1, f"learn.lr is {c.learn.lr}; it must be below 1, or AdamW diverges"),
        (c.run.name is None or may_name(c.run.name),
         f"run.name is {shown(c.run.name)}; use letters, digits and . _ + = - only, at most {LONGEST_NAME} "
         "bytes (run.root is the folder above it)"),
    ]  # fmt: skip


def may_name(folder: str) -> bool:
    """Whether a run's folder may have this name."""
    return (
        re.fullmatch(r"[\w.+=-]+", folder) is not None
        and folder not in (".", "..")
        and len(folder.encode()) <= LONGEST_NAME
    )


def _sync_rules(config: Config) -> list[tuple[bool, str]]:
    sync, point, adapts = config.sync, config.sync.set_point, config.sync.rule == "adaptive"
    unused = [n for n in ("metric", "set_point", "v_min", "v_max") if getattr(sync, n) != getattr(SyncConfig, n)]
    return [
        (sync.rule == "every" or sync.period == SyncConfig.period,
         f"sync.period has no effect with sync.rule = {sync.rule}: remove one of them"),
        (adapts or not unused,
         f"sync.{'/'.join(unused)} has no effect without sync.rule = adaptive: set that or remove it"),
        (not adapts or point is not None,
         "sync.set_point is unset; sync.rule = adaptive needs a target divergence, such as --sync.set_point "
         "0.03 for tv_token"),
        (point is None or 0 < point < (float("inf") if sync.metric == "kl" else 1), f"sync.set_point is {point}; "
         f"{sync.metric} needs a value {'above 0' if sync.metric == 'kl' else 'between 0 and 1'}"),
        (1 <= sync.v_min <= sync.v_max,
         f"sync.v_min is {sync.v_min} and sync.v_max {sync.v_max}; use 1 or more, and v_max not below v_min"),
        (not adapts or config.diagnose.probe_prompts > 0,
         "sync.rule = adaptive needs a probe: set diagnose.probe_prompts above 0"),
    ]  # fmt: skip


def _stream_rules(config: Config) -> list[tuple[bool, str]]:
    collect, sync, draw = config.collect, config.sync, config.draw
    if collect.mode == "lock_step":
        return [
            (collect.max_age is None, 'collect.max_age has no effect without collect.mode = "stream": set that, or use '
             "draw.max_age to limit replay"),
            (sync.in_flight == SyncConfig.in_flight, 'sync.in_flight has no effect without collect.mode = "stream": '
             "nothing is being written when lock_step syncs"),
        ]  # fmt: skip
    unused = [n for n in ("offset", "overlap", "deterministic") if getattr(collect, n) != getattr(CollectConfig, n)]
    age = collect.max_age
    return [
        (not unused, f"collect.{'/'.join(unused)} cannot be combined with collect.mode = stream: remove one of them"),
        (writes(draw), f"draw.policy = {draw.policy} generates nothing: remove collect.mode = stream"),
        (draw.leftovers == "drop", "draw.leftovers = keep would delay other groups beyond collect.max_age: use "
         "collect.mode = lock_step, or drop them"),
        (draw.policy != "replay" or draw.fresh > 0, "draw.fresh is 0, but collect.mode = stream needs new groups in "
         "every batch: raise it"),
        (draw.policy != "fresh" or not (config.store.data or config.store.solutions),
         "store.data or store.solutions has rollouts, but with collect.mode = stream "
         'draw.policy = fresh trains only on what the run generates: set draw.policy = "mixed" with draw.shares'),
        (age is None or age >= 0, f"collect.max_age is {age}; it must be at least 0"),
        (age is None or sync.rule != "never",
         f"collect.max_age is {age}, but with sync.rule = never responses get older without limit: remove one of them"),
        (age is None or sync.rule != "every" or age >= sync.period - 1, f"collect.max_age is {age}, but the engine's "
         f"weights are up to {sync.period - 1} batches old (sync.period - 1): raise it, or sync more often"),
        (age is None or sync.rule != "adaptive" or age >= sync.v_min - 1, f"collect.max_age is {age}, but the engine's "
         f"weights are up to {sync.v_min - 1} batches old (sync.v_min - 1): raise it, or lower sync.v_min"),
    ]  # fmt: skip


def _engine_rules(config: Config) -> list[tuple[bool, str]]:
    engine, served = config.engine, config.engine.name == "vllm"
    settings = ("urls", "launch", "args", "gpu_memory", *(() if config.cluster.engines else ("timeout",)))
    unused = [n for n in settings if getattr(engine, n) != getattr(EngineConfig, n)]
    started = engine.launch > 0 or config.cluster.engines > 0
    return [
        (served or not unused,
         f"engine.{'/'.join(unused)} has no effect without engine.name = vllm: set that (--engine vllm) or remove it"),
        *_transport_rules(config),
        (not served or bool(config.cluster.engines) or bool(engine.urls) != bool(engine.launch),
         "engine.name = vllm needs either engine.urls (running servers) or engine.launch (servers to start): "
         f"{'both are set' if engine.urls and engine.launch else 'none is set, such as --engine.launch 1'}"),
        (len(set(engine.urls)) == len(engine.urls), "engine.urls: a server is named twice: remove one"),
        (engine.timeout > 0, f"engine.timeout is {engine.timeout:g}; use a number of seconds above 0"),
        (all(is_server_url(url) for url in engine.urls),
         "engine.urls: each must be the address of a server, such as http://127.0.0.1:8000, without a path, user or "
         "password (an API key belongs into the environment variable VLLM_API_KEY)"),
        (started or not engine.args, "engine.args has no effect without engine.launch: remove it"),
        *((not has_option(engine.args, start), f"engine.args holds {secret}, which would be written to the run's "
           f"config: set the environment variable {variable} instead")
          for start, secret, variable in SECRET_OPTIONS),
        (engine.gpu_memory is None or (started and 0 < engine.gpu_memory < 1),
         f"engine.gpu_memory is {engine.gpu_memory}; it needs engine.launch and a share between 0 and 1"),
    ]  # fmt: skip


def _transport_rules(config: Config) -> list[tuple[bool, str]]:
    """How weights may travel to each kind of engine."""
    chosen, served, actors = config.sync.transport, config.engine.name == "vllm", config.cluster.engines > 0
    return [
        (served or actors or chosen == SyncConfig.transport,
         f"sync.transport is {chosen}, but the engine is in this process: set engine.name = vllm or cluster.engines, "
         "or remove it"),
        (not (served and actors) or chosen in ("auto", "file"),
         f"sync.transport is {chosen}, but servers in Ray actors get their weights in files: use auto"),
        (not served or actors or chosen != "store",
         "sync.transport is store, but weights reach a vLLM server without Ray: use file or auto"),
        (served or not actors or chosen in ("auto", "store", "group"),
         f"sync.transport is {chosen}, but engines in Ray actors are no vLLM servers: use store, group or auto"),
    ]  # fmt: skip


def _cluster_rules(config: Config) -> list[tuple[bool, str]]:
    cluster = config.cluster  # learners = 0 switches it off, and the other settings may stay
    return [
        (cluster.learners == 0 or config.model.compute != "float16",
         "model.compute is float16, in which ranks cannot compute: use bfloat16, or remove cluster.learners"),
        *((0 < share <= 1 or share == int(share) > 0,
           f"cluster.{name} is {share:g}; use a fraction of a GPU, such as 0.5, or a number of GPUs")
          for name, share in (("gpus_per_learner", cluster.gpus_per_learner),
                              ("gpus_per_engine", cluster.gpus_per_engine))),
        (cluster.engines == 0 or not (config.engine.urls or config.engine.launch),
         "cluster.engines starts a vLLM server in each Ray actor: remove engine.urls and engine.launch, or "
         "cluster.engines"),
        (cluster.address is None or cluster.runtime == "ray" or cluster.engines > 0,
         "cluster.address has no effect with cluster.runtime = processes: remove one of them"),
        (cluster.timeout > 0, f"cluster.timeout is {cluster.timeout:g}; use a number of seconds above 0"),
    ]  # fmt: skip


def _lean_rules(config: Config) -> list[tuple[bool, str]]:
    if config.learn.memory == "full":
        return []
    return [
        (config.model.compute in ("auto", "bfloat16"), f"model.compute is {config.model.compute}, but learn.memory = "
         "lean keeps all weights in bfloat16: use auto or bfloat16, or learn.memory = full"),
        (config.cluster.learners == 0, "cluster.learners: ranks keep their weights in float32: remove it, or use "
         "learn.memory = full"),
        (config.objective.ref_ema is None, "objective.ref_ema moves the reference by less than bfloat16 can show: use "
         "objective.ref_period, or learn.memory = full"),
    ]  # fmt: skip


def _reward_rules(config: Config) -> list[tuple[bool, str]]:
    reward, share, limit = config.reward, config.task.held_out_share, config.sampling.max_tokens
    return [
        (share is None or 0 <= share < 1, f"task.held_out_share is {share}; it must be at least 0 and below 1"),
        (len(reward.weights) in (0, len(reward.functions)), f"reward.weights has {len(reward.weights)} numbers for "
         f"{len(reward.functions)} in reward.functions: give one for each"),
        (reward.timeout > 0, f"reward.timeout is {reward.timeout}; use a number of seconds above 0"),
        (reward.truncated == "penalise" or reward.truncated_reward == RewardConfig.truncated_reward,
         'reward.truncated_reward has no effect without reward.truncated = "penalise": set that or remove it'),
        (reward.overlong_buffer <= limit, f"reward.overlong_buffer is {reward.overlong_buffer}, more than "
         f"sampling.max_tokens = {limit}"),
        (reward.overlong_buffer > 0 or reward.overlong_penalty == RewardConfig.overlong_penalty,
         "reward.overlong_penalty has no effect without reward.overlong_buffer above 0: set that or remove it"),
        (reward.overlong_penalty > 0, f"reward.overlong_penalty is {reward.overlong_penalty}; use a value "
         "above 0"),
    ]  # fmt: skip


def _store_rules(config: Config) -> list[tuple[bool, str]]:
    url, name = config.store.url, config.run.name
    data, bad, solutions = config.store.data, config.store.skip_bad, config.store.solutions
    return [
        (solutions is None or config.task.name in (*WITH_ROWS, "countdown"), "store.solutions needs a task with "
         f"solutions ({', '.join(WITH_ROWS)} or countdown), not {config.task.name}: remove it"),
        (solutions in (None, SOLUTION) or config.task.name != "countdown", f"store.solutions is {shown(solutions)}; "
         f"for the task countdown it must be {SOLUTION!r}"),
        (bad is None or len(data) > 0, "store.skip_bad has no effect without store.data: set that or remove it"),
        (url is None or not holds_password(url), NO_PASSWORD),
        (url is None or is_database_url(url), NO_URL),
        (url is None or name is None or len(name.encode()) <= 63,
         f"run.name has {len((name or '').encode())} bytes; a PostgreSQL schema name may have at most 63"),
    ]  # fmt: skip


def _draw_rules(config: Config) -> list[tuple[bool, str]]:
    draw, size = config.draw, config.collect.group_size
    shares = shares_of(draw)
    reached = staleness_of(config)
    streams = config.collect.mode == "stream"
    bound = "collect.max_age" if streams else "sync.v_max" if config.sync.rule == "adaptive" else "sync.period"
    cause = bound if streams else f"collect.offset + {bound} - 1"
    acts_with = [
        ("fresh", draw.policy == "replay", 'policy = "replay"'), ("shares", draw.policy == "mixed", 'policy = "mixed"'),
        ("mix", draw.policy == "mixed", 'policy = "mixed"'),
        ("order", draw.policy != "fresh", "policy other than fresh"),
        ("half_life", draw.order == "priority", 'order = "priority"'),
        ("max_uses", draw.policy != "fresh", "policy other than fresh"),
        ("leftovers", writes(draw), "policy that generates (fresh, replay, or mixed with a share of self)"),
    ]  # fmt: skip
    return [
        *((acts or getattr(draw, name) == getattr(DrawConfig, name),
         f"draw.{name} has no effect without draw.{other}: set that or remove it") for name, acts, other in acts_with),
        (0 <= draw.fresh < 1, f"draw.fresh is {draw.fresh}; it must be at least 0 and below 1 (policy fresh is 1)"),
        (0 < draw.half_life < math.inf, f"draw.half_life is {draw.half_life}; use a value above 0"),
        (draw.policy != "mixed" or len(draw.shares) > 0,
         'draw.shares is empty: give the share of each origin, such as ["self=0.5", "model:teacher=0.5"]'),
        (len(shares) == len(draw.shares) and all(o and 0 < share < math.inf for o, share in shares.items()),
         f"draw.shares is {list(draw.shares)}; each must be ORIGIN=NUMBER with a number above 0, no origin twice"),
        (draw.mix == "between" or len(shares) <= size, f"draw.shares names {len(shares)} origins, more than "
         f"collect.group_size = {size} members"),
        (draw.max_age is None or not writes(draw) or config.sync.rule != "never",
         f"draw.max_age is {draw.max_age}, but with sync.rule = never the run's own rollouts get older without limit: "
         "remove one of them"),
        (draw.max_age is None or not writes(draw) or draw.max_age >= reached,
         f"draw.max_age is {draw.max_age}, but the run's own rollouts reach age {reached} ({cause}) before they "
         f"are drawn and would be skipped: raise it, or lower {bound}"),
        (draw.max_uses is None or draw.max_uses >= 1, f"draw.max_uses is {draw.max_uses}; it must be at least 1"),
        (draw.min_rewarded is None or min(2, size) <= draw.min_rewarded <= size, f"draw.min_rewarded is "
         f"{draw.min_rewarded}; it must be at least {min(2, size)} and at most collect.group_size = {size}"),
        (0 <= draw.min_spread < math.inf, f"draw.min_spread is {draw.min_spread}; it must be at least 0"),
    ]  # fmt: skip
