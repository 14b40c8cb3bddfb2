"""A fork of the server behaves as a new process does."""

import signal
import subprocess

import pytest

from tests.command import Forked, run_script, solera, start

PROGRAM = """
import atexit, os, random, signal, sys, threading, time
print(os.getcwd(), sorted(os.environ.items()), sys.argv[1:], sys.path, __name__, sys.modules["__main__"].__name__)
print(sys.stdout.encoding, sys.stdout.errors, sys.stdout.isatty(), sys.stderr.errors, repr(sys.stdin.read()))
print([(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)])
print(sorted(os.listdir("/proc/self/fd"), key=int)[:3], os.getpgrp(), os.getsid(0), threading.active_count())
atexit.register(print, "at exit", flush=True)
threading.Thread(target=lambda: (time.sleep(0.2), print("of a thread"))).start()
def end():
    {end}
end()
"""
ENDS = {
    "it comes to its end": ("pass", 0),
    "a status": ("sys.exit(7)", 7),
    "a status above 255": ("sys.exit(258)", 2),
    "a word": ("sys.exit('done')", 1),
    "an exception": ("raise ValueError('wrong')", 1),
    "no way out": ("os._exit(3)", 3),
    "a signal": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
}


@pytest.fixture
def sigint_not_ignored():
    """A shell starts background commands with SIGINT ignored, and a new process would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_not_ignored")
@pytest.mark.parametrize("name", ENDS)
def test_it_ends_as_a_new_process_ends(tmp_path, name):
    end, status = ENDS[name]
    (tmp_path / "program.py").write_text(PROGRAM.format(end=end))
    forked, fresh = (
        run_script(tmp_path / "program.py", "a", "b c", cwd=tmp_path, fresh=fresh, COLUMNS="33")
        for fresh in (False, True)
    )
    assert forked.returncode == fresh.returncode == status
    assert forked.stdout.splitlines() == fresh.stdout.splitlines()
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_the_command_says_the_same():
    for arguments in (["--version"], ["trian"], ["train", "--run.stepz", "3"], ["data", "--help"]):
        forked, fresh = solera(*arguments), solera(*arguments, fresh=True)
        told = [(done.returncode, done.stdout, done.stderr) for done in (forked, fresh)]
        assert told[0] == told[1]


@pytest.mark.parametrize("arguments", [["train", "--help"], ["train", "--objective", "ü"]])
def test_in_another_encoding_it_says_the_same(arguments):
    with start(*arguments, PYTHONIOENCODING="ascii") as forked:
        assert isinstance(forked, Forked)
        told = forked.communicate()
    fresh = solera(*arguments, PYTHONIOENCODING="ascii", fresh=True)
    assert (forked.returncode, *told) == (fresh.returncode, fresh.stdout, fresh.stderr)


def test_two_at_once_are_signalled_and_waited_for_apart(tmp_path):
    first, second = (start("generate", "embedded", "--prompts", 20000, "--out", tmp_path / name) for name in "ab")
    assert isinstance(first, Forked) and first.pid != second.pid
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.1)
    assert first.poll() is None
    first.kill()
    assert first.wait(60) == first.poll() == -signal.SIGKILL
    assert second.poll() is None
    second.terminate()
    second.communicate(60)
    assert second.returncode in (130, -signal.SIGTERM)


def test_two_programs_draw_different_numbers(tmp_path):
    (tmp_path / "program.py").write_text("import random, numpy\nprint(random.random(), numpy.random.rand())")
    drawn = [run_script(tmp_path / "program.py").stdout.split() for _ in range(2)]
    assert len({number for numbers in drawn for number in numbers}) == 4


def test_what_is_read_at_the_start_takes_a_new_process():
    with start("--version", HF_HOME="/nowhere") as new, start("--version") as forked:
        assert isinstance(new, subprocess.Popen) and isinstance(forked, Forked)
