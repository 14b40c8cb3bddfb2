"""The table of objectives: each name stands for a composition of parts with their constants.

A name is a starting point. Fields that a config leaves unset come from the row of its name, or from the part that the
user chose instead. Fields without effect are refused. This module does not import torch, so that it loads quickly.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from solera.config import (
    AdvantageName,
    AggregationName,
    CollectConfig,
    Config,
    DrawConfig,
    ObjectiveConfig,
    alike,
    check,
    check_types,
    default_lr,
    passing,
    resolve_task,
)
from solera.errors import SoleraError
from solera.objectives.peers import PEER_FIELDS, PEER_NAMES
from solera.objectives.values import RANGES, check_together

YAO = "Yao et al., arXiv 2509.24203"
MROUEH = "Mroueh et al., arXiv 2505.22257"


@dataclass(frozen=True)
class ObjectiveSpec:
    """One named objective: its policy term and the default values of its fields.

    `constants` are the term's own fields, in addition to those that every objective has. `advantage` is `None` if the
    term uses the rewards directly.
    """

    term: str
    advantage: AdvantageName | None
    aggregation: AggregationName
    formula: str
    use: str
    reference: str
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    zero_variance_mask: bool = True
    refill: bool = False
    drop: str = "none"
    regulariser: str = "none"

    def defaults(self) -> dict[str, Any]:
        """Defaults of this row. Some of these fields have an effect only with the part that the row itself chooses."""
        shared: dict[str, Any] = {
            "advantage": self.advantage, "credit": self.advantage and "rollout", "aggregation": self.aggregation,
            "zero_variance_mask": self.zero_variance_mask, "refill": self.refill, "drop": self.drop,
        }  # fmt: skip
        if self.term not in WHOLE_RESPONSE_TERMS:
            shared |= {"regulariser": self.regulariser, "beta": 0.0, "entropy_bonus": 0.0}
        return {name: value for name, value in shared.items() if value is not None} | dict(self.constants)


UNCENTRED = ("raw", "shifted")
"""Advantages that are not 0 when all rewards are equal. With them the zero-variance mask is off by default."""
WHOLE_RESPONSE_TERMS = ("opmd_kimi", "opmd_pairwise")
"""Losses of a whole response. No token penalties can be added to them."""
REFERENCE_TERMS = ("opmd_kimi", "opmd_pairwise")
SAMPLER_FREE_TERMS = ("opmd", "opmd_kimi", "opmd_pairwise", "sft")
"""Terms that do not use the behaviour policy's log-probabilities."""

BAND = {"epsilon_low": 0.2, "epsilon_high": 0.2}
RING = {**BAND, "ring_low": 0.6, "ring_high": 2.0}
WIDE_RING = {"epsilon_low": 0.6, "epsilon_high": 2.0, "ring_low": 0.8, "ring_high": 4.0}
AROUND_PROXIMAL = ("decoupled", "tis", "mis")
"""Terms that clip around the policy before the batch."""
DUAL_CLIP_TERMS = ("ppo", "off_policy", "gspo", *AROUND_PROXIMAL, "m2po", "dppo")
"""Terms whose gradient passes through a ratio that is unbounded where the advantage is negative."""
PLAIN = {"clip": "none", "weight": "none"}
TEMPERED = {"clip": "none", "weight": "exp_advantage"}

PARTS: Mapping[str, Mapping[Any, Mapping[str, Any]]] = {
    "advantage": {"whiten": {"whiten_epsilon": 1e-8}, "shifted": {"delta": -0.1}, "logavgexp": {"advantage_tau": 1.0}},
    "clip": {"one_side": BAND, "two_side": BAND, "ring": RING},
    "weight": {"exp_advantage": {"adaptive_temperature": False}},
    "adaptive_temperature": {False: {"weight_temperature": 1.0}},
    "regulariser": {name: {"regulariser_weight": 0.1} for name in ("forward_kl", "k2_token", "k2_sequence")},
    "drop": {name: {"keep_denominator": False} for name in ("random", "worst")},
}
"""Fields that a choice adds: `PARTS[field][choice]` holds these fields and their defaults."""
KL_FIELDS: Mapping[str, Any] = {"kl": "k3", "kl_weight": "importance"}
"""Fields that beta above 0 adds, with their defaults."""
REFERENCE_UPDATES = ("ref_period", "ref_ema")
"""Optional fields of an objective with a reference policy."""


