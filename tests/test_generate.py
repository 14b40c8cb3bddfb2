"""`solera generate`: what is written, that it can be gone on with, and the way from prompts to a trained model."""

import json
import os
import shutil
import signal
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from solera.cli import main
from solera.models import loading
from solera.records import Rollout
from solera.run.running import resume
from solera.store.database import place_in
from solera.store.reading import reading
from solera.tasks.arithmetic import is_held_out
from tests.command import Forked, solera, start

SUMS = [(a, b) for a in range(12, 90, 7) for b in range(13, 90, 11) if not is_held_out(a, b)][:30]


def write_prompts(folder: Path, rows: list[dict]) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def prompts(tmp_path) -> Path:
    return write_prompts(tmp_path, [{"prompt": f"{a}+{b}=", "note": "no answer"} for a, b in SUMS])


def rollouts_in(folder: Path) -> list[Rollout]:
    with reading(place_in(folder)) as store:
        return [rollout for rollout, _ in store.rollouts()]


def words(prompts: Path, out: Path, *more: str) -> list[str]:
    chosen = ["--task", "jsonl", "--task.path", str(prompts), "--out", str(out), "--max_tokens", "6", *more]
    return ["generate", "embedded", "--device", "cpu", *chosen]


def refusal(capfd, *arguments: str) -> str:
    """The one line that the command ends with."""
    assert main(list(arguments)) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    return said


