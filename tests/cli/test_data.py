"""The command `solera data`, in processes of its own, on a run that was begun, goes on, or is over."""

import io
import json
import re
import subprocess
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from solera import open_store
from solera.config import check, parse
from solera.errors import SoleraError
from solera.records import Reward
from solera.run.running import train
from solera.store.ledger import Ledger
from solera.store.parquet import read_rows
from tests.command import solera as command
from tests.conftest import random_rollout
from tests.store.test_lines import HELD_OUT, TRAINING

RUN = """
run = {{ root = "{root}", name = "{name}", steps = {steps}, device = "cpu" }}
collect = {{ prompts = 4, group_size = 4 }}
store = {{ data = [{data}] }}
evaluate = {{ every = 0, problems = 4 }}
diagnose = {{ every = 0 }}
report = {{ tensorboard = false, progress = false, page = false }}
"""


solera = partial(command, "data")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    return train(parse(RUN.format(root=root, name="run", steps=2, data=""), "test")).folder


@pytest.mark.parametrize("what", ["import", "reward"])
def test_bad_lines_are_not_written_over_the_file_they_come_from(folder, tmp_path, what):
    (tmp_path / "linked.jsonl").symlink_to(tmp_path / "f.jsonl")
    text = json.dumps({"prompt": TRAINING, "response": "9", "model": "teacher", "id": 1, "value": 1}) + "\n{broken\n"
    (tmp_path / "f.jsonl").write_text(text)
    for bad in ("f.jsonl", "linked.jsonl"):
        refused = solera(what, folder, tmp_path / "f.jsonl", "--skip-bad", tmp_path / bad)
        assert refused.returncode == 2
        assert refused.stderr.endswith("this is the input file; choose another file for the bad lines\n")
        assert (tmp_path / "f.jsonl").read_text() == text


def test_in_out_and_rewards(folder, tmp_path):
    file, out, bad = tmp_path / "teacher.jsonl", tmp_path / "out.jsonl", tmp_path / "bad.jsonl"
    rows = [{"prompt": TRAINING, "response": str(i), "model": "teacher"} for i in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    refused = solera("import", folder, file)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"solera: {file}:4: not JSON") and refused.stderr.count("\n") == 1
    done = solera("import", folder, file, "--skip-bad", bad)
    assert (done.returncode, done.stdout) == (0, "3 rollouts imported, 0 already known, 0 rewards updated\n")
    assert f"{file}:4: not JSON" in done.stderr and bad.read_text() == "{broken\n"
    assert solera("reward", folder, "--id", 33, "--value", 1).stdout == "1 reward written\n"
    shown = [line.split() for line in solera("stats", folder).stdout.splitlines()]
    head = ["rollouts", "prompts", "waiting", "reward", "used", "uses"]
    assert shown[:1] == [["origin", *head]] and ["model:teacher", "3", "1", "2", "1.000", "0", "0"] in shown
    of_self = next(line for line in shown if line[:1] == ["self"])
    assert of_self[1:4] + of_self[5:] == ["32", "8", "0", "32", "32"]
    assert [line[:2] for line in shown[shown.index(["age", "now", *head]) + 1 :][:2]] == [["2-3", "32"], ["none", "3"]]
    assert [line[:2] for line in shown[shown.index(["uses", *head]) + 1 :][:2]] == [["0", "3"], ["1", "32"]]
    assert (folder / "store.png").read_bytes().startswith(b"\x89PNG")
    assert solera("verify", folder).stdout == "35 rollouts checked: no faults\n"
    assert solera("export", folder, out).stdout == f"35 rollouts exported to {out}\n"
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == list(range(1, 36))


