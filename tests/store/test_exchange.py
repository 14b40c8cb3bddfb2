"""Files in and out of a ledger: all or none, once however often, bad lines set aside."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from solera.config import TaskConfig, resolve_task
from solera.errors import SoleraError
from solera.models.loading import load_reader
from solera.records import PROBE, Reward, Sampling
from solera.store.exchange import check_readable, export_rollouts, import_rewards, import_rollouts
from solera.store.ledger import Ledger
from solera.store.lines import plain
from solera.store.reading import reading
from solera.store.statistics import statistics
from solera.store.verifying import verify
from solera.tasks.jsonl import read_split
from tests.conftest import random_rollout
from tests.store.test_ledger import drawn, rollouts, waiting
from tests.store.test_lines import TRAINING, damaged, reader_of


@pytest.fixture(scope="module")
def reader():
    return reader_of(TaskConfig(), load_reader("embedded"), "file:f")


@pytest.fixture
def ledger(place):
    opened = Ledger(place)
    yield opened
    opened.close()


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def row(response: int, **fields) -> dict:
    return {"prompt": TRAINING, "response": str(response), "model": "m", **fields}


def test_importing_again_adds_nothing_and_revises_changed_rewards(ledger, reader, tmp_path):
    file = lines(tmp_path / "f.jsonl", row(1, reward=1), row(2), row(2), row(3, reward=0))
    assert import_rollouts(ledger, file, reader).rollouts == 4  # the same text twice is two samples
    done = import_rollouts(ledger, file, reader)
    assert (done.rollouts, done.known, done.rewards) == (0, 4, 0)
    assert drawn(ledger, 9, 2) == [(f"arithmetic/{TRAINING}", [1, 4])]
    file = lines(tmp_path / "f.jsonl", row(1, reward=1), row(2, reward=0.5), row(2), row(3, reward=0.25), row(4))
    done = import_rollouts(ledger, file, reader)
    assert (done.rollouts, done.known, done.rewards) == (1, 4, 2)
    (group,) = ledger.draw(1, 3)
    assert [(r.id, r.reward) for r in group.rollouts] == [(1, 1.0), (2, 0.5), (4, 0.25)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_export_does_not_bring_held_out_rows_in(ledger, tmp_path, kind):
    """One run held out nothing of what another run, over the same prompts with other answers, holds out."""
    model, file, data = load_reader("embedded"), tmp_path / f"out.{kind}", tmp_path / "sums.jsonl"
    lines(data, *({"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(40)))
    task = TaskConfig("jsonl", path=str(data), held_out_share=0.5)
    training, held_out = read_split(resolve_task(task), frozenset())
    other = lines(tmp_path / "other.jsonl", {"prompt": "9=", "answer": "9"})
    whole = reader_of(TaskConfig("jsonl", path=str(data), held_out_path=str(other)), model, "file:f")
    answers = lines(
        tmp_path / "a.jsonl", *({"prompt": row.data["prompt"], "response": "1"} for row in training + held_out)
    )
    assert import_rollouts(ledger, answers, whole).rollouts == 40
    export_rollouts(ledger.place, file)
    lines(data, *({"prompt": f"{a}+1=", "answer": "7"} for a in range(40)))  # every key is another
    half = reader_of(task, model, "file:f")
    again = import_rollouts(ledger, file, half)
    assert (again.rollouts + again.known, again.held_out, again.complaints) == (len(training), len(held_out), [])
    assert len(held_out) > 5


def test_a_bad_line_refuses_the_whole_file(ledger, reader, tmp_path):
    file = lines(tmp_path / "f.jsonl", row(1, reward=1), "", "{not json", row(2, reward=1))
    with pytest.raises(SoleraError, match=r"f\.jsonl:3: not JSON: .* at character 2"):
        import_rollouts(ledger, file, reader)
    assert ledger.watermark() == 0


def test_bad_lines_are_set_aside_and_can_be_mended(ledger, reader, tmp_path):
    file, bad = lines(tmp_path / "f.jsonl", row(1), "{not json", row(2), {"prompt": 3}), tmp_path / "bad.jsonl"
    done = import_rollouts(ledger, file, reader, bad)
    assert (done.rollouts, len(done.complaints)) == (2, 2)
    assert [complaint.split(": ")[0] for complaint in done.complaints] == [f"{file}:2", f"{file}:4"]
    assert bad.read_text() == '{not json\n{"prompt": 3}\n'


def test_what_fails_while_it_is_written_leaves_nothing(ledger, reader, tmp_path, monkeypatch):
    file = lines(tmp_path / "f.jsonl", *(row(i, reward=1) for i in range(30)))
    monkeypatch.setattr("solera.store.ledger.IMPORTED_TOGETHER", 10)
    real, calls = ledger._add_rewards.run, iter(range(9))

    def run(connection, rows):
        if next(calls) == 2:
            raise SoleraError("the disk is full")
        real(connection, rows)

    monkeypatch.setattr(ledger._add_rewards, "run", run)
    with pytest.raises(SoleraError, match="the disk is full"):
        import_rollouts(ledger, file, reader)
    assert ledger.watermark() == 0
    monkeypatch.setattr(ledger._add_rewards, "run", real)
    assert import_rollouts(ledger, file, reader).rollouts == 30


def test_a_file_of_rewards(ledger, tmp_path):
    ledger.add(rollouts("aabb", reward=None))
    assert waiting(ledger, 2) == 0
    file = lines(tmp_path / "r.jsonl", {"id": 1, "value": 1}, {"id": 2, "value": 0}, {"id": 3, "value": 0.5})
    assert import_rewards(ledger, file).rewards == 3
    assert import_rewards(ledger, file).rewards == 0
    assert waiting(ledger, 2) == 1
    file = lines(tmp_path / "r.jsonl", {"id": 2, "value": 2}, {"id": 99, "value": 1}, {"id": 4, "value": 0})
    with pytest.raises(SoleraError, match=r"r\.jsonl:2: field 'id': there is no rollout 99; the last is 4"):
        import_rewards(ledger, file)
    assert ledger.draw(1, 2)[0].rollouts[1].reward == 0
    assert import_rewards(ledger, file, tmp_path / "bad.jsonl").rewards == 2
    assert [r.reward for r in ledger.draw(1, 2)[0].rollouts] == [1, 2]
    assert waiting(ledger, 2) == 2


def test_a_probe_is_given_no_reward(ledger, tmp_path):
    ledger.add([dataclasses.replace(rollouts("a")[0], origin=PROBE), *rollouts("a", reward=None)])
    file = lines(tmp_path / "r.jsonl", {"id": 2, "value": 1}, {"id": 1, "value": 1})
    with pytest.raises(
        SoleraError, match=r"r\.jsonl:2: field 'id': rollout 1 belongs to a probe, which training does not use;"
    ):
        import_rewards(ledger, file)
    with pytest.raises(SoleraError, match="rollout 1 belongs to a probe"):
        ledger.revise([(2, Reward(1.0)), (1, Reward(1.0))])
    assert import_rewards(ledger, file, tmp_path / "bad.jsonl").rewards == 1


def test_what_a_resume_set_aside_is_given_no_reward(ledger, reader, tmp_path):
    """Nothing would ever learn from it; what was imported after the checkpoint stays, and is graded as before."""
    ledger.add(rollouts("a", reward=None))
    ledger.add(rollouts("a", reward=None))
    answers = lines(tmp_path / "f.jsonl", row(1))
    import_rollouts(ledger, answers, reader)
    ledger.rewind(1, version=0, lineage="test")
    file = lines(tmp_path / "r.jsonl", {"id": 1, "value": 1}, {"id": 3, "value": 1}, {"id": 2, "value": 1})
    says = "rollout 2 was generated after the checkpoint that the run resumed from, so training does not use it; "
    with pytest.raises(
        SoleraError, match=rf"r\.jsonl:3: field 'id': {says}solera data export lists the ids that can be rewarded"
    ):
        import_rewards(ledger, file)
    with pytest.raises(SoleraError, match=says):
        ledger.revise([(1, Reward(1.0)), (2, Reward(1.0))])
    assert import_rewards(ledger, file, tmp_path / "bad.jsonl").rewards == 2
    assert import_rollouts(ledger, lines(answers, row(1, reward=0.5)), reader).rewards == 1


def test_an_import_repeats_what_an_earlier_solera_set_aside(ledger, reader, tmp_path):
    """Its resume did not spare what was imported: such a file was read again, and still is."""
    import_rollouts(ledger, lines(tmp_path / "f.jsonl", row(1)), reader)
    with ledger.transaction(write=True) as connection:
        connection.exec_driver_sql("UPDATE rollouts SET superseded = 1")
    assert import_rollouts(ledger, lines(tmp_path / "f.jsonl", row(1, reward=1)), reader).rewards == 1


def test_a_reward_that_names_no_part_is_not_added_beside_others(ledger, tmp_path):
    parts = (Reward(1.0, "exact", "exact"), Reward(0.2, "digits", "rewards.py:digits"))
    (own,) = rollouts("a")
    ledger.add([dataclasses.replace(own, rewards=parts), *rollouts("a"), *rollouts("a", reward=None)])
    unnamed = [{"id": id_, "value": 0} for id_ in (3, 1, 2)]
    file = lines(tmp_path / "r.jsonl", *unnamed)
    says = r"r\.jsonl:2: no part is given, but the reward of rollout 1 has digits, exact: name the part to change"
    with pytest.raises(SoleraError, match=says):
        import_rewards(ledger, file)
    assert import_rewards(ledger, file, tmp_path / "bad.jsonl").rewards == 2
    assert json.loads((tmp_path / "bad.jsonl").read_text()) == unnamed[1]
    lines(tmp_path / "r.jsonl", {"id": 1, "value": 0, "part": "exact"}, {"id": 1, "value": 0.5, "part": "reward"})
    assert import_rewards(ledger, file).rewards == 2
    lines(tmp_path / "r.jsonl", {"id": 1, "value": 0.25})  # now there is a part of that name
    assert import_rewards(ledger, file).rewards == 1
    assert [round(r.reward, 9) for r in ledger.draw(1, 3)[0].rollouts] == [0.45, 0, 0]


def test_revisions_are_counted_and_parts_are_kept_apart(ledger):
    ledger.add(rollouts("a"))  # reward 1.0 from the task
    given = [(1, Reward(0.5, source="p")), (1, Reward(0.25, "style", "p")), (1, Reward(0.75, source="p"))]
    assert ledger.revise(given) == 3
    (rollout,) = ledger.draw(1, 1)[0].rollouts
    assert sorted((r.part, r.revision, r.value) for r in rollout.rewards) == [
        ("reward", 0, 1.0), ("reward", 1, 0.5), ("reward", 2, 0.75), ("style", 0, 0.25),
    ]  # fmt: skip
    assert rollout.reward == 1.0
    with pytest.raises(SoleraError, match="there is no rollout 7"):
        ledger.revise([(1, Reward(0.0)), (7, Reward(0.0))])
    assert ledger.draw(1, 1)[0].rollouts[0].reward == 1.0


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_an_export_is_another_stores_import(ledger, reader, tmp_path, name):
    ledger.add([*rollouts("aab"), *rollouts("b", reward=None)])
    ledger.revise([(2, Reward(0.5, position=1))])
    assert export_rollouts(ledger.place, tmp_path / name) == 4
    other = Ledger(tmp_path / "other.db")
    done = import_rollouts(other, tmp_path / name, reader)
    assert (done.rollouts, done.known) == (4, 0)
    with reading(ledger.place) as a, reading(other.place) as b:
        for (ours, _), (theirs, _) in zip(a.rollouts(), b.rollouts(), strict=True):
            assert (ours.prompt_key, ours.reward, ours.version) == (theirs.prompt_key, theirs.reward, theirs.version)
            assert [r.position for r in theirs.rewards] == [r.position for r in ours.rewards][-len(theirs.rewards) :]
            assert ours.sequences[0].span_logp.tobytes() == theirs.sequences[0].span_logp.tobytes()
    assert statistics(other.place)["origin"] == [("file:f", 4, 2, 1, pytest.approx(2.5 / 3), 0, 0)]
    other.close()
    assert not list(tmp_path.glob(".unfinished*"))


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_stores_own_export_adds_nothing_to_it(ledger, reader, tmp_path, name):
    """Though `self` becomes `file:NAME` on its way in. Other tokens under a known id are another's; so is a lineage."""
    (same,) = rollouts("b")
    ledger.add([*rollouts("aa"), same, same, *rollouts("b", reward=None)])
    import_rollouts(ledger, lines(tmp_path / "f.jsonl", row(1)), reader)
    export_rollouts(ledger.place, tmp_path / name)
    done = import_rollouts(ledger, tmp_path / name, reader)
    assert (done.rollouts, done.known, done.rewards, ledger.watermark()) == (0, 6, 0, 6)
    with reading(ledger.place) as opened:
        first, second, *_ = (plain(rollout, 0.0) for rollout, _ in opened.rollouts())
    first["rewards"] = [{"value": 0.25, "source": "anna"}]
    edited = lines(tmp_path / "edited.jsonl", first, {**second, "lineage": "another"}, {**first, "id": 2})
    done = import_rollouts(ledger, edited, reader)
    assert (done.rollouts, done.known, done.rewards) == (2, 1, 1)
    assert ledger.fetch([1])[0].reward == 0.25
    done = import_rollouts(ledger, lines(tmp_path / "odd.jsonl", {**first, "id": 2**70}, {**first, "id": [1]}), reader)
    assert done.rollouts + done.known == 2


