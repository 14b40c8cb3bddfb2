"""A Llama-like model in few kernels: eight a layer for one token a row, four of them products, and ten for prompts.

A compiled layer of a Hugging Face model is eleven for one token a row, and about forty if it is not compiled. When few
rows are left, and for prompts of a few thousand tokens, a kernel takes as long to start as to compute. Here, for one
token a row, the rotation by position is part of attention; an addition to the residual stream is part of the norm after
it. The weights are the module's own, at their own addresses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from solera.engines.kv_cache import Decoding
from solera.models import siblings, wide
from solera.models.attention import Plan
from solera.models.language_model import LanguageModel

KNOWN = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Layers that compute `x + attention(norm(x))`, then `x + down(silu(gate(norm(x))) * up(norm(x)))`."""


Attend = Callable[[Any, Tensor, tuple[Tensor, Tensor], torch.dtype], Tensor]
"""Attention of a layer: its module, the product of queries, keys and values, cosine and sine of each position, and the
type of the result, `[S, heads, D]`."""


@dataclass(frozen=True, eq=False)
class FusedModel:
    """The body of a model that takes plans, for an engine."""

    model: LanguageModel

    @classmethod
    def of(cls, model: LanguageModel) -> "FusedModel | None":
        """None for a model whose layers have other parts."""
        layers: Any = getattr(model.body, "layers", ())
        if not layers or not all(_is_known(layer) for layer in layers):
            return None
        siblings.join(model.body)
        return cls(model)

    def hidden(self, token_S: Tensor, position_S: Tensor, plan: Decoding) -> Tensor:
        """Hidden states after the last norm, `[S, H]`, in the type of the weights."""
        return self._run(token_S, position_S, partial(_decode, plan))

    def fill(self, token_N: Tensor, position_N: Tensor, plan: Plan) -> None:
        """Compute texts, whose keys and values the plan keeps."""
        self._run(token_N, position_N, partial(_fill, plan))

    def _run(self, token_S: Tensor, position_S: Tensor, attend: Attend) -> Tensor:
        from solera.engines import kernels  # triton is there only where a GPU is

        body: Any = self.model.body
        x_SH = kernels.embed(token_S, body.embed_tokens.weight, self.between)
        cos_1SD, sin_1SD = body.rotary_emb(x_SH, position_S[None])
        added_SH = None
        for layer in body.layers:
            added_SH = self._layer(layer, x_SH, added_SH, (cos_1SD[0], sin_1SD[0]), attend)
        return self._norm(body.norm, x_SH, added_SH)

    @property
    def between(self) -> torch.dtype:
        """The type of what products return."""
        return torch.float32 if self.model.is_wide else self.model.module.dtype

    @property
    def bytes_per_token(self) -> int:
        """Memory that a pass needs per token at the end of a layer, where it is most."""
        body: Any = self.model.body
        attention, down = body.layers[0].self_attn, body.layers[0].mlp.down_proj
        hidden, inner, queries = down.out_features, down.in_features, attention.o_proj.in_features
        product = queries + attention.k_proj.out_features + attention.v_proj.out_features
        products = 4 * hidden + product + 2 * inner + 2 * attention.head_dim  # and cosine and sine
        inputs = hidden + queries + inner
        return products * self.between.itemsize + inputs * self.model.module.dtype.itemsize

    def _layer(
        self, layer: Any, x_SH: Tensor, added_SH: Tensor | None, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Add what the layer before returned to the residual stream, then return what this one adds to it."""
        from solera.engines import kernels

        attention, mlp = layer.self_attn, layer.mlp
        normed_SH = self._norm(layer.input_layernorm, x_SH, added_SH)
        bias_N = None if attention.q_proj.bias is None else attention.q_proj.bias.all_siblings
        product_SN = self._multiply(normed_SH, attention.q_proj.weight.all_siblings, bias_N)
        out_SHD = attend(attention, product_SN, rotation, normed_SH.dtype)
        attended_SH = self._multiply(out_SHD.flatten(1), attention.o_proj.weight)
        normed_SH = self._norm(layer.post_attention_layernorm, x_SH, attended_SH)
        both_SN = self._multiply(normed_SH, mlp.gate_proj.weight.all_siblings)
        return self._multiply(kernels.gate(both_SN, normed_SH.dtype), mlp.down_proj.weight)

    def _norm(self, norm: Any, x_SH: Tensor, added_SH: Tensor | None) -> Tensor:
        from solera.engines import kernels

        return kernels.add_norm(x_SH, added_SH, norm.weight, norm.variance_epsilon)

    def _multiply(self, x_SK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        if not self.model.is_wide:
            return nn.functional.linear(x_SK, weight_NK, bias_N)
        product_SN = wide.multiply(x_SK, weight_NK)
        return product_SN if bias_N is None else product_SN + bias_N


def _decode(
    plan: Decoding, attention: Any, product_SN: Tensor, rotation: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    from solera.engines import kernels

    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    query_SHD, key_SHD, value_SHD = (
        part.unflatten(1, (-1, attention.head_dim))
        for part in product_SN.split([part.out_features for part in parts], dim=1)
    )
    return kernels.decode_attention(
        query_SHD, key_SHD, value_SHD, attention.pool_key, attention.pool_value,
        plan.page_SP, plan.prompt_length_S, plan.response_length_S, plan.alive_S, attention.scaling,
        _rotation(attention, *rotation), dtype,
    )  # fmt: skip


def _fill(
    plan: Plan, attention: Any, product_NX: Tensor, rotation: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    from solera.engines import kernels

    queries, keys = (part.out_features // attention.head_dim for part in (attention.q_proj, attention.k_proj))
    parts = kernels.rotate(product_NX, queries, keys, _rotation(attention, *rotation), attention.pool_key.dtype)
    query, key, value = (part_NHD.transpose(0, 1)[None] for part_NHD in parts)
    return plan.attend(attention, query, key, value, attention.scaling)[0].to(dtype)


def _rotation(attention: Any, cos_SD: Tensor, sin_SD: Tensor) -> Any:
    from solera.engines import kernels

    query: Any = getattr(attention, "q_norm", None)
    if query is None:
        return kernels.Rotation(cos_SD, sin_SD)
    return kernels.Rotation(cos_SD, sin_SD, query.weight, attention.k_norm.weight, query.variance_epsilon)


def _is_known(layer: nn.Module) -> bool:
    """Whether a layer has the parts that are computed here, and no others."""
    if type(layer).__name__ not in KNOWN:
        return False
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
    outputs = [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        all(type(part) in siblings.JOINED for part in (*inputs, *outputs))
        and len({part.bias is None for part in inputs}) == 1
        and all(part.bias is None for part in outputs)
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    )
