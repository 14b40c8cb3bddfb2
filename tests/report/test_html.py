"""The page, read back: its numbers are those of metrics.jsonl and of the store, each read here in another way."""

import json
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from solera.config import Config, ObjectiveConfig, TaskConfig, dump
from solera.errors import SoleraError
from solera.objectives.table import resolve_config
from solera.records import Reward, Rollout, Segment, Sequence, Span, Use
from solera.report.html import write_report
from solera.report.panels import PANELS, panels_for
from solera.report.text import Piece, TextReader
from solera.store.ledger import Ledger
from tests.command import SEARCH_PATH
from tests.report.pages import Page

HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>\u2028&lt;"


def report(folder: Path, **options) -> Page:
    return Page(write_report([folder], folder / "report.html", **options))


def bare_run(folder: Path, metrics: str = '{"step": 0, "reward/mean": 0.5}\n', config: str = "") -> Path:
    """The least that is a run's folder."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(metrics)
    (folder / "config.toml").write_text(config)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A real run of twelve batches, synced every four."""
    from solera.config import parse
    from solera.run.running import train

    root = tmp_path_factory.mktemp("runs")
    return train(
        parse(
            f"""
            run = {{ root = "{root}", name = "real", steps = 12, device = "cpu" }}
            collect = {{ prompts = 8, group_size = 8 }}
            sync = {{ period = 4 }}
            evaluate = {{ every = 6, problems = 8 }}
            report = {{ tensorboard = false, progress = false }}
            """,
            "test",
        )
    )


def test_training_leaves_a_page_that_needs_nothing_else(trained):
    page = Page(trained.report)
    assert trained.report == trained.folder / "report.html"
    assert page.references == []
    assert "link" not in page.tags
    assert page.tags.count("script") == 3  # the data, the chart library, the page's own
    assert sorted(p.name for p in trained.folder.iterdir()) == [
        "account.jsonl", "beginning.json", "checkpoints", "config.toml", "lock", "metrics.jsonl", "model", "plot.png",
        "report.html", "store.db", "tokens.count",
    ]  # fmt: skip


def test_the_page_carries_the_chart_library_its_version_and_its_licence(trained):
    page = Page(trained.report)
    assert f"uPlot (v{page.data['uplot']})" in page.text
    assert "The MIT License (MIT)" in page.text and "Leon Sorokin" in page.text


def test_curves_are_the_metrics(trained):
    (run,) = Page(trained.report).data["runs"]
    rows = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    assert run["metrics"].keys() == {name for row in rows for name in row} - {"step"}
    for name, column in run["metrics"].items():
        logged = {row["step"]: pytest.approx(row[name], rel=1e-5) for row in rows if name in row}
        assert dict(zip(run["steps"][column["steps"]], column["values"], strict=True)) == logged
    assert run["syncs"] == [0, 4, 8]
    assert run["accuracies"] == [[0, rows[0]["eval/pass@1"]], [12, rows[12]["eval/pass@1"]]]
    assert run["facts"]["tokens for training"] == sum(row.get("tokens/generated", 0) for row in rows)
    assert (run["learned"], run["planned"], run["finished"]) == (12, 12, True)
    assert run["notes"] == []


def test_groups_are_the_stores(trained):
    """Rewards, advantages, ages and lengths by plain SQL; the text by the alphabet of the embedded model."""
    (run,) = report(trained.folder, groups=1000).data["runs"]
    with closing(sqlite3.connect(trained.folder / "store.db")) as store:
        used = store.execute(
            "select u.version, r.id, r.prompt_key, w.value, u.advantage, u.age, r.version, r.finish_reason, r.sequences"
            " from uses u join rollouts r on r.id = u.rollout_id join rewards w on w.rollout_id = r.id"
        ).fetchall()
    expected = {
        (version, id_): (key, value, advantage, age, [written], finish, _written_tokens(data))
        for version, id_, key, value, advantage, age, written, finish, data in used
    }
    shown = {
        (g["step"], m["id"]): (
            g["key"], m["reward"], m["advantage"], m["age"], m["versions"], m["finish"], m["length"],
        )
        for g in run["groups"]
        for m in g["members"]
    }  # fmt: skip
    assert len(used) == 12 * 8 * 8
    assert shown == expected
    assert all(len(group["members"]) == 8 for group in run["groups"])
    for group in run["groups"]:
        rewards = {m["reward"] for m in group["members"]}
        assert group["differs"] == (len(rewards) > 1)
        assert group["masked"] == (len(rewards) == 1)  # the objective masks groups with equal rewards
        assert group["key"] == f"arithmetic/{group['prompt']}"
        a, b = map(int, group["prompt"].removesuffix("=").split("+"))
        assert group["expected"] == str(a + b)
        for m in group["members"]:
            (turn,) = m["turns"]
            assert (turn["text"] == str(a + b)) == (m["reward"] == 1)


