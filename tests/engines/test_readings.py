"""Readings of servers' counters that survive a kill. The servers here are small ones that have only the counter."""

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from solera.engines.vllm.counter import TokenCounter
from solera.engines.vllm.http import Http
from solera.engines.vllm.readings import Readings
from solera.errors import SoleraError
from solera.folder.counts import Counts


class Server:
    """Says what vLLM says about its counter."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.started = tokens, 5.0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                lines = f'vllm:generation_tokens_total{{engine="0"}} {server.tokens}.0\n'
                page = f"{lines}process_start_time_seconds {server.started}\n".encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, *_: object) -> None:
                return

        self.listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.listening.server_port}"
        threading.Thread(target=self.listening.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.listening.shutdown()
        self.listening.server_close()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """Both have sampled for others before."""
    made = [Server(1000), Server(2000)]
    yield made
    for server in made:
        server.close()


class Process:
    """A process of a run: opens the counters, and then counts like `run/build.py` and the account."""

    def __init__(self, folder: Path, servers: list[Server], holds: str = "run") -> None:
        self.counts = Counts(folder / "tokens.count")
        readings = Readings(folder / "server", self.counts)
        self.counters = [TokenCounter(Http(server.url, 10.0), readings, holds) for server in servers]
        self.before = self.counts["engine"] - sum(counter.total for counter in self.counters)
        self.count()

    def count(self) -> int:
        self.counts.raise_to("engine", self.before + sum(counter.read() for counter in self.counters))
        return self.counts["engine"]

    def hold(self, lineage: str = "run") -> None:
        for counter in self.counters:
            counter.belongs_to(lineage)


@pytest.fixture
def begun(tmp_path: Path, servers: list[Server]) -> Process:
    """A run that has counted 30 + 50 tokens."""
    process = Process(tmp_path, servers, "")
    process.hold()
    servers[0].tokens, servers[1].tokens = 1030, 2050
    assert process.count() == 80
    return process


def test_a_killed_run_counts_on(tmp_path, servers, begun):
    servers[0].tokens += 7
    servers[1].tokens += 11
    assert Process(tmp_path, servers).count() == 98
    servers[1].tokens += 100
    assert Process(tmp_path, servers).count() == 198


@pytest.mark.parametrize("read", [(0,), (1,), (0, 1), (0, 0)])
def test_a_kill_between_readings_or_before_they_are_counted(tmp_path, servers, begun, read):
    servers[0].tokens += 7
    servers[1].tokens += 11
    for number in read:
        begun.counters[number].read()
    servers[0].tokens += 100
    for _ in range(2):  # killed again at once: nothing is counted twice
        again = Process(tmp_path, servers)
        assert again.counts["engine"] == 198
    servers[0].tokens += 1000
    assert again.count() == 1198


def test_a_kill_at_any_moment_of_a_resume(tmp_path, servers, begun):
    """The files after each of them was written, copied away as a kill would leave them."""
    servers[0].tokens += 7
    servers[1].tokens += 11
    counts = Counts(tmp_path / "tokens.count")
    readings = Readings(tmp_path / "server", counts)
    for number, server in enumerate(servers):
        TokenCounter(Http(server.url, 10.0), readings, "run").read()
        shutil.copytree(tmp_path, tmp_path.parent / f"killed-{number}", dirs_exist_ok=True)
    assert [Process(tmp_path.parent / f"killed-{number}", servers).count() for number in range(2)] == [98, 98]


def test_tokens_of_a_check_are_left_out_once(tmp_path, servers, begun):
    """Two tokens of a check are sampled, and five of the run, before or after a reading and a kill."""
    servers[0].tokens += 2
    begun.counters[0].exclude(2)
    servers[0].tokens += 5
    assert Process(tmp_path, servers).count() == 85
    assert Process(tmp_path, servers).count() == 85
    assert begun.count() == 85


def test_returned_tokens_that_a_server_did_not_count_stay_counted(tmp_path, servers, begun):
    begun.counts.add("engine", 40)
    servers[0].tokens += 7
    begun.counters[0].read()
    assert Process(tmp_path, servers).count() == 127


@pytest.mark.parametrize("changed", ["restarted", "weights of another run"])
def test_a_server_that_others_used_begins_anew(tmp_path, servers, begun, changed):
    if changed == "restarted":
        servers[0].started, servers[0].tokens = 9.0, 400
    else:
        servers[0].tokens += 400
    servers[1].tokens += 11
    again = Process(tmp_path, servers, "run" if changed == "restarted" else "other")
    expected = 91 if changed == "restarted" else 80  # the second one holds other weights, too
    assert again.count() == expected
    again.hold()
    servers[0].tokens += 3
    assert again.count() == expected + 3
    assert Process(tmp_path, servers).count() == expected + 3


def test_files_of_an_earlier_version_are_continued(tmp_path, servers):
    """One file for each server, without totals. The second had two tokens of a check after its reading."""
    counts = Counts(tmp_path / "tokens.count")
    counts.add("engine", 80)
    (tmp_path / "server").mkdir()
    for number, (server, tokens, excluded) in enumerate(zip(servers, (1030, 2050), (0, 2), strict=True)):
        kept = [server.url, [tokens, 5.0], excluded, "run"]
        (tmp_path / "server" / f"counter-{number}.json").write_text(json.dumps(kept))
    servers[0].tokens, servers[1].tokens = 1037, 2063
    for _ in range(2):
        assert Process(tmp_path, servers).count() == 80 + 7 + 11
    assert [file.name for file in (tmp_path / "server").iterdir()] == ["counters.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"servers": {}}', '{"elsewhere": 0, "servers": {"u": [1]}}'])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "counters.json").write_text(text)
    with pytest.raises(SoleraError, match=r"counters\.json: the file is damaged; delete it"):
        Readings(tmp_path, Counts())
