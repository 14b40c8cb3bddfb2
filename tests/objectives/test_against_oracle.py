"""Every named objective, with every option that acts on it, equals the oracle in value and gradient."""

from itertools import product
from typing import Any

import pytest

from solera.config import ObjectiveConfig
from solera.errors import SoleraError
from solera.objectives.objective import compose
from solera.objectives.table import resolve
from tests.objectives import batches
from tests.objectives.comparison import assert_agree
from tests.objectives.oracle import TABLE

Options = dict[str, Any]
WITHOUT_TOKENS = ("opmd_kimi", "opmd_pairwise")
REC = [name for name, row in TABLE.items() if row["term"] == "rec"]
BANDED = ("ppo", "gspo", "decoupled", "tis", "mis")
DUAL_CLIPPED = (*BANDED, "off_policy", "m2po", "dppo")
NEEDS_NO_BEHAVIOUR = [
    "reinforce", "rloo", "red_drop", "red_weight", "red_weight_adaptive", "opmd", "asymre", "sft", *WITHOUT_TOKENS,
]  # fmt: skip
OWN: dict[str, list[Options]] = {
    "off_policy": [
        {"epsilon": 0.7},
        {"epsilon": 1.5},
        {"centre": "proximal"},
        {"level": "sequence"},
        {"level": "sequence", "centre": "proximal", "epsilon": 0.4},
    ],
    "cispo": [{"cap": 1.3}],
    "topr": [{"level": "token"}],
    "tis": [{"weight_high": 1.2}],
    "mis": [{"weight_low": 0.8, "weight_high": 1.2}],
    "m2po": [{"second_moment": 0.004}, {"second_moment": 0.3}, {"second_moment": 2.0}],
    "dppo": [{"tolerance": 0.02}, {"tolerance": 0.3}],
    "sapo": [{"tau_positive": 2.0, "tau_negative": 0.7}],
    "opmd": [{"tau": 0.3}],
    "opmd_kimi": [{"tau": 0.4}, {"tau": 3.0}],
    "opmd_pairwise": [{"tau": 0.4}, {"tau": 3.0}],
    "sft": [{"threshold": 0.1}, {"threshold": 0.25}],
}


def advantages() -> list[Options]:
    names = ("mean", "whiten", "whiten_bessel", "leave_one_out", "logavgexp")
    return [{"advantage": name} for name in names] + [
        {"advantage": "whiten", "whiten_epsilon": 1e-4},
        {"advantage": "whiten", "whiten_epsilon": 0.5},
        {"advantage": "logavgexp", "advantage_tau": 0.3},
        {"advantage": "raw", "zero_variance_mask": False},
        {"advantage": "shifted", "zero_variance_mask": False},
        {"advantage": "shifted", "delta": 0.2, "zero_variance_mask": False},
    ]


def additions() -> list[Options]:
    """What every token term may have added."""
    return [
        {"beta": 0.3},
        {"beta": 0.3, "kl_weight": "none"},
        {"beta": 0.3, "kl": "k2"},
        {"beta": 0.3, "kl": "k2", "kl_weight": "none"},
        {"beta": 0.3, "kl": "k1"},
        {"entropy_bonus": 0.05},
        {"regulariser": "forward_kl"},
        {"regulariser": "k2_token", "regulariser_weight": 0.4},
        {"regulariser": "k2_sequence", "regulariser_weight": 0.4},
        {"regulariser": "k2_sequence", "beta": 0.2, "kl": "k2", "entropy_bonus": 0.1, "zero_variance_mask": False},
    ]


def of_rec(name: str) -> list[Options]:
    adaptive = TABLE[name].get("adaptive_temperature", False)
    weights: list[Options] = [{"weight": "none"}, {"weight": "importance"}, {"weight": "exp_advantage"}]
    clips: list[Options] = [{"clip": clip} for clip in ("one_side", "two_side", "ring")]
    if adaptive:
        return clips
    return [clip | weight for clip in [{"clip": "none"}, *clips] for weight in weights] + [
        {"weight": "exp_advantage", "weight_temperature": 0.3},
        {"weight": "exp_advantage", "adaptive_temperature": True, "aggregation": "sequence_sum"},
    ]


def of_red_drop() -> list[Options]:
    return [
        {"drop": "worst"},
        {"keep_denominator": True},
        {"keep_denominator": True, "regulariser": "k2_sequence", "beta": 0.2, "entropy_bonus": 0.1},
        {"drop": "worst", "keep_denominator": True, "aggregation": "sequence_mean", "advantage": "whiten"},
        {"drop": "worst", "advantage": "leave_one_out", "aggregation": "fixed_length", "clip": "one_side"},
    ]


def combinations(name: str) -> list[Options]:
    term = TABLE[name]["term"]
    found: list[Options] = [{}, {"zero_variance_mask": True}, {"zero_variance_mask": False}, *OWN.get(term, [])]
    if name == "asymre":
        found.remove({"zero_variance_mask": True})
    if name in WITHOUT_TOKENS:
        return found
    aggregations = ["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
    if TABLE[name].get("adaptive_temperature"):
        aggregations.remove("sequence_mean")
    found += [{"aggregation": aggregation} for aggregation in aggregations] + additions()
    if term != "sft":
        found += advantages()
    if name in REC:
        found += of_rec(name)
    if name == "red_drop":
        found += of_red_drop()
    if term in DUAL_CLIPPED:
        found += [{"dual_clip": c} for c in (1.05, 3.0)]
    if term in BANDED or (name in REC and TABLE[name].get("clip")):
        found += [{"epsilon_low": 0.3, "epsilon_high": 0.5}]
    return found


@pytest.mark.parametrize("kind", batches.KINDS)
@pytest.mark.parametrize("name", TABLE)
def test_names(name: str, kind: str) -> None:
    assert_agree(name, batches.KINDS[kind](1), 1, f"{kind}, seed 1")


@pytest.mark.parametrize("name", TABLE)
def test_options(name: str) -> None:
    kinds = list(batches.KINDS)
    first = list(TABLE).index(name)  # so that an option meets other batches under other names
    for seed, options in enumerate(combinations(name), start=first):
        kind = kinds[seed % (len(kinds) - 1)]
        assert_agree(name, batches.KINDS[kind](seed), seed, f"{kind}, seed {seed}", **options)


@pytest.mark.parametrize("advantage", ["raw", "shifted"])
@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row["advantage"] != "–"])
def test_raw_and_shifted_rewards_turn_the_mask_off(name: str, advantage: str) -> None:
    for kind in ("ties", "gaps"):
        assert_agree(name, batches.KINDS[kind](4), 4, f"{kind}, seed 4", advantage=advantage)


