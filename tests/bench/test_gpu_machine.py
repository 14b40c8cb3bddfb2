"""`benchmarks/gpu_machine.py`: lanes of parts, their limits, and the way of files to another machine."""

import os
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path

from tests.command import ROOT

PARTS = """
[say]
run = "echo $1 and $2; test -d data; test $(basename $PWD) = repository"

[fail]
run = "false; echo never"

[hang]
limit = 6
run = "trap 'echo saved; exit 3' INT; sleep 1000 & echo $! > $LOGS/../child; wait"

[after]
run = "echo $MINUTES"
"""


def call(tmp_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The script in a repository of its own."""
    repository = tmp_path / "repository"
    if not repository.exists():
        (repository / "benchmarks").mkdir(parents=True)
        (repository / "benchmarks" / "gpu_machine.py").write_text((ROOT / "benchmarks" / "gpu_machine.py").read_text())
        (repository / "benchmarks" / "gpu_parts.toml").write_text(PARTS)
        (repository / "docs" / "results" / "some").mkdir(parents=True)
        (repository / "docs" / "results" / "some" / "a-s0.json").write_text("{}")
    command = "trap '' INT; exec \"$@\""
    return subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, "benchmarks/gpu_machine.py", *map(str, arguments)],
        cwd=repository, capture_output=True,
        text=True, check=False, env=os.environ | {"SOLERA_GPU_WORK": str(tmp_path / "work"), "TMPDIR": str(tmp_path)},
    )  # fmt: skip


def test_lanes_run_side_by_side_and_a_part_beyond_its_limit_may_save_and_leaves_nothing(tmp_path):
    """Also as a background job of a shell, which ignores interrupts."""
    start = time.monotonic()
    done = call(tmp_path, "run", 60, tmp_path / "out", "hang,after", "say:this:that,fail")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 40
    with tarfile.open(tmp_path / "out" / "session.tgz") as archive:
        names = archive.getnames()
        logs = {name: archive.extractfile(name).read().decode() for name in names if name.startswith("logs/")}
    left = 60 * float(logs.pop("logs/after.txt"))
    # without the last seconds of all, those of the part, and the limit of the one before it; rounded to 0.6 s
    assert 1 <= left <= 60 - 15 - 30 - 6 + 0.3
    assert logs == {"logs/hang.txt": "saved\n", "logs/say_this_that.txt": "this and that\n", "logs/fail.txt": ""}
    assert "sweeps/some/results/a-s0.json" in names  # a finished run that was published
    ended = {line.partition(": ")[0]: line for line in done.stdout.splitlines() if not line.startswith("=")}
    assert "interrupted after" in ended["hang"] and "status 1 after" in ended["fail"]
    assert "status 0 after" in ended["say:this:that"]
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    deadline = time.monotonic() + 10  # a busy machine may not have come to end it yet
    while not (over := has_ended(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert over


def has_ended(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_part_that_does_not_exist_is_refused_before_anything_runs(tmp_path):
    done = call(tmp_path, "run", 60, tmp_path / "out", "after", "hang,nothing:1")
    assert done.returncode == 1
    assert done.stderr == "gpu_machine: no part nothing; there are say, fail, hang, after\n"
    assert not (tmp_path / "out").exists()


def test_folders_are_unpacked_when_the_last_one_is_there(tmp_path):
    content, pieces = tmp_path / "content", tmp_path / "pieces"
    for folder in (content / "site", pieces):
        folder.mkdir(parents=True)
    (content / "site" / "data").write_bytes(noise := os.urandom(5000))
    shell = f"tar cf - -C {content} . | xz | split -d -b 4000 - {pieces}/"
    subprocess.run(["bash", "-c", shell], check=True)
    first, second = sorted(pieces.iterdir())
    for number, piece in ((2, second), (1, first)):
        (pieces / f"{number}").mkdir()
        piece.rename(pieces / f"{number}" / f"base.{number}_of_2")
    assert call(tmp_path, "unpack", pieces / "2").stdout == "base.2_of_2 is here, missing: base.1_of_2\n"
    assert not (tmp_path / "work" / "site").exists()
    assert call(tmp_path, "unpack", pieces / "1").stdout.startswith("base is unpacked: ")
    assert (tmp_path / "work" / "site" / "data").read_bytes() == noise


def test_every_published_part_has_a_command_that_bash_can_read():
    for name, part in tomllib.loads((ROOT / "benchmarks" / "gpu_parts.toml").read_text()).items():
        assert set(part) <= {"run", "limit"}, name
        subprocess.run(["bash", "-n", "-c", part["run"]], check=True)
