"""Every objective on data of several lags."""

import math

import pytest

from solera.diagnosis.exact import space_of
from solera.lab import amplification
from solera.lab.bias import compare, draw, measure, situated
from solera.lab.objectives import named
from solera.lab.options import LabOptions
from solera.objectives.table import TABLE

COUNTED_ALIKE = [
    name
    for name, row in TABLE.items()
    if row.aggregation == "token_mean" and row.advantage in ("mean", "leave_one_out") and not name.startswith("red_")
]


@pytest.fixture(scope="module")
def rows() -> dict:
    measured = measure(LabOptions(quick=True, lags=(0, 4)), lambda items, _: items)
    assert measured["exact"]
    return {(row["objective"], row["lag"]): row for row in measured["rows"]}


def test_every_objective_has_its_figures(rows: dict):
    assert set(rows) == {(name, lag) for name in TABLE for lag in (0, 4)}
    for row in rows.values():
        assert all(math.isfinite(row[key]) for key in ("scale", "bias", "variance"))
        if row["cosine"] is not None:  # the law of cosines ties the three together
            assert row["bias"] ** 2 == pytest.approx(1 + row["scale"] ** 2 - 2 * row["scale"] * row["cosine"], abs=1e-9)


@pytest.mark.parametrize("name", COUNTED_ALIKE)
def test_on_policy_tokens_counted_alike_point_along_the_policy_gradient(rows: dict, name: str):
    """Every ratio is 1, so weights and clips do nothing, and one denominator serves all responses."""
    assert rows[name, 0]["cosine"] == pytest.approx(1, abs=1e-9)
    assert rows[name, 0]["noise"] == pytest.approx(rows["reinforce", 0]["noise"], rel=1e-9)


def test_a_mean_over_each_response_tilts_the_gradient(rows: dict):
    assert rows["grpo", 0]["cosine"] < 1 - 1e-4


def test_importance_weights_without_clip_correct_for_any_lag():
    """On a bandit `E_α[ρ·(r_i − mean)·∇ℓ] = (G−1)/G·∇J` whoever α is: the others' rewards drop out of E_π[∇ℓ] = 0."""
    objective = named("reinforce", weight="importance", zero_variance_mask=False)
    for stale in situated(space_of(3, 1), seed=1, lags=(0, 5, 20), size=4):
        found = compare(objective, stale)
        assert found["scale"] == pytest.approx(3 / 4, abs=1e-9)
        assert found["cosine"] == pytest.approx(1, abs=1e-9)
    assert stale.divergence["tv"] > 0.1


@pytest.mark.parametrize("experiment", ["bias", "amplification"])
def test_the_legend_hides_nothing(experiment: str):
    if experiment == "bias":
        figure = draw(measure(LabOptions(quick=True, objectives=("grpo", "sft")), lambda items, _: items))
    else:
        figure = amplification.draw(amplification.measure(LabOptions(quick=True), lambda items, _: items))
    figure.draw_without_rendering()
    assert not [axis for axis in figure.axes if axis.get_legend()]
    (legend,) = [legend.get_window_extent() for legend in figure.legends]
    assert not [axis for axis in figure.axes if axis.get_tightbbox().overlaps(legend)]
