"""Faults that are injected from outside: signals, a proxy in front of a real server, a full disk, a second trainer.

Each is survived, or the run stops with one clear line and can be resumed. No rollout is lost or used twice.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from solera.config import parse
from solera.engines.faults import TakenError
from solera.errors import SoleraError
from solera.report.sinks import read_metrics
from solera.run import running
from solera.run.build import CANARY_PROMPTS
from solera.run.parts import Parts
from solera.run.serving import open_server
from solera.training.delivery import CANARY_TOKENS
from tests.command import solera
from tests.test_account import assert_the_checkpoint_agrees
from tests.vllm.conftest import weights_of
from tests.vllm.counters import Checks, counters_of, settled
from tests.vllm.proxy import GENERATE, Proxy, Spoil, SwallowError, TruncateError, choice
from tests.vllm.test_streaming import GROUP, PROMPTS, even_digits, no_rollout_lost_or_used_twice

pytestmark = pytest.mark.vllm
STEPS = 6

RUN = """
run = {{ root = "{root}", name = "run", steps = {steps}, device = "cpu" }}
engine = {{ name = "vllm", urls = {urls}, timeout = {timeout} }}
sampling = {{ max_tokens = 24, temperature = 1.5 }}
learn = {{ lr = 0.003 }}
collect = {{ mode = "stream", prompts = {prompts}, group_size = {group} }}
sync = {{ period = 2 }}
diagnose = {{ every = 0 }}
evaluate = {{ every = 0, problems = 8 }}
checkpoint = {{ every = 2 }}
report = {{ tensorboard = false, progress = false }}
"""


def text_of(root: Path, urls: list[str], timeout: float = 60.0, steps: int = STEPS) -> str:
    return RUN.format(
        root=root, steps=steps, urls=json.dumps(urls), timeout=timeout, prompts=PROMPTS, group=GROUP
    )  # fmt: skip


def at_leisure(prompts: list[str], completions: list[str], **fields: object) -> list[float]:
    """Leaves a server the time to come back."""
    time.sleep(0.3)
    return even_digits(prompts, completions, **fields)


def train(
    root: Path, urls: list[str], timeout: float = 60.0, steps: int = STEPS, reward: Callable = even_digits
) -> str:
    """Train, and return what the console says."""
    console = Console(file=StringIO(), width=1000)
    running.train(parse(text_of(root, urls, timeout, steps), "test"), console, rewards=[reward])
    return console.file.getvalue()  # type: ignore[attr-defined]


def total(root: Path, name: str) -> float:
    return sum(row.get(name, 0.0) for row in read_metrics(root / "run" / "metrics.jsonl"))


def wait_for_rows(root: Path, count: int, over: threading.Event) -> None:
    """Until the run has logged so many rows, or is over."""
    metrics = root / "run" / "metrics.jsonl"
    while not over.wait(0.01) and not (metrics.is_file() and len(metrics.read_text().splitlines()) >= count):
        continue


def processes(url: str) -> dict[str, list[int]]:
    """The server's own processes, by kind: the watchdog, the API server, and what that has started."""
    port, parents = url.rpartition(":")[2].encode(), dict[int, int]()
    found: dict[str, list[int]] = {"watchdog": [], "server": [], "below": []}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"--port" in words and words[words.index(b"--port") + 1] == port:
            dog = any(word.endswith(b"watchdog.py") for word in words)
            found["watchdog" if dog else "server"].append(int(folder.name))
    while more := [
        pid for pid, parent in parents.items()
        if parent in found["server"] + found["below"] and pid not in found["server"] + found["below"]
    ]:  # fmt: skip
        found["below"] += more
    return found


def drop_a_token(said: dict[str, Any]) -> None:
    said["token_ids"].pop()


def drop_a_logprob(said: dict[str, Any]) -> None:
    said["logprobs"]["content"].pop()


def empty_a_logprob(said: dict[str, Any]) -> None:
    said["logprobs"]["content"][0]["logprob"] = None


def no_versions(said: dict[str, Any]) -> None:
    said["weight_versions"] = None


