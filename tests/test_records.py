"""A prompt and its answer, made the short way, are what the constructors make, and what is wrong is refused."""

import dataclasses

import numpy as np
import pytest

from solera.errors import SoleraError
from solera.records import Completion, Prompt, Reward, Rollout, Sampling, Sequence, Span


def completion(tokens: int, *versions: tuple[int, int], ints=np.int32, floats=np.float32, logps: int | None = None):
    logp = -np.arange(tokens if logps is None else logps, dtype=floats) / 4
    return Completion(np.arange(7, 7 + tokens, dtype=ints), logp, versions, "length", "run", Sampling(1.0, 8))


@pytest.mark.parametrize("types", [(np.int32, np.float32), (np.int64, np.float64)])
def test_a_prompt_and_its_answer_are_one_sequence(types):
    short = Sequence.turns(((4, 12, 5), completion(3, (3, 9), ints=types[0], floats=types[1])))
    logp = np.array([0, -0.25, -0.5], np.float32)
    long = Sequence(np.array([4, 12, 5, 7, 8, 9], np.int32), (Span(3, 6, 9),), logp)
    assert vars(short).keys() == vars(long).keys() == {field.name for field in dataclasses.fields(Sequence)}
    assert (short.spans, short.length, short.version) == (long.spans, long.length, long.version) == (long.spans, 3, 9)
    for name in ("token_ids_T", "span_logp", "mask_T", "version_T", "behaviour_logp_T"):
        a, b = getattr(short, name), getattr(long, name)
        assert a.dtype == b.dtype and a.tolist() == b.tolist(), name
    assert all(isinstance(span, Span) for span in short.spans)


def test_an_answer_of_two_versions_or_of_none_has_its_spans():
    two = Sequence.turns(((4, 12), completion(5, (2, 3), (3, 4))))
    assert (two.spans, two.length, two.version) == ((Span(2, 4, 3), Span(4, 7, 4)), 5, 3)
    empty = Sequence.turns(((4, 12), completion(0, (0, 3))))
    assert (empty.spans, empty.length, empty.version, empty.token_ids_T.tolist()) == ((), 0, -1, [4, 12])


@pytest.mark.parametrize(
    ("given", "written", "complaint"),
    [
        ((), completion(2, (2, 3)), "holds the first token"),
        ((4,), completion(2, (3, 3)), "beyond its 3 tokens"),
        ((4,), completion(3, (2, 3)), "3 log-probabilities for 2 tokens"),
        ((4,), completion(2, (2, 3), logps=1), "1 log-probabilities for 2 tokens"),
    ],
)
def test_an_answer_that_does_not_fit_itself_is_refused(given, written, complaint):
    with pytest.raises(SoleraError, match=complaint):
        Rollout.of(Prompt("key", given), written)


def test_a_rollout_of_an_answer_has_every_field():
    written = completion(2, (2, 3))
    short = Rollout.of(Prompt("key", (4, 5)), written, rewards=(Reward(0.5),), origin="game")
    long = Rollout("key", short.sequences, (Reward(0.5),), "run", "game", "length", Sampling(1.0, 8))
    assert vars(short) == vars(long)
    with pytest.raises(dataclasses.FrozenInstanceError):
        short.id = 3  # type: ignore[misc]
    assert dataclasses.replace(short, origin="self").sequences is short.sequences
