"""Continuous decoding gives what plain decoding gives, whatever the number of slots, the order and the memory."""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from solera.engines import continuous, slots
from solera.engines.continuous import ContinuousDecoder
from solera.engines.decoding import Decoded, decode
from solera.engines.in_process import InProcessEngine
from solera.engines.jobs import Decoder, Job, Written
from solera.engines.pages import bytes_per_token
from solera.engines.tables import bucket
from solera.models.language_model import LanguageModel
from solera.models.memory import RECORDING
from solera.records import Prompt, Sampling
from solera.tasks.episodes import attempt_all
from tests.conftest import END, VOCABULARY, random_prompt
from tests.engines.test_in_process import ask, ragged_requests

SAMPLING = Sampling(temperature=1.3, max_tokens=12)


@pytest.fixture
def planned(tiny) -> LanguageModel:
    return tiny.copy(torch.float32).with_plans()


def requests(count: int = 16) -> tuple[list[tuple[int, ...]], list[int]]:
    rng = np.random.default_rng(3)
    prompts = [prompt for prompt in (random_prompt(rng) for _ in range(count)) for _ in range(int(rng.integers(1, 5)))]
    return prompts, list(range(len(prompts)))


def assert_same(got: Decoded, expected: Decoded) -> None:
    assert got.length_B.tolist() == expected.length_B.tolist()
    assert got.finished_B.tolist() == expected.finished_B.tolist()
    for b, length in enumerate(expected.length_B):
        assert got.token_BT[b, :length].tolist() == expected.token_BT[b, :length].tolist()
        np.testing.assert_allclose(got.logp_BT[b, :length], expected.logp_BT[b, :length], atol=1e-5)


def written(decoder: Decoder, prompts: list[tuple[int, ...]], seeds: list[int], sampling: Sampling) -> Decoded:
    """All that was handed out, in the order of the requests; nothing twice."""
    jobs = [Job(prompt, sampling, seed, sampling.max_tokens) for prompt, seed in zip(prompts, seeds, strict=True)]
    return Decoded.of([each for _, several in turns(decoder, jobs) for each in several], jobs)


def turns(decoder: Decoder, jobs: list[Job]) -> Iterator[tuple[int, list[Written]]]:
    """How many jobs were begun, and what had ended, turn by turn."""
    begun, ended = 0, set[Job]()
    while begun < len(jobs) or decoder.busy:
        if begun < len(jobs):
            begun += decoder.admit(jobs[begun:])
        several = decoder.advance()
        assert not ended & {each.job for each in several}
        ended |= {each.job for each in several}
        yield begun, several
    assert ended == set(jobs)


@pytest.mark.parametrize("slots", [1, 7, 16, 1000])
def test_it_writes_what_plain_decoding_writes(tiny, planned, slots):
    prompts, seeds = requests()
    expected = decode(tiny.copy(torch.float32), prompts, seeds, SAMPLING, (END,))
    assert {1, SAMPLING.max_tokens} <= set(expected.length_B.tolist())
    decoder = ContinuousDecoder(planned, (END,), slots)
    for _ in range(2):  # the second time in memory that the first has written to
        assert_same(written(decoder, prompts, seeds, SAMPLING), expected)


@pytest.mark.parametrize("sampling", [Sampling(0.0, 12), Sampling(1.0, 12, 0.8)], ids=["greedy", "top_p"])
def test_greedy_and_truncated_sampling(tiny, planned, sampling):
    prompts, seeds = requests()
    expected = decode(tiny.copy(torch.float32), prompts, seeds, sampling, (END,))
    assert_same(written(ContinuousDecoder(planned, (END,), 16), prompts, seeds, sampling), expected)


def test_greedy_is_that_of_generate(tiny, planned):
    prompts, seeds = requests(8)
    got = written(ContinuousDecoder(planned, (END,), 16), prompts, seeds, Sampling(0.0, 12))
    module = tiny.copy(torch.float32).module
    for b, prompt in enumerate(prompts):
        whole = module.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=END, pad_token_id=END
        )
        assert whole[0, len(prompt) :].tolist() == got.token_BT[b, : got.length_B[b]].tolist()


