"""Continuous decoding gives what plain decoding gives, whatever the number of slots, the order and the memory."""

import asyncio
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from solera.engines import continuous
from solera.engines.continuous import ContinuousDecoder, Memory, _bucket
from solera.engines.decoding import Decoded, decode
from solera.engines.in_process import InProcessEngine
from solera.engines.sampling import sample
from solera.models.language_model import LanguageModel
from solera.records import Prompt, Sampling
from solera.streams import uniforms
from solera.tasks.episodes import attempt_all
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


def written(
    decoder: ContinuousDecoder, prompts: list[tuple[int, ...]], numbers: np.ndarray, sampling: Sampling
) -> Decoded:
    """All that was handed out, in the order of the requests; nothing twice."""
    parts = list(decoder.decode(prompts, numbers, sampling))
    rows = np.concatenate([rows for rows, _ in parts if rows])
    assert sorted(rows.tolist()) == list(range(len(prompts)))
    order = np.argsort(rows)
    columns = [[getattr(part, name) for rows, part in parts if rows] for name in vars(parts[-1][1])]
    return Decoded(*(np.concatenate(column)[order] for column in columns))


@pytest.mark.parametrize("slots", [1, 7, 16, 1000])
def test_it_writes_what_plain_decoding_writes(tiny, planned, slots):
    prompts, numbers = requests()
    expected = decode(tiny.copy(torch.float32), prompts, numbers, SAMPLING, (END,))
    assert {1, SAMPLING.max_tokens} <= set(expected.length_B.tolist())
    decoder = ContinuousDecoder(planned, (END,), slots)
    for _ in range(2):  # the second time in memory that the first has written to
        assert_same(written(decoder, prompts, numbers, SAMPLING), expected)


@pytest.mark.parametrize("sampling", [Sampling(0.0, 12), Sampling(1.0, 12, 0.8)], ids=["greedy", "top_p"])
def test_greedy_and_truncated_sampling(tiny, planned, sampling):
    prompts, numbers = requests()
    expected = decode(tiny.copy(torch.float32), prompts, numbers, sampling, (END,))
    assert_same(written(ContinuousDecoder(planned, (END,), 16), prompts, numbers, sampling), expected)


def test_greedy_is_that_of_generate(tiny, planned):
    prompts, numbers = requests(8)
    got = written(ContinuousDecoder(planned, (END,), 16), prompts, numbers, Sampling(0.0, 12))
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
    assert_same(written(decoder, prompts, numbers, SAMPLING), expected)
    assert decoder.memory is not None
    assert decoder.memory.slots <= 4


def test_prompts_are_computed_in_parts(tiny, planned, monkeypatch):
    monkeypatch.setattr(continuous, "PREFILL_TOKENS", 5)
    prompts, numbers = requests()
    expected = decode(tiny.copy(torch.float32), prompts, numbers, SAMPLING, (END,))
    assert_same(written(ContinuousDecoder(planned, (END,), 64), prompts, numbers, SAMPLING), expected)


def test_the_engine_uses_it_for_a_model_that_takes_plans(tiny, planned):
    asked = ragged_requests(12, 5)
    plain = ask(InProcessEngine(tiny.copy(torch.float32), (END,), 64, torch.float32), asked)
    fast = ask(InProcessEngine(planned, (END,), 7, torch.float32), asked)
    for expected, got in zip(plain, fast, strict=True):
        assert got.token_ids_T.tolist() == expected.token_ids_T.tolist()
        assert got.finish_reason == expected.finish_reason


class Late(ContinuousDecoder):
    """On a processor, but it learns which rows have ended a chunk late, as from a GPU."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.graphed, self.advanced = True, 0

    def _room(self) -> int:
        return 1_000_000

    def _sample(self, logits_SV, uniform_S, sampling):
        return sample(logits_SV, uniform_S, sampling.temperature, sampling.top_p)

    def advance(self, memory, rows, sampling, tokens) -> None:
        self.advanced += 1
        for _ in range(tokens):
            self.step(memory, rows, sampling)


@pytest.mark.parametrize("chunk", [1, 2, 5, 50])
@pytest.mark.parametrize("slots", [1, 9, 1000])
def test_what_ended_is_handed_out_once_though_the_host_learns_of_it_late(tiny, planned, monkeypatch, slots, chunk):
    monkeypatch.setattr(continuous, "CHUNK", chunk)
    prompts, numbers = requests()
    expected = decode(tiny.copy(torch.float32), prompts, numbers, SAMPLING, (END,))
    decoder = Late(planned, (END,), slots)
    for _ in range(2):
        assert_same(written(decoder, prompts, numbers, SAMPLING), expected)


def test_short_responses_are_handed_out_before_long_ones_are_written(planned, monkeypatch):
    monkeypatch.setattr(continuous, "CHUNK", 2)
    prompts, numbers = requests()
    decoder = Late(planned, (END,), 1000)
    moments = dict[int, list[int]]()
    for _, decoded in decoder.decode(prompts, numbers, SAMPLING):
        for length in decoded.length_B.tolist():
            moments.setdefault(length, []).append(decoder.advanced)
    assert (
        max(moments[1]) <= 3
    )  # ended in the first chunk, which is read after the second, and given while the third runs
    assert min(moments[12]) == decoder.advanced == 6


def answered(engine: InProcessEngine, count: int, after) -> list:
    """`after` of each of several requests, in one event loop, as soon as each has its answer."""

    async def one(request):
        return await after(await engine.generate(*request))

    async def gather():
        return await asyncio.gather(*map(one, ragged_requests(count, 5)), return_exceptions=True)

    return asyncio.run(gather())


@pytest.fixture
def late(planned, monkeypatch) -> InProcessEngine:
    monkeypatch.setattr(continuous, "CHUNK", 2)
    engine = InProcessEngine(planned, (END,), 1000, torch.float32, early=True)
    engine._continuous = Late(planned, (END,), 1000)
    return engine


def test_attempts_go_on_while_others_are_written_and_none_of_the_engines_settings_reach_them(late, monkeypatch):
    inside = []

    @contextmanager
    def precision():
        inside.append(True)
        yield
        inside.pop()

    async def after(completion):
        return late._continuous.advanced, (torch.is_grad_enabled(), *inside)

    monkeypatch.setattr(late, "_precision", precision)
    moments, settings = zip(*answered(late, 12, after), strict=True)
    assert len(set(moments)) > 2
    assert set(settings) == {(True,)}


def test_all_answers_come_together_unless_they_may_come_early(late):
    """A reward function of one's own is given all responses in one call, as it may compare them."""
    late.early = False

    async def after(completion):
        return late._continuous.advanced, len(completion.token_ids_T)

    moments, lengths = zip(*answered(late, 12, after), strict=True)
    assert len(set(moments)) == 1
    assert len(set(lengths)) > 5


