"""The processes that grade go on after an interruption, and with many open files."""

import os
import resource
import signal

import pytest

from solera.tasks.judges import Judge


@pytest.fixture
def judge():
    judge = Judge("solera.tasks.python_tool", None)
    yield judge
    judge._end()


def code(text: str):
    return "runner", (100,), (text,), 20, False


def test_a_reply_that_nobody_waited_for_is_not_the_reply_to_the_next_question(judge):
    def interrupt(*_):
        raise KeyboardInterrupt

    assert judge.ask(code("print('first')")) == "first\n"
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            judge.ask(code("import time; time.sleep(2); print('late')"))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert judge.ask(code("print('next')")) == "next\n"


def test_a_process_that_was_interrupted_while_it_started_is_not_asked(judge, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(judge, "_reply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            judge.ask(code("print('first')"))
    assert judge.ask(code("print('next')")) == "next\n"


def test_more_than_1024_open_files(judge):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert judge.ask(code("print('here')")) == "here\n"
        assert judge.ask(code("print('again')")) == "again\n"
    finally:
        for file in held:
            os.close(file)
        judge._end()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
