"""The oracle against numbers worked out by hand from docs/formulas.md."""

import math

import pytest
import torch

from tests.objectives import oracle
from tests.objectives.oracle_groups import advantages
from tests.objectives.oracle_names import SHARED

LN2 = math.log(2.0)
WHITE = 0.5 / math.sqrt(0.25 + 1e-8)  # the whitened advantage of one success and one failure


def response(reward, logp, log_ratio=None, log_q=None, d=None, uniform=0.5, entropy=None) -> oracle.Response:
    """All tokens answered for; `log_ratio` = ℓ−b, `log_q` = p−b, `d` = f−ℓ."""
    zeros = [0.0] * len(logp)
    behaviour = [v - x for v, x in zip(logp, log_ratio or zeros, strict=True)]
    return oracle.Response(
        reward=reward,
        mask=[True] * len(logp),
        logp=torch.tensor(logp, dtype=torch.float64, requires_grad=True),
        behaviour=behaviour,
        proximal=[b + x for b, x in zip(behaviour, log_q or zeros, strict=True)],
        ref=[v + x for v, x in zip(logp, d or zeros, strict=True)],
        entropy=torch.tensor(entropy or zeros, dtype=torch.float64, requires_grad=True),
        uniform=uniform,
    )


def pair() -> list[list[oracle.Response]]:
    """A success with ρ = 2, ½ and q = 2.5, ½; a failure with ρ = 4 and q = 1; d = −.1, −.2; .2; H = 1, 2; 3."""
    return [
        [
            response(1.0, [-1.0, -2.0], [LN2, -LN2], [math.log(2.5), -LN2], [-0.1, -0.2], entropy=[1.0, 2.0]),
            response(0.0, [-1.0], [2 * LN2], [0.0], [0.2], entropy=[3.0]),
        ]
    ]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


K3 = [math.exp(d) - d - 1 for d in (-0.1, -0.2, 0.2)]

