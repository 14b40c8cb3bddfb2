"""Lines of JSON to rollouts: what they say, and what they may not say."""

import json
from dataclasses import replace

import numpy as np
import pytest

from solera.config import TaskConfig, resolve_task
from solera.errors import SoleraError
from solera.models.codec import TokenizerCodec
from solera.models.loading import Reader, load_reader
from solera.records import Reward, Rollout, Sampling, Segment, Sequence, Span
from solera.store.lines import LineReader, plain, read_reward, spelled
from solera.tasks.arithmetic import is_held_out
from solera.tasks.held_out import HeldOut
from solera.tasks.keys import keys_of
from tests.conftest import random_rollout


@pytest.fixture(scope="module")
def model() -> Reader:
    return load_reader("embedded")


def reader_of(task: TaskConfig, model: Reader, origin: str) -> LineReader:
    task = resolve_task(task)
    held_out = HeldOut(task, model.codec, 500, None)
    return LineReader(model.codec, keys_of(task), held_out, model.vocabulary, model.max_length, origin, task.template)


@pytest.fixture(scope="module")
def read(model):
    reader = reader_of(TaskConfig(), model, "file:answers")

    def read_one(data):
        (rollout,) = reader(data if isinstance(data, bytes) else json.dumps(data).encode(), "f.jsonl:7")
        return rollout

    return read_one


def problem(held_out: bool) -> str:
    return next(f"{a}+45=" for a in range(100) if is_held_out(a, 45) == held_out)


TRAINING, HELD_OUT = problem(False), problem(True)
LINE = {"prompt": TRAINING, "response": "82", "model": "other", "reward": 1}


def test_text_of_another_model(read, model):
    """Characters are the embedded model's tokens, and a finished response has the end token."""
    rollout = read(LINE)
    (sequence,) = rollout.sequences
    prompt = model.codec.encode(TRAINING)
    assert model.codec.decode(sequence.token_ids_T[len(prompt) :]) == "82"
    assert sequence.token_ids_T[-1] in model.codec.end_token_ids
    assert sequence.token_ids_T[: len(prompt)].tolist() == list(prompt)
    assert (sequence.spans, sequence.span_logp) == ((Span(len(prompt), len(prompt) + 3, -1),), None)
    assert (rollout.prompt_key, rollout.origin) == (f"arithmetic/{TRAINING}", "model:other")
    assert (rollout.rewards, rollout.version, rollout.lineage) == ((Reward(1.0, source="model:other"),), None, None)
    cut_off = read({**LINE, "finish_reason": "length", "reward": None}).sequences[0]
    assert cut_off.length == 2
    assert read({"prompt": TRAINING, "response": "1"}).origin == "file:answers"
    assert read({"prompt": TRAINING, "response": "1"}).rewards == ()


def test_text_is_kept_where_its_tokens_do_not_spell_it(model):
    class Lowering(TokenizerCodec):
        def response(self, text, ended):
            return super().response(text.replace("O", "0"), ended)

    codec = Lowering(model.codec.tokenizer, model.codec.end_token_ids)
    reader = reader_of(TaskConfig(), replace(model, codec=codec), "human")
    lines = [json.dumps({"prompt": TRAINING, "response": text}).encode() for text in ("8O", "80")]
    (as_written,), (as_spelled,) = (reader(line, "f.jsonl:1") for line in lines)
    assert (as_written.text, as_spelled.text) == ("8O", None)
    assert as_written.sequences[0].token_ids_T.tolist() == as_spelled.sequences[0].token_ids_T.tolist()


def test_tokens_with_log_probabilities(read):
    rollout = read({"prompt": TRAINING, "response_ids": [5, 6, 1], "logp": [-0.5, 0, -2.25], "key": "k"})
    assert rollout.sequences[0].span_logp.tolist() == [-0.5, 0.0, -2.25]
    assert rollout.prompt_key == "k"


