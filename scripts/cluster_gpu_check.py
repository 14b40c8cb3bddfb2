"""Compare learners and engines in other processes with those in this one, on one GPU or a CPU.

    python scripts/cluster_gpu_check.py [MODEL] [--device cpu|cuda] [--compute bfloat16] [--steps 10] [--parts PART …]

MODEL is a Hugging Face folder. Without it, a Llama with random weights is made: 1.5 billion parameters on a GPU, a tiny
one on a CPU. It needs the package ray. The table at the end has

- the plain learner, FSDP2 with one rank in a process and in a Ray actor, and two ranks on one device, over gloo:
  seconds of an update, in turns, peak memory, and the difference of the gradients in float32;
- what Ray adds to an update, and to a call that does nothing;
- the engine in this process and in a Ray actor: seconds of a sync and tokens per second;
- weights of a rank in a Ray actor, which sends them to the engine in a Ray actor: seconds of a sync. This process gets
  a copy too.

It ends with status 1 if gradients or weights are not the same. The parts are `gradients`, `learners` (times and memory)
and `engines`. Only the last two need a machine without other work.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from solera.batch import Batch
from solera.bench.random_model import write as write_random_model
from solera.cluster.actors import Actors
from solera.cluster.engines import ActorPool, EngineSpec
from solera.cluster.passing import way
from solera.config import LearnConfig, ObjectiveConfig
from solera.engines.groups import gpu_of
from solera.engines.in_process import InProcessEngine
from solera.errors import SoleraError, one_line
from solera.learner.learner import Learner
from solera.models.language_model import LanguageModel
from solera.models.loading import Source
from solera.objectives.objective import compose
from solera.objectives.table import resolve
from solera.protocols import Weights
from solera.records import Completion, Group, Prompt, Reward, Rollout, Sampling, TensorSpec
from solera.sharded.effort import peak_memory
from solera.sharded.learner import ShardedLearner
from solera.sharded.processes import Processes
from solera.sharded.rank import GroupPeers, LearnerSpec, Rank, Seat
from solera.sharded.ranks import Ranks
from solera.tasks.event_loop import EventLoop
from solera.training.collation import collate

PARTS = ("gradients", "learners", "engines")
TIMEOUT = 300.0
TOLERANCE = 1e-4
"""Largest relative difference of two gradients in float32."""
WAYS = {"handle": "CUDA IPC", "store": "object store", "nccl": "NCCL", "gloo": "gloo"}
SHARE = 0.2
"""Of the GPU, for each actor. This process has the rest."""


BEGAN = time.perf_counter()


def tell(what: str) -> None:
    """Progress, on standard error."""
    print(f"{time.perf_counter() - BEGAN:5.0f} s  {what}", file=sys.stderr, flush=True)


class Checked(Rank):
    """A rank that shows its gradient."""

    def gradient(self) -> list[torch.Tensor]:
        model = self.learner.model
        return [model.whole(p.grad).cpu() for p in model.parameters().values()]

    def nothing(self) -> None:
        """To time a call."""

    def gathers_on(self) -> str:
        """The GPU on which weights are gathered (`gpu_of`)."""
        model = self.learner.model
        return gpu_of(model.whole(next(iter(model.parameters().values())).detach()).device)


def make_checked(spec: LearnerSpec, seat: Seat) -> Checked:
    return Checked(spec, GroupPeers(seat, spec.device))


def plain(spec: LearnerSpec, source: Source) -> Learner:
    model, _ = source.load(torch.device(spec.device))
    return Learner(
        model, spec.objective, spec.config, lineage=spec.lineage, temperature=spec.temperature, limit=spec.limit,
        steps=spec.steps, compute=spec.compute, reference=None,
    )  # fmt: skip


def spec_of(given: argparse.Namespace, source: Source, model: LanguageModel, compute: str, lr: float) -> LearnerSpec:
    return LearnerSpec(
        partial(source.for_rank, model.takes_any_mask), compose(resolve(ObjectiveConfig("grpo"))),
        LearnConfig(lr=lr, warmup=0, grad_clip=1e9), "check", 1.0, given.tokens, 1000, getattr(torch, compute),
        given.device,
    )  # fmt: skip


def batch_of(given: argparse.Namespace, engine: InProcessEngine, vocabulary: int, spec: LearnerSpec) -> Batch:
    """Responses of the model itself, with random rewards."""
    rng = np.random.default_rng(0)
    prompts = [tuple(map(int, rng.integers(3, vocabulary, 8))) for _ in range(given.prompts)]
    with EventLoop() as events:
        written = events.run(write(engine, [p for p in prompts for _ in range(given.group)], given.tokens))
    rollouts = [
        Rollout.of(Prompt(f"check/{n // given.group}", prompts[n // given.group]), completion,
                   rewards=(Reward(float(rng.integers(0, 2)) + 0.1 * (n % given.group)),))
        for n, completion in enumerate(written)
    ]  # fmt: skip
    groups = [
        Group(f"check/{p}", tuple(rollouts[p * given.group : (p + 1) * given.group])) for p in range(given.prompts)
    ]
    return collate(groups, spec.objective, now=0, lineage="check", seed=0)


async def write(engine: Any, prompts: list[tuple[int, ...]], tokens: int) -> list[Completion]:
    sampling = Sampling(1.0, tokens)
    return await asyncio.gather(*(engine.generate(prompt, sampling, seed) for seed, prompt in enumerate(prompts)))


def seconds_of(function: Callable[[], Any], device: str) -> float:
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def hosts_of(given: argparse.Namespace) -> dict[str, Callable[[Callable[[Seat], Any]], Any]]:
    share = SHARE if given.device == "cuda" else 0.0
    return {
        "FSDP2, 1 rank, process": lambda make: Processes(1, make, TIMEOUT),
        "FSDP2, 1 rank, Ray actor": lambda make: Actors(1, make, TIMEOUT, None, cpus=4, gpus=share),
        "FSDP2, 2 ranks, processes": lambda make: Processes(2, make, TIMEOUT),
    }


def opened(given: argparse.Namespace, spec: LearnerSpec, rows: list[list[str]]) -> dict[str, Ranks]:
    """The ranks that can be started. Those that cannot get a row that says why."""
    found = {}
    for name, start in hosts_of(given).items():
        tell(f"starting: {name}")
        try:
            found[name] = Ranks(start(partial(make_checked, spec)), TIMEOUT)
        except (SoleraError, RuntimeError) as error:
            rows.append([name, f"does not run: {one_line(error)}"])
    return found


def compare_gradients(given: argparse.Namespace, source: Source, model: LanguageModel, batch: Batch) -> dict[str, str]:
    """Of each kind of learner, against the plain one, in float32."""
    spec, found, failed = spec_of(given, source, model, "float32", 0.0), dict[str, str](), list[list[str]]()
    alone = plain(spec, source)
    alone.update(batch)
    expected = [p.grad.cpu() for p in alone.model.parameters().values()]
    norm = float(torch.sqrt(sum((g.double() ** 2).sum() for g in expected)))
    del alone
    for name, ranks in opened(given, spec, failed).items():
        tell(f"gradient: {name}")
        try:
            ShardedLearner(spec, ranks).update(batch)
            own = ranks.call("gradient", [()] * ranks.count)[0]
            apart = float(torch.sqrt(sum(((a - b).double() ** 2).sum() for a, b in zip(own, expected, strict=True))))
            most = max(float((a - b).abs().max()) for a, b in zip(own, expected, strict=True))
            found[name] = f"{apart / norm:.1e} ({most:.1e})"
        except SoleraError as error:
            found[name] = f"fails: {one_line(error)}"
        tell(f"gradient: {name}: {found[name]}")
        ranks.close()
    return found | dict(failed)


def compare_learners(
    given: argparse.Namespace, source: Source, model: LanguageModel, batch: Batch, gradients: dict[str, str],
    rows: list[list[str]],
) -> None:  # fmt: skip
    spec = spec_of(given, source, model, given.compute, 1e-6)
    alone, ranks = plain(spec, source), opened(given, spec, rows)
    learners: dict[str, Any] = {"plain learner": alone, **{n: ShardedLearner(spec, r) for n, r in ranks.items()}}
    times: dict[str, list[float]] = {name: [] for name in learners}
    calls: dict[str, list[float]] = {name: [] for name in ranks}
    memory: dict[str, float] = {}
    for step in range(given.steps + 2):
        tell(f"update {step + 1} of {given.steps + 2}")
        for name in list(times):
            try:
                took = seconds_of(partial(learn, name, learners[name], batch, memory), given.device)
            except SoleraError as error:
                rows.append([name, f"fails: {one_line(error)}"])
                del times[name], calls[name]
                continue
            tell(f"  {name}: {1000 * took:.1f} ms, {memory[name]:.2f} GiB")
            if step >= 2:  # the first steps allocate and compile
                times[name].append(took)
            if name in calls:
                group = ranks[name]
                nothing = [()] * group.count
                calls[name] += [seconds_of(lambda g=group, n=nothing: g.call("nothing", n), "cpu") for _ in range(20)]
    for each in ranks.values():
        each.close()
    for name, took in times.items():
        spread = f"{1000 * statistics.median(took):.1f} ({1000 * min(took):.1f} to {1000 * max(took):.1f})"
        call = f"{1000 * statistics.median(calls[name]):.2f}" if name in calls else "–"
        rows.append([name, spread, f"{memory[name]:.2f}", call, gradients.get(name, "–")])
    process, actor = "FSDP2, 1 rank, process", "FSDP2, 1 rank, Ray actor"
    if process in times and actor in times:
        pairs = zip(times[actor], times[process], strict=True)
        more = 1000 * statistics.median(a - p for a, p in pairs)
        rows.append(["Ray's overhead per update", f"{more:+.1f}"])


def learn(name: str, learner: Any, batch: Batch, memory: dict[str, float]) -> None:
    """An update. Notes the most memory that the learner's process has held, in GiB."""
    told = learner.update(batch).metrics
    memory[name] = told.get("rank/0/memory", 0.0) or peak_memory(learner.model.device)