BY_HAND = [
    # REINFORCE's token losses are .5, 1 and −.5
    ("reinforce", {}, 1 / 3),
    ("reinforce", {"aggregation": "sequence_mean"}, (0.75 - 0.5) / 2),
    ("reinforce", {"aggregation": "sequence_sum"}, 0.5),
    ("reinforce", {"aggregation": "fixed_length"}, 1 / 16),
    ("rloo", {}, 2 / 3),
    ("grpo", {}, ((-1.2 - 0.5) / 2 + 4) * WHITE / 2),
    ("grpo", {"whiten_epsilon": 0.75}, ((-1.2 - 0.5) / 2 + 4) * 0.5 / 2),
    ("grpo", {"dual_clip": 3.0}, ((-1.2 - 0.5) / 2 + 3) * WHITE / 2),
    ("off_policy_grpo", {"dual_clip": 3.0, "centre": "proximal"}, ((-2 - 0.5) / 2 + 3) * WHITE / 2),
    ("gspo", {"dual_clip": 3.0}, (-1 + 3) * WHITE / 2),
    ("decoupled", {"dual_clip": 3.0}, (-2.5 * 0.8 - 0.5 + 3) * WHITE / 3),
    ("m2po", {"dual_clip": 3.0}, (-0.5 + 3) * WHITE / 3),
    ("dppo", {"dual_clip": 5.0}, (-0.5 + 4) * WHITE / 3),
    ("dapo", {}, (-1.28 - 0.5 + 4) * WHITE / 3),
    ("dr_grpo", {}, (-1.2 - 0.5 + 4) * 0.5 / 16),
    ("off_policy_grpo", {}, ((-1.2 - 0.5) / 2 + 4) * WHITE / 2),
    ("off_policy_grpo", {"centre": "proximal"}, ((-2 - 0.5) / 2 + 4) * WHITE / 2),
    ("off_policy_grpo", {"epsilon": 1.5}, ((-2 - 0.5) / 2 + 4) * WHITE / 2),
    ("off_policy_grpo", {"level": "sequence"}, (-1 + 4) * WHITE / 2),
    ("off_policy_grpo", {"level": "sequence", "centre": "proximal"}, (-1 + 4) * WHITE / 2),
    ("gspo", {}, (-1 + 4) * WHITE / 2),
    ("cispo", {}, (2 + 1 - 4) * WHITE / 3),
    ("cispo", {"cap": 3.0}, 0.0),
    ("topr", {}, 1 / 3),
    ("decoupled", {}, (-2.5 * 0.8 - 0.5 + 4) * WHITE / 3),
    ("tis", {}, (-2 * 0.8 - 0.5 + 4) * WHITE / 3),
    ("mis", {"weight_low": 0.4}, (-0.5 + 4) * WHITE / 3),
    ("mis", {"weight_low": 0.6, "weight_high": 3.0}, (-2.5 * 0.8 + 4) * WHITE / 3),
    ("m2po", {}, (-0.5 + 4) * WHITE / 3),
    ("m2po", {"second_moment": 0.5}, (-2 - 0.5 + 4) * WHITE / 3),
    ("dppo", {}, (-0.5 + 4) * WHITE / 3),
    ("dppo", {"tolerance": 0.2}, (-2 - 0.5 + 4) * WHITE / 3),
    ("sapo", {}, (-4 * (sigmoid(1) + sigmoid(-0.5)) / 2 + 4 / 1.05 * sigmoid(3.15)) * WHITE / 2),
    ("rec_oneside_is", {}, (0.5 - 2) / 3),
    ("rec_oneside_nois", {}, (1 - 0.5) / 3),
    ("rec_twoside_is", {}, 0.0),
    ("rec_ring_is", {}, -2 / 3),
    ("rec_ring_nois", {}, -0.5 / 3),
    ("rec_oneside_is_wide", {}, (1 + 0.5 - 2) / 3),
    ("rec_twoside_is_wide", {}, (1 + 0.5) / 3),
    ("rec_twoside_nois_wide", {}, (0.5 + 1) / 3),
    ("rec_ring_is_wide", {}, (1 + 0.5) / 3),
    ("rec_ring_is_wide", {"ring_high": 2.5}, (1 + 0.5 - 2) / 3),
    ("red_weight", {}, (1.5 * math.exp(0.5) - 0.5 * math.exp(-0.5)) / 3),
    ("red_weight", {"weight_temperature": 2.0}, (1.5 * math.exp(0.25) - 0.5 * math.exp(-0.25)) / 3),
    ("red_weight_adaptive", {}, 1 / 3),
    ("opmd", {}, 1 / 6),
    ("opmd", {"tau": 3.0}, 1 / 12),
    ("opmd_kimi", {}, 0.0914389),  # log Ẑ = .6201145; residuals .0798855 and −.4201145
    ("opmd_pairwise", {}, 0.25 / 4),
    ("opmd_pairwise", {"tau": 0.5}, (0.85 - 0.1) ** 2 / 2),
    ("opmd_k2", {}, 1 / 3 + 0.1 * 6 * LN2**2 / 3),
    ("asymre", {}, (0.6 * 3 - 0.4) / 3),
    ("asymre", {"delta": 0.5}, (0 - 1) / 3),
    ("sft", {}, 1.5),
    ("sft", {"threshold": 0.0}, 4 / 3),
    ("reinforce", {"regulariser": "forward_kl"}, 1 / 3 + 0.1 * 4 / 3),
    ("reinforce", {"regulariser": "k2_sequence"}, 1 / 3 + 0.1 * 0.5 * (2 * LN2) ** 2 / 3),
    (
        "reinforce",
        {"regulariser": "k2_sequence", "regulariser_weight": 1.0, "aggregation": "sequence_mean"},
        0.125 + 0.5 * (2 * LN2) ** 2 / 2,
    ),
    ("reinforce", {"beta": 1.0, "kl_weight": "none"}, (1 + sum(K3)) / 3),
    ("reinforce", {"beta": 1.0}, (1 + 2 * K3[0] + 0.5 * K3[1] + 4 * K3[2]) / 3),
    ("reinforce", {"beta": 1.0, "kl": "k2", "kl_weight": "none"}, (1 + 0.045) / 3),
    ("reinforce", {"beta": 1.0, "kl": "k2"}, (1 + 0.1) / 3),
    ("reinforce", {"beta": 1.0, "kl": "k1"}, (1 - 0.5) / 3),
    ("reinforce", {"entropy_bonus": 0.1}, (1 - 0.6) / 3),
]


@pytest.mark.parametrize(("name", "options", "expected"), BY_HAND)
def test_one_success_and_one_failure(name, options, expected):
    assert oracle.loss(name, pair(), limit=8, **options).item() == pytest.approx(expected, abs=2e-7)


