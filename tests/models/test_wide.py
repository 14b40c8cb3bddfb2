"""Weights in bfloat16, float32 wherever nothing is multiplied: closer than plain bfloat16, with its own gradients."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PhimoeConfig, PhimoeForCausalLM

from solera.models import siblings
from solera.models.attention import PackedTexts, Text
from solera.models.language_model import LanguageModel
from solera.models.wide import Wide, linear
from tests.models import architectures
from tests.models.test_siblings import IDS, compiled, make

PLAN = PackedTexts.of([Text(0, 7), Text(7, 7)])
AT = torch.arange(14)[None] % 7


def rounded(kind="llama"):
    """A model whose weights bfloat16 can hold, larger than those of a fresh one, so that roundings show."""
    of_llama = kind in ("llama", "qwen2")
    model = make(kind) if of_llama else architectures.make(kind).float()  # whose weights are larger already
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if of_llama else 1).copy_(parameter.bfloat16())
    return LanguageModel(model)


def widened(model):
    return model.copy(torch.bfloat16).with_plans().widened()


def logp(model, plan=None, scale=1.0):
    """Log-probabilities of both texts, whose logits are not rounded, and their gradient, computed from a scaled one."""
    model.module.requires_grad_(True).zero_grad()
    if plan is None:
        hidden = model.hidden(IDS, AT[:, :7].expand(2, -1))
    else:
        hidden = model.hidden(IDS.reshape(1, -1), AT, plan=plan).unflatten(1, (2, 7))[0]
    logits = hidden.double() @ model.head.weight.double().T
    logits = logits if model.head.bias is None else logits + model.head.bias.double()
    logp = torch.log_softmax(logits, -1)[:, :-1].gather(2, IDS[:, 1:, None])[..., 0]
    (logp.sum() * scale).backward()
    gradient = torch.cat([parameter.grad.double().flatten() for parameter in model.module.parameters()]) / scale
    return logp.detach(), gradient


def test_only_what_enters_a_product_is_rounded():
    """Expected: the product of the rounded numbers in float64. Plain bfloat16 would be off by up to 2⁻⁹ of a result."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((2, 5, 40), (30, 40), (30,)))
    weight, bias = weight.bfloat16(), bias.bfloat16()
    got = linear(x, weight, bias)
    expected = x.bfloat16().double().numpy() @ weight.double().numpy().T + bias.double().numpy()
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_the_gradient_is_that_of_the_rounded_product():
    generator = torch.Generator().manual_seed(1)
    x, weight, above = (torch.randn(*shape, generator=generator) for shape in ((6, 40), (30, 40), (6, 30)))
    x, weight = x.requires_grad_(True), weight.bfloat16().requires_grad_(True)
    linear(x, weight).backward(above)
    short_x, short_above = x.detach().bfloat16().double().numpy(), above.bfloat16().double().numpy()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.float32, torch.bfloat16)
    np.testing.assert_allclose(x.grad.numpy(), short_above @ weight.detach().double().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(weight.grad.double().numpy(), short_above.T @ short_x, rtol=2**-8, atol=1e-3)


def test_frozen_weights_get_no_gradient():
    layer = nn.Linear(4, 3).bfloat16().requires_grad_(False)
    layer.__class__ = Wide
    x = torch.randn(2, 4, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and layer.weight.grad is None


@pytest.mark.parametrize(
    ("kind", "share", "share_of_slope"),
    [("llama", 0.7, 0.6), ("qwen2", 0.7, 0.6), ("phi", 0.75, 0.75), ("qwen3_moe", 1.0, 1.0)],
)
def test_a_widened_model_errs_less_than_a_plain_one(kind, share, share_of_slope):
    """Both against float64, which transformers' experts cannot compute, log-probabilities and gradients. What experts
    return is rounded to bfloat16."""
    model = rounded(kind)
    exact, slope = logp(model.copy(torch.float32 if kind == "qwen3_moe" else torch.float64))
    plain, plain_slope = logp(model.copy(torch.bfloat16))
    # Some gradients of the larger weights do not fit into float16, in which attention computes.
    wide, wide_slope = logp(widened(model), PLAN, scale=1.0 if kind in ("llama", "qwen2") else 2.0**-10)
    assert (wide - exact).abs().mean() < share * (plain - exact).abs().mean()
    assert (wide_slope - slope).norm() < share_of_slope * (plain_slope - slope).norm()


def test_hidden_states_come_in_the_heads_type_and_keys_in_float16():
    model = widened(rounded())
    assert model.hidden(IDS.reshape(1, -1), AT, plan=PLAN).dtype == torch.bfloat16
    assert model.key_value_dtype == torch.float16
    assert rounded().copy(torch.bfloat16).key_value_dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "phi", "qwen3_moe"])
def test_copies_and_models_of_the_same_weights_are_wide_too(kind):
    model = widened(rounded(kind))
    for other in (model.copy(torch.bfloat16), model.sharing()):
        assert other.is_wide and other.key_value_dtype == torch.float16
        assert torch.equal(logp(other, PLAN)[0], logp(model, PLAN)[0])


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_siblings_share_one_product_and_give_the_same(kind):
    model = rounded(kind).copy(torch.bfloat16).widened()
    with torch.no_grad():
        expected = model.hidden(IDS, AT[:, :7].expand(2, -1))
        siblings.join(model.body)
        products, _ = compiled(model.module)
        torch.testing.assert_close(model.hidden(IDS, AT[:, :7].expand(2, -1)), expected)
    assert products == [4]


def test_gradients_go_through_what_is_compiled():
    model, twin = (rounded().copy(torch.bfloat16).widened() for _ in range(2))
    expected = logp(twin)
    siblings.join(model.body)
    compiled(model.module)
    torch.testing.assert_close(logp(model), expected, rtol=1e-3, atol=1e-4)


def test_a_router_that_is_a_linear_layer_computes_in_float32():
    """Phimoe's calls the layer's own method. Its router and copies of it give what float32 gives, without rounding."""
    torch.manual_seed(0)
    sizes = architectures.SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    exact = PhimoeForCausalLM(PhimoeConfig(**sizes)).eval()
    for parameter in exact.parameters():
        parameter.data = parameter.data.bfloat16().float()
    wide = widened(LanguageModel(exact))
    x = torch.randn(5, 32)
    (router,) = (part for name, part in exact.named_modules() if name.endswith("layers.0.mlp.router"))
    for module in (wide.module, wide.copy(torch.bfloat16).module, pickle.loads(pickle.dumps(wide.module))):
        (other,) = (part for name, part in module.named_modules() if name.endswith("layers.0.mlp.router"))
        assert other.weight.dtype == torch.bfloat16
        for got, expected in zip(other(x), router(x), strict=True):
            assert torch.equal(got, expected)
