"""A sweep file becomes a plan, or is refused in one line that names file, line and cell."""

import re
from pathlib import Path

import pytest

from solera.config import load
from solera.errors import SoleraError
from solera.sweep.file import read_plan
from solera.sweep.plan import Plan

GRID = """\
[sweep]
seeds = [4, 7]

[axis.algorithm]
grpo = { objective.name = "grpo" }
wide = { objective.name = "grpo", objective.epsilon_high = 0.4 }

[axis.regime]
on_policy = { sync.period = 1 }
never = { sync.rule = "never" }
[axis.regime.lag]
sync.period = 1
collect.offset = 10

[run]
steps = 30

[quick]
seeds = 1
keep = { regime = ["lag", "never"] }
[quick.run]
steps = 3
"""


def plan(tmp_path: Path, text: str, quick: bool = False) -> Plan:
    (tmp_path / "grid.toml").write_text(text)
    return read_plan(tmp_path / "grid.toml", quick)


def refusal(tmp_path: Path, text: str, quick: bool = False) -> str:
    with pytest.raises(SoleraError) as refused:
        plan(tmp_path, text, quick)
    assert "\n" not in str(refused.value)
    return str(refused.value).removeprefix(f"{tmp_path}/")


def test_every_cell_with_every_seed(tmp_path):
    found = plan(tmp_path, GRID)
    assert (found.name, found.folder, found.seeds) == ("grid", Path("sweeps/grid"), (4, 7))
    assert [cell.name for cell in found.cells] == [
        "grpo+on_policy", "grpo+never", "grpo+lag", "wide+on_policy", "wide+never", "wide+lag",
    ]  # fmt: skip
    assert len(found.runs()) == 12
    first_seed = found.runs()[:6]
    assert {run.seed for run in first_seed} == {4}  # seed by seed: a stopped sweep can be compared
    last = found.runs()[-1].config
    assert (last.run.name, last.run.root, last.run.seed, last.run.steps) == ("wide+lag-s7", "sweeps/grid/runs", 7, 30)
    assert (last.objective.epsilon_high, last.sync.period, last.collect.offset) == (0.4, 1, 10)
    assert (last.objective.epsilon_low, last.task.level) == (0.2, 2)  # resolved
    assert found.cells[1].config.sync.rule == "never"


def test_quick_keeps_choices_and_overrides_fields(tmp_path):
    found = plan(tmp_path, GRID, quick=True)
    assert (found.name, found.seeds) == ("grid-quick", (0,))
    assert [cell.name for cell in found.cells] == ["grpo+never", "grpo+lag", "wide+never", "wide+lag"]
    assert {cell.config.run.steps for cell in found.cells} == {3}


def test_only_some_cells(tmp_path):
    found = plan(tmp_path, GRID)
    assert found.only([]) == found.runs()
    assert [run.name for run in found.only(["regime=lag", "algorithm=wide"])] == ["wide+lag-s4", "wide+lag-s7"]
    either = found.only(["regime=lag", "regime=never", "algorithm=grpo"])
    assert [run.name for run in either] == ["grpo+never-s4", "grpo+lag-s4", "grpo+never-s7", "grpo+lag-s7"]
    excluded = GRID.replace("[sweep]", '[sweep]\nexclude = [{ algorithm = "grpo", regime = "never" }]')
    with pytest.raises(SoleraError, match="excludes all such cells"):
        plan(tmp_path, excluded).only(["algorithm=grpo", "regime=never"])


