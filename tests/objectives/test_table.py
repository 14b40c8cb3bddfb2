"""The table of names: defaults from one place, and refusals that say what to change."""

import dataclasses
import re
import runpy
from pathlib import Path

import pytest

from solera.config import (
    AdvantageName,
    AggregationName,
    ClipName,
    CollectConfig,
    Config,
    DrawConfig,
    LearnConfig,
    ObjectiveConfig,
    SyncConfig,
)
from solera.errors import SoleraError
from solera.objectives.objective import compose
from solera.objectives.peers import PEER_FIELDS, PEER_NAMES
from solera.objectives.table import TABLE, notices, optional, resolve, resolve_config


def test_unset_fields_come_from_the_row():
    resolved = resolve(ObjectiveConfig("grpo"))
    assert (resolved.advantage, resolved.aggregation, resolved.zero_variance_mask) == ("whiten", "sequence_mean", True)
    assert (resolved.epsilon_low, resolved.epsilon_high, resolved.beta) == (0.2, 0.2, 0.0)
    assert resolved.kl is None
    assert resolved.epsilon is None
    off_policy = resolve(ObjectiveConfig("off_policy_grpo"))
    assert (off_policy.epsilon, off_policy.centre, off_policy.level) == (0.2, "one", "token")


@pytest.mark.parametrize("name", TABLE)
def test_every_row_resolves_composes_and_resolves_again_to_itself(name):
    resolved = resolve(ObjectiveConfig(name))
    assert resolve(resolved) == resolved
    assert compose(resolved).uses_reference == (name in ("opmd_kimi", "opmd_pairwise"))
    if name not in ("opmd_kimi", "opmd_pairwise"):
        with_kl = resolve(ObjectiveConfig(name, beta=0.1))
        assert resolve(with_kl) == with_kl
        assert compose(with_kl).uses_reference


SPECIFIED = {
    "reinforce": ("mean", "token_mean", True), "rloo": ("leave_one_out", "token_mean", True),
    "grpo": ("whiten", "sequence_mean", True), "dapo": ("whiten", "token_mean", True),
    "dr_grpo": ("mean", "fixed_length", True), "off_policy_grpo": ("whiten", "sequence_mean", True),
    "gspo": ("whiten", "sequence_mean", True), "cispo": ("whiten", "token_mean", True),
    "topr": ("mean", "token_mean", True), "decoupled": ("whiten", "token_mean", True),
    "tis": ("whiten", "token_mean", True), "mis": ("whiten", "token_mean", True),
    "m2po": ("whiten", "token_mean", True), "dppo": ("whiten", "token_mean", True),
    "sapo": ("whiten", "sequence_mean", True), "red_drop": ("mean", "token_mean", True),
    "red_weight": ("mean", "token_mean", True), "red_weight_adaptive": ("mean", "token_mean", True),
    "opmd": ("mean", "token_mean", True), "opmd_kimi": (None, "sequence_sum", False),
    "opmd_pairwise": (None, "group_sum", False), "opmd_k2": ("mean", "token_mean", False),
    "asymre": ("shifted", "token_mean", False), "sft": (None, "token_mean", False),
    **{
        f"rec_{clip}_{weight}{wide}": ("mean", "token_mean", True)
        for clip in ("oneside", "twoside", "ring") for weight in ("is", "nois") for wide in ("", "_wide")
    },
}  # fmt: skip


def test_the_table_is_the_one_of_the_formulas():
    rows = {name: resolve(ObjectiveConfig(name)) for name in TABLE}
    assert {n: (c.advantage, c.aggregation, c.zero_variance_mask) for n, c in rows.items()} == SPECIFIED
    assert [n for n, c in rows.items() if c.refill] == ["dapo"]
    wide = rows["rec_ring_is_wide"]
    assert (wide.epsilon_low, wide.epsilon_high, wide.ring_low, wide.ring_high) == (0.6, 2.0, 0.8, 4.0)
    ring = rows["rec_ring_nois"]
    assert (ring.epsilon_low, ring.epsilon_high, ring.ring_low, ring.ring_high) == (0.2, 0.2, 0.6, 2.0)
    assert (rows["dapo"].epsilon_high, rows["gspo"].epsilon_low, rows["gspo"].epsilon_high) == (0.28, 3e-4, 4e-4)
    assert (rows["opmd_k2"].regulariser, rows["opmd_k2"].regulariser_weight) == ("k2_token", 0.1)
    assert (rows["asymre"].delta, rows["red_drop"].drop, rows["red_drop"].keep_denominator) == (-0.1, "random", False)