def test_little_memory_takes_waves(tiny, planned, monkeypatch):
    prompts, seeds = requests(30)
    expected = decode(tiny.copy(torch.float32), prompts, seeds, SAMPLING, (END,))
    monkeypatch.setattr("solera.engines.pages.PAGE", 4)
    decoder = ContinuousDecoder(planned, (END,), 64)
    monkeypatch.setattr(decoder, "_room", lambda: 50)
    jobs = [Job(prompt, SAMPLING, seed, SAMPLING.max_tokens) for prompt, seed in zip(prompts, seeds, strict=True)]
    waves, ended = zip(*turns(decoder, jobs), strict=True)
    assert len(set(waves)) > 3
    assert_same(Decoded.of([each for several in ended for each in several], jobs), expected)
    assert decoder.pages is not None
    assert decoder.pages.nbytes <= 50 * bytes_per_token(planned)


def test_prompts_that_find_no_memory_are_computed_when_an_update_has_ended(tiny, planned, monkeypatch):
    """A learner holds the lock during its update. If memory is still full then, the requests fail."""
    prompts, seeds = requests()
    expected = written(ContinuousDecoder(planned, (END,), 64), prompts, seeds, SAMPLING)
    updating, refused, given = threading.Event(), list[bool](), ContinuousDecoder._pass

    def update() -> None:
        with RECORDING:
            updating.set()
            time.sleep(0.2)
        updating.clear()

    def full(self, *arguments) -> None:
        if updating.is_set() or len(refused) > 1:
            refused.append(updating.is_set())
            raise torch.OutOfMemoryError("full")
        given(self, *arguments)

    monkeypatch.setattr(ContinuousDecoder, "_pass", full)
    learner = threading.Thread(target=update)
    learner.start()
    updating.wait()
    assert_same(written(ContinuousDecoder(planned, (END,), 64), prompts, seeds, SAMPLING), expected)
    learner.join()
    assert refused == [True]
    refused.append(False)
    with pytest.raises(torch.OutOfMemoryError):
        written(ContinuousDecoder(planned, (END,), 64), prompts, seeds, SAMPLING)


def test_prompts_are_computed_in_parts(tiny, planned, monkeypatch):
    monkeypatch.setattr(continuous, "PREFILL_TOKENS", 5)
    prompts, seeds = requests()
    expected = decode(tiny.copy(torch.float32), prompts, seeds, SAMPLING, (END,))
    assert_same(written(ContinuousDecoder(planned, (END,), 64), prompts, seeds, SAMPLING), expected)


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

    def steps(self, memory, rows, kind, tokens) -> None:
        self.advanced += 1
        for _ in range(tokens):
            self.step(memory, rows, kind)


def test_a_short_request_finds_a_slot_while_long_ones_fill_the_table(planned):
    """300 requests for 256 slots, none of which ends before its 32 tokens: the proof of a sync would wait for that."""
    decoder = Late(planned, (VOCABULARY + 1,), 256)
    prompts, seeds = (each[:300] for each in requests(200))
    long, short = Sampling(temperature=1.0, max_tokens=32), Sampling(temperature=1.0, max_tokens=2)
    assert decoder.admit([Job(ids, long, seed, 32) for ids, seed in zip(prompts, seeds, strict=True)]) == 300
    assert decoder.advance() == []
    proof = [Job(prompts[0], short, 1, 2), Job(prompts[1], short, 2, 2)]
    assert decoder.admit(proof) == 2
    first = [decoder.advance() for _ in range(2)][1]
    assert {each.job for each in first} == set(proof)
    ended = [each for _ in range(40) if decoder.busy for each in decoder.advance()]
    assert len(ended) == 300


def test_requests_that_come_one_by_one_are_written_together(planned):
    """From a Ray actor or over HTTP, the first request comes alone. Those after it must not wait for its end."""
    decoder = Late(planned, (VOCABULARY + 1,), 128)
    prompts, seeds = (each[:100] for each in requests(60))
    jobs = [Job(ids, SAMPLING, seed, 12) for ids, seed in zip(prompts, seeds, strict=True)]
    assert [decoder.admit([job]) for job in jobs] == [1] * 100
    ended = [decoder.advance() for _ in range(4) if decoder.busy]
    assert sum(map(len, ended)) == 100
    assert_same(Decoded.of([each for several in ended for each in several], jobs),
                written(ContinuousDecoder(planned, (VOCABULARY + 1,), 128), prompts, seeds, SAMPLING))  # fmt: skip


