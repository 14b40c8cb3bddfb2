"""Batched decoding with a key-value cache: each different text is computed once, finished rows leave the batch, and new
ones join it between two tokens."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from solera.engines.jobs import Job, Spell, Written, stop_at
from solera.engines.sampling import sample
from solera.models.language_model import LanguageModel
from solera.records import Sampling
from solera.streams import uniforms

SHARED = 128
"""Shortest beginning, in tokens, that is computed once for all texts that begin together."""


@dataclass
class LiveRows:
    """The unfinished rows (`_B`) and the distinct texts they have so far (`_S`, slots of the cache).

    Rows with the same text share a slot: all rows of a group until their first token, and as long as they sample the
    same tokens. Each text is computed once, however many rows share it.
    """

    row_B: Tensor
    slot_B: Tensor
    step_B: Tensor
    """Tokens written for each row."""
    logits_SV: Tensor
    cache: DynamicCache
    real_SK: Tensor | None
    next_position_S: Tensor
    prefilled: int
    """Tokens that were computed for the prompts."""
    diverged: bool = False
    """Whether every row has its own text. Rows that differ once never become equal again."""

    @classmethod
    def prefill(cls, model: LanguageModel, prompts: Items[tuple[int, ...]]) -> "LiveRows":
        """Run each distinct prompt through the model. A long beginning that all of them share is computed once."""
        number = {prompt: s for s, prompt in enumerate(dict.fromkeys(prompts))}
        cache = model.new_cache()
        shared = _begin_shared(model, list(number), cache)
        longest = max(map(len, number)) - shared
        token_SK = np.zeros((len(number), longest), np.int64)
        real_SK = np.zeros((len(number), longest), bool)
        for prompt, s in number.items():
            start = shared + longest - len(prompt)  # padded on the left: all last tokens are in one column
            token_SK[s, start:] = prompt[shared:]
            real_SK[s, start:] = True
        position_SK = torch.from_numpy(shared + (real_SK.cumsum(1) - 1).clip(0)).to(model.device)
        real = None if real_SK.all() else torch.from_numpy(real_SK).to(model.device)
        mask = None if real is None else _prefill_mask(real, shared) if model.takes_any_mask else real
        if real is not None and shared:
            real = torch.nn.functional.pad(real, (shared, 0), value=True)
            mask = mask if model.takes_any_mask else real
        hidden_SKH = model.hidden(torch.from_numpy(token_SK).to(model.device), position_SK, mask, cache)
        return cls(
            row_B=torch.arange(len(prompts), device=model.device),
            slot_B=torch.tensor([number[prompt] for prompt in prompts], device=model.device),
            step_B=torch.zeros(len(prompts), dtype=torch.int64, device=model.device),
            logits_SV=model.logits(hidden_SKH[:, -1]),
            cache=cache,
            real_SK=real,
            next_position_S=position_SK[:, -1] + 1,
            prefilled=shared + int(real_SK.sum()),
        )

    @property
    def can_join(self) -> bool:
        return _is_plain(self.cache)

    def join(self, other: "LiveRows") -> None:
        """Take in other rows, whose `row_B` is numbered to go with these. Shorter texts are padded on the left; columns
        that only texts long gone needed are cut off, or a cache that is never empty would grow for ever."""
        slots, longest = len(self.logits_SV), max(self._longest, other._longest)
        self.real_SK = torch.cat([_padded_mask(rows, longest) for rows in (self, other)])
        for layer, added in zip(self.cache.layers, other.cache.layers, strict=True):
            keys, values = ((getattr(layer, kind), getattr(added, kind)) for kind in ("keys", "values"))
            layer.keys, layer.values = (torch.cat([_padded(x, longest) for x in pair]) for pair in (keys, values))
        self.row_B = torch.cat([self.row_B, other.row_B])
        self.slot_B = torch.cat([self.slot_B, other.slot_B + slots])
        self.step_B = torch.cat([self.step_B, other.step_B])
        self.logits_SV = torch.cat([self.logits_SV, other.logits_SV])
        self.next_position_S = torch.cat([self.next_position_S, other.next_position_S])
        self.diverged = self.diverged and other.diverged

    @property
    def width(self) -> int:
        return self.cache.layers[0].keys.shape[-2]

    @property
    def _longest(self) -> int:
        """Columns from the first that any row needs. Behind a shared beginning, a shorter text has a gap."""
        return self.width if self.real_SK is None else self.width - int(self.real_SK.any(0).int().argmax())

    def advance(self, model: LanguageModel, token_B: Tensor, kept_B: Tensor | None) -> None:
        """Append a token to every row. If `kept_B` is given, the other rows are removed first."""
        if kept_B is not None:
            self.row_B, self.slot_B, token_B = self.row_B[kept_B], self.slot_B[kept_B], token_B[kept_B]
            self.step_B = self.step_B[kept_B]
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
        self.step_B = self.step_B + 1

    def _take(self, parent_S: Tensor, slots: int) -> None:
        """Slots of the next token. Each continues one of the current slots."""
        if len(parent_S) == slots and torch.equal(parent_S, torch.arange(slots, device=parent_S.device)):
            return
        self.cache.batch_select_indices(parent_S)
        self.next_position_S = self.next_position_S[parent_S]
        self.real_SK = None if self.real_SK is None else self.real_SK[parent_S]


def _padded(tensor_SHKD: Tensor, width: int) -> Tensor:
    """So many columns, counted from the right."""
    return torch.nn.functional.pad(tensor_SHKD, (0, 0, width - tensor_SHKD.shape[-2], 0))


def _padded_mask(rows: LiveRows, width: int) -> Tensor:
    own = rows.width
    real_SK = rows.real_SK
    if real_SK is None:
        real_SK = torch.ones(len(rows.logits_SV), own, dtype=torch.bool, device=rows.logits_SV.device)
    return torch.nn.functional.pad(real_SK, (width - own, 0))


def _begin_shared(model: LanguageModel, prompts: list[tuple[int, ...]], cache: DynamicCache) -> int:
    """Compute the beginning that all prompts share, if it is long enough to be worth it. Returns its length.

    The turns of an agent share the description of its tools, and those of a group also their prompt.
    """
    first, last = min(prompts), max(prompts)  # all others lie between them
    most = min(map(len, prompts)) - 1
    shared = next((n for n in range(most) if first[n] != last[n]), most)
    if len(prompts) < 2 or shared < SHARED or not _is_plain(cache):
        return 0
    token_1K = torch.tensor([first[:shared]], device=model.device)
    model.hidden(token_1K, torch.arange(shared, device=model.device)[None], None, cache)
    for layer in cache.layers:
        layer.keys, layer.values = (x.expand(len(prompts), -1, -1, -1) for x in (layer.keys, layer.values))
    return shared


def _is_plain(cache: DynamicCache) -> bool:
    """Whether every layer keeps all tokens. One that keeps a window cannot be padded or shared."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _prefill_mask(real_SK: Tensor, shared: int) -> Tensor:
    """Each token sees real keys up to its own position; padding sees itself, so that its softmax is defined. All see a
    `shared` beginning. `[S, 1, K, shared + K]`"""
    places = torch.arange(real_SK.shape[1], device=real_SK.device)
    seen_KK, own_KK = places[None, :] <= places[:, None], places[None, :] == places[:, None]
    mask_SKK = (real_SK[:, None, :] & seen_KK) | own_KK
    return torch.nn.functional.pad(mask_SKK, (shared, 0), value=True)[:, None]


