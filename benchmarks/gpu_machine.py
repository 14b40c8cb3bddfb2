#!/usr/bin/env python3
"""Measure on a GPU machine that has torch and transformers, but no package index, and that is lent for minutes.

    python benchmarks/gpu_machine.py pack .carry/base --files data/gsm8k smollm2.gguf convert.py
    python benchmarks/gpu_machine.py pack .carry/vllm --packages vllm.txt
    python benchmarks/gpu_machine.py unpack .carry/base/1      # there, each folder; the last one unpacks everything
    python benchmarks/gpu_machine.py run 570 OUT convert,warm problems,bits     # there, in the repository
    python benchmarks/gpu_machine.py run 570 OUT speed:10 sweep:gsm8k_second:3

If a process with a session of its own outlives a call, the machine can work while more folders arrive:

    cp -r . /tmp/repo; cd /tmp/repo; setsid python benchmarks/gpu_machine.py run 440 /tmp/out tests >/tmp/log 2>&1 &

`pack` writes packages and files as numbered folders of limited size; it needs uv, tar and xz. `run` takes a limit in
seconds, a folder, and *lanes*: parts of benchmarks/gpu_parts.toml, joined by commas. The parts of a lane run in turn,
the lanes side by side, with `--mps` under NVIDIA's MPS. What is not done in time is interrupted. The end of each part's
output is printed. OUT/session.tgz has all of it, with the results of sweeps and the metrics of runs. Finished runs of
sweeps come from docs/results/; to add new ones, unpack session.tgz in the repository and call
`scripts/write_smollm2_doc.py --collect`.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
WORK = Path(os.environ.get("SOLERA_GPU_WORK", "/tmp/solera_gpu"))
"""There: packages in `site`, data, models, and what torch compiles."""
PROBLEMS = 4096
LAST_SECONDS = 15
"""What is left of the limit when everything is interrupted."""
PATIENCE = 10
"""Seconds in which an interrupted part may save."""
SHOWN = 45
"""Lines at the end of a part's output that are printed."""
BENCH = "solera bench --problems $WORK/problems.jsonl --prompts 64 --new_tokens 256 --threads 8"
KEPT = ("sweeps/*/results", "sweeps/*/logs", "sweeps/*.json*", "runs/*/metrics.jsonl")


class Part(NamedTuple):
    command: str
    arguments: list[str]
    limit: float
    """Seconds."""


def parts_of(lane: str) -> dict[str, Part]:
    """The parts of a lane by name, such as `speed:10`."""
    known = tomllib.loads((HERE / "gpu_parts.toml").read_text(encoding="utf-8"))
    found = {}
    for name in lane.split(","):
        kind, *arguments = name.split(":")
        if kind not in known:
            sys.exit(f"gpu_machine: no part {kind}; there are {', '.join(known)}")
        found[name] = Part(known[kind]["run"], arguments, known[kind].get("limit", float("inf")))
    return found


class Session:
    """Runs lanes until a deadline."""

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds - LAST_SECONDS
        self.logs = Path(tempfile.mkdtemp())
        self.ended = dict[str, str]()

    def run(self, lanes: Sequence[dict[str, Part]]) -> None:
        threads = [threading.Thread(target=self._lane, args=(lane,)) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _lane(self, lane: dict[str, Part]) -> None:
        for name, part in lane.items():
            start = time.monotonic()
            self.ended[name] = f"{self._run(name, part)} after {time.monotonic() - start:.1f} s"
            print(f"{name}: {self.ended[name]}", flush=True)

    def _run(self, name: str, part: Part) -> str:
        left = min(part.limit, self.deadline - time.monotonic())
        if left <= 0:
            return "not started"
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", part.command, name, *part.arguments],
                stdout=log, stderr=subprocess.STDOUT, env=self._environment(left), start_new_session=True,
            )  # fmt: skip
            try:
                return f"status {process.wait(left)}"
            except subprocess.TimeoutExpired:
                return "interrupted"
            finally:
                stop(process)

    def _log(self, name: str) -> Path:
        return self.logs / f"{name.replace(':', '_').replace('/', '_')}.txt"

    def _environment(self, left: float) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(Path.cwd()), str(WORK / "site"), os.environ.get("PYTHONPATH")]))
        return os.environ | {
            "PYTHONPATH": path, "PATH": f"{WORK / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONUNBUFFERED": "1",
            "WORK": str(WORK), "LOGS": str(self.logs), "MINUTES": f"{max(left - 30, 1) / 60:.2f}", "COLUMNS": "170",
            "BENCH": BENCH.replace("$WORK", str(WORK)), "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "TORCHINDUCTOR_CACHE_DIR": str(WORK / "inductor"), "TRITON_CACHE_DIR": str(WORK / "triton"),
        }  # fmt: skip

    def show(self) -> None:
        for name, said in self.ended.items():
            print(f"\n===== {name}: {said}")
            if self._log(name).exists():
                lines = self._log(name).read_text(encoding="utf-8", errors="replace").splitlines()
                print("\n".join([line for line in lines if "it/s]" not in line][-SHOWN:]), flush=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a part, give it time to save, then kill what it left."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(PATIENCE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def run(seconds: float, out: Path, lanes: Sequence[str], mps: bool) -> None:
    chosen = [parts_of(lane) for lane in lanes]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and all it starts, ignore it
    prepare()
    if mps:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": str(WORK / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(WORK / "mps")}
        (WORK / "mps").mkdir(exist_ok=True)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)  # fails if one runs already
    session = Session(seconds)
    session.run(chosen)
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / "session.tgz", "w:gz") as archive:
        archive.add(session.logs, "logs")
        for path in (path for pattern in KEPT for path in sorted(Path().glob(pattern))):
            archive.add(path)
    session.show()