def gradient(name: str, batch: list[list[oracle.Response]], **options) -> list[list[float]]:
    oracle.loss(name, batch, limit=8, **options).backward()
    return [member.logp.grad.tolist() for group in batch for member in group]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("reinforce", {}, [[-0.5, -0.5], [0.5]]),
        ("grpo", {"aggregation": "token_mean", "advantage": "mean"}, [[0.0, -0.25], [2.0]]),
        ("rec_oneside_is", {}, [[0.0, -0.25], [2.0]]),
        ("gspo", {"aggregation": "token_mean", "advantage": "mean"}, [[-0.5, -0.5], [2.0]]),
        ("off_policy_grpo", {"aggregation": "token_mean", "advantage": "mean", "level": "sequence"}, [[-1, -1], [2]]),
        ("cispo", {"advantage": "mean"}, [[-1.0, -0.25], [2.0]]),
        ("decoupled", {"advantage": "mean"}, [[-1.0, -0.25], [2.0]]),
        ("reinforce", {"regulariser": "forward_kl", "regulariser_weight": 1.0}, [[-1.5, -1.5], [-0.5]]),
        ("opmd_k2", {"regulariser_weight": 1.0}, [[-0.5 + 2 * LN2, -0.5 - 2 * LN2], [0.5 + 4 * LN2]]),
        ("reinforce", {"beta": 1.0, "kl": "k1"}, [[-0.5 + 2.2, -0.5 + 0.6], [0.5 + 4 * 0.8]]),
        ("reinforce", {"beta": 1.0, "kl": "k2"}, [[-0.5 + 0.2, -0.5 + 0.1], [0.5 - 0.8]]),
        ("reinforce", {"beta": 1.0, "kl": "k3"}, [[-0.5 + 0.2, -0.5 + 0.1], [0.5 - 0.8]]),
    ],
)
def test_gradients(name, options, expected):
    scaled = [[g * 3 for g in row] for row in gradient(name, pair(), **options)]
    for got, want in zip(scaled, expected, strict=True):
        assert got == pytest.approx(want)


def test_sapo_has_the_slope_of_the_sigmoid():
    batch = [[response(1.0, [-1.0]), response(0.0, [-1.0], [LN2])]]
    (positive,), (negative,) = gradient("sapo", batch)
    assert positive == pytest.approx(-WHITE / 2)
    assert negative == pytest.approx(4 * sigmoid(1.05) * sigmoid(-1.05) * 2 * WHITE / 2)


def test_clip_fractions():
    for name, expected in {
        "grpo": 1 / 3, "rec_twoside_is": 1.0, "rec_ring_nois": 2 / 3, "mis": 1 / 3, "m2po": 1 / 3, "dppo": 1 / 3,
        "cispo": 0.0, "sapo": 0.0, "reinforce": 0.0, "gspo": 0.0, "sft": 0.0, "opmd_kimi": 0.0,
    }.items():  # fmt: skip
        options = {"weight_low": 0.4} if name == "mis" else {}
        assert oracle.clip_fraction(name, pair(), limit=8, **options) == pytest.approx(expected), name


def test_topr_keeps_successes_whole_and_caps_failures():
    def batch():
        return [[response(1.0, [-1.0], [5.0]), response(0.0, [-1.0, -2.0], [-2 * LN2, LN2])]]

    assert oracle.loss("topr", batch(), limit=8).item() == pytest.approx((0.5 - 0.5 * 0.5 * 3) / 3)
    by_token = (0.5 - 0.25 * 0.5 * 1 - 1 * 0.5 * 2) / 3
    assert oracle.loss("topr", batch(), limit=8, level="token").item() == pytest.approx(by_token)


def test_adaptive_temperature():
    def batch(n: int, scale: float = 1.0):
        return [[response(scale, [-1.0]), response(0.0, [-1.0] * n)]]

    # e^(1/T) = 2, so the weights are √2 and 1/√2
    root = (0.5 * math.sqrt(2) - 2 * 0.5 / math.sqrt(2)) / 3
    assert oracle.loss("red_weight_adaptive", batch(2), limit=8).item() == pytest.approx(root, abs=1e-4)
    below = (0.5 * math.exp(0.5 / 0.8) - 4 * 0.5 * math.exp(-0.5 / 0.8)) / 5
    assert oracle.loss("red_weight_adaptive", batch(4), limit=8).item() == pytest.approx(below)
    above = (50 * math.exp(0.5) - 2 * 50 * math.exp(-0.5)) / 3
    assert oracle.loss("red_weight_adaptive", batch(2, 100.0), limit=8).item() == pytest.approx(above)
    with pytest.raises(ValueError, match="sequence_mean"):
        oracle.loss("red_weight_adaptive", batch(2), limit=8, aggregation="sequence_mean")


