"""docs/coming-from.md: its configs are accepted, its fields exist, its translated script trains."""

import dataclasses
import re
from typing import get_type_hints

import pytest
import torch

from solera.config import Config, ObjectiveConfig, parse
from solera.errors import SoleraError
from solera.objectives.advantage import whiten, whiten_bessel
from solera.objectives.table import resolve, resolve_config
from tests.command import ROOT, solera

PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("text", blocks("toml"))
def test_its_configs_are_accepted(text):
    resolve_config(parse(text, "coming-from.md"))


def test_its_fields_exist():
    sections = {
        name: {key.name for key in dataclasses.fields(section)} for name, section in get_type_hints(Config).items()
    }
    text = without_their_names()
    named = re.findall(rf"`({'|'.join(sections)})\.(?!toml|html|db)(\w+)", text)
    assert len(named) > 100
    assert [f"{section}.{key}" for section, key in named if key not in sections[section]] == []
    known = {key for keys in sections.values() for key in keys}
    assigned = {*re.findall(r"`(\w+) = ", text), *re.findall(r"`(\w+)` = `", text)}
    assert {"dual_clip", "weight_high", "tolerance"} <= assigned
    assert assigned <= known


def without_their_names() -> str:
    """The page without the first column of the others' tables: some of them have sections of the same names."""
    start, stop = PAGE.index("## verl's options"), PAGE.index("## Names you may type")
    return PAGE[:start] + re.sub(r"^\|[^|]*\|", "", PAGE[start:stop], flags=re.MULTILINE) + PAGE[stop:]


def test_every_peer_has_a_section_and_a_config():
    for name in ("TRL's options", "verl's options", "Trinity-RFT", "AReaL", "prime-rl"):
        assert re.search(rf"^## {name}$", PAGE, re.MULTILINE), name
    for name in ("trl", "verl", "trinity", "areal", "prime-rl"):
        assert any(text.startswith(f"# {name}.toml") for text in blocks("toml")), name


def test_its_names_are_answered_as_it_says():
    table = PAGE.split("## Names you may type")[1].split("## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 8
    for typed, _, ours in rows:
        words = re.findall(r"`(\w+)`", typed)
        if " with `" in typed:
            field, *objectives = words
            configs = [ObjectiveConfig(name, **{field: 2.0}) for name in objectives]
            answers = [re.findall(r"`(\w+)`", ours)[0]] * len(configs)
        else:
            configs = [ObjectiveConfig(name) for name in words]
            answers = [re.findall(r"`([a-z]\w+)", part)[0] for part in ours.split("; ")]
        for config, answer in zip(configs, answers, strict=True):
            with pytest.raises(SoleraError, match=rf"\b{answer}\w*\b"):
                resolve(config)


def test_its_table_of_whitening():
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| 0 and ")]
    assert len(rows) == 3
    group_B = torch.zeros(8, dtype=torch.int64)
    for rewards, *shown in rows:
        reward_B = float(rewards.removeprefix("0 and ")) * torch.tensor([1.0] * 3 + [0.0] * 5, dtype=torch.float64)
        centred, deviation = (reward_B - reward_B.mean())[0], reward_B.std()
        expected = [
            whiten_bessel(reward_B, group_B, 1)[0], centred / (deviation + 1e-6),
            *(whiten(reward_B, group_B, 1, whiten_epsilon=epsilon)[0] for epsilon in (1e-8, 1e-4)),
        ]  # fmt: skip
        assert shown == [f"{advantage:.2f}" for advantage in expected]


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