def test_a_run_begins_with_the_good_lines_of_its_files(tmp_path):
    """The real command: the bad lines of both files go into one."""
    good = {"prompt": TRAINING, "response": "9", "model": "teacher", "reward": 1.0}
    held_out = json.dumps({**good, "prompt": HELD_OUT})
    text = json.dumps({**good, "reward": "good"})
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(good)}\n{held_out}\n\n{json.dumps({**good, 'response': '8'})}\n")
    (tmp_path / "b.jsonl").write_text(f"{{broken\n{json.dumps({**good, 'response': '7'})}\n{text}")
    files, bad = (tmp_path / "a.jsonl", tmp_path / "b.jsonl"), tmp_path / "bad.jsonl"
    (tmp_path / "run.toml").write_text(RUN.format(root=tmp_path, name="run", steps=1, data=""))

    def begin(*more: object) -> subprocess.CompletedProcess:
        return command("train", tmp_path / "run.toml", "--store.data", *files, *more, "--objective", "red_weight")

    refused = begin()
    assert refused.returncode == 2 and 'store.skip_bad = "bad.jsonl"' in refused.stderr
    over = begin("--store.skip_bad", files[1])
    assert over.returncode == 2 and over.stderr.endswith("choose another file for the bad lines\n")
    assert not (tmp_path / "run").exists() and files[1].read_text().endswith(text)
    done = begin("--store.skip_bad", bad)
    assert done.returncode == 0, done.stderr
    assert bad.read_text() == f"{{broken\n{text}\n"
    for said in (f"{files[1]}:1: not JSON", f"{files[1]}:3: field 'reward'"):
        assert said in done.stdout
    assert f"{files[0]}: skipped 1 line: answers to held-out problems" in done.stdout
    assert f"2 bad lines of store.data written to {bad}" in done.stdout
    with closing(Ledger(tmp_path / "run" / "store.db")) as ledger, ledger.transaction() as connection:
        count = "select count(*) from rollouts where origin = 'model:teacher'"
        assert connection.exec_driver_sql(count).scalar_one() == 3


def test_skip_bad_without_data_is_refused():
    with pytest.raises(SoleraError, match=r"^store\.skip_bad has no effect without store\.data: set that"):
        check(parse('store.skip_bad = "bad.jsonl"', "test"))


def empty_run(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text("")
    Ledger(folder / "store.db").close()
    return folder


def test_an_empty_store_has_empty_tables(tmp_path):
    shown = solera("stats", empty_run(tmp_path))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert [line.split()[0] for line in shown.stdout.split("\n\n")] == ["origin", "age", "reward", "uses", "plot"]


@pytest.mark.parametrize("name", ["out.png", "out.txt", "out"])
def test_the_plot_is_a_png_whatever_its_name(tmp_path, name):
    run = empty_run(tmp_path / "run")
    shown = solera("stats", run, "--plot", tmp_path / name)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"run", name}


def test_names_that_mean_something_to_matplotlib_or_nothing_at_all_are_plotted(tmp_path):
    run = empty_run(Path(f"{tmp_path}/$x_$ \udcff"))
    with closing(Ledger(run / "store.db")) as ledger:
        ledger.add([replace(random_rollout(np.random.default_rng(0), 0, (2, 3), 1.0), origin="model:$x_$")])
    shown = solera("stats", run)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert (run / "store.png").read_bytes().startswith(b"\x89PNG")