def compare_engines(given: argparse.Namespace, source: Source, rows: list[list[str]]) -> bool:
    """Returns whether the engines hold the same weights."""
    compute, device = getattr(torch, given.compute), torch.device(given.device)
    on_gpu = given.device == "cuda"
    model, codec = source.load(device)
    sent = {name: p.detach().to(compute) for name, p in model.parameters().items()}
    here = InProcessEngine(
        model.for_compute(compute, copied=True), codec.end_token_ids, 1024, compute, on_gpu, early=True
    )
    share = SHARE if on_gpu else 0.0
    tell("starting: engine in a Ray actor")
    pool = ActorPool(
        EngineSpec(source, compute, 1024, torch.get_num_threads(), given.device, share, on_gpu), 1, cpus=4,
        address=None, timeout=TIMEOUT, tell=lambda sampled: None, say=print,
    )  # fmt: skip
    there = pool.members[0].engine
    how = WAYS[there.sender.way(next(iter(sent.values())))]
    prompts, held = [(3, 4, 5, 6)] * given.prompts * given.group, []
    engines = {"engine in this process": here, f"engine in a Ray actor ({how})": there}
    with EventLoop() as events:
        for name, engine in engines.items():
            tell(name)
            syncs, speeds = [], []
            for version in range(1, given.steps + 1):
                weights = Weights("check", version, iter(sent.items()))
                syncs.append(seconds_of(lambda e=engine, w=weights: e.load(w), given.device))
                start = time.perf_counter()
                written = events.run(write(engine, prompts, given.tokens))
                speeds.append(sum(len(each.token_ids_T) for each in written) / (time.perf_counter() - start))
                tell(f"  sync {1000 * syncs[-1]:.1f} ms, {speeds[-1]:.0f} tokens/s")
            held.append(engine.held.tensors)
            rows.append(
                [name, f"sync {1000 * statistics.median(syncs):.1f} ms", f"{statistics.median(speeds):.0f} tokens/s"]
            )
    try:
        held.append(sync_from_rank(given, spec_of(given, source, model, given.compute, 0.0), pool, rows))
    except (SoleraError, RuntimeError) as error:
        held.append(())
        rows.append(["rank in a Ray actor to engine in a Ray actor", f"fails: {one_line(error)}"])
    pool.close()
    return all(each == held[0] for each in held)


