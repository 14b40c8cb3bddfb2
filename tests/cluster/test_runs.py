"""`solera train` with several ranks: the same run, whatever hosts the ranks and whatever happens to them."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from solera.folder.checkpoint import checkpoints, read_state
from tests.cluster.runs import assert_same, ranks_of, reached, rows_of, train, weights_of, write
from tests.cluster.test_failures import runs
from tests.command import solera, start
from tests.test_account import assert_the_checkpoint_agrees

pytestmark = pytest.mark.cluster
HOSTS = ("processes", "ray")


def test_the_metrics_are_those_of_one_process(single, undisturbed):
    alone, several = rows_of(single), rows_of(undisturbed)
    assert [row.keys() for row in several] == [row.keys() for row in alone]
    for name, value in alone[0].items():  # before rounding errors add up
        if isinstance(value, float) and name != "tokens/computed":
            assert several[0][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    for name, tensor in weights_of(single).items():
        assert torch.allclose(weights_of(undisturbed)[name], tensor, atol=0.02), name


def test_each_rank_writes_its_share_of_the_model(single, undisturbed):
    """The rest of the folder is the same as that of one process."""
    last = checkpoints(undisturbed / "checkpoints")[-1]
    for several in (undisturbed / "model", last / "model"):
        assert {path.name for path in several.glob("*.safetensors")} == {
            "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        }  # fmt: skip
        for path in (single / "model").iterdir():
            if path.name not in ("model.safetensors", "digests.json"):
                assert (several / path.name).read_bytes() == path.read_bytes(), path.name
        model = AutoModelForCausalLM.from_pretrained(several)
        assert torch.equal(model.get_input_embeddings().weight, weights_of(undisturbed)["model.embed_tokens.weight"])


def test_ray_actors_train_the_same_run_as_processes(tmp_path, undisturbed):
    assert_same(train(tmp_path, "ray", runtime="ray"), undisturbed)


def test_ranks_join_a_ray_cluster_of_two_nodes_and_leave_it_as_it_was(tmp_path, undisturbed):
    """Two nodes of one CPU on this machine, so that each has one rank."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        folder = train(tmp_path, "joined", runtime="ray", address=f'"{cluster.address}"')
        assert_same(folder, undisturbed)
        assert [node.any_processes_alive() for node in cluster.list_all_nodes()] == [True, True]
    finally:
        cluster.shutdown()


def test_without_ray_the_error_says_what_to_install(tmp_path):
    broken = tmp_path / "packages" / "ray"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError")
    path = os.pathsep.join([str(broken.parent), os.environ.get("PYTHONPATH", os.getcwd())])
    ended = solera("train", write(tmp_path, "no_ray", runtime="ray"), PYTHONPATH=path)
    assert ended.returncode == 2 and not (tmp_path / "no_ray").exists()
    (said,) = ended.stderr.strip().splitlines()
    assert "cluster.runtime = ray needs the package ray: pip install 'solera[cluster]'" in said


@pytest.mark.parametrize("runtime", HOSTS)
def test_a_run_that_was_killed_continues_bit_for_bit_and_leaves_nothing_running(tmp_path, undisturbed, runtime):
    folder, process = tmp_path / "killed", start("train", write(tmp_path, "killed", runtime=runtime), fresh=True)
    reached(folder, 6, process)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 120
    while any(map(runs, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(runs, ranks))
    ended = solera("train", "--resume", folder)
    assert ended.returncode == 0, ended.stderr
    assert_same(folder, undisturbed)


def test_a_checkpoint_moves_between_numbers_of_ranks(tmp_path):
    """Two ranks, then one process, then three ranks. Each writes a checkpoint that the next continues from."""
    folder = tmp_path / "moves"
    first = solera("train", write(tmp_path, "moves"), "--run.steps", 4)
    assert first.returncode == 0, first.stderr
    kept = {path.name for path in (checkpoints(folder / "checkpoints")[-1] / "learner").iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= kept
    for steps, learners in ((8, 0), (12, 3)):
        ended = solera("train", "--resume", folder, "--run.steps", steps, "--cluster.learners", learners)
        assert ended.returncode == 0, ended.stderr
        newest = checkpoints(folder / "checkpoints")[-1]
        assert read_state(newest).version == steps
        assert (newest / "learner").is_dir() == bool(learners)
    single = tmp_path / "one"
    ended = solera("train", write(tmp_path, "one", learners=0), "--run.steps", 12)
    assert ended.returncode == 0, ended.stderr
    for name, tensor in weights_of(single).items():
        assert torch.allclose(weights_of(folder)[name], tensor, atol=0.02), name


def test_a_damaged_part_of_a_rank_is_noticed(tmp_path):
    folder = tmp_path / "damaged"
    assert solera("train", write(tmp_path, "damaged"), "--run.steps", 4).returncode == 0
    part = checkpoints(folder / "checkpoints")[-1] / "learner" / "__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    ended = solera("train", "--resume", folder, "--run.steps", 8)
    assert ended.returncode == 2
    assert "learner/__1_0.distcp is damaged" in ended.stderr


@pytest.mark.parametrize(("runtime", "sent"), [("processes", signal.SIGKILL), ("ray", signal.SIGKILL),
                                               ("processes", signal.SIGSTOP)])  # fmt: skip
def test_after_a_rank_is_lost_all_ranks_begin_again_in_the_same_run(tmp_path, undisturbed, runtime, sent):
    timeout = 60 if sent == signal.SIGKILL else 15
    file = write(tmp_path, "lost", runtime=runtime, timeout=float(timeout), restarts=2)
    folder, process = tmp_path / "lost", start("train", file, fresh=True)
    reached(folder, 6, process)
    ranks = ranks_of(process)
    os.kill(ranks[1], sent)
    said = " ".join(" ".join(process.communicate()).split())
    assert process.returncode == 0, said
    assert "starting all ranks again, 1 further restart allowed after this" in said
    assert "rank " in said and ("died" in said or "signal 9" in said or "did not answer" in said)
    assert not any(map(runs, ranks))
    assert_same(folder, undisturbed)
    account = assert_the_checkpoint_agrees(folder)
    assert account.difference == 0 and account.dropped["superseded"] > 0


@pytest.mark.parametrize(
    ("runtime", "sent"), [("processes", signal.SIGINT), ("processes", signal.SIGTERM), ("ray", signal.SIGINT)]
)
def test_a_signal_to_all_processes_finishes_the_step_and_writes_a_checkpoint(tmp_path, undisturbed, runtime, sent):
    """A terminal sends SIGINT to the ranks as well; `timeout`, systemd and Slurm send SIGTERM."""
    command = [sys.executable, "-m", "solera.cli", "train", str(write(tmp_path, "stopped", runtime=runtime))]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    folder = tmp_path / "stopped"
    reached(folder, 5, process)
    os.killpg(process.pid, sent)
    told, said = process.communicate()
    assert process.returncode == 130, said
    assert "stopped after batch" in said and "was ended" not in told
    assert solera("train", "--resume", folder).returncode == 0
    assert_same(folder, undisturbed)


def test_without_restarts_a_lost_rank_stops_the_run_in_one_line(tmp_path, undisturbed):
    file = write(tmp_path, "stops", restarts=0)
    folder, process = tmp_path / "stops", start("train", file, fresh=True)
    reached(folder, 6, process)
    os.kill(ranks_of(process)[0], signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode == 2
    last = said.strip().splitlines()[-1]
    assert "of 2 was ended by signal 9" in last and f"continue with: solera train --resume {folder}" in last
    assert solera("train", "--resume", folder).returncode == 0
    assert_same(folder, undisturbed)
