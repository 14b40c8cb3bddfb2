"""What a config is put together to."""

import pytest

from solera.build import OwnCode, _graded_alone
from solera.config import Config, RewardConfig


@pytest.mark.parametrize(
    ("functions", "own", "alone"),
    [
        ((), OwnCode(), True),
        (("number", "boxed", "math"), OwnCode(), True),
        (("number", "rewards.py:brevity"), OwnCode(), False),
        ((), OwnCode(rewards=(len,)), False),
        ((), OwnCode(task=lambda codec: None), False),
    ],
)
def test_functions_of_ones_own_are_given_whole_batches(functions, own, alone):
    assert _graded_alone(Config(reward=RewardConfig(functions=functions)), own) is alone
