"""Time the copy of the weights that the controller gets from ranks at every sync.

    OMP_NUM_THREADS=1 python -m benchmarks.rank_sync [--runtime processes|ray] [--ranks 1] [--device cpu] [--syncs 7]

The model is a Llama of SmolLM2's shape with random weights: 135 million in bfloat16, 269 MB, 272 tensors. It prints the
seconds of each sync and the processor seconds of all its processes, Ray's included. Both are medians, and the first two
syncs do not count. Then it compares all weights with those that a rank made, bit for bit.
"""

import argparse
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.decode_step import SIZES
from solera.cluster.actors import Actors
from solera.config import LearnConfig, ObjectiveConfig
from solera.models.digest import describe
from solera.models.language_model import LanguageModel
from solera.objectives.objective import compose
from solera.objectives.table import resolve
from solera.sharded.learner import ShardedLearner
from solera.sharded.processes import Processes
from solera.sharded.rank import LearnerSpec, make_rank
from solera.sharded.ranks import Ranks

TIMEOUT, DTYPE = 120.0, torch.bfloat16


def random_llama() -> LanguageModel:
    """The same in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES["smollm2"], max_position_embeddings=2048)
    return LanguageModel(LlamaForCausalLM(config).eval())


def processor_seconds() -> float:
    """Of this process and all that it started, directly or not."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        parents[int(file.parent.name)], ticks[int(file.parent.name)] = int(fields[1]), sum(map(int, fields[11:13]))

    def is_ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and is_ours(parents[pid]))

    return sum(used for pid, used in ticks.items() if is_ours(pid)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtime", choices=("processes", "ray"), default="processes")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--syncs", type=int, default=7)
    given = parser.parse_args()
    spec = LearnerSpec(
        random_llama, compose(resolve(ObjectiveConfig("grpo"))), LearnConfig(lr=0.0, warmup=0), "check", 1.0, 8, 10,
        DTYPE, given.device,
    )  # fmt: skip
    make, gpus = partial(make_rank, spec), 1 / given.ranks if given.device == "cuda" else 0.0
    host: Any = (
        Processes(given.ranks, make, TIMEOUT)
        if given.runtime == "processes"
        else Actors(given.ranks, make, TIMEOUT, None, gpus=gpus)
    )
    ranks = Ranks(host, TIMEOUT)
    learner, took = ShardedLearner(spec, ranks), list[tuple[float, float]]()
    for _ in range(given.syncs + 2):
        used, began = processor_seconds(), time.perf_counter()
        held = dict(learner.weights(str(DTYPE)).tensors)
        took.append((time.perf_counter() - began, processor_seconds() - used))
    size = sum(tensor.nbytes for tensor in held.values())
    seconds, used = (statistics.median(column) for column in zip(*took[2:], strict=True))
    print(
        f"{given.runtime}, {given.ranks} ranks: {1000 * seconds:.0f} ms, {size / seconds / 1e9:.2f} GB/s, "
        f"{used:.2f} processor seconds ({', '.join(f'{1000 * wall:.0f}' for wall, _ in took)})"
    )
    expected = {name: p.detach().to(DTYPE) for name, p in random_llama().parameters().items()}
    assert list(held) == list(expected) and all(torch.equal(held[name], expected[name]) for name in expected)
    assert learner.manifest(str(DTYPE)).tensors == describe(expected.items())
    ranks.close()


if __name__ == "__main__":
    main()