def prepare() -> None:
    """Put commands on the search path, data where recipes expect it, and finished runs where sweeps find them."""
    (WORK / "bin").mkdir(parents=True, exist_ok=True)
    for name, arguments in (("python", ""), ("solera", "-m solera.cli ")):
        command = WORK / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        command.chmod(0o755)
    if not Path("data").exists():
        Path("data").symlink_to(WORK)
    published, sweeps = Path("docs/results"), Path("sweeps")
    sweeps.mkdir(exist_ok=True)
    for folder in (each for each in published.iterdir() if each.is_dir()):
        shutil.copytree(folder, sweeps / folder.name / "results", dirs_exist_ok=True)
    for file in published.glob("verdicts_smollm2_*.jsonl"):
        if not (sweeps / file.name).exists():
            shutil.copy(file, sweeps)


def pack(out: Path, packages: Path, files: Sequence[Path], mib: int) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            ["uv", "pip", "install", "--quiet", "--no-deps", "--target", Path(scratch) / "site", "--python-platform",
             "x86_64-manylinux_2_34", "--python-version", "3.12", "-r", packages], check=True,
        )  # fmt: skip
        for file in files:
            (shutil.copytree if file.is_dir() else shutil.copy)(file, Path(scratch) / file.name)
        through(f"tar cf - -C '{scratch}' . | xz -2 -T0 | split -d -a 2 -b {mib}M - '{out}/'")
    pieces = sorted(out.iterdir())
    for number, piece in enumerate(pieces, 1):
        size = piece.stat().st_size / 2**20
        (out / f"{number}").mkdir()
        piece.rename(out / f"{number}" / f"{out.name}.{number}_of_{len(pieces)}")
        print(f"{out}/{number}: {size:.0f} MiB")


def unpack(folder: Path) -> None:
    (piece,) = folder.iterdir()
    name, _, position = piece.name.rpartition(".")
    total = int(position.partition("_of_")[2])
    incoming = WORK / "incoming"
    incoming.mkdir(parents=True, exist_ok=True)
    shutil.copy(piece, incoming)
    pieces = [incoming / f"{name}.{number}_of_{total}" for number in range(1, total + 1)]
    if missing := [each.name for each in pieces if not each.exists()]:
        print(f"{piece.name} is here, missing: {', '.join(missing)}")
        return
    through(f"cat {shlex.join(map(str, pieces))} | xz -d -T0 | tar xf - -C '{WORK}'")
    for each in pieces:
        each.unlink()
    print(f"{name} is unpacked: {WORK} has {', '.join(sorted(each.name for each in WORK.iterdir()))}")


def through(pipeline: str) -> None:
    subprocess.run(["bash", "-o", "pipefail", "-c", pipeline], check=True)


def write_problems(model: str, gsm8k: Path, out: Path) -> None:
    """Problems of GSM8K as `solera bench` and TRL take them: the prompt's text as in the recipes, and the number."""
    from transformers import AutoTokenizer

    from solera.config import Config, ModelConfig, TaskConfig
    from solera.models.loading import load_reader
    from solera.run.parts import resolved
    from solera.run.task import build_task

    config = resolved(Config(model=ModelConfig(model), task=TaskConfig("gsm8k", path=str(gsm8k))))
    task, tokenizer = build_task(config, load_reader(model).codec), AutoTokenizer.from_pretrained(model)
    with out.open("w", encoding="utf-8") as file:
        for prompt in map(task.prompt, range(PROBLEMS)):
            text = tokenizer.decode(prompt.token_ids)
            assert tuple(tokenizer.encode(text, add_special_tokens=False)) == prompt.token_ids
            answer = prompt.data["answer"].rpartition("####")[2].strip().replace(",", "")
            file.write(json.dumps({"prompt": text, "answer": answer}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    packing = commands.add_parser("pack", help="here: write numbered folders")
    packing.add_argument("out", type=Path)
    packing.add_argument("--packages", type=Path, default=HERE / "gpu_packages.txt", help="a requirements file")
    packing.add_argument("--files", type=Path, nargs="+", default=[], help="files and folders to take along")
    packing.add_argument("--mib", type=int, default=52, help="size of a folder")
    packing.set_defaults(call=pack)
    unpacking = commands.add_parser("unpack", help="there: take one folder")
    unpacking.add_argument("folder", type=Path)
    unpacking.set_defaults(call=unpack)
    running = commands.add_parser("run", help="there: run lanes of parts")
    running.add_argument("seconds", type=float)
    running.add_argument("out", type=Path)
    running.add_argument("lanes", nargs="+")
    running.add_argument("--mps", action="store_true", help="let kernels of several processes run at the same time")
    running.set_defaults(call=run)
    writing = commands.add_parser("problems", help="there: write problems for `solera bench`")
    writing.add_argument("model")
    writing.add_argument("gsm8k", type=Path)
    writing.add_argument("out", type=Path)
    writing.set_defaults(call=write_problems)
    options = vars(parser.parse_args())
    options.pop("call")(**options)


if __name__ == "__main__":
    main()
