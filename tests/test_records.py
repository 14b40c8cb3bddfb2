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


def test_a_sequence_begins_with_something_given():
    with pytest.raises(SoleraError, match="holds the first token"):
        Rollout.of(Prompt("key", ()), completion(2, (2, 3)))


@pytest.mark.parametrize(
    ("tokens", "logps", "versions"),
    [
        (4, 3, ((1, 3), (2, 4))),  # followed by another turn, this used to shift that turn's span by one
        (4, 4, ((1, 3), (2, 4))),
        (4, 4, ((1, 3), (5, 4))),
        (4, 3, ((4, 3),)),
        (3, 4, ((3, 3),)),
        (4, 4, ()),
        (0, 0, ((1, 3),)),
        (2, 2, ((3, 3), (-1, 4))),
        (2, 2, (2, 3)),
        (2, 2, ((2.0, 3),)),
        (2, 2, ((2, None),)),
        (2, 2, None),
    ],
)
def test_a_completion_that_does_not_fit_itself_is_refused_when_it_is_made(tokens, logps, versions):
    with pytest.raises(SoleraError, match=r"^completion: .*(every token has one of each|pairs of \(tokens, version\))"):
        Completion(np.arange(7, 7 + tokens, dtype=np.int32), -np.ones(logps, np.float32), versions, "stop")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"behaviour_logp_T": np.array([-0.5, np.nan], np.float32)}, "not a finite number"),
        ({"behaviour_logp_T": np.array([-0.5, -np.inf])}, "not a finite number"),
        ({"behaviour_logp_T": -0.5}, "behaviour_logp_T must be a list of numbers, not a float"),
        ({"behaviour_logp_T": None}, "behaviour_logp_T must be a list of numbers"),
        ({"token_ids_T": "ab"}, "token_ids_T is text"),
        ({"token_ids_T": [1.5, 2.5]}, "must be token ids"),
        ({"token_ids_T": np.zeros((2, 2), np.int32)}, "every token has one of each"),
        ({"finish_reason": "eos"}, "finish_reason is 'eos'; it must be stop or length"),
        ({"versions": ((1, 3),)}, "2 tokens, 2 log-probabilities, and versions for 1 tokens"),
    ],
)
def test_what_a_completion_cannot_hold_is_named(fields, complaint):
    with pytest.raises(SoleraError, match=complaint):
        dataclasses.replace(completion(2, (2, 3)), **fields)


def test_a_completion_of_lists_is_one_of_arrays():
    made = Completion([7, 8], [-0.5, -0.25], ((2, 3),), "stop")
    assert (made.token_ids_T.dtype, made.behaviour_logp_T.dtype) == (np.int32, np.float32)
    sequence = Rollout.of(Prompt("key", [4, 5]), made, [6], made).sequences[0]
    assert sequence.token_ids_T.tolist() == [4, 5, 7, 8, 6, 7, 8]
    assert sequence.spans == (Span(2, 4, 3), Span(5, 7, 3))


@pytest.mark.parametrize("token_ids", [[4, 5], np.array([4, 5]), (np.int64(4), np.int32(5)), range(4, 6)])
def test_a_prompt_takes_any_run_of_whole_numbers(token_ids):
    prompt = Prompt("key", token_ids)
    assert prompt.token_ids == (4, 5)
    assert {type(token_id) for token_id in prompt.token_ids} == {int}


@pytest.mark.parametrize("token_ids", ["12+34=", (1.0, 2.0), [[1, 2], [3]], [True, False], None, 7, ("1", "2")])
def test_a_prompt_of_anything_else_is_refused(token_ids):
    with pytest.raises(SoleraError, match=r"^prompt 'key': token_ids (is text|must be token ids)"):
        Prompt("key", token_ids)


def test_a_prompt_without_a_name_or_with_odd_data_is_refused():
    with pytest.raises(SoleraError, match="key must be text, not a int"):
        Prompt(3, (4,))
    with pytest.raises(SoleraError, match="data must be a dictionary, not text"):
        Prompt("key", (4,), "5")


@pytest.mark.parametrize(
    ("rewards", "complaint"),
    [
        ((1.0,), r"rewards contains 1.0; each must be a solera.Reward, such as Reward\(1.0\)"),
        ([Reward(1.0), 0.5], "rewards contains 0.5"),
        (1.0, r"rewards must be a tuple, such as \(Reward\(1.0\),\), not a float"),
        (Reward(1.0), "rewards must be a tuple"),
        (None, "rewards must be a tuple"),
    ],
)
def test_rewards_that_are_none_are_refused(rewards, complaint):
    with pytest.raises(SoleraError, match=f"rollout of 'key': {complaint}"):
        Rollout.of(Prompt("key", (4,)), completion(2, (2, 3)), rewards=rewards)
    with pytest.raises(SoleraError, match=f"rollout of 'key': {complaint}"):
        Rollout("key", (), rewards)


def test_turns_of_anything_but_tokens_and_completions_are_refused():
    prompt, written = Prompt("key", (4,)), completion(2, (2, 3))

    async def generate():
        return written

    for turn, complaint in [("no", "turn 2 is text"), (None, "turn 2 must be"), (generate(), "turn 2 is a coroutine")]:
        with pytest.raises(SoleraError, match=f"rollout of 'key': sequence: {complaint}"):
            Rollout.of(prompt, written, turn, written)
    with pytest.raises(SoleraError, match=r"must be a solera.Prompt, not a tuple"):
        Rollout.of((4,), written)


def test_a_rollout_of_an_answer_has_every_field():
    written = completion(2, (2, 3))
    short = Rollout.of(Prompt("key", (4, 5)), written, rewards=(Reward(0.5),), origin="game")
    long = Rollout("key", short.sequences, (Reward(0.5),), "run", "game", "length", Sampling(1.0, 8))
    assert vars(short) == vars(long)
    with pytest.raises(dataclasses.FrozenInstanceError):
        short.id = 3  # type: ignore[misc]
    assert dataclasses.replace(short, origin="self").sequences is short.sequences
