"""Batched decoding with a key-value cache. Each distinct text is computed once, and finished rows leave the batch."""

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
    """The tokens generated after each prompt, padded to the longest. `length_B` includes the end token."""

    token_BT: npt.NDArray[np.int32]
    logp_BT: npt.NDArray[np.float32]
    length_B: npt.NDArray[np.int64]
    finished_B: npt.NDArray[np.bool_]


@dataclass
class LiveRows:
    """The unfinished rows (`_B`) and the distinct texts they have so far (`_S`, slots of the cache).

    Rows with the same text share a slot: all rows of a group until their first token, and as long as they sample the
    same tokens. Each text is computed once, however many rows share it.
    """

    row_B: Tensor
    slot_B: Tensor
    logits_SV: Tensor
    cache: DynamicCache
    real_SK: Tensor | None
    next_position_S: Tensor
    diverged: bool = False
    """Whether every row has its own text. Rows that differ once never become equal again."""

    @classmethod
    def prefill(cls, model: LanguageModel, prompts: Items[tuple[int, ...]]) -> "LiveRows":
        """Run each distinct prompt through the model."""
        number = {prompt: s for s, prompt in enumerate(dict.fromkeys(prompts))}
        longest = max(map(len, number))
        token_SK = np.zeros((len(number), longest), np.int64)
        real_SK = np.zeros((len(number), longest), bool)
        for prompt, s in number.items():
            token_SK[s, longest - len(prompt) :] = prompt  # padded on the left: all last tokens are in one column
            real_SK[s, longest - len(prompt) :] = True
        real = None if real_SK.all() else torch.from_numpy(real_SK).to(model.device)
        position_SK = torch.from_numpy((real_SK.cumsum(1) - 1).clip(0)).to(model.device)
        cache = model.new_cache()
        mask = None if real is None else _prefill_mask(real) if model.takes_any_mask else real
        hidden_SKH = model.hidden(torch.from_numpy(token_SK).to(model.device), position_SK, mask, cache)
        return cls(
            row_B=torch.arange(len(prompts), device=model.device),
            slot_B=torch.tensor([number[prompt] for prompt in prompts], device=model.device),
            logits_SV=model.logits(hidden_SKH[:, -1]),
            cache=cache,
            real_SK=real,
            next_position_S=position_SK[:, -1] + 1,
        )

    def advance(self, model: LanguageModel, token_B: Tensor, kept_B: Tensor | None) -> None:
        """Append a token to every row. If `kept_B` is given, the other rows are removed first."""
        if kept_B is not None:
            self.row_B, self.slot_B, token_B = self.row_B[kept_B], self.slot_B[kept_B], token_B[kept_B]
        slots, vocabulary = self.logits_SV.shape
        if self.diverged:
            parent_S, token_S = self.slot_B, token_B
            self.slot_B = torch.arange(len(token_B), device=token_B.device)
        else:
            pair_S, self.slot_B = torch.unique(self.slot_B * vocabulary + token_B, return_inverse=True)
            parent_S, token_S = pair_S // vocabulary, pair_S % vocabulary
            self.diverged = len(pair_S) == len(token_B)
        self._take(parent_S, slots)
        mask = self.real_SK
        if mask is not None:
            self.real_SK = torch.cat([mask, mask.new_ones(len(token_S), 1)], dim=1)
            # A ready-made mask, if the model accepts one; otherwise transformers would build it at every token.
            mask = self.real_SK[:, None, None] if model.takes_any_mask else self.real_SK
        hidden_S1H = model.hidden(token_S[:, None], self.next_position_S[:, None], mask, self.cache)
        self.logits_SV = model.logits(hidden_S1H[:, -1])
        self.next_position_S = self.next_position_S + 1

    def _take(self, parent_S: Tensor, slots: int) -> None:
        """Slots of the next token. Each continues one of the current slots."""
        if len(parent_S) == slots and torch.equal(parent_S, torch.arange(slots, device=parent_S.device)):
            return
        self.cache.batch_select_indices(parent_S)
        self.next_position_S = self.next_position_S[parent_S]
        self.real_SK = None if self.real_SK is None else self.real_SK[parent_S]


def _prefill_mask(real_SK: Tensor) -> Tensor:
    """Each token sees real keys up to its own position; padding sees itself, so that its softmax is defined. `[S, 1, K,
    K]`"""
    places = torch.arange(real_SK.shape[1], device=real_SK.device)
    seen_KK, own_KK = places[None, :] <= places[:, None], places[None, :] == places[:, None]
    return ((real_SK[:, None, :] & seen_KK) | own_KK)[:, None]


def room_for(model: LanguageModel, prompt: int, max_tokens: int) -> int:
    """Maximum number of tokens after a prompt of this length."""
    return max_tokens if model.max_length is None else min(max_tokens, model.max_length - prompt)


@torch.inference_mode()
def decode(
    model: LanguageModel,
    prompts: Items[tuple[int, ...]],
    uniform_BT: npt.NDArray[np.float32],
    sampling: Sampling,
    end_token_ids: tuple[int, ...],
) -> Decoded:
    """Continue every prompt until an end token, `sampling.max_tokens` or the end of the model's context. `uniform_BT`
    holds the random numbers."""
    assert uniform_BT.shape == (len(prompts), sampling.max_tokens)
    limits = [room_for(model, len(prompt), sampling.max_tokens) for prompt in prompts]
    limit_B = torch.tensor(limits, device=model.device)
    cut_off = min(limits) < sampling.max_tokens
    live = LiveRows.prefill(model, prompts)
    uniforms = torch.from_numpy(uniform_BT).to(model.device)
    ends = torch.tensor(end_token_ids, device=model.device)
    token_BT = torch.zeros(uniform_BT.shape, dtype=torch.int64, device=model.device)
    logp_BT = torch.zeros(uniform_BT.shape, device=model.device)
    length_B = limit_B.clone()
    finished_B = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    for step in range(sampling.max_tokens):
        uniform_B = uniforms[live.row_B, step]
        token_B, logp_B = sample(live.logits_SV[live.slot_B], uniform_B, sampling.temperature, sampling.top_p)
        token_BT[live.row_B, step] = token_B
        logp_BT[live.row_B, step] = logp_B
        ended_B = (token_B[:, None] == ends).any(dim=1)
        some_ended = bool(ended_B.any())
        if some_ended:
            length_B[live.row_B[ended_B]] = step + 1
            finished_B[live.row_B[ended_B]] = True
        if cut_off:
            ended_B = ended_B | (limit_B[live.row_B] <= step + 1)
            some_ended = bool(ended_B.any())
        if step + 1 == sampling.max_tokens or (some_ended and bool(ended_B.all())):
            break
        live.advance(model, token_B, ~ended_B if some_ended else None)
    return Decoded(
        token_BT.to(torch.int32).cpu().numpy(), logp_BT.cpu().numpy(), length_B.cpu().numpy(), finished_B.cpu().numpy()
    )
