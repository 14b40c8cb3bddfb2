"""The loop on the real parts: ages are the schedule's, each row and batch is accounted for, and it learns."""

import math
import sqlite3
import tomllib
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from solera import config as configuration
from solera.engines.in_process import InProcessEngine
from solera.errors import SoleraError
from solera.learner.learner import Learner
from solera.models import loading
from solera.models.language_model import LanguageModel
from solera.report.sinks import read_metrics
from solera.run import running
from solera.store.ledger import Ledger
from solera.training.supply import LockStep
from tests.command import solera


@pytest.mark.parametrize(
    ("v", "i", "d"),
    [
        (1, 1, 0),
        (1, 3, 0),
        (4, 1, 0),
        (7, 1, 0),
        (1, 1, 3),
        (4, 1, 3),
        (3, 2, 7),
        (5, 1, 5),
        ("never", 1, 0),
        ("never", 1, 4),
    ],
)
def test_recorded_ages_are_the_schedules(short_run, v, i, d):
    """Batch k is written by version max(0, v·⌊(k−d)/v⌋)."""
    steps = 16
    sync = 'sync = { rule = "never" }' if v == "never" else f"sync = {{ period = {v} }}"
    result = short_run(
        f"{sync}\nrun = {{ steps = {steps} }}\nlearn = {{ passes = {i} }}\n"
        f"collect = {{ prompts = 2, group_size = 4, offset = {d} }}"
    )
    written_by = [0 if v == "never" else max(0, v * ((k - d) // v)) for k in range(steps)]
    expected = [k - version for k, version in enumerate(written_by)]
    rows = result.metrics[:steps]
    assert [row["age/mean"] for row in rows] == [row["age/max"] for row in rows] == expected
    with sqlite3.connect(result.folder / "store.db") as database:
        ages = database.execute("select version, min(age), max(age), count(*) from uses group by version").fetchall()
    assert ages == [(k, age, age, 8) for k, age in enumerate(expected)]


def test_a_stale_engine_really_writes_with_old_weights(short_run):
    """At age 0 the policy is the one that wrote the data; within a period of syncs it moves away from it."""
    result = short_run("sync = { period = 3 }\nlearn = { lr = 3e-3, warmup = 0 }")
    tv = [row["divergence/tv_token"] for row in result.metrics[:6]]
    assert tv[0] < 1e-6
    assert tv[3] < 1e-6
    assert min(tv[1], tv[2], tv[4], tv[5]) > 1e-4


def test_several_passes_take_several_steps_on_one_batch(short_run):
    once = short_run("run = { steps = 1 }\nlearn = { warmup = 0 }", name="once")
    thrice = short_run("run = { steps = 1 }\nlearn = { warmup = 0, passes = 3 }", name="thrice")
    models = [loading.load(str(r.folder / "model"), torch.device("cpu"))[0].parameters() for r in (once, thrice)]
    start = loading.load("embedded", torch.device("cpu"))[0].parameters()
    moved = [sum((model[n] - start[n]).abs().sum().item() for n in start) for model in models]
    assert 1.5 * moved[0] < moved[1] < 4 * moved[0]


def test_the_same_seed_gives_the_same_run_and_another_does_not(short_run):
    def told(seed: int, name: str) -> list[dict[str, float]]:
        rows = short_run(f"run = {{ seed = {seed} }}", name=name).metrics
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]

    first = told(5, "a")
    assert told(5, "b") == first
    assert told(6, "c") != first


@pytest.mark.parametrize(
    "settings",
    [
        "sync = { period = 4 }",
        'sync = { rule = "never" }\ncollect = { offset = 2, OVERLAP }',
        'sync = { rule = "adaptive", set_point = 0.01, v_min = 3 }\ndiagnose = { probe_prompts = 8 }',
        'sync = { period = 3 }\nobjective = { name = "grpo", refill = true }\nevaluate = { every = 2 }',
        'sync = { period = 9 }\nobjective = { name = "dapo" }\ncollect = { group_size = 4, OVERLAP }',
    ],
)
def test_a_batch_written_while_another_is_learned_from_is_the_same(short_run, monkeypatch, settings):
    """And it is: at as many steps as the sync rule leaves room for."""
    written_ahead = []
    write = LockStep._ahead

    def noting(supply, first, groups):
        written_ahead.append(groups)
        return write(supply, first, groups)

    monkeypatch.setattr(LockStep, "_ahead", noting)

    def told(overlap: str) -> tuple[list[dict[str, float]], int]:
        written_ahead.clear()
        field = f"prompts = 4, overlap = {overlap}"
        toml = settings.replace("OVERLAP", field) if "OVERLAP" in settings else f"{settings}\ncollect = {{ {field} }}"
        rows = short_run(f"{toml}\nrun = {{ steps = 9 }}", name=overlap).metrics
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows], len(written_ahead)

    alone, beside = told("false"), told("true")
    assert alone[0] == beside[0]
    assert alone[1] == 0
    assert beside[1] >= 2


def test_weights_shared_with_the_learner_give_the_same_run_as_a_copy(short_run, monkeypatch):
    """At v = 1, whatever else: several passes, a lag of waiting batches."""
    shared = []
    sharing = LanguageModel.sharing
    monkeypatch.setattr(LanguageModel, "sharing", lambda model: shared.append(1) or sharing(model))

    def told(name: str) -> list[dict[str, float]]:
        rows = short_run("sync = { period = 1 }\nlearn = { passes = 2 }\ncollect = { offset = 1 }", name=name).metrics
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]

    first = told("shared")
    assert len(shared) == 1
    monkeypatch.setattr("solera.run.build.always_fresh", lambda sync: False)
    assert told("copied") == first
    assert len(shared) == 1


