"""Batched decoding with a key-value cache: each different prompt is encoded once, finished rows leave the batch."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache

from solera.engines.sampling import sample
from solera.models.language_model import LanguageModel
from solera.records import Sampling


@dataclass(frozen=True, eq=False)
class Decoded:
    """What was written after each prompt, padded to the longest. `length_B` counts the end token."""

    token_BT: npt.NDArray[np.int32]
    logp_BT: npt.NDArray[np.float32]
    length_B: npt.NDArray[np.int64]
    finished_B: npt.NDArray[np.bool_]


@dataclass
class LiveRows:
    """The rows still being written: their numbers in the batch, next-token logits, cache, and which keys are real."""

    row_B: Tensor
    logits_BV: Tensor
    cache: DynamicCache
    real_BK: Tensor | None
    next_position_B: Tensor

    @classmethod
    def prefill(cls, model: LanguageModel, prompts: Items[tuple[int, ...]]) -> "LiveRows":
        """Run each different prompt through the model once, then give every row a copy of its prompt's cache."""
        number = {prompt: u for u, prompt in enumerate(dict.fromkeys(prompts))}
        longest = max(map(len, number))
        token_UK = np.zeros((len(number), longest), np.int64)
        real_UK = np.zeros((len(number), longest), bool)
        for prompt, u in number.items():
            token_UK[u, longest - len(prompt) :] = prompt  # padded on the left: every last token in one column
            real_UK[u, longest - len(prompt) :] = True
        real = None if real_UK.all() else torch.from_numpy(real_UK).to(model.device)
        position_UK = torch.from_numpy((real_UK.cumsum(1) - 1).clip(0)).to(model.device)
        cache = model.new_cache()
        hidden_UKH = model.hidden(torch.from_numpy(token_UK).to(model.device), position_UK, real, cache)
        logits_UV = model.logits(hidden_UKH[:, -1])
        prompt_B = torch.tensor([number[prompt] for prompt in prompts], device=model.device)
        cache.batch_select_indices(prompt_B)
        return cls(
            row_B=torch.arange(len(prompts), device=model.device),
            logits_BV=logits_UV[prompt_B],
            cache=cache,
            real_BK=None if real is None else real[prompt_B],
            next_position_B=position_UK[prompt_B, -1] + 1,
        )

    def keep(self, kept_B: Tensor) -> None:
        """Drop the other rows. Costs no more than the copy of the cache that the next token makes anyway."""
        index = kept_B.nonzero()[:, 0]
        self.row_B, self.next_position_B = self.row_B[index], self.next_position_B[index]
        self.real_BK = None if self.real_BK is None else self.real_BK[index]
        if len(index):
            self.cache.batch_select_indices(index)

    def advance(self, model: LanguageModel, token_B: Tensor) -> None:
        """Append one token to every row."""
        if self.real_BK is not None:
            self.real_BK = torch.cat([self.real_BK, self.real_BK.new_ones(len(token_B), 1)], dim=1)
        mask = self.real_BK
        if mask is not None and model.takes_any_mask:
            mask = mask[:, None, None]  # ready made: transformers would build this from the other form, token by token
        hidden_B1H = model.hidden(token_B[:, None], self.next_position_B[:, None], mask, self.cache)
        self.logits_BV = model.logits(hidden_B1H[:, -1])
        self.next_position_B = self.next_position_B + 1


@torch.inference_mode()
def decode(
    model: LanguageModel,
    prompts: Items[tuple[int, ...]],
    uniform_BT: npt.NDArray[np.float32],
    sampling: Sampling,
    end_token_ids: tuple[int, ...],
) -> Decoded:
    """Continue every prompt until an end token or `sampling.max_tokens`. `uniform_BT` holds the random numbers."""
    assert uniform_BT.shape == (len(prompts), sampling.max_tokens)
    live = LiveRows.prefill(model, prompts)
    uniforms = torch.from_numpy(uniform_BT).to(model.device)
    ends = torch.tensor(end_token_ids, device=model.device)
    token_BT = torch.zeros(uniform_BT.shape, dtype=torch.int64, device=model.device)
    logp_BT = torch.zeros(uniform_BT.shape, device=model.device)
    length_B = torch.full((len(prompts),), sampling.max_tokens, device=model.device)
    finished_B = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    for step in range(sampling.max_tokens):
        uniform_B = uniforms[live.row_B, step]
        token_B, logp_B = sample(live.logits_BV, uniform_B, sampling.temperature, sampling.top_p)
        token_BT[live.row_B, step] = token_B
        logp_BT[live.row_B, step] = logp_B
        ended_B = torch.isin(token_B, ends)
        if ended_B.any():
            length_B[live.row_B[ended_B]] = step + 1
            finished_B[live.row_B[ended_B]] = True
            live.keep(~ended_B)
            token_B = token_B[~ended_B]
        if not len(live.row_B) or step + 1 == sampling.max_tokens:
            break
        live.advance(model, token_B)
    return Decoded(
        token_BT.to(torch.int32).cpu().numpy(), logp_BT.cpu().numpy(), length_B.cpu().numpy(), finished_B.cpu().numpy()
    )
