"""A rollout's sequences as compact bytes.

Little-endian. A header with format and number of sequences; for each sequence its number of tokens, whether it has
log-probabilities, and its number of spans; then the token ids, the spans as (start, stop, version), and the spans'
log-probabilities.
"""

import struct
from itertools import chain

import numpy as np

from solera.errors import SoleraError
from solera.records import Sequence, Span

FORMAT = 1
_HEADER = struct.Struct("<BH")
_SEQUENCE = struct.Struct("<I?I")


def encode(sequences: tuple[Sequence, ...]) -> bytes:
    parts = [_HEADER.pack(FORMAT, len(sequences))]
    for s in sequences:
        parts.append(_SEQUENCE.pack(len(s.token_ids_T), s.span_logp is not None, len(s.spans)))
        parts.append(s.token_ids_T.astype("<i4", copy=False).tobytes())
        parts.append(struct.pack(f"<{3 * len(s.spans)}i", *chain.from_iterable(s.spans)))
        if s.span_logp is not None:
            parts.append(s.span_logp.astype("<f4", copy=False).tobytes())
    return b"".join(parts)


def decode(data: bytes) -> tuple[Sequence, ...]:
    """What `encode` was given; damaged bytes are refused."""
    try:
        kind, count = _HEADER.unpack_from(data)
        if kind != FORMAT:
            raise SoleraError(f"store: sequences are in format {kind}, this version reads {FORMAT}")
        place, sequences = _HEADER.size, []
        for _ in range(count):
            sequence, place = _decode_one(data, place)
            sequences.append(sequence)
    except (struct.error, ValueError) as error:
        raise SoleraError(f"store: damaged sequence data: {error}") from error
    if place != len(data):
        raise SoleraError(f"store: damaged sequence data: {len(data) - place} bytes too many")
    return tuple(sequences)


def _decode_one(data: bytes, place: int) -> tuple[Sequence, int]:
    length, has_logp, count = _SEQUENCE.unpack_from(data, place)
    place += _SEQUENCE.size
    token_ids_T = np.frombuffer(data, "<i4", length, place)
    place += 4 * length
    numbers = struct.unpack_from(f"<{3 * count}i", data, place)
    place += 12 * count
    spans = tuple(Span(*numbers[i : i + 3]) for i in range(0, 3 * count, 3))
    written = sum(stop - start for start, stop, _ in spans) if has_logp else 0
    logp = np.frombuffer(data, "<f4", written, place) if has_logp else None
    return Sequence(token_ids_T, spans, logp), place + 4 * written
