"""The account of tokens: what engines sampled against what became of it, by hand and after kills."""

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import tarfile
import time
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from rich.console import Console

from solera.engines import decoding
from solera.engines.in_process import InProcessEngine
from solera.folder.account import Account
from solera.folder.checkpoint import checkpoints, read_state
from solera.folder.counts import Counts
from solera.records import Completion, PolicyVersion, Prompt, Reward, Rollout, Use
from solera.run import running
from solera.store.deferred import Deferred
from solera.store.ledger import Ledger
from solera.training.accounting import Accounting
from tests.command import solera, start
from tests.conftest import END
from tests.engines.test_in_flight import LONG, sent, slowly, some_versions, written_across_versions
from tests.engines.test_in_process import ragged_requests
from tests.previous.make import HERE
from tests.test_stream import Unhurried, rows_in, settings, train

NOW = PolicyVersion("run", 2)


class Sampler:
    """An engine of which only the count matters."""

    def __init__(self, sampled: int = 0) -> None:
        self.sampled = sampled


def written(admission: int, *lengths: int, graded: bool = True) -> list[Rollout]:
    """One group."""
    return [
        Rollout.of(
            Prompt(f"p/{admission}", (1, 2)),
            Completion(np.arange(n, dtype=np.int32), np.zeros(n, np.float32), ((n, 0),), "stop", lineage="run"),
            rewards=(Reward(1.0),) if graded else (),
        ).admitted(admission)
        for n in lengths
    ]


@pytest.fixture
def store(tmp_path):
    ledger = Ledger(tmp_path / "store.db")
    yield Deferred(ledger)
    ledger.close()


def learn(store: Deferred, version: int, groups: int, *without_effect: int) -> None:
    """Draw groups of two and learn from them; the members with these lengths have no part in the loss."""
    drawn = [rollout for group in store.draw(groups, 2) for rollout in group.rollouts]
    store.record([Use(r.id, version, version, None if r.length in without_effect else 0.5) for r in drawn])


def test_every_number_by_hand(tmp_path, store):
    """Lengths are powers of two: each sum says which responses are in it."""
    said, counts, engine = list[str](), Counts(), Sampler()
    account = Accounting(counts, (engine, Sampler()), store, tmp_path / "account.jsonl", said.append)
    account.restore(None, PolicyVersion("run", 0), 0)
    store.add(written(0, 1, 2) + written(1, 4, 8) + written(2, 16, 32, graded=False) + written(3, 64, 128))
    store.add(written(4, 256, 512))
    learn(store, 0, 2, 8)
    learn(store, 1, 1)  # problem 3; problem 2 has no rewards and is passed over
    for purpose, tokens in {"training": 1023 + 7, "probe": 11, "canary": 13, "unstored": 7}.items():
        counts.add(purpose, tokens)  # 7 were of an attempt that failed
    engine.sampled = 1030 + 24 + 5  # 5 were of a request that was cancelled
    found = account.take(NOW, idle=True)
    assert (found.generated, found.trained, found.waiting, found.writing, found.lost) == (1059, 199, 768, 0, 0)
    assert found.dropped == {
        "masked": 8, "leftover": 48, "too_old": 0, "superseded": 0, "unstored": 7, "aborted": 5,
    }  # fmt: skip
    assert found.other == {"probe": 11, "canary": 13, "evaluation": 0}
    assert found.difference == 0 and not said
    learn(store, 2, 1)  # problem 4, used first now
    engine.sampled += 2048
    counts.add("training", 1024)
    later = account.take(PolicyVersion("run", 4), idle=False)  # 1024 at the engine, 1024 at a task, none in the store
    assert (later.trained, later.waiting, later.writing, later.difference) == (967, 0, 2048, 0)
    assert json.loads((tmp_path / "account.jsonl").read_text().splitlines()[1])["tokens/writing"] == 2048


@pytest.mark.parametrize(
    ("spoil", "apart", "says"),
    [
        (lambda counts, engine: counts.add("training", 3), 3, "3 tokens in no other number"),
        (lambda counts, engine: counts.add("unstored", 2), -2, "2 tokens counted twice"),
        (lambda counts, engine: setattr(engine, "sampled", 2), -1, "1 token counted twice"),
    ],
    ids=["returned and gone", "counted twice", "the engine counts too few"],
)
def test_what_does_not_balance_is_said_with_the_difference(tmp_path, store, spoil, apart, says):
    said, counts, engine = list[str](), Counts(), Sampler()
    account = Accounting(counts, (engine, Sampler()), store, tmp_path / "account.jsonl", said.append)
    account.restore(None, PolicyVersion("run", 0), 0)
    store.add(written(0, 1, 2))
    counts.add("training", 3)
    engine.sampled = 3 + (3 if apart == 3 else 0)
    spoil(counts, engine)
    assert account.take(NOW, idle=True).difference == apart
    assert len(said) == 1 and f"does not balance at step 2: {says}" in said[0]


