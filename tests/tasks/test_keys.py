"""Under which key a prompt from elsewhere is known."""

import pytest

from solera.config import TaskConfig, resolve_task
from solera.errors import SoleraError
from solera.tasks import gym
from solera.tasks.arithmetic import is_held_out
from solera.tasks.keys import keys_of


def test_in_a_mixture_gym_refuses_only_what_no_other_task_knows():
    key_of = keys_of(resolve_task(TaskConfig("mixture", parts=("gym:gcd", "arithmetic"))))
    sums = [(a, b) for a in range(10, 60) for b in range(10, 60)]
    training = [f"{a}+{b}=" for a, b in sums if not is_held_out(a, b)]
    assert any(map(gym.is_held_out, training))
    assert all(key_of(text) == f"arithmetic/arithmetic/{text}" for text in training)
    a, b = next(pair for pair in sums if is_held_out(*pair))
    unknown = next(text for text in map("question {}".format, range(99)) if gym.is_held_out(text))
    for refused in (f"{a}+{b}=", unknown):
        with pytest.raises(SoleraError, match="held-out"):
            key_of(refused)
