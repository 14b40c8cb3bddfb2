"""A Hugging Face causal language model, split into its body (tokens to hidden states) and its head (to logits).

The split is what lets logits be computed for a few tokens at a time. This file alone knows how such a model is called.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from solera.errors import SoleraError


class LanguageModel:
    """Weights that turn token ids into hidden states, and hidden states into logits."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self.device: torch.device = module.device
        self.body: nn.Module = module.base_model
        self.head = module.get_output_embeddings()
        text_config = module.config.get_text_config()
        self._softcap: float | None = getattr(text_config, "final_logit_softcapping", None)
        self.max_length: int | None = getattr(text_config, "max_position_embeddings", None)
        windows = set(getattr(text_config, "layer_types", None) or ()) - {"full_attention"}
        self.takes_any_mask = not windows and not getattr(text_config, "sliding_window", None)
        """Whether a mask of our own may replace the model's (not where some layers see a window only)."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once, tied ones under one name."""
        return dict(self.module.named_parameters())

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.module.config)

    def hidden(
        self, token_ids_BT: Tensor, position_BT: Tensor, mask: Tensor | None = None, cache: DynamicCache | None = None
    ) -> Tensor:
        """Hidden states `[B, T, H]`.

        `mask` is `None` (causal, nothing hidden), `[B, K]` (which keys are real) or `[B, 1, T, K]` (who sees whom).
        """
        output = self.body(
            input_ids=token_ids_BT,
            position_ids=position_BT,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return output.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in the head's own precision. `[…, H] -> […, V]`"""
        logits = self.head(hidden)
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def copy(self, dtype: torch.dtype) -> "LanguageModel":
        """The same weights in memory of their own, not trained."""
        return LanguageModel(copy.deepcopy(self.module).to(dtype).eval().requires_grad_(False))

    @torch.no_grad()
    def check(self) -> None:
        """Refuse a model whose logits are not what body and head give: it does something that we do not know."""
        token_ids_BT = torch.arange(4, device=self.device)[None]
        whole = self.module(input_ids=token_ids_BT).logits
        parts = self.logits(self.hidden(token_ids_BT, torch.arange(4, device=self.device)[None]))
        if whole.shape != parts.shape or not torch.allclose(whole, parts, rtol=1e-2, atol=1e-2):
            name = type(self.module).__name__
            raise SoleraError(f"model: {name} is not a plain body and head (logits differ when split); not supported")


def without_dropout(module: PreTrainedModel) -> PreTrainedModel:
    """Switch dropout off for good, so that a policy is one distribution and not a random one."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("attention_dropout", "attn_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return module


def end_token_ids(module: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's, and those of the model's generation config."""
    configured = module.generation_config.eos_token_id if module.generation_config else None
    several = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({i for i in (*several, tokenizer.eos_token_id) if i is not None}))
