"""The examples, as a user runs them but shorter, and parts of one's own across a resume."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import solera
from solera.config import override
from solera.report.sinks import read_metrics
from solera.run.own_code import OwnCode
from solera.run.parts import resolved
from solera.run.running import InterruptedRunError
from tests.command import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_the_example_runs_and_learns(tmp_path, example):
    done = run_script(EXAMPLES / example, 25, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "%" in done.stdout.splitlines()[-1]
    (folder,) = (tmp_path / "runs").iterdir()
    accuracies = [row["eval/pass@1"] for row in read_metrics(folder / "metrics.jsonl") if "eval/pass@1" in row]
    assert accuracies[-1] > accuracies[0] + 0.05


def config(tmp_path: Path) -> solera.Config:
    return solera.Config(
        run=solera.RunConfig(steps=6, root=str(tmp_path), name="own", device="cpu"),
        collect=solera.CollectConfig(prompts=4, group_size=4),
        evaluate=solera.EvaluateConfig(every=0, problems=8),
        report=solera.ReportConfig(tensorboard=False, progress=False, page=False),
    )


def test_a_run_with_own_code_goes_on_only_with_own_code(tmp_path):
    calls, measured = [], []

    def rule(state: solera.SyncState, version: int, diagnosis: dict[str, float]) -> solera.SyncState:
        calls.append(version)
        measured.append(diagnosis["divergence/tv_token"])
        if version == 3 and len(calls) == 3:
            os.kill(os.getpid(), 2)  # Ctrl-C in the middle of the run
        return replace(state, due=True)

    with pytest.raises(InterruptedRunError):
        solera.train(config(tmp_path), rule=rule)
    with pytest.raises(
        solera.SoleraError, match=r"your own code for rule: resume it with solera.resume\(.*rule=\.\.\.\)"
    ):
        solera.resume(tmp_path / "own")
    result = solera.resume(tmp_path / "own", rule=rule)
    assert calls == [1, 2, 3, 4, 5, 6]
    assert measured == [row["divergence/tv_token"] for row in result.metrics if "divergence/tv_token" in row]
    assert [row["sync/version"] for row in result.metrics if "sync/version" in row] == [0, 1, 2, 3, 4, 5]


def test_a_run_with_an_own_objective_is_named_so():
    own = OwnCode(objective=solera.custom_objective(lambda tokens: None))
    named, plain = resolved(solera.Config(), own).run.name, resolved(solera.Config()).run.name
    assert named.endswith("-own-objective-s0") and "own" not in plain


def test_a_reward_function_from_python_counts_beside_the_graders(tmp_path):
    seen = []

    def constant(rollout: solera.Rollout, row: dict) -> float:
        seen.append(row["answer"])
        return 0.25

    settings = replace(config(tmp_path), reward=solera.RewardConfig(functions=("exact",)))
    result = solera.train(settings, rewards=[constant])
    assert {row["reward/constant"] for row in result.metrics if "reward/constant" in row} == {0.25}
    assert all("reward/exact" in row for row in result.metrics if "reward/constant" in row)
    assert all(answer.isdigit() for answer in seen)


def test_own_code_that_cannot_act_is_refused(tmp_path):
    def verbatim(rollout: solera.Rollout, row: dict) -> float:
        return 0.0

    settings = replace(config(tmp_path), reward=solera.RewardConfig(functions=("verbatim",)))
    with pytest.raises(solera.SoleraError, match="reward/verbatim is listed twice"):
        solera.train(settings, rewards=[verbatim])
    for wrong in ({"regulariser": "k2"}, {"drop": "wrost"}, {"zero_variance_mask": "off"}, {"advantage": "wihten"}):
        with pytest.raises(solera.SoleraError, match=f"objective.{next(iter(wrong))} is"):
            solera.custom_objective(lambda tokens: None, **wrong)
    assert solera.custom_objective(lambda tokens: None, beta=0.1, ref_period=3).ref_period == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("own", [False, True])
def test_what_is_said_of_the_configs_objective_is_not_said_of_ones_own(tmp_path, own, capsys):
    """On fresh data in one pass the default's clip cannot act; REINFORCE has none."""
    plain = solera.custom_objective(lambda tokens: solera.Term(-tokens.advantage_T * tokens.logp_T))
    fresh = override(config(tmp_path), "sync", period=1)
    solera.train(override(fresh, "learn", passes=1), Console(), objective=plain if own else None)
    assert ("the clip cannot act" in capsys.readouterr().out) != own


def test_a_term_sees_only_what_it_learns_from_and_any_number_is_a_reward(tmp_path):
    import numpy as np
    import torch

    def signs(tokens: solera.Tokens) -> solera.Term:
        advantage_T = tokens.advantage_T
        assert (advantage_T != 0).all() and (tokens.responses.advantage_B != 0).all()
        assert tokens.responses.advantage_B.dtype == torch.float64
        return solera.Term(-advantage_T / advantage_T.abs() * tokens.ratio("token"), silenced_T=advantage_T > 0)

    def length(rollout: solera.Rollout, row: dict) -> np.float32:
        return np.float32(rollout.length % 2)

    objective = solera.custom_objective(signs, advantage="mean")
    result = solera.train(config(tmp_path), objective=objective, rewards=[length])
    import sqlite3

    rows = sqlite3.connect(result.folder / "store.db").execute("select distinct typeof(value) from rewards").fetchall()
    assert rows == [("real",)]
    with pytest.raises(solera.SoleraError, match="task or rewards from your own code"):
        solera.evaluate_models([str(result.folder)])
    assert solera.evaluate_models([str(result.folder)], rewards=[length]).models[0].greedy.problems
