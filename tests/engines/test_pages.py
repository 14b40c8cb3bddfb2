"""Pages of keys and values: taken as responses grow, given back as they end, and never too few for all to end."""

import asyncio
import itertools

import numpy as np
import pytest
import torch

from solera.engines.continuous import ContinuousDecoder
from solera.engines.decoding import Decoded, decode
from solera.engines.in_process import InProcessEngine
from solera.engines.jobs import Job
from solera.engines.pages import NOBODY, Pages, bytes_per_token
from solera.engines.slots import Rows
from solera.errors import SoleraError
from solera.models.language_model import LanguageModel
from solera.records import Completion, Sampling
from tests.conftest import END, VOCABULARY
from tests.engines.test_continuous import Late, assert_same, planned, requests, turns, written
from tests.engines.test_in_flight import (
    LONG as LONG_IN_FLIGHT,
)
from tests.engines.test_in_flight import (
    VERSIONS,
    assert_each_span_is_of_its_version,
    slowly,
    some_versions,
    written_across_versions,
)

__all__ = ["planned"]
LONG = Sampling(temperature=1.3, max_tokens=60)


@pytest.fixture
def small(monkeypatch) -> None:
    """Pages of four tokens, in segments of a few pages."""
    monkeypatch.setattr("solera.engines.pages.PAGE", 4)


def test_no_two_pages_share_memory_in_any_layer(planned, small):
    """Every number in every page is written to; then each page still has its own."""
    pages = Pages(planned, room=4 * 200)
    taken = pages.take(190)
    assert len({*taken, NOBODY}) == 191
    for layer, kind in itertools.product(range(len(pages.pools)), range(2)):
        for page in (*taken, NOBODY):
            pages.pools[layer][kind][page] = 1000.0 * page + 10 * layer + kind
    for layer, kind in itertools.product(range(len(pages.pools)), range(2)):
        for page in (*taken, NOBODY):
            assert (pages.pools[layer][kind][page] == 1000.0 * page + 10 * layer + kind).all()


def test_memory_follows_what_is_taken(planned, small):
    pages = Pages(planned, room=4 * 320)
    at_rest, page = pages.nbytes, 4 * bytes_per_token(planned)
    assert at_rest <= 20 * page
    first, second = pages.take(100), pages.take(150)
    assert 250 * page <= pages.nbytes <= 271 * page
    assert not pages.can_take(100)
    pages.give(second)
    assert pages.nbytes <= 120 * page
    pages.reserve(200)
    pages.give(first)
    assert 200 * page <= pages.nbytes <= 221 * page
    pages.reset()
    assert (pages.nbytes, pages.taken) == (at_rest, 0)
    assert len(set(pages.take(300))) == 300


def test_pages_that_are_kept_stay(planned, small):
    pages = Pages(planned, room=4 * 320, kept=True)
    taken = pages.take(250)
    most = pages.nbytes
    pages.give(taken)
    pages.reset()
    assert pages.nbytes == most


def test_pages_that_are_kept_may_be_used_when_a_learner_has_taken_the_rest(planned, small):
    """Ten tokens have room beside it."""
    kept, given_back = (Pages(planned, room=4 * 320, kept=kept) for kept in (True, False))
    for pages in (kept, given_back):
        pages.give(pages.take(250))
        pages.allow(10)
    assert kept.most == kept.total >= 250
    assert given_back.most < 20


@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
@pytest.mark.parametrize("slots", [7, 1000])
@pytest.mark.parametrize("decoder", [ContinuousDecoder, Late])
def test_what_is_written_does_not_depend_on_the_size_of_pages(planned, monkeypatch, decoder, slots, tokens):
    """Bit for bit: with 1,024 tokens a page, every text lies in one piece."""
    prompts, seeds = requests()
    results = []
    for size in (1024, tokens):
        monkeypatch.setattr("solera.engines.pages.PAGE", size)
        results.append(written(decoder(planned, (END,), slots), prompts, seeds, LONG))
    whole, paged = results
    assert whole.length_B.max() == 60
    assert paged.length_B.tolist() == whole.length_B.tolist()
    assert np.array_equal(paged.token_BT, whole.token_BT)
    assert np.array_equal(paged.logp_BT, whole.logp_BT)