def test_what_is_exported_is_read_back_without_loss(read):
    rng = np.random.default_rng(0)
    original = random_rollout(rng, 1, (2, 3), 0.1, origin="model:x", sampling=Sampling(0.7, 9, 1.0))
    back = read(json.dumps(plain(original, 0.0)).encode())
    for name in ("prompt_key", "lineage", "origin", "finish_reason", "sampling", "rewards", "version"):
        assert getattr(back, name) == getattr(original, name), name
    (a,), (b,) = original.sequences, back.sequences
    assert a.spans == b.spans and a.token_ids_T.tolist() == b.token_ids_T.tolist()
    assert a.span_logp.tobytes() == b.span_logp.tobytes()
    warm = Sequence(a.token_ids_T, a.spans, a.span_logp, (0.3,) * len(a.spans))
    object.__setattr__(original, "sequences", (warm,))
    assert read(json.dumps(plain(original, 0.0)).encode()).sequences[0].temperatures == warm.temperatures
    authors = (Segment("prompt", 1), Segment("policy", len(a.token_ids_T) - 2), Segment("tool", 1, 2, 1))
    object.__setattr__(original, "sequences", (Sequence(a.token_ids_T, a.spans, a.span_logp, None, authors),))
    assert read(json.dumps(plain(original, 0.0)).encode()).sequences[0].segments == authors
    without = Sequence(a.token_ids_T, a.spans, None)
    object.__setattr__(original, "sequences", (without,))
    object.__setattr__(original, "origin", "self")
    back = read(json.dumps(plain(original, 0.0)).encode())
    assert back.sequences[0].span_logp is None
    assert back.origin == "file:answers"  # another run's self is not this run's


def test_a_held_out_prompt_is_refused_as_tokens_and_under_another_key(read, model):
    said = "is one of the task's held-out problems, which are never trained on"
    with pytest.raises(SoleraError, match=f"^f.jsonl:7: field 'prompt' {said}$"):
        read({**LINE, "prompt": HELD_OUT, "key": "k"})
    for prompt, refused in ((HELD_OUT, True), (TRAINING, False)):
        ids = list(model.codec.encode(prompt))
        line = {"key": "k", "sequences": [{"ids": [*ids, 5, 1], "spans": [[len(ids), len(ids) + 2, 0]]}]}
        if refused:
            with pytest.raises(SoleraError, match=f"^f.jsonl:7: field 'sequences': its prompt {said}$"):
                read(line)
        else:
            assert read(line).prompt_key == "k"