def sync_from_rank(
    given: argparse.Namespace, spec: LearnerSpec, pool: ActorPool, rows: list[list[str]]
) -> tuple[TensorSpec, ...]:
    """Syncs in which a rank in a Ray actor sends its weights. Returns what the engine holds then."""
    tell("starting: FSDP2, 1 rank, Ray actor")
    share, there = SHARE if given.device == "cuda" else 0.0, pool.members[0].engine
    ranks = Ranks(Actors(1, partial(make_checked, spec), TIMEOUT, None, cpus=4, gpus=share), TIMEOUT)
    try:
        learner, syncs, gathers = ShardedLearner(spec, ranks), [], []
        how = WAYS[way("auto", ranks.call("gathers_on", [()])[0], there.receiver.gpu)]
        name = f"rank in a Ray actor to engine in a Ray actor ({how})"
        tell(name)
        for _ in range(given.steps):
            syncs.append(seconds_of(lambda: pool.load(learner.weights(there.dtype)), given.device))
            gathers.append(seconds_of(lambda: list(learner.weights(there.dtype).tensors), given.device))
            tell(f"  sync {1000 * syncs[-1]:.1f} ms; without the engine {1000 * gathers[-1]:.1f} ms")
    finally:
        ranks.close()
    alone = f"without the engine {1000 * statistics.median(gathers):.1f} ms"
    rows.append([name, f"sync {1000 * statistics.median(syncs):.1f} ms", alone])
    return there.held.tensors