def room_for(model: LanguageModel, prompt: int, max_tokens: int) -> int:
    """Maximum number of tokens after a prompt of this length."""
    return max_tokens if model.max_length is None else min(max_tokens, model.max_length - prompt)


@dataclass
class Sheet:
    """What has been written for each job (`_R`) since the decoder was last idle, and the random numbers to come."""

    jobs: list[Job]
    uniform_RT: Tensor
    token_RT: Tensor
    logp_RT: Tensor
    limit_R: Tensor

    def __post_init__(self) -> None:
        self.kinds = {job.kind for job in self.jobs}
        self.stops = any(job.sampling.stop for job in self.jobs)

    @classmethod
    def blank(cls, jobs: list[Job], device: torch.device) -> "Sheet":
        limits = [job.limit for job in jobs]
        drawn = uniforms(np.array([job.seed for job in jobs], np.uint64), max(limits))
        return cls(
            jobs,
            torch.from_numpy(drawn).to(device),
            torch.zeros(drawn.shape, dtype=torch.int32, device=device),
            torch.zeros(drawn.shape, device=device),
            torch.tensor(limits, device=device),
        )

    def keeping(self, row_B: Tensor, added: "Sheet") -> "Sheet":
        """The rows that are still being written, and new ones after them."""
        width = max(self.token_RT.shape[1], added.token_RT.shape[1])

        def joined(name: str) -> Tensor:
            parts = (getattr(self, name)[row_B], getattr(added, name))
            return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])

        return Sheet(
            [self.jobs[row] for row in row_B.tolist()] + added.jobs,
            joined("uniform_RT"), joined("token_RT"), joined("logp_RT"),
            torch.cat([self.limit_R[row_B], added.limit_R]),
        )  # fmt: skip