def _rec_rows() -> Iterator[tuple[str, ObjectiveSpec]]:
    """`rec_{oneside,twoside,ring}_{is,nois}`, each also with a wide clip."""
    clips = {
        "oneside": ("one_side", "a token counts until its ratio passes the bound in the direction of its advantage"),
        "twoside": ("two_side", "a token counts while its ratio is within both bounds"),
        "ring": ("ring", "like twoside, and a token far outside counts again if the update pulls it back"),
    }
    for wide, (name, (clip, meaning)), (suffix, weight) in product(
        (False, True), clips.items(), (("is", "importance"), ("nois", "none"))
    ):
        edges = WIDE_RING if wide else RING  # the ring bounds have an effect only with clip = ring
        narrow = f"{meaning}, {'weighted by the ratio' if suffix == 'is' else 'unweighted'}"
        use = f"rec_{name}_{suffix} for old data: clips less, and so learns faster" if wide else narrow
        yield f"rec_{name}_{suffix}{'_wide' if wide else ''}", ObjectiveSpec(
            "rec", "mean", "token_mean", f"−sg({'ρ·' if weight == 'importance' else ''}M)·A·ℓ, M: {clip} clip", use,
            YAO, {"clip": clip, "weight": weight, **edges},
        )  # fmt: skip


