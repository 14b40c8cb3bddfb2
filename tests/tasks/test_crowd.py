"""Grading in other processes. Expected: the hand-written verdicts of `pairs/number.py`."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from solera.config import Config, RewardConfig, TaskConfig
from solera.objectives.table import resolve_config
from solera.tasks import crowd
from solera.tasks.crowd import FEW, Crowd
from solera.tasks.judges import judges
from solera.tasks.rewards import build_rewards
from tests.tasks.pairs.number import NUMBER
from tests.tasks.parts import Letters, Listed, completion

MANY = NUMBER[: 3 * FEW]


@pytest.fixture
def new_processes():
    judges.cache_clear()
    yield
    for process in children():
        os.killpg(process, signal.SIGKILL)
    judges.cache_clear()


async def verdicts(asked: Crowd, pairs) -> list[bool]:
    return await asyncio.gather(*(asked.grade((text, answer, True)) for text, answer, _ in pairs))


async def started(asked: Crowd) -> None:
    """Ask until the processes have started. All that is asked meanwhile is graded here."""
    deadline = time.monotonic() + 100
    while not asked._running() and time.monotonic() < deadline:
        assert await verdicts(asked, MANY) == [right for *_, right in MANY]
        await asyncio.sleep(0.05)
    assert asked._running()


def not_here(_):
    raise AssertionError("graded in this process")


def children() -> list[int]:
    """Processes of graders that this one has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, status = (folder / "cmdline").read_bytes().split(b"\0"), (folder / "stat").read_text().split(") ")[1]
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        if crowd.__name__.encode() in words and int(status.split()[1]) == os.getpid():
            found.append(int(folder.name))
    return found


def test_other_processes_give_the_verdicts_in_order(new_processes):
    async def grade() -> list[bool]:
        asked = Crowd("number")
        await started(asked)
        asked._grade_here = not_here
        return await verdicts(asked, NUMBER)

    assert asyncio.run(grade()) == [right for *_, right in NUMBER]


def test_a_cut_off_response_is_graded_as_one(new_processes):
    """Without an end, `It is 4` might have become `It is 42`."""

    async def grade() -> list[list[bool]]:
        asked = Crowd("number")
        await started(asked)
        asked._grade_here = not_here
        each = [asyncio.gather(*(asked.grade(("It is 4", "4", ends)) for _ in range(FEW))) for ends in (True, False)]
        return [await some for some in each]

    assert asyncio.run(grade()) == [[True] * FEW, [False] * FEW]


def test_few_responses_start_no_process(new_processes):
    few = MANY[: FEW - 1]
    assert asyncio.run(verdicts(Crowd("number"), few)) == [right for *_, right in few]
    assert children() == []


def test_a_killed_process_costs_no_verdict(new_processes):
    """Its responses are graded here. Later ones are graded by another process that takes its place."""

    async def grade() -> None:
        asked = Crowd("number")
        await started(asked)
        for _ in range(3):
            for process in (killed := children()):
                os.killpg(process, signal.SIGKILL)
            for _ in range(2):  # the first question finds out, the second starts a process
                assert await verdicts(asked, MANY) == [right for *_, right in MANY]
            assert killed and {*children()} - {*killed}

    asyncio.run(grade())


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("/bin/false", "the grading process of solera.tasks.crowd did not start: it computed for too long, or its"),
        ("/no/python", "[Errno 2] No such file or directory: '/no/python'"),
    ],
)
def test_processes_that_do_not_start_are_not_needed(python, why, new_processes, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", python)

    async def grade() -> None:
        asked = Crowd("number")
        deadline = time.monotonic() + 60
        while not caplog.records and time.monotonic() < deadline:
            assert await verdicts(asked, MANY) == [right for *_, right in MANY]
            await asyncio.sleep(0.05)
        assert await verdicts(asked, MANY) == [right for *_, right in MANY]
        assert not asked._running()

    asyncio.run(grade())
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(f"solera: {why}") and said.endswith(": responses are graded one after the other")


@pytest.mark.parametrize(
    ("cores", "function", "many"), [(16, "number", True), (16, "exact", False), (2, "number", False)]
)
def test_a_slow_grader_uses_spare_cores(cores, function, many, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert (crowd.crowd_of(function) is not None) == many


def test_rewards_come_from_other_processes(new_processes, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    problems = Listed(*({"prompt": "?", "answer": answer} for _, answer, _ in MANY))
    config = Config(task=TaskConfig("jsonl", path="data.jsonl"), reward=RewardConfig(("number", "exact"), (2.0, 0.5)))
    rewards = build_rewards(resolve_config(config), Letters(), problems)

    async def grade() -> list[list[float]]:
        check, _ = rewards.checks
        await started(check.crowd)
        check.crowd._grade_here = not_here
        asked = [rewards(problems.prompt(i), completion(text)) for i, (text, *_) in enumerate(MANY)]
        return [[reward.value for reward in given] for given in await asyncio.gather(*asked)]

    assert asyncio.run(grade()) == [[2.0 * right, 0.5 * (text.strip() == answer)] for text, answer, right in MANY]