class PlainDecoder:
    """Decodes with the Hugging Face module as it is, on any device."""

    def __init__(
        self, model: LanguageModel, end_token_ids: tuple[int, ...], max_rows: int, spell: Spell | None = None
    ) -> None:
        self.model = model
        self.max_rows = max_rows
        self.spell = spell
        self.prefilled = 0
        self.sampled = 0
        self._ends = torch.tensor(end_token_ids, device=model.device)
        self.reset()

    def reset(self) -> None:
        self._live: LiveRows | None = None
        self._sheet: Sheet | None = None

    def free(self) -> None:
        """Keys and values are not kept longer than a batch."""
        self.reset()

    @property
    def busy(self) -> bool:
        return self._live is not None

    @torch.inference_mode()
    def admit(self, jobs: list[Job]) -> int:
        if self._live is None:
            jobs = jobs[: self.max_rows]
            self._sheet = Sheet.blank(jobs, self.model.device)
            self._live = self._prefill(jobs)
            return len(jobs)
        assert self._sheet is not None
        if not self._live.can_join or len(self._live.row_B) + len(jobs) > self.max_rows:
            return 0
        added = self._prefill(jobs)
        self._sheet = self._sheet.keeping(self._live.row_B, Sheet.blank(jobs, self.model.device))
        self._live.row_B = torch.arange(len(self._live.row_B), device=self.model.device)
        added.row_B += len(self._live.row_B)
        self._live.join(added)
        return len(jobs)

    def _prefill(self, jobs: list[Job]) -> LiveRows:
        live = LiveRows.prefill(self.model, [job.token_ids for job in jobs])
        self.prefilled += live.prefilled
        return live

    @torch.inference_mode()
    def advance(self) -> list[Written]:
        live, sheet = self._live, self._sheet
        assert live is not None and sheet is not None
        token_B, logp_B = self._sample(live, sheet)
        self.sampled += len(token_B)
        sheet.token_RT[live.row_B, live.step_B] = token_B.to(torch.int32)
        sheet.logp_RT[live.row_B, live.step_B] = logp_B
        stopped_B = (token_B[:, None] == self._ends).any(dim=1) | self._stopped(live, sheet)
        ended_B = stopped_B | (live.step_B + 1 >= sheet.limit_R[live.row_B])
        some_ended = bool(ended_B.any())
        written = _collect(live, sheet, ended_B, stopped_B) if some_ended else []
        if len(written) == len(token_B):
            self.reset()
        else:
            live.advance(self.model, token_B, ~ended_B if some_ended else None)
        return written

    @torch.inference_mode()
    def drop_cancelled(self) -> None:
        """What the others write next is computed already."""
        live, sheet = self._live, self._sheet
        if live is None or sheet is None:
            return
        kept_B = torch.tensor([not sheet.jobs[row].cancelled for row in live.row_B.tolist()], device=live.row_B.device)
        if not kept_B.any():
            self.reset()
        elif not kept_B.all():
            live.row_B, live.slot_B, live.step_B = live.row_B[kept_B], live.slot_B[kept_B], live.step_B[kept_B]
            live.diverged = False  # slots without a row may be left: the next token sorts them out

    @torch.inference_mode()
    def recompute(self) -> dict[Job, int]:
        live, sheet = self._live, self._sheet
        if live is None or sheet is None:
            return {}
        steps, jobs = live.step_B.tolist(), [sheet.jobs[row] for row in live.row_B.tolist()]
        token_BT = sheet.token_RT[live.row_B].tolist()
        texts = [job.token_ids + tuple(token_BT[b][: steps[b]]) for b, job in enumerate(jobs)]
        renewed = LiveRows.prefill(self.model, texts)
        renewed.row_B, renewed.step_B = live.row_B, live.step_B
        self._live = renewed
        self.prefilled += renewed.prefilled
        return dict(zip(jobs, steps, strict=True))

    def _sample(self, live: LiveRows, sheet: Sheet) -> tuple[Tensor, Tensor]:
        logits_BV, uniform_B = live.logits_SV[live.slot_B], sheet.uniform_RT[live.row_B, live.step_B]
        if len(sheet.kinds) == 1:
            return sample(logits_BV, uniform_B, *next(iter(sheet.kinds)))
        token_B, logp_B = torch.empty_like(live.row_B), torch.empty_like(uniform_B)
        kind_B = [sheet.jobs[row].kind for row in live.row_B.tolist()]
        for kind in sheet.kinds.intersection(kind_B):
            chosen_B = torch.tensor([own == kind for own in kind_B], device=token_B.device)
            token_B[chosen_B], logp_B[chosen_B] = sample(logits_BV[chosen_B], uniform_B[chosen_B], *kind)
        return token_B, logp_B

    def _stopped(self, live: LiveRows, sheet: Sheet) -> Any:
        """Rows whose newest token completes a stop string."""
        if not sheet.stops:
            return False
        assert self.spell is not None, "stop strings need a tokenizer"
        found = []
        for row, step in zip(live.row_B.tolist(), live.step_B.tolist(), strict=True):
            stop, written = sheet.jobs[row].sampling.stop, sheet.token_RT[row, : step + 1].cpu().numpy()
            found.append(bool(stop) and stop_at(written, step, stop, self.spell) is not None)
        return torch.tensor(found, device=live.row_B.device)


