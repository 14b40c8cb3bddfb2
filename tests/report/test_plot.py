"""The picture and the page: the same questions, the same curves, the same colours; each as it is drawn."""

import re
from importlib.resources import files

import pytest
from matplotlib.colors import to_hex

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
    *_, reward = draw(rows, "a run").axes
    low, high = reward.get_ylim()
    assert low < -2 and high > -1
    assert limits(ROWS)["Does it learn?"] == (0, pytest.approx(1.2))


def test_a_weighted_reward_has_an_axis_of_its_own_and_does_not_squeeze_the_accuracy():
    rows = [{**row, "reward/mean": 40.0 + row["step"]} for row in ROWS]
    learns, *others, reward = draw(rows, "a run").axes
    assert len(others) == 3
    assert learns.get_ylim() == (0, pytest.approx(1.2)) and reward.get_ylim()[1] >= 50
    assert [line.get_label() for line in learns.lines] == ["held-out accuracy", "reward of the batch (right)"]
    only = [{name: value for name, value in row.items() if name != "eval/pass@1"} for row in rows]
    assert len(draw(only, "a run").axes) == 4  # nothing to squeeze


def test_a_run_without_success_and_with_nothing_but_rounding_is_drawn_as_such():
    names = ("reward/mean", "eval/pass@1", "age/mean", "age/max", "clip/fraction", "reward/zero_variance_fraction")
    noise = {"divergence/tv_sequence": 3e-7, "divergence/tv_token": 1e-7}
    drawn = limits([{**row, **dict.fromkeys(names, 0.0), **noise} for row in ROWS])
    assert drawn.pop("How far is the policy from the data's policies?") == (0, pytest.approx(0.012))
    assert list(drawn.values()) == [(0, pytest.approx(1.2))] * 3
