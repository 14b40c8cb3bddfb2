"""What a task may ask of one turn, against a plain loop over the model without a cache."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from solera.engines.in_process import InProcessEngine
from solera.errors import SoleraError
from solera.records import Completion, Prompt, Reward, Rollout, Sampling
from solera.store.encoding import decode, encode
from solera.tasks.episodes import Failed, Guard, attempt_all
from solera.tasks.rewards import last_turn
from tests.conftest import END, VOCABULARY
from tests.engines.test_in_process import fresh_logp

LETTERS = "abcdefghijk"


def spell(token_ids_T) -> str:
    return "".join(LETTERS[i] for i in token_ids_T)


@pytest.fixture(params=["plain", "continuous"])
def engine(request, tiny) -> InProcessEngine:
    model = tiny.copy(torch.float32)
    model = model.with_plans() if request.param == "continuous" else model
    return InProcessEngine(model, (END,), 64, torch.float32, spell=spell)


NEXT: dict[tuple[int, ...], int] = {}
"""The likeliest token after each text that a test has asked for. `tiny` has the same weights in all of them."""


@torch.no_grad()
def likeliest(model, text: tuple[int, ...]) -> int:
    if text not in NEXT:
        NEXT[text] = int(model.module(input_ids=torch.tensor([text])).logits[0, -1].argmax())
    return NEXT[text]


def greedy(model, prompt: tuple[int, ...], most: int, stop: tuple[str, ...]) -> tuple[list[int], str]:
    """The likeliest token after the whole text, again and again."""
    written: list[int] = []
    while len(written) < most and len(prompt) + len(written) < 128:
        written.append(likeliest(model, (*prompt, *written)))
        if written[-1] == END or any(text in spell(written) for text in stop):
            return written, "stop"
    return written, "length"


class Asking:
    """A task that asks for one turn with given arguments, and keeps what came."""

    def __init__(self, **asked) -> None:
        self.asked = asked
        self.came: dict[str, Completion] = {}

    async def run(self, prompt, generate):
        completion = self.came[prompt.key] = await generate(prompt.token_ids, **self.asked)
        return Rollout.of(prompt, completion, rewards=(Reward(1.0),))


def prompts(count: int = 24) -> list[Prompt]:
    rng = np.random.default_rng(2)
    lengths = [*rng.integers(1, 9, count - 2), 120, 127]
    return [Prompt(f"p/{n}", tuple(rng.integers(2, VOCABULARY, int(k)).tolist())) for n, k in enumerate(lengths)]


@pytest.mark.parametrize(
    "asked",
    [{}, {"max_tokens": 1}, {"max_tokens": 5}, {"max_tokens": 40}, {"stop": "gg"}, {"stop": ["ci", "h"]},
     {"stop": ("b",), "max_tokens": 7}, {"max_tokens": np.int64(3), "stop": []}],
    ids=str,
)  # fmt: skip
def test_greedy_turns_are_those_of_a_plain_loop(engine, tiny, asked):
    model, task = tiny.copy(torch.float32), Asking(**asked)
    made = attempt_all(task, engine, [(prompt, n) for n, prompt in enumerate(prompts())], Sampling(0.0, 12))
    stop = asked.get("stop", ())
    stop, reasons = (stop,) if isinstance(stop, str) else tuple(stop), set()
    for prompt, rollout in zip(prompts(), made, strict=True):
        expected, reason = greedy(model, prompt.token_ids, asked.get("max_tokens", 12), stop)
        assert task.came[prompt.key].token_ids_T.tolist() == expected
        assert (task.came[prompt.key].finish_reason, rollout.finish_reason) == (reason, reason)
        reasons.add(reason)
    assert "length" in reasons


@pytest.mark.parametrize("temperature", [0.4, 1.3, 2.5])
def test_behaviour_logp_is_that_of_the_temperature_asked_for(engine, tiny, temperature):
    model, task = tiny.copy(torch.float32), Asking(temperature=temperature)
    made = attempt_all(task, engine, [(prompt, n) for n, prompt in enumerate(prompts())], Sampling(1.0, 12))
    for prompt, rollout in zip(prompts(), made, strict=True):
        completion = task.came[prompt.key]
        expected = fresh_logp(model, prompt.token_ids, completion, temperature)
        np.testing.assert_allclose(rollout.sequences[0].span_logp, expected, atol=1e-4)
        assert rollout.sampling.temperature == temperature


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"max_tokens": 0}, "generate: max_tokens is 0; it must be at least 1"),
        ({"max_tokens": -3}, "generate: max_tokens is -3; it must be at least 1"),
        ({"max_tokens": 2.5}, "generate: max_tokens must be a whole number, not a float"),
        ({"max_tokens": True}, "generate: max_tokens must be a whole number, not a bool"),
        ({"stop": ""}, "generate: a text in stop is empty"),
        ({"stop": ["a", ""]}, "generate: a text in stop is empty"),
        ({"stop": [3]}, "generate: stop must be a text or a list of texts"),
        ({"stop": None}, "generate: stop must be a text or a list of texts"),
        ({"temperature": -1}, "generate: temperature is -1; it must be 0, or 0.001 or more"),
        ({"temperature": 1e-9}, "generate: temperature is 1e-09; it must be 0, or 0.001 or more"),
        ({"temperature": float("nan")}, "generate: temperature is nan"),
        ({"temperature": "hot"}, "generate: temperature must be a number, not text"),
        ({"room": 0}, "generate: room is 0; it must be at least 1"),
        ({"room": 1.5}, "generate: room must be a whole number, not a float"),
    ],
    ids=str,
)
def test_bad_values_fail_the_episode_with_one_line(engine, asked, complaint):
    (failed,) = attempt_all(Asking(**asked), engine, [(prompts()[0], 0)], Sampling(1.0, 4), None, Guard("missing"))
    assert isinstance(failed, Failed) and isinstance(failed.error, SoleraError)
    assert str(failed.error).startswith(complaint)
    assert "\n" not in str(failed.error)


def test_a_greedy_evaluation_may_be_asked_for_greedy_text(engine):
    task = Asking(temperature=0)
    attempt_all(task, engine, [(prompts()[0], 0)], Sampling(0.0, 4))
    assert task.came["p/0"].sampling == Sampling(0.0, 4)


@pytest.mark.parametrize(("asked", "most"), [({"room": 3}, 3), ({"max_tokens": 5, "room": 9}, 5), ({"room": 99}, 12)])
def test_room_can_only_lower_the_limit(tiny, asked, most):
    engine, task = InProcessEngine(tiny.copy(torch.float32), (99,), 64, torch.float32), Asking(**asked)
    attempt_all(task, engine, [(Prompt("p", (2, 3)), 0)], Sampling(1.0, 12))
    assert len(task.came["p"].token_ids_T) == most


def test_a_greedy_turn_of_a_run_that_samples_is_given_text(engine, tiny):
    class Three:
        async def run(self, prompt, generate):
            first = await generate(prompt.token_ids, max_tokens=4)
            ids = (*prompt.token_ids, *first.token_ids_T.tolist(), 5)
            second = await generate(ids, temperature=0, max_tokens=3)
            third = await generate((*ids, *second.token_ids_T.tolist(), 6), temperature=0.5, max_tokens=2)
            return Rollout.of(prompt, first, (5,), second, (6,), third, rewards=(Reward(1.0),))

    (made,) = attempt_all(Three(), engine, [(Prompt("p", (2, 3)), 1)], Sampling(1.0, 12))
    (sequence,) = made.sequences
    first, third = sequence.spans
    assert sequence.temperatures == (1.0, 0.5)
    assert made.sampling.temperature == 0.5
    assert made.length == first.stop - first.start + third.stop - third.start
    middle = sequence.token_ids_T[first.stop + 1 : third.start - 1].tolist()
    assert middle == greedy(tiny.copy(torch.float32), tuple(sequence.token_ids_T[: first.stop + 1].tolist()), 3, ())[0]


def test_graders_see_a_greedy_last_turn(engine):
    """And who wrote which tokens is recorded, so that it is still known after the store."""

    class Two:
        async def run(self, prompt, generate):
            first = await generate(prompt.token_ids, max_tokens=4)
            ids = (*prompt.token_ids, *first.token_ids_T.tolist(), 5, 6)
            last = await generate(ids, temperature=0, max_tokens=3)
            lasts.append(last.token_ids_T.tolist())
            return Rollout.of(prompt, first, (5, 6), last, rewards=(Reward(1.0),))

    lasts: list[list[int]] = []
    (made,) = attempt_all(Two(), engine, [(Prompt("p", (2, 3)), 1)], Sampling(1.0, 12))
    again = replace(made, sequences=decode(encode(made.sequences)))
    first = made.sequences[0].spans[0]
    for rollout in (made, again):
        assert last_turn(rollout).tolist() == lasts[0]
        assert [segment[:2] for segment in rollout.sequences[0].segments] == [
            ("prompt", 2), ("policy", first.stop - first.start), ("environment", 2), ("greedy", len(lasts[0])),
        ]  # fmt: skip


def test_an_episode_of_greedy_turns_only_has_nothing_to_train_on(engine):
    (made,) = attempt_all(Asking(temperature=0), engine, [(Prompt("p", (2, 3)), 1)], Sampling(1.0, 4))
    assert (made.length, made.sequences[0].spans) == (0, ())


@pytest.mark.parametrize("kind", ["plain", "continuous"])
def test_sixteen_second_turns_that_come_one_by_one_are_one_batch(tiny, monkeypatch, kind):
    """Episode k asks for its second turn once k others have begun with theirs, and no token is written before. Requests
    that waited for an idle decoder would be 17 batches."""
    monkeypatch.setattr("solera.engines.slots.CHUNK", 1)
    model = tiny.copy(torch.float32)
    engine = InProcessEngine(model.with_plans() if kind == "continuous" else model, (99,), 64, torch.float32)
    begun: list[tuple[bool, int]] = []
    decoder = engine.decoder
    admit, advance = decoder.admit, decoder.advance

    def admitting(jobs):
        beside, count = decoder.busy, admit(jobs)
        begun.append((beside, count))
        return count

    def advancing():
        while 1 < len(begun) < 17 and engine._inbox.empty():
            pass
        return advance()

    class Staggered:
        async def run(self, prompt, generate):
            first = await generate(prompt.token_ids, max_tokens=2)
            while len(begun) <= int(prompt.key):
                await asyncio.sleep(0.001)
            given = (*prompt.token_ids, *first.token_ids_T.tolist(), 4)
            return Rollout.of(prompt, first, (4,), await generate(given), rewards=(Reward(1.0),))

    several = [(Prompt(str(n), (2 + n % 9, 3, 2 + n // 2)), n) for n in range(16)]
    longer = [(Prompt(f"longer/{n}", (*prompt.token_ids, 3, 3, n % 9)), n) for prompt, n in several]
    attempt_all(Asking(), engine, longer, Sampling(1.0, 40))  # makes memory for so many
    monkeypatch.setattr(decoder, "admit", admitting)
    monkeypatch.setattr(decoder, "advance", advancing)
    together = attempt_all(Staggered(), engine, several, Sampling(1.0, 40))
    assert begun == [(False, 16), (False, 1), *[(True, 1)] * 15]
    for rollout in together:
        (sequence,) = rollout.sequences
        first, second = (tuple(span) for span in sequence.spans)
        assert (first[1] - first[0], second[1] - second[0]) == (2, 40)
        for start, stop, _ in sequence.spans:
            ids = sequence.token_ids_T
            written = Completion(ids[start:stop], np.zeros(stop - start, np.float32), ((stop - start, 0),), "length")
            expected = fresh_logp(tiny.copy(torch.float32), tuple(ids[:start].tolist()), written, 1.0)
            np.testing.assert_allclose(sequence.behaviour_logp_T[start:stop], expected, atol=1e-4)