def _collect(live: LiveRows, sheet: Sheet, ended_B: Tensor, stopped_B: Tensor) -> list[Written]:
    row_E, length_E = live.row_B[ended_B], (live.step_B[ended_B] + 1).tolist()
    token_ET, logp_ET = sheet.token_RT[row_E].cpu().numpy(), sheet.logp_RT[row_E].cpu().numpy()
    stopped = stopped_B[ended_B].tolist()
    return [
        Written(sheet.jobs[row], token_ET[e, : length_E[e]], logp_ET[e, : length_E[e]], stopped[e])
        for e, row in enumerate(row_E.tolist())
    ]


@dataclass(frozen=True, eq=False)
class Decoded:
    """What was written after each prompt, padded to the longest. `length_B` counts the end token."""

    token_BT: npt.NDArray[np.int32]
    logp_BT: npt.NDArray[np.float32]
    length_B: npt.NDArray[np.int64]
    finished_B: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, written: list[Written], jobs: list[Job]) -> "Decoded":
        """In the order of the jobs."""
        by_job = {id(each.job): each for each in written}
        found = [by_job[id(job)] for job in jobs]
        length_B = np.array([len(each.token_ids_T) for each in found])
        token_BT = np.zeros((len(jobs), length_B.max()), np.int32)
        logp_BT = np.zeros((len(jobs), length_B.max()), np.float32)
        for b, each in enumerate(found):
            token_BT[b, : length_B[b]], logp_BT[b, : length_B[b]] = each.token_ids_T, each.logp_T
        return cls(token_BT, logp_BT, length_B, np.array([each.stopped for each in found]))


def decode(
    model: LanguageModel,
    prompts: Items[tuple[int, ...]],
    seeds: Items[int],
    sampling: Sampling,
    end_token_ids: tuple[int, ...],
) -> Decoded:
    """Continue every prompt until an end token, `sampling.max_tokens` or the end of the model's context, all in one
    batch."""
    jobs = [
        Job(prompt, sampling, seed, room_for(model, len(prompt), sampling.max_tokens))
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    decoder = PlainDecoder(model, end_token_ids, len(jobs))
    decoder.admit(jobs)
    written = list[Written]()
    while decoder.busy:
        written += decoder.advance()
    return Decoded.of(written, jobs)
