"""Measures, ranking, comparisons and the report, from run folders written by hand."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from solera.config import dump
from solera.errors import SoleraError
from solera.report.run_folder import RunFolder
from solera.sweep import report
from solera.sweep.curves import curve
from solera.sweep.file import read_plan
from solera.sweep.plan import Plan
from solera.sweep.results import Results, collect, measured, wobble
from solera.sweep.state import Failures, locked, refuse_changed
from tests.report.browsing import chart_named, opened, painted, running_browser
from tests.report.pages import Page

FILE = """
sweep = { seeds = 3, name = "made", root = "ROOT" }
run = { steps = 2 }
[axis.algorithm]
grpo = { objective.name = "grpo" }
rloo = { objective.name = "rloo" }
"r.-" = { objective.name = "reinforce" }
[axis.regime]
v1 = { sync.period = 1 }
v9 = { sync.period = 9 }
"""
FINAL = {
    "grpo+v1": [0.50, 0.60, 0.40], "rloo+v1": [0.51, 0.62, 0.46], "r.-+v1": [0.50, 0.60, 0.40],
    "grpo+v9": [0.30, 0.30, 0.30], "rloo+v9": [0.90, 0.91, 0.92], "r.-+v9": [0.20, 0.50, 0.26],
}  # fmt: skip
"""Accuracy after the last batch, by seed."""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    (tmp_path / "made.toml").write_text(FILE.replace("ROOT", str(tmp_path)))
    return read_plan(tmp_path / "made.toml")


def write_runs(plan: Plan) -> Plan:
    for run in plan.runs():
        final = FINAL[run.cell.name][run.seed]
        rows = [
            {
                "step": 0,
                "eval/pass@1": 0.1,
                "time/generate": 1.0,
                "time/learn": 0.5,
                "time/evaluate": 9.0,
                "sync/count": 1,
            },
            {
                "step": 1,
                "time/generate": 2.0,
                "time/sync": 0.25,
                "time/store": 0.25,
                "sync/count": 2,
                "clip/fraction": 0.5,
            },
            {"step": 2, "eval/pass@1": final},
        ]
        (run.folder / "model").mkdir(parents=True)
        (run.folder / "config.toml").write_text(dump(run.config))
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run.folder / "report.html").write_text("")
    return plan


@pytest.fixture
def results(plan: Plan) -> Results:
    return collect(write_runs(plan))


def test_wobble():
    """Nine evaluations: the last third is 0.6, 0.9, 0.6, whose mean is 0.7 and variance (0.01 + 0.04 + 0.01)/3."""
    assert wobble([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.9, 0.6]) == pytest.approx(math.sqrt(0.02))
    assert wobble([0.1, 0.2, 0.3, 0.4, 0.5]) is None


def test_measures_of_a_run(tmp_path):
    rows = [{"step": step, "eval/pass@1": accuracy} for step, accuracy in enumerate((0.2, 0.9, 0.4))]
    found = measured(RunFolder(tmp_path, {}, rows), 2)
    assert (found.final, found.best, found.mean, found.wobble) == (0.4, 0.9, pytest.approx(0.5), None)
    assert (found.clipped, found.syncs) == (None, 0)  # nothing was logged about them


def test_measures_are_read_from_the_runs(results):
    (first, *_) = results.runs
    assert first.measures.final == 0.5
    assert first.measures.mean == pytest.approx(0.3)
    assert first.measures.seconds == pytest.approx((1 + 0.5 + 2 + 0.25 + 0.25) / 2)  # evaluation is not counted
    assert (first.measures.clipped, first.measures.syncs) == (0.5, 2)
    assert first.curve == [(0, 0.1), (2, 0.5)]


def test_spread_and_rank(results):
    cells = {cell.name: cell for cell in results.plan.cells}
    found = results.spread(cells["rloo+v9"], "final")
    assert (found.mean, found.deviation, found.seeds) == (pytest.approx(0.91), pytest.approx(0.01), 3)
    names = [cell.compared for cell in results.ranked(results.plan.panels()["regime v9"])]
    assert names == ["rloo", "r.-", "grpo"]  # 0.91, 0.32, 0.30
    assert curve(results, cells["r.-+v9"]) == [(0, pytest.approx(0.1), 0.1, 0.1), (2, pytest.approx(0.32), 0.2, 0.5)]


def test_comparisons_are_paired_and_corrected(results):
    """ν = 2, so p = 1 − t/√(2 + t²). Three have a p; the smallest is multiplied by 3."""
    by_name = {one.cell.name: one for one in results.comparisons()}
    assert set(by_name) == {"rloo+v1", "rloo+v9", "r.-+v1", "r.-+v9"}
    clear = by_name["rloo+v9"]  # 0.60, 0.61, 0.62: t = 0.61·√3/0.01
    t = 0.61 * math.sqrt(3) / 0.01
    assert clear.difference.p == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-6)
    assert clear.corrected_p == pytest.approx(3 * clear.difference.p)
    assert (clear.verdict, clear.difference.higher) == ("higher", 3)
    assert by_name["r.-+v1"].verdict == "not distinguishable: no spread over seeds to judge by"  # equal on every seed
    assert by_name["r.-+v9"].verdict == "not distinguishable"  # −0.1, 0.2, −0.04
    assert by_name["rloo+v1"].against.name == "grpo+v1"


def test_the_terminal_shows_each_cell_and_how_it_compares(results, plan, monkeypatch):
    """rloo+v9 is 0.61 above grpo+v9, with s = 0.01 and t(2) = 4.3027: ± 4.3027·0.01/√3 = 0.0248. r.-+v9 has 0.2, 0.5
    and 0.26, whose standard deviation is √((0.12² + 0.18² + 0.06²)/2) = 0.1587."""
    head, *lines = report.summary(results)
    assert head.startswith("Accuracy of the last weights, mean ± standard deviation")
    by_name = {line.split()[0]: line for line in lines}
    assert [name for name in by_name if name.endswith("v9")] == ["rloo+v9", "r.-+v9", "grpo+v9"]  # best first
    assert by_name["rloo+v9"] == "rloo+v9   91.0 ± 1.0 %  +61.0 (+58.5 to +63.5), higher"
    assert by_name["r.-+v9"].startswith("r.-+v9   32.0 ± 15.9 %  +2.0 (")
    assert by_name["grpo+v9"] == "grpo+v9   30.0 ± 0.0 %  baseline"
    monkeypatch.setattr(report, "MOST_LINES", 4)
    assert report.summary(results)[-1] == "and 2 more cells in the report"
    assert len(report.summary(results)) == 6
    for run in plan.runs():
        (run.folder / "model").rmdir()
    assert report.summary(collect(plan)) == []


def test_holm_can_take_a_verdict_back(results, plan):
    """Differences m − 0.01, m, m + 0.01 with ν = 2: p = 1 − t/√(2 + t²) is 0.03 where t² = 2·0.97²/(1 − 0.97²)."""
    m = 0.01 / math.sqrt(3) * math.sqrt(2 * 0.97**2 / (1 - 0.97**2))
    for run in plan.runs():
        if run.cell.compared != "grpo" and run.cell.circumstances == ("v9",):
            final = 0.3 + m + 0.01 * (run.seed - 1)
            rows = [{"step": 0, "eval/pass@1": 0.1}, {"step": 2, "eval/pass@1": final}]
            (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    by_name = {one.cell.name: one for one in collect(plan).comparisons()}
    one = by_name["rloo+v9"]
    assert one.difference.p == pytest.approx(0.03)
    assert one.difference.low > 0
    assert one.verdict == "not distinguishable after Holm's correction"


def test_only_common_finished_seeds_are_compared(plan):
    write_runs(plan)
    runs = {run.name: run for run in plan.runs()}
    (runs["grpo+v1-s0"].folder / "model").rmdir()  # stopped
    (runs["rloo+v1-s2"].folder / "model").rmdir()
    Failures(plan.folder).add(runs["rloo+v1-s2"], "exit status 2: <b>no | reward</b>")
    found = collect(plan)
    (one,) = [one for one in found.comparisons() if one.cell.name == "rloo+v1"]
    assert (one.difference.seeds, one.difference.mean) == (1, pytest.approx(0.02))
    assert [(r.run.name, r.state) for r in found.runs if r.measures is None] == [
        ("grpo+v1-s0", "unfinished"), ("rloo+v1-s2", "failed"),
    ]  # fmt: skip
    assert report.state_words(found) == (
        "16 of 18 runs finished; 1 failed; 1 stopped before the end. Comparisons may change until all are finished."
    )
    page = report.write(found)
    assert "&lt;b&gt;no | reward&lt;/b&gt;" in page.read_text()
    assert r"\<b\>no \| reward\</b\>" in (plan.folder / "report.md").read_text()


def test_the_report_holds_everything_in_itself(results):
    page = Page(report.write(results))
    folder = results.plan.folder
    assert sorted(page.references) == sorted(f"runs/{run.name}/report.html" for run in results.plan.runs())
    assert page.data["names"] == ["grpo", "rloo", "r.-"]
    assert [chart["title"] for chart in page.data["charts"]] == ["regime v1", "regime v9"]
    (line,) = [line for line in page.data["charts"][1]["lines"] if line["run"] == 2]
    assert (line["steps"], line["low"], line["high"]) == ([0, 2], [0.1, 0.2], [0.1, 0.5])
    assert line["values"] == pytest.approx([0.1, 0.32])
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads((folder / "results.json").read_text())
    assert len(told["runs"]) == 18
    assert told["cells"][0]["final"] == {"mean": 0.5, "deviation": pytest.approx(0.1), "seeds": 3}
    assert [one["verdict"] for one in told["comparisons"] if one["cell"] == "rloo+v9"] == ["higher"]


def test_a_run_without_a_report_has_no_link(results):
    """As with report.page = false."""
    (results.runs[0].run.folder / "report.html").unlink()
    page = Page(report.write(results))
    assert sorted(page.references) == sorted(f"runs/{run.run.name}/report.html" for run in results.runs[1:])


def test_the_page_draws_its_curves_and_hides_a_cell(results):
    with running_browser() as browser, opened(browser, report.write(results)) as page:
        assert page.evaluate("charts.map((chart) => chart.lines.length)") == [3, 3]
        v9 = chart_named(page, "regime v9")
        assert painted(page, v9, 1, 0.505)  # rloo's line, from 0.1 to 0.91
        assert painted(page, v9, 1.5, 0.35) and not painted(page, v9, 1.5, 0.9)  # within the band of r.-; above all
        page.get_by_role("button", name="rloo").click()
        assert not painted(page, v9, 1, 0.505)
        assert page.locator("#charts h3").all_inner_texts() == ["regime v1", "regime v9"]


def test_text_of_the_sweeps_file_is_no_place_to_fill(plan, tmp_path):
    file = tmp_path / "made.toml"
    file.write_text(file.read_text() + "# /* data */ /* uplot */ </script><script>alert(1)</script>\n")
    page = Page(report.write(collect(read_plan(file))))
    assert page.data["charts"] and page.tags.count("script") == 3


@pytest.mark.parametrize("after", ["", None])
def test_the_report_quotes_the_file_that_the_sweep_began_with(plan, tmp_path, after):
    """It was edited, or removed, while the runs were active."""
    file = tmp_path / "made.toml"
    text = file.read_text()
    file.unlink() if after is None else file.write_text(after)
    report.write(collect(plan))
    assert text in (plan.folder / "report.md").read_text()


def test_the_markdown_says_who_is_best(results):
    report.write(results)
    text = (results.plan.folder / "report.md").read_text()
    v9 = text[text.index("regime v9") : text.index("## Against")]
    assert re.findall(r"^\| (\S+) \| (\S+ ± \S+) %", v9, re.M) == [
        ("rloo", "91.0 ± 1.0"), ("r.-", "32.0 ± 15.9"), ("grpo", "30.0 ± 0.0"),
    ]  # fmt: skip
    assert "| rloo+v9 | grpo+v9 | higher | +61.0 | +58.5 to +63.5 | 3 / 0 of 3 | below 0.001 |" in text


def test_a_report_of_nothing(plan):
    assert "0 of 18 runs finished; 18 not started." in report.write(collect(plan)).read_text()


@pytest.mark.parametrize(("seeds", "why"), [(1, "no spread to judge by"), (2, "only if it is 9 times"), (3, None)])
def test_a_sweep_of_too_few_seeds_says_so(plan, seeds, why):
    """T with one degree of freedom is Cauchy's: its two-sided quantile of 95 % is tan(0.95·π/2)."""
    assert round(math.tan(0.95 * math.pi / 2) / math.sqrt(2)) == 9
    few = dataclasses.replace(plan, seeds=plan.seeds[:seeds])
    text = report.write(collect(few)).read_text()
    if why is None:
        assert "but not which is better" not in text
    else:
        assert re.search(rf"{seeds} seeds? can show that the cells run, but not which is better: [^.]*{why}", text)


def test_a_changed_file_is_refused(plan, tmp_path):
    write_runs(plan)
    refuse_changed(plan)
    file = tmp_path / "made.toml"
    file.write_text(file.read_text() + "[learn]\nlr = 1e-3\n")
    with pytest.raises(
        SoleraError, match=r"v1-s0 was created with learn\.lr = 0\.0003, but \S+ now has 0\.001: choose an"
    ):
        refuse_changed(read_plan(file))
    file.write_text(file.read_text().replace("seeds = 3", "seeds = 4").replace("1e-3", "3e-4"))
    refuse_changed(read_plan(file))  # more seeds are no change of what is there


def test_one_sweep_at_a_time(plan):
    with (
        locked(plan.folder),
        pytest.raises(SoleraError, match="another `solera sweep` is using"),
        locked(plan.folder),
    ):
        pass
