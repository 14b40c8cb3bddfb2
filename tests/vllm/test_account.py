"""The account of tokens against vLLM's own counters, read from outside, with two servers and after kills.

What the account says is compared with three things that the run does not control: the servers' metrics, what passed
through proxies, and the store, read with sqlite3 and struct (`tests/test_account.py`).
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import start
from tests.test_account import assert_the_checkpoint_agrees, counted_in, sums, verified
from tests.vllm.counters import Checks, counters_of
from tests.vllm.proxy import Proxy

pytestmark = pytest.mark.vllm
CHECKING = 8
"""Requests with which a sync is checked: two for the cache and two canaries, on two servers."""

RUN = """
run = {{ root = "{root}", name = "run", steps = 10, device = "cpu" }}
model = {{ path = "{model}" }}
engine = {{ name = "vllm", urls = {urls}, timeout = 60 }}
sampling = {{ max_tokens = 24, temperature = 1.0 }}
collect = {{ {collect}, prompts = 4, group_size = 4 }}
sync = {{ period = 2 }}
reward = {{ functions = ["{reward}:even_digits"] }}
diagnose = {{ every = 0 }}
evaluate = {{ every = 4, problems = 8 }}
checkpoint = {{ every = 3 }}
report = {{ tensorboard = false, progress = false }}
"""


@pytest.fixture
def proxies(urls: list[str]) -> Iterator[list[Proxy]]:
    made = [Proxy(url) for url in urls]
    yield made
    for proxy in made:
        proxy.stop()


def rows_in(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


@pytest.mark.parametrize("mode", ["lock_step", "stream"])
def test_two_servers_and_a_run_that_is_killed(
    urls: list[str], proxies: list[Proxy], rambling: Path, tmp_path: Path, mode: str
) -> None:
    run, file = tmp_path / "run", tmp_path / "run.toml"
    (tmp_path / "reward.py").write_text(
        "def even_digits(completions, **_):\n"
        "    return [sum(letter in '02468' for letter in text) / max(1, len(text)) for text in completions]\n"
    )
    collect = 'mode = "stream", max_age = 3' if mode == "stream" else 'mode = "lock_step"'
    names = json.dumps([proxy.url for proxy in proxies])
    file.write_text(
        RUN.format(root=tmp_path, model=rambling, urls=names, collect=collect, reward=tmp_path / "reward.py")
    )
    checks, first = Checks(proxies), counters_of(urls)

    def sampled() -> int:
        return sum(counters_of(urls)) - sum(first) - checks.tokens

    process, lost = start("train", file), 0
    for kill in (2, 6):
        while rows_in(run) < kill and process.poll() is None:
            time.sleep(0.01)
        asked = sum(proxy.generated for proxy in proxies)
        while sum(proxy.generated for proxy in proxies) < asked + CHECKING + 2 and process.poll() is None:
            time.sleep(0.001)  # until responses are being written
        # A kill between the readings of two counters would lose what the first server has sampled since the last one.
        begun = time.monotonic()
        while not checks.between_readings and time.monotonic() < begun + 10 and process.poll() is None:
            time.sleep(0.001)
        assert process.poll() is None, process.stderr and process.stderr.read()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        total, counts, before = sampled(), counted_in(run), aborted_before(run)
        stored = sum(sums(run, 10**6, 10**9).values())
        lost = total - stored - before - sum(counts[name] for name in ("probe", "canary", "evaluation", "unstored"))
        process = start("train", "--resume", run)
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    account = assert_the_checkpoint_agrees(run)
    cut = 0 if mode == "lock_step" else 2 * CHECKING  # a check of the cache that a kill interrupts counts as lost
    assert 0 <= account.lost - lost <= cut and lost > 0
    assert account.difference == 0 and "does not balance" not in said
    flying = sampled() - account.generated  # sampled after the last account, by a stream that goes on
    assert flying == 0 if mode == "lock_step" else -cut <= flying < 4 * 16 * 24
    assert verified(run).returncode == 0
    shares = [sum(json.loads(line)[f"engine/{n}/tokens"] for line in metrics(run)) for n in range(2)]
    assert min(shares) > 0  # both have served


def metrics(run: Path) -> list[str]:
    return [line for line in (run / "metrics.jsonl").read_text().splitlines() if "engine/0/tokens" in line]


def aborted_before(run: Path) -> int:
    """Dropped as aborted according to the last account."""
    file = run / "account.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return json.loads(lines[-1])["tokens/dropped/aborted"] if lines else 0
