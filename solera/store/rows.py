"""Convert records to table rows and back, with a checksum over the values of every row."""

from collections import Counter
from functools import cache
from hashlib import blake2b
from math import isnan, nan
from struct import Struct
from typing import Any
from zlib import crc32

from solera.records import Reward, Rollout, Sampling, Use
from solera.store.encoding import decode, encode

ROLLOUT_COLUMNS = (
    "id", "prompt_key", "lineage", "version", "origin", "finish_reason", "temperature", "max_tokens", "top_p",
    "created", "tokens", "sequences", "text", "checksum", "admission", "rewards", "seal",
)  # fmt: skip
REWARD_COLUMNS = ("rollout_id", "part", "revision", "value", "source", "created", "position", "sequence", "checksum")
USE_COLUMNS = ("version", "rollout_id", "age", "advantage", "revision", "group_number", "checksum")
SET_ASIDE = 1 << 32
"""Added to the seal of a rollout that a resume superseded, so that the seal covers that flag too."""


def rollout_row(id_: int, rollout: Rollout, now: float, fingerprint: bytes | None = None) -> tuple[Any, ...]:
    """In the order of ROLLOUT_COLUMNS."""
    sampling = rollout.sampling
    drawn: tuple[float | None, int | None, float | None] = (None, None, None)
    if sampling is not None:
        drawn = sampling.temperature, sampling.max_tokens, sampling.top_p
    sequences = encode(rollout.sequences)
    written = id_, rollout.prompt_key, rollout.lineage, rollout.version, rollout.origin, rollout.finish_reason
    seal = seal_of(*written, *drawn, now, rollout.text, rollout.admission, fingerprint)
    return (
        *written, *drawn, now, tokens_of(rollout), sequences, rollout.text, crc32(sequences), rollout.admission,
        len(rollout.rewards), seal,
    )  # fmt: skip


def tokens_of(rollout: Rollout) -> int | None:
    """How many tokens the run's engine wrote for it, if it was written for training; `None` for probes and for text
    from elsewhere."""
    return rollout.length if rollout.admission is not None and rollout.lineage is not None else None


def reward_row(rollout_id: int, reward: Reward, now: float, late: int | None = None) -> tuple[Any, ...]:
    """In the order of REWARD_COLUMNS. `late` is the reward's number among those that arrived after their rollout."""
    values = rollout_id, reward.part, reward.revision, reward.value, reward.source, now, reward.position
    return *values, reward.sequence, checksum_of_reward(*values, late, reward.sequence)


def use_row(use: Use) -> tuple[Any, ...]:
    """In the order of USE_COLUMNS."""
    values = use.version, use.rollout_id, use.age, use.advantage, use.revision, use.group
    return *values, checksum_of_use(*values)


def fingerprint(rollout: Rollout, seen: Counter[bytes]) -> bytes:
    """A digest of text and author. If `seen` already contains the text, it is another sample, not the same one."""
    words = "\0".join((rollout.prompt_key, rollout.origin, rollout.lineage or "", rollout.finish_reason))
    content = blake2b(words.encode() + b"\0" + encode(rollout.sequences), digest_size=16)
    seen[content.digest()] += 1
    content.update(seen[content.digest()].to_bytes(4))
    return content.digest()


def rollout_of(row: Any, graded: tuple[Reward, ...]) -> Rollout:
    id_, prompt_key, lineage, origin, finish_reason, temperature, max_tokens, top_p, sequences, text, admission = row
    sampling = None if temperature is None else _sampling(temperature, max_tokens, top_p)
    return Rollout(
        prompt_key, decode(sequences), graded, lineage, origin, finish_reason, sampling, id_, text, admission
    )  # fmt: skip


_sampling = cache(Sampling)  # a run has one or two values, a batch hundreds of rollouts


_ROLLOUT, _REWARD, _USE = Struct("<qqqqddd"), Struct("<qqqqdd"), Struct("<qqqqqd")
_NONE = -(2**63)
"""Stands for an unset whole number."""


def seal_of(
    id_: int, key: str, lineage: str | None, version: int | None, origin: str, finish_reason: str,
    temperature: float | None, max_tokens: int | None, top_p: float | None, created: float, text: str | None,
    admission: int | None, fingerprint: bytes | None,
) -> int:  # fmt: skip
    """CRC-32 of all columns of a rollout except its tokens, which have their own checksum."""
    numbers = _ROLLOUT.pack(
        id_, _whole(version), _whole(max_tokens), _whole(admission), _real(temperature), _real(top_p), created
    )
    words = _words(key, lineage, origin, finish_reason, text)
    return crc32(words if fingerprint is None else words + fingerprint, crc32(numbers))


def checksum_of_reward(
    rollout_id: int, part: str, revision: int, value: float, source: str, created: float, position: int | None,
    late: int | None, sequence: int | None = None,
) -> int:  # fmt: skip
    numbers = _REWARD.pack(rollout_id, revision, _whole(position), _whole(late), _real(value), created)
    if sequence is not None:  # otherwise as in stores that have no such column
        numbers += sequence.to_bytes(8, "little")
    return crc32(_words(part, source), crc32(numbers))


def checksum_of_use(
    version: int, rollout_id: int, age: int | None, advantage: float | None, revision: int | None, group: int | None
) -> int:
    return crc32(_USE.pack(version, rollout_id, _whole(age), _whole(revision), _whole(group), _real(advantage)))


def _whole(value: int | None) -> int:
    return _NONE if value is None else value


def _real(value: float | None) -> float:
    """The number as a database returns it: SQLite has no negative zero, and stores NaN as NULL."""
    return nan if value is None or isnan(value) else value + 0.0


def _words(*words: str | None) -> bytes:
    """The texts joined; a zero character, which no text may contain, stands for an unset one."""
    return "\0".join(["\0" if word is None else word for word in words]).encode()