def test_a_resumed_account_counts_what_was_lost_and_what_is_superseded(tmp_path):
    """Checkpoint at 3 tokens, then 12 stored, 16 returned and not stored, 32 sampled and not returned: killed."""
    file, ledger = tmp_path / "tokens.count", Ledger(tmp_path / "store.db")
    store, counts = Deferred(ledger), Counts(file)
    first = Accounting(counts, (Sampler(), Sampler()), store, tmp_path / "account.jsonl", print)
    first.restore(None, PolicyVersion("run", 0), 0)
    store.add(written(0, 1, 2))
    counts.add("training", 3)
    counts.add("engine", 3)
    saved, watermark = first.take(PolicyVersion("run", 1), idle=True), store.watermark()
    store.add(written(1, 4, 8))
    store.flush()
    counts.add("training", 12 + 16)
    counts.add("engine", 12 + 16 + 32)
    counts.add("examiner", 64)
    counts.add("evaluation", 64)
    ledger.rewind(watermark, 1, "run")
    for _ in range(2):  # killed again before the next checkpoint: the same is lost, not twice as much
        engine = Sampler()
        again = Accounting(Counts(file), (engine, Sampler()), store, tmp_path / "account.jsonl", print)
        again.restore(saved, PolicyVersion("run", 1), watermark)
    found = again.take(PolicyVersion("run", 1), idle=True)
    assert (found.generated, found.waiting, found.lost, found.dropped["superseded"]) == (127, 3, 48, 12)
    assert found.other["evaluation"] == 64 and found.difference == 0
    ledger.close()


def test_an_engine_that_also_evaluates_is_counted_once(tmp_path, store):
    counts, engine = Counts(), Sampler()
    account = Accounting(counts, (engine, engine), store, tmp_path / "account.jsonl", print)
    account.restore(None, PolicyVersion("run", 0), 0)
    store.add(written(0, 1, 2))
    counts.add("training", 3)
    counts.add("evaluation", 4)
    engine.sampled = 7
    found = account.take(NOW, idle=True)
    assert (found.generated, found.difference, found.dropped["aborted"]) == (7, 0, 0)


class Moving(Counts):
    """Engines and episodes go on in other threads: all numbers grow after each reading."""

    def __getitem__(self, name: str) -> int:
        held = super().__getitem__(name)
        self.add(name, 7)
        if name != "engine":  # whatever was returned was sampled before
            self.add("engine", 7)
        return held


def test_an_account_taken_while_others_go_on_counting_balances(tmp_path, store):
    said = list[str]()
    account = Accounting(Moving(), (Sampler(), Sampler()), store, tmp_path / "account.jsonl", said.append)
    for version in (1, 2, 3):
        found = account.take(PolicyVersion("run", version), idle=False)
        assert found.difference == 0 and found.writing > 0
    assert not said


def test_a_count_that_was_deleted_is_raised_to_what_the_store_holds(tmp_path, store):
    said = list[str]()
    store.add(written(0, 1, 2))
    store.flush()
    account = Accounting(Counts(), (Sampler(), Sampler()), store, tmp_path / "account.jsonl", said.append)
    account.restore(Account(generated=3, waiting=3), PolicyVersion("run", 0), store.watermark())
    assert account.take(PolicyVersion("run", 0), idle=True).difference == 0
    assert len(said) == 1 and "3 too low" in said[0]


@pytest.mark.parametrize("plans", [False, True], ids=["plain", "continuous"])
def test_an_engine_counts_all_that_it_samples_also_for_cancelled_requests(tiny, plans, monkeypatch):
    """Counted here at the one function that samples. The continuous decoder also samples for rows that have ended."""
    drawn, told = [0], list[int]()
    real = decoding.sample

    def counting(logits_BV, *rest):
        drawn[0] += len(logits_BV)
        return real(logits_BV, *rest)

    monkeypatch.setattr(decoding, "sample", counting)
    model = tiny.with_plans() if plans else tiny
    engine = slowly(InProcessEngine(model, (END,), 64, tiny.module.dtype, early=True, count=told.append))
    requests = ragged_requests(6, 4, LONG)

    async def ask() -> tuple[int, int]:
        begun = [asyncio.ensure_future(engine.generate(*request)) for request in requests]
        while not (before := engine.sampled):
            await asyncio.sleep(0.005)
        for each in begun[::2]:
            each.cancel()
        done = await asyncio.gather(*begun, return_exceptions=True)
        returned = sum(len(each.token_ids_T) for each in done if isinstance(each, Completion))
        return returned, before

    returned, before = asyncio.run(ask())
    while engine.decoder.busy:
        time.sleep(0.01)
    assert 0 < before <= engine.sampled
    assert returned < engine.sampled <= len(requests) * LONG.max_tokens
    assert told == sorted(told) and told[-1] == engine.sampled
    if not plans:
        assert engine.sampled == drawn[0]


