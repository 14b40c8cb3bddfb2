"""Names and fields from other libraries, and what to use in Solera instead. Does not import torch.

`docs/coming-from.md` has the complete list.
"""

from collections.abc import Mapping

PEER_NAMES: Mapping[str, str] = {
    "ppo": "use grpo: PPO's clipped loss, with the rewards of a group instead of a critic",
    "vanilla": 'verl\'s vanilla loss is grpo with aggregation = "token_mean" and dual_clip = 3',
    "bnpo": 'TRL\'s bnpo is grpo with aggregation = "token_mean"',
    "luspo": 'TRL\'s luspo is gspo with aggregation = "sequence_sum"',
    "vespo": "Solera has no vespo; topr and gspo also weight whole responses",
    "gpg": "verl's gpg is reinforce: no ratio and no clip",
    "dro": "verl's dro is opmd_k2 with regulariser_weight = dro_beta / 2",
    "icepop": "IcePop is mis with weight_low = 0.5 and weight_high = 5",
    "dppo_tv": "verl's dppo_tv is dppo with tolerance = clip_ratio",
    "rec": "use reinforce, which has no clip, or one of rec_{oneside,twoside,ring}_{is,nois}",
    "importance_sampling": 'Trinity-RFT\'s importance_sampling is reinforce with weight = "importance"',
    "raft": "Trinity-RFT's raft is sft, which imitates the responses whose reward reaches objective.threshold",
    "default": (
        'prime-rl\'s default loss is dppo with advantage = "mean", tolerance = 0.2, regulariser = "k2_token" and '
        "regulariser_weight = 0.001"
    ),
}
"""Name of an objective in another library -> what to use in Solera."""

CISPO_CAP = "its largest ratio is objective.cap: equal to TRL's epsilon_high, or to 1 + clip_ratio_high in verl"
DPPO_TOLERANCE = "its bound is objective.tolerance, the largest change in a token's probability (verl's clip_ratio)"
TRL_DELTA = "TRL's delta is objective.dual_clip (objective.delta shifts the advantage `shifted`)"
PEER_FIELDS: Mapping[tuple[str, str], str] = {
    ("cispo", "epsilon"): CISPO_CAP,
    ("cispo", "epsilon_high"): CISPO_CAP,
    ("cispo", "epsilon_low"): "its ratios have no lower bound",
    ("cispo", "dual_clip"): "objective.cap bounds its ratios",
    ("tis", "cap"): "its largest weight is objective.weight_high",
    ("mis", "cap"): "weights above objective.weight_high become 0",
    ("decoupled", "cap"): "use tis, which bounds the weight by objective.weight_high",
    **{("dppo", name): DPPO_TOLERANCE for name in ("epsilon", "epsilon_low", "epsilon_high")},
    ("topr", "dual_clip"): "its weights are at most 1",
    ("sapo", "dual_clip"): "its gate bounds large ratios",
    ("rec", "dual_clip"): 'objective.clip = "two_side" leaves out large ratios, whatever the sign of the advantage',
    **{(term, "delta"): TRL_DELTA for term in ("ppo", "gspo", "off_policy", "decoupled", "tis", "mis")},
}
"""(term, field) -> why the term does not use the field, and what to use instead."""