def truncated() -> Spoil:
    numbers = itertools.count(1)

    def spoil(path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if path == GENERATE and answer is not None and next(numbers) == 5:
            raise TruncateError
        return answer

    return spoil


def older_version() -> Spoil:
    """Label later texts with the weights that wrote the first ones."""
    labels = list[str]()

    def relabel(said: dict[str, Any]) -> None:
        labels.extend(span["version"] for span in said["weight_versions"] if span["version"] not in labels)
        if len(labels) > 1:
            for span in said["weight_versions"]:
                span["version"] = labels[0]

    return choice(relabel, 1, 10**6)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (choice(drop_a_token, 5, 5), "tokens and"),
        (choice(drop_a_logprob, 5, 5), "log-probabilities, at most 24 were asked for"),
        (choice(empty_a_logprob, 5, 5), "answered in an unknown form"),
        (choice(no_versions, 5, 5), "did not say which weights wrote every token"),
        (older_version(), "it wrote with version 0, which it should not hold"),
    ],
    ids=["wrong token count", "missing log-probability", "empty log-probability", "no version", "wrong version"],
)
def test_an_answer_that_cannot_be_right_is_not_used(
    proxy: Proxy, second: str, tmp_path: Path, spoil: Spoil, complaint: str
) -> None:
    proxy.spoil = spoil
    said = train(tmp_path, [proxy.url, second])
    assert f"vLLM server {proxy.url} is set aside: " in said and complaint in said, said
    assert total(tmp_path, "engine/0/set_aside") >= 1 and total(tmp_path, "engine/1/set_aside") == 0
    no_rollout_lost_or_used_twice(tmp_path / "run", STEPS)


def test_every_server_writes_the_canary_of_every_sync_and_is_in_the_metrics(urls: list[str], tmp_path: Path) -> None:
    proxies = [Proxy(url) for url in urls]
    asked = [0, 0]

    def counting(number: int) -> Spoil:
        def spoil(path: str, request: bytes, answer: bytes | None) -> bytes | None:
            if path == GENERATE and answer is None:
                asked[number] += json.loads(request)["sampling_params"]["max_tokens"] == CANARY_TOKENS
            return answer

        return spoil

    for number, proxy in enumerate(proxies):
        proxy.spoil = counting(number)
    train(tmp_path, [proxy.url for proxy in proxies])
    for proxy in proxies:
        proxy.stop()
    syncs = 1 + STEPS // 2  # period 2: before steps 0, 2 and 4, and before the last evaluation
    assert asked == [CANARY_PROMPTS * syncs] * 2
    assert total(tmp_path, "engine/0/tokens") > 0 and total(tmp_path, "engine/1/tokens") > 0


def test_a_truncated_answer_is_asked_for_again(proxy: Proxy, second: str, tmp_path: Path) -> None:
    proxy.spoil = truncated()
    train(tmp_path, [proxy.url, second])
    assert total(tmp_path, "engine/0/retries") == 1 and total(tmp_path, "engine/0/set_aside") == 0
    no_rollout_lost_or_used_twice(tmp_path / "run", STEPS)