def test_nothing_is_written_ahead_of_a_sync(short_run, monkeypatch):
    """With v = 4 and nine batches, those after the first, fifth and ninth: 1, 2, 3 and 5, 6, 7."""
    begun = []
    monkeypatch.setattr(
        LockStep, "drawn", lambda self, groups, ahead: begun.append(self.store.watermark() // 64) if ahead else None
    )
    short_run("sync = { period = 4 }\ncollect = { overlap = true }\nrun = { steps = 9 }")
    assert begun == [1, 2, 3, 5, 6, 7]


def test_the_runs_folder_is_complete(short_run):
    result = short_run(
        'objective = { name = "grpo", beta = 0.01, ref_period = 2 }\nreport = { tensorboard = true, page = true }'
    )
    names = {path.name for path in result.folder.iterdir()}
    assert {"config.toml", "metrics.jsonl", "store.db", "model", "plot.png", "tensorboard"} <= names
    text = (result.folder / "config.toml").read_text()
    again = configuration.parse(text, "config.toml")
    assert (again.objective.kl, again.objective.epsilon_low, again.sync.period) == ("k3", 0.2, 10)
    assert configuration.dump(again) == text
    assert tomllib.loads(text)["run"]["name"] == "short"
    assert any((result.folder / "tensorboard").glob("events*"))
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(7))
    promised = {
        "reward/mean", "reward/zero_variance_fraction", "age/mean", "age/max", "sync/version", "sync/count",
        "divergence/tv_sequence", "divergence/tv_token", "divergence/kl", "divergence/ess", "clip/fraction", "kl/ref",
        "policy/entropy", "learn/grad_norm", "learn/lr", "response/length", "response/truncated", "tokens/generated",
        "tokens/trained", "time/generate", "time/learn",
    }  # fmt: skip
    assert promised <= rows[1].keys()
    assert "time/sync" in rows[0]
    assert {"eval/pass@1"} <= rows[0].keys() & rows[-1].keys()
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_refill_fills_the_batch_with_groups_that_differ(short_run):
    plain = short_run("collect = { prompts = 8 }", name="plain")
    filled = short_run("collect = { prompts = 8, refill_rounds = 50 }\nobjective = { refill = true }", name="filled")

    def live(row):
        return round(row["groups/drawn"] * (1 - row["reward/zero_variance_fraction"]))

    assert min(live(row) for row in plain.metrics[:6]) < 8
    assert all(live(row) >= 8 for row in filled.metrics[:6])
    with sqlite3.connect(filled.folder / "store.db") as database:
        assert database.execute("select count(*) from rollouts where uses = 0 and origin = 'self'").fetchone() == (0,)
        assert database.execute("select max(uses) from rollouts").fetchone() == (1,)


def test_refill_stops_at_its_bound(short_run):
    rounds = "collect = {{ prompts = 8, refill_rounds = {} }}\nobjective = {{ refill = true }}\ntask = {{ level = 4 }}"
    for refill_rounds in (1, 2):  # at level 4 the embedded model is never right: every group is flat, and doubles
        result = short_run(rounds.format(refill_rounds), name=f"r{refill_rounds}")
        assert [row["groups/drawn"] for row in result.metrics[:6]] == [8 * (1 + refill_rounds)] * 6


def test_gradient_checkpointing_gives_the_same_run(short_run):
    plain = short_run(name="plain")
    saving = short_run("learn = { gradient_checkpointing = true }", name="saving")
    assert [row["reward/mean"] for row in saving.metrics[:6]] == [row["reward/mean"] for row in plain.metrics[:6]]
    assert saving.accuracy_after == plain.accuracy_after