def test_second_turns_of_early_and_late_answers_are_written_together(late, monkeypatch):
    batches = []
    write = late._write
    monkeypatch.setattr(late, "_write", lambda requests: batches.append(len(requests)) or write(requests))

    async def again(completion):
        return await late.generate((3, 4, *completion.token_ids_T.tolist()), SAMPLING, 7)

    answered(late, 12, again)
    assert batches == [60, 60]


def test_an_error_in_the_middle_reaches_those_who_still_wait(late, monkeypatch):
    step = late._continuous.step

    def broken(*given):
        if late._continuous.advanced > 4:
            raise MemoryError("full")
        step(*given)

    async def after(completion):
        return completion

    monkeypatch.setattr(late._continuous, "step", broken)
    outcomes = answered(late, 12, after)
    failed = [outcome for outcome in outcomes if isinstance(outcome, MemoryError)]
    assert 0 < len(failed) < 60
    assert all(len(outcome.token_ids_T) <= 8 for outcome in outcomes if outcome not in failed)


def test_whoever_gives_up_stops_the_writing_and_the_engine_goes_on_later(late, monkeypatch):
    """The first attempt fails while others are still written, and some wait for a second turn already."""
    monkeypatch.setattr(continuous, "CHUNK", 1)
    asked = ragged_requests(12, 5)
    expected = ask(late, asked)
    chunks, late._continuous.advanced = late._continuous.advanced, 0

    class Failing:
        failed = False

        async def run(self, prompt, generate):
            await generate(prompt.token_ids)
            if not self.failed:
                self.failed = True
                raise ValueError("no grade")
            await generate(prompt.token_ids)

    short_first = np.argsort([len(completion.token_ids_T) for completion in expected], kind="stable").tolist()
    attempts = [(Prompt("key", ids), seed) for ids, _, seed in (asked[b] for b in short_first)]
    with pytest.raises(ValueError, match="no grade"):
        attempt_all(Failing(), late, attempts, SAMPLING)
    assert late._continuous.advanced < chunks
    assert late._pending
    for got, wanted in zip(ask(late, asked), expected, strict=True):
        assert got.token_ids_T.tolist() == wanted.token_ids_T.tolist()
        assert got.behaviour_logp_T.tolist() == wanted.behaviour_logp_T.tolist()


def test_memory_made_for_one_batch_holds_the_next_with_longer_prompts(planned):
    prompts, numbers = requests()
    decoder = ContinuousDecoder(planned, (END,), 16)
    written(decoder, prompts, numbers, SAMPLING)
    memory = decoder.memory
    longer = [(3, *prompt) for prompt in prompts]
    assert sum(map(len, set(longer))) < 1.5 * sum(map(len, set(prompts)))
    written(decoder, longer, numbers, SAMPLING)
    assert decoder.memory is memory


def test_few_sizes_of_graphs():
    sizes = sorted({_bucket(rows) for rows in range(1, 1025)})
    assert sizes == [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert all(_bucket(rows) >= rows for rows in range(1, 1025))
    assert _bucket(100, most=100) == 100


@pytest.mark.parametrize("places", [4000, 1400, 900])
def test_where_memory_is_short_one_memory_serves_all_batches(planned, monkeypatch, places):
    """What is alive counts as taken, as torch's allocator counts it. Every batch has prompts of other lengths."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    made, allocating = [], Memory.allocate.__func__

    def room(decoder):
        held = decoder.memory.pools[0][0].shape[0] if decoder.memory else 0
        return (places - sum(keys.shape[0] for keys in alive) + held) // 2

    def allocate(cls, *sizes):
        memory = allocating(cls, *sizes)
        made.append((len(alive), memory.slots))
        alive.add(memory.pools[0][0])
        return memory

    monkeypatch.setattr(Late, "_room", room)
    monkeypatch.setattr(Memory, "allocate", classmethod(allocate))
    decoder, rng = Late(planned, (END,), 64), np.random.default_rng(0)
    for batch in range(12):
        prompts = [tuple(rng.integers(2, 11, int(rng.integers(3, 12))).tolist()) for _ in range(16)] * 4
        written(decoder, prompts, uniforms(np.arange(64, dtype=np.uint64) + batch, 12), Sampling(1.0, 12))
    assert len(made) == 1
    written(decoder, [(2, 3)] * 64, uniforms(np.arange(64, dtype=np.uint64), 24), Sampling(1.0, 24))
    assert [before for before, _ in made] == [0] * len(made)  # never two at a time
