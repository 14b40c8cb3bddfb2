"""Digests against whole-number arithmetic in Python, and what they must see."""

import pytest
import torch

from solera.models import digest
from solera.models.digest import describe


def digest_of(tensor: torch.Tensor) -> int:
    return describe([("x", tensor)])[0].digest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_it_is_the_formula_in_whole_numbers(dtype, monkeypatch):
    tensor = (40 * torch.randn(4, 3, generator=torch.Generator().manual_seed(0))).to(dtype)
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.element_size()]
    bits = tensor.flatten().view(kind).tolist()
    weights = [w % 2**64 for w in digest._weights(torch.device("cpu")).tolist()[:5]]
    monkeypatch.setattr(digest, "BLOCK", 5)
    total = 0
    for start in range(0, 12, 5):
        total = total * 0x5851F42D4C957F2D + sum(w * x for w, x in zip(weights, bits[start : start + 5], strict=False))
    assert digest_of(tensor) % 2**64 == total % 2**64


def test_weights_are_odd_and_all_different():
    weights = digest._weights(torch.device("cpu"))
    assert bool((weights & 1 == 1).all())
    assert len(weights.unique()) == digest.BLOCK
    assert abs(weights.double().mean().item()) < 2**63 * 4 / digest.BLOCK**0.5  # as of uniform numbers, 4 deviations


def test_every_single_bit_is_seen():
    values = torch.randn(7, generator=torch.Generator().manual_seed(1))
    clean, bits = digest_of(values), values.view(torch.int32)
    for place in range(7):
        for bit in range(32):
            bits[place] ^= 1 << bit if bit < 31 else -(2**31)
            assert digest_of(values) != clean
            bits[place] ^= 1 << bit if bit < 31 else -(2**31)
    assert digest_of(values) == clean


def test_order_sign_and_type_are_seen():
    values = torch.randn(30, 30, generator=torch.Generator().manual_seed(2))
    names = [values, values.T, values.flip(0), -values, values.roll(1, 1), values.bfloat16().float(), values.bfloat16()]
    assert len({digest_of(value) for value in names}) == len(names)
    assert digest_of(values.T.contiguous().T) == digest_of(values)


def test_blocks_do_not_change_places_unseen():
    values = torch.randn(2 * digest.BLOCK, generator=torch.Generator().manual_seed(3))
    assert digest_of(values) != digest_of(values.roll(digest.BLOCK))
