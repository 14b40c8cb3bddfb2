"""Processes that a server forks: how they end, what they inherit, and what happens if the server is killed."""

import sys

import pytest

from tests.command import run_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each process is a new Python")
PROGRAM = """
import gc, os, signal, sys, time
from pathlib import Path
from solera.errors import SoleraError
from solera.run.forking import Processes

def leave(status): sys.exit(status)
def fail(): raise ValueError("wrong")
def die(): os.kill(os.getpid(), signal.SIGKILL)
def note(name):
    loaded = "torch" in sys.modules and gc.isenabled()
    Path(name).write_text(f"{os.environ['OMP_NUM_THREADS']} {loaded} {os.getppid()}")
def encode():  # on several threads, which a fork may have
    from solera.models.loading import load_reader
    codec = load_reader("embedded").codec
    sys.exit(codec.encode_each(["1+2="] * 3000, True) != [codec.encode("1+2=")] * 3000)
def wait(name):
    try:
        Path(name + "-started").touch()
        time.sleep(600)
    except KeyboardInterrupt:
        Path(name).write_text("interrupted")
def until(name):
    while not Path(name).exists(): time.sleep(0.01)

print("before", end=" ")  # not flushed: it must not be printed again by the forks
with Processes(signal.SIGINT, threads=3) as processes:
    jobs = [processes.start(leave, 0), processes.start(leave, 7), processes.start(fail), processes.start(die)]
    jobs.append(processes.start(encode))
    for job in reversed(jobs): job.join()
    print([job.exitcode for job in jobs])
    slow, noting = processes.start(wait, "left"), processes.start(note, "note")
    noting.join()
    print(noting.exitcode, slow.exitcode)
    until("left-started")
until("left")  # the end of the block interrupts what still runs
threads, loaded, server = Path("note").read_text().split()
print(threads, loaded, server != str(os.getpid()), os.environ.get("OMP_NUM_THREADS") == "3")

with Processes(signal.SIGKILL) as processes:
    processes.start(note, "note").join()
    os.kill(int(Path("note").read_text().split()[2]), signal.SIGKILL)
    for _ in range(2):
        try:
            processes.start(leave, 0)
        except SoleraError as error:
            print(error)
"""


def test_processes_end_as_they_should_and_a_killed_server_is_told(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_script(tmp_path / "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    gone = "the process that starts the others was killed, perhaps because memory ran out: run the command again"
    assert done.stdout.splitlines() == ["before [0, 7, 1, -9, 0]", "0 None", "3 True True False", gone, gone]
    assert done.stderr.splitlines()[-1] == "ValueError: wrong"