def _written_tokens(data: bytes) -> int:
    """Of one sequence in one span: 3 bytes, then tokens, has_logp and spans in 9, token ids, (start, stop, version)."""
    tokens, _, spans = struct.unpack_from("<I?I", data, 3)
    start, stop, _ = struct.unpack_from("<iii", data, 12 + 4 * tokens)
    assert spans == 1
    return stop - start


def test_a_sample_is_spread_over_the_steps_and_prefers_groups_that_differ(trained):
    (run,) = report(trained.folder, groups=12).data["runs"]
    (everything,) = report(trained.folder, groups=1000).data["runs"]
    assert sorted({group["step"] for group in run["groups"]}) == [0, 6, 11]  # 0, 5.5, 11, halves to the even side
    for step in (0, 6, 11):
        there = sum(group["differs"] for group in everything["groups"] if group["step"] == step)
        taken = [group["differs"] for group in run["groups"] if group["step"] == step]
        assert len(taken) == 4
        assert sum(taken) == (min(there, 3) if there < 8 else 4)
    assert report(trained.folder, groups=0).data["runs"][0]["groups"] == []


def test_a_prompt_drawn_twice_in_a_step_is_two_groups(tmp_path):
    folder = bare_run(tmp_path / "run", config="collect = { group_size = 2 }")
    _store(folder, [("p", reward, (5, 6, 7)) for reward in (0.0, 1.0, 1.0, 1.0)])
    groups = report(folder).data["runs"][0]["groups"]
    assert [[m["id"] for m in group["members"]] for group in groups] == [[1, 2], [3, 4]]
    assert [group["differs"] for group in groups] == [True, False]


def _store(folder: Path, responses: list[tuple[str, float, tuple[int, ...]]]) -> None:
    """Rollouts of one prompt token and these tokens, all learned from at version 0."""
    store = Ledger(folder / "store.db")
    ids = store.add([_rollout(key, reward, tokens) for key, reward, tokens in responses])
    store.record([Use(id_, 0, 0, 0.5) for id_ in ids])
    store.close()


def _rollout(key: str, reward: float, tokens: tuple[int, ...], *rewards: Reward) -> Rollout:
    ids = np.array((4, *tokens), np.int32)
    sequence = Sequence(ids, (Span(1, len(ids), 0),), np.zeros(len(tokens), np.float32))
    return Rollout(key, (sequence,), (Reward(reward), *rewards), lineage="a")


def test_parts_of_a_reward_latest_revision_each(tmp_path):
    folder = bare_run(tmp_path / "run")
    store = Ledger(folder / "store.db")
    first, second = store.add([_rollout("p", 0.25, (5,), Reward(1.0, part="format")), _rollout("p", 0.0, (6,))])
    store.add_reward(first, Reward(0.75, revision=1))
    store.record([Use(first, 0, None, 1.0), Use(second, 0, None, -1.0)])
    store.close()
    (group,) = report(folder).data["runs"][0]["groups"]
    assert [m["reward"] for m in group["members"]] == [1.75, 0.0]
    assert [m["parts"] for m in group["members"]] == [{"reward": 0.75, "format": 1.0}, {}]
    assert group["members"][0]["age"] is None


def test_a_page_whose_tasks_data_is_gone_shows_its_groups_without_expected_answers(tmp_path):
    folder = bare_run(tmp_path / "run", config='task = { name = "jsonl", path = "gone/sums.jsonl" }')
    _store(folder, [("p", reward, (5, 6, 7)) for reward in (0.0, 1.0)])
    (run,) = report(folder).data["runs"]
    assert [group["expected"] for group in run["groups"]] == [None]
    assert "Expected answers are not shown: gone/sums.jsonl: the file no longer exists." in run["notes"]


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ('name = "unheard_of"', "task.name is 'unheard_of'"),
        ('name = "jsonl"\npath = 3', "task.path is 3 but must be text"),
        ('name = "arithmetic"\nmoon = "full"', None),  # a field of another version does not matter
    ],
)
def test_a_task_that_is_not_understood_is_noted(tmp_path, task, says):
    folder = bare_run(tmp_path / "run", config=f"[task]\n{task}\n[objective]\nspin = 3\n")
    _store(folder, [("arithmetic/1+2=", reward, (5, 6, 7)) for reward in (0.0, 1.0)])
    (run,) = report(folder).data["runs"]
    assert [group["expected"] for group in run["groups"]] == ["3" if says is None else None]
    noted = [note for note in run["notes"] if note.startswith("Expected answers are not shown: ")]
    assert len(noted) == (says is not None) and all(says in note for note in noted)


