"""Names of a hub: refused at once where nobody answers, waited for where somebody does, and read from the cache."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from solera.models.source import EMBEDDED

ROOT = Path(__file__).parents[1]
COMMIT, NEXT = "0" * 39 + "1", "0" * 39 + "2"


@pytest.fixture
def closed() -> str:
    """An address at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


class Hub(BaseHTTPRequestHandler):
    """A hub that holds the embedded model as `owner/name`, and takes its time."""

    seconds = 0.0
    moved = False
    """Whether its branch has another revision by now, whose texts end with another token."""
    asked: ClassVar[list[str]] = []
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        time.sleep(self.seconds)
        Hub.asked.append(f"{self.command} {self.path}")
        file = EMBEDDED / re.sub("^.*/resolve/[^/]*/", "", self.path)
        found = self.path == "/" or (self.path.startswith("/owner/name/") and file.is_file())
        body = file.read_bytes() if found and file.is_file() else b""
        commit = NEXT if Hub.moved and f"/{COMMIT}/" not in self.path else COMMIT
        if commit == NEXT and file.name == "generation_config.json":
            body = body.replace(b'"eos_token_id": 1', b'"eos_token_id": 2')
        self.send_response(200 if found else 404)
        tag = f'"{file.name}-{commit}"'
        for name, value in {"ETag": tag, "X-Repo-Commit": commit, "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        if not found:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


@contextmanager
def serving() -> Iterator[str]:
    """The address of a hub, which then closes."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def hub():
    with serving() as address:
        yield address


def surroundings(cache: Path, **environment: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_") and "proxy" not in name}
    return {**kept, "PYTHONPATH": str(ROOT), "HF_HOME": str(cache), "OMP_NUM_THREADS": "1", **environment}


def python(*arguments: str, cache: Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=cwd,
        env=surroundings(cache, **environment),
    )  # fmt: skip


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_model_of_a_hub_that_does_not_answer_is_refused_in_one_line_before_torch_is_loaded(command, closed, tmp_path):
    program = (
        "import sys, solera.cli; status = solera.cli.main({}); sys.exit(9 if 'torch' in sys.modules else status)"
    ).format(["train", "--model", "owner/name"] if command == "train" else ["eval", "owner/name"])
    start = time.perf_counter()
    done = python("-c", program, cache=tmp_path, HF_ENDPOINT=closed)
    assert time.perf_counter() - start < 20  # the hub's own library tries for 23 s, twice
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line == (
        "solera: model owner/name: the hub cannot be reached (or HF_HUB_OFFLINE is set), and there is no copy in its "
        "cache: "
        "give a folder, or download it first: hf download owner/name"
    )


def test_data_of_a_hub_that_does_not_answer_is_refused_in_one_line(closed, tmp_path):
    start = time.perf_counter()
    done = python(
        "-m", "solera.cli", "train", "--task", "gsm8k", "--task.path", "owner/sums:main", cache=tmp_path,
        HF_ENDPOINT=closed,
    )  # fmt: skip
    assert time.perf_counter() - start < 20
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == (
        "solera: owner/sums:main: the hub cannot be reached (or HF_HUB_OFFLINE is set), and there is no copy in its "
        "cache: "
        "give a file or a folder, or load it once with network access"
    )


@pytest.mark.parametrize("named", [("--model", "owner/name"), ("--task", "gsm8k", "--task.path", "owner/name")])
def test_a_secure_connection_that_fails_is_told_as_that(hub, tmp_path, named):
    """The hub speaks plain HTTP, where TLS is expected."""
    secure = hub.replace("http:", "https:")
    done = python("-m", "solera.cli", "train", *named, "--run.steps", "1", cache=tmp_path, HF_ENDPOINT=secure)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "owner/name: the hub answers, but a secure connection fails: [SSL: " in line
    assert "cannot be reached" not in line


@pytest.mark.parametrize("name", ["a/b..c", "a--b/c", "a/b.git"])
def test_a_name_that_no_hub_would_have_is_one_line(closed, tmp_path, name):
    done = python("-m", "solera.cli", "train", "--model", name, "--run.steps", "1", cache=tmp_path, HF_ENDPOINT=closed)
    assert done.returncode == 2
    assert done.stderr.startswith(f"solera: model {name}: the hub cannot be reached")
    assert done.stderr.count("\n") == 1


def test_a_hub_that_does_not_answer_is_called_once(closed, tmp_path):
    calling = """
from huggingface_hub import get_session
from solera import hub
session, made = get_session(), []
usual = session.head
session.head = lambda *given, **more: made.append(1) or usual(*given, **more)
for _ in range(3):
    try: hub.call()
    except ConnectionError as error: print(error.args[0][:7])
print(len(made))
"""
    done = python("-c", calling, cache=tmp_path, HF_ENDPOINT=closed)
    assert done.stdout == "the hub\nthe hub\nthe hub\n1\n", done.stderr


LOADING = """
import os, sys, torch
from solera.models.loading import load
for line in sys.stdin:
    if not os.fork():  # a process asks the hub only once whether it answers
        print(len(load("owner/name", torch.device("cpu"))[1].encode("12+34=")), flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_hub_that_answers_too_late_is_reached_all_the_same(hub, tmp_path):
    Hub.seconds = 1.5
    calling = "from solera import hub; hub.call(); print('reached')"
    done = python("-c", calling, cache=tmp_path, HF_ENDPOINT=hub, HF_HUB_ETAG_TIMEOUT="1")
    assert (done.stdout, done.stderr) == ("reached\n", "")


def test_a_model_comes_from_the_hub_and_from_its_copy_where_the_hub_does_not_answer(hub, tmp_path):
    Hub.seconds = 0.0
    with serving() as address:
        loading = subprocess.Popen(
            [sys.executable, "-c", LOADING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=ROOT, env=surroundings(tmp_path, HF_ENDPOINT=address),
        )  # fmt: skip
        loading.stdin.write("while the hub answers\n")
        loading.stdin.flush()
        assert loading.stdout.readline() == "6\n"
    out, err = loading.communicate("after it has closed\n")
    assert (out, err, loading.returncode) == ("6\n", "", 0)
    finding = "from solera.models.source import obtain; print(obtain('owner/name'))"
    asked_not_to = python("-c", finding, cache=tmp_path, HF_ENDPOINT=hub, HF_HUB_OFFLINE="1")
    assert (Path(asked_not_to.stdout.strip()) / "config.json").is_file()


PINNING = """
import pickle, sys, torch
from pathlib import Path
from solera.config import LoraConfig
from solera.models.loading import Source, save
adapters = Path(sys.argv[1]).with_name("adapters")
named, above = Source("owner/name"), Source(str(adapters))
save(*Source("owner/name", LoraConfig(rank=2)).load(torch.device("cpu")), adapters)
with open(sys.argv[1], "wb") as file:
    pickle.dump([source.absolute().pinned() for source in (named, above)], file)
"""
BECOMING_A_RANK = """
import pickle, sys, torch
from safetensors.torch import load_file
from solera.errors import SoleraError
from solera.models.unloaded import Unloaded
with open(sys.argv[1], "rb") as file:
    sources = pickle.load(file)
expected = load_file(sys.argv[2])
for adapted, source in enumerate(sources):
    try:
        made = source.for_rank(True)
    except SoleraError as error:
        sys.exit(str(error))
    assert isinstance(made, Unloaded) and (made.adapter is not None) == adapted
    made.fill(made.module)
    whole, _ = source.load(torch.device("cpu"))
    for module in (made.module, whole.module):
        found = {name.replace(".base_layer", ""): p for name, p in module.named_parameters() if "lora_" not in name}
        assert found and all(torch.equal(parameter, expected[name]) for name, parameter in found.items())
    print({str(file.parent) for file in made.files.values()}.pop())
"""


def test_ranks_leave_the_weights_of_a_hub_name_in_the_cached_files_and_other_machines_fetch_the_same_ones(
    hub, closed, tmp_path
):
    """The model itself, and adapters above it."""
    Hub.seconds = 0.0
    pinned, weights = tmp_path / "pinned", str(EMBEDDED / "model.safetensors")
    first, other, third = (tmp_path / name for name in ("first", "other", "third"))
    done = python("-c", PINNING, str(pinned), cache=first, HF_ENDPOINT=hub)
    assert done.returncode == 0, done.stderr
    become = ["-c", BECOMING_A_RANK, str(pinned), weights]
    here = python(*become, cache=first, HF_ENDPOINT=closed)
    snapshot = f"hub/models--owner--name/snapshots/{COMMIT}"
    assert here.stdout == f"{first / snapshot}\n" * 2, here.stderr
    first.rename(tmp_path / "away")  # as on a machine that does not see this cache
    Hub.asked.clear()
    there = python(*become, cache=other, HF_ENDPOINT=hub)
    assert there.stdout == f"{other / snapshot}\n" * 2, there.stderr
    fetched = {path.split("/")[-2] for path in Hub.asked if "/resolve/" in path}
    assert fetched == {COMMIT}  # not what the hub's branch has by then
    again = python(*become, cache=other, HF_ENDPOINT=closed)
    assert again.stdout == there.stdout, again.stderr
    nowhere = python(*become, cache=third, HF_ENDPOINT=closed)
    assert nowhere.returncode == 1 and nowhere.stderr == (
        f"model owner/name on the machine {socket.gethostname()}: the hub cannot be reached (or HF_HUB_OFFLINE is "
        "set), and there is no copy in its cache: give a folder that every machine has, or download it there: "
        f"hf download owner/name --revision {COMMIT}\n"
    )


CHOOSING = """
import pickle, sys
from dataclasses import replace
from pathlib import Path
from solera import config as configuration
from solera.run.parts import load_parts, resolved
from solera.run.ranking import engine_spec
config = configuration.override(configuration.Config(), "model", path="owner/name")
parts = load_parts(resolved(configuration.override(config, "cluster", engines=1)))
served = configuration.override(parts.config, "engine", name="vllm")
with open(sys.argv[1], "wb") as file:
    pickle.dump([engine_spec(each, Path()) for each in (parts, replace(parts, config=served))], file)
"""
OPENING = """
import pickle, sys
import torch
from solera.models.loading import load
with open(sys.argv[1], "rb") as file:
    own, server = pickle.load(file)
print(own.source.load(torch.device("cpu"))[1].end_token_ids, server.source.where())
print(load("owner/name", torch.device("cpu"))[1].end_token_ids)
"""


def test_engines_that_start_after_the_hub_has_another_revision_have_the_one_that_the_controller_loaded(
    hub, tmp_path, monkeypatch
):
    """On the controller's machine, and on one that does not see its cache."""
    monkeypatch.setattr(Hub, "seconds", 0.0)
    chosen, first, other = (tmp_path / name for name in ("chosen", "first", "other"))
    done = python("-c", CHOOSING, str(chosen), cache=first, HF_ENDPOINT=hub)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(Hub, "moved", True)
    for cache in (first, other):
        opened = python("-c", OPENING, str(chosen), cache=cache, HF_ENDPOINT=hub)
        if cache == first:
            first.rename(tmp_path / "away")
        snapshot = cache / f"hub/models--owner--name/snapshots/{COMMIT}"
        assert opened.stdout.splitlines() == [f"(1,) {snapshot}", "(1, 2)"], opened.stderr


CACHING = """
import glob, json, os
import datasets
datasets.load_dataset("json", data_files="rows.jsonl", cache_dir="made")
(made,) = glob.glob("made/json/*/0.0.0/*/")
copy = os.path.join(os.environ["HF_HOME"], "datasets/owner___sums/main/0.0.0/1")
os.makedirs(os.path.dirname(copy))
os.rename(made, copy)
os.rename(f"{copy}/json-train.arrow", f"{copy}/sums-train.arrow")
with open(f"{copy}/dataset_info.json", "r+") as file:
    information = json.load(file) | {"config_name": "main", "dataset_name": "sums"}
    file.seek(0), file.truncate(), json.dump(information, file)
from solera.tasks.sources import find_splits
print(find_splits("owner/sums:main"))
"""


def test_data_comes_from_its_copy_where_the_hub_does_not_answer(closed, tmp_path):
    """The copy is laid out here as `datasets` lays out what it has fetched."""
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?"}\n')
    done = python("-c", CACHING, cache=tmp_path, cwd=tmp_path, HF_ENDPOINT=closed)
    assert done.stdout == "{'train': [('owner/sums:main:train:1', b'{\"question\": \"1+1?\"}')]}\n", done.stderr