@pytest.mark.parametrize("plans", [False, True], ids=["plain", "continuous"])
def test_without_cancelled_requests_an_engine_has_sampled_what_it_returned(tiny, plans):
    versions = some_versions(tiny)
    model = versions[0].copy(tiny.module.dtype)
    engine = slowly(InProcessEngine(model.with_plans() if plans else model, (END,), 16, tiny.module.dtype, early=True))
    returned = written_across_versions(engine, versions, "keep")
    assert engine.sampled == sum(len(completion.token_ids_T) for _, completion in returned)
    engine.load(sent(9, versions[0]))
    assert engine.sampled == sum(len(completion.token_ids_T) for _, completion in returned)


# -- whole runs --------------------------------------------------------------------------------------------------------


def length_of(sequences: bytes) -> int:
    """Tokens in the spans, read from the bytes as docs in store/encoding.py describe them."""
    (_, count), place, total = struct.unpack_from("<BH", sequences), 3, 0
    for _ in range(count):
        length, has_logp, spans = struct.unpack_from("<I?I", sequences, place)
        place += 9 + 4 * length
        ranges = [struct.unpack_from("<iii", sequences, place + 12 * n) for n in range(spans)]
        tokens = sum(stop - start for start, stop, _ in ranges)
        place += 12 * spans + 4 * tokens * has_logp
        total += tokens
    return total


def sums(folder: Path, before: int, upto: int) -> dict[str, int]:
    """What became of the stored tokens, without any of Solera's code: as of a version and the last id of then."""
    found = dict.fromkeys(("trained", "masked", "superseded", "undrawn"), 0)
    with closing(sqlite3.connect(folder / "store.db")) as store:
        used: dict[int, tuple[int, bool]] = {}
        for version, id_, advantage in store.execute("select version, rollout_id, advantage from uses"):
            if version < before:
                first = (version, advantage is None)
                used[id_] = min(used.get(id_, first), first)
        rows = store.execute(
            "select id, sequences, superseded from rollouts where origin = 'self' and id <= ?", (upto,)
        )
        for id_, sequences, superseded in rows:
            if superseded:
                what = "superseded"
            else:
                what = "undrawn" if id_ not in used else "masked" if used[id_][1] else "trained"
            found[what] += length_of(sequences)
    return found


def counted_in(folder: Path) -> dict[str, int]:
    names = ("engine", "examiner", "training", "probe", "canary", "evaluation", "unstored")
    return dict(zip(names, struct.unpack("<7q", (folder / "tokens.count").read_bytes()), strict=True))


def assert_the_checkpoint_agrees(folder: Path) -> Account:
    """The newest checkpoint's account against the store's own rows."""
    state = read_state(checkpoints(folder / "checkpoints")[-1])
    account = state.account
    assert account is not None
    found = sums(folder, state.version, state.watermark)
    dropped = account.dropped
    assert account.trained == found["trained"] and dropped["masked"] == found["masked"]
    assert dropped["superseded"] == found["superseded"]
    assert account.waiting + dropped["leftover"] + dropped["too_old"] == found["undrawn"]
    rest = sum(found.values()) + dropped["unstored"] + dropped["aborted"] + account.lost + account.writing
    assert account.generated == rest + sum(account.other.values())
    return account


def verified(folder: Path) -> subprocess.CompletedProcess[str]:
    return solera("data", "verify", folder.resolve())


@pytest.mark.parametrize("mode", ["stream", "lock_step"])
def test_the_account_balances_to_the_token_after_each_of_several_kills(tmp_path, mode):
    file, folder = tmp_path / "run.toml", tmp_path / "run"
    collect = 'mode = "stream", max_age = 6' if mode == "stream" else 'mode = "lock_step", offset = 1'
    file.write_text(settings(tmp_path, "run", collect, "sync = { period = 3 }", steps=24))
    rng = np.random.default_rng(1)
    process, lost = start("train", file), 0
    for kill in range(4):
        wanted, until = rows_in(folder) + int(rng.integers(2, 6)), time.monotonic() + 120
        while rows_in(folder) < min(wanted, 20) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        assert process.poll() is None, f"ended before kill {kill}"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        if found := checkpoints(folder / "checkpoints"):
            before = read_state(found[-1]).account
            assert before is not None and before.difference == 0
        # Nothing runs now: what was sampled and is neither stored nor accounted for is lost.
        counts, stored = counted_in(folder), sum(sums(folder, 10**6, 10**9).values())
        spent = stored + sum(counts[name] for name in ("probe", "canary", "evaluation", "unstored"))
        lost = counts["engine"] + counts["examiner"] - spent - (before.dropped["aborted"] if found else 0)
        assert lost >= 0
        process = start("train", "--resume", folder)
    assert process.wait() == 0
    account = assert_the_checkpoint_agrees(folder)
    assert account.lost == lost
    counts = counted_in(folder)
    assert counts["engine"] + counts["examiner"] >= account.generated
    if mode == "lock_step":
        assert account.writing == 0
    result = verified(folder)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("account")
    return train(settings(root, "run", 'mode = "stream"', "sync = { period = 2 }"))


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("update rollouts set tokens = tokens + 2 where id = (select min(rollout_id) from uses)", "its row says"),
        ("update rollouts set tokens = null where id = (select min(rollout_id) from uses)", "the store has"),
        (
            "update uses set advantage = null, checksum = null where advantage is not null",
            "tokens trained on, the store",
        ),
        ("update rollouts set superseded = 1, seal = null where uses = 0", "tokens superseded, the store has"),
    ],
)
def test_verify_names_the_tokens_that_a_changed_row_adds_or_hides(finished, tmp_path, statement, says):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    assert verified(folder).returncode == 0
    with closing(sqlite3.connect(folder / "store.db")) as store, store:
        assert store.execute(statement).rowcount > 0
    result = verified(folder)
    assert result.returncode == 1 and says in result.stderr