def test_a_part_brings_its_fields_and_takes_them_along():
    ring = resolve(ObjectiveConfig("reinforce", clip="ring", epsilon_low=0.5))
    assert (ring.epsilon_low, ring.epsilon_high, ring.ring_low, ring.ring_high) == (0.5, 0.2, 0.6, 2.0)
    bare = resolve(ObjectiveConfig("rec_oneside_is_wide", clip="none", weight="none"))
    assert bare.epsilon_low is None and bare.epsilon_high is None
    assert resolve(ObjectiveConfig("red_weight_adaptive")).weight_temperature is None
    assert resolve(ObjectiveConfig("grpo", drop="worst")).keep_denominator is False


def test_an_objective_without_a_ratio_does_not_ask_who_wrote_the_data():
    free = ("reinforce", "rloo", "red_drop", "red_weight", "red_weight_adaptive", "opmd", "opmd_kimi", "opmd_pairwise")
    asking = {name for name in TABLE if compose(resolve(ObjectiveConfig(name))).uses_behaviour}
    assert asking == TABLE.keys() - {*free, "asymre", "sft"}
    assert compose(resolve(ObjectiveConfig("reinforce", beta=0.1))).uses_behaviour  # weighs its KL by the ratio
    assert not compose(resolve(ObjectiveConfig("reinforce", beta=0.1, kl_weight="none"))).uses_behaviour


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (ObjectiveConfig("gropo"), "did you mean grpo"),
        (
            ObjectiveConfig("grpo", epsilon=0.1),
            r"is not used by grpo: remove it; did you mean epsilon_low or epsilon_high\?",
        ),
        (ObjectiveConfig("off_policy_grpo", epsilon_low=0.1), r"by off_policy_grpo: remove it; did you mean epsilon\?"),
        (ObjectiveConfig("grpo", ref_period=10), "objective.ref_period needs a reference policy: set objective.beta"),
        (ObjectiveConfig("grpo", kl="k2"), "objective.kl needs a reference policy"),
        (ObjectiveConfig("grpo", beta=0.1, ref_period=10, ref_ema=0.1), "choose one"),
        (ObjectiveConfig("grpo", beta=0.1, ref_ema=1.0), "between 0 and 1"),
        (ObjectiveConfig("grpo", beta=0.1, kl="k1", kl_weight="none"), "has no gradient"),
        (ObjectiveConfig("grpo", beta=-1.0), "at least 0"),
        (ObjectiveConfig("grpo", epsilon_low=1.5), "between 0 and 1"),
        (ObjectiveConfig("off_policy_grpo", epsilon=0.0), "above 0"),
        (ObjectiveConfig("grpo", refill=True, zero_variance_mask=False), "zero_variance_mask = true"),
        (ObjectiveConfig("grpo", clip="ring"), "objective.clip is not used by grpo"),
        (ObjectiveConfig("reinforce", epsilon_low=0.1), "only has an effect with objective.clip = one_side or two"),
        (
            ObjectiveConfig("red_weight_adaptive", weight_temperature=2.0),
            "with objective.adaptive_temperature = False: remove it",
        ),
        (ObjectiveConfig("red_weight_adaptive", aggregation="sequence_mean"), "cancel under sequence_mean"),
        (ObjectiveConfig("opmd_kimi", beta=0.1), "objective.beta is not used by opmd_kimi"),
        (ObjectiveConfig("opmd_pairwise", regulariser="k2_token"), "is not used by opmd_pairwise"),
        (ObjectiveConfig("opmd_kimi", aggregation="token_mean"), "is sequence_sum by definition"),
        (ObjectiveConfig("opmd_kimi", advantage="mean"), "objective.advantage is not used by opmd_kimi"),
        (ObjectiveConfig("reinforce", unknown_behaviour="proximal"), "is not used by reinforce"),
        (ObjectiveConfig("asymre", advantage="mean", delta=-0.2), "has an effect with objective.advantage = shifted"),
        (ObjectiveConfig("rec_ring_is", ring_low=0.1), "at least epsilon_low"),
        (ObjectiveConfig("grpo", keep_denominator=True), "only has an effect with objective.drop = random or worst"),
        (ObjectiveConfig("mis", weight_low=3.0), "below weight_high"),
        (ObjectiveConfig("grpo", whiten_epsilon=0.0), "whiten_epsilon is 0.0; it must be at least 1e-12"),
        (ObjectiveConfig("grpo", whiten_epsilon=-1e-8), "at least 1e-12"),
        (ObjectiveConfig("dr_grpo", whiten_epsilon=1e-8), "effect with objective.advantage = whiten: remove it"),
        (ObjectiveConfig("grpo", advantage="whiten_bessel", whiten_epsilon=1e-8), "advantage = whiten: remove it"),
        (ObjectiveConfig("sft", whiten_epsilon=1e-8), "whiten_epsilon is not used by sft: remove it"),
        *((ObjectiveConfig("grpo", dual_clip=c), f"dual_clip is {c}; it must be above 1") for c in (1.0, 0.5, -3.0)),
        (ObjectiveConfig("cispo", dual_clip=3.0), r"not used by cispo: remove it; objective.cap bounds its ratios"),
        (ObjectiveConfig("sapo", dual_clip=3.0), "not used by sapo: remove it; its gate bounds large ratios"),
        (ObjectiveConfig("topr", dual_clip=3.0), "not used by topr: remove it; its weights are at most 1"),
        *(
            (ObjectiveConfig(name, dual_clip=3.0), f'not used by {name}: remove it; objective.clip = "two_side"')
            for name in ("reinforce", "rec_oneside_is", "rec_ring_nois_wide", "red_drop")
        ),
        *(
            (ObjectiveConfig(name, dual_clip=3.0), f"objective.dual_clip is not used by {name}: remove it")
            for name in ("opmd", "opmd_kimi", "opmd_pairwise", "sft")
        ),
    ],
)
def test_what_cannot_act_is_refused_in_one_line(config, says):
    with pytest.raises(SoleraError, match=says) as refusal:
        resolve(config)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ppo", "use grpo"), ("PPO", "use grpo"), ("vanilla", 'grpo with aggregation = "token_mean" and dual_clip = 3'),
        ("bnpo", 'grpo with aggregation = "token_mean"'), ("gpg", "is reinforce"), ("rec", "or one of rec_"),
        ("icepop", "mis with weight_low = 0.5 and weight_high = 5"), ("IcePop", "mis with weight_low"),
        ("dro", "opmd_k2 with regulariser_weight = dro_beta / 2"), ("luspo", 'gspo with aggregation = "sequence_sum"'),
        ("GRPO", "did you mean grpo"), ("dr-grpo", "did you mean dr_grpo"), ("quux", "there is no such objective"),
        ("my.py:soft", "passed from Python: solera.train"),
    ],
)  # fmt: skip
def test_a_name_of_another_library_is_answered_with_ours(name, says):
    with pytest.raises(SoleraError) as refusal:
        resolve(ObjectiveConfig(name))
    assert str(refusal.value).startswith(f"objective.name is {name!r}; ")
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("cispo", {"epsilon_high": 0.28}, "is objective.cap"), ("cispo", {"epsilon": 0.2}, "is objective.cap"),
        ("cispo", {"epsilon_low": 0.2}, "no lower bound"), ("tis", {"cap": 2.0}, "objective.weight_high"),
        ("mis", {"cap": 2.0}, "objective.weight_high"), ("decoupled", {"cap": 2.0}, "use tis, which bounds the weight"),
        ("dppo", {"epsilon_low": 0.2}, "is objective.tolerance"), ("grpo", {"delta": 4.0}, "objective.dual_clip"),
        ("dapo", {"delta": 4.0}, "objective.dual_clip"), ("gspo", {"delta": 4.0}, "objective.dual_clip"),
    ],
)  # fmt: skip
def test_a_field_of_another_library_is_answered_with_ours(name, fields, says):
    with pytest.raises(SoleraError) as refusal:
        resolve(ObjectiveConfig(name, **fields))
    assert str(refusal.value).startswith(f"objective.{next(iter(fields))} is not used by {name}: remove it; ")
    assert says in str(refusal.value)


