"""The probe on the real parts: held out, never learned from, judged by the formula, and without effect on the run."""

import dataclasses
import sqlite3
from contextlib import closing

import numpy as np
import pytest
import torch

from solera.config import CollectConfig, Config, DiagnoseConfig, EvaluateConfig, RunConfig, with_settings
from solera.models import loading
from solera.records import PROBE
from solera.run.build import build_loop
from solera.run.parts import Parts, resolved
from solera.run.task import build_task
from solera.store.ledger import Ledger
from solera.sync.rules import SyncState
from solera.training.loop import Loop
from solera.training.step_metrics import StepMetrics
from tests.command import solera
from tests.sweep.test_student import integrated


class Nowhere:
    def log(self, step, metrics): ...


@pytest.fixture
def settings():
    """Other settings of the loop."""
    return {}


@pytest.fixture
def parts(tmp_path, settings):
    """A loop with weights delivered and a probe of five prompts, judged at every step; and what it says."""
    config = Config(
        run=RunConfig(steps=6, device="cpu"), collect=CollectConfig(prompts=4, group_size=6),
        evaluate=EvaluateConfig(problems=30), diagnose=DiagnoseConfig(probe_prompts=5, every=1, probe_group=6),
    )  # fmt: skip
    config = resolved(with_settings(config, settings, "settings"))
    model, codec = loading.load("embedded", torch.device("cpu"))
    store, said = Ledger(tmp_path / "store.db"), list[str]()
    parts = Parts(config, model, codec, build_task(config, codec), torch.float32, say=said.append)
    loop = build_loop(parts, store, Nowhere(), tmp_path)
    loop.delivery.deliver()
    yield loop, said
    store.close()


def move(loop: Loop, size: float) -> None:
    """Another version of the learner's weights."""
    generator = torch.Generator().manual_seed(loop.learner.version)
    with torch.no_grad():
        for parameter in loop.learner.model.parameters().values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    loop.learner.version += 1


@torch.no_grad()
def token_logp(loop: Loop) -> list[np.ndarray]:
    """log π of every token of every response of the probe, by one plain forward pass each."""
    found = []
    for rollout in loop.store.fetch(list(range(1, 31))):
        (sequence,) = rollout.sequences
        ids = torch.tensor(sequence.token_ids_T.tolist())
        logp = torch.log_softmax(loop.learner.model.module(input_ids=ids[None]).logits[0].double(), -1)
        found.append(np.array([logp[t - 1, ids[t]].item() for t in np.flatnonzero(sequence.mask_T)]))
    return found


def response_logp(loop: Loop) -> np.ndarray:
    return np.array([logp_T.sum() for logp_T in token_logp(loop)])


def test_an_update_is_judged_by_the_formula(parts):
    """α, π_k and π are three different policies; everything is computed again with numpy."""
    loop, _ = parts
    loop.probe.renew(SyncState())
    alpha, alpha_tokens = response_logp(loop), token_logp(loop)
    move(loop, 0.003)
    proximal, before = loop.probe.score(), response_logp(loop)
    move(loop, 0.01)
    found, after = loop.probe.judge(proximal), response_logp(loop)
    log_ratios = [pi_T - alpha_T for pi_T, alpha_T in zip(token_logp(loop), alpha_tokens, strict=True)]
    rollouts = loop.store.fetch(list(range(1, 31)))
    assert [r.prompt_key for r in rollouts] == [rollouts[6 * p].prompt_key for p in range(5) for _ in range(6)]
    w, w_k = (np.exp(logp - alpha).reshape(5, 6) for logp in (after, before))
    r = np.array([rollout.reward for rollout in rollouts]).reshape(5, 6)
    gains = ((w - w_k) * (r - r.mean(1, keepdims=True))).sum(1) / 5
    sigma = (r.var(1, ddof=1).mean() + 1e-4) ** 0.5
    beyond = ((w - 1) * (r - r.mean(1, keepdims=True))).sum(1).mean() / 5
    tv, tv_k = np.maximum(1 - w, 0).mean(), np.maximum(1 - w_k, 0).mean()
    low, high = found["improvement/low"], found["improvement/high"]
    worse, better = np.append(gains, min(0, *gains)), np.append(gains, max(0, *gains))
    widths = worse.mean() - low, high - better.mean()
    errors = [many.std(ddof=1) / 6**0.5 for many in (worse, better)]
    assert found["improvement/estimate"] == pytest.approx(gains.mean(), abs=1e-5)
    assert [integrated(width / error, 5) for width, error in zip(widths, errors, strict=True)] == pytest.approx(
        [0.95, 0.95], abs=1e-4
    )
    assert found["improvement/tight"] == pytest.approx(beyond / sigma - (1 - sigma) / sigma * tv - tv_k, abs=1e-4)
    assert found["improvement/theorem1"] == pytest.approx(
        beyond / sigma - 2 * (1 - sigma) / sigma * tv - 2 * tv_k, abs=1e-4
    )
    assert found["improvement/mean_w"] == pytest.approx(w.mean(), abs=1e-5)
    assert found["tokens/probe"] == sum(map(len, alpha_tokens)) > 30
    assert found["improvement/state"] == int(low > 0) - int(high < 0)
    assert found["probe/tv_sequence"] == pytest.approx(tv, abs=1e-5)
    assert found["probe/kl"] == pytest.approx(np.mean([np.sum(np.exp(x) - 1 - x) for x in log_ratios]), abs=1e-5)
    assert tv > 2 * tv_k > 0