def test_panels_and_counterparts(tmp_path):
    found = plan(tmp_path, GRID)
    assert {title: [cell.compared for cell in cells] for title, cells in found.panels().items()} == {
        "regime on_policy": ["grpo", "wide"], "regime never": ["grpo", "wide"], "regime lag": ["grpo", "wide"],
    }  # fmt: skip

    def pairs(plan: Plan) -> dict[str, str]:
        return {c.name: other.name for c in plan.cells if (other := plan.counterpart(c))}

    assert pairs(found) == {"wide+on_policy": "grpo+on_policy", "wide+never": "grpo+never", "wide+lag": "grpo+lag"}
    one = GRID.replace("[sweep]", '[sweep]\nbaseline = { algorithm = "wide", regime = "lag" }')
    assert set(pairs(plan(tmp_path, one)).values()) == {"wide+lag"}
    assert len(pairs(plan(tmp_path, one))) == 5
    excluded = GRID.replace("[sweep]", '[sweep]\nexclude = [{ algorithm = "grpo", regime = "never" }]')
    assert len(plan(tmp_path, excluded).cells) == 5
    assert "wide+never" not in pairs(plan(tmp_path, excluded))


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("steps = 30", "stesp = 30", r"16: unknown field run\.stesp; did you mean steps\?"),
        ("[run]", "[runn]", r"15: unknown table \[runn\]; did you mean run\?"),
        ("steps = 30", "seed = 3", r"16: run\.seed is set by the sweep: remove it \(set sweep\.seeds\)"),
        ("seeds = [4, 7]", "seed = 3", r"2: unknown field sweep\.seed; did you mean seeds\?"),
        ("seeds = [4, 7]", "seeds = 0", r"2: seeds is 0 but must be a number of seeds, or a list"),
        ("seeds = [4, 7]", "seeds = [4, 4]", r"2: seeds is \[4, 4\]: one of them is listed twice"),
        ("seeds = [4, 7]", 'measure = "fast"', r"2: sweep\.measure is 'fast' but must be one of final, best"),
        ("seeds = [4, 7]", 'name = "a/b"', r"2: sweep\.name is 'a/b'; use letters"),
        ("sync.rule", "sync.ruel", r"10: axis regime, choice never: unknown field sync\.ruel; did you mean"),
        ("collect.offset = 10", "collect.offset = 1.5", r"13: axis regime, choice lag: collect\.offset is 1\.5"),
        ("collect.offset = 10", "learn.betas = [1]", r"13: axis regime, choice lag: learn\.betas is \[1\]"),
        ("epsilon_high = 0.4", "tau = 0.4", r"6: cell algorithm wide, regime on_policy: objective\.tau is not"),
        ("steps = 30", "steps = 0", r"16: cell algorithm grpo, regime on_policy: run\.steps is 0; it must"),
        ("sync.period = 1 }", "task.name = 'x' }", r"9: cell algorithm grpo, regime on_policy: task\.name"),
        ('{ objective.name = "grpo" }', '"grpo"', r"5: axis algorithm, choice grpo: write the fields it sets"),
        ("grpo = {", '"a+b" = {', r"5: axis algorithm: choice 'a\+b'; use letters"),
        ("on_policy = { sync", "on_policy = { objective.name = 'grpo', sync",
         r"9: axis regime, choice on_policy: objective\.name is also set on the axis algorithm"),
        ("epsilon_high = 0.4", "epsilon_high = 0.2", r" the cells grpo\+on_policy and wide\+on_policy have the same"),
        ("seeds = [4, 7]", 'baseline = { algoritm = "grpo" }', r"2: sweep\.baseline names the axis 'algoritm'; did"),
        ("seeds = [4, 7]", 'baseline = { algorithm = "gro" }', r"2: sweep\.baseline: 'gro' is not on the axis"),
        ("seeds = [4, 7]", 'baseline = "grpo"', r"2: sweep\.baseline must be choices by axis"),
        ("seeds = [4, 7]", 'exclude = { algorithm = "grpo" }', r"2: sweep\.exclude must be a list of cells"),
        ("seeds = [4, 7]", 'exclude = [{ algorithm = "grpo" }, { algorithm = "wide" }]', r"2: .*leaves no cell"),
        ("seeds = [4, 7]", 'exclude = [{ regime = ["lag"] }]', r"2: sweep\.exclude: \['lag'\] is not on the axis"),
        ("seeds = [4, 7]", "baseline = { algorithm = [] }", r"2: sweep\.baseline: \[\] is not on the axis algorithm"),
        ("seeds = [4, 7]", f"seeds = [{10**20}]", r" cell grpo\+on_policy, seed 10+: run\.seed is 10+ but must be"),
        ("wide = {", f"{'w' * 195} = {{", r" cell w+\+on_policy, seed 4: run\.name is 'w+.*at most 200 bytes"),
        ("[sweep]", "[sweep", r" not valid TOML: .*line 1"),
    ],
)  # fmt: skip
def test_refused_in_one_line_with_its_place(tmp_path, before, after, says):
    assert before in GRID
    assert re.match(rf"grid\.toml:{says}", refusal(tmp_path, GRID.replace(before, after, 1)))


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("steps = 3\n", "steps = true\n", r"22: quick: run\.steps is True but must be a whole number"),
        ('["lag", "never"]', '["lagg"]', r"20: quick\.keep: 'lagg' is not on the axis regime; did you mean lag"),
        ('["lag", "never"]', '[["lag"]]', r"20: quick\.keep: \['lag'\] is not on the axis regime"),
        ('["lag", "never"]', '"lag"', r"20: quick\.keep must be lists of choices by axis"),
        ("seeds = 1", "seeds = -1", r"19: seeds is -1"),
        ("[quick.run]", "[quick.sync]\nperiod = 3\n[quick.run]", r"22: cell .*regime never: sync\.period has no"),
    ],
)  # fmt: skip
def test_quick_is_refused_as_strictly(tmp_path, before, after, says):
    assert before in GRID
    assert re.match(rf"grid\.toml:{says}", refusal(tmp_path, GRID.replace(before, after, 1), quick=True))


def test_what_is_missing(tmp_path):
    without_quick = GRID[: GRID.index("[quick]")]
    assert "has no table [quick]" in refusal(tmp_path, without_quick, quick=True)
    assert "has no axis" in refusal(tmp_path, "[sweep]\nseeds = 2\n")
    with pytest.raises(SoleraError, match="cannot be read"):
        read_plan(tmp_path / "nothing.toml")


def test_data_and_rewards_are_checked_before_anything_starts(tmp_path):
    task = '[task]\nname = "jsonl"\npath = "nothing.jsonl"\n'
    assert re.search(r"cell algorithm grpo, regime on_policy: .*nothing\.jsonl", refusal(tmp_path, GRID + task))
    reward = '[reward]\nfunctions = ["nothing.py:f"]\n'
    assert re.match(r"grid\.toml:24: cell .*nothing\.py", refusal(tmp_path, GRID + reward))


def test_a_plan_can_be_read_where_its_model_and_data_are_not(tmp_path):
    """The results of another machine can then be shown."""
    (tmp_path / "grid.toml").write_text(f'{GRID}[model]\npath = "no/such/model"\n[task]\nname = "gsm8k"\npath = "no"\n')
    with pytest.raises(SoleraError, match="no/such/model"):
        read_plan(tmp_path / "grid.toml")
    assert len(read_plan(tmp_path / "grid.toml", to_run=False).cells) == 6  # 2 × 3


def test_a_config_written_for_a_run_reads_back_equal(tmp_path):
    from solera.config import dump

    for run in plan(tmp_path, GRID).runs():
        (tmp_path / "run.toml").write_text(dump(run.config))
        assert load(tmp_path / "run.toml") == run.config