def test_a_slow_answer_is_asked_for_again(proxy: Proxy, second: str, tmp_path: Path) -> None:
    slow = iter([True])

    def spoil(path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if path == GENERATE and answer is not None and proxy.generated > 8 and next(slow, False):
            time.sleep(30)
        return answer

    proxy.spoil = spoil
    start = time.monotonic()
    train(tmp_path, [proxy.url, second], timeout=10.0)
    assert next(slow, None) is None and time.monotonic() - start < 120
    assert total(tmp_path, "engine/0/retries") >= 1
    no_rollout_lost_or_used_twice(tmp_path / "run", STEPS)


def test_a_refused_connection_leaves_the_others(proxy: Proxy, second: str, tmp_path: Path) -> None:
    def spoil(path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if proxy.generated >= 8:
            threading.Thread(target=proxy.stop).start()
        return answer

    proxy.spoil = spoil
    said = train(tmp_path, [proxy.url, second])
    assert f"vLLM server {proxy.url} is set aside: " in said, said
    assert total(tmp_path, "engine/1/tokens") > total(tmp_path, "engine/0/tokens") > 0
    no_rollout_lost_or_used_twice(tmp_path / "run", STEPS)


def test_with_no_server_left_the_command_stops_with_one_line_and_is_resumed(proxy: Proxy, tmp_path: Path) -> None:
    def spoil(path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if proxy.generated >= 60:
            threading.Thread(target=proxy.stop).start()
        return answer

    proxy.spoil = spoil
    settings = tmp_path / "run.toml"
    settings.write_text(text_of(tmp_path, [proxy.url], timeout=5.0))
    stopped = solera("train", settings)
    assert stopped.returncode == 2
    last = stopped.stderr.strip().splitlines()[-1]
    assert f"no engine is left: vLLM server {proxy.url}" in last and "ConnectError" in last and "--resume" in last
    proxy.spoil = lambda path, request, answer: answer
    proxy.start()
    resumed = solera("train", "--resume", tmp_path / "run")
    assert resumed.returncode == 0, resumed.stderr
    no_rollout_lost_or_used_twice(tmp_path / "run", STEPS)


def not_applied(claimed: bool) -> Spoil:
    """The second update does not reach the server. With `claimed`, the server seems to say that it holds it."""
    updates, claim = [0], dict[str, Any]()

    def spoil(path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if path == "/update_weights" and answer is None:
            updates[0] += 1
            if updates[0] == 2:
                claim.update(json.loads(request)["update_info"])
                raise SwallowError
            claim.clear()
        if claimed and claim and path == "/collective_rpc" and answer is not None:
            said = json.loads(answer)
            for held in said["results"]:
                held |= {"label": claim["label"], "tensors": claim["tensors"]}
            return json.dumps(said).encode()
        return answer

    return spoil


@pytest.mark.parametrize(
    ("claimed", "complaint"),
    [(False, "it missed the sync of version 2"), (True, "does not write with them (log-probabilities differ")],
    ids=["openly", "claimed"],
)
def test_weights_that_are_not_applied_are_noticed(
    proxy: Proxy, second: str, tmp_path: Path, claimed: bool, complaint: str
) -> None:
    proxy.spoil = not_applied(claimed)
    said = train(tmp_path, [proxy.url, second], steps=12, reward=at_leisure)
    assert f"vLLM server {proxy.url} is set aside: " in said and complaint in said, said
    assert f"vLLM server {proxy.url} is back" in said, said
    no_rollout_lost_or_used_twice(tmp_path / "run", 12)


def test_a_second_trainer_in_the_middle_of_a_check_is_no_stale_cache(url: str, parts: Parts, tmp_path: Path) -> None:
    """Another run sends its weights between the two requests that check the prefix cache."""
    other, once = open_server(parts, url, 8, tmp_path / "other"), iter([True])
    proxy = Proxy(url)
    ours = open_server(parts, proxy.url, 8, tmp_path / "ours")

    def spoil(path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if path == GENERATE and answer is None and "cache_salt" in json.loads(request) and next(once, False):
            other.load(weights_of(1, "another"))
        return answer

    proxy.spoil = spoil
    with pytest.raises(TakenError, match="another run uses it; give each run a server of its own"):
        ours.load(weights_of(2))
    for each in (ours, other, proxy):
        (each.stop if isinstance(each, Proxy) else each.close)()


def test_a_second_trainer_takes_a_server_and_the_other_goes_on(
    url: str, second: str, parts: Parts, tmp_path: Path
) -> None:
    """The first run leaves the server to the second, and says so. With no other server it stops, and is resumed. If
    both send weights at the same moment, it can say only that a sync failed; then another one is tried."""
    other = open_server(parts, url, 8, tmp_path / "weights")

    def take(root: Path, over: threading.Event) -> None:
        wait_for_rows(root, 1, over)
        while not over.wait(0.1):
            with contextlib.suppress(SoleraError):  # the first run may send its weights at the same time
                other.load(weights_of(1, "another"))

    def compete(root: Path, urls: list[str]) -> bool:
        """Whether the first run said that there is another."""
        over = threading.Event()
        taking = threading.Thread(target=take, args=(root, over))
        taking.start()
        try:
            said = train(root, urls, steps=2 * STEPS)
        except SoleraError as stopped:
            said = str(stopped)
        finally:
            over.set()
            taking.join()
        if len(urls) == 1:
            assert said.startswith("no engine is left: ") and "\n" not in said and "continue with: " in said
            running.resume(root / "run", Console(file=StringIO()), rewards=[even_digits])
        no_rollout_lost_or_used_twice(root / "run", 2 * STEPS)
        told = "another run uses it; give each run a server of its own" in said
        assert told or "(during the sync of version " in said
        return told

    for urls in ([url, second], [url]):
        assert any(compete(tmp_path / f"{len(urls)}-{attempt}", urls) for attempt in range(3))
    other.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_a_full_disk_stops_the_run_with_one_line_and_it_is_resumed(url: str, small_disk: Path) -> None:
    """The run's folder, the store and the weights on their way to the server are on the disk."""

    over = threading.Event()

    def fill() -> None:
        wait_for_rows(small_disk, 3, over)
        with (small_disk / "filler").open("wb", buffering=0) as file:
            while shutil.disk_usage(small_disk).free:
                file.write(b"0" * 4096)

    filling = threading.Thread(target=fill)
    filling.start()
    settings = small_disk / "run.toml"
    settings.write_text(text_of(small_disk, [url]))
    stopped = solera("train", settings)
    over.set()
    filling.join()
    assert stopped.returncode != 0
    last = stopped.stderr.strip().splitlines()[-1]
    assert "No space left on device" in last or "disk is full" in last, stopped.stderr
    assert "--resume" in last
    (small_disk / "filler").unlink()
    resumed = solera("train", "--resume", small_disk / "run")
    assert resumed.returncode == 0, resumed.stderr
    no_rollout_lost_or_used_twice(small_disk / "run", STEPS)


def signalled(url: str, number: int, kinds: tuple[str, ...]) -> None:
    found = processes(url)
    assert found["server"] and found["below"], found
    for kind in kinds:
        for process in found[kind]:
            os.kill(process, number)


def test_a_stopped_server_is_set_aside_and_comes_back_when_it_goes_on(url: str, second: str, tmp_path: Path) -> None:
    proxy, once = Proxy(second), iter([True])  # the proxy only tells when the server is busy

    def spoil(path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if proxy.generated >= 8 and answer is None and next(once, False):
            signalled(second, signal.SIGSTOP, ("server", "below"))
        return answer

    proxy.spoil = spoil
    try:
        said = train(tmp_path, [url, proxy.url], timeout=8.0)
    finally:
        signalled(second, signal.SIGCONT, ("server", "below"))
        proxy.stop()
    assert f"vLLM server {proxy.url} is set aside: no answer within 8 s (engine.timeout)" in said, said
    no_rollout_lost_or_used_twice(tmp_path / "run", STEPS)
    again = train(tmp_path / "again", [url, second])  # it works again
    assert "set aside" not in again and total(tmp_path / "again", "engine/1/tokens") > 0


def test_a_server_that_is_killed_during_a_sync_is_one(url: str, doomed: str, tmp_path: Path) -> None:
    """All that both servers sampled is in the account. During a sync, no token is sampled. The sync fails, and so do
    the requests in flight: what is noticed first is said."""
    proxies, updates, died = [Proxy(url), Proxy(doomed)], [0], [0]
    checks, first = Checks(proxies), counters_of([url, doomed])

    def spoil(path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if path == "/update_weights" and answer is None:
            updates[0] += 1
            if updates[0] == 2:
                died[0] = settled(doomed)
                signalled(doomed, signal.SIGKILL, ("server", "below"))
        return checks.watch(path, request, answer)

    proxies[1].spoil = spoil
    said = train(tmp_path, [proxy.url for proxy in proxies])
    assert re.search(f"vLLM server {proxies[1].url} is set aside: (it missed the sync of version 2|{GENERATE}: )", said)
    assert total(tmp_path, "engine/1/set_aside") == 1
    no_rollout_lost_or_used_twice(tmp_path / "run", STEPS)
    sampled = counters_of([url])[0] + died[0] - sum(first) - checks.tokens
    account = assert_the_checkpoint_agrees(tmp_path / "run")
    assert 0 <= sampled - account.generated < PROMPTS * GROUP * 24 * 2  # by the stream, after the last account
    for proxy in proxies:
        proxy.stop()
