"""A rollout or a reward as a line of JSON. Reading is strict: every error names the field and says what it must be.

A line holds text (`prompt`, `response`) or tokens (`sequences`). An export writes tokens.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from solera.config import perhaps
from solera.errors import SoleraError, kind_of
from solera.protocols import Codec
from solera.records import AUTHORS, NO_VERSION, Prompt, Reward, Rollout, Sampling, Segment, Sequence, Span
from solera.tasks.episodes import FAILED
from solera.tasks.jsonl import canonical, check_prompt, read_object
from solera.tasks.keys import HELD_OUT, HeldOutError, KeyOf
from solera.tasks.prompting import encode_prompt, refuse_unknown

TEXT_FIELDS = ("prompt", "response", "response_ids", "logp", "model")
SAMPLING_FIELDS = ("temperature", "max_tokens", "top_p")
TOKEN_FIELDS = ("sequences", "lineage", "sampling", "text", "prompt", "response")
"""The last two are for people; only the tokens count."""
SHARED_FIELDS = ("key", "origin", "finish_reason", "reward", "rewards", "id", "created")
REWARD_FIELDS = ("id", "value", "part", "source", "position", "sequence")
LARGEST = 2**31 - 1
ORIGIN = re.compile(r"self|human|(model|file):.+")


@dataclass(frozen=True)
class LineReader:
    """Converts a line to its rollouts: one, unless the line has several `responses`.

    `is_held_out` checks a prompt's tokens. `origin` is for lines that name none. `vocabulary` and `longest` are the
    model's.
    """

    codec: Codec
    key_of: KeyOf
    is_held_out: Callable[[tuple[int, ...]], bool]
    vocabulary: int
    longest: int | None
    origin: str
    template: str | None = None
    """The task's template, for prompts that are text. The author of the response saw the bare problem; the model sees
    the template."""

    def __call__(self, line: bytes, place: str) -> list[Rollout]:
        data = read_object(line, place)
        try:
            canonical(data)
            return [self._rollout(one) for one in (_apart(data) if "responses" in data else [data])]
        except SoleraError as error:
            raise type(error)(f"{place}: {error}") from None

    def _rollout(self, data: dict[str, Any]) -> Rollout:
        if {"id", "value"} <= data.keys():
            raise SoleraError("this line rewards a response by its id: use solera data reward")
        shape = TOKEN_FIELDS if "sequences" in data else TEXT_FIELDS
        _known(data, (*shape, *SHARED_FIELDS), "responses")
        rollout = self._tokens(data) if "sequences" in data else self._text(data)
        self._fits(rollout)
        return rollout

    def _text(self, data: dict[str, Any]) -> Rollout:
        prompt, finish = self._prompt(data), _choice(data, "finish_reason", ("stop", "length"), "stop")
        ids = self._response(data, finish == "stop")
        if not ids:
            raise SoleraError("field 'response' has no tokens")
        logp = None
        if data.get("logp") is not None:
            if "response_ids" not in data:
                raise SoleraError("field 'logp' needs 'response_ids': log-probabilities belong to tokens, not to text")
            logp = _logps(data, "logp", len(ids))
        sequence = Sequence(
            np.array([*prompt.token_ids, *ids], np.int32),
            (Span(len(prompt.token_ids), len(prompt.token_ids) + len(ids), NO_VERSION),),
            logp,
        )
        origin, written = self._origin(data), data.get("response")
        text = None if written in (None, self.codec.decode(sequence.token_ids_T[-len(ids) :])) else written
        return Rollout(prompt.key, (sequence,), _rewards(data, origin), None, origin, finish, text=text)

    def _prompt(self, data: dict[str, Any]) -> Prompt:
        if "prompt" not in data:
            raise SoleraError("field 'prompt' is missing")
        try:
            check_prompt(data["prompt"])
            ids = encode_prompt(self.codec, self.template, data["prompt"])
            if not ids:
                raise SoleraError("has no tokens")
            key = self.key_of(data["prompt"])
            return Prompt(_text(data, "key") if "key" in data else key, ids)
        except SoleraError as error:
            raise error if str(error).startswith("field") else type(error)(f"field 'prompt' {error}") from None

    def _response(self, data: dict[str, Any], ended: bool) -> tuple[int, ...]:
        if "response_ids" in data:
            return tuple(_wholes(data, "response_ids", 0, self.vocabulary - 1))
        if not isinstance(data.get("response"), str):
            raise SoleraError(_must_be(data, "response", "text"))
        ids = self.codec.response(data["response"], ended)
        try:
            refuse_unknown(self.codec, ids, data["response"])
        except SoleraError as error:
            raise SoleraError(f"field 'response' {error}") from None
        return ids

    def _origin(self, data: dict[str, Any]) -> str:
        """Who wrote it. `self` in a file means another run's learner, so the file's origin is used."""
        if "model" in data and "origin" in data:
            raise SoleraError("fields 'model' and 'origin' both name the author: keep one")
        origin = f"model:{_text(data, 'model')}" if "model" in data else data.get("origin", self.origin)
        if not isinstance(origin, str) or not ORIGIN.fullmatch(origin) or "\0" in origin:
            raise SoleraError(_must_be(data, "origin", "human, model:NAME or file:NAME"))
        return self.origin if origin == "self" else origin

    def _tokens(self, data: dict[str, Any]) -> Rollout:
        sequences = data["sequences"]
        if not isinstance(sequences, list) or not sequences or not all(isinstance(one, dict) for one in sequences):
            raise SoleraError(_must_be(data, "sequences", "a list of objects with ids, spans and logp"))
        origin = self._origin(data)
        return Rollout(
            _text(data, "key"), tuple(map(self._sequence, sequences)), _rewards(data, origin),
            None if data.get("lineage") is None else _text(data, "lineage"), origin,
            _choice(data, "finish_reason", ("stop", "length"), "stop"), _sampling(data.get("sampling")),
            id=_id(data), text=None if data.get("text") is None else _text(data, "text"),
        )  # fmt: skip

    def _sequence(self, data: dict[str, Any]) -> Sequence:
        _known(data, ("ids", "spans", "logp", "temperatures", "segments"))
        spans = data.get("spans")
        if not isinstance(spans, list) or not all(isinstance(span, list) and len(span) == 3 for span in spans):
            raise SoleraError(_must_be(data, "spans", "a list of [start, stop, version]"))
        checked = tuple(Span(*_wholes({"spans": span}, "spans", NO_VERSION, LARGEST)) for span in spans)
        ids = np.array(_wholes(data, "ids", 0, self.vocabulary - 1), np.int32)
        written = sum(span.stop - span.start for span in checked)
        logp = None if data.get("logp") is None else _logps(data, "logp", written)
        sequence = Sequence(ids, checked, logp, _temperatures(data, len(checked)), _segments(data))
        if checked and self.is_held_out(tuple(ids[: checked[0].start].tolist())):
            raise HeldOutError(f"field 'sequences': its prompt {HELD_OUT}")
        return sequence

    def _fits(self, rollout: Rollout) -> None:
        longest = max(s.spans[-1].stop if s.spans else 0 for s in rollout.sequences)
        if self.longest is not None and longest > self.longest:
            raise SoleraError(f"prompt and response have {longest} tokens; the model accepts at most {self.longest}")
        left_empty = FAILED in rollout.parts or rollout.finish_reason == "length"  # a run may store these
        if not rollout.length and not left_empty:
            raise SoleraError("field 'sequences' has no span, so no policy wrote any of it")


def read_reward(line: bytes, place: str, usual_part: Callable[[int], str]) -> tuple[int, Reward]:
    """A line of a file of rewards: the rollout's id and the reward. `usual_part(id)` gives the part if none is
    named."""
    data = read_object(line, place)
    try:
        canonical(data)
        _known(data, REWARD_FIELDS)
        id_ = _whole(data, "id", 1, LARGEST)
        return id_, _reward(data if "part" in data else {**data, "part": usual_part(id_)}, "person")
    except SoleraError as error:
        raise SoleraError(f"{place}: {error}") from None


def plain(rollout: Rollout, created: float) -> dict[str, Any]:
    """A line that `LineReader` can read back without loss."""
    sampling = rollout.sampling
    return {
        "id": rollout.id, "key": rollout.prompt_key, "origin": rollout.origin, "lineage": rollout.lineage,
        "finish_reason": rollout.finish_reason, "created": created, "text": rollout.text,
        "sampling": None if sampling is None else {name: getattr(sampling, name) for name in SAMPLING_FIELDS},
        "rewards": [vars(reward) for reward in rollout.rewards],
        "sequences": [_plain(sequence) for sequence in rollout.sequences],
    }  # fmt: skip


def spelled(rollout: Rollout, codec: Codec) -> dict[str, str]:
    """The text next to the tokens, for people: the prompt, and everything from the first generated token on."""
    starts = [s.spans[0].start if s.spans else len(s.token_ids_T) for s in rollout.sequences]
    pairs = list(zip(rollout.sequences, starts, strict=True))
    written = "\n".join(codec.decode(sequence.token_ids_T[start:]) for sequence, start in pairs)
    first, start = pairs[0]
    return {"prompt": codec.decode(first.token_ids_T[:start]), "response": rollout.text or written}


def _plain(sequence: Sequence) -> dict[str, Any]:
    logp = None if sequence.span_logp is None else [float(str(value)) for value in sequence.span_logp]  # shortest form
    line: dict[str, Any] = {
        "ids": sequence.token_ids_T.tolist(),
        "spans": [list(span) for span in sequence.spans],
        "logp": logp,
    }
    if sequence.temperatures is not None:
        line["temperatures"] = list(sequence.temperatures)
    if sequence.segments is not None:
        line["segments"] = [segment._asdict() for segment in sequence.segments]
    return line


def _apart(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a line with several responses into several lines. Each response is text or an object; `rewards` has a
    number for each."""
    responses, rewards = data["responses"], data.get("rewards")
    if not isinstance(responses, list) or not responses or not all(isinstance(one, str | dict) for one in responses):
        raise SoleraError(_must_be(data, "responses", "a list of texts or objects"))
    if rewards is not None and (not isinstance(rewards, list) or len(rewards) != len(responses)):
        raise SoleraError(f"field 'rewards' must be a list of {len(responses)} numbers, one for each of 'responses'")
    shared = {name: value for name, value in data.items() if name not in ("responses", "rewards", "id")}
    lines = [shared | ({"response": one} if isinstance(one, str) else one) for one in responses]
    return lines if rewards is None else [line | {"reward": r} for line, r in zip(lines, rewards, strict=True)]