def test_a_task_of_ones_own_has_no_expected_answers_and_needs_no_note(tmp_path):
    folder = bare_run(tmp_path / "run", config='task = { name = "jsonl", path = "gone/sums.jsonl" }')
    (folder / "own_code.json").write_text('["task"]')
    _store(folder, [("arithmetic/1+2=", reward, (5, 6, 7)) for reward in (0.0, 1.0)])
    (run,) = report(folder).data["runs"]
    assert [group["expected"] for group in run["groups"]] == [None]
    assert not any("Expected answers" in note for note in run["notes"])


def test_expected_answers_of_a_file_named_from_where_the_run_was_started(tmp_path, short_run, monkeypatch):
    """The run began in one folder and the page is made in another; the answer column is not called `answer`."""
    begun = tmp_path / "begun"
    begun.mkdir()
    rows = [{"prompt": f"{a}+{b}=", "gold": str(a + b)} for a in range(30, 60) for b in range(10, 30)]
    (begun / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(begun)
    folder = short_run('task = { name = "jsonl", path = "sums.jsonl", answer = "gold" }').folder
    monkeypatch.chdir(tmp_path)
    groups = report(folder).data["runs"][0]["groups"]
    assert groups
    for group in groups:
        a, b = group["prompt"].removesuffix("=").split("+")
        assert group["expected"] == str(int(a) + int(b))


def test_the_account_of_tokens_is_the_last_whole_line(tmp_path):
    folder = bare_run(tmp_path / "run")
    assert report(folder).data["runs"][0]["account"] == {}
    first = {"step": 2, "tokens/generated": 5, "tokens/trained": 5}
    last = {
        "step": 4, "tokens/generated": 100, "tokens/trained": 60, "tokens/waiting": 0, "tokens/dropped/too_old": 30,
        "tokens/other/probe": 6, "tokens/lost": 3,
    }  # fmt: skip
    (folder / "account.jsonl").write_text(f'{json.dumps(first)}\n{json.dumps(last)}\n{{"step": 6, "tokens/gene')
    assert report(folder).data["runs"][0]["account"] == {
        "generated": 100, "trained": 60, "dropped: too old": 30, "other: probe": 6, "lost": 3, "unexplained": 1,
    }  # fmt: skip


def test_turns_tell_what_was_written_from_what_was_given(tmp_path):
    folder = bare_run(tmp_path / "run", config='model = { path = "nowhere" }')
    ids = np.arange(10, 18, dtype=np.int32)
    spans = (Span(2, 3, 0), Span(3, 4, 1), Span(6, 8, 1))  # weights changed after the first token; then a tool spoke
    store = Ledger(folder / "store.db")
    (id_,) = store.add([Rollout("p", (Sequence(ids, spans, None),), (Reward(1.0),), lineage="a")])
    store.record([Use(id_, 2, 2, 0.0)])
    store.close()
    run = report(folder).data["runs"][0]
    (group,) = run["groups"]
    (member,) = group["members"]
    assert group["prompt"] == "10 11"
    told = [(turn["written"], turn["text"], turn["author"], turn["tokens"]) for turn in member["turns"]]
    assert told == [(True, "12 13", "policy", 2), (False, "14 15", "given", 2), (True, "16 17", "policy", 2)]
    assert member["versions"] == [0, 1]
    assert member["by_version"] == [[[0, "12"], [1, " 13"]], [], [[1, "16 17"]]]
    assert "shown as token ids, because no tokenizer could be loaded (nowhere: " in " ".join(run["notes"])


def test_an_episode_is_told_turn_by_turn(tmp_path):
    """Two turns and a greedy one: a tool answers two calls, one of which fails, then the environment speaks. Rewards
    belong to the first and the last trained turn; the history of the second sequence was rendered anew."""
    folder = bare_run(tmp_path / "run", config='model = { path = "nowhere" }')
    segments = (
        Segment("prompt", 2), Segment("policy", 2), Segment("tool", 1, 2, 1), Segment("greedy", 1),
        Segment("environment", 1), Segment("policy", 1),
    )  # fmt: skip
    first = Sequence(np.arange(10, 18, dtype=np.int32), (Span(2, 4, 0), Span(7, 8, 0)), None, None, segments)
    again = (Segment("prompt", 3, 1, 1), Segment("policy", 1))
    second = Sequence(np.arange(20, 24, dtype=np.int32), (Span(3, 4, 0),), None, None, again)
    rewards = (
        Reward(0.25, "a", position=1), Reward(0.5, "b", position=2), Reward(1.0, "c", position=0, sequence=1),
        Reward(2.0, "whole"),
    )  # fmt: skip
    store = Ledger(folder / "store.db")
    (id_,) = store.add([Rollout("p", (first, second), rewards, lineage="a")])
    store.record([Use(id_, 2, 2, 0.0)])
    store.close()
    (group,) = report(folder).data["runs"][0]["groups"]
    turns = [tuple(turn.values()) for turn in group["members"][0]["turns"]]
    assert turns == [
        (True, "12 13", "policy", 2, 0, 0, {"a": 0.25}), (False, "14", "tool", 1, 2, 1, {}),
        (False, "15", "greedy", 1, 0, 0, {}), (False, "16", "environment", 1, 0, 0, {}),
        (True, "17", "policy", 1, 0, 0, {"b": 0.5}), (False, "20 21 22", "prompt", 3, 1, 1, {}),
        (True, "23", "policy", 1, 0, 0, {"c": 1.0}),
    ]  # fmt: skip
    assert group["members"][0]["reward"] == 3.75


def test_a_character_that_two_versions_wrote_goes_to_the_second():
    """Tokens are bytes here, and a sync came in the middle of é."""
    read = TextReader(lambda ids: bytes(ids).decode("utf-8", "replace"), ends=(0,))
    ids = [*"aé b".encode(), 0]
    piece = Piece(True, ids, [(2, 3), (1, 4), (3, 5)])
    assert read.by_version(piece) == [(3, "a"), (4, "é"), (5, " b")]
    assert read(piece) == "aé b"
    assert read.by_version(Piece(True, ids, [(5, 3), (1, 4)])) == [(3, "aé b"), (4, "")]


def test_hostile_text_stays_text(tmp_path):
    """A tokenizer whose every word is an attempt to break out of the page."""
    from tokenizers import Tokenizer, models

    folder = bare_run(tmp_path / f"run&<b>{'x' * 3}", metrics=json.dumps({"step": 0, HOSTILE: 1.0}) + "\n")
    (folder / "model").mkdir()
    words = {HOSTILE if i == 5 else f"w{i}": i for i in range(8)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "model" / "tokenizer.json"))
    _store(folder, [(HOSTILE, 1.0, (5,)), (HOSTILE, 0.0, (6,))])
    page = report(folder)
    (run,) = page.data["runs"]
    assert run["groups"][0]["key"] == HOSTILE
    assert [m["turns"][0]["text"] for m in run["groups"][0]["members"]] == [HOSTILE, "w6"]
    assert page.tags.count("script") == 3
    assert "img" not in page.tags
    assert "<" not in page.scripts["data"]
    assert "\u2028" not in page.text
    assert "innerHTML" not in page.text and "insertAdjacentHTML" not in page.text  # text goes in as text