def test_red_drop():
    def batch():
        uniforms = [0.1, 0.9, 0.2, 0.3, 0.8]
        rewards = [1.0, 0.0, 0.125, 0.125, 0.125]
        return [[response(r, [-1.0 - i], uniform=x) for i, (r, x) in enumerate(zip(rewards, uniforms, strict=True))]]

    # three of the four negatives go; response 1 survives the random drop, response 4 the worst-first one
    random_drop = (0.5 * 1 - 0.5 * 2) / 2
    assert oracle.loss("red_drop", batch(), limit=8).item() == pytest.approx(random_drop)
    worst = (0.4375 * 1 - 0.4375 * 5) / 2
    assert oracle.loss("red_drop", batch(), limit=8, drop="worst").item() == pytest.approx(worst)
    kept = oracle.loss("red_drop", batch(), limit=8, keep_denominator=True, regulariser="forward_kl").item()
    assert kept == pytest.approx((-0.5 + 0.1 * 15) / 5)


def test_m2po_drops_equal_squares_together():
    batch = [[response(1.0, [-1.0] * 3, [0.3, 0.3, 0.1]), response(0.0, [-1.0, -1.0], [-0.3, 0.9])]]
    # candidates .09 .09 .01 .09: their mean .07 is too large, and the three equal ones go at once
    assert oracle.clip_fraction("m2po", batch, limit=8) == pytest.approx(3 / 5)
    expected = (-math.exp(0.1) + math.exp(0.9)) * WHITE / 5
    assert oracle.loss("m2po", batch, limit=8).item() == pytest.approx(expected)


def test_a_clamped_ratio_keeps_its_gradient():
    batch = [[response(1.0, [-1.0], [-1e4]), response(0.0, [-1.0], [1e4])]]
    (up,), (down,) = gradient("dr_grpo", batch)
    assert up == pytest.approx(-0.5 * math.exp(-20) / 16)
    assert down == pytest.approx(0.5 * math.exp(20) / 16)


def test_advantages():
    rewards = [0.0, 1.0, 1.0, 2.0]
    log_mean = math.log((1 + 2 * math.e + math.e**2) / 4)
    for kind, first in {
        "mean": -1.0,
        "whiten": -1 / math.sqrt(0.50000001),
        "whiten_bessel": -1 / (math.sqrt(2 / 3) + 1e-4),
        "leave_one_out": -4 / 3,
        "logavgexp": -log_mean,
        "shifted": -0.9,
        "raw": 0.0,
    }.items():
        assert advantages(rewards, SHARED | {"advantage": kind})[0] == pytest.approx(first), kind
        alone = {"raw": 3.0, "shifted": 0.1}.get(kind, 0.0)
        assert advantages([3.0], SHARED | {"advantage": kind}) == pytest.approx([alone]), kind


def test_who_takes_part():
    def batch():
        empty = response(9.0, [-1.0])
        empty.mask = [False]
        equal = [response(1.0, [-5.0]), response(1.0, [-5.0])]
        return [[*pair()[0], response(None, [-7.0]), empty], equal, [response(1.0, [-5.0])], [response(None, [-1.0])]]

    assert oracle.loss("reinforce", batch(), limit=8).item() == pytest.approx(1 / 3)
    assert oracle.loss("reinforce", batch(), limit=8, zero_variance_mask=False).item() == pytest.approx(1 / 6)
    # raw and shifted turn the mask off: three further responses with A = .1 and ℓ = −5
    shifted = oracle.loss("reinforce", batch(), limit=8, advantage="shifted").item()
    assert shifted == pytest.approx((0.6 * 3 - 0.4 + 3 * 0.5) / 6)
    assert oracle.loss("opmd_pairwise", batch(), limit=8).item() == pytest.approx(0.25 / 4 / 3)
    assert oracle.loss("reinforce", batch()[1:], limit=8) is None
    assert oracle.loss("sft", [[response(0.0, [-1.0])]], limit=8) is None


def test_unknown_behaviour():
    def batch():
        group = pair()[0]
        for member in group:
            member.proximal, member.behaviour = member.behaviour, None
        return [group]

    assert oracle.loss("reinforce", batch(), limit=8).item() == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="unknown"):
        oracle.loss("grpo", batch(), limit=8)
    expected = oracle.loss("grpo", pair(), limit=8).item()
    assert oracle.loss("grpo", batch(), limit=8, unknown_behaviour="proximal").item() == pytest.approx(expected)
