"""What a config is put together to."""

import pytest

from solera.build import OwnCode, _graded_alone, device_of
from solera.config import Config, RewardConfig, RunConfig
from solera.errors import SoleraError


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


def test_a_limit_for_a_gpu_is_refused_on_a_processor():
    with pytest.raises(SoleraError, match="this run is on a CPU: remove it"):
        device_of(Config(run=RunConfig(device="cpu", gpu_memory=4.0)))