def test_several_runs_and_what_differs_between_them(short_run, tmp_path):
    folders = [
        short_run('sync = { period = 2 }\nrun = { seed = 3 }\nobjective = { name = "off_policy_grpo" }', "a").folder,
        short_run('objective = { name = "grpo" }', "b").folder,
    ]
    data = Page(write_report(folders, tmp_path / "both.html")).data
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert [run["facts"]["v (sync period)"] for run in data["runs"]] == [2, 10]
    differing = {field["name"]: field["values"] for field in data["settings"] if field["differs"]}
    assert differing == {
        "run.seed": [3, 0],
        "sync.period": [2, 10],
        "objective.name": ["off_policy_grpo", "grpo"],
        "objective.epsilon": [0.2, None],
        "objective.epsilon_low": [None, 0.2],
        "objective.epsilon_high": [None, 0.2],
        "objective.centre": ["one", None],
        "objective.level": ["token", None],
    }
    assert all(run["groups"] for run in data["runs"])


def test_one_run_shows_what_differs_from_the_defaults(short_run):
    data = Page(short_run("learn = { lr = 1e-3 }\nreport = { page = true }").report).data
    differing = {field["name"]: (field["values"], field["default"]) for field in data["settings"] if field["differs"]}
    assert differing["learn.lr"] == ([0.001], 0.0003)
    assert differing["collect.prompts"] == ([8], 32)
    assert not {"run.name", "objective.advantage", "learn.betas"} & differing.keys()