def test_a_grade_is_corrected_by_its_part(tmp_path):
    (tmp_path / "config.toml").write_text("")
    made = random_rollout(np.random.default_rng(0), 0, (2, 3), 1.0)
    with closing(Ledger(tmp_path / "store.db")) as ledger:
        ledger.add([replace(made, rewards=(Reward(1.0, "exact"), Reward(0.2, "digits")))])
    refused = solera("reward", tmp_path, "--id", 1, "--value", 0)
    assert refused.returncode == 2
    assert "the reward of rollout 1 has digits, exact: name the part to change" in refused.stderr
    assert solera("reward", tmp_path, "--id", 1, "--value", 0, "--part", "exact").returncode == 0
    with closing(Ledger(tmp_path / "store.db")) as ledger:
        assert ledger.draw(1, 1)[0].rollouts[0].reward == 0.2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("reward", "{run}", "--id", 4), "give --id and --value, or a file"),
        (("reward", "{run}", "--id", 999, "--value", 1), "there is no rollout 999"),
        (
            ("reward", "{run}", "--id", "9" * 20, "--value", 1),
            "--id is 99999999999999999999; it must be a whole number",
        ),
        (
            ("reward", "{run}", "--id", 1, "--value", 1, "--part", "\udcff"),
            "--part is '\\udcff'; it must be UTF-8 text",
        ),
        (("reward", "{run}", "--id", 1, "--value", 1, "--source", "\udcff"), "--source is '\\udcff'; it must be UTF-8"),
        (("reward", "{run}", "--id", 1, "--value", "nan"), "a reward must be finite"),
        (("import", "{run}", "none.jsonl", "--origin", "self"), "it must be human, model:NAME or file:NAME"),
        (("reward", "{run}", "--id", 1, "--value", "1e13"), "at most 1e+12 in size"),
        (("export", "{run}", "no/such.jsonl"), "no/such.jsonl: cannot write a file to no: No such file"),
        (("stats", "none"), "none: no config.toml, so it is not the folder of a run"),
        ((), "an action is missing; use one of stats, verify, import, export, reward (see solera data --help)"),
    ],
)
def test_mistakes_are_one_line(folder, arguments, says):
    refused = solera(*(str(argument).format(run=folder) for argument in arguments))
    assert refused.returncode == 2
    assert says in refused.stderr and refused.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_export_with_text_is_read_by_people_and_read_back(folder, tmp_path, kind):
    out, again = tmp_path / f"out.{kind}", tmp_path / "again.jsonl"
    assert solera("export", folder, out, "--text").returncode == 0
    rows = list(map(json.loads, out.read_text().splitlines() if kind == "jsonl" else read_rows(out)))
    assert all(f"arithmetic/{row['prompt']}" == row["key"] for row in rows if row["origin"] == "self")
    right = [row["response"] == str(sum(map(int, row["prompt"][:-1].split("+")))) for row in rows[:32]]
    assert right == [row["rewards"][0]["value"] == 1.0 for row in rows[:32]] and 0 < sum(right) < 32
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / "config.toml").write_text("")
    Ledger(tmp_path / "fresh" / "store.db").close()
    assert solera("import", tmp_path / "fresh", out).stdout.startswith(f"{len(rows)} rollouts imported, 0 already")
    assert solera("export", tmp_path / "fresh", again).returncode == 0
    back = [json.loads(line) for line in again.read_text().splitlines()]
    assert [row["text"] for row in back] == [None] * len(rows)
    assert [row["sequences"][0]["ids"] for row in back] == [row["sequences"][0]["ids"] for row in rows]


def test_of_many_bad_lines_the_first_are_told(folder, tmp_path):
    file, bad = tmp_path / "many.jsonl", tmp_path / "bad.jsonl"
    file.write_text("".join(json.dumps({"prompt": TRAINING, "response": i}) + "\n" for i in range(40)))
    told = solera("import", folder, file, "--skip-bad", bad).stderr.splitlines()
    assert [line.split(": ")[1] for line in told[:5]] == [f"{file}:{number}" for number in range(1, 6)]
    assert told[5:] == ["solera: and 35 more", f"solera: 40 bad lines written to {bad}"]


