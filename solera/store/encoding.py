"""A rollout's sequences as compact bytes.

Little-endian. The header has the format and the number of sequences. Each sequence has its number of tokens, whether it
has log-probabilities, and its number of spans; then the token ids, the spans as (start, stop, version), and the
log-probabilities of the spans. In format 2, a temperature for each span follows, or NaN if none was recorded. In format
3, these are followed by the number of segments and each segment as (author, tokens, calls, failed calls).
"""

import struct
from math import isnan
from typing import Any

import numpy as np

from solera.errors import SoleraError
from solera.records import AUTHORS, Segment, Sequence, Span

FORMAT, WITH_TEMPERATURES, WITH_SEGMENTS = 1, 2, 3
"""The second is used only if a sequence has turns of different temperatures, the third only if it has segments."""
_HEADER = struct.Struct("<BH")
_SEQUENCE = struct.Struct("<I?I")
_SPAN = struct.Struct("<iii")
_COUNT, _SEGMENT = struct.Struct("<I"), struct.Struct("<BIII")
_INT, _FLOAT, _TEMPERATURE = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<f8")


def encode(sequences: tuple[Sequence, ...]) -> bytearray:
    """Returns a bytearray, which SQLite's driver takes directly. For bytes it first looks for an adapter, which takes
    longer than writing them."""
    told = any(s.segments is not None for s in sequences)
    warm = told or any(s.temperatures is not None for s in sequences)
    kind = WITH_SEGMENTS if told else WITH_TEMPERATURES if warm else FORMAT
    parts: list[Any] = [_HEADER.pack(kind, len(sequences))]
    for s in sequences:
        parts.append(_SEQUENCE.pack(len(s.token_ids_T), s.span_logp is not None, len(s.spans)))
        parts.append(np.ascontiguousarray(s.token_ids_T, _INT))  # copied once, when all are joined
        parts += [_SPAN.pack(*span) for span in s.spans]
        if s.span_logp is not None:
            parts.append(np.ascontiguousarray(s.span_logp, _FLOAT))
        if warm:
            parts.append(np.array(s.temperatures or [np.nan] * len(s.spans), _TEMPERATURE))
        if told:
            parts.append(_COUNT.pack(len(s.segments or ())))
            parts += [_SEGMENT.pack(AUTHORS.index(author), *counts) for author, *counts in s.segments or ()]
    return bytearray().join(parts)


def decode(data: bytes | bytearray) -> tuple[Sequence, ...]:
    """The inverse of `encode`. Refuses damaged bytes."""
    try:
        kind, count = _HEADER.unpack_from(data)
        if not FORMAT <= kind <= WITH_SEGMENTS:
            raise SoleraError(f"store: sequences are in format {kind}, this version reads up to {WITH_SEGMENTS}")
        place, sequences = _HEADER.size, []
        for _ in range(count):
            sequence, place = _decode_one(data, place, kind)
            sequences.append(sequence)
    except (struct.error, ValueError) as error:
        raise SoleraError(f"store: damaged sequence data: {error}") from error
    if place != len(data):
        raise SoleraError(f"store: damaged sequence data: {len(data) - place} bytes too many")
    return tuple(sequences)


def _decode_one(data: bytes | bytearray, place: int, kind: int) -> tuple[Sequence, int]:
    length, has_logp, count = _SEQUENCE.unpack_from(data, place)
    place += _SEQUENCE.size
    token_ids_T = np.frombuffer(data, _INT, length, place)
    place += 4 * length
    spans = tuple(map(Span._make, _SPAN.iter_unpack(data[place : place + _SPAN.size * count])))
    if len(spans) != count:
        raise ValueError("the spans are cut off")
    place += _SPAN.size * count
    span_logp = None
    if has_logp:
        span_logp = np.frombuffer(data, _FLOAT, sum([stop - start for start, stop, _ in spans]), place)
        place += 4 * len(span_logp)
    if kind == FORMAT:
        return Sequence(token_ids_T, spans, span_logp), place
    temperatures = tuple(np.frombuffer(data, _TEMPERATURE, count, place).tolist())
    place += _TEMPERATURE.itemsize * count
    known = None if any(map(isnan, temperatures)) or not spans else temperatures
    if kind == WITH_TEMPERATURES:
        return Sequence(token_ids_T, spans, span_logp, known), place
    segments, place = _decode_segments(data, place)
    return Sequence(token_ids_T, spans, span_logp, known, segments or None), place


def _decode_segments(data: bytes | bytearray, place: int) -> tuple[tuple[Segment, ...], int]:
    (count,) = _COUNT.unpack_from(data, place)
    place += _COUNT.size
    stop = place + _SEGMENT.size * count
    found = [*_SEGMENT.iter_unpack(data[place:stop])]
    if len(found) != count or any(author >= len(AUTHORS) for author, *_ in found):
        raise ValueError("the segments are cut off or damaged")
    return tuple(Segment(AUTHORS[author], *counts) for author, *counts in found), stop