class Watched(Late):
    """Notes how many rows are under way, and how many bytes and pages they take, chunk by chunk."""

    room = 1_000_000

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.seen = list[tuple[int, int, int]]()

    def _room(self) -> int:
        return self.room

    def steps(self, memory, rows, kind, tokens) -> None:
        assert self.rows is not None
        self.seen.append((self.rows.taken, self.pages.nbytes, self.pages.taken))
        super().steps(memory, rows, kind, tokens)


@pytest.fixture
def gave_way(monkeypatch) -> list[Job]:
    """The jobs whose rows gave way."""
    noted, give_way = [], Rows._give_way

    def noting(rows, slot):
        noted.append(rows.seats[slot].job)
        give_way(rows, slot)

    monkeypatch.setattr(Rows, "_give_way", noting)
    return noted


def jobs_of(sampling: Sampling, count: int = 100) -> list[Job]:
    prompts, seeds = requests(60)
    return [
        Job(prompt, sampling, seed, sampling.max_tokens)
        for prompt, seed in zip(prompts[:count], seeds[:count], strict=True)
    ]


def all_written(decoder: ContinuousDecoder, jobs: list[Job]) -> Decoded:
    return Decoded.of([each for _, several in turns(decoder, jobs) for each in several], jobs)


@pytest.mark.parametrize("chunk", [1, 8])
def test_when_memory_is_short_rows_wait_and_more_run_than_could_be_reserved(
    tiny, planned, small, gave_way, monkeypatch, chunk
):
    """100 responses in memory that would hold a few of the full length. They are those of plain decoding."""
    monkeypatch.setattr("solera.engines.slots.CHUNK", chunk)
    jobs = jobs_of(LONG)
    prompts = sum(-(-(len(prompt) - 1) // 4) * 4 for prompt in {job.token_ids for job in jobs})
    expected = decode(
        tiny.copy(torch.float32), [job.token_ids for job in jobs], [job.seed for job in jobs], LONG, (END,)
    )
    assert expected.length_B.mean() < 60 / 2.5
    decoder = Watched(planned, (END,), 200)
    decoder.room = 3 * prompts
    assert_same(all_written(decoder, jobs), expected)
    rows, memory, _ = zip(*decoder.seen, strict=True)
    assert 4 <= 2 * prompts // 60 <= 10
    assert max(rows) > 1.5 * (2 * prompts // 60)
    assert max(memory) <= decoder.room * bytes_per_token(planned)


def test_a_row_that_gave_way_writes_the_same_again(tiny, planned, small, gave_way):
    """After many short responses, long ones: more rows begin than can go on together."""
    decoder = Watched(planned, (END,), 200)
    short = jobs_of(Sampling(1.3, 9))
    all_written(decoder, short)
    decoder._room = lambda: 4 * 256
    decoder.pages = None
    decoder.ends = torch.tensor([VOCABULARY + 1])  # nothing ends early now
    jobs = jobs_of(LONG, 60)
    begun = decoder.sampled
    got = all_written(decoder, jobs)
    expected = decode(
        tiny.copy(torch.float32),
        [job.token_ids for job in jobs],
        [job.seed for job in jobs],
        LONG,
        (VOCABULARY + 1,),
    )
    assert set(gave_way)
    assert_same(got, expected)
    assert decoder.sampled - begun > 60 * 60  # what was written twice counts twice


def test_a_large_table_with_memory_for_few_rows_goes_on(planned, small):
    """No slot is kept free for short requests where slots are not what is short."""
    decoder = Watched(planned, (END,), 256)
    decoder.room = 4 * 64
    jobs = [Job((2, 3 + n % 3), LONG, n, 60) for n in range(300)]
    assert decoder.admit(jobs) == 300
    ended = [each for _ in range(3000) if decoder.busy for each in decoder.advance()]
    assert len(ended) == 300
    assert decoder.memory.slots == 256


def test_one_response_that_does_not_fit_is_refused(planned, small):
    decoder = Watched(planned, (END,), 8)
    decoder.room = 4 * 12
    with pytest.raises(SoleraError, match="does not hold the keys and values of one response of 60 tokens"):
        decoder.admit(jobs_of(LONG, 1))


def test_memory_falls_as_rows_end_and_little_is_left_between_batches(planned, small):
    decoder = Watched(planned, (END,), 200)
    decoder.room = 4 * 4000
    all_written(decoder, jobs_of(Sampling(1.3, 100)))
    rows, memory, taken = zip(*decoder.seen, strict=True)
    assert rows[0] == 100
    assert taken[-1] < max(taken) / 2
    assert decoder.pages.taken == 0
    assert decoder.pages.nbytes <= decoder.room * bytes_per_token(planned) / 16 < max(memory) / 2


def test_an_engine_beside_a_learner_keeps_what_it_took(planned, small):
    decoder = Watched(planned, (END,), 200)
    decoder.keeps_memory = True
    decoder.room = 4 * 2000
    all_written(decoder, jobs_of(LONG))
    assert len({memory for _, memory, _ in decoder.seen}) == 1
    assert decoder.pages.nbytes == decoder.seen[0][1]


@pytest.mark.parametrize("room", [4 * 400, 4 * 48])
def test_weights_in_flight_while_memory_is_short(tiny, small, gave_way, room):
    """A row that gives way begins again with the weights of then: each token still belongs to who wrote it."""
    versions = some_versions(tiny)
    model = versions[0].copy(torch.float32).with_plans()
    engine = slowly(InProcessEngine(model, (END,), 64, torch.float32, early=True))
    engine.decoder._room = lambda: room
    engine.decoder.lengths += [1] * 1000  # it expects short ones
    crossed = written_across_versions(engine, versions, "keep")
    assert_each_span_is_of_its_version(crossed, versions)
    assert sum(len(completion.versions) > 1 for _, completion in crossed) >= 5
    assert bool(gave_way) == (room < 4 * 100)
    assert len(versions) == VERSIONS


def test_a_short_request_that_finds_no_memory_waits(planned, small, monkeypatch):
    """And whoever asks for more than fits beside the others waits until they have ended."""
    engine = InProcessEngine(planned, (END,), 64, torch.float32, early=True)
    engine.decoder._room = lambda: 4 * 64

    async def ask():
        first = [asyncio.ensure_future(engine.generate((2, 3 + n % 5), LONG, n)) for n in range(40)]
        await asyncio.sleep(0.01)
        second = [asyncio.ensure_future(engine.generate((4,) * (1 + 3 * n), Sampling(1.3, 4), n)) for n in range(40)]
        return await asyncio.gather(*first, *second)

    completions = asyncio.run(ask())
    assert len(completions) == 80
    assert all(len(completion.token_ids_T) for completion in completions)


def test_a_model_whose_layers_differ_has_pages_of_the_largest(planned, small, monkeypatch):
    shapes = [(2, 8), (1, 4)]
    monkeypatch.setattr(LanguageModel, "key_value_shapes", property(lambda model: shapes))
    pages = Pages(planned, room=400)
    assert [tuple(key.shape[1:]) for key, _ in pages.pools] == [(4, 2, 8), (4, 1, 4)]
    taken = pages.take(60)
    for layer, (key, value) in enumerate(pages.pools):
        for page in taken:
            key[page], value[page] = 2.0 * page + 500 * layer, 2.0 * page + 500 * layer + 1
    for layer, (key, value) in enumerate(pages.pools):
        for page in taken:
            assert (key[page] == 2.0 * page + 500 * layer).all()
            assert (value[page] == 2.0 * page + 500 * layer + 1).all()


@pytest.fixture
def parts(monkeypatch) -> list[tuple[int, int, bool]]:
    """Parts of six tokens. How many tokens were computed behind how many, and whether they follow a prompt, pass by
    pass."""
    monkeypatch.setattr("solera.engines.prompts.PART", 6)
    noted, fill_part = [], ContinuousDecoder.fill_part

    def noting(decoder, part, turn, shared):
        noted.append((shared, len(part.token_ids), shared >= turn))
        fill_part(decoder, part, turn, shared)

    monkeypatch.setattr(ContinuousDecoder, "fill_part", noting)
    return noted


def with_long_prompts(sampling: Sampling) -> list[Job]:
    """Prompts of 1 to 40 tokens, two jobs each."""
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(2, VOCABULARY, length).tolist()) for length in range(1, 41)]
    return [Job(prompt, sampling, 2 * p + g, sampling.max_tokens) for p, prompt in enumerate(prompts) for g in range(2)]


@pytest.mark.parametrize("tokens", [4, 16, 64])
@pytest.mark.parametrize("slots", [8, 1000])
def test_prompts_in_parts_give_what_whole_prompts_give(tiny, planned, monkeypatch, parts, slots, tokens):
    monkeypatch.setattr("solera.engines.pages.PAGE", tokens)
    jobs = with_long_prompts(Sampling(1.3, 20))
    texts, seeds = [job.token_ids for job in jobs], [job.seed for job in jobs]
    expected = decode(tiny.copy(torch.float32), texts, seeds, Sampling(1.3, 20), (END,))
    for decoder in (ContinuousDecoder(planned, (END,), slots), Late(planned, (END,), slots)):
        assert_same(all_written(decoder, jobs), expected)
        # Of a prompt of n tokens, n - 1 are computed, each once; those of up to six in one piece.
        assert decoder.prefilled == sum(range(40))
    assert parts.count((0, 6, False)) == 2 * 33
    assert parts.count((36, 3, False)) == 2


def test_rows_go_on_while_a_long_prompt_is_computed(planned, parts, monkeypatch):
    """One part between two chunks. What was asked for with it, and what is asked for later, does not wait for it."""
    monkeypatch.setattr("solera.engines.slots.CHUNK", 2)
    decoder = Late(planned, (VOCABULARY + 1,), 64)
    sampling = Sampling(1.3, 40)
    long = Job(tuple(2 + n % 8 for n in range(61)), sampling, 1, 40)
    others = [Job((3, 4 + n), sampling, n, 40) for n in range(4)]
    assert decoder.admit([long, *others]) == 5
    assert parts == []
    for turn in range(1, 10):
        decoder.advance()
        assert (decoder.advanced, len(parts)) == (turn, turn)
        assert decoder.rows.taken == 4 + (turn > 4)
        if turn == 4:
            assert decoder.admit([Job((5, 6, 7), sampling, 9, 40)]) == 1
            assert decoder.rows.taken == 5
    decoder.advance()
    assert decoder.rows.taken == 6
    ended = [each for _ in range(60) if decoder.busy for each in decoder.advance()]
    assert len(ended) == 6
    assert parts == [(first, 6, False) for first in range(0, 60, 6)]


def test_a_long_prompt_that_nobody_wants_any_more_is_not_computed(planned, parts):
    decoder = Late(planned, (END,), 64)
    long = [Job(tuple(2 + n % 8 for n in range(61)), LONG, seed, 60) for seed in range(2)]
    decoder.admit([*long, Job((3, 4), LONG, 5, 60)])
    decoder.advance()
    for job in long:
        job.cancelled = True
    decoder.drop_cancelled()
    while decoder.busy:
        assert {each.job for each in decoder.advance()}.isdisjoint(long)
    assert len(parts) == 1
    assert decoder.pages.taken == 0


@pytest.mark.parametrize("decoder_type", [ContinuousDecoder, Late])
def test_weights_in_flight_while_long_prompts_are_computed(tiny, parts, monkeypatch, decoder_type):
    """What was computed with the weights before is computed again: prompts in parts, and responses behind them."""
    monkeypatch.setattr("solera.engines.slots.CHUNK", 2)
    versions = some_versions(tiny)
    model = versions[0].copy(torch.float32).with_plans()
    decoder = decoder_type(model, (VOCABULARY + 1,), 64)
    sampling = Sampling(LONG_IN_FLIGHT.temperature, 40)
    prompts = [tuple(2 + (n * seed) % 8 for n in range(3 + 11 * seed)) for seed in range(6)]
    jobs = [Job(prompt, sampling, seed, 40) for seed, prompt in enumerate(prompts * 2)]
    assert decoder.admit(jobs) == 12
    ended, behind = [], []
    for version, turns_of_it in enumerate((6, 7, 3, 1000)):
        if version:
            with torch.no_grad():
                for own, new in zip(model.parameters().values(), versions[version].parameters().values(), strict=True):
                    own.copy_(new)
            before = len(parts)
            for job, tokens in decoder.recompute().items():
                if tokens:
                    job.earlier.append((tokens, version - 1))
            behind.append(sum(after_prompt for *_, after_prompt in parts[before:]))
        for _ in range(turns_of_it):
            ended += decoder.advance() if decoder.busy else []
    crossed = [
        (job.token_ids, Completion(tokens_T, logp_T, job.versions(40, VERSIONS - 1), "length", "run", sampling))
        for job, tokens_T, logp_T, _ in ended
    ]
    assert_each_span_is_of_its_version(crossed, versions)
    assert len(crossed) == 12
    assert {len(completion.versions) for _, completion in crossed} == {1, 3, 4}
    assert min(behind) > 0