def test_verify_names_a_count_that_is_too_low_or_gone(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    counts = counted_in(folder)
    (folder / "tokens.count").write_bytes(struct.pack("<7q", counts["engine"] - 500, *list(counts.values())[1:]))
    assert "but the checkpoint has counted" in verified(folder).stderr
    (folder / "tokens.count").unlink()
    assert "tokens.count is missing" in verified(folder).stderr


class Tiring(Unhurried):
    """Fails after it has written, for some problems, at the first attempt or always; and counts the tokens itself."""

    wasted = 0
    failed: ClassVar[set[tuple[str, int]]] = set()

    async def run(self, prompt, generate) -> Rollout:
        number = int(prompt.key.partition("/")[2])
        completion = await generate(prompt.token_ids)
        if prompt.key.startswith("sum") and number % 5 == 2:
            again = (prompt.key, int(completion.token_ids_T.sum()))
            if number % 2 or again not in Tiring.failed:
                Tiring.failed.add(again)
                Tiring.wasted += len(completion.token_ids_T)
                raise ValueError("tired")
        if number % 7 == 3 and prompt.key.startswith("sum"):
            second = await generate(prompt.token_ids)  # left out of the rollout
            Tiring.wasted += len(second.token_ids_T)
        return Rollout.of(prompt, completion, rewards=(Reward(float(completion.token_ids_T.sum() % 2)),))


@pytest.mark.parametrize("mode", ["lock_step", "stream"])
def test_tokens_of_failed_repeated_and_left_out_turns_are_dropped_as_unstored(tmp_path, mode):
    Tiring.wasted = 0
    Tiring.failed.clear()
    more = "sync = { period = 1 }"
    extra = (
        ', max_age = 0, retries = 1, errors = "missing"' if mode == "stream" else ', retries = 1, errors = "missing"'
    )
    folder = train(settings(tmp_path, "run", f'mode = "{mode}"{extra}', more), task=Tiring)
    account = assert_the_checkpoint_agrees(folder)
    assert account.dropped["unstored"] == Tiring.wasted > 0
    assert account.writing == 0 and account.difference == 0


def test_a_run_of_an_earlier_version_begins_its_account_at_the_resume(tmp_path, monkeypatch):
    with tarfile.open(HERE / "plain.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path / "plain")
    begun = read_state(checkpoints(Path("run/checkpoints"))[-1])
    assert begun.account is None
    told = StringIO()
    running.resume(Path("run"), Console(file=told, width=200))
    state = read_state(checkpoints(Path("run/checkpoints"))[-1])
    assert state.account is not None
    assert (state.account.since, state.account.difference) == (begun.version, 0)
    assert state.account.trained > 0 and state.account.generated > 0
    assert f"the account of tokens begins at step {begun.version}" in told.getvalue()
    assert verified(Path("run")).returncode == 0


def test_a_run_without_checkpoints_still_takes_its_account(tmp_path):
    text = settings(tmp_path, "run", 'mode = "lock_step"').replace("every = 3 }", "every = 0 }")
    folder = train(text)
    (line,) = (folder / "account.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row.pop("step") == 10
    assert row.pop("tokens/generated") == sum(row.values()) > 0


def test_evaluation_canary_and_probe_are_named(finished):
    account = assert_the_checkpoint_agrees(finished)
    assert min(account.other.values()) > 0
    with closing(sqlite3.connect(finished / "store.db")) as store:
        probes = store.execute("select sequences from rollouts where origin = 'probe'").fetchall()
    assert account.other["probe"] == sum(length_of(sequences) for (sequences,) in probes)