def _rewards(data: dict[str, Any], origin: str) -> tuple[Reward, ...]:
    """One number (`reward`), or one for each part (`rewards`); none if the reward is still missing."""
    if "reward" in data and "rewards" in data:
        raise SoleraError("fields 'reward' and 'rewards' both give the reward: keep one")
    if data.get("reward") is not None:
        return (Reward(_number(data, "reward"), source=origin),)
    several = data.get("rewards", [])
    if not isinstance(several, list) or not all(isinstance(one, dict) for one in several):
        raise SoleraError(_must_be(data, "rewards", "a list of objects with value, part and source"))
    for one in several:
        _known(one, (*REWARD_FIELDS[1:], "revision"))
    latest: dict[str, Reward] = {}
    for one in several:
        part = _text(one, "part", "reward")
        if part in latest and "revision" not in one:
            raise SoleraError(f"field 'rewards' has the part {part!r} twice: add them up, or rename one")
        latest[part] = _reward(one, origin)  # in the order of revisions
    return tuple(latest.values())


def _reward(data: dict[str, Any], source: str) -> Reward:
    position = None if data.get("position") is None else _whole(data, "position", 0, LARGEST)
    sequence = None if data.get("sequence") is None else _whole(data, "sequence", 0, LARGEST)
    return Reward(
        _number(data, "value"), _text(data, "part", "reward"), _text(data, "source", source), 0, position, sequence
    )  # fmt: skip