def test_what_the_answers_name_exists():
    fields = {field.name for field in dataclasses.fields(ObjectiveConfig)}
    for name, answer in PEER_NAMES.items():
        assert name not in TABLE
        assert set(re.findall(r"(\w+) = ", answer)) <= fields
    for (term, field), answer in PEER_FIELDS.items():
        assert term in {row.term for row in TABLE.values()}
        assert field in fields
        assert set(re.findall(r"objective\.(\w+)", answer)) <= fields


def test_a_dual_clip_is_off_unless_set():
    names = {name for name in TABLE if "dual_clip" in optional(resolve(ObjectiveConfig(name)))}
    assert names == {
        "grpo", "dapo", "dr_grpo", "off_policy_grpo", "gspo", "decoupled", "tis", "mis", "m2po", "dppo",
    }  # fmt: skip
    for name in names:
        assert resolve(ObjectiveConfig(name)).dual_clip is None
        assert resolve(ObjectiveConfig(name, dual_clip=3.0)).dual_clip == 3.0


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Config(collect=CollectConfig(refill_rounds=9)), "only has an effect with objective.refill = true"),
        (Config(collect=CollectConfig(offset=2), objective=ObjectiveConfig(refill=True)), "choose one"),
        (Config(objective="grpo"), "objective is 'grpo' but must be a solera.ObjectiveConfig"),
        (
            Config(objective=ObjectiveConfig(centre="prox")),
            "objective.centre is 'prox' but must be one of one, proximal",
        ),
        (Config(learn=LearnConfig(passes=2.5)), "learn.passes is 2.5 but must be a whole number"),
        ("recipes/demo.toml", "solera.load reads a TOML file"),
    ],
)
def test_what_a_config_cannot_mean_is_refused(config, says):
    with pytest.raises(SoleraError, match=says):
        resolve_config(config)


