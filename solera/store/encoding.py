"""A rollout's sequences as compact bytes: ids of every token, the rest of the policy's own tokens only."""

import struct

import numpy as np

from solera.errors import SoleraError
from solera.records import NO_VERSION, Sequence

_HEADER = struct.Struct("<BH")  # format, sequences
_SEQUENCE = struct.Struct("<IB")  # tokens, flags
_RUNS = struct.Struct("<I")  # runs of equal versions
FORMAT = 1
HAS_LOGP, HAS_VERSION = 1, 2


def encode(sequences: tuple[Sequence, ...]) -> bytes:
    """Little-endian: header; then for each sequence its length and flags, ids, mask as bits, log-probabilities and
    runs of versions of the masked-in tokens."""
    parts = [_HEADER.pack(FORMAT, len(sequences))]
    for s in sequences:
        flags = HAS_LOGP * (s.behaviour_logp_T is not None) | HAS_VERSION * (s.version_T is not None)
        parts += [
            _SEQUENCE.pack(len(s.token_ids_T), flags),
            s.token_ids_T.astype("<i4", copy=False).tobytes(),
            np.packbits(s.mask_T).tobytes(),
        ]
        if s.behaviour_logp_T is not None:
            parts.append(s.behaviour_logp_T[s.mask_T].astype("<f4", copy=False).tobytes())
        if s.version_T is not None:
            parts.append(_encode_runs(s.version_T[s.mask_T]))
    return b"".join(parts)


def decode(data: bytes) -> tuple[Sequence, ...]:
    """What `encode` was given."""
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
    length, flags = _SEQUENCE.unpack_from(data, place)
    place += _SEQUENCE.size
    token_ids_T = np.frombuffer(data, "<i4", length, place)
    place += 4 * length
    packed = np.frombuffer(data, np.uint8, (length + 7) // 8, place)
    place += len(packed)
    mask_T = np.unpackbits(packed, count=length).view(np.bool_)
    written = int(np.count_nonzero(mask_T))
    behaviour_logp_T = version_T = None
    if flags & HAS_LOGP:
        behaviour_logp_T = np.zeros(length, np.float32)
        behaviour_logp_T[mask_T] = np.frombuffer(data, "<f4", written, place)
        place += 4 * written
    if flags & HAS_VERSION:
        (runs,) = _RUNS.unpack_from(data, place)
        value_and_count = np.frombuffer(data, "<i4", 2 * runs, place + _RUNS.size)
        place += _RUNS.size + 8 * runs
        version_T = np.full(length, NO_VERSION, np.int32)
        version_T[mask_T] = np.repeat(value_and_count[0::2], value_and_count[1::2])
    return Sequence(token_ids_T, mask_T, behaviour_logp_T, version_T), place


def _encode_runs(values: np.ndarray) -> bytes:
    if not len(values):
        return _RUNS.pack(0)
    starts = np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1))
    counts = np.diff(np.append(starts, len(values)))
    return _RUNS.pack(len(starts)) + np.stack([values[starts], counts], axis=1).astype("<i4").tobytes()