@pytest.mark.parametrize(("slots", "chunk"), [(1, 1), (1, 5), (9, 2), (9, 50), (1000, 1), (1000, 5), (1000, 50)])
def test_what_ended_is_handed_out_once_though_the_host_learns_of_it_late(tiny, planned, monkeypatch, slots, chunk):
    monkeypatch.setattr("solera.engines.slots.CHUNK", chunk)
    prompts, seeds = requests()
    expected = decode(tiny.copy(torch.float32), prompts, seeds, SAMPLING, (END,))
    decoder = Late(planned, (END,), slots)
    for _ in range(2):
        assert_same(written(decoder, prompts, seeds, SAMPLING), expected)


def test_short_responses_are_handed_out_before_long_ones_are_written(planned, monkeypatch):
    monkeypatch.setattr("solera.engines.slots.CHUNK", 2)
    prompts, seeds = requests()
    decoder = Late(planned, (END,), 1000)
    moments = dict[int, list[int]]()
    jobs = [Job(prompt, SAMPLING, seed, SAMPLING.max_tokens) for prompt, seed in zip(prompts, seeds, strict=True)]
    for _, several in turns(decoder, jobs):
        for each in several:
            moments.setdefault(len(each.token_ids_T), []).append(decoder.advanced)
    assert (
        max(moments[1]) <= 3
    )  # ended in the first chunk, which is read after the second, and given while the third runs
    assert min(moments[12]) == decoder.advanced == 6


@pytest.mark.parametrize(("many", "chunks"), [(8, 6), (9, 3)])
def test_of_many_rows_the_host_asks_twice_as_often_which_have_ended(planned, monkeypatch, many, chunks):
    """Eight rows of twelve tokens, by fours or by twos."""
    monkeypatch.setattr("solera.engines.slots.CHUNK", 4)
    monkeypatch.setattr("solera.engines.slots.MANY", many)
    prompts, seeds = (each[:8] for each in requests())
    decoder = Late(planned, (VOCABULARY + 1,), 8)
    jobs = [Job(prompt, SAMPLING, seed, 12) for prompt, seed in zip(prompts, seeds, strict=True)]
    assert sum(len(several) for _, several in turns(decoder, jobs)) == 8
    assert decoder.advanced == chunks


def answered(engine: InProcessEngine, count: int, after) -> list:
    """`after` of each of several requests, in one event loop, as soon as each has its answer."""

    async def one(request):
        return await after(await engine.generate(*request))

    async def gather():
        return await asyncio.gather(*map(one, ragged_requests(count, 5, SAMPLING)), return_exceptions=True)

    return asyncio.run(gather())


@pytest.fixture
def late(planned, monkeypatch) -> InProcessEngine:
    monkeypatch.setattr("solera.engines.slots.CHUNK", 2)
    engine = InProcessEngine(planned, (END,), 1000, torch.float32, early=True)
    engine.decoder = Late(planned, (END,), 1000)
    return engine


def test_attempts_go_on_while_others_are_written_and_none_of_the_engines_settings_reach_them(late):
    late.compute = torch.bfloat16  # by autocast, in the engine's thread
    advance = late.decoder.advance

    def unhurried():
        time.sleep(0.02)  # the attempts, in another thread, get their turn
        return advance()

    late.decoder.advance = unhurried

    async def after(completion):
        return late.decoder.advanced, (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))

    moments, settings = zip(*answered(late, 12, after), strict=True)
    assert len(set(moments)) > 2
    assert set(settings) == {(True, False)}


def test_all_answers_come_together_unless_they_may_come_early(late):
    """A reward function of one's own is given all responses in one call, as it may compare them."""
    late.early = False

    async def after(completion):
        return late.decoder.advanced, len(completion.token_ids_T)

    moments, lengths = zip(*answered(late, 12, after), strict=True)
    assert len(set(moments)) == 1
    assert len(set(lengths)) > 5