ON_POLICY = SyncConfig(period=1)


@pytest.mark.parametrize(
    ("name", "fields", "parts", "says"),
    [
        ("off_policy_grpo", {"centre": "proximal"}, {}, "around the policy before the batch"),
        ("decoupled", {}, {}, "around the policy before the batch"),
        ("mis", {}, {"sync": ON_POLICY}, "around the policy before the batch"),
        ("grpo", {}, {"sync": ON_POLICY}, "responses of the same version"),
        ("gspo", {}, {"sync": ON_POLICY}, "responses of the same version"),
        ("rec_twoside_is", {}, {"sync": ON_POLICY}, "responses of the same version"),
        ("off_policy_grpo", {"centre": "proximal"}, {"learn": LearnConfig(passes=2)}, None),
        ("decoupled", {}, {"learn": LearnConfig(minibatches=2)}, None),
        ("grpo", {}, {"sync": ON_POLICY, "learn": LearnConfig(passes=2)}, None),
        ("grpo", {}, {"sync": ON_POLICY, "collect": CollectConfig(offset=1)}, None),
        ("grpo", {}, {"sync": ON_POLICY, "draw": DrawConfig(policy="replay")}, None),
        ("grpo", {}, {"sync": SyncConfig(period=2)}, None),
        ("grpo", {}, {"sync": SyncConfig(rule="never")}, None),
        ("reinforce", {}, {"sync": ON_POLICY}, None),
        ("cispo", {}, {"sync": ON_POLICY}, None),
    ],
)
def test_a_clip_that_cannot_act_is_said_once_not_refused(name, fields, parts, says):
    said = notices(resolve_config(Config(objective=ObjectiveConfig(name, **fields), **parts)))
    assert [says in sentence for sentence in said] == ([] if says is None else [True])


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("grpo", {"epsilon_low": 0.0, "epsilon_high": 0.0}), ("off_policy_grpo", {"epsilon": 0.0}),
        ("rec_ring_is", {"ring_low": 0.1}), ("mis", {"weight_low": 2.0}), ("mis", {"weight_low": 3.0}),
        ("grpo", {"epsilon_low": -0.1}), ("grpo", {"epsilon_low": 1.5}),
    ],
)  # fmt: skip
def test_empty_and_inverted_bands_are_refused(name, fields):
    with pytest.raises(SoleraError, match=f"objective.{next(iter(fields))}"):
        resolve(ObjectiveConfig(name, **fields))


def test_the_page_about_the_algorithms_is_up_to_date():
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "write_algorithms_doc.py"))
    text = script["DOC"].read_text(encoding="utf-8")
    assert script["written"](text) == text
    for field, choices in (("advantage", AdvantageName), ("clip", ClipName), ("aggregation", AggregationName)):
        assert all(f"`{choice}`" in text for choice in choices.__args__), field