def test_the_choice_of_task_and_objective_is_told_and_what_follows_from_it_is_not(tmp_path):
    chosen = Config(task=TaskConfig("jsonl", path="sums.jsonl"), objective=ObjectiveConfig("off_policy_grpo"))
    data = report(bare_run(tmp_path / "run", config=dump(resolve_config(chosen)))).data
    differing = {field["name"]: (field["values"], field["default"]) for field in data["settings"] if field["differs"]}
    assert differing == {
        "task.name": (["jsonl"], "arithmetic"),
        "task.path": (["sums.jsonl"], None),
        "objective.name": (["off_policy_grpo"], Config().objective.name),
    }


@pytest.mark.parametrize(
    ("task", "differ"),
    [
        (TaskConfig("mixture", parts=("arithmetic@1", "gym:gcd@1"), weights=(1.0, 2.0)),
         {"task.parts": ["arithmetic@1", "gym:gcd@1"], "task.weights": [1.0, 2.0]}),
        (TaskConfig("mixture", parts=("arithmetic@1",)), {"task.parts": ["arithmetic@1"]}),
        (TaskConfig("gsm8k", held_out_path="test.jsonl"), {"task.held_out_path": "test.jsonl"}),
    ],
)  # fmt: skip
def test_a_task_of_several_fields_is_told_and_what_follows_from_it_is_not(tmp_path, task, differ):
    data = report(bare_run(tmp_path / "run", config=dump(resolve_config(Config(task=task))))).data
    differing = {field["name"]: field["values"] for field in data["settings"] if field["differs"]}
    assert differing == {"task.name": [task.name]} | {name: [value] for name, value in differ.items()}


@pytest.mark.parametrize("parts", ["3", "[3]", '"ab"', "[]", "[[]]"])
def test_a_damaged_mixture_is_compared_with_the_plain_defaults(tmp_path, parts):
    config = f'task = {{ name = "mixture", parts = {parts} }}\n'
    data = report(bare_run(tmp_path / "run", config=config)).data
    assert "task.name" in {field["name"] for field in data["settings"] if field["differs"]}


def test_a_config_with_a_byte_order_mark_is_read(tmp_path):
    folder = bare_run(tmp_path / "run", config="\ufefflearn = { lr = 1e-3 }\n")
    data = report(folder).data
    assert [field["name"] for field in data["settings"] if field["differs"]] == ["learn.lr"]
    assert not [note for note in data["runs"][0]["notes"] if "config.toml" in note]


def test_a_number_with_hundreds_of_digits_is_not_drawn_and_such_a_step_is_damaged(tmp_path):
    many = "9" * 400
    lines = [
        f'{{"step": 0, "reward/mean": {many}}}',
        '{"step": 1, "reward/mean": 0.5}',
        f'{{"step": {many}}}',
        "[" * 9999,
    ]
    (run,) = report(bare_run(tmp_path / "run", metrics="\n".join([*lines, ""]))).data["runs"]
    assert run["metrics"]["reward/mean"]["values"] == [0.5]
    assert "Some values are not finite and are not drawn: reward/mean." in run["notes"]
    assert "metrics.jsonl: 2 damaged lines are skipped; the first is line 3." in run["notes"]


def test_a_run_without_config_differs_in_nothing(tmp_path):
    folders = [bare_run(tmp_path / "a", config="learn = { lr = 1e-3 }"), bare_run(tmp_path / "b")]
    assert not any(field["differs"] for field in report(folders[1]).data["settings"])
    data = Page(write_report(folders, tmp_path / "both.html")).data
    assert not any(field["differs"] for field in data["settings"])
    assert next(f["values"] for f in data["settings"] if f["name"] == "learn.lr") == [0.001, None]