def test_of_several_revisions_the_last_counts(read):
    rewards = [{"value": 1.0, "revision": 0}, {"value": 0.25, "revision": 1}, {"value": 2, "part": "style"}]
    rollout = read({**{k: v for k, v in LINE.items() if k != "reward"}, "rewards": rewards})
    assert rollout.reward == 2.25


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": None}, "field 'prompt' is null, but must be text or a list of chat messages"),
        ({"prompt": "what?"}, "field 'prompt' holds 'w', which the model's tokenizer does not know"),
        ({"prompt": "1+1=?"}, "field 'prompt' holds '?', which the model's tokenizer does not know"),
        ({"prompt": HELD_OUT}, "field 'prompt' is one of the task's held-out problems"),
        ({"prompt": [{"role": "user", "content": "1+1="}]}, "field 'prompt' holds chat messages, but the model has no"),
        ({"response": 82}, "field 'response' is a number 82, but must be text"),
        ({"response": "eighty"}, "field 'response' holds 'e', which the model's tokenizer does not know"),
        ({"response": "8 2\t"}, "field 'response' holds '\\t', which the model's tokenizer does not know"),
        ({"response": "", "finish_reason": "length"}, "field 'response' has no tokens"),
        ({"response": "1" * 5000}, "tokens; the model accepts at most"),
        ({"finish_reason": "done"}, "field 'finish_reason' is text 'done', but must be stop or length"),
        ({"reward": "1"}, "field 'reward' is text '1', but must be a finite number"),
        ({"reward": True}, "field 'reward' is true or false True, but must be a finite number"),
        ({"reward": 10**400}, "field 'reward' is a number"),
        ({"rewards": []}, "fields 'reward' and 'rewards' both give"),
        ({"rewrd": 1}, "unknown field 'rewrd'; did you mean reward?"),
        ({"id": 3, "value": 1}, "use solera data reward"),
        ({"origin": "human"}, "fields 'model' and 'origin' both name the author"),
        ({"model": ""}, "field 'model' is text '', but must be text, not empty"),
        ({"key": "a\0b"}, "without a zero character"),
        ({"logp": [-1.0]}, "field 'logp' needs 'response_ids'"),
        ({"response_ids": [5, 1], "logp": [-1.0]}, "field 'logp' has 1 log-probabilities for 2 tokens"),
        ({"response_ids": [5, 1], "logp": [-1.0, 3.0]}, "'logp' has a number 3.0 at index 1, but must hold log-prob"),
        ({"responses": []}, "field 'responses' is a list, but must be a list of texts or objects"),
        ({"responses": ["1"], "rewards": [1, 2]}, "field 'rewards' must be a list of 1 numbers"),
        ({"responses": ["1", {"respnse": "2"}]}, "unknown field 'respnse'; did you mean response?"),
        ({"rewards": [{"value": 1, "position": -1}], "reward": None}, "fields 'reward' and 'rewards' both"),
        ({"response_ids": [5, 10**9]}, "has a number 1000000000 at index 1, but must hold whole numbers from 0 to"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(read, change, says):
    with pytest.raises(SoleraError) as refusal:
        read({**LINE, **change})
    assert str(refusal.value).startswith("f.jsonl:7: ")
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_part_of_a_reward_stands_once_but_for_its_revisions(read):
    line = {name: value for name, value in LINE.items() if name != "reward"}
    twice = [{"value": 1, "part": "x"}, {"value": 2, "part": "x"}]
    with pytest.raises(SoleraError, match="field 'rewards' has the part 'x' twice"):
        read({**line, "rewards": twice})
    rollout = read({**line, "rewards": [{**one, "revision": number} for number, one in enumerate(twice)]})
    assert [(reward.part, reward.value) for reward in rollout.rewards] == [("x", 2.0)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"id": "a', "not JSON: Unterminated string starting at character 8"),
        (b'{"id": "\n"}', "not JSON: Invalid control character at character 9"),
        (b'{"id": 1,', "not JSON: Expecting property name enclosed in double quotes at character 10"),
        (b'{"id": 0, "value": 1}', "field 'id' is a number 0, but must be a whole number from 1"),
        (b'{"id": "2", "value": 1}', "field 'id' is text '2', but must be a whole number from 1"),
        (b'{"value": 1}', "field 'id' is missing, but must be a whole number"),
        (b'{"id": 1}', "field 'value' is missing, but must be a finite number"),
        (b'{"id": 1, "value": NaN}', "not finite"),
        (b'{"id": 1, "value": 1, "revision": 3}', "unknown field 'revision'"),
    ],
)
def test_bad_rewards(line, says):
    with pytest.raises(SoleraError, match=r"^r\.jsonl:3: ") as refusal:
        read_reward(line, "r.jsonl:3", lambda id_: "reward")
    assert says in str(refusal.value)


def damaged(rng: np.random.Generator, line: bytes) -> bytes:
    """One of: bytes overwritten, cut out, doubled; the line cut off; a value replaced by one of another kind."""
    kind, place = rng.integers(0, 5), int(rng.integers(0, len(line)))
    end = place + int(rng.integers(1, 6))
    if kind == 0:
        return line[:place] + rng.integers(0, 256, end - place, dtype=np.uint8).tobytes() + line[end:]
    if kind == 1:
        return line[:place] + line[end:]
    if kind == 2:
        return line[:end] + line[place:]
    if kind == 3:
        return line[:place]
    data = json.loads(line)
    others = [None, -1, 1e999, "x", [], {}, [[]], True, 10**30, "\ud800", [None], {"a": 1}, -(2**40)]
    name = str(rng.choice(list(data)))
    data[name] = others[rng.integers(0, len(others))]
    return json.dumps(data).encode()


def test_an_empty_response_is_exported_and_read_back_as_one(read, model):
    """What a failed episode leaves."""
    ids = np.array(model.codec.encode(TRAINING), np.int32)
    empty = Rollout(f"arithmetic/{TRAINING}", (Sequence(ids, (), np.zeros(0, np.float32)),), (Reward(0.0, "failed"),))
    assert spelled(empty, model.codec) == {"prompt": TRAINING, "response": ""}
    back = read(plain(empty, 0.0))
    assert (back.length, back.rewards) == (0, empty.rewards)
