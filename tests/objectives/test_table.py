"""The table of names: defaults from one place, and refusals that say what to change."""

import pytest

from solera.config import CollectConfig, Config, LearnConfig, ObjectiveConfig
from solera.errors import SoleraError
from solera.objectives.objective import compose
from solera.objectives.table import TABLE, notices, resolve, resolve_config


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
    resolved = resolve(ObjectiveConfig(name, beta=0.1))
    assert resolve(resolved) == resolved
    assert resolve(resolve(ObjectiveConfig(name))) == resolve(ObjectiveConfig(name))
    assert compose(resolved).uses_reference


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (ObjectiveConfig("gropo"), "did you mean grpo"),
        (ObjectiveConfig("grpo", epsilon=0.1), "objective.epsilon is not used by grpo: remove it"),
        (ObjectiveConfig("off_policy_grpo", epsilon_low=0.1), "objective.epsilon_low is not used"),
        (ObjectiveConfig("grpo", ref_period=10), "objective.ref_period needs a reference policy: set objective.beta"),
        (ObjectiveConfig("grpo", kl="k2"), "objective.kl needs a reference policy"),
        (ObjectiveConfig("grpo", beta=0.1, ref_period=10, ref_ema=0.1), "choose one"),
        (ObjectiveConfig("grpo", beta=0.1, ref_ema=1.0), "between 0 and 1"),
        (ObjectiveConfig("grpo", beta=0.1, kl="k1", kl_weight="none"), "has no gradient"),
        (ObjectiveConfig("grpo", beta=-1.0), "at least 0"),
        (ObjectiveConfig("grpo", epsilon_low=1.5), "between 0 and 1"),
        (ObjectiveConfig("off_policy_grpo", epsilon=0.0), "above 0"),
        (ObjectiveConfig("grpo", refill=True, zero_variance_mask=False), "zero_variance_mask = true"),
    ],
)
def test_what_cannot_act_is_refused_in_one_line(config, says):
    with pytest.raises(SoleraError, match=says) as refusal:
        resolve(config)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Config(collect=CollectConfig(refill_rounds=9)), "acts with objective.refill = true only"),
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


def test_a_clip_that_cannot_act_is_said_not_refused():
    config = Config(objective=resolve(ObjectiveConfig("off_policy_grpo", centre="proximal")))
    assert "cannot act" in notices(config)[0]
    assert notices(Config(objective=config.objective, learn=LearnConfig(passes=2))) == []
    assert notices(Config(objective=resolve(ObjectiveConfig("off_policy_grpo")))) == []
