"""Siblings share one product where they are compiled, and are plain linear layers everywhere else."""

import copy
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from solera.models import siblings

SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50,
}  # fmt: skip
IDS = torch.arange(14).reshape(2, 7)


def make(kind):
    torch.manual_seed(0)
    model = (
        LlamaForCausalLM(LlamaConfig(**SHAPE)) if kind == "llama" else Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def compiled(model):
    """Compile the model's layers as far as the graph. Returns how many products each graph then has: of forward
    passes, and of backward passes."""
    products, back = [], []

    def count(into, graph_module, _):
        targets = [node.target for node in graph_module.graph.nodes]
        into.append(sum(target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) for target in targets))
        return make_boxed_func(graph_module.forward)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=partial(count, products), bw_compiler=partial(count, back), decompositions=select_decomp_table()
    )
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return products, back


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_four_products_a_layer_in_place_of_seven_and_the_same_logits(kind):
    model = make(kind)
    names = dict(model.named_parameters()).keys()
    expected = logits(model)
    siblings.join(model)
    assert dict(model.named_parameters()).keys() == names
    assert torch.equal(logits(model), expected)
    products, _ = compiled(model)
    torch.testing.assert_close(logits(model), expected)
    assert products == [4]  # the layers share one graph


def test_weights_written_in_place_are_those_multiplied():
    model, other = make("llama"), make("llama")
    siblings.join(model)
    compiled(model)
    logits(model)
    with torch.no_grad():
        for own, new in zip(model.parameters(), other.parameters(), strict=True):
            own.copy_(new.mul_(1.5))
    torch.testing.assert_close(logits(model), logits(other))


def test_modules_that_share_weights_share_what_they_lie_in():
    first, other = make("llama"), make("llama")
    second = copy.deepcopy(first, {id(parameter): parameter for parameter in first.parameters()})
    for model in (first, second):
        siblings.join(model)
        compiled(model)
        logits(model)
    with torch.no_grad():
        for own, new in zip(first.parameters(), other.parameters(), strict=True):
            own.copy_(new.mul_(1.5))
    expected = logits(other)
    for model in (first, second):
        torch.testing.assert_close(logits(model), expected)


def test_a_copy_has_weights_of_its_own():
    model = make("llama")
    siblings.join(model)
    twin = copy.deepcopy(model)
    expected = logits(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    siblings.join(twin)
    compiled(twin)
    torch.testing.assert_close(logits(twin), expected)


def test_gradients_reach_every_sibling():
    model, plain = make("llama"), make("llama")
    siblings.join(model)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_twelve_products_a_layer_in_place_of_twenty_one_and_the_same_gradients(kind):
    """Of a product y = x·wᵀ, the way back needs two: one for x and one for w."""
    model, plain = make(kind).double(), make(kind).double()
    siblings.join(model)
    products, back = compiled(model)
    assert_same_gradients(model, plain)
    assert (products, back) == ([4], [8])
    assert_same_gradients(model, plain)  # added to those before
    assert (products, back) == ([4], [8])


def assert_same_gradients(model, plain):
    for each in (model, plain):
        each(input_ids=IDS, use_cache=False).logits.square().sum().backward()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)


def test_siblings_with_different_inputs_do_not_share():
    torch.manual_seed(0)

    class Crossed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(8, size) for size in (6, 4, 2))

        def forward(self, x, y):
            return self.q_proj(x), self.k_proj(y), self.v_proj(x), self.k_proj(x)

    model = Crossed()
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    expected = model(x, y)
    siblings.join(model)
    torch._dynamo.reset()
    got = torch.compile(model, backend="aot_eager")(x, y)
    for own, plain in zip(got, expected, strict=True):
        torch.testing.assert_close(own, plain)
