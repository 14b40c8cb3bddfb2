"""Engine error by hand, and its alarm."""

import pytest
import torch

from solera.diagnosis.mismatch import Mismatch

RATIO, RESPONSE = torch.tensor([0.5, -0.25, 3.0, -0.75]), torch.tensor([0, 0, 1, 2])


def test_only_fresh_responses_count_and_the_alarm_sounds_once():
    """Fresh are responses 0 and 2: (½ + ¼ + ¾)/3 = ½."""
    said = list[str]()
    watch = Mismatch(0.5, said.append)
    assert watch.measure(RATIO, RESPONSE, torch.tensor([True, False, True])) == pytest.approx({"mismatch/logp": 0.5})
    assert not said
    for _ in range(2):
        assert watch.measure(RATIO, RESPONSE, torch.tensor([True, True, True]))["mismatch/logp"] == 1.125
    assert len(said) == 1 and "by 1.1 a token on average (up to 0.5 is rounding)" in said[0]


def test_without_fresh_responses_nothing_is_said_and_nan_is_an_alarm():
    said = list[str]()
    assert Mismatch(0.5, said.append).measure(RATIO, RESPONSE, torch.zeros(3, dtype=torch.bool)) == {}
    assert not said
    Mismatch(0.5, said.append).measure(RATIO * torch.nan, RESPONSE, torch.ones(3, dtype=torch.bool))
    assert len(said) == 1