@pytest.mark.parametrize("name", [n for n in TABLE if n in REC or TABLE[n]["term"] in BANDED])
def test_bounds_are_inclusive(name: str) -> None:
    edges = batches.edge_options()
    band = {key: edges[key] for key in ("epsilon_low", "epsilon_high")}
    names = [{}] if TABLE[name]["term"] in BANDED else [{"clip": clip} for clip in ("one_side", "two_side", "ring")]
    for options in names:
        bounds = edges if options.get("clip") == "ring" else band
        for seed in range(4):
            assert_agree(name, batches.edges(seed), seed, f"edges, seed {seed}", **options, **bounds)


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row["term"] in DUAL_CLIPPED])
def test_dual_clip(name: str) -> None:
    kinds = ["plain", "stale", "huge", "edges", "on_policy"]
    variants: list[Options] = [{}, {"advantage": "mean"}, {"beta": 0.3, "aggregation": "token_mean"}]
    if name == "off_policy_grpo":
        variants += [{"centre": "proximal"}, {"level": "sequence"}, {"level": "sequence", "centre": "proximal"}]
    for seed, (options, c) in enumerate(product(variants, (1.0001, 1.5, 3.0, 1e6)), start=list(TABLE).index(name)):
        kind = kinds[seed % 5]
        assert_agree(name, batches.KINDS[kind](seed), seed, f"{kind}, seed {seed}", dual_clip=c, **options)


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row["term"] in BANDED])
def test_the_bound_of_the_dual_clip_is_inclusive(name: str) -> None:
    edges = batches.edge_options()
    band = {"epsilon_low": edges["epsilon_low"], "epsilon_high": edges["epsilon_high"]}
    for seed in range(4):
        for c in (1 + edges["epsilon_high"], 1 + edges["ring_high"]):
            assert_agree(name, batches.edges(seed), seed, f"edges, seed {seed}", dual_clip=c, **band)


@pytest.mark.parametrize("advantage", ["mean", "whiten", "whiten_bessel", "leave_one_out", "logavgexp"])
def test_a_group_of_one_has_no_advantage(advantage: str) -> None:
    for kind in ("ties", "gaps"):
        options = {"advantage": advantage, "zero_variance_mask": False, "regulariser": "forward_kl"}
        assert_agree("reinforce", batches.KINDS[kind](5), 5, f"{kind}, seed 5", **options)


@pytest.mark.parametrize("name", ["grpo", "gspo", "sft", "opmd_kimi", "opmd_pairwise", "red_weight_adaptive"])
def test_red_drop_before_other_terms(name: str) -> None:
    for kind in ("ties", "gaps", "unlucky"):
        for options in ({"drop": "random"}, {"drop": "worst"}):
            assert_agree(name, batches.KINDS[kind](6), 6, f"{kind}, seed 6", **options)


@pytest.mark.parametrize("drop", ["random", "worst"])
def test_ties_among_the_dropped(drop: str) -> None:
    for seed in range(8):
        for kind in ("ties", "plain", "unlucky"):
            assert_agree("red_drop", batches.KINDS[kind](seed), seed, f"{kind}, seed {seed}", drop=drop)


def test_rounding_is_no_imbalance() -> None:
    for seed in range(8):
        assert_agree("red_weight_adaptive", batches.balanced(seed), seed, f"balanced, seed {seed}")


@pytest.mark.parametrize("bound", [0.035, 0.03, 0.01])
def test_equal_squares_go_together(bound: float) -> None:
    assert_agree("m2po", batches.equal_squares(0), 0, "equal_squares, seed 0", second_moment=bound)


@pytest.mark.parametrize("name", TABLE)
def test_finite_numbers_that_are_no_log_probabilities(name: str) -> None:
    assert_agree(name, batches.absurd(1), 1, "absurd, seed 1")


@pytest.mark.parametrize("name", TABLE)
def test_unknown_behaviour(name: str) -> None:
    options = {} if name in NEEDS_NO_BEHAVIOUR else {"unknown_behaviour": "proximal"}
    for seed in (1, 2):
        assert_agree(name, batches.foreign(seed), seed, f"foreign, seed {seed}", **options)


def test_only_dapo_refills() -> None:
    assert [name for name in TABLE if resolve(ObjectiveConfig(name=name)).refill] == ["dapo"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {"beta": 0.1, "kl": "k1", "kl_weight": "none"}),
        ("red_weight_adaptive", {"aggregation": "sequence_mean"}),
        ("opmd_kimi", {"beta": 0.1}),
        ("opmd_pairwise", {"regulariser": "forward_kl"}),
    ],
)
def test_what_cannot_act_is_refused(name: str, options: Options) -> None:
    with pytest.raises(SoleraError):
        compose(resolve(ObjectiveConfig(name=name, **options)))