def test_what_a_resume_set_aside_can_be_imported(ledger, reader, tmp_path):
    ledger.add(rollouts("ab"))
    export_rollouts(ledger.place, tmp_path / "out.jsonl")
    ledger.rewind(1, version=0, lineage="test")
    done = import_rollouts(ledger, tmp_path / "out.jsonl", reader)
    assert (done.rollouts, done.known) == (1, 1)


def test_probes_are_not_exported(ledger, reader, tmp_path):
    """They answer held-out problems, which no run may train on."""
    probes = [dataclasses.replace(rollout, origin=PROBE) for rollout in rollouts("cc")]
    ledger.add([*rollouts("a"), *probes, *rollouts("b")])
    assert export_rollouts(ledger.place, tmp_path / "out.jsonl") == 2
    other = Ledger(tmp_path / "other.db")
    assert import_rollouts(other, tmp_path / "out.jsonl", reader).rollouts == 2
    other.close()


def test_a_parquet_file_of_several_responses(ledger, reader, tmp_path):
    file, bad = tmp_path / "answers.parquet", tmp_path / "bad.jsonl"
    rows = [
        {"prompt": TRAINING, "responses": ["80", "81"], "rewards": [1.0, None], "model": "m"},
        {"prompt": None, "responses": ["80"], "rewards": [0.0], "model": "m"},
        {"prompt": TRAINING, "responses": ["80"], "rewards": [0.5, 0.5], "model": "m"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    with pytest.raises(SoleraError, match=r"answers\.parquet:2: field 'prompt' is missing"):
        import_rollouts(ledger, file, reader)
    done = import_rollouts(ledger, file, reader, bad)
    assert (done.rollouts, len(done.complaints)) == (2, 2)
    assert [json.loads(line)["rewards"] for line in bad.read_text().splitlines()] == [[0.0], [0.5, 0.5]]
    assert import_rollouts(ledger, file, reader, bad).known == 2
    ledger.revise([(2, Reward(0.25))])
    (group,) = ledger.draw(1, 2)
    assert [(r.reward, r.origin) for r in group.rollouts] == [(1.0, "model:m"), (0.25, "model:m")]
    file.write_bytes(b"PAR1 no more")
    with pytest.raises(SoleraError, match=r"answers\.parquet: cannot be read as Parquet"):
        import_rollouts(ledger, file, reader)


def test_ten_thousand_damaged_lines_among_good_ones(ledger, reader, tmp_path):
    """Each is refused with its place or, where the damage left it valid, taken; all good ones are kept."""
    rng = np.random.default_rng(5)
    tokens = json.dumps(plain(random_rollout(rng, 1, (2, 3), 0.5, sampling=Sampling(1.0, 9)), 0.0)).encode()
    text = json.dumps(row(82, reward=1, finish_reason="stop", key="k")).encode()
    every = [damaged(rng, (tokens, text)[n % 2]).replace(b"\n", b" ") or b"{" for n in range(10_000)]
    places = set(range(0, 11_000, 11))
    rest, good = iter(every), (json.dumps(row(n, reward=0)).encode() for n in range(1000))
    written = [next(good) if n in places else next(rest) for n in range(11_000)]
    file, bad = tmp_path / "f.jsonl", tmp_path / "bad.jsonl"
    file.write_bytes(b"\n".join(written) + b"\n")
    with pytest.raises(SoleraError, match=r"f\.jsonl:\d+: "):
        import_rollouts(ledger, file, reader)
    assert ledger.watermark() == 0
    done = import_rollouts(ledger, file, reader, bad)
    assert len(done.complaints) > 8_000 and all("\n" not in complaint for complaint in done.complaints)
    numbers = [int(complaint.removeprefix(f"{file}:").split(":")[0]) for complaint in done.complaints]
    assert bad.read_bytes().split(b"\n")[:-1] == [written[n - 1] for n in numbers]
    assert not places & {n - 1 for n in numbers}
    assert done.rollouts + len(numbers) == 11_000 - sum(not line.strip() for line in written)
    assert not verify(ledger.place).complaints


def test_a_pipe_is_not_opened_to_look_at_it(tmp_path):
    """Its writer would be cut off."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_readable(pipe)  # to open it would wait for a writer
    with pytest.raises(SoleraError, match="cannot be read"):
        check_readable(tmp_path / "nothing")
