"""How many runs fit on the machine at the same time, and what each of them gets of it."""

import json
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from solera.config import Config, override
from solera.errors import SoleraError
from solera.models.source import obtain
from solera.run.forking import Processes
from solera.sweep.plan import Plan

FIXED_GIB, GIB_PER_BILLION = 8.0, 39.0
"""GPU memory that a run needs: a fixed part, and a part for each billion parameters. Measured: 13 GiB with 0.135
billion, 68 GiB with 1.54 billion (benchmarks/RESULTS.md)."""
CONTEXT_GIB = 1.0
"""What each process takes of the GPU besides `run.gpu_memory`: its CUDA context and loaded kernels."""
LEFT_FREE = 0.05
"""Share of the GPU's free memory that no run gets."""
MOST_ON_A_GPU = 4
"""Most runs on one GPU unless `--jobs` says otherwise."""


@dataclass(frozen=True)
class Share:
    """What each run gets if `jobs` runs are active at the same time."""

    jobs: int
    threads: int
    gpu_memory: float | None = None
    """In GiB; `None` on a CPU."""

    @property
    def on_gpu(self) -> bool:
        return self.gpu_memory is not None

    def given_to(self, config: Config) -> Config:
        """The config of a run with its share. What the sweep's file sets stays."""
        config = override(config, "run", threads=config.run.threads or self.threads)
        if self.on_gpu:
            config = override(config, "run", gpu_memory=config.run.gpu_memory or self.gpu_memory)
        alone_on_its_cores = self.on_gpu and self.threads > 1
        if config.collect.mode == "lock_step" and config.collect.overlap is None and not alone_on_its_cores:
            config = override(config, "collect", overlap=False)  # other runs use the other cores
        return config

    def words(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        each = f", each with {threads} and {self.gpu_memory:.1f} GiB of the GPU" if self.on_gpu else ""
        return f"{self.jobs} at a time{each}"


def share_of(plan: Plan, jobs: int | None, processes: Processes) -> Share:
    """Share out the machine. `jobs` is the number of parallel runs; `None` means as many as fit."""
    configs = [cell.config for cell in plan.cells]
    free = None if all(config.run.device == "cpu" for config in configs) else free_gpu_memory(processes)
    threads = max(config.run.threads or 1 for config in configs)
    if free is None:
        return Share(jobs or max(1, cores() // threads), 1)
    return gpu_share(free, cores(), threads, max(map(memory_needed, configs)), jobs)


def gpu_share(free: float, processors: int, threads: int, needed: float, jobs: int | None) -> Share:
    """Share out a GPU with this much free memory. A run needs `threads` processors and `needed` GiB."""
    usable = (1 - LEFT_FREE) * free
    if jobs is None:
        jobs = max(1, min(MOST_ON_A_GPU, processors // threads, int(usable // (needed + CONTEXT_GIB))))
    memory = usable / jobs - CONTEXT_GIB
    if memory <= 0:
        raise SoleraError(f"--jobs is {jobs}, but the GPU has only {free:.1f} GiB free: use fewer")
    return Share(jobs, max(1, processors // jobs), math.floor(10 * memory) / 10)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_needed(config: Config) -> float:
    """GiB that a run needs on a GPU: as its config says, or estimated from the size of its model."""
    if config.run.gpu_memory is not None:
        return config.run.gpu_memory
    return FIXED_GIB + GIB_PER_BILLION * parameters_in(Path(obtain(config.model.path))) / 1e9


def parameters_in(folder: Path) -> int:
    """Number of parameters in a model folder's safetensors files. 0 if there are none, or if the folder is a hub
    name."""
    from safetensors import safe_open

    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


def free_gpu_memory(processes: Processes) -> float | None:
    """GiB that are free on the GPU; `None` without one. Asked in a process that then ends, because a process that has
    used CUDA keeps part of the memory."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "free.json"
        job = processes.start(_tell_free_memory, told)
        job.join()
        if job.exitcode:
            raise SoleraError("the GPU's free memory cannot be read: set run.device = cpu, or repair the GPU")
        return json.loads(told.read_text(encoding="utf-8"))


def _tell_free_memory(told: Path) -> None:
    import torch

    free = torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else None
    told.write_text(json.dumps(free), encoding="utf-8")


def compile_cache(root: Path) -> dict[str, str]:
    """Environment variables that let all runs share what torch and Triton compile. Variables that are set stay."""
    folder = (root / "compiled").absolute()
    wanted = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    return {name: os.environ.get(name, value) for name, value in wanted.items()}