def print_table(rows: list[list[str]]) -> None:
    head = ["", "ms per update", "GiB", "ms per call", "Δ gradient"]
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    for row in rows:
        print("| " + " | ".join([*row, *[""] * (len(head) - len(row))]) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--compute", help="number format; default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="longest response")
    given = parser.parse_args()
    given.compute = given.compute or ("bfloat16" if given.device == "cuda" else "float32")
    folder = Path(tempfile.mkdtemp(prefix="solera-check-"))
    size = "1.5b" if given.device == "cuda" else "tiny"
    source = Source(given.model or write_random_model(size, "embedded", folder / "model", given.device))
    model, codec = source.load(torch.device(given.device))
    engine = InProcessEngine(model, codec.end_token_ids, 1024, torch.float32, early=True)
    spec = spec_of(given, source, model, given.compute, 0.0)
    engine.load(Weights("check", 0, iter(list(model.parameters().items()))))
    batch = batch_of(given, engine, model.module.config.vocab_size, spec)
    tell("a batch is there")
    rows: list[list[str]] = []
    gradients = compare_gradients(given, source, model, batch) if "gradients" in given.parts else {}
    if "learners" in given.parts:
        compare_learners(given, source, model, batch, gradients, rows)
    else:
        rows += [[name, "", "", "", apart] for name, apart in gradients.items()]
    same = "engines" not in given.parts or compare_engines(given, source, rows)
    print_table(rows)
    if "engines" in given.parts:
        print("weights in the engines:", "the same" if same else "DIFFERENT")
    equal = all(apart[0].isdigit() and float(apart.split()[0]) < TOLERANCE for apart in gradients.values())
    return 0 if same and equal else 1


if __name__ == "__main__":
    sys.exit(main())
