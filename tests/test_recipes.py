"""Every recipe can be read and resolved; those of real models are built, with small parts of the same kind in place of
what would be fetched."""

import dataclasses
import json
import re
import sqlite3
from pathlib import Path

import pytest

from solera.config import load, override
from solera.objectives.table import resolve_config
from solera.run import running
from solera.sweep.file import read_plan
from tests.command import solera

RECIPES = sorted(path for path in Path("recipes").glob("*.toml") if not path.name.startswith("sweep"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_resolves_and_says_what_to_expect(path):
    config = resolve_config(load(path))
    header = re.match(r"(#.*\n)+", path.read_text())[0]
    assert "Expect" in header
    assert config.run.steps > 0


@pytest.mark.parametrize(
    "name",
    [
        "gsm8k_qwen2.5_0.5b", "deepscaler_r1_1.5b", "gsm8k_warm_start", "countdown_warm_start", "gsm8k_smollm2",
        "gym_smollm2",
    ],
)  # fmt: skip
def test_a_dry_run_takes_a_step(tmp_path, monkeypatch, small_chat_model, name):
    recipe = Path(f"recipes/{name}.toml").resolve()
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "test"):
        rows = [{"question": f"{split} {i}", "problem": f"{split} {i}", "answer": f"so #### {i}"} for i in range(8)]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    config = load(recipe)
    task = config.task if config.task.path is None else dataclasses.replace(config.task, path="data")
    if task.held_out_path is not None:
        task = dataclasses.replace(task, held_out_path="data/test.jsonl")
    config = dataclasses.replace(
        config,
        task=task,
        run=dataclasses.replace(config.run, steps=1, device="cpu", name="dry"),
        model=dataclasses.replace(config.model, path=str(small_chat_model)),
        collect=dataclasses.replace(config.collect, prompts=2, group_size=min(2, config.collect.group_size)),
        sampling=dataclasses.replace(config.sampling, max_tokens=6),
        evaluate=dataclasses.replace(config.evaluate, problems=3),
        report=dataclasses.replace(config.report, tensorboard=False, progress=False, page=False),
    )
    result = running.train(config)
    assert (result.model / "config.json").is_file()
    assert "eval/pass@1" in result.metrics[-1]


@pytest.fixture
def warm_started(tmp_path, monkeypatch, small_chat_model) -> Path:
    """A folder with the models and the problems that the sweeps on GSM8K and countdown name."""
    for name in ("warm", "countdown_warm"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "model").symlink_to(small_chat_model)
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    for split in ("train", "test"):
        rows = [{"question": f"{split} {i}", "answer": f"so #### {i}"} for i in range(8)]
        (tmp_path / "data" / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_sweeps_on_gsm8k_have_the_cells_of_the_papers(warm_started):
    recipes = Path(__file__).parents[1] / "recipes"
    second, first = (read_plan(recipes / f"sweep_gsm8k_{name}.toml") for name in ("second", "first"))
    settings = {
        cell.name: (c.sync.period, c.learn.passes, c.objective.zero_variance_mask, c.objective.centre)
        for cell in second.cells
        for c in [cell.config]
    }
    assert settings == {
        "on_policy": (1, 1, True, "one"), "on_policy_unmasked": (1, 1, False, "one"),
        "v10_centre_one": (10, 1, True, "one"), "v10_centre_proximal": (10, 1, True, "proximal"),
        "reuse_i10": (1, 10, True, "one"),
    }  # fmt: skip
    assert (len(first.cells), len(first.runs()), len(second.runs())) == (3 * 7 - 2, 38, 15)
    on_policy = {c.compared for c in first.cells if (c.config.sync.rule, c.config.sync.period) == ("every", 1)}
    assert on_policy == {"grpo", "red_drop", "red_weight", "topr", "reinforce"}  # the others are reinforce there
    assert {(c.config.sync.rule, c.config.sync.period) for c in first.cells if c.compared == "topr"} == {
        ("every", 1), ("every", 20), ("never", 10),
    }  # fmt: skip
    for cell in (*first.cells, *second.cells):
        assert (cell.config.collect.prompts, cell.config.collect.group_size) == (64, 8 if cell in first.cells else 16)
        assert (cell.config.evaluate.problems, cell.config.evaluate.samples) == (1319, 4)


def test_the_sweep_on_countdown_has_three_objectives_in_four_regimes(warm_started):
    recipes = Path(__file__).parents[1] / "recipes"
    plan, warm = read_plan(recipes / "sweep_countdown.toml"), load(recipes / "countdown_warm_start.toml")
    assert len(plan.cells) == 12
    assert {(c.config.objective.name, c.config.sync.rule, c.config.sync.period) for c in plan.cells} == {
        (name, *sync)
        for name in ("grpo", "rec_oneside_nois", "topr")
        for sync in (("every", 1), ("every", 10), ("every", 20), ("never", 10))
    }
    assert len(plan.runs()) == 24
    for cell in plan.cells:
        assert (cell.config.collect.prompts, cell.config.collect.group_size) == (64, 16)
        assert (cell.config.evaluate.problems, cell.config.evaluate.samples) == (1000, 4)
        assert cell.config.task == resolve_config(warm).task
        assert cell.config.model.path == "runs/countdown_warm/model"
    assert warm.run.seed not in {run.seed for run in plan.runs()}  # training goes on with other problems


@pytest.mark.parametrize(
    ("name", "made_by", "shared"),
    [
        ("gsm8k_adaptive", "gsm8k_second", 6), ("gsm8k_mixed", "gsm8k_first", 4), ("gsm8k_dual_clip", "gsm8k_first", 4),
    ],
)  # fmt: skip
def test_runs_of_another_sweep_can_be_taken_over(name, made_by, shared):
    """As the recipe says: their files are copied. Only the folder differs."""
    recipes = Path(__file__).parents[1] / "recipes"
    own, other = (read_plan(recipes / f"sweep_{one}.toml", to_run=False).runs() for one in (name, made_by))
    others = {run.name: run.config for run in other}
    same = [run for run in own if run.name in others]
    assert len(same) == shared
    for run in same:
        assert run.config == override(others[run.name], "run", root=run.config.run.root)


@pytest.mark.parametrize(
    ("name", "only", "number", "compared"),
    [
        ("gsm8k_second", (), 5, "compared with 8 held-out problems"),
        ("gsm8k_first", ("--only", "regime=never"), 2, "compared with 8 held-out problems"),
        ("countdown", ("--only", "regime=never"), 3, "128 of 128 responses state a problem of countdown"),
        ("gsm8k_adaptive", ("--only", "setting=adaptive"), 1, "128 responses compared with 8 held-out problems"),
        ("gsm8k_dual_clip", ("--only", "algorithm=grpo_dual_clip"), 2, "compared with 8 held-out problems"),
        ("gsm8k_long", (), 1, "compared with 8 held-out problems"),
    ],
    ids=("second", "first", "countdown", "adaptive", "dual_clip", "long"),
)
def test_a_quick_sweep_runs(warm_started, name, only, number, compared):
    """Its last table says what is smaller with --quick. Groups are smaller still here, and runs have no page."""
    recipe = warm_started / f"sweep_{name}.toml"
    text = (Path(__file__).parents[1] / "recipes" / recipe.name).read_text()
    recipe.write_text(f"{text}collect.group_size = 4\nreport.page = false\n")
    done = solera("sweep", recipe, "--quick", *only, cwd=warm_started)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted((warm_started / "sweeps" / f"{name}-quick" / "runs").iterdir())
    assert len(runs) == number
    proof = solera("data", "verify", runs[0], "--held-out", cwd=warm_started)
    assert proof.returncode == 0, proof.stderr
    assert compared in proof.stdout


def test_solutions_of_training_problems_are_members_of_mixed_groups(warm_started):
    recipe = warm_started / "sweep_gsm8k_mixed.toml"
    text = (Path(__file__).parents[1] / "recipes" / recipe.name).read_text()
    recipe.write_text(f"{text}collect.prompts = 4\nreport.page = false\n".replace("collect.prompts = 8\n", ""))
    only = ("--only", "data=solutions", "--only", "algorithm=red_weight")
    done = solera("sweep", recipe, "--quick", *only, cwd=warm_started)
    assert done.returncode == 0, done.stdout + done.stderr
    run = warm_started / "sweeps/gsm8k_mixed-quick/runs/red_weight+solutions-s0"
    query = (
        "select u.version, u.group_number, sum(r.origin = 'file:solutions'), count(*), count(distinct r.prompt_key) "
        "from uses u join rollouts r on r.id = u.rollout_id group by 1, 2"
    )
    with sqlite3.connect(run / "store.db") as database:
        groups = database.execute(query).fetchall()
        keys = {key for (key,) in database.execute("select prompt_key from rollouts where origin = 'file:solutions'")}
    assert len(groups) == 4 * 4
    assert {group[2:] for group in groups} == {(1, 8, 1)}  # one solution, 8 members, one problem
    assert len(keys) == 8  # the training problems
    proof = solera("data", "verify", run, "--held-out", cwd=warm_started)
    assert proof.returncode == 0, proof.stderr
    assert f"{8 + 4 * 4 * 7} responses compared with 8 held-out problems" in proof.stdout
