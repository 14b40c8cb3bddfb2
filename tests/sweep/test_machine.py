"""How a machine is shared out, with numbers computed by hand."""

import signal

import pytest

from solera.errors import SoleraError
from solera.models.source import EMBEDDED
from solera.run.forking import Processes
from solera.sweep.file import read_plan
from solera.sweep.machine import Share, compile_cache, gpu_share, memory_needed, parameters_in, share_of
from tests.command import solera

GRID = """
sweep = { seeds = 2 }
run = { steps = 4, device = "cpu" }
collect = { prompts = 4, group_size = 4 }
evaluate = { every = 0, problems = 10 }
report = { tensorboard = false, page = false }
[axis.algorithm]
grpo = { objective.name = "grpo" }
reinforce = { objective.name = "reinforce" }
"""


def plan_of(tmp_path, text: str = GRID):
    (tmp_path / "grid.toml").write_text(text)
    return read_plan(tmp_path / "grid.toml")


@pytest.mark.parametrize(
    ("free", "cores", "threads", "needed", "jobs", "share"),
    [
        (100, 16, 1, 13, None, Share(4, 4, 22.7)),  # memory for 6 of 14 GiB, at most 4: 95 / 4 − 1 = 22.75
        (40, 16, 1, 13, None, Share(2, 8, 18.0)),  # 38 GiB: 2 of 14; 38 / 2 − 1
        (20, 16, 1, 30, None, Share(1, 16, 18.0)),  # too little for one, which may still try
        (100, 6, 2, 13, None, Share(3, 2, 30.6)),  # cores for 3 runs of 2 threads; 95 / 3 − 1
        (100, 16, 1, 13, 6, Share(6, 2, 14.8)),  # as asked: 95 / 6 − 1 = 14.83
    ],
)
def test_a_gpu_is_shared_out(free, cores, threads, needed, jobs, share):
    assert gpu_share(free, cores, threads, needed, jobs) == share


def test_a_gpu_that_is_too_small_is_refused():
    with pytest.raises(SoleraError, match=r"--jobs is 8, but the GPU has only 4\.0 GiB free"):
        gpu_share(4.0, 16, 1, 13, 8)


def test_a_run_gets_its_share_and_keeps_what_the_file_sets(tmp_path):
    (cell, _) = plan_of(tmp_path).cells
    on_cpu = Share(2, 1).given_to(cell.config)
    assert (on_cpu.run.threads, on_cpu.run.gpu_memory, on_cpu.collect.overlap) == (1, None, False)
    on_gpu = Share(3, 5, 30.0).given_to(cell.config)
    assert (on_gpu.run.threads, on_gpu.run.gpu_memory, on_gpu.collect.overlap) == (5, 30.0, None)
    crowded = Share(3, 1, 30.0).given_to(cell.config)
    assert crowded.collect.overlap is False
    (cell, _) = plan_of(tmp_path, GRID.replace("steps = 4", "steps = 4, threads = 2")).cells
    assert Share(3, 5, 30.0).given_to(cell.config).run.threads == 2


def test_the_need_follows_from_the_model_or_is_set(tmp_path):
    text = GRID.replace('device = "cpu"', "gpu_memory = 20")
    assert memory_needed(plan_of(tmp_path, text).cells[0].config) == 20
    assert memory_needed(plan_of(tmp_path).cells[0].config) == pytest.approx(8.0, abs=0.1)


def test_the_embedded_models_parameters():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    assert parameters_in(EMBEDDED) == sum(p.numel() for p in model.parameters())


def test_a_cpu_takes_a_run_per_core(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    two_threads = GRID.replace("steps = 4", "steps = 4, threads = 2")
    with Processes(signal.SIGINT) as processes:
        assert share_of(plan_of(tmp_path), None, processes) == Share(6, 1)
        assert share_of(plan_of(tmp_path, two_threads), None, processes) == Share(3, 1)
        assert share_of(plan_of(tmp_path), 2, processes) == Share(2, 1)


def test_the_compile_cache_lies_beside_the_sweeps_unless_it_is_set(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    cache = compile_cache(tmp_path)
    assert cache == {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled"), "TRITON_CACHE_DIR": "/elsewhere"}


def test_a_sweep_can_stream(tmp_path):
    text = GRID.replace("group_size = 4", 'group_size = 4, mode = "stream"').replace("seeds = 2", "seeds = 1")
    (tmp_path / "grid.toml").write_text(text)
    done = solera("sweep", "grid.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 runs finished." in done.stdout
