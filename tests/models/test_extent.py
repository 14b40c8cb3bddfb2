"""How large a model's numbers are found to be, against numbers put into it by hand."""

import pytest
import torch

from solera.models.extent import fits_float16, largest
from solera.models.language_model import LanguageModel

TEXTS = [(2, 3, 4), (5, 6, 7, 8)]


@pytest.fixture
def model(tiny) -> LanguageModel:
    return tiny.copy(torch.float32)


def test_a_large_number_in_a_token_that_is_read_is_found(model):
    """Only the last text has token 8; its embedding goes on as it is into the first layer."""
    assert 1 < largest(model, TEXTS) < 1000
    with torch.no_grad():
        model.module.get_input_embeddings().weight[8, 3] = -40_000.0
        model.module.get_input_embeddings().weight[9] = 1.0
    assert largest(model, TEXTS) == pytest.approx(40_000, rel=1e-3)


def test_what_grows_between_two_products_is_found(model):
    """Gate and up of one layer a hundred times as large, down a million times smaller: only the product of the two is
    large, which leaves no part of the layer and enters the last."""
    mlp = model.body.layers[0].mlp
    gate = []
    mlp.gate_proj.register_forward_hook(lambda part, given, result: gate.append(mlp.act_fn(result)))
    mlp.up_proj.register_forward_hook(lambda part, given, result: gate.append(gate.pop() * result))
    with torch.no_grad():
        mlp.gate_proj.weight *= 100
        mlp.up_proj.weight *= 100
        mlp.down_proj.weight *= 1e-6
        found = largest(model, TEXTS)
    expected = max(float(product.abs().max()) for product in gate)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found > 100


def test_no_hook_is_left(model):
    largest(model, TEXTS)
    assert not any(part._forward_hooks for part in model.body.modules())


def test_room_is_left_to_grow():
    assert fits_float16(32_000)
    assert not fits_float16(33_000)
    assert not fits_float16(float("inf"))
    assert not fits_float16(float("nan"))