def test_nothing_learned_is_no_improvement(parts):
    loop, _ = parts
    loop.probe.renew(SyncState())
    proximal = loop.probe.score()
    loop.learner.version += 1
    found = loop.probe.judge(proximal)
    assert found["improvement/estimate"] == found["improvement/state"] == found["probe/tv_sequence"] == 0
    assert (found["improvement/mean_w"], found["probe/ess"]) == pytest.approx((1, 1), abs=1e-12)


@pytest.mark.parametrize("cut", [{"pack_tokens": 0}, {"micro_batch_tokens": 48}], ids=str)
def test_a_run_resumed_with_other_micro_batches_compares_the_same_tokens(parts, cut):
    loop, said = parts
    loop.probe.renew(SyncState())
    state = loop.probe.state()
    loop.learner.config = dataclasses.replace(loop.learner.config, **cut)
    loop.learner.version += 1
    loop.probe.restore(state)
    found = loop.probe.judge(loop.probe.score())
    assert found["probe/ess"] == pytest.approx(1, abs=1e-6)
    assert found["probe/tv_token"] == pytest.approx(0, abs=1e-6)
    assert not said


def test_the_probe_of_an_older_checkpoint_is_not_compared_and_the_run_says_so(parts):
    loop, said = parts
    loop.probe.renew(SyncState())
    state = loop.probe.state()
    del state["order"]
    loop.probe.renew(SyncState(count=1, engine_version=loop.learner.version))  # ends the probe, writes no other
    loop.probe.restore(state)
    assert loop.probe.score() is None
    assert len(said) == 1 and "next sync" in said[0]


def test_a_policy_that_the_probe_does_not_cover_is_said_once(parts):
    loop, said = parts
    loop.probe.renew(SyncState())
    for _ in range(3):
        proximal = loop.probe.score()
        move(loop, 0.3)
        loop.probe.judge(proximal)
    assert len(said) == 1 and "weights on the probe average 0." in said[0]


@pytest.mark.parametrize("settings", [("collect.mode=stream", "sync.period=3")], ids=["stream"])
def test_a_learner_that_streams_does_not_wait_for_its_probe(parts):
    """It scores the responses with the weights that wrote them, which it no longer has, and keeps its own."""
    loop, _ = parts
    model = loop.learner.model.parameters()
    loop.probe.renew(SyncState())
    alpha = {name: parameter.detach().clone() for name, parameter in model.items()}
    move(loop, 0.02)
    moved = {name: parameter.detach().clone() for name, parameter in model.items()}
    proximal = loop.probe.score()
    assert all(torch.equal(parameter, moved[name]) for name, parameter in model.items())
    np.testing.assert_allclose(proximal.logp_T, np.concatenate(token_logp(loop)), atol=1e-5)
    loop.learner.model.module.load_state_dict(alpha, strict=False)
    as_alpha = np.concatenate(token_logp(loop))
    np.testing.assert_allclose(loop.probe.state()["alpha_logp_T"], as_alpha, atol=1e-5)
    assert np.abs(as_alpha - proximal.logp_T).max() > 0.01
    assert loop.probe.judge(proximal)["tokens/probe"] == len(as_alpha)


