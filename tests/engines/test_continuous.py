"""Continuous decoding gives what plain decoding gives, whatever the number of slots, the order and the memory."""

import numpy as np
import pytest
import torch

from solera.engines import continuous
from solera.engines.continuous import ContinuousDecoder, _bucket
from solera.engines.decoding import Decoded, decode
from solera.engines.in_process import InProcessEngine
from solera.models.language_model import LanguageModel
from solera.records import Sampling
from solera.streams import uniforms
from tests.conftest import END, random_prompt
from tests.engines.test_in_process import ask, ragged_requests

SAMPLING = Sampling(temperature=1.3, max_tokens=12)


@pytest.fixture
def planned(tiny) -> LanguageModel:
    return tiny.copy(torch.float32).with_plans()


def requests(count: int = 30) -> tuple[list[tuple[int, ...]], np.ndarray]:
    rng = np.random.default_rng(3)
    prompts = [prompt for prompt in (random_prompt(rng) for _ in range(count)) for _ in range(int(rng.integers(1, 5)))]
    return prompts, uniforms(np.arange(len(prompts), dtype=np.uint64), SAMPLING.max_tokens)


def assert_same(got: Decoded, expected: Decoded) -> None:
    assert got.length_B.tolist() == expected.length_B.tolist()
    assert got.finished_B.tolist() == expected.finished_B.tolist()
    for b, length in enumerate(expected.length_B):
        assert got.token_BT[b, :length].tolist() == expected.token_BT[b, :length].tolist()
        np.testing.assert_allclose(got.logp_BT[b, :length], expected.logp_BT[b, :length], atol=1e-5)


@pytest.mark.parametrize("slots", [1, 7, 16, 1000])
def test_it_writes_what_plain_decoding_writes(tiny, planned, slots):
    prompts, numbers = requests()
    expected = decode(tiny.copy(torch.float32), prompts, numbers, SAMPLING, (END,))
    assert {1, SAMPLING.max_tokens} <= set(expected.length_B.tolist())
    decoder = ContinuousDecoder(planned, (END,), slots)
    for _ in range(2):  # the second time in memory that the first has written to
        assert_same(decoder.decode(prompts, numbers, SAMPLING), expected)


@pytest.mark.parametrize("sampling", [Sampling(0.0, 12), Sampling(1.0, 12, 0.8)], ids=["greedy", "top_p"])
def test_greedy_and_truncated_sampling(tiny, planned, sampling):
    prompts, numbers = requests()
    expected = decode(tiny.copy(torch.float32), prompts, numbers, sampling, (END,))
    assert_same(ContinuousDecoder(planned, (END,), 16).decode(prompts, numbers, sampling), expected)


def test_greedy_is_that_of_generate(tiny, planned):
    prompts, numbers = requests(8)
    got = ContinuousDecoder(planned, (END,), 16).decode(prompts, numbers, Sampling(0.0, 12))
    module = tiny.copy(torch.float32).module
    for b, prompt in enumerate(prompts):
        whole = module.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=END, pad_token_id=END
        )
        assert whole[0, len(prompt) :].tolist() == got.token_BT[b, : got.length_B[b]].tolist()


def test_little_memory_takes_waves(tiny, planned, monkeypatch):
    prompts, numbers = requests()
    expected = decode(tiny.copy(torch.float32), prompts, numbers, SAMPLING, (END,))
    decoder = ContinuousDecoder(planned, (END,), 64)
    monkeypatch.setattr(decoder, "_room", lambda: 50)
    waves = list(decoder._waves(prompts, SAMPLING))
    assert len(waves) > 3
    assert_same(decoder.decode(prompts, numbers, SAMPLING), expected)
    assert decoder.memory is not None
    assert decoder.memory.slots <= 4


def test_prompts_are_computed_in_parts(tiny, planned, monkeypatch):
    monkeypatch.setattr(continuous, "PREFILL_TOKENS", 5)
    prompts, numbers = requests()
    expected = decode(tiny.copy(torch.float32), prompts, numbers, SAMPLING, (END,))
    assert_same(ContinuousDecoder(planned, (END,), 64).decode(prompts, numbers, SAMPLING), expected)


def test_the_engine_uses_it_for_a_model_that_takes_plans(tiny, planned):
    asked = ragged_requests(12, 5)
    plain = ask(InProcessEngine(tiny.copy(torch.float32), (END,), 64, torch.float32), asked)
    fast = ask(InProcessEngine(planned, (END,), 7, torch.float32), asked)
    for expected, got in zip(plain, fast, strict=True):
        assert got.token_ids_T.tolist() == expected.token_ids_T.tolist()
        assert got.finish_reason == expected.finish_reason


def test_few_sizes_of_graphs():
    sizes = sorted({_bucket(rows) for rows in range(1, 1025)})
    assert sizes == [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert all(_bucket(rows) >= rows for rows in range(1, 1025))
    assert _bucket(100, most=100) == 100
