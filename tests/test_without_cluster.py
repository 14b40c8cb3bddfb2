"""Without `[cluster]`, a run is one process, and Ray is neither imported nor started."""

from pathlib import Path

import pytest

from solera.config import Config, check, override
from solera.errors import SoleraError
from tests.command import run_script

PROGRAM = """
import sys
from pathlib import Path

sys.modules["ray"] = None  # importing it fails

import solera

config = solera.Config(
    run=solera.RunConfig(steps=2, root=sys.argv[1], name="run", device="cpu"),
    collect=solera.CollectConfig(prompts=2, group_size=2),
    evaluate=solera.EvaluateConfig(problems=2),
    diagnose=solera.DiagnoseConfig(probe_prompts=0),
)
solera.train(config)
children = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
print("children:", " ".join(children).split())
"""


def test_ray_is_neither_imported_nor_started(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ended = run_script(script, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "children: []" in ended.stdout


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"learners": -1}, "cluster.learners is -1; it must be at least 0"),
        ({"learners": 2, "restarts": -1}, "cluster.restarts is -1; it must be at least 0"),
        ({"learners": 2, "timeout": 0.0}, "cluster.timeout is 0; use a number of seconds above 0"),
        ({"learners": 2, "runtime": "processes", "address": "auto"}, "cluster.address has no effect with"),
        ({"engines": -1}, "cluster.engines is -1; it must be at least 0"),
        (
            {"gpus_per_learner": 1.5},
            "cluster.gpus_per_learner is 1.5; use a fraction of a GPU, such as 0.5, or a number",
        ),
        ({"gpus_per_engine": 0.0}, "cluster.gpus_per_engine is 0; use a fraction of a GPU"),
        ({"gpus_per_engine": -1.0}, "cluster.gpus_per_engine is -1; use a fraction of a GPU"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, object], says: str) -> None:
    with pytest.raises(SoleraError, match=f"^{says}"):
        check(override(Config(), "cluster", **values))


def test_ranks_may_train_on_gpus_but_not_in_float16() -> None:
    config = override(override(Config(), "run", device="cuda"), "cluster", learners=2, engines=1, gpus_per_engine=0.5)
    check(config)
    with pytest.raises(SoleraError, match=r"^model\.compute is float16, in which ranks cannot compute: use bfloat16"):
        check(override(config, "model", compute="float16"))


def test_engines_in_ray_actors_may_be_vllm_servers_that_the_actors_start() -> None:
    config = override(Config(), "cluster", engines=2)
    check(override(config, "engine", timeout=30.0))
    check(override(config, "cluster", runtime="processes", address="auto"))
    served = override(config, "engine", name="vllm", args=("--max-num-seqs=8",), gpu_memory=0.5)
    check(served)
    for changed in ({"launch": 1}, {"urls": ("http://127.0.0.1:8000",)}):
        with pytest.raises(SoleraError, match=r"^cluster\.engines starts a vLLM server in each Ray actor"):
            check(override(served, "engine", **changed))
    for transport in ("ipc", "group", "store"):
        with pytest.raises(SoleraError, match=rf"^sync\.transport is {transport}, but servers in Ray actors get their"):
            check(override(served, "sync", transport=transport))


def test_weights_of_engines_in_ray_actors_travel_through_the_store_or_a_group() -> None:
    config = override(Config(), "cluster", engines=2)
    for transport in ("auto", "store", "group"):
        check(override(config, "sync", transport=transport))
    for transport in ("file", "ipc"):
        with pytest.raises(
            SoleraError, match=rf"^sync\.transport is {transport}, but engines in Ray actors are no vLLM"
        ):
            check(override(config, "sync", transport=transport))
    with pytest.raises(SoleraError, match=r"^sync\.transport is group, but the engine is in this process: set engine"):
        check(override(Config(), "sync", transport="group"))
    served = override(Config(), "engine", name="vllm", launch=1)
    with pytest.raises(SoleraError, match=r"^sync\.transport is store, but weights reach a vLLM server without Ray"):
        check(override(served, "sync", transport="store"))


def test_the_other_settings_may_stay_when_ranks_are_switched_off() -> None:
    check(override(Config(), "cluster", learners=0, timeout=9.0, restarts=1))