def _sampling(data: Any) -> Sampling | None:
    if data is None:
        return None
    if not isinstance(data, dict):
        raise SoleraError(_must_be({"sampling": data}, "sampling", "an object"))
    _known(data, SAMPLING_FIELDS)
    most = _whole(data, "max_tokens", 1, LARGEST)
    return Sampling(_number(data, "temperature"), most, _number(data, "top_p"))


def _id(data: dict[str, Any]) -> int | None:
    """The id in the store that it was exported from. Other tools write their own ids."""
    id_ = data.get("id")
    return id_ if type(id_) is int and 0 < id_ <= LARGEST else None


def _known(data: dict[str, Any], fields: tuple[str, ...], *taken_apart: str) -> None:
    """Refuse unknown fields. `taken_apart` are fields of a line that its rollouts no longer have."""
    for name in data:
        if name not in fields:
            raise SoleraError(f"unknown field {name!r}{perhaps(name, (*fields, *taken_apart))}")


def _must_be(data: dict[str, Any], field: str, what: str) -> str:
    held = _shown(data[field]) if field in data else "missing"
    return f"field {field!r} is {held}, but must be {what}"


def _shown(value: Any) -> str:
    return f"{kind_of(value)} {value!r}"[:60] if isinstance(value, str | int | float) else kind_of(value)