def test_from_prompts_without_answers_to_a_trained_model(tmp_path, prompts):
    """Every step is the command that a user types: generate, export, reward, train offline."""
    done = solera(*words(prompts, tmp_path / "out", "--samples", "8", "--export", "answers.jsonl"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "240 responses to 30 prompts" in done.stdout
    assert done.stdout.rstrip().endswith("add --task jsonl --task.path PROBLEMS.jsonl")
    assert solera("data", "verify", "out", cwd=tmp_path).stdout == "240 rollouts checked: no faults\n"
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert Counter(Counter(line["prompt"] for line in lines).values()) == {8: 30}
    assert all(line["rewards"] == [] and line["origin"] == "model:embedded" for line in lines)
    assert {json.dumps(line["sampling"]) for line in lines} == {'{"temperature": 1.0, "max_tokens": 6, "top_p": 1.0}'}
    assert len({line["lineage"] for line in lines}) == 1

    right = {f"{a}+{b}=": str(a + b) for a, b in SUMS}
    given = [{"id": line["id"], "value": float(line["response"] == right[line["prompt"]])} for line in lines]
    (tmp_path / "rewards.jsonl").write_text("".join(json.dumps(line) + "\n" for line in given))
    assert solera("data", "reward", "out", "rewards.jsonl", cwd=tmp_path).stdout == "240 rewards written\n"

    (command,) = [line.removeprefix("train   solera ") for line in done.stdout.splitlines() if line.startswith("train")]
    small = "--run.steps 4 --run.name run --collect.prompts 6 --evaluate.problems 10 --run.device cpu"
    trained = solera(*command.split(), *small.split(), cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert all(row["tokens/generated"] == 0 and row["tokens/trained"] > 0 for row in rows[:4])
    learned = rollouts_in(tmp_path / "runs/run")
    assert len(learned) == 240 and {r.origin for r in learned} == {"model:embedded"} and all(r.known for r in learned)
    assert sum(r.reward for r in learned) == sum(line["value"] for line in given)


@torch.no_grad()
def test_the_probabilities_are_those_that_the_model_gives(tmp_path, prompts):
    """At the temperature sampled at, by one plain forward pass for each response."""
    assert main(words(prompts, tmp_path / "out", "--samples", "2", "--temperature", "0.7", "--prompts", "5")) == 0
    found = rollouts_in(tmp_path / "out")
    assert len(found) == 10
    model, _ = loading.load("embedded", torch.device("cpu"))
    for rollout in found:
        (sequence,) = rollout.sequences
        (span,) = sequence.spans
        assert rollout.version == span.version == 0 and rollout.sampling.temperature == 0.7
        ids = torch.tensor(sequence.token_ids_T.tolist())
        logp_TV = torch.log_softmax(model.module(input_ids=ids[None]).logits[0].double() / 0.7, -1)
        wanted = [logp_TV[t - 1, ids[t]].item() for t in range(span.start, span.stop)]
        assert sequence.span_logp == pytest.approx(wanted, abs=1e-4)


def ask_to_stop(process: Forked, number: int, store: Path) -> None:
    """Once something is written."""
    deadline = time.monotonic() + 300
    while not _rows(store):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)


def _rows(store: Path) -> int:
    """None while the store is being made."""
    try:
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as database:
            return database.execute("select count(*) from rollouts").fetchone()[0]
    except sqlite3.OperationalError:
        return 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_or_killed_it_goes_on_without_repeating_a_prompt(tmp_path, prompts, number):
    many = write_prompts(tmp_path, [{"prompt": f"{a}+{b}="} for a in range(10, 60) for b in range(10, 50)])
    arguments = words(many, tmp_path / "out", "--samples", "3", "--engine.max_rows", "12")
    started = start(*arguments)
    ask_to_stop(started, number, tmp_path / "out" / "store.db")
    _, said = started.communicate()
    assert started.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert number == signal.SIGKILL or "run the same command to continue" in said
    before = rollouts_in(tmp_path / "out")
    assert 0 < len(before) < 6000 and len(before) % 3 == 0
    assert set(Counter(rollout.prompt_key for rollout in before).values()) == {3}
    assert main([*arguments, "--engine.max_rows", "1200"]) == 0
    after = rollouts_in(tmp_path / "out")
    assert Counter(Counter(rollout.prompt_key for rollout in after).values()) == {3: 2000}
    assert [rollout.id for rollout in after[: len(before)]] == [rollout.id for rollout in before]


def test_called_again_it_adds_what_is_missing_and_responses_differ(tmp_path, prompts, capfd):
    out, hot = tmp_path / "out", ("--temperature", "3")
    assert main(words(prompts, out, *hot, "--samples", "2", "--prompts", "4")) == 0
    assert main(words(prompts, out, *hot, "--samples", "16", "--prompts", "6")) == 0
    assert "96 responses to 6 prompts" in (said := capfd.readouterr().out) and "8 of them from before" in said
    assert "further" not in said
    assert main(words(prompts, out, *hot, "--samples", "3", "--prompts", "5")) == 0
    said = capfd.readouterr().out
    assert f"15 responses to 5 prompts in {out}, 15 of them from before; it holds 65 further responses to them" in said
    assert main(words(prompts, tmp_path / "whole", *hot, "--samples", "16", "--prompts", "6")) == 0

    def written(folder: Path) -> set[tuple[str, tuple[int, ...]]]:
        return {(r.prompt_key, tuple(r.sequences[0].token_ids_T.tolist())) for r in rollouts_in(folder)}

    assert written(out) == written(tmp_path / "whole")  # the seed of a response is its prompt's and its number's
    assert max(Counter(key for key, _ in written(out)).values()) > 2  # not the same one sixteen times
    for changed, name in (
        (["--temperature", "0.5"], "sampling.temperature = 3.0, but now it is 0.5"),
        ([*hot, "--seed", "3"], "run.seed = 0, but now it is 3"),
        ([*hot, "--origin", "model:other"], "origin = model:embedded, but now it is model:other"),
    ):
        capfd.readouterr()
        assert name in refusal(capfd, *words(prompts, out, *changed))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "put the model before the options"),
        (["embedded", "--prompts", "3"], "give a folder for the responses, --out FOLDER"),
        (
            ["embedded", "--out", "out"],
            "arithmetic generates problems without end: set how many to answer, such as --prompts",
        ),
        (["embedded", "--out", "out", "--prompts", "0"], "--prompts is 0; it must be at least 1"),
        (["embedded", "--out", "out", "--prompts", "1", "--samples", "-2"], "--samples is -2; it must be at least 1"),
        (["embedded", "--out", "out", "--prompts", "1", "--temperature", "0"], "sampling.temperature is 0.0"),
        (["embedded", "--out", "out", "--prompts", "1", "--origin", "self"], "it must be human, model:NAME or file:"),
        (["embedded", "--out", "taken", "--prompts", "1"], "--out taken already exists and has no store"),
        (["nowhere", "--out", "out", "--prompts", "1"], "nowhere"),
        (["embedded", "--out", "out", "--task", "jsonl", "--task.path", "none.jsonl"], "none.jsonl: cannot be read"),
        (["embedded", "--out", "out", "--task", "jsonl", "--task.path", "bad.jsonl"], "bad.jsonl:2: field 'prompt' is"),
        (["embedded", "--out", "out", "--task", "jsonl", "--task.path", "chat.jsonl"], "chat.jsonl:1: field 'prompt' "),
        (["embedded", "--out", "out", "--prompts", "1", "--export", "taken"], "--export taken: this is a folder"),
        (["embedded", "--out", "out", "--promts", "1"], "did you mean --prompts?"),
        (["embedded", "--out", "my answers", "--prompts", "1"], "solera: --out is 'my answers'; use letters, digits"),
        (["embedded", "--out", "taken/..", "--prompts", "1"], "solera: --out is 'taken/..'; use letters, digits"),
        (["embedded", "--out", "a" * 201, "--prompts", "1"], "at most 200 bytes, for the folder's name"),
    ],
)
def test_mistakes_are_refused_in_one_line_and_leave_nothing(tmp_path, monkeypatch, capfd, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1="}\n{"question": "2+2="}\n')
    (tmp_path / "chat.jsonl").write_text('{"prompt": [{"role": "user", "content": "1+1="}]}\n')
    before = sorted(path.name for path in tmp_path.iterdir())
    assert says in refusal(capfd, "generate", *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


EMBEDDED = Path(loading.__file__).parent / "embedded"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '=' if add_generation_prompt }}"


