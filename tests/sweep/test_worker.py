"""What a sweep does to its runs, with processes that are not runs."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from solera.config import dump
from solera.sweep.machine import Share
from solera.sweep.plan import PlannedRun
from solera.sweep.results import collect
from solera.sweep.runner import INTERRUPTED, Runner
from solera.sweep.state import Failures
from solera.sweep.worker import Worker
from tests.report.runs import write_run
from tests.sweep.test_machine import GRID, plan_of

WAITING = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored, if the tests are a shell's background job
print("ready", flush=True)
time.sleep(100)
"""
NOBODY = 2**22 + 1
"""An id above the highest that Linux gives to a process."""


class Unreported:
    """A process whose end the fork server has not reported."""

    exitcode = None

    def __init__(self, pid: int) -> None:
        self.pid = pid


class Ended:
    """A process that has ended."""

    pid = NOBODY

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode


class Given:
    """Starts nothing; the jobs are given."""

    def __init__(self, *jobs: Unreported | Ended) -> None:
        self._jobs = list(jobs)

    def start(self, *_: object) -> Unreported | Ended:
        return self._jobs.pop(0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no fork server")
def test_a_run_that_just_ended_does_not_keep_the_others_from_being_stopped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path)
    plan.folder.mkdir(parents=True)
    going = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE)
    try:
        going.stdout.readline()
        processes = Given(Unreported(NOBODY), Unreported(going.pid))
        runner = Runner(plan, plan.runs()[:2], Share(2, 1), False, lambda _: 0, processes)
        runner.fill(2, float("inf"))
        runner.ask_to_stop()
        assert going.wait(60) == -signal.SIGINT
    finally:
        going.kill()
        going.communicate()


def log_batches(run: PlannedRun, batches: int, *checkpoints: int) -> None:
    """What a run leaves that was killed: it logged so many batches and saved after these."""
    for step in checkpoints:
        (run.folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True, exist_ok=True)
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps({"step": n}) + "\n" for n in range(batches)))


def worker_of(run: PlannedRun, folder: Path) -> Worker:
    return Worker(run, folder, lambda _: 0, Share(1, 1), {}, Given(Unreported(NOBODY)))


@pytest.mark.parametrize(("checkpoints", "kept"), [((), 0), ((1,), 1), ((1, 2), 2)])
def test_a_killed_run_goes_on_from_its_newest_checkpoint(tmp_path, monkeypatch, checkpoints, kept):
    """It logged 3 of 4 batches."""
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path)
    run = plan.runs()[0]
    log_batches(run, 3, *checkpoints)
    worker = worker_of(run, plan.folder)
    assert worker.before == kept
    assert worker.made == 0  # it has not started to learn
    log_batches(run, kept)
    assert worker.made == 0
    log_batches(run, 4)
    assert worker.made == 4 - kept


@pytest.mark.parametrize(
    ("status", "after"),
    [
        (0, ""), (INTERRUPTED, ""), (1, ", but then: exit status 1: no output"),
        (-signal.SIGKILL, ", but then: killed by signal 9: no output"),
    ],
)  # fmt: skip
def test_a_run_with_a_model_is_finished_however_it_ended(tmp_path, monkeypatch, status, after):
    """It was stopped, or failed, while it wrote its report."""
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path, GRID.replace("page = false", "page = true"))
    plan.folder.mkdir(parents=True)
    runner = Runner(plan, plan.runs()[:1], Share(1, 1), False, lambda _: 0, Given(Ended(status)))
    runner.fill(1, float("inf"))
    (worker,) = runner.running
    worker.seconds = worker.together = 6.0
    write_run(worker.run.folder, [{"step": n, "eval/pass@1": 0.5} for n in range(5)], dump(worker.run.config))
    (worker.run.folder / "model").mkdir()
    (said,) = runner.reap()
    assert said == f"finished  grpo-s0{after}"
    assert (runner.finished, runner.stopped) == (1, 0)
    (found, *_) = collect(plan).runs
    assert (found.state, found.measures.final, found.pace.seconds, found.pace.steps) == ("finished", 0.5, 6.0, 4)
    assert (worker.run.folder / "report.html").exists() == (status == INTERRUPTED)
    assert Failures(plan.folder).get(worker.run) is None
