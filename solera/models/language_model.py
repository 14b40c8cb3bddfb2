"""A Hugging Face causal language model, split into its body (tokens to hidden states) and its head (to logits).

The split allows logits to be computed for a few tokens at a time. Only this file knows how such a model is called.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from solera.errors import SoleraError, one_line
from solera.models import attention, lookup, siblings, wide
from solera.models.adapter import MARK, Adapter
from solera.models.attention import PackedTexts, Plan, Text

T = TypeVar("T", bound=tuple[Tensor, ...])
SHORT = (torch.bfloat16, torch.float16)


class LanguageModel:
    """Weights that turn token ids into hidden states, and hidden states into logits."""

    def __init__(self, module: PreTrainedModel, adapter: Adapter | None = None) -> None:
        self.module = module
        self.adapter = adapter
        self.device: torch.device = module.device
        self.body: nn.Module = module.base_model
        self.head = module.get_output_embeddings()
        lookup.put_in_order(module.get_input_embeddings())
        named = dict(module.named_parameters())
        self._parameters = {name: p for name, p in named.items() if MARK in name} or named
        text_config = module.config.get_text_config()
        self._softcap: float | None = getattr(text_config, "final_logit_softcapping", None)
        self.max_length: int | None = getattr(text_config, "max_position_embeddings", None)
        self.plain_because = _own_attention(module.config)
        """Why texts are padded instead of packed, in words; empty if they are packed."""
        self.takes_any_mask = not self.plain_because
        """Whether our own boolean mask may replace the model's. Eager attention would add it to the scores, and
        sliding-window layers would lose their window."""
        self.can_take_plans = False
        """Whether `with_plans` would give the same logits; `check` finds out."""
        self.is_wide = False
        """Whether values between matrix products are float32 although the weights are bfloat16."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained and synced parameters, each once; tied ones have one name. With adapters, only those of the
        adapters."""
        return self._parameters

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.module.config)

    def hidden(
        self,
        token_ids_BT: Tensor,
        position_BT: Tensor,
        mask: Tensor | None = None,
        cache: DynamicCache | None = None,
        plan: Plan | None = None,
    ) -> Tensor:
        """Return hidden states `[B, T, H]`.

        `mask` is `None` (causal, nothing hidden), `[B, K]` (which keys are real) or `[B, 1, T, K]` (which token sees
        which). A model called with plans accepts no mask.
        """
        output = self.body(
            **({} if plan is None else {"plan": plan}),
            input_ids=token_ids_BT,
            position_ids=position_BT,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return output.last_hidden_state.to(self.module.dtype)

    def embed(self, token_ids_BT: Tensor) -> Tensor:
        """What the first layer of a model that takes plans is given. `[B, T, H]`"""
        embedded: Tensor = self.module.get_input_embeddings()(token_ids_BT)
        return embedded

    def hidden_of(self, embedded_BTH: Tensor, position_BT: Tensor, plan: Plan) -> Tensor:
        """`hidden` of tokens that are embedded already."""
        output = self.body(plan=plan, inputs_embeds=embedded_BTH, position_ids=position_BT, use_cache=False)
        return output.last_hidden_state.to(self.module.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits in the precision of the head, or in float32 if a GPU multiplies in lower precision. `[…, H] ->
        […, V]`

        At the size of logits, bfloat16 has steps of an eighth.
        """
        if self.multiplies_exactly(hidden):
            return wide.multiply(hidden.flatten(0, -2), self.head.weight).unflatten(0, hidden.shape[:-1])
        logits = wide.linear(hidden, self.head.weight, self.head.bias) if self.is_wide else self.head(hidden)
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def multiplies_exactly(self, hidden: Tensor) -> bool:
        """Whether logits are just a product of 16-bit matrices on a GPU, which can be summed in float32."""
        plain = isinstance(self.head, nn.Linear) and self.head.bias is None and self._softcap is None
        return plain and hidden.is_cuda and hidden.dtype == self.head.weight.dtype and hidden.dtype in SHORT

    def run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call `function(self, …)`, which may use body and head. A sharded model has its weights at hand only here."""
        return function(self, *arguments, **named)

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a parameter, or of what was computed from parameters. A sharded model gathers it."""
        return tensor

    @property
    def takes_plans(self) -> bool:
        return self.module.config.get_text_config()._attn_implementation == attention.NAME

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts: the weights of all experts of a layer are one parameter. In float16, the
        host would have to ask the GPU how many tokens each expert gets, which a CUDA graph cannot."""
        others = (part for part in self.body.modules() if not isinstance(part, nn.Conv1d))
        return any(parameter.dim() == 3 for part in others for parameter in part.parameters(recurse=False))

    @property
    def attentions(self) -> list[nn.Module]:
        """The attention module of each layer."""
        return [part for part in self.body.modules() if hasattr(part, "k_proj") and hasattr(part, "layer_idx")]

    @property
    def key_value_shapes(self) -> list[tuple[int, int]]:
        """Number of key-value heads and their size, layer by layer."""
        parts: list[Any] = list(self.attentions)
        return [(part.k_proj.out_features // part.head_dim, part.head_dim) for part in parts]

    def with_plans(self) -> "LanguageModel":
        """Call this model with plans from now on."""
        self.module.set_attn_implementation(attention.NAME)
        return self

    def widened(self) -> "LanguageModel":
        """Compute this model of bfloat16 weights in float32 between its matrix products from now on."""
        wide.widen(self.body, self.module.get_input_embeddings(), self.attentions)
        self.is_wide = True
        return self

    def in_bfloat16(self) -> "LanguageModel":
        """Keep the weights in bfloat16 only, from now on: what is trained is what is computed with, with plans on a GPU
        if it can take them. Buffers keep their type (see `copy`). Refuses a model that cannot be computed so."""
        for parameter in self.module.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        if self.device.type == "cuda" and self.can_take_plans:
            self.with_plans()
        self.widened()
        ids, at = (torch.arange(start, start + 6, device=self.device)[None] for start in (2, 0))
        plan = PackedTexts.of([Text(0, 6)]).to(self.device) if self.takes_plans else None
        try:
            with torch.no_grad():
                self.logits(self.hidden(ids % self.head.weight.shape[0], at, plan=plan))
        except (RuntimeError, TypeError) as error:
            raise SoleraError(
                f"learn.memory is lean, but {type(self.module).__name__} cannot be computed with bfloat16 weights "
                f"({one_line(error)}): use full"
            ) from error
        return self

    @property
    def key_value_dtype(self) -> torch.dtype:
        """The type in which keys and values are cached."""
        return wide.ATTENDS_IN if self.is_wide else self.module.dtype

    def compile_layers(self) -> None:
        """Compile every layer, which fuses its small operations and products of the same input. All layers share the
        compiled code. From then on weights must be written in place."""
        from solera.models import compiling

        siblings.join(self.body)
        layers: Any = self.body.layers
        for layer in layers:
            layer.compile(dynamic=True, backend=compiling.fuse)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Run uncompiled: for prompts, which spend their time in matrix products and have many shapes. torch's own
        switch would also affect other models in other threads."""
        layers: Any = self.body.layers
        compiled = [layer._compiled_call_impl for layer in layers]
        try:
            for layer in layers:
                layer._compiled_call_impl = None
            yield
        finally:
            for layer, call in zip(layers, compiled, strict=True):
                layer._compiled_call_impl = call

    def copy(self, dtype: torch.dtype) -> "LanguageModel":
        """Return a copy of the weights that is not trained. Buffers keep their type: rotary frequencies rounded to
        bfloat16 would differ from the learner's more with every position."""
        module = copy.deepcopy(self.module).eval().requires_grad_(False)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
        return self._called_alike(module)

    def sharing(self) -> "LanguageModel":
        """Return another model that shares these parameters: a change to one changes the other."""
        same = {id(parameter): parameter for parameter in self.module.parameters()}
        return self._called_alike(copy.deepcopy(self.module, same).eval())

    def _called_alike(self, module: PreTrainedModel) -> "LanguageModel":
        other = LanguageModel(module)
        other.takes_any_mask, other.can_take_plans = self.takes_any_mask, self.can_take_plans
        other.is_wide = self.is_wide
        return other

    def for_compute(self, dtype: torch.dtype, copied: bool = False) -> "LanguageModel":
        """Return the model to call in this precision: itself, or on a GPU a copy that uses plans if it can. A model
        with only bfloat16 weights (`in_bfloat16`) is called as it is."""
        planned = self.device.type == "cuda" and self.can_take_plans and dtype in SHORT and not self.is_wide
        if planned:
            model = self.copy(dtype).with_plans()
            return model.widened() if dtype == torch.bfloat16 else model
        return self.copy(dtype) if copied else self

    @torch.no_grad()
    def check(self) -> None:
        """Refuse a model whose logits depend on how it is called: as body and head, or padded with a cache. Also find
        out whether our mask and packing give the same logits; if not, packing is not used."""
        name = type(self.module).__name__
        ids = torch.arange(2, 8, device=self.device)[None] % self.head.weight.shape[0]
        at = torch.arange(6, device=self.device)[None]
        try:
            whole = self.module(input_ids=ids).logits
            if not _close(self.logits(self.hidden(ids, at)), whole):
                raise SoleraError(
                    f"model: {name} is not a plain body and head (logits differ when split); not supported"
                )
            real = torch.tensor([[False, True, True, True]], device=self.device)
            cache = self.new_cache()
            self.hidden(
                torch.cat([ids[:, :1], ids[:, :3]], 1), torch.tensor([[0, 0, 1, 2]], device=self.device), real, cache
            )
            real = torch.cat([real, real[:, 1:2]], 1)
            if not _close(self.logits(self.hidden(ids[:, 3:4], at[:, 3:4], real, cache)), whole[:, 3:4]):
                raise SoleraError(f"model: {name} gives other logits when padded on the left; not supported")
            if self.takes_any_mask:
                self._try_packing(ids, whole)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise SoleraError(
                f"model: {name} cannot be run with a cache and a padded prompt: {one_line(error)}"
            ) from error

    def _try_packing(self, ids: Tensor, whole: Tensor) -> None:
        self.takes_any_mask = self._packs(ids, whole)
        self.can_take_plans = self.takes_any_mask and self._plans(ids, whole)
        if not self.takes_any_mask:
            self.plain_because = "its logits change if texts are packed"
        elif self.device.type == "cuda" and not self.can_take_plans:
            own = "its positions depend on the longest text" if self._rotates_by_length else ""
            self.plain_because = own or "its attention cannot be replaced by ours"

    def _packs(self, ids: Tensor, whole: Tensor) -> bool:
        """Whether a text keeps its logits when packed after two of its tokens with another text in between."""
        packed = torch.cat([ids[:, :2], ids[:, 3:5], ids[:, 2:]], 1)
        at = torch.tensor([[0, 1, 2, 3, 2, 3, 4, 5]], device=self.device)
        segment = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2], device=self.device)
        sees = (segment[:, None] == segment) | (segment == 0)
        mask = (sees & torch.ones(8, 8, dtype=torch.bool, device=self.device).tril())[None, None]
        return _close(self.logits(self.hidden(packed, at, mask))[:, 4:], whole[:, 2:])

    @property
    def _rotates_by_length(self) -> bool:
        """Whether rotary frequencies depend on the longest position of a pass. The host then waits for the GPU to tell
        it, which a CUDA graph cannot, and a text would depend on those that are packed with it."""
        return getattr(getattr(self.body, "rotary_emb", None), "rope_type", "") in ("dynamic", "longrope")

    def _plans(self, ids: Tensor, whole: Tensor) -> bool:
        """Whether a text keeps its logits when it continues a stretch of the row that another text continues too."""
        layers = getattr(self.body, "layers", ())
        if len(self.attentions) != len(layers) or not layers or self._rotates_by_length:
            return False
        packed = torch.cat([ids[:, :2], ids[:, 3:5], ids[:, 2:]], 1)
        at = torch.tensor([[0, 1, 2, 3, 2, 3, 4, 5]], device=self.device)
        texts = PackedTexts.of([Text(0, 2), Text(2, 2, 0, 2), Text(4, 4, 0, 2)]).to(self.device)
        usual = self.module.config._attn_implementation
        self.module.set_attn_implementation(attention.NAME)
        try:
            return _close(self.logits(self.hidden(packed, at, plan=texts))[:, 4:], whole[:, 2:])
        except TypeError:  # a model that does not pass on the arguments of its attention
            return False
        finally:
            self.module.set_attn_implementation(usual)


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-2, atol=1e-2)


def _own_attention(config: Any) -> str:
    """Why no other attention may replace the model's, in words; empty if one may."""
    text = config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None):
        return "it caps its attention scores"
    if getattr(text, "sliding_window", None) or set(getattr(text, "layer_types", None) or ()) - {"full_attention"}:
        return "some of its layers see only a window"
    return "" if config._attn_implementation == "sdpa" else f"its attention is {config._attn_implementation}"


def with_capped_scores(module: PreTrainedModel) -> PreTrainedModel:
    """Use the attention that caps its scores if the model's config asks for it (Gemma 2). torch's would not."""
    if getattr(module.config.get_text_config(), "attn_logit_softcapping", None):
        module.set_attn_implementation("eager")
    return module


def without_dropout(module: PreTrainedModel) -> PreTrainedModel:
    """Disable dropout for good, so that the policy is one fixed distribution."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("attention_dropout", "attn_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return module


def end_token_ids(generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """All tokens that end a response: the tokenizer's, and those of the model's generation config."""
    configured = generation_config.eos_token_id if generation_config else None
    several = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({i for i in (*several, tokenizer.eos_token_id) if i is not None}))