def test_a_metric_that_no_panel_names_gets_one(tmp_path):
    folder = bare_run(tmp_path / "run", '{"step": 0, "reward/mean": 0.5, "moon/phase": 0.25, "time/learn": 2}\n')
    data = report(folder).data
    assert [panel["metrics"] for panel in data["other"]] == [{"moon/phase": "moon/phase"}]
    assert [panel["title"] for panel in data["panels"]] == ["Does it learn?"]
    assert data["runs"][0]["seconds"] == {"learn": 2}
    named = [name for panel in PANELS for name in panel.metrics]
    assert len(named) == len(set(named))
    assert panels_for(named) == (list(PANELS), [])


def test_ranks_and_engines_are_compared_in_one_panel():
    ranks = [f"rank/{n}/{what}" for n in (0, 10, 2) for what in ("tokens", "memory")]
    known, other = panels_for([*ranks, "engine/0/tokens", "engine/1/tokens", "engine/1/serving"])
    drawn = {panel.title: panel.metrics for panel in known}
    assert drawn["Is the work balanced?"] == {f"rank/{n}/tokens": f"rank {n}" for n in (0, 2, 10)}
    assert list(drawn["Is the work balanced?"].values()) == ["rank 0", "rank 2", "rank 10"]
    assert list(drawn) == ["Is the work balanced?", "Memory of each rank", "What does each engine write?"]
    assert [panel.title for panel in other] == ["engine/1/serving"]


def test_one_rank_has_a_panel_for_each_metric():
    assert [panel.title for panel in panels_for(["rank/0/tokens", "rank/0/memory"])[1]] == [
        "rank/0/memory",
        "rank/0/tokens",
    ]


def test_the_time_of_a_part_is_not_counted_twice(tmp_path):
    """The proof is a part of the sync: the bar has 2 + 3 seconds."""
    row = '{"step": 0, "reward/mean": 0.5, "time/learn": 2, "time/sync": 3, "time/sync/proof": 1}\n'
    data = report(bare_run(tmp_path / "run", row)).data
    assert data["runs"][0]["seconds"] == {"learn": 2, "sync": 3}
    assert data["other"] == []


def test_a_long_run_is_decimated_and_keeps_its_peaks_and_the_middle_of_every_interval(tmp_path):
    rows = [{"step": i, "reward/mean": float(i == 3333), "learn/loss": i / 2} for i in range(5001)]
    for i in range(0, 5001, 2):
        rows[i] |= {"eval/pass@1": 0.5 + i / 1e5, "eval/pass@1_low": 0.4, "eval/pass@1_high": 0.6}
    run = report(bare_run(tmp_path / "run", "".join(json.dumps(row) + "\n" for row in rows))).data["runs"][0]
    curves = {
        name: dict(zip(run["steps"][column["steps"]], column["values"], strict=True))
        for name, column in run["metrics"].items()
    }
    assert all(len(curve) <= 1002 for curve in curves.values())
    assert curves["reward/mean"][3333] == 1
    assert all(value == step / 2 for step, value in curves["learn/loss"].items())
    assert {0, 5000} <= curves["learn/loss"].keys()
    assert curves["eval/pass@1"].keys() == curves["eval/pass@1_low"].keys() == curves["eval/pass@1_high"].keys()
    steps, means = run["metrics"]["learn/loss"]["means"]
    assert len(steps) == 500 and means == pytest.approx([step / 2 for step in steps], rel=1e-5)  # of a straight line
    assert run["accuracies"] == [[0, 0.5], [5000, 0.55]]
    assert "at most 1,000 points" in " ".join(run["notes"])


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ("", {"v (sync period)": None, "offset": None}),
        ("[sync]\nperiod = 10\n[collect]\noffset = 3\n", {"v (sync period)": 10, "offset": 3}),
        ('[sync]\nrule = "adaptive"\nperiod = 10\n', {"v (sync period)": "adaptive", "offset": None}),
        ('[draw]\npolicy = "replay"\n[sync]\nperiod = 4\n', {"v (sync period)": 4, "offset": None}),
        ('[draw]\npolicy = "offline"\n[sync]\nperiod = 10\n', {"data": "offline: nothing is generated"}),
        (
            '[draw]\npolicy = "mixed"\nshares = ["human=1"]\n[sync]\nperiod = 10\n',
            {"data": "offline: nothing is generated"},
        ),
        (
            '[draw]\npolicy = "mixed"\nshares = ["self=1", "human=1"]\n[sync]\nperiod = 5\n',
            {"v (sync period)": 5, "offset": None},
        ),
    ],
)
def test_only_a_run_with_an_engine_has_a_sync_period(tmp_path, config, facts):
    (run,) = report(bare_run(tmp_path / "run", config=config)).data["runs"]
    assert {name: run["facts"][name] for name in ("v (sync period)", "offset", "data") if name in run["facts"]} == facts


