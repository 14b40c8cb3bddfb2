"""The account of tokens against vLLM's own counters, read from outside, with two servers and after kills.

What the account says is compared with three things that the run does not control: the servers' metrics, what passed
through proxies, and the store, read with sqlite3 and struct (`tests/test_account.py`).
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from solera.folder.account import Account
from tests.command import start
from tests.test_account import assert_the_checkpoint_agrees, counted_in, sums, verified
from tests.vllm.counters import Checks, counters_of
from tests.vllm.proxy import GENERATE, Proxy

pytestmark = pytest.mark.vllm
CHECKING = 8
"""Requests with which a sync is checked: two for the cache and two canaries, on two servers."""
SLOW = 5.0
"""Seconds without a step after which a run is taken to wait for the answers that are held back."""

RUN = """
run = {{ root = "{root}", name = "run", steps = {steps}, device = "cpu" }}
model = {{ path = "{model}" }}
engine = {{ name = "vllm", urls = {urls}, timeout = 60 }}
sampling = {{ max_tokens = 24, temperature = 1.0 }}
collect = {{ {collect}, prompts = 4, group_size = 4 }}
sync = {{ period = 2 }}
reward = {{ functions = ["{reward}:even_digits"] }}
diagnose = {{ every = 0 }}
evaluate = {{ every = 4, problems = 8 }}
checkpoint = {{ every = {every} }}
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


@pytest.fixture
def written(tmp_path: Path, rambling: Path, proxies: list[Proxy]) -> Callable[..., Path]:
    """Writes the config of a run on both servers, with these settings of `collect`, `checkpoint.every` and
    `run.steps`."""
    (tmp_path / "reward.py").write_text(
        "def even_digits(completions, **_):\n"
        "    return [sum(letter in '02468' for letter in text) / max(1, len(text)) for text in completions]\n"
    )

    def write(collect: str, every: int, steps: int = 10) -> Path:
        names, file = json.dumps([proxy.url for proxy in proxies]), tmp_path / "run.toml"
        text = RUN.format(
            root=tmp_path, model=rambling, urls=names, collect=collect, reward=tmp_path / "reward.py", every=every,
            steps=steps,
        )  # fmt: skip
        file.write_text(text)
        return file

    return write


class Outside:
    """What both servers have sampled for the run, by their own counters."""

    def __init__(self, urls: list[str], proxies: list[Proxy], run: Path) -> None:
        self.urls = urls
        self.run = run
        self.checks = Checks(proxies)
        self.first = sum(counters_of(urls))

    def sampled(self) -> int:
        return sum(counters_of(self.urls)) - self.first - self.checks.tokens

    def lost(self) -> int:
        """What the killed run has lost: sampled, neither stored nor for another purpose, and not aborted before."""
        counts, stored = counted_in(self.run), sum(sums(self.run, 10**6, 10**9).values())
        other = sum(counts[name] for name in ("probe", "canary", "evaluation", "unstored"))
        return self.sampled() - stored - other - aborted_before(self.run)


@pytest.mark.parametrize("mode", ["lock_step", "stream"])
def test_two_servers_and_a_run_that_is_killed(
    urls: list[str], proxies: list[Proxy], written: Callable[..., Path], tmp_path: Path, mode: str
) -> None:
    run, outside = tmp_path / "run", Outside(urls, proxies, tmp_path / "run")
    file = written('mode = "stream", max_age = 3' if mode == "stream" else 'mode = "lock_step"', 3)
    process, lost = start("train", file), 0
    for kill in (2, 6):
        while rows_in(run) < kill and process.poll() is None:
            time.sleep(0.01)
        asked = sum(proxy.generated for proxy in proxies)
        while sum(proxy.generated for proxy in proxies) < asked + CHECKING + 2 and process.poll() is None:
            time.sleep(0.001)  # until responses are being written
        assert process.poll() is None, process.stderr and process.stderr.read()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        lost = outside.lost()
        process = start("train", "--resume", run)
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    account = assert_the_checkpoint_agrees(run)
    cut = 0 if mode == "lock_step" else 2 * CHECKING  # a check of the cache that a kill interrupts counts as lost
    assert 0 <= account.lost - lost <= cut and lost > 0
    assert account.difference == 0 and "does not balance" not in said
    flying = outside.sampled() - account.generated  # sampled after the last account, by a stream that goes on
    assert flying == 0 if mode == "lock_step" else -cut <= flying < 4 * 16 * 24
    assert verified(run).returncode == 0
    shares = [sum(json.loads(line)[f"engine/{n}/tokens"] for line in metrics(run)) for n in range(2)]
    assert min(shares) > 0  # both have served


