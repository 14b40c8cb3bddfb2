"""What a real server writes: token ids, log-probabilities, ends."""

import asyncio

import numpy as np
import pytest
import torch

from solera.engines.vllm.client import VllmEngine
from solera.errors import BadRequestError
from solera.records import Completion, Sampling
from solera.run.parts import Parts
from solera.tasks.event_loop import EventLoop
from tests.vllm.conftest import forward_logp, model_of, weights_of
from tests.vllm.counters import counters_of

pytestmark = pytest.mark.vllm
CLOSE = 5e-4


def ask(events: EventLoop, engine: VllmEngine, prompt: tuple[int, ...], sampling: Sampling, *seeds: int):
    async def together() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(prompt, sampling, seed) for seed in seeds))

    return events.run(together())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_log_probabilities_are_of_the_sampled_distribution(
    engine: VllmEngine, parts: Parts, events: EventLoop, temperature: float
) -> None:
    engine.load(weights_of(1))  # less certain than the embedded model
    apart, written = [], set()
    for index in range(4):
        prompt = parts.task.prompt(index).token_ids
        for completion in ask(events, engine, prompt, Sampling(temperature, 16), *range(8)):
            expected_T = forward_logp(1, prompt, completion.token_ids_T, temperature)
            apart.append(np.abs(completion.behaviour_logp_T - expected_T).max())
            written.add(tuple(completion.token_ids_T.tolist()))
    assert max(apart) < CLOSE
    assert len(written) > 8  # not all alike


def test_a_response_ends_with_the_end_token_or_at_its_limit(
    engine: VllmEngine, parts: Parts, events: EventLoop
) -> None:
    prompt, (end,) = parts.task.prompt(0).token_ids, parts.codec.end_token_ids
    for completion in ask(events, engine, prompt, Sampling(1.0, 30), *range(16)):
        assert completion.finish_reason == "stop"
        assert completion.token_ids_T[-1] == end and end not in completion.token_ids_T[:-1]
    (cut,) = ask(events, engine, prompt, Sampling(1.0, 1), 5)
    assert (cut.finish_reason, len(cut.token_ids_T), cut.versions) == ("length", 1, ((1, 0),))


def test_the_end_token_in_the_last_place_is_an_end(engine: VllmEngine, parts: Parts, events: EventLoop) -> None:
    prompt = parts.task.prompt(0).token_ids
    (whole,) = ask(events, engine, prompt, Sampling(1.0, 30), 3)
    (same,) = ask(events, engine, prompt, Sampling(1.0, len(whole.token_ids_T)), 3)
    assert same.token_ids_T.tolist() == whole.token_ids_T.tolist()
    assert same.finish_reason == "stop"


def test_the_context_ends_a_response(engine: VllmEngine, parts: Parts, events: EventLoop) -> None:
    prompt = parts.task.prompt(0).token_ids
    filled = (prompt * 64)[:62]
    engine.end_token_ids = ()
    (two,) = ask(events, engine, filled, Sampling(1.0, 30), 0)
    (none,) = ask(events, engine, (*filled, 2, 3), Sampling(1.0, 30), 0)
    assert (len(two.token_ids_T), two.finish_reason) == (2, "length")
    assert (len(none.token_ids_T), none.finish_reason, none.versions) == (0, "length", ((0, 0),))


def test_greedy_takes_the_likeliest_token_and_calls_it_certain(
    engine: VllmEngine, parts: Parts, events: EventLoop
) -> None:
    prompt = parts.task.prompt(1).token_ids
    (completion,) = ask(events, engine, prompt, Sampling(0.0, 16), 9)
    text = list(prompt)
    with torch.no_grad():
        for token in completion.token_ids_T.tolist():
            assert token == int(model_of(0)(torch.tensor([text])).logits[0, -1].argmax())
            text.append(token)
    assert completion.behaviour_logp_T.tolist() == [0.0] * len(completion.token_ids_T)