def test_parts_of_the_reward_and_the_loss_have_main_panels_and_intervals_are_bands(tmp_path):
    logged = ("reward/mean", "reward/exact", "reward/brevity", "reward/zero_variance_fraction", "learn/loss",
              "eval/pass@1", "eval/pass@1_low", "eval/pass@1_high", "eval/pass@1/sums", "eval/pass@1/gcd",
              "own/score", "own/score_low", "own/score_high", "own/half_low")  # fmt: skip
    known, other = panels_for(logged)
    by_title = {panel.title: panel for panel in known}
    assert list(by_title) == [
        "Does it learn?", "What is the reward made of?", "Accuracy by part of the mixture",
        "What is not learned from?", "Loss",
    ]  # fmt: skip
    assert by_title["What is the reward made of?"].metrics == {
        "reward/mean": "whole reward", "reward/brevity": "brevity", "reward/exact": "exact",
    }  # fmt: skip
    assert by_title["Does it learn?"].right == ("reward/mean",)
    assert by_title["Does it learn?"].intervals == {"eval/pass@1": ("eval/pass@1_low", "eval/pass@1_high")}
    assert [panel.title for panel in other] == ["own/half_low", "own/score"]
    assert other[1].intervals == {"own/score": ("own/score_low", "own/score_high")}


def test_a_panel_is_flat_where_nothing_in_it_changes_in_any_run(tmp_path):
    rows = [{"step": k, "learn/lr": 3e-4, "learn/loss": 1.0, "policy/entropy": 0.5 + k} for k in range(3)]
    changed = [{**row, "learn/lr": 1e-3, "learn/loss": 1.0 + row["step"]} for row in rows]
    folders = [
        bare_run(tmp_path / name, "".join(json.dumps(row) + "\n" for row in made))
        for name, made in (("a", rows), ("b", changed))
    ]
    alone = {panel["title"]: panel["flat"] for panel in report(folders[0]).data["panels"]}
    assert alone == {"Loss": True, "Entropy of the policy": False, "Learning rate": True}
    panels = Page(write_report(folders, tmp_path / "both.html")).data["panels"]
    assert {panel["title"]: panel["flat"] for panel in panels} == alone | {"Loss": False}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "metrics.jsonl").unlink(), "metrics.jsonl is missing"),
        (lambda f: (f / "metrics.jsonl").write_text(""), "metrics.jsonl holds no step yet"),
        (lambda f: (f / "metrics.jsonl").open("a").write('{"step": 1, "rew'), "(line 2) was cut off"),
        (lambda f: (f / "metrics.jsonl").write_text('}\n[]\n{"step": 1}\n'), "2 damaged lines"),
        (lambda f: (f / "metrics.jsonl").write_bytes(b'\xff\n{"step": 1}\n'), "1 damaged"),
        (lambda f: (f / "metrics.jsonl").write_text('{"step": 0, "a/b": NaN, "c/d": 1}\n'), "not drawn: a/b"),
        (lambda f: (f / "metrics.jsonl").write_text('{"step": 0, "c/d": 1}\n'), "no evaluation"),
        (lambda f: (f / "metrics.jsonl").write_text('{"step": 0, "eval/pass@1": NaN}\n'), "no evaluation"),
        (lambda f: (f / "config.toml").unlink(), "config.toml is missing"),
        (lambda f: (f / "config.toml").write_text("run = \n"), "config.toml cannot be read"),
        (lambda f: (f / "config.toml").write_text("run = { steps = nan, seed = 1979-05-27 }"), "store.db is"),
        (lambda f: None, "store.db is missing"),
        (lambda f: (f / "store.db").write_text("not a database" * 100), "no groups to show"),
        (lambda f: sqlite3.connect(f / "store.db").close(), "no groups to show"),
        (lambda f: Ledger(f / "store.db").close(), "training has not used any rollout yet"),
    ],
)  # fmt: skip
def test_what_is_missing_or_damaged_is_said_on_the_page(tmp_path, spoil, says):
    folder = bare_run(tmp_path / "run")
    spoil(folder)
    page = report(folder)
    assert says in " ".join(page.data["runs"][0]["notes"])
    assert "NaN" not in page.scripts["data"]