@pytest.mark.parametrize("kind", ["plain", "continuous"])
def test_second_turns_begin_while_first_ones_are_still_written(tiny, late, monkeypatch, kind):
    """And none of them depends on when it began."""
    engine, joined = late, []
    if kind == "plain":
        engine = InProcessEngine(tiny.copy(torch.float32), (END,), 1000, torch.float32, early=True)
    first = ask(engine, ragged_requests(12, 5))
    expected = ask(engine, [((3, 4, *each.token_ids_T.tolist()), SAMPLING, 7) for each in first])
    admit = engine.decoder.admit

    def counting(jobs):
        beside = engine.decoder.busy
        joined.append(admit(jobs))
        return joined.pop() if not beside else joined[-1]

    async def again(completion):
        return await engine.generate((3, 4, *completion.token_ids_T.tolist()), SAMPLING, 7)

    monkeypatch.setattr(engine.decoder, "admit", counting)
    both = answered(engine, 12, again)
    assert sum(joined) > 30
    for got, wanted in zip(both, expected, strict=True):
        assert got.token_ids_T.tolist() == wanted.token_ids_T.tolist()
        np.testing.assert_allclose(got.behaviour_logp_T, wanted.behaviour_logp_T, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "continuous"])
def test_requests_of_several_temperatures_and_limits_are_each_served_as_if_alone(tiny, planned, kind):
    model = tiny.copy(torch.float32) if kind == "plain" else planned
    engine = InProcessEngine(model, (END,), 1000, torch.float32)
    samplings = [Sampling(1.3, 12), Sampling(0.7, 5), Sampling(0.0, 9), Sampling(1.3, 3)]
    asked = [(prompt, samplings[n % 4], seed) for n, (prompt, _, seed) in enumerate(ragged_requests(12, 5))]
    together = ask(engine, asked)
    for request, got in zip(asked, together, strict=True):
        (alone,) = ask(engine, [request])
        assert got.token_ids_T.tolist() == alone.token_ids_T.tolist()
        assert got.sampling == request[1]
        np.testing.assert_allclose(got.behaviour_logp_T, alone.behaviour_logp_T, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "rows", "chunk"),
    [*(("plain", rows, None) for rows in (1, 8, 1000)), *product(["continuous"], (1, 8, 1000), (1, 5))],
)
def test_a_response_ends_with_the_token_that_completes_a_stop_string(tiny, planned, monkeypatch, kind, rows, chunk):
    """Tokens are spelt as letters: token 4 is "e". What is written before the stop is what would be written without.
    One request in four has no stop strings."""
    if chunk is not None:
        monkeypatch.setattr("solera.engines.slots.CHUNK", chunk)
    model = tiny.copy(torch.float32) if kind == "plain" else planned

    def spell(ids):
        return "".join("abcdefghijklmnop"[i] for i in ids)

    engine = InProcessEngine(model, (END,), rows, torch.float32, spell=spell)
    asked = ragged_requests(12, 5)
    free = ask(engine, asked)
    stops = [("ee", "jd") if number % 4 else () for number in range(len(asked))]
    stopping = zip(asked, stops, strict=True)
    stopped = ask(engine, [(prompt, replace(SAMPLING, stop=stop), seed) for (prompt, _, seed), stop in stopping])
    cut = 0
    for whole, got, stop in zip(free, stopped, stops, strict=True):
        text = spell(whole.token_ids_T)
        ends = [text.index(each) + 2 for each in stop if each in text]
        length = min([*ends, len(text)])
        cut += length < len(text)
        assert got.token_ids_T.tolist() == whole.token_ids_T[:length].tolist()
        assert got.finish_reason == ("stop" if ends else whole.finish_reason)
    assert cut > 5


