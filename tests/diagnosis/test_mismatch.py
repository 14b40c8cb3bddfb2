"""Engine error by hand, and its alarm."""

import numpy as np
import pytest

from solera.diagnosis.mismatch import Mismatch

RATIO, RESPONSE = np.array([0.5, -0.25, 3.0, -0.75]), np.array([0, 0, 1, 2])


def test_only_fresh_responses_count_and_the_alarm_sounds_once():
    """Fresh are responses 0 and 2: (½ + ¼ + ¾)/3 = ½."""
    said = list[str]()
    watch = Mismatch(0.5, said.append)
    assert watch.measure(RATIO, RESPONSE, np.array([True, False, True])) == pytest.approx({"mismatch/logp": 0.5})
    assert not said
    for _ in range(2):
        assert watch.measure(RATIO, RESPONSE, np.array([True, True, True]))["mismatch/logp"] == 1.125
    assert len(said) == 1 and "by 1.1 nats per token on average; rounding explains up to 0.5" in said[0]


def test_without_fresh_responses_nothing_is_said_and_nan_is_an_alarm():
    said = list[str]()
    assert Mismatch(0.5, said.append).measure(RATIO, RESPONSE, np.zeros(3, np.bool_)) == {}
    assert not said
    Mismatch(0.5, said.append).measure(RATIO * np.nan, RESPONSE, np.ones(3, np.bool_))
    assert len(said) == 1
