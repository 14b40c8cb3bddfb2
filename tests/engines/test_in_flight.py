"""New weights while responses are being written: each token belongs to the version that wrote it."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from solera.engines.in_process import InProcessEngine
from solera.errors import SoleraError
from solera.models.language_model import LanguageModel
from solera.protocols import Weights
from solera.records import Completion, Sampling
from solera.tasks.event_loop import EventLoop
from tests.conftest import END
from tests.engines.test_in_process import fresh_logp, ragged_requests

LONG = Sampling(temperature=1.3, max_tokens=100)
VERSIONS = 4


def some_versions(model: LanguageModel) -> list[LanguageModel]:
    """The model, and others whose distributions are far from it and from each other. None of them ends early."""
    versions = [model.copy(torch.float32)]
    for seed in range(1, VERSIONS):
        torch.manual_seed(seed)
        other = model.copy(torch.float32)
        with torch.no_grad():
            for parameter in other.parameters().values():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        versions.append(other)
    return versions


def sent(version: int, model: LanguageModel) -> Weights:
    return Weights("run", version, iter(model.parameters().items()))


def slowly(engine: InProcessEngine, seconds: float = 0.002) -> InProcessEngine:
    """Let every turn of the decoder take a while, so that weights arrive between two tokens of a response."""
    advance: Callable = engine.decoder.advance

    def later():
        time.sleep(seconds)
        return advance()

    engine.decoder.advance = later  # type: ignore[method-assign]
    return engine


def written_across_versions(
    engine: InProcessEngine, versions: list[LanguageModel], in_flight: str
) -> list[tuple[tuple[int, ...], Completion]]:
    """Ask for responses, in two waves, while one version after the other is loaded."""
    asked = ragged_requests(10, 4, LONG)
    engine.load(sent(0, versions[0]))

    async def ask() -> list[Completion]:
        early = [asyncio.ensure_future(engine.generate(*request)) for request in asked[:30]]
        await asyncio.sleep(0.05)
        return [*await asyncio.gather(*early), *await asyncio.gather(*(engine.generate(*r) for r in asked[30:]))]

    with EventLoop() as events:
        begun = events.begin(ask())
        for version in range(1, VERSIONS):
            time.sleep(0.04)
            held = engine.load(sent(version, versions[version]), in_flight)
            assert (held.version, engine.version) == (version, version)
        completions = begun.result()
    return [(prompt, completion) for (prompt, _, _), completion in zip(asked, completions, strict=True)]


def assert_each_span_is_of_its_version(
    written: list[tuple[tuple[int, ...], Completion]], versions: list[LanguageModel], tolerance: float = 1e-4
) -> None:
    for prompt, completion in written:
        assert [v for _, v in completion.versions] == sorted({v for _, v in completion.versions})
        expected = np.zeros(len(completion.token_ids_T))
        start = 0
        for tokens, version in completion.versions:
            logp_T = fresh_logp(versions[version], prompt, completion, LONG.temperature)
            expected[start : start + tokens] = logp_T[start : start + tokens]
            start += tokens
        assert np.abs(completion.behaviour_logp_T - expected).max() < tolerance


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
@pytest.mark.parametrize("plans", [False, True], ids=["plain", "continuous"])
def test_responses_continue_with_new_weights_and_each_span_matches_a_forward_pass_of_its_version(
    tiny, plans, in_flight
):
    versions = some_versions(tiny)
    model = versions[0].copy(torch.float32)
    engine = slowly(InProcessEngine(model.with_plans() if plans else model, (END,), 64, torch.float32, early=True))
    written = written_across_versions(engine, versions, in_flight)
    assert_each_span_is_of_its_version(written, versions)
    assert sum(len(completion.versions) > 1 for _, completion in written) >= 5


@pytest.mark.parametrize("plans", [False, True], ids=["plain", "continuous"])
def test_drain_ends_responses_with_the_weights_that_began_them(tiny, plans):
    versions = some_versions(tiny)
    model = versions[0].copy(torch.float32)
    engine = slowly(InProcessEngine(model.with_plans() if plans else model, (END,), 64, torch.float32, early=True))
    written = written_across_versions(engine, versions, "drain")
    assert_each_span_is_of_its_version(written, versions)
    assert all(len(completion.versions) == 1 for _, completion in written)
    assert len({version for _, completion in written for _, version in completion.versions}) > 1


@pytest.mark.parametrize("plans", [False, True], ids=["plain", "continuous"])
def test_requests_that_are_given_up_while_weights_arrive_disturb_no_other(tiny, plans, monkeypatch):
    """Of several lengths, some with stop strings, with little room. Tokens are spelt as letters."""
    monkeypatch.setattr("solera.engines.pages.PAGE", 16)
    rng, versions, got = random.Random(0), some_versions(tiny), list[tuple[tuple[int, ...], Sampling, Completion]]()
    model = versions[0].copy(torch.float32)

    def spell(token_ids_T) -> str:
        return "".join(chr(97 + token) for token in token_ids_T)

    engine = InProcessEngine(model.with_plans() if plans else model, (END,), 16, torch.float32, early=True, spell=spell)
    slowly(engine, 0.001).load(sent(0, versions[0]))

    async def ask(prompt: tuple[int, ...], seed: int) -> None:
        sampling = replace(LONG, max_tokens=rng.choice([3, 20, 60, 100]), stop=rng.choice([(), ("ee", "jd")]))
        await asyncio.sleep(0.3 * rng.random())
        try:
            limit = rng.choice([None, 0.1 * rng.random()])
            got.append((prompt, sampling, await asyncio.wait_for(engine.generate(prompt, sampling, seed), limit)))
        except TimeoutError:
            pass

    async def ask_all() -> None:
        await asyncio.gather(*(ask(prompt, seed) for prompt, _, seed in ragged_requests(20, 3, LONG)))

    with EventLoop() as events:
        begun = events.begin(ask_all())
        for version, in_flight in ((1, "keep"), (2, "drain"), (3, "abort")):
            time.sleep(0.07)
            engine.load(sent(version, versions[version]), in_flight)
        begun.result()
    assert 20 < len(got) < 60
    assert_each_span_is_of_its_version([(prompt, completion) for prompt, _, completion in got], versions)
    for _, sampling, completion in got:
        text = spell(completion.token_ids_T)
        assert not any(stop in text[:-1] for stop in sampling.stop)
        ended = completion.token_ids_T[-1] == END or text.endswith(sampling.stop)
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(text) == sampling.max_tokens
    while engine.decoder.busy:
        time.sleep(0.01)
    assert not plans or engine.decoder.pages.taken == 0


def test_random_numbers_of_a_response_do_not_change_with_the_weights(tiny):
    """Weights that are loaded again, unchanged, change no token."""
    same = tiny.copy(torch.float32)
    engine = slowly(InProcessEngine(tiny.copy(torch.float32), (END,), 64, torch.float32, early=True))
    crossed = written_across_versions(engine, [same] * VERSIONS, "keep")
    undisturbed = InProcessEngine(tiny.copy(torch.float32), (END,), 64, torch.float32, early=True)

    async def ask() -> list[Completion]:
        return await asyncio.gather(*(undisturbed.generate(*request) for request in ragged_requests(10, 4, LONG)))

    for (_, completion), plain in zip(crossed, asyncio.run(ask()), strict=True):
        assert completion.token_ids_T.tolist() == plain.token_ids_T.tolist()
    assert any(len(completion.versions) > 1 for _, completion in crossed)


def test_weights_that_do_not_fit_are_refused_and_responses_under_way_go_on(tiny):
    model = tiny.copy(torch.float32)
    engine = slowly(InProcessEngine(model.copy(torch.float32), (END,), 64, torch.float32, early=True))
    engine.load(sent(0, model))
    requests = ragged_requests(5, 4, LONG)

    async def ask() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(*request) for request in requests))

    with EventLoop() as events:
        begun = events.begin(ask())
        time.sleep(0.02)
        with pytest.raises(SoleraError, match="does not fit"):
            engine.load(Weights("run", 1, iter([("model.norm.weight", torch.zeros(3))])), "keep")
        completions = begun.result()
    assert {version for completion in completions for _, version in completion.versions} == {0}
    assert_each_span_is_of_its_version(
        [(prompt, completion) for (prompt, _, _), completion in zip(requests, completions, strict=True)], [model]
    )
