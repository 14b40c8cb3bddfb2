"""What a sweep does to its runs, with processes that are not runs."""

import signal
import subprocess
import sys

import pytest

from solera.sweep.machine import Share
from solera.sweep.runner import Runner
from tests.sweep.test_machine import plan_of

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


class Given:
    """Starts nothing; the jobs are given."""

    def __init__(self, *jobs: Unreported) -> None:
        self._jobs = list(jobs)

    def start(self, *_: object) -> Unreported:
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