def test_a_kill_between_the_readings_of_two_counters_loses_no_count(
    urls: list[str], proxies: list[Proxy], written: Callable[..., Path], tmp_path: Path
) -> None:
    """The first server's answers are held back, so that it has sampled tokens which the run never gets. The run reads
    its counter, asks for the second one's, and is killed before the answer."""
    run, outside = tmp_path / "run", Outside(urls, proxies, tmp_path / "run")
    process = start("train", written('mode = "stream", max_age = 3', 2, steps=24))
    between = BetweenReadings(proxies, outside)
    while rows_in(run) < 2 and process.poll() is None:
        time.sleep(0.01)
    between.armed = True
    assert between.reached.wait(120), process.poll()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    between.leave()
    lost = outside.lost()
    assert resumed(run).lost - lost in range(2 * CHECKING) and lost >= between.held > 0


class BetweenReadings:
    """Stops a run when it has read the counter of the first server and asks for that of the second. Begins when it is
    `armed`. The run may have some batches ready then, and takes its next accounts while no server is at work."""

    def __init__(self, proxies: list[Proxy], outside: Outside) -> None:
        self.armed = self.holding = False
        self.held = 0
        """Tokens of answers that the first server has given and the run has not got."""
        self.reached = threading.Event()
        self._run, self._checks, self._first = outside.run, outside.checks, proxies[0]
        proxies[0].spoil, proxies[1].spoil = self._at_first, self._at_second

    def leave(self) -> None:
        self.armed = self.holding = False

    def _at_first(self, path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if path == "/metrics" and answer is None and self.armed:
            self._hold_some_answers()
        if path == GENERATE and answer is not None and json.loads(request)["sampling_params"]["max_tokens"] > 2:
            self._delay(len(json.loads(answer)["choices"][0]["token_ids"]))
        return self._checks.watch(path, request, answer)

    def _at_second(self, path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if path == "/metrics" and answer is None and self.held:
            self.reached.set()
            self._wait()
        return self._checks.watch(path, request, answer)

    def _delay(self, tokens: int) -> None:
        """Answer late, so that there are answers to hold when the run takes its account, unless the run needs this one
        before."""
        steps, end = rows_in(self._run), time.monotonic() + SLOW
        while self.armed and not self.holding and time.monotonic() < end:
            time.sleep(0.01)
            if rows_in(self._run) > steps:
                steps, end = rows_in(self._run), time.monotonic() + SLOW
        if self.holding:
            self.held += tokens
            self._wait()

    def _hold_some_answers(self) -> None:
        """Hold answers until the server has counted them. If there are none, let the run go on to its next account."""
        self.holding = True
        counters_of([self._first.target.geturl()])
        self.holding = self.held > 0

    def _wait(self) -> None:
        while self.holding:
            time.sleep(0.01)


def resumed(run: Path) -> Account:
    """The account of a killed run that was resumed and has ended."""
    process = start("train", "--resume", run)
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    account = assert_the_checkpoint_agrees(run)
    assert account.difference == 0 and "does not balance" not in said
    assert verified(run).returncode == 0
    return account


def metrics(run: Path) -> list[str]:
    return [line for line in (run / "metrics.jsonl").read_text().splitlines() if "engine/0/tokens" in line]


def aborted_before(run: Path) -> int:
    """Dropped as aborted according to the last account."""
    file = run / "account.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return json.loads(lines[-1])["tokens/dropped/aborted"] if lines else 0