@pytest.mark.parametrize("settings", [("collect.mode=stream", "sync.period=3")], ids=["stream"])
def test_a_probe_under_way_is_complete_before_a_checkpoint_and_before_the_next_sync(parts):
    loop, _ = parts
    loop.probe.renew(SyncState())
    loop.save(SyncState(), None)
    assert len(loop.probe.state()["ids"]) == 30
    move(loop, 0.02)
    loop.probe.renew(SyncState())
    move(loop, 0.02)
    held = loop.engine.version
    loop.synced(SyncState(count=1, engine_version=held, due=True), StepMetrics())
    assert loop.engine.version > held
    probe = [r for r in loop.store.fetch(list(range(31, 61))) if r.origin == PROBE]
    assert len(probe) == 30 and {span.version for r in probe for span in r.sequences[0].spans} == {held}


@pytest.mark.parametrize("settings", [("collect.mode=stream", "sync.period=5")], ids=["stream"])
def test_a_step_that_is_due_before_the_probe_is_written_is_judged_once_it_is(parts):
    probe, engine = parts[0].probe, parts[0].engine
    probe.every = 50
    (due,) = (step for step in range(50) if probe.due(step))
    parts[0].learner.version = due
    with engine._writing:  # it writes nothing
        probe.renew(SyncState(count=1, engine_version=due - 5))
        assert [probe.judges(step) for step in (due, due + 1)] == [False, False]
        owing = probe.state()
    assert probe._begun.wait(60)
    assert [probe.judges(step) for step in (due + 2, due + 3)] == [True, False]
    settled = probe.state()
    for state, judged in ((owing, True), (settled, False)):  # as in a resumed run
        probe.restore(state)
        assert probe.judges(due + 4) == judged


@pytest.mark.parametrize("settings", [("collect.mode=stream", "sync.period=5")], ids=["stream"])
@pytest.mark.parametrize(
    ("every", "after", "last", "judged"),
    [(50, 0, False, False), (50, 3, False, False), (50, 4, False, True), (50, 0, True, True), (1, 0, False, True)],
)
def test_the_last_step_before_a_sync_and_the_last_of_all_wait_for_the_probe(parts, every, after, last, judged):
    probe, engine = parts[0].probe, parts[0].engine
    probe.every = every
    due = next(step for step in range(5, 55) if probe.due(step))
    parts[0].learner.version = due
    with engine._writing:
        probe.renew(SyncState(count=1, engine_version=due - 5))
        for step in range(due, due + after):
            assert not probe.judges(step)
        assert probe.judges(due + after, last) == judged


@pytest.mark.parametrize("settings", [("collect.mode=stream", "sync.period=5")], ids=["stream"])
def test_a_step_that_no_probe_could_judge_before_a_sync_gets_one_after_it(parts):
    """The sync came sooner than expected."""
    loop, _ = parts
    loop.probe.every = 50
    (due,) = (step for step in range(50) if loop.probe.due(step))
    loop.learner.version = due
    with loop.engine._writing:
        loop.probe.renew(SyncState(count=1, engine_version=due - 5))
        assert not loop.probe.judges(due)
    loop.probe.finish()
    loop.learner.version = due + 2
    loop.probe.renew(SyncState(count=1, engine_version=due))
    assert loop.probe.judges(due + 2, last=True) and len(loop.probe.score().logp_T) > 30


def test_one_step_in_every_block_is_judged_and_its_place_changes(parts):
    probe = parts[0].probe
    probe.every = 7
    places = [[k % 7 for k in range(7 * b, 7 * b + 7) if probe.due(k)] for b in range(60)]
    assert all(len(place) == 1 for place in places)
    assert {place[0] for place in places} == set(range(7))


def rows_of(result, without: tuple[str, ...]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith(without)} for row in result.metrics]


