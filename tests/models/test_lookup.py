"""The embedding's gradient. Expected: sums of whole numbers by numpy, which are exact."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from solera.models.language_model import LanguageModel
from solera.models.lookup import Lookup, Ordered, put_in_order
from tests.models.architectures import make

TOKEN = torch.tensor([[3, 1, 3, 0], [3, 2, 0, 3]])
VOCABULARY, WIDTH = 5, 6


def gradient() -> torch.Tensor:
    return torch.randint(-9, 10, (*TOKEN.shape, WIDTH), generator=torch.Generator().manual_seed(0)).float()


def summed(token: torch.Tensor, grad: torch.Tensor, unused: int | None = None) -> np.ndarray:
    sums = np.zeros((VOCABULARY, grad.shape[-1]))
    np.add.at(sums, token.flatten().numpy(), grad.flatten(0, -2).double().numpy())
    if unused is not None:
        sums[unused] = 0
    return sums


@pytest.mark.parametrize("unused", [None, 3])
@pytest.mark.parametrize("wide", [False, True])
def test_each_token_gets_the_sum_of_its_places(unused, wide):
    embedding = nn.Embedding(VOCABULARY, WIDTH, unused)
    put_in_order(embedding)
    embedding.is_wide = wide
    grad = gradient()
    embedding(TOKEN).backward(grad)
    np.testing.assert_array_equal(embedding.weight.grad.numpy(), summed(TOKEN, grad, unused))


def test_a_wide_one_returns_float32_and_sums_in_it():
    """400 ones of bfloat16 added up in bfloat16 are 256."""
    embedding = nn.Embedding(2, 1).bfloat16()
    put_in_order(embedding)
    embedding.is_wide = True
    got = embedding(torch.zeros(400, dtype=torch.long))
    got.backward(torch.ones(400, 1))
    assert got.dtype == torch.float32 and embedding.weight.grad.tolist() == [[400.0], [0.0]]


def test_a_derived_class_keeps_its_own_forward():
    embedding = Gemma3TextScaledWordEmbedding(VOCABULARY, WIDTH, padding_idx=0, embed_scale=4.0)
    before = embedding(TOKEN)
    put_in_order(embedding)
    kind = type(embedding)
    put_in_order(embedding)
    assert isinstance(embedding, Gemma3TextScaledWordEmbedding) and type(embedding) is kind
    assert torch.equal(embedding(TOKEN), before)
    embedding.is_wide = True
    assert torch.equal(embedding(TOKEN), before)
    grad = gradient()
    embedding(TOKEN).backward(grad)
    np.testing.assert_array_equal(embedding.weight.grad.numpy(), 4.0 * summed(TOKEN, grad, unused=0))


def test_models_are_in_order():
    for name in ("llama", "gemma3"):
        assert isinstance(LanguageModel(make(name)).module.get_input_embeddings(), Ordered)


def test_weights_that_are_not_trained_get_no_gradient():
    weight = torch.randn(VOCABULARY, WIDTH)
    assert not Lookup.apply(TOKEN, weight, -1, torch.float32).requires_grad
