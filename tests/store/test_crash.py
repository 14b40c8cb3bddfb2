"""Nothing that was acknowledged is lost or doubled, whenever whoever is killed."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from solera.store.database import Postgres, open_for_reading
from solera.store.encoding import decode
from tests.store.crashing import GROUP

LIVES = 20


@pytest.fixture
def survived(place, tmp_path):
    """The folder with the notes, and the store, after three writers were killed twenty times each."""
    url, folder = ("", tmp_path) if isinstance(place, Path) else (str(place.url), tmp_path / place.run)
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.store.crashing", url, str(folder), str(LIVES), "1"]
    done = subprocess.run(command, check=False, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")  # everyone lived until killed
    return folder


def noted(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text().splitlines()


def test_three_writers_killed_at_random_moments(survived, place):
    assert isinstance(place, Path | Postgres)
    with open_for_reading(place) as database:
        rollouts = database.exec_driver_sql("select id, prompt_key, sequences, uses from rollouts").all()
        rewards = database.exec_driver_sql("select rollout_id, revision, late from rewards").all()
        uses = database.exec_driver_sql("select rollout_id, version from uses").all()

    members = Counter(key for _, key, _, _ in rollouts)
    assert set(members.values()) == {GROUP}  # no group in part, none twice
    texts = Counter((key, decode(bytes(data))[0].token_ids_T.tobytes()) for _, key, data, _ in rollouts)
    assert set(texts.values()) == {1}

    graded, late = noted(survived, "collect"), noted(survived, "grade_later")
    assert set(graded) <= members.keys()
    assert {line.split()[0] for line in late} <= members.keys()
    assert len(graded) >= LIVES // 2 and len(late) >= LIVES // 2  # in every second life, something was done

    given = Counter(id_ for id_, _, _ in rewards)
    assert set(given.values()) == {1}
    rewarded = {line.split()[0] for line in late if line.endswith("rewarded")} | set(graded)
    assert all(given[id_] == 1 for id_, key, _, _ in rollouts if key in rewarded)
    by_group = Counter(key for id_, key, _, _ in rollouts if given[id_])
    assert set(by_group.values()) == {GROUP}  # rewards of a group came together or not at all
    numbers = [number for _, _, number in rewards if number is not None]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))

    learned = Counter(id_ for id_, _ in uses)
    assert set(learned.values()) == {1}  # nothing was learned from twice
    assert {int(id_) for line in noted(survived, "learn") for id_ in line.split()} <= learned.keys()
    assert len(noted(survived, "learn")) >= LIVES // 2
    assert all(uses_ == learned[id_] for id_, _, _, uses_ in rollouts)