TABLE: dict[str, ObjectiveSpec] = {
    "reinforce": ObjectiveSpec(
        "rec", "mean", "token_mean", "−A·ℓ", "on-policy data; off-policy only as a baseline, because it collapses",
        YAO, PLAIN,
    ),
    "rloo": ObjectiveSpec(
        "rec", "leave_one_out", "token_mean", "−A·ℓ", "on-policy data in small groups; its baseline is unbiased",
        "Ahmadian et al., arXiv 2402.14740", PLAIN,
    ),
    "grpo": ObjectiveSpec(
        "ppo", "whiten", "sequence_mean", "−min(ρA, clip(ρ, 1−ε_l, 1+ε_h)·A) + β·KL",
        "the common baseline; data up to some tens of batches old", "Shao et al., arXiv 2402.03300", BAND,
    ),
    "dapo": ObjectiveSpec(
        "ppo", "whiten", "token_mean", "−min(ρA, clip(ρ, 1−ε_l, 1+ε_h)·A)",
        "long responses; replaces groups whose rewards are all equal by new ones", "Yu et al., arXiv 2503.14476",
        {"epsilon_low": 0.2, "epsilon_high": 0.28}, refill=True,
    ),
    "dr_grpo": ObjectiveSpec(
        "ppo", "mean", "fixed_length", "−min(ρA, clip(ρ, 1−ε_l, 1+ε_h)·A)",
        "GRPO without its bias towards long wrong answers and easy prompts", "Liu et al., arXiv 2503.20783", BAND,
    ),
    "off_policy_grpo": ObjectiveSpec(
        "off_policy", "whiten", "sequence_mean",
        "−min(ρA, clip(ρ, max(ρ'−ε, 0), ρ'+ε)·A) + β·KL, ρ' = 1, or π_k/α with centre = proximal",
        "an engine synced every v batches; with centre = one, the default, it equals grpo", MROUEH,
        {"epsilon": 0.2, "centre": "one", "level": "token"},
    ),
    "gspo": ObjectiveSpec(
        "gspo", "whiten", "sequence_mean", "−min(sA, clip(s, 1−ε_l, 1+ε_h)·A), s = exp(mean(ℓ−b))",
        "mixture-of-experts models, whose token ratios are noisy", "Zheng et al., arXiv 2507.18071",
        {"epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": ObjectiveSpec(
        "cispo", "whiten", "token_mean", "−sg(min(ρ, cap))·A·ℓ", "keeps rare tokens that a clip would remove",
        "MiniMax, arXiv 2506.13585; cap 5: ScaleRL, arXiv 2510.13786", {"cap": 5.0},
    ),
    "topr": ObjectiveSpec(
        "topr", "mean", "token_mean", "−sg(a)·A·ℓ, a = 1 where A > 0, else min(w, 1)",
        "old data; wrong responses lose their weight once the policy no longer produces them",
        "Le Roux et al., arXiv 2503.14286", {"level": "sequence"},
    ),
    "decoupled": ObjectiveSpec(
        "decoupled", "whiten", "token_mean", "−sg(q)·min(uA, clip(u)·A), u = π_θ/π_k, q = π_k/α",
        "several passes over stale data; the clip limits only the change since the start of the batch",
        "Hilton et al., arXiv 2110.00641", BAND,
    ),
    "tis": ObjectiveSpec(
        "tis", "whiten", "token_mean", "decoupled, with min(q, weight_high) in place of q",
        "an engine whose probabilities differ slightly from the learner's", "Yao et al., 2025 (truncated IS)",
        {**BAND, "weight_high": 2.0},
    ),
    "mis": ObjectiveSpec(
        "mis", "whiten", "token_mean", "decoupled, with q where weight_low ≤ q ≤ weight_high and 0 elsewhere",
        "like tis, if the probabilities of single tokens differ a lot", "IcePop, Ling Team, arXiv 2510.18855",
        {**BAND, "weight_low": 0.5, "weight_high": 2.0},
    ),
    "m2po": ObjectiveSpec(
        "m2po", "whiten", "token_mean",
        "−ρA, but 0 for dropped tokens. Only tokens that the update moves away from α can be dropped (A > 0 and ρ > 1, "
        "or A < 0 and ρ < 1): those with the largest (log ρ)², until the mean of the others is at most second_moment",
        "very stale data", "Zheng et al., arXiv 2510.01161", {"second_moment": 0.04},
    ),
    "dppo": ObjectiveSpec(
        "dppo", "whiten", "token_mean", "−ρA, but 0 where |π − α| > tolerance and the update would increase it",
        "large vocabularies, where the ratios of rare tokens are noisy", "Qi et al., arXiv 2602.04879",
        {"tolerance": 0.1},
    ),
    "sapo": ObjectiveSpec(
        "sapo", "whiten", "sequence_mean", "−(4/τ)·σ(τ(ρ−1))·A", "a soft gate instead of a clip",
        "Gao et al., arXiv 2511.20347", {"tau_positive": 1.0, "tau_negative": 1.05},
    ),
    **dict(_rec_rows()),
    "red_drop": ObjectiveSpec(
        "rec", "mean", "token_mean", "−A·ℓ, after dropping negatives until a group has as many as positives",
        "off-policy data without ratios; groups with many failures", YAO, PLAIN, drop="random",
    ),
    "red_weight": ObjectiveSpec(
        "rec", "mean", "token_mean", "−sg(exp(A/T))·A·ℓ",
        "off-policy data without ratios; good responses get more weight", YAO,
        {**TEMPERED, "adaptive_temperature": False, "weight_temperature": 1.0},
    ),
    "red_weight_adaptive": ObjectiveSpec(
        "rec", "mean", "token_mean", "−sg(exp(A/T))·A·ℓ, T such that Σ A·exp(A/T)·n = 0",
        "like red_weight; adapts T to how far failures outweigh successes", "Yao et al., follow-up",
        {**TEMPERED, "adaptive_temperature": True},
    ),
    "opmd": ObjectiveSpec(
        "opmd", "mean", "token_mean", "−A·ℓ/(1+τ)", "the simplest form of mirror descent", YAO, {"tau": 1.0}
    ),
    "opmd_kimi": ObjectiveSpec(
        "opmd_kimi", None, "sequence_sum", "(r − τ·log Ẑ − τ·Σ(ℓ−f))²",
        "data written by the reference policy; tau = 0.1 lets the policy move away from it", "Kimi, arXiv 2501.12599",
        {"tau": 1.0}, zero_variance_mask=False,
    ),
    "opmd_pairwise": ObjectiveSpec(
        "opmd_pairwise", None, "group_sum", "Σ_{i<j}(a_i − a_j)²/(2τG), a = r − τ·Σ(ℓ−f)",
        "data from any source; tau = 0.1 lets the policy move away from the reference", YAO, {"tau": 1.0},
        zero_variance_mask=False,
    ),
    "opmd_k2": ObjectiveSpec(
        "rec", "mean", "token_mean", "−A·ℓ + λ·(ℓ−b)²",
        "pulls the policy towards the one that wrote the data, instead of clipping", YAO, PLAIN,
        zero_variance_mask=False, regulariser="k2_token",
    ),
    "asymre": ObjectiveSpec(
        "rec", "shifted", "token_mean", "−(r − mean − δ)·ℓ", "off-policy data, with a bias towards imitation",
        "Arnal et al., arXiv 2506.20520", PLAIN, zero_variance_mask=False,
    ),
    "sft": ObjectiveSpec(
        "sft", None, "token_mean", "−ℓ where r ≥ threshold", "a warm start on good responses", "", {"threshold": 0.5},
        zero_variance_mask=False,
    ),
}  # fmt: skip


def find(name: str) -> ObjectiveSpec:
    if name not in TABLE:
        plain = name.lower().replace("-", "_")
        close = difflib.get_close_matches(plain, TABLE, n=3)
        meant = f"did you mean {' or '.join(close)}?" if close else "there is no such objective"
        if ".py" in name:
            meant = "an objective of your own is passed from Python: solera.train(config, objective=...)"
        hint = PEER_NAMES.get(plain, meant)
        raise SoleraError(f"objective.name is {name!r}; {hint} (solera algorithms lists all {len(TABLE)})")
    return TABLE[name]


def resolve(config: ObjectiveConfig) -> ObjectiveConfig:
    """Fill in every field that has an effect, and refuse every field that has none."""
    check_types(config, "objective", ObjectiveConfig)
    row = find(config.name)
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "name"}
    given = {name: value for name, value in given.items() if value is not None}
    acting = _acting(row, given)
    filled = dataclasses.replace(config, **{name: given.get(name, value) for name, value in acting.items()})
    if needs_behaviour(filled) and config.unknown_behaviour is None:
        filled = dataclasses.replace(filled, unknown_behaviour="refuse")
    for name in given.keys() - acting.keys():
        _refuse_idle(name, filled)
    _check(filled)
    return filled


def _acting(row: ObjectiveSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every field that has an effect, with its default. A field of a part counts only if that part is chosen."""
    defaults = row.defaults()
    if given.get("advantage") in UNCENTRED:
        defaults["zero_variance_mask"] = False
    if not given.get("zero_variance_mask", defaults["zero_variance_mask"]):
        defaults["refill"] = False
    owned = {name for field in PARTS if field in defaults for fields in PARTS[field].values() for name in fields}
    acting = {name: value for name, value in defaults.items() if name not in owned}
    pending = list(acting)
    while pending:
        field = pending.pop()
        choice = given.get(field, acting[field])
        brought = KL_FIELDS if field == "beta" and choice > 0 else PARTS.get(field, {}).get(choice, {})
        for name, value in brought.items():
            acting[name] = defaults.get(name, value)
            pending.append(name)
    return acting


def needs_reference(config: ObjectiveConfig) -> bool:
    """Whether a resolved objective needs `ref_logp`."""
    return find(config.name).term in REFERENCE_TERMS or (config.beta or 0) > 0


def needs_behaviour(config: ObjectiveConfig) -> bool:
    """Whether a resolved objective needs the log-probabilities that its data was sampled with."""
    row = find(config.name)
    if row.term == "rec":
        in_term = config.clip != "none" or config.weight == "importance"
    else:
        in_term = row.term not in SAMPLER_FREE_TERMS
    weighted_kl = (config.beta or 0) > 0 and config.kl_weight == "importance"
    return in_term or weighted_kl or config.regulariser in ("k2_token", "k2_sequence")


def optional(resolved: ObjectiveConfig) -> list[str]:
    """Fields without a default that have an effect once they are set."""
    dual_clip = ["dual_clip"] if find(resolved.name).term in DUAL_CLIP_TERMS else []
    return [*dual_clip, *(REFERENCE_UPDATES if needs_reference(resolved) else ())]


def _refuse_idle(name: str, resolved: ObjectiveConfig) -> None:
    """Refuse a field that was set but has no effect. Optional fields pass."""
    term = find(resolved.name).term
    if name in optional(resolved) or (name == "unknown_behaviour" and needs_behaviour(resolved)):
        return
    if (term, name) in PEER_FIELDS:
        raise SoleraError(f"objective.{name} is not used by {resolved.name}: remove it; {PEER_FIELDS[term, name]}")
    if name in (*KL_FIELDS, *REFERENCE_UPDATES) and "beta" in find(resolved.name).defaults():
        raise SoleraError(f"objective.{name} needs a reference policy: set objective.beta above 0 or remove it")
    for field, choices in PARTS.items():
        owners = [str(choice) for choice, fields in choices.items() if name in fields]
        if owners and getattr(resolved, field) is not None:
            raise SoleraError(
                f"objective.{name} only has an effect with objective.{field} = {' or '.join(owners)}: remove it"
            )
    acting = [field for field, value in vars(resolved).items() if value is not None and field != name]
    raise SoleraError(f"objective.{name} is not used by {resolved.name}: remove it{alike(name, acting, 2)}")


def resolve_config(config: Config) -> Config:
    """Check every value, and fill in unset fields whose default depends on other fields. Does not import torch."""
    check(config)
    objective = resolve(config.objective)
    if not objective.refill and config.collect.refill_rounds != CollectConfig.refill_rounds:
        raise SoleraError(
            "collect.refill_rounds only has an effect with objective.refill = true: set that, or remove it"
        )
    if objective.refill and config.collect.offset:
        raise SoleraError(
            "objective.refill would draw from the batches that collect.offset keeps waiting, and so change their lag: "
            "choose one"
        )
    task, evaluate, learn = resolve_task(config.task), config.evaluate, config.learn
    if evaluate.threshold is None:
        evaluate = dataclasses.replace(evaluate, threshold=passing(task))
    if learn.lr is None:
        learn = dataclasses.replace(learn, lr=default_lr(config))
    return dataclasses.replace(config, objective=objective, task=task, evaluate=evaluate, learn=learn)


def _check(c: ObjectiveConfig) -> None:
    for name, (low, high, wanted) in RANGES.items():
        value = getattr(c, name)
        if value is not None and not low <= value <= high:
            raise SoleraError(f"objective.{name} is {value}; it must be {wanted}")
    check_together(c)
    if c.refill and not c.zero_variance_mask:
        raise SoleraError("objective.refill replaces masked groups: set objective.zero_variance_mask = true")
    if c.credit == "turn" and c.weight == "exp_advantage":
        raise SoleraError(
            'objective.weight = "exp_advantage" weights whole responses by their advantage: choose another weight, or '
            'objective.credit = "rollout"'
        )
    if c.credit == "turn" and c.refill:
        raise SoleraError(
            'objective.refill counts groups by their total rewards: remove it, or set objective.credit = "rollout"'
        )
    row = find(c.name)
    if c.keep_denominator and row.advantage is None:
        raise SoleraError(
            f"objective.keep_denominator gives dropped responses an advantage of 0, but {c.name} uses no advantages: "
            "remove it"
        )
    if row.term in WHOLE_RESPONSE_TERMS and c.aggregation != row.aggregation:
        raise SoleraError(f"objective.aggregation of {c.name} is {row.aggregation} by definition: remove it")
    if c.adaptive_temperature and c.aggregation == "sequence_mean":
        raise SoleraError(
            "objective.adaptive_temperature weights responses by their lengths, which cancel under sequence_mean: "
            "choose another aggregation"
        )


def notices(config: Config) -> list[str]:
    """Messages to print once about a resolved config that is allowed but may surprise."""
    c = config.objective
    if (c.epsilon is None and c.epsilon_low is None) or max(config.learn.passes, config.learn.minibatches) > 1:
        return []
    if c.centre == "proximal" or find(c.name).term in AROUND_PROXIMAL:
        return [
            "with one pass and one minibatch the clip has no effect: it is centred around the policy before the batch, "
            "so every token is at the centre"
        ]
    if _always_fresh(config):
        return [
            "with one pass and one minibatch over responses of the same version the clip cannot act: every ratio is 1 "
            "up to rounding"
        ]
    return []


def _always_fresh(config: Config) -> bool:
    """Whether every response is trained on by the version that wrote it."""
    synced = config.sync.rule == "every" and config.sync.period == 1
    return synced and not config.collect.offset and config.draw == DrawConfig() and not _imports(config)


def _imports(config: Config) -> bool:
    return bool(config.store.data or config.store.solutions)