def test_the_probe_changes_nothing_else_and_is_never_learned_from(short_run):
    plain = short_run("run = { steps = 12 }\nsync = { period = 3 }\ndiagnose = { every = 0 }", name="plain")
    probed = short_run(
        "run = { steps = 12 }\nsync = { period = 3 }\ndiagnose = { every = 4, probe_prompts = 6 }", name="probed"
    )
    extra = ("time/", "probe/", "improvement/", "tokens/probe")
    assert rows_of(probed, extra) == rows_of(plain, extra)
    assert not any(name.startswith(extra[1:]) for row in plain.metrics for name in row)
    judged = [row for row in probed.metrics if "improvement/state" in row]
    assert [row["step"] // 4 for row in judged] == [0, 1, 2]
    assert {"estimate", "low", "high", "tight", "theorem1", "mean_w", "state"} == {
        name.split("/")[1] for name in judged[0] if name.startswith("improvement/")
    }
    with sqlite3.connect(probed.folder / "store.db") as database:
        versions = database.execute(
            "select version, count(*), max(uses) from rollouts where origin = ? group by version", (PROBE,)
        ).fetchall()
        learned = database.execute("select distinct prompt_key from rollouts where origin = 'self'").fetchall()
        looked_at = database.execute("select distinct prompt_key from rollouts where origin = ?", (PROBE,)).fetchall()
    assert all(version % 3 == 0 and (count, uses) == (24, 0) for version, count, uses in versions)
    assert not set(learned) & set(looked_at)


def test_probes_are_written_only_where_a_step_is_judged_before_the_next_sync(short_run):
    result = short_run("run = { steps = 24 }\nsync = { period = 1 }\ndiagnose = { every = 8, probe_prompts = 2 }")
    judged = [row["step"] for row in result.metrics if "improvement/state" in row]
    written = [row["step"] for row in result.metrics if "tokens/probe" in row]
    assert len(judged) == 3 and 0 not in judged
    assert written == judged


def test_a_streaming_run_judges_the_steps_of_lock_step_or_soon_after_and_its_account_balances(short_run):
    """A probe that is not written yet may postpone it up to the next sync, which comes every four steps."""
    settings = """run = {{ steps = 24, name = "{0}" }}\ncollect = {{ mode = "{0}" }}\nsync = {{ period = 4 }}
        diagnose = {{ every = 6, probe_prompts = 6 }}\ncheckpoint = {{ every = 5 }}"""
    due = [row["step"] for row in short_run(settings.format("lock_step")).metrics if "improvement/state" in row]
    assert [step // 6 for step in due] == [0, 1, 2, 3]
    result = short_run(settings.format("stream"))
    judged = [row for row in result.metrics if "improvement/state" in row]
    windows = [range(step, step // 4 * 4 + 4) for step in due]
    assert all(any(row["step"] in window for row in judged) for window in windows)
    assert all(any(row["step"] in window for window in windows) for row in judged)
    assert all(0.5 < row["improvement/mean_w"] < 1.5 and row["probe/ess"] > 0.3 for row in judged)
    assert solera("data", "verify", result.folder.resolve(), "--held-out").returncode == 0


@pytest.mark.parametrize(("period", "every"), [(1, 4), (4, 4), (2, 9)])
def test_every_token_of_a_probe_is_in_a_row_of_a_streaming_run(short_run, period, every):
    result = short_run(
        f"""run = {{ steps = 16 }}\ncollect = {{ mode = "stream" }}\nsync = {{ period = {period} }}
            diagnose = {{ every = {every}, probe_prompts = 3, probe_group = 4 }}"""
    )
    with sqlite3.connect(result.folder / "store.db") as database:
        ids = [one for (one,) in database.execute("select id from rollouts where origin = 'probe'")]
    with closing(Ledger(result.folder / "store.db")) as store:
        stored = sum(rollout.length for rollout in store.fetch(ids))
    assert sum(row.get("tokens/probe", 0) for row in result.metrics) == stored > 0


@pytest.mark.parametrize(("metric", "set_point"), [("tv_sequence", 0.05), ("kl", 0.03), ("ess", 0.95)])
def test_an_adaptive_run_syncs_at_its_set_point(short_run, metric, set_point):
    """Readings at a sync lie around the set-point, and only there does a reading reach it; faster learning syncs more
    often; v_min and v_max hold."""
    run = f"""run = {{{{ steps = 60 }}}}\nlearn = {{{{ lr = {{}}, warmup = 0 }}}}
              diagnose = {{{{ probe_prompts = 12, every = 0 }}}}
              sync = {{{{ rule = "adaptive", metric = "{metric}", set_point = {set_point}, v_min = 2, v_max = 20 }}}}"""
    counts, at_sync = [], []
    for lr in ("1e-4", "5e-4") if metric == "kl" else ("5e-4",):
        rows = short_run(run.format(lr), name=f"lr{lr}").metrics[:60]
        held = [row["sync/version"] for row in rows]
        for k, row in enumerate(rows[:-1]):
            reading, batches, synced = row[f"probe/{metric}"], k + 1 - held[k], held[k + 1] == k + 1
            share = (1 - reading) / (1 - set_point) if metric == "ess" else reading / set_point
            assert not synced or 2 <= batches <= 20
            assert synced or batches < 2 or share < 1
            at_sync += [share] if synced and 2 < batches < 20 else []
        counts.append(rows[-1]["sync/count"])
    assert counts == sorted(set(counts))
    assert len(at_sync) >= 5
    assert 0.8 <= np.median(at_sync) <= 1.2, at_sync