def test_chat_messages_go_through_the_models_template(tmp_path, capfd):
    model = Path(shutil.copytree(EMBEDDED, tmp_path / "chatty"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    rows = [{"prompt": [{"role": "user", "content": f"{i}1+{i}2"}]} for i in range(1, 4)]
    file, out = write_prompts(tmp_path, [*rows, rows[1]]), tmp_path / "out"
    command = ["generate", str(model), "--task", "jsonl", "--task.path", str(file), "--out", str(out)]
    assert main([*command, "--samples", "2", "--max_tokens", "4", "--export", str(tmp_path / "all.jsonl")]) == 0
    assert "1 of 4 prompts are duplicates and are answered only once" in " ".join(capfd.readouterr().err.split())
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [f"{i}1+{i}2=" for i in range(1, 4) for _ in range(2)]
    assert {line["origin"] for line in lines} == {"model:chatty"}


def test_a_runs_model_into_its_own_store_is_imported_with_its_lineage(short_run, tmp_path, capfd):
    """A resume keeps it; its age is known, since the run's own weights wrote it."""
    folder = short_run("run = { steps = 4 }\ncheckpoint = { every = 2 }").folder
    own = rollouts_in(folder)
    command = ["generate", str(folder), "--prompts", "5", "--samples", "3", "--out", str(folder), "--device", "cpu"]
    assert main(command) == 0
    added = rollouts_in(folder)[len(own) :]
    assert len(added) == 15 and {r.origin for r in added} == {"model:short"} and not any(r.rewards for r in added)
    lineage = next(rollout.lineage for rollout in own if rollout.origin == "self")
    assert {(r.lineage, r.version, r.age(6, lineage)) for r in added} == {(lineage, 4, 2)}
    assert main(command) == 0
    assert "15 of them from before" in capfd.readouterr().out and len(rollouts_in(folder)) == len(own) + 15
    shutil.rmtree(folder / "model")
    resume(folder)
    assert [r for r in rollouts_in(folder) if r.origin == "model:short"]
    capfd.readouterr()
    held_out = [*command[:2], "--held_out", "--prompts", "3", "--out", str(folder), "--device", "cpu"]
    assert "held-out problems, which are never trained on" in refusal(capfd, *held_out)


def test_samples_added_to_a_run_may_equal_earlier_ones(short_run, tmp_path):
    """Short answers repeat often. A folder of its own stores every response that is generated."""
    run, whole = short_run("run = { steps = 1 }").folder, tmp_path / "whole"
    for out, samples in ((run, "2"), (run, "8"), (whole, "8")):
        chosen = ["--prompts", "4", "--samples", samples, "--temperature", "0.7", "--device", "cpu"]
        assert main(["generate", "embedded", *chosen, "--out", str(out)]) == 0

    def written(folder: Path) -> Counter[tuple[str, tuple[int, ...]]]:
        found = [r for r in rollouts_in(folder) if r.origin == "model:embedded"]
        return Counter((r.prompt_key, tuple(r.sequences[0].token_ids_T.tolist())) for r in found)

    assert written(run) == written(whole)
    assert written(whole).total() == 32 and 4 < len(written(whole)) < 32


def test_held_out_problems_are_written_apart_and_left_out_of_training(short_run, tmp_path):
    out = tmp_path / "held"
    assert main(["generate", "embedded", "--held_out", "--prompts", "6", "--samples", "2", "--out", str(out)]) == 0
    keys = {rollout.prompt_key for rollout in rollouts_in(out)}
    assert len(keys) == 6
    assert all(is_held_out(*map(int, key.removeprefix("arithmetic/").rstrip("=").split("+"))) for key in keys)
    result = short_run(f'store = {{ data = ["{out}"] }}\nrun = {{ steps = 1 }}')
    assert not [rollout for rollout in rollouts_in(result.folder) if rollout.origin == "model:embedded"]


def test_a_folder_as_data_brings_what_its_export_brings(short_run, prompts, tmp_path):
    out, file = tmp_path / "out", tmp_path / "e.jsonl"
    assert main(words(prompts, out, "--samples", "3", "--export", str(file))) == 0
    for name, data in (("folder", out), ("file", file)):
        short_run(f'run = {{ steps = 1 }}\nstore = {{ data = ["{data}"] }}', name=name)

    def brought(name: str) -> list[tuple]:
        found = [r for r in rollouts_in(tmp_path / name) if r.origin == "model:embedded"]
        return [(r.id, r.prompt_key, r.lineage, r.version, r.sequences[0].span_logp.tolist()) for r in found]

    assert len(brought("folder")) == 90
    assert brought("folder") == brought("file")


def test_in_postgresql(postgres, prompts, tmp_path):
    url, name = postgres.replace("postgresql+psycopg", "postgresql"), f"out-{os.getpid()}-{time.time_ns()}"
    command = words(prompts, tmp_path / name, "--samples", "2", "--prompts", "4", "--url", url)
    assert main(command) == 0
    assert not (tmp_path / name / "store.db").exists()
    assert main([*command, "--samples", "3"]) == 0
    assert len(rollouts_in(tmp_path / name)) == 12


def test_a_folder_of_responses_is_not_resumed_and_nothing_held_out_is_no_task_to_train_on(prompts, tmp_path, capfd):
    out = tmp_path / "out"
    assert main(words(prompts, out, "--samples", "1", "--prompts", "2")) == 0
    capfd.readouterr()
    said = refusal(capfd, "train", "--resume", str(out))
    assert f"to train on them: solera train --store.data {out} --draw.policy offline" in said
    rows = write_prompts(tmp_path, [{"prompt": f"{i}", "answer": "1"} for i in range(9)])
    none = ["--task", "jsonl", "--task.path", str(rows), "--task.held_out_share", "0", "--run.root", str(tmp_path)]
    assert "task.held_out_share = 0.0 holds out none of its 9 different prompts: raise it" in refusal(
        capfd, "train", *none
    )


def test_two_at_once_are_refused(prompts, tmp_path, capfd):
    from solera.folder.files import alone

    out = tmp_path / "out"
    assert main(words(prompts, out, "--samples", "1", "--prompts", "2")) == 0
    capfd.readouterr()
    with alone(out):
        assert "another process is writing into this store" in refusal(capfd, *words(prompts, out, "--samples", "1"))


def test_weights_have_the_same_name_wherever_they_lie(tmp_path, prompts):
    """The lineage of a model that no run has trained: by its values, so that responses can be told apart by author."""
    shutil.copytree(EMBEDDED, tmp_path / "copy")
    for model, out in (("embedded", "a"), (str(tmp_path / "copy"), "b")):
        command = words(prompts, tmp_path / out, "--samples", "1", "--prompts", "2")
        assert main([command[0], model, *command[2:]]) == 0
    first, second = (rollouts_in(tmp_path / out) for out in ("a", "b"))
    assert {r.lineage for r in first} == {r.lineage for r in second}
    assert [r.origin for r in second] == ["model:copy"] * 2
    assert np.array_equal(first[0].sequences[0].token_ids_T, second[0].sequences[0].token_ids_T)


@pytest.mark.parametrize(("level", "told"), [("1", " --task.level 1"), ("2", "")])
def test_the_command_that_trains_names_the_level_unless_it_is_the_default(tmp_path, capfd, level, told):
    out = tmp_path / "out"
    options = ["--device", "cpu", "--samples", "8", "--prompts", "2", "--task.level", level, "--out", str(out)]
    assert main(["generate", "embedded", *options]) == 0
    assert f"train   solera train --store.data {out} --draw.policy offline{told}\n" in capfd.readouterr().out