def test_nucleus_sampling_renormalises(engine: VllmEngine, parts: Parts, events: EventLoop) -> None:
    prompt = parts.task.prompt(2).token_ids
    (completion,) = ask(events, engine, prompt, Sampling(1.0, 1, top_p=0.6), 1)
    with torch.no_grad():
        probability_V = model_of(0)(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    order = probability_V.argsort(descending=True)
    kept = order[: int((probability_V[order].cumsum(0) < 0.6).sum()) + 1]
    expected = (probability_V[completion.token_ids_T[0]] / probability_V[kept].sum()).log()
    assert abs(completion.behaviour_logp_T[0] - float(expected)) < CLOSE


def test_a_stop_string_ends_the_text_and_stays_in_it(engine: VllmEngine, parts: Parts, events: EventLoop) -> None:
    prompt = parts.task.prompt(0).token_ids
    engine.load(weights_of(1))
    tried = 0
    for seed, completion in enumerate(ask(events, engine, prompt, Sampling(1.0, 40), *range(12))):
        text = parts.codec.decode(completion.token_ids_T)
        stop = text[3:5]
        if len(stop) < 2:
            continue
        tried += 1
        (cut,) = ask(events, engine, prompt, Sampling(1.0, 40, stop=("never", stop)), seed)
        assert parts.codec.decode(cut.token_ids_T) == text[: text.index(stop) + len(stop)]
        assert cut.finish_reason == "stop"
        assert len(cut.behaviour_logp_T) == len(cut.token_ids_T) == cut.versions[0][0]
    assert tried > 3


def test_tokens_are_drawn_as_often_as_they_are_probable(engine: VllmEngine, parts: Parts, events: EventLoop) -> None:
    engine.load(weights_of(1))
    prompt, count = parts.task.prompt(0).token_ids, 600
    written = ask(events, engine, prompt, Sampling(1.0, 1), *range(1000, 1000 + count))
    drawn_V = np.bincount([int(completion.token_ids_T[0]) for completion in written], minlength=17) / count
    with torch.no_grad():
        probability_V = model_of(1)(torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy()
    error_V = np.sqrt(probability_V * (1 - probability_V) / count)
    assert (np.abs(drawn_V - probability_V) < 4 * error_V + 2 / count).all()


def test_a_seed_gives_the_same_tokens_whatever_is_written_beside(
    engine: VllmEngine, parts: Parts, events: EventLoop
) -> None:
    prompt, sampling = parts.task.prompt(0).token_ids, Sampling(1.0, 16)
    engine.load(weights_of(1))
    seeds = [2**64 - 1, 7, 2**63 + 5]
    together = ask(events, engine, prompt, sampling, *seeds, *range(20))
    for seed, before in zip(seeds, together, strict=False):
        (alone,) = ask(events, engine, prompt, sampling, seed)
        assert alone.token_ids_T.tolist() == before.token_ids_T.tolist()
    assert len({tuple(completion.token_ids_T.tolist()) for completion in together}) > 3


@pytest.mark.parametrize("text", [(), (3, 17), (-1,), (3, 2**31 - 1)])
def test_a_text_that_the_model_cannot_read_is_refused_alone(
    engine: VllmEngine, parts: Parts, events: EventLoop, text: tuple[int, ...]
) -> None:
    prompt, sampling = parts.task.prompt(0).token_ids, Sampling(1.0, 4)

    async def both() -> list[object]:
        asked = (engine.generate(text, sampling, 0), engine.generate(prompt, sampling, 0))
        return await asyncio.gather(*asked, return_exceptions=True)

    refused, good = events.run(both())
    assert isinstance(refused, BadRequestError)
    assert isinstance(good, Completion)


def test_work_is_counted(engine: VllmEngine, parts: Parts, events: EventLoop) -> None:
    before = engine.work
    written = ask(events, engine, parts.task.prompt(0).token_ids, Sampling(1.0, 16), *range(8))
    done = engine.work - before
    assert done.tokens == sum(len(completion.token_ids_T) for completion in written)
    assert 0 < done.seconds < 60


def test_the_servers_own_counter_has_every_token_and_not_the_checks_of_a_sync(
    engine: VllmEngine, parts: Parts, events: EventLoop
) -> None:
    assert engine.sampled == 0  # counted since it was opened, without the checks of the first sync
    prompt = parts.task.prompt(0).token_ids
    written = ask(events, engine, prompt, Sampling(1.0, 20), *range(30))
    engine.load(weights_of(1))
    written += ask(events, engine, prompt, Sampling(1.0, 20), *range(10))
    counters_of([engine.http.url])  # the server counts a moment after it has answered
    assert engine.sampled == sum(len(completion.token_ids_T) for completion in written)