def test_settings_edited_since_the_run_began_are_noted(tmp_path):
    folder = bare_run(tmp_path / "run", config='[learn]\nlr = 0.001\n[run]\nname = "x"\n')
    begun = {"learn.lr": "0.0003", "learn.grad_clip": "unset", "run.name": '"x"', "run.seed": "4"}
    (folder / "beginning.json").write_text(json.dumps({"started_in": ".", "problems": "", "settings": begun}))
    notes = report(folder).data["runs"][0]["notes"]
    changed = "learn.lr is 0.001, was 0.0003; run.seed is unset, was 4"
    assert f"settings have changed since the run started: {changed}. The settings shown are the last." in notes
    (folder / "beginning.json").write_text("{")
    assert any("beginning.json: the file is damaged" in note for note in report(folder).data["runs"][0]["notes"])


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(SoleraError, match="nowhere: no such folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(SoleraError, match=r"neither config.toml nor metrics.jsonl"):
        write_report([tmp_path], tmp_path / "report.html")
    run = bare_run(tmp_path / "run")
    with pytest.raises(SoleraError, match="is a folder; give the file"):
        write_report([run], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_store_in_use_is_read_and_not_held_up(tmp_path, trained):
    """The page shows what is committed, from a store whose log was not folded in: running, or killed and copied."""
    folder = shutil.copytree(trained.folder, tmp_path / "running")
    store = Ledger(folder / "store.db")
    ids = store.add([_rollout("late", 1.0, (5,)), _rollout("late", 0.0, (6,))])
    store.record([Use(id_, 12, 0, 1.0) for id_ in ids])
    assert max(group["step"] for group in report(folder).data["runs"][0]["groups"]) == 12
    killed = shutil.copytree(folder, tmp_path / "killed")
    store.add([_rollout("later", 1.0, (5,))])
    store.close()
    (killed / "store.db-shm").unlink()
    assert max(group["step"] for group in report(killed).data["runs"][0]["groups"]) == 12


def test_two_folders_of_one_name_are_told_apart_and_one_given_twice_is_one(tmp_path):
    folders = []
    for place in ("x", "y"):
        (tmp_path / place).mkdir()
        folders.append(bare_run(tmp_path / place / "run"))
    data = Page(write_report([*folders, folders[0]], tmp_path / "report.html")).data
    assert [run["name"] for run in data["runs"]] == [str(folder) for folder in folders]


def test_settings_of_another_version_of_the_package(tmp_path):
    folder = bare_run(
        tmp_path / "run", config='objective = { name = "unheard_of", spin = 3 }\nmoon = { phase = "full" }'
    )
    fields = {field["name"]: field["values"] for field in report(folder).data["settings"] if field["differs"]}
    assert fields["objective.spin"] == [3] and fields["moon.phase"] == ["full"]


def test_the_command_writes_where_it_says_without_loading_torch(trained, tmp_path):
    program = "import sys, solera.cli; sys.exit(solera.cli.main(sys.argv[1:]) or 'torch' in sys.modules)"

    def solera(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program, "report", *arguments],
            capture_output=True, text=True, check=False, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": SEARCH_PATH},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    other = shutil.copytree(trained.folder, tmp_path / "other")
    (other / "report.html").unlink()
    assert solera("other") == "report other/report.html\n"
    assert len(Page(other / "report.html").data["runs"][0]["groups"]) == 80
    assert solera("other", str(trained.folder)) == "report report.html\n"
    assert [run["name"] for run in Page(tmp_path / "report.html").data["runs"]] == ["other", "real"]
    assert solera("other", "--out", "chosen.html", "--groups", "5") == "report chosen.html\n"
    assert len(Page(tmp_path / "chosen.html").data["runs"][0]["groups"]) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chosen.html", "other", "report.html"]


def test_verdicts_stand_in_the_page_as_words(tmp_path):
    """Which updates were judged how, and when the first one did harm."""
    states = {0: 1, 3: 0, 5: -1, 8: 1, 9: -1}
    rows = [
        {"step": k, "reward/mean": 0.5} | ({"improvement/state": states[k]} if k in states else {}) for k in range(10)
    ]
    page = report(bare_run(tmp_path / "run", "".join(json.dumps(row) + "\n" for row in rows)))
    (run,) = page.data["runs"]
    assert run["facts"]["updates judged"] == "2 certified, 1 inconclusive, 2 harmful (first at step 5)"
    (words,) = [panel.words for panel in PANELS if panel.words]
    assert words == {"improvement/state": {1: "certified", 0: "inconclusive", -1: "harmful"}}
