"""The report and the sweep's page in a real browser, opened from a file: what is drawn, and what buttons do."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from solera.records import Reward, Rollout, Segment, Sequence, Span
from solera.report.html import write_report
from solera.store.ledger import Ledger
from tests.report.browsing import chart_named, opened, painted, running_browser, until
from tests.report.runs import rollout, used, write_run

STEPS = 60
PARTS = [f"part{i:02}" for i in range(12)]
JUDGED = {0: (0.02, 0.01, 0.03), 20: (0.01, -0.01, 0.03), 40: (-0.02, -0.03, -0.01)}
"""Step: the improvement, and the ends of its interval."""


def rows(shift: float = 0.0) -> list[dict[str, float]]:
    """A run with a weighted reward of twelve parts, intervals, judged updates, constant metrics and one of decades."""
    made = []
    for k in range(STEPS + 1):
        row = {
            "step": k, "reward/mean": 20 + 0.3 * k + shift, "age/mean": k % 4, "age/max": k % 4 + 1,
            "sync/count": k // 4, "learn/loss": math.sin(k / 9), "learn/grad_norm": 10 ** (k / 15), "learn/lr": 3e-4,
            "response/truncated": 0.0, "odd/one": 7.5, "odd/two": k * k,
            **{f"reward/{part}": i + k for i, part in enumerate(PARTS)},
        }  # fmt: skip
        if k % 10 == 0:
            middle = 0.2 + 0.01 * k
            row |= {"eval/pass@1": middle, "eval/pass@1_low": middle - 0.1, "eval/pass@1_high": middle + 0.1}
        if k in JUDGED:
            row |= dict(zip(("improvement/estimate", "improvement/low", "improvement/high"), JUDGED[k], strict=True))
            row["improvement/state"] = (JUDGED[k][1] > 0) - (JUDGED[k][2] < 0)
        made.append(row)
    return made


def groups(folder: Path) -> None:
    """Groups of steps 0, 1 and 2 whose rewards spread by 0.5, 0 and 0.25, in order."""
    store = Ledger(folder / "store.db")
    for step, rewards in ((0, (0.0, 1.0)), (1, (1.0, 1.0)), (2, (0.5, 1.0))):
        used(store, step, [rollout(f"arithmetic/{step}+7=", reward) for reward in rewards])
    store.close()


@pytest.fixture(scope="module")
def browser():
    with running_browser() as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("one") / "run", rows())
    groups(folder)
    return write_report([folder], folder / "report.html")


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("two")
    folders = [write_run(root / name, rows(shift)) for name, shift in (("a", 0.0), ("b", 5.0))]
    return write_report(folders, root / "report.html")


@pytest.fixture
def page(browser, report):
    with opened(browser, report) as one:
        yield one


def test_an_episode_is_shown_turn_by_turn(browser, tmp_path):
    folder = write_run(tmp_path / "run", rows())
    authors = (Segment("prompt", 1), Segment("policy", 2), Segment("tool", 3, 2, 1), Segment("policy", 1))
    ids = np.array([4, 5, 6, 7, 8, 9, 5], np.int32)
    sequence = Sequence(ids, (Span(1, 3, 0), Span(6, 7, 0)), np.zeros(3, np.float32), None, authors)
    store = Ledger(folder / "store.db")
    used(store, 1, [Rollout("k", (sequence,), (Reward(0.5, "step", position=2),), lineage="a"), rollout("k", 0.0)])
    store.close()
    with opened(browser, write_report([folder], folder / "report.html")) as page:
        page.evaluate("document.querySelector('.group').open = true")
        until(page, "document.querySelectorAll('.turn').length > 0")
        told = page.evaluate("[...document.querySelectorAll('.turn .who')].map((who) => who.textContent)")
        assert told == ["policy · 2 tokens", "tool · 3 tokens · 2 calls · 1 failed", "policy · 1 token · step 0.5"]
        assert page.evaluate("document.querySelectorAll('.members tbody tr').length") == 2


def test_every_chart_is_drawn_from_a_file_without_a_network(page):
    counts = page.evaluate(
        "charts.map(({uplot: u}) => u.ctx.getImageData(0, 0, u.ctx.canvas.width, u.ctx.canvas.height).data)"
        ".map((pixels) => pixels.filter((value, i) => i % 4 === 3 && value > 0).length)"
    )
    assert len(counts) == page.evaluate("data.panels.filter((panel) => !panel.flat).length") >= 6
    assert min(counts) > 1000
    sentence = page.locator("#diagnosis .says").inner_text()
    assert sentence.startswith("Not finished; held-out accuracy rose from 20 % to 80 % (95 % interval 70 to 90 %)")
    assert page.evaluate("[...document.querySelectorAll('h1, h2')].map((one) => one.textContent)") == [
        "run", "Curves", "Groups", "Settings",
    ]  # fmt: skip


def test_accuracy_and_reward_have_axes_of_their_own_and_the_interval_is_a_band(page):
    learns = chart_named(page, "Does it learn?")
    scales = page.evaluate(
        f"[charts[{learns}].uplot.scales.y, charts[{learns}].uplot.scales.right].map((s) => [s.min, s.max])"
    )
    assert scales[0][0] == 0 and 0.9 <= scales[0][1] <= 1.1  # the reward goes up to 38
    assert scales[1][1] >= 38
    assert page.evaluate(f"charts[{learns}].uplot.axes.map((axis) => axis.label ?? '')") == [
        "step",
        "accuracy",
        "reward",
    ]
    middle = 0.2 + 0.01 * 25
    assert painted(page, learns, 25, middle + 0.05) and painted(page, learns, 25, middle - 0.07)
    assert not painted(page, learns, 25, middle + 0.13) and not painted(page, learns, 25, middle - 0.14)


def test_judged_updates_are_points_with_bars(page):
    help_ = chart_named(page, "Did the update help?")
    for step, (value, low, high) in JUDGED.items():
        assert painted(page, help_, step, value)
        assert painted(page, help_, step, low + 0.002) and painted(page, help_, step, high - 0.002)
    assert not painted(page, help_, 10, 0.015)  # no line joins them


def test_an_axis_leaves_out_one_value_far_above_many_but_none_of_a_few(page):
    assert page.evaluate("bounds([0.0331, 0.0052, 0.0126, 0.0017], false)[1]") >= 0.0331
    assert page.evaluate("bounds([30, ...Array(99).fill(1)], false)[1]") < 3


@pytest.mark.parametrize("several", [False, True])
def test_each_metric_of_a_panel_has_a_dash_of_its_own(browser, report, both, several):
    with opened(browser, both if several else report) as page:
        parts = chart_named(page, "What is the reward made of?")
        drawn = page.evaluate(
            f"charts[{parts}].uplot.series.filter((one) => one.width === 2)"
            ".map((one) => [one.dash ?? [], one.stroke()])"
        )
        assert len(drawn) == 13 * (2 if several else 1)  # the whole reward and its twelve parts
        assert len({json.dumps(dash) for dash, _ in drawn}) == 13
        assert len({colour for _, colour in drawn}) == (2 if several else 13)
        samples = page.evaluate(
            "(i) => [...charts[i].host.querySelectorAll('.sample')].map((one) => one.getAttribute('stroke-dasharray'))",
            parts,
        )
        assert len(samples) == len(set(samples)) == 13


def test_what_never_changes_is_folded_and_drawn_when_opened(page):
    shown = page.locator("#flat > details > summary").all_inner_texts()
    assert [" ".join(text.split()) for text in shown] == [
        "Learning rate learning rate 3.0e-4 throughout", "Responses cut off share 0 throughout",
    ]  # fmt: skip
    before = page.evaluate("charts.length")
    page.locator("#flat > details > summary").first.click()
    until(page, f"charts.length === {before + 1} && !!charts.at(-1).uplot")
    assert painted(page, before, 30, 3e-4)
    page.get_by_text("All other metrics (3)").click()
    until(page, "charts.some((chart) => chart.title === 'odd/two' && chart.uplot)")
    assert "7.5 throughout" in page.locator("#other details.flat").inner_text()


def test_values_over_decades_have_a_log_axis_and_others_do_not(page):
    norm, loss = chart_named(page, "Gradient norm"), chart_named(page, "Loss")
    assert [page.evaluate(f"charts[{i}].uplot.scales.y.distr") for i in (norm, loss)] == [3, 1]
    assert page.evaluate(f"charts[{norm}].host.querySelector('h3').innerText").endswith("log scale")


def test_a_log_axis_marks_powers_of_ten_and_leaves_rounding_below_it(page):
    norm = chart_named(page, "Gradient norm")
    assert page.evaluate("powers(null, [1, 2, 5, 10, 20, 100])") == [1, None, None, 10, None, 100]
    assert page.evaluate("powers(null, Array.from({length: 16}, (_, i) => 10 ** (i - 15)))") == [
        10.0**power if power % 3 == 0 else None for power in range(-15, 1)
    ]
    low, high = page.evaluate(f"charts[{norm}].options([], []).scales.y.range(null, 1e-13, 0.5)")
    assert low == pytest.approx(1e-7) and high == 1
    assert page.evaluate(f"charts[{norm}].options([], []).scales.y.range(null, 0.02, 0.5)") == [0.01, 1]


def test_groups_are_sorted_by_mouse_and_keyboard_and_tell_the_expected_answer(page):
    def steps() -> list[str]:
        return page.locator("details.group .when").all_inner_texts()

    assert steps() == ["step 2", "step 1", "step 0"]  # the latest first
    page.get_by_role("button", name="spread of rewards").click()
    assert steps() == ["step 0", "step 2", "step 1"]
    page.get_by_role("button", name="spread of rewards").press("Enter")
    assert steps() == ["step 1", "step 2", "step 0"]
    page.get_by_role("button", name="step").focus()
    page.keyboard.press("Space")
    assert steps() == ["step 2", "step 1", "step 0"]
    assert page.locator(".sorts [aria-pressed=true]").inner_text() == "step: latest first ↓"
    assert page.locator("details.group .expected").all_inner_texts() == ["expected 9", "expected 8", "expected 7"]
    page.locator("details.group summary").first.click()
    assert page.locator("details.group[open] .answer").inner_text() == "Expected answer: 9"


def test_the_pointer_reads_all_charts_at_one_step_and_a_drag_zooms_them(page):
    loss, norm = chart_named(page, "Loss"), chart_named(page, "Gradient norm")
    over = page.locator(".u-over").nth(loss)
    over.scroll_into_view_if_needed()
    box = over.bounding_box()

    def at(share: float) -> tuple[float, float]:
        return box["x"] + share * box["width"], box["y"] + 40

    page.mouse.move(*at(0.5))
    legends = page.evaluate(
        f"[{loss}, {norm}].map((i) => charts[i].host.querySelector('.keys').innerText.replace(/\\s+/g, ' '))"
    )
    assert legends == [f"loss {math.sin(30 / 9):.4f} step 30", "before clipping 100 step 30"]  # 10^(30/15)
    page.mouse.move(*at(0.25))
    page.mouse.down()
    page.mouse.move(*at(0.4))
    page.mouse.move(*at(0.5))
    page.mouse.up()
    ranges = page.evaluate("charts.map(({uplot: u}) => [u.scales.x.min, u.scales.x.max])")
    assert ranges == [[pytest.approx(15, abs=0.5), pytest.approx(30, abs=0.5)]] * len(ranges)
    page.mouse.dblclick(*at(0.5))
    assert page.evaluate("charts.map(({uplot: u}) => [u.scales.x.min, u.scales.x.max])") == [[0, STEPS]] * len(ranges)


def test_a_run_is_hidden_by_its_chip_and_colours_follow_the_scheme(browser, both):
    inks = []
    for scheme in ("light", "dark"):
        with opened(browser, both, scheme=scheme) as page:
            loss = chart_named(page, "Loss")
            count = "charts.map((chart) => chart.shown().length)"
            before = page.evaluate(count)
            page.get_by_role("button", name="b", exact=True).click()
            assert page.evaluate(count) == [lines / 2 for lines in before]
            inks.append(
                page.evaluate(
                    f"[getComputedStyle(document.body).backgroundColor, charts[{loss}].uplot.series.at(-1).stroke()]"
                )
            )
    assert inks[0][0] != inks[1][0] and inks[0][1] != inks[1][1]


def test_ten_runs_have_ten_colours(browser, tmp_path):
    few = [{"step": k, "learn/loss": k + 0.5} for k in range(5)]
    folders = [write_run(tmp_path / f"run{number}", few) for number in range(10)]
    with opened(browser, write_report(folders, tmp_path / "report.html")) as page:
        colours = page.evaluate("charts[0].uplot.series.filter((one) => one.width === 2).map((one) => one.stroke())")
        assert len(colours) == len(set(colours)) == 10


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_sees_all_of_it_without_scrolling_sideways(browser, both, scheme):
    with opened(browser, both, width=390, scheme=scheme) as page:
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
        assert page.evaluate("Math.max(...charts.map((chart) => chart.plot.getBoundingClientRect().right))") <= 390


def test_a_long_run_stays_light(browser, tmp_path):
    """30,000 steps: no peak is lost, and the page is small and fast."""
    noise = [
        {"step": k, "learn/loss": float((k * 7919) % 1000) / 1000 + (9 if k == 24_321 else 0)} for k in range(30_000)
    ]
    folder = write_run(tmp_path / "long", noise)
    target = write_report([folder], tmp_path / "report.html")
    assert target.stat().st_size < 250_000  # the library and the page's own parts are 115 kB of it
    with opened(browser, target) as page:
        values = page.evaluate("charts[0].lines[0].values")
        assert len(values) <= 1002 and max(values) == pytest.approx(9 + (24_321 * 7919 % 1000) / 1000)