def test_the_reference_of_a_run_moves_as_configured(short_run):
    base = "collect = { prompts = 24 }\nlearn = { lr = 3e-3, warmup = 0 }\nobjective = { beta = 0.01"
    frozen = short_run(base + " }", name="frozen").metrics[:6]
    swapped = short_run(base + ", ref_period = 2 }", name="swapped").metrics[:6]
    mixed = short_run(base + ", ref_ema = 0.5 }", name="mixed").metrics[:6]
    assert all(row["kl/ref"] > 1e-4 for row in frozen[1:])
    assert [abs(row["kl/ref"]) < 1e-6 for row in swapped] == [True, False, True, False, True, False]
    assert all(mixed[k]["kl/ref"] > 1e-6 for k in range(1, 6))
    assert all(mixed[k]["kl/ref"] < 0.9 * frozen[k]["kl/ref"] for k in range(2, 6))


def test_evaluation_is_sampled_as_configured(short_run):
    greedy = short_run("evaluate = { problems = 100 }", name="greedy").accuracy_before
    hot = short_run("evaluate = { problems = 100, temperature = 5.0 }", name="hot").accuracy_before
    narrow = short_run("evaluate = { problems = 100, temperature = 5.0, top_p = 1e-6 }", name="narrow").accuracy_before
    assert narrow == greedy > 0.2 > hot


def test_several_samples_give_pass_at_n(short_run):
    """pass@1 lies in its interval, is at most pass@n, and the run's max and mean are over its evaluations."""
    result = short_run("evaluate = { problems = 100, temperature = 1.0, samples = 4, every = 2 }")
    rows = [row for row in result.metrics if "eval/pass@1" in row]
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    for row in rows:
        assert row["eval/pass@1_low"] < row["eval/pass@1"] < row["eval/pass@1_high"]
        assert row["eval/pass@1"] == row["eval/reward"] < row["eval/pass@4"] < 1
    accuracies = [row["eval/pass@1"] for row in rows]
    assert result.accuracy_max == max(accuracies)
    assert result.accuracy_mean == pytest.approx(sum(accuracies) / 4)


def test_training_leaves_torch_as_it_found_it(short_run):
    def settings():
        return torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.backends.cuda.cudnn_sdp_enabled()

    with torch.backends.mkldnn.flags(enabled=True):
        before = settings()
        short_run("run = { steps = 1, threads = 2 }")
        assert settings() == before


def test_it_learns(short_run):
    result = short_run(
        "run = { steps = 40, seed = 3 }\ncollect = { prompts = 32, group_size = 8 }\nevaluate = { problems = 200 }"
    )
    assert 0.2 <= result.accuracy_before <= 0.4
    assert result.accuracy_after > 0.6


def test_engine_error_is_kept_apart_from_staleness(short_run, monkeypatch):
    """It is measured at age 0 only, is rounding there, and a wrong temperature in the engine is said once."""
    rows = short_run("sync = { period = 3 }\nlearn = { lr = 3e-3, warmup = 0 }", name="clean").metrics[:6]
    assert [k for k, row in enumerate(rows) if "mismatch/logp" in row] == [0, 3]
    assert max(rows[k]["mismatch/logp"] for k in (0, 3)) < 1e-5
    assert rows[1]["divergence/tv_token"] > 1e-3
    real, said = InProcessEngine.generate, []
    monkeypatch.setattr(running, "say", lambda console, sentence: said.append(sentence))

    async def hotter(self, token_ids, sampling, seed):
        hot = replace(sampling, temperature=1.5) if sampling.max_tokens == 16 and sampling.temperature else sampling
        return await real(self, token_ids, hot, seed)

    monkeypatch.setattr(InProcessEngine, "generate", hotter)
    rows = short_run("sync = { period = 1 }", name="hotter").metrics[:6]
    assert all(row["mismatch/logp"] > 0.01 for row in rows)
    assert len([sentence for sentence in said if "check for a different temperature" in sentence]) == 1


def test_a_batch_that_an_update_fails_on_is_in_the_store(short_run, monkeypatch, tmp_path):
    """Whoever asks why wants to look at it."""
    update = Learner.update

    def fail(self, batch):
        if self.version == 2:
            raise SoleraError("not this one")
        return update(self, batch)

    monkeypatch.setattr(Learner, "update", fail)
    with pytest.raises(SoleraError, match="not this one"):
        short_run(
            'run = { steps = 5, device = "cpu" }\ncollect = { prompts = 4, group_size = 2 }\ndiagnose = { every = 0 }'
        )
    with closing(Ledger(next(tmp_path.rglob("store.db")))) as ledger:
        assert (ledger.watermark(), ledger.missing(24, 1, 0)) == (24, 16)


def test_without_a_page_a_run_ends_with_its_model(tmp_path):
    small = ["--collect.prompts", 2, "--collect.group_size", 2, "--evaluate.problems", 2, "--run.steps", 1]
    done = solera("train", *small, "--report.page", "false", "--run.name", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2].startswith("all evaluations") and done.stdout.endswith("model  runs/r/model\n")
    names = {path.name for path in (tmp_path / "runs" / "r").iterdir()}
    assert {"model", "metrics.jsonl"} <= names and not {"plot.png", "report.html"} & names
