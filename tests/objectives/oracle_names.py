"""docs/formulas.md, section 6, for the oracle: every name with its constants, and what is refused."""

from typing import Any

SHARED: dict[str, Any] = {
    "advantage_tau": 1.0,
    "whiten_epsilon": 1e-8,
    "dual_clip": None,
    "delta": -0.1,
    "epsilon": 0.2,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "ring_low": 0.6,
    "ring_high": 2.0,
    "clip": "none",
    "weight": "none",
    "weight_temperature": 1.0,
    "adaptive_temperature": False,
    "regulariser": "none",
    "regulariser_weight": 0.1,
    "beta": 0.0,
    "kl": "k3",
    "kl_weight": "importance",
    "entropy_bonus": 0.0,
    "centre": "one",
    "level": "token",
    "cap": 5.0,
    "tau": 1.0,
    "tau_positive": 1.0,
    "tau_negative": 1.05,
    "second_moment": 0.04,
    "tolerance": 0.1,
    "drop": "none",
    "keep_denominator": False,
    "threshold": 0.5,
    "weight_low": 0.5,
    "weight_high": 2.0,
    "unknown_behaviour": "refuse",
}


def row(advantage: str, term: str, aggregation: str, mask: str, **constants: Any) -> dict[str, Any]:
    return {
        "advantage": advantage,
        "term": term,
        "aggregation": aggregation,
        "zero_variance_mask": mask == "on",
        **constants,
    }


TABLE: dict[str, dict[str, Any]] = {
    "reinforce": row("mean", "rec", "token_mean", "on"),
    "rloo": row("leave_one_out", "rec", "token_mean", "on"),
    "grpo": row("whiten", "ppo", "sequence_mean", "on"),
    "dapo": row("whiten", "ppo", "token_mean", "on", epsilon_high=0.28),
    "dr_grpo": row("mean", "ppo", "fixed_length", "on"),
    "off_policy_grpo": row("whiten", "off_policy", "sequence_mean", "on"),
    "gspo": row("whiten", "gspo", "sequence_mean", "on", epsilon_low=3e-4, epsilon_high=4e-4),
    "cispo": row("whiten", "cispo", "token_mean", "on"),
    "topr": row("mean", "topr", "token_mean", "on", level="sequence"),
    "decoupled": row("whiten", "decoupled", "token_mean", "on"),
    "tis": row("whiten", "tis", "token_mean", "on"),
    "mis": row("whiten", "mis", "token_mean", "on"),
    "m2po": row("whiten", "m2po", "token_mean", "on"),
    "dppo": row("whiten", "dppo", "token_mean", "on"),
    "sapo": row("whiten", "sapo", "sequence_mean", "on"),
    "rec_oneside_is": row("mean", "rec", "token_mean", "on", clip="one_side", weight="importance"),
    "rec_oneside_nois": row("mean", "rec", "token_mean", "on", clip="one_side"),
    "rec_twoside_is": row("mean", "rec", "token_mean", "on", clip="two_side", weight="importance"),
    "rec_twoside_nois": row("mean", "rec", "token_mean", "on", clip="two_side"),
    "rec_ring_is": row("mean", "rec", "token_mean", "on", clip="ring", weight="importance"),
    "rec_ring_nois": row("mean", "rec", "token_mean", "on", clip="ring"),
    "red_drop": row("mean", "rec", "token_mean", "on", drop="random"),
    "red_weight": row("mean", "rec", "token_mean", "on", weight="exp_advantage"),
    "red_weight_adaptive": row("mean", "rec", "token_mean", "on", weight="exp_advantage", adaptive_temperature=True),
    "opmd": row("mean", "opmd", "token_mean", "on"),
    "opmd_kimi": row("–", "opmd_kimi", "–", "off"),
    "opmd_pairwise": row("–", "opmd_pairwise", "–", "off"),
    "opmd_k2": row("mean", "rec", "token_mean", "off", regulariser="k2_token"),
    "asymre": row("shifted", "rec", "token_mean", "off"),
    "sft": row("–", "sft", "token_mean", "off"),
}
for narrow in [name for name in TABLE if name.startswith("rec_")]:
    TABLE[f"{narrow}_wide"] = TABLE[narrow] | {
        "epsilon_low": 0.6,
        "epsilon_high": 2.0,
        "ring_low": 0.8,
        "ring_high": 4.0,
    }


def complete(name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """The constants of a name with what replaces them, and the refusals of sections 3 and 5."""
    options = SHARED | TABLE[name] | overrides
    if options["advantage"] in ("raw", "shifted") and "zero_variance_mask" not in overrides:
        options["zero_variance_mask"] = False
    if options["beta"] and options["kl"] == "k1" and options["kl_weight"] == "none":
        raise ValueError("k1 without weight has no gradient in expectation")
    if options["adaptive_temperature"] and options["aggregation"] == "sequence_mean":
        raise ValueError("adaptive temperature under sequence_mean")
    of_tokens = options["regulariser"] != "none" or options["beta"] or options["entropy_bonus"]
    if name in ("opmd_kimi", "opmd_pairwise") and of_tokens:
        raise ValueError(f"{name} has no token term")
    return options