def test_answers_to_held_out_problems_are_skipped_and_a_file_of_nothing_else_is_refused(folder, tmp_path):
    file = tmp_path / "teacher.jsonl"
    rows = [{"prompt": prompt, "response": "1"} for prompt in (HELD_OUT, TRAINING, HELD_OUT)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = solera("import", folder, file)
    assert done.stdout == (
        "1 rollout imported, 0 already known, 0 rewards updated, 2 skipped because they answer held-out problems\n"
    )
    file.write_text(json.dumps(rows[0]) + "\n")
    refused = solera("import", folder, file)
    assert refused.returncode == 2 and refused.stderr == (
        f"solera: {file}: it holds only answers to the task's held-out problems, which are never trained on\n"
    )


def test_a_run_that_cannot_read_its_data_names_the_way_past_it(tmp_path):
    file = tmp_path / "old.jsonl"
    file.write_text(json.dumps({"prompt": TRAINING, "response": 1}) + "\n")
    says = r":1: field 'response' is .*; correct it, or import only .*: store\.skip_bad = \"bad\.jsonl\"$"
    with pytest.raises(SoleraError, match=says):
        train(parse(RUN.format(root=tmp_path, name="run", steps=1, data=f'"{file}"'), "test"))


def test_offline_on_imported_data_with_feedback_while_it_runs(tmp_path, monkeypatch):
    """Half of the rewards are missing at first and come during the run; then their groups are learned from too."""
    rows = [
        {"prompt": TRAINING, "key": f"k/{i // 4}", "response": str(i), "reward": i % 2 if i < 32 else None}
        for i in range(64)
    ]
    file = tmp_path / "old.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = RUN.format(root=tmp_path, name="offline", steps=6, data=f'"{file}"')
    text += 'draw = { policy = "offline", order = "priority" }\nobjective = { unknown_behaviour = "proximal" }'
    from solera.store.selected import Selected

    real, drawn = Selected.draw, []

    def draw(self, groups, size, now):
        if len(drawn) == 2:  # from outside, by another connection
            with_rewards = [(i + 1, Reward(float(i % 2))) for i in range(32, 64)]
            assert open_store(tmp_path / "offline").revise(with_rewards) == 32
        chosen = real(self, groups, size, now)
        drawn.append({rollout.id for group in chosen for rollout in group.rollouts})
        return chosen

    monkeypatch.setattr(Selected, "draw", draw)
    result = train(parse(text, "test"))
    assert [row.get("draw/unrewarded") for row in result.metrics[:6]] == [32, 32, None, None, None, None]
    assert drawn[0] | drawn[1] == set(range(1, 33))
    assert drawn[2] | drawn[3] == set(range(33, 65))  # never used: they come first
    assert all(row["tokens/generated"] == 0 < row["tokens/trained"] for row in result.metrics[:6])
    assert all(row["sync/count"] == 0 for row in result.metrics[:6])  # there is no engine


def test_text_without_log_probabilities_is_refused_before_the_run_has_a_folder(tmp_path):
    (tmp_path / "old.jsonl").write_text(json.dumps({"prompt": TRAINING, "response": "1", "model": "teacher"}) + "\n")
    run = RUN.format(root=tmp_path, name="run", steps=1, data=f'"{tmp_path / "old.jsonl"}"')
    with pytest.raises(
        SoleraError, match=r"old\.jsonl: a rollout from 'model:teacher' .* such as red_weight or asymre"
    ):
        train(parse(run + 'draw = { policy = "offline" }', "test"))
    assert not (tmp_path / "run").exists()


def test_bad_data_is_refused_before_the_run_has_a_folder(tmp_path):
    (tmp_path / "old.jsonl").write_text('{"prompt": "1+1=", "respnse": "2"}\n')
    with pytest.raises(SoleraError, match=r"old\.jsonl:1: unknown field 'respnse'; did you mean response\?"):
        train(parse(RUN.format(root=tmp_path, name="run", steps=1, data=f'"{tmp_path / "old.jsonl"}"'), "test"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("shares", ['"self=0.5", "model:techer=0.5"', '"model:techer=1"'])
def test_a_misspelt_origin_is_refused_before_the_run_has_a_folder(tmp_path, shares):
    (tmp_path / "old.jsonl").write_text(json.dumps({"prompt": TRAINING, "response": "1", "model": "teacher"}) + "\n")
    run = RUN.format(root=tmp_path, name="run", steps=1, data=f'"{tmp_path / "old.jsonl"}"')
    said = "no rollouts of origin model:techer; store.data has model:teacher; did you mean model:teacher?"
    with pytest.raises(SoleraError, match=rf"^draw\.shares: {re.escape(said)}$"):
        train(parse(run + f'draw = {{ policy = "mixed", shares = [{shares}] }}', "test"))
    assert not (tmp_path / "run").exists()


def test_an_origin_that_may_still_be_imported_is_told(tmp_path):
    run = RUN.format(root=tmp_path, name="run", steps=1, data="")
    said = Console(file=io.StringIO())
    train(parse(run + 'draw = { policy = "mixed", shares = ["self=0.5", "human=0.5"] }', "test"), said)
    assert "note: draw.shares: no rollouts of origin human yet; import them during" in said.file.getvalue()
