"""Cutting responses into rows and micro-batches for the model.

Responses with the same prompt share a row `[prompt, response 1, response 2, …]`: positions restart after the prompt
and no response sees another, so each is scored as if it stood alone and the prompt is computed once. Responses that are
equal word for word share their places too. A row with one response is the ordinary case. The result does not depend on
how rows are cut, packed or padded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from solera.models.attention import PackedTexts, Text, count_up, filler
from solera.models.tiling import TILE
from solera.records import Rollout, Sequence

STEP = 1024
"""Smallest difference between two sizes of padded micro-batches."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward pass. `_R` rows of `_L` places; `_T` the tokens that the policy answers for, in the batch's order.

    `behaviour_logp_T` is NaN where nobody recorded it.
    `segment_RL` numbers the response at each place (0 the prompt, −1 padding), `None` where no row holds two.
    """

    token_RL: Tensor
    position_RL: Tensor
    segment_RL: Tensor | None
    predictor_T: Tensor
    target_T: Tensor
    behaviour_logp_T: Tensor
    response_T: Tensor
    texts: PackedTexts | None = None
    """Who sees whom, where all rows lie one after the other in a single one, with padding only at its end."""

    @property
    def padded_places(self) -> int | None:
        """The number of places, if it and the number of tiles are those of a padded size."""
        places = self.token_RL.numel()
        fits = self.texts is not None and len(self.texts.query_tiles) == tiles_for(places)
        return places if fits and places == places_for(places) else None

    def mask(self) -> Tensor | None:
        """Who sees whom, `[R, 1, L, L]`: a place sees the prompt and its own response, never what comes later."""
        if self.segment_RL is None:
            return None
        segment = self.segment_RL
        own_or_prompt = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
        length = segment.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=segment.device).tril()
        return (own_or_prompt & earlier)[:, None]

    def after(self, responses: int) -> "MicroBatch":
        """The same where so many responses come before its own."""
        return replace(self, response_T=self.response_T + responses)

    def to(self, device: torch.device) -> "MicroBatch":
        if device.type == "cpu":
            return self
        moved = {name: v.to(device, non_blocking=True) for name, v in vars(self).items() if isinstance(v, Tensor)}
        return MicroBatch(**{**vars(self), **moved, "texts": self.texts and self.texts.to(device)})


@dataclass
class PackedRow:
    """Texts that share a row after a common prompt, each with the sequences (and response numbers) it stands for."""

    prefix: int
    length: int
    texts: list[list[tuple[Sequence, int]]]


Unit = list[PackedRow]
"""Rows that must stay in one forward pass, since one response spans them."""


def micro_batches(rollouts: tuple[Rollout, ...], token_budget: int, pack_tokens: int) -> list[MicroBatch]:
    """Rows sorted by length, cut so that rows times the longest stay within the budget, but one unit alone may not."""
    units = sorted(_units(rollouts, pack_tokens), key=lambda unit: max(row.length for row in unit))
    return [_lay_out(rows) for rows in _cut(units, token_budget)]


def places_for(tokens: int) -> int:
    """The padded size of a micro-batch: four sizes from one power of two to the next, so that few are recorded. It is
    never the width of a model: torch's compiler takes equal numbers for the same, and would compile again for others.

    >>> [places_for(tokens) for tokens in (1, 1088, 1089, 7233, 8257, 12_500, 16_449)]
    [1088, 1088, 2112, 8256, 10304, 14400, 20544]
    """
    steps = max(1, -(-(tokens - TILE) // STEP))
    between = max(1, 2 ** (steps.bit_length() - 1) // 4)
    return TILE + STEP * between * -(-steps // between)


def tiles_for(places: int) -> int:
    """Tiles of a padded micro-batch: enough for texts of 32 tokens, and for 250 shorter ones. It is odd, so it is never
    the width of a head."""
    return places // 32 + 257


def flat_micro_batches(rollouts: tuple[Rollout, ...], token_budget: int, padded: int = 0) -> list[MicroBatch]:
    """Rows laid end to end, in as few micro-batches as the budget allows, each of about as many tokens; a prompt is
    computed once for as many responses as fit. A text above the budget is alone in its micro-batch. One of at most
    `padded` places is padded to one of few sizes."""
    units = sorted(_units(rollouts, token_budget), key=_tokens, reverse=True)
    alone = [unit for unit in units if _tokens(unit) > token_budget]
    parts = alone + _share_out(units[len(alone) :], token_budget)
    return [_lay_out_flat(rows, padded) for rows in parts]


def _share_out(units: list[Unit], token_budget: int) -> list[list[PackedRow]]:
    """The rows of each micro-batch. Units come longest first; none is above the budget."""
    count = -(-sum(map(_tokens, units)) // token_budget)
    while True:
        parts: list[list[PackedRow]] = [[] for _ in range(count)]
        filled = [0] * count
        for unit in units:
            least = filled.index(min(filled))
            parts[least] += unit
            filled[least] += _tokens(unit)
        if max(filled, default=0) <= token_budget:
            return [rows for rows in parts if rows]
        count += 1


def longest_text(rollouts: tuple[Rollout, ...]) -> int:
    """Tokens of the longest response with its prompt. All sequences of a response are computed in one pass."""
    return max((sum(len(_read(s)) for s in rollout.sequences if s.spans) for rollout in rollouts), default=0)


def _tokens(unit: Unit) -> int:
    return sum(row.length for row in unit)


def _units(rollouts: tuple[Rollout, ...], pack_tokens: int) -> list[Unit]:
    units: list[Unit] = []
    open_rows: dict[bytes, PackedRow] = {}  # by prompt
    placed: dict[bytes, list[tuple[Sequence, int]]] = {}  # by whole text
    for response, rollout in enumerate(rollouts):
        if len(rollout.sequences) > 1:
            units.append([_row_of(sequence, response) for sequence in rollout.sequences if sequence.spans])
            continue
        (sequence,) = rollout.sequences
        token_ids_T, prefix = _read(sequence), sequence.spans[0].start
        whole = token_ids_T.tobytes()
        prompt = whole[: prefix * token_ids_T.itemsize]
        if whole in placed and placed[whole][0][0].spans[0].start == prefix:
            placed[whole].append((sequence, response))
            continue
        row = open_rows.get(prompt)
        if row is not None and row.length + len(token_ids_T) - prefix <= pack_tokens:
            row.length += len(token_ids_T) - prefix
            row.texts.append([(sequence, response)])
        else:
            row = _row_of(sequence, response)
            open_rows[prompt] = row
            units.append([row])
        placed[whole] = row.texts[-1]
    return units


def _row_of(sequence: Sequence, response: int) -> PackedRow:
    return PackedRow(sequence.spans[0].start, len(_read(sequence)), [[(sequence, response)]])


def _read(sequence: Sequence) -> npt.NDArray[np.int32]:
    """The tokens up to the last that the policy answers for: what was given after it may not fit into the model."""
    return sequence.token_ids_T[: sequence.spans[-1].stop]


def _cut(units: list[Unit], token_budget: int) -> Iterator[list[PackedRow]]:
    rows: list[PackedRow] = []
    for unit in units:
        longest = max(row.length for row in unit)  # units come shortest first
        if rows and (len(rows) + len(unit)) * longest > token_budget:
            yield rows
            rows = []
        rows = rows + unit
    if rows:
        yield rows


def _lay_out_flat(rows: list[PackedRow], padded: int) -> MicroBatch:
    """Lay the rows end to end in one row. Padding is short texts of token 0, each place at position 0."""
    texts, tokens = _texts(rows), _tokens(rows)
    places = places_for(tokens)
    if places <= padded:
        plan = PackedTexts.of([*texts, *filler(tokens, places)]).padded(tiles_for(places))
        if plan is not None:
            return _lay_out(rows, plan, places)
    return _lay_out(rows, PackedTexts.of(texts), tokens)


def _lay_out(rows: list[PackedRow], plan: PackedTexts | None = None, places: int = 0) -> MicroBatch:
    """All places at once: tables with a line for each stretch of text and each span, expanded to tokens.

    With a plan, rows lie end to end in one row of so many places, else they are padded to the longest.
    """
    lengths = [row.length for row in rows]
    flat = plan is not None
    width = places if flat else max(lengths)
    row_starts = [0, *accumulate(lengths)] if flat else range(0, len(rows) * width, width)
    stretches: list[tuple[int, int, int, int]] = []  # first place, tokens, first position, segment
    spans: list[tuple[int, int, int, int]] = []  # first place, tokens, place that predicts the first, response
    tokens, targets, logps = [], [], []
    for row_start, row in zip(row_starts, rows, strict=False):
        place = row_start + row.prefix
        stretches.append((row_start, row.prefix, 0, 0))
        tokens.append(row.texts[0][0][0].token_ids_T[: row.prefix])
        for segment, members in enumerate(row.texts, 1):
            tail = _read(members[0][0])[row.prefix :]
            stretches.append((place, len(tail), row.prefix, segment))
            tokens.append(tail)
            for sequence, response in members:
                for start, stop, _ in sequence.spans:
                    # A response's first token is predicted from the prompt's last place, others from the one before.
                    first = place + start - row.prefix
                    predictor = row_start + row.prefix - 1 if start == row.prefix else first - 1
                    spans.append((first, stop - start, predictor, response))
                    targets.append(sequence.token_ids_T[start:stop])
                known = sequence.span_logp
                logps.append(known if known is not None else np.full(sequence.length, np.nan, np.float32))
            place += len(tail)
    first, length, position, segment_of = np.array(stretches).T
    within = count_up(length)
    place_N = np.repeat(first, length) + within

    def spread(values_N: np.ndarray, empty: int) -> Tensor:
        grid = np.full(width if flat else len(rows) * width, empty, np.int64)
        grid[place_N] = values_N
        return torch.from_numpy(grid.reshape(-1, width))

    span_first, span_length, span_predictor, response_of = np.array(spans).T
    predictor_T = np.repeat(span_first, span_length) + count_up(span_length) - 1
    predictor_T[span_length.cumsum() - span_length] = span_predictor
    packed = not flat and any(len(row.texts) > 1 for row in rows)
    return MicroBatch(
        token_RL=spread(np.concatenate(tokens), 0),
        position_RL=spread(np.repeat(position, length) + within, 0),
        segment_RL=spread(np.repeat(segment_of, length), -1) if packed else None,
        predictor_T=torch.from_numpy(predictor_T),
        target_T=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        behaviour_logp_T=torch.from_numpy(np.concatenate(logps)),
        response_T=torch.from_numpy(np.repeat(response_of, span_length)),
        texts=plan,
    )


def _texts(rows: list[PackedRow]) -> list[Text]:
    """A prompt and each response that continues it; with one response they are a single text."""
    texts, start = list[Text](), 0
    for row in rows:
        if len(row.texts) == 1:
            texts.append(Text(start, row.length))
        else:
            texts.append(Text(start, row.prefix))
            place = start + row.prefix
            for members in row.texts:
                length = len(_read(members[0][0])) - row.prefix
                texts.append(Text(place, length, start, row.prefix))
                place += length
        start += row.length
    return texts
