"""The picture and the page: the same questions, the same curves, the same colours; each as it is drawn."""

import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from solera.report.html import write_report
from solera.report.panels import PANELS
from solera.report.plot import draw

ROWS = [
    {
        "step": k, "reward/mean": 0.1 * k, "age/mean": k % 4, "age/max": k % 4 + 1, "divergence/tv_sequence": 0.2,
        "divergence/tv_token": 0.1, "clip/fraction": 0.01, "reward/zero_variance_fraction": 0.4, "sync/count": k // 4,
    }
    | ({"eval/pass@1": 0.1 * k} if k % 5 == 0 else {})
    for k in range(11)
]  # fmt: skip
STYLE = files("solera.report").joinpath("page/style.css").read_text()
JUDGED = {0: (0.02, 0.01, 0.03), 1: (0.01, -0.01, 0.03), 6: (-0.02, -0.03, -0.01)}
"""Step: the improvement, and the ends of its interval."""


def page_colours() -> list[str]:
    """What the page's style gives its curves where it is light."""
    return re.findall(r"--c[0-9]: light-dark\((#[0-9a-f]{6})", STYLE)


def test_the_picture_has_the_pages_curves_in_the_pages_colours():
    panels = {panel.title: panel for panel in PANELS}
    axes = draw(ROWS, "a run").axes
    assert len(axes) == 4
    for axis in axes:
        expected = dict(
            zip(panels[axis.get_title().removesuffix(" (batches)")].metrics.values(), page_colours(), strict=False)
        )
        drawn = {line.get_label(): to_hex(line.get_color()) for line in axis.lines if line.get_label() != "sync"}
        assert drawn == expected


def test_a_curve_that_hides_behind_another_is_named_with_it_as_on_the_page():
    rows = [{**row, "age/max": row["age/mean"]} for row in ROWS]
    (axis,) = [axis for axis in draw(rows, "a run").axes if axis.get_title().startswith("How old")]
    assert [line.get_label() for line in axis.lines] == ["mean age = oldest response", "sync"]


def limits(rows: list[dict]) -> dict[str, tuple[float, float]]:
    """Lowest and highest value of each axis, by its panel's title."""
    return {axis.get_title().removesuffix(" (batches)"): axis.get_ylim() for axis in draw(rows, "a run").axes}


def test_what_is_not_known_of_text_of_others_has_no_axis_and_says_so():
    rows = [{name: row[name] for name in ("step", "reward/mean", "clip/fraction", "sync/count")} for row in ROWS[:3]]
    learns, age, far, _ = draw(rows, "a run").axes
    assert learns.lines and not learns.texts
    for panel in (age, far):
        assert [text.get_text() for text in panel.texts] == ["not known in this run"]
        assert not panel.lines and not len(panel.get_xticks()) and not len(panel.get_yticks())


def test_rewards_below_0_are_inside_the_picture():
    rows = [{**row, "reward/mean": -2 + 0.1 * k, "eval/pass@1": 0.0} for k, row in enumerate(ROWS)]
    low, high = limits(rows)["Does it learn?"]
    assert -3 < low < -2 and 0 < high < 1
    assert limits(ROWS)["Does it learn?"] == (0, pytest.approx(1.2))


def test_a_run_without_success_and_with_nothing_but_rounding_is_drawn_as_such():
    names = ("reward/mean", "eval/pass@1", "age/mean", "age/max", "clip/fraction", "reward/zero_variance_fraction")
    noise = {"divergence/tv_sequence": 3e-7, "divergence/tv_token": 1e-7}
    drawn = limits([{**row, **dict.fromkeys(names, 0.0), **noise} for row in ROWS])
    assert drawn.pop("How far is the policy from who wrote the data?") == (0, pytest.approx(0.012))
    assert list(drawn.values()) == [(0, pytest.approx(1.2))] * 3


def figures(folder: Path, rows: list[dict], runs: int = 1) -> dict[str, str]:
    """The page's figures as a browser has drawn them, by title."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser is here")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folders = [folder, *(folder / str(number) for number in range(1, runs))]
    for further in folders[1:]:
        further.mkdir()
        shutil.copy(folder / "metrics.jsonl", further)
    target = write_report(folders, folder / "report.html")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom"]
    done = subprocess.run(
        [browser, *options, f"--user-data-dir={folder}/browser", target.as_uri()], capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    drawn = re.findall(r"<figure.*?</figure>", done.stdout, re.DOTALL)
    return {re.search(r"<h3>(.*?)</h3>", one)[1]: one for one in drawn}


def test_judged_updates_are_points_with_their_intervals_and_no_line_joins_them(tmp_path):
    names = ("improvement/estimate", "improvement/low", "improvement/high")
    rows = [{**row, **dict(zip(names, JUDGED.get(row["step"], ()), strict=False))} for row in ROWS]
    figure = figures(tmp_path, rows)["Did the update help?"]
    assert figure.count('class="dot"') == 3
    assert "<path" not in figure
    bars = re.findall(r'<line class="interval" [^>]*y1="([\d.]+)" y2="([\d.]+)"', figure)
    dots = re.findall(r'<circle class="dot" [^>]*cy="([\d.]+)"', figure)
    assert len(bars) == 3
    for dot, ends in zip(dots, bars, strict=True):
        assert float(dot) == pytest.approx((float(ends[0]) + float(ends[1])) / 2)  # each lies in its interval's middle
    (zero,) = re.findall(r'<line class="zero" [^>]*y1="([\d.]+)"', figure)
    lowest = [max(map(float, ends)) for ends in bars]
    assert [low < float(zero) for low in lowest] == [True, False, False]  # certified: all of it lies above 0


def test_the_page_gives_a_metric_its_colour_whether_or_not_the_others_are_there(tmp_path):
    unevaluated = [{name: value for name, value in row.items() if name != "eval/pass@1"} for row in ROWS]
    for rows, colours in ((ROWS, {"--c0", "--c1"}), (unevaluated, {"--c1"})):
        figure = figures(tmp_path, rows)["Does it learn?"]
        assert set(re.findall(r"--colour: var\((--c.)\)", figure)) == colours


def test_on_a_page_of_several_runs_each_metric_of_a_panel_has_a_line_of_its_own(tmp_path):
    names = {"tokens/generated": 9, "tokens/graded": 8, "tokens/trained": 7, "tokens/effective": 6}
    figure = figures(tmp_path, [{**row, **names} for row in ROWS], runs=2)["Where do the tokens go?"]
    lines = re.findall(r'<path class="([^"]*)" d="M1,4H23"', figure)
    assert len(lines) == len(set(lines)) == 4
    dashes = dict(re.findall(r"\.curve\.(dash\d) \{ stroke-dasharray: ([^;]*);", STYLE))
    assert len(dashes) == len(set(dashes.values())) == 3
