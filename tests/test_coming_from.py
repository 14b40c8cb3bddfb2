"""docs/coming-from.md: its configs are accepted, its fields exist, its translated script trains."""

import dataclasses
import re
from typing import get_type_hints

import pytest

from solera.config import Config, parse
from solera.objectives.table import resolve_config
from tests.test_cli import ROOT, solera

PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("text", blocks("toml"))
def test_its_configs_are_accepted(text):
    resolve_config(parse(text, "coming-from.md"))


def test_its_fields_exist():
    rooms = {name: {key.name for key in dataclasses.fields(room)} for name, room in get_type_hints(Config).items()}
    before, verl = PAGE.split("## verl's options")
    table, after = verl.split("### A reward function")
    ours = before + re.sub(r"^\|[^|]*\|", "", table, flags=re.MULTILINE) + after  # verl has rooms of the same names
    named = re.findall(rf"`({'|'.join(rooms)})\.(?!toml|html|db)(\w+)", ours)
    assert len(named) > 100
    assert [f"{room}.{key}" for room, key in named if key not in rooms[room]] == []


def test_its_metrics_exist():
    columns = [line.rstrip(" |").rpartition(" | ")[2] for line in PAGE.split("## Metrics")[1].splitlines()]
    named = {name for column in columns for name in re.findall(r"`(\w+/[\w@<>]+)`", column)}
    explained = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert len(named) > 25
    assert {name for name in named if f"`{name}`" not in explained} == {"reward/<function>"}


def test_its_script_trains(tmp_path):
    data = (ROOT / "examples" / "own_reward" / "data.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(data[:192]), encoding="utf-8")
    (tmp_path / "test.jsonl").write_text("\n".join(data[-48:]), encoding="utf-8")
    (tmp_path / "rewards.py").write_text(blocks("python")[0], encoding="utf-8")
    (tmp_path / "run.toml").write_text(blocks("toml")[0], encoding="utf-8")
    done = solera("train", "run.toml", "--run.steps", "2", "--run.device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "sums" / "model" / "config.json").is_file()