def _text(data: dict[str, Any], field: str, default: str | None = None) -> str:
    value = data.get(field, default)
    if not isinstance(value, str) or not value or "\0" in value:
        raise SoleraError(_must_be(data, field, "text, not empty and without a zero character"))
    return value


def _choice(data: dict[str, Any], field: str, choices: tuple[Any, ...], default: Any) -> Any:
    if data.get(field, default) not in choices:
        raise SoleraError(_must_be(data, field, " or ".join(choices)))
    return data.get(field, default)


def _number(data: dict[str, Any], field: str) -> float:
    value: Any = data.get(field)
    if type(value) not in (int, float) or not -1e308 <= value <= 1e308:
        raise SoleraError(_must_be(data, field, "a finite number"))
    return float(value)


def _wholes(data: dict[str, Any], field: str, least: int, most: int) -> list[int]:
    values = data.get(field)
    if not isinstance(values, list):
        raise SoleraError(_must_be(data, field, f"a list of whole numbers from {least} to {most}"))
    bad = [not (type(v) is int and least <= v <= most) for v in values]
    _refuse(field, values, bad, f"whole numbers from {least} to {most}")
    return values


def _refuse(field: str, values: list[Any], bad: list[bool], what: str) -> None:
    if any(bad):
        place = bad.index(True)
        raise SoleraError(f"field {field!r} has {_shown(values[place])} at index {place}, but must hold {what}")


def _whole(data: dict[str, Any], field: str, least: int, most: int) -> int:
    value: Any = data.get(field)
    if type(value) is not int or not least <= value <= most:
        raise SoleraError(_must_be(data, field, f"a whole number from {least} to {most}"))
    return value


def _logps(data: dict[str, Any], field: str, count: int) -> np.ndarray:
    values = data[field]
    if not isinstance(values, list):
        raise SoleraError(_must_be(data, field, "a list of log-probabilities"))
    bad = [not (type(v) in (int, float) and -1e30 < v <= 1e-4) for v in values]
    _refuse(field, values, bad, "log-probabilities, none above 0")
    if len(values) != count:
        raise SoleraError(f"field {field!r} has {len(values)} log-probabilities for {count} tokens")
    return np.array(values, np.float32)


def _temperatures(data: dict[str, Any], count: int) -> tuple[float, ...] | None:
    values = data.get("temperatures")
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != count:
        raise SoleraError(_must_be(data, "temperatures", "a list with one temperature for each span"))
    _refuse("temperatures", values, [not (type(v) in (int, float) and 0 < v < 1e30) for v in values], "temperatures")
    return tuple(map(float, values))


def _segments(data: dict[str, Any]) -> tuple[Segment, ...] | None:
    values = data.get("segments")
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise SoleraError(_must_be(data, "segments", "a list of objects with author and tokens"))
    found = []
    for value in values:
        _known(value, Segment._fields)
        counts = [_whole({"calls": 0, "failed": 0, **value}, name, 0, LARGEST) for name in Segment._fields[1:]]
        found.append(Segment(_choice(value, "author", AUTHORS, ""), *counts))
    return tuple(found)