@pytest.mark.parametrize("chunk", [1, 4, 8])
def test_late_in_a_long_response_only_its_end_is_searched_for_stop_strings(planned, monkeypatch, chunk):
    """Three letters that occur first after 25 tokens. A stop string of three bytes may reach back 11 tokens."""
    monkeypatch.setattr("solera.engines.slots.CHUNK", chunk)
    searched, search = list[int](), slots.stop_at
    note = lambda ids, *given: searched.append(len(ids)) or search(ids, *given)  # noqa: E731
    monkeypatch.setattr(slots, "stop_at", note)

    def spell(ids):
        return "".join("abcdefghijklmnop"[i] for i in ids)

    engine = InProcessEngine(planned, (END,), 8, torch.float32, spell=spell)
    asked = [(prompt, replace(SAMPLING, max_tokens=60), seed) for prompt, _, seed in ragged_requests(12, 5)]
    stops = list[tuple[str, ...]]()
    for whole in ask(engine, asked):
        text = spell(whole.token_ids_T)
        late = [text[n : n + 3] for n in range(25, len(text) - 2) if text.index(text[n : n + 3]) == n]
        stops.append(tuple(late[:1]))
    stopping = zip(asked, stops, strict=True)
    stopped = ask(engine, [(prompt, replace(given, stop=stop), seed) for (prompt, given, seed), stop in stopping])
    for whole, got, stop in zip(ask(engine, asked), stopped, stops, strict=True):
        end = spell(whole.token_ids_T).index(stop[0]) + 3 if stop else len(whole.token_ids_T)
        assert got.token_ids_T.tolist() == whole.token_ids_T[:end].tolist()
        assert got.behaviour_logp_T.tolist() == pytest.approx(whole.behaviour_logp_T[:end].tolist(), abs=1e-5)
    assert sum(map(bool, stops)) > 5
    assert max(searched) == 11 + chunk


def test_an_error_in_the_middle_reaches_those_who_still_wait(late, monkeypatch):
    step = late.decoder.step

    def broken(*given):
        if late.decoder.advanced > 4:
            raise MemoryError("full")
        step(*given)

    async def after(completion):
        return completion

    monkeypatch.setattr(late.decoder, "step", broken)
    outcomes = answered(late, 12, after)
    failed = [outcome for outcome in outcomes if isinstance(outcome, MemoryError)]
    assert 0 < len(failed) < 60
    assert all(len(outcome.token_ids_T) <= 8 for outcome in outcomes if outcome not in failed)


def test_whoever_gives_up_stops_the_writing_and_the_engine_goes_on_later(late, monkeypatch):
    """The first attempt fails while others are still written, and some wait for a second turn already."""
    monkeypatch.setattr("solera.engines.slots.CHUNK", 1)
    asked = ragged_requests(12, 5)
    expected = ask(late, asked)
    chunks, late.decoder.advanced = late.decoder.advanced, 0

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
    assert late.decoder.advanced < chunks
    for got, wanted in zip(ask(late, asked), expected, strict=True):
        assert got.token_ids_T.tolist() == wanted.token_ids_T.tolist()
        assert got.behaviour_logp_T.tolist() == wanted.behaviour_logp_T.tolist()


def test_memory_made_for_one_batch_holds_the_next_with_longer_prompts(planned):
    prompts, seeds = requests()
    decoder = ContinuousDecoder(planned, (END,), 16)
    written(decoder, prompts, seeds, SAMPLING)
    memory = decoder.memory
    longer = [(3, *prompt) for prompt in prompts]
    assert sum(map(len, set(longer))) < 1.5 * sum(map(len, set(prompts)))
    written(decoder, longer, seeds, SAMPLING)
    assert decoder.memory is memory


def test_few_sizes_of_graphs():
    sizes = sorted({bucket(rows) for rows in range(1, 1025)})
    assert sizes == [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert all(bucket(rows) >= rows for rows in range(1, 1025))
    assert bucket(100, most=100) == 100


@pytest.mark.parametrize("room", [2000, 700, 450])
def test_where_memory_is_short_one_memory_serves_all_batches(planned, monkeypatch, room):
    """Every batch has prompts of other lengths. Longer responses need other tables, but no other pages."""
    monkeypatch.setattr("solera.engines.pages.PAGE", 4)
    monkeypatch.setattr(Late, "_room", lambda decoder: room)
    decoder, rng, used = Late(planned, (END,), 64), np.random.default_rng(0), set()
    for batch in range(8):
        prompts = [tuple(rng.integers(2, 11, int(rng.integers(3, 12))).tolist()) for _ in range(16)] * 4
        written(decoder, prompts, range(batch, batch + 64), Sampling(1.0, 12))
        used.add((decoder.memory, decoder.pages))
    assert len(used) == 1
    written(decoder, [(2, 3)] * 64, range(64), Sampling(1.0, 24))
    ((memory, pages),) = used
    assert decoder.memory is not memory
    assert decoder.pages is pages
