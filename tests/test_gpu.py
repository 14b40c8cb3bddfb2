"""What only an accelerator can show. Run with `pytest -m gpu`; the results are in benchmarks/RESULTS.md."""

import asyncio
import copy
import dataclasses
import gc
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from solera.cluster.actors import Actors
from solera.cluster.engines import ActorPool, EngineSpec
from solera.config import LearnConfig, LoraConfig, ObjectiveConfig, parse
from solera.engines import messages
from solera.engines.continuous import ContinuousDecoder
from solera.engines.decoding import Decoded, decode
from solera.engines.in_process import InProcessEngine
from solera.engines.jobs import Job
from solera.engines.pages import bytes_per_token
from solera.engines.prefill import Pass as PromptPass
from solera.engines.prompts import Group as PromptGroup
from solera.engines.prompts import Stretch
from solera.engines.slots import Rows
from solera.errors import SoleraError
from solera.learner.compute_weights import ComputeWeights
from solera.learner.graphs import FIRST_USES, MOST_PLACES, Pass, RecordedBody
from solera.learner.head import ScoredHead
from solera.learner.learner import Learner
from solera.learner.optimisers import LeanAdamW
from solera.models import loading
from solera.models.attention import PackedTexts, Text
from solera.models.digest import BLOCK, describe
from solera.models.language_model import LanguageModel
from solera.models.lookup import sums_in_order
from solera.models.memory import free_bytes, limited, recording
from solera.objectives.table import resolve
from solera.protocols import Weights
from solera.records import Completion, Group, Reward, Rollout, Sampling, Sequence
from solera.run import running
from solera.run.running import Result
from solera.sharded.learner import ShardedLearner
from solera.sharded.processes import Processes
from solera.sharded.rank import GroupPeers, LearnerSpec, Rank, Seat, make_rank
from solera.sharded.ranks import Ranks
from solera.streams import uniforms
from solera.training.collation import collate
from tests.cluster.ranks import embedded, float32_llama, noting_rank, spec_of
from tests.conftest import VOCABULARY
from tests.engines.test_continuous import SAMPLING, requests, turns, written
from tests.engines.test_continuous import assert_same as assert_written
from tests.engines.test_in_flight import (
    LONG,
    assert_each_span_is_of_its_version,
    slowly,
    some_versions,
    written_across_versions,
)
from tests.engines.test_in_process import ask, fresh_logp, ragged_requests
from tests.learner.test_invariance import assert_same, gradient, make_groups, make_learner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
END = 1


def on_gpu(model: LanguageModel, dtype: torch.dtype) -> LanguageModel:
    copy = model.copy(dtype)
    return LanguageModel(copy.module.to("cuda"))


def test_behaviour_logp_in_float32_is_that_of_a_fresh_forward_pass(tiny):
    engine = InProcessEngine(on_gpu(tiny, torch.float32), (END,), 64, torch.float32)
    cpu = tiny.copy(torch.float32)
    requests = ragged_requests(30, 6)
    for (prompt, sampling, _), completion in zip(requests, ask(engine, requests), strict=True):
        assert (
            np.abs(completion.behaviour_logp_T - fresh_logp(cpu, prompt, completion, sampling.temperature)).max() < 1e-4
        )


def test_behaviour_logp_in_bfloat16_is_close(tiny):
    engine = InProcessEngine(on_gpu(tiny, torch.bfloat16), (END,), 64, torch.bfloat16)
    cpu = tiny.copy(torch.bfloat16).copy(torch.float32)
    differences = []
    requests = ragged_requests(60, 6)
    for (prompt, sampling, _), completion in zip(requests, ask(engine, requests), strict=True):
        differences += list(completion.behaviour_logp_T - fresh_logp(cpu, prompt, completion, sampling.temperature))
    assert np.abs(differences).mean() < 0.02


@pytest.mark.parametrize("cut", [{}, {"pack_tokens": 0}, {"micro_batch_tokens": 30}, {"logit_chunk": 3}], ids=str)
def test_the_gradient_is_that_of_the_cpu(tiny, cut):
    expected = gradient(tiny, make_groups())
    moved = LanguageModel(tiny.copy(torch.float64).module.to("cuda").requires_grad_(True))
    assert_same(gradient(moved, make_groups(), **cut).cpu(), expected)


def planned(model: LanguageModel, dtype: torch.dtype) -> LanguageModel:
    return on_gpu(model, dtype).with_plans()


@pytest.mark.parametrize("slots", [8, 200])
@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(0.0, 12), Sampling(1.0, 12, 0.8)], ids=str)
def test_graphs_write_what_plain_decoding_on_the_cpu_writes(tiny, slots, sampling):
    prompts, seeds = requests()
    expected = decode(tiny.copy(torch.float32), prompts, seeds, sampling, (END,))
    decoder = ContinuousDecoder(planned(tiny, torch.float32), (END,), slots, compiled=False)
    for _ in range(2):
        assert_written(written(decoder, prompts, seeds, sampling), expected)


def test_a_graph_serves_responses_of_any_length(tiny):
    """A canary of two tokens between two batches records nothing."""
    prompts, seeds = requests()
    decoder = ContinuousDecoder(planned(tiny, torch.float32), (END,), 200, compiled=False)
    written(decoder, prompts, seeds, SAMPLING)
    recorded = dict(decoder._graphs)
    short = Sampling(SAMPLING.temperature, 2)
    expected = decode(tiny.copy(torch.float32), prompts, seeds, short, (END,))
    assert_written(written(decoder, prompts, seeds, short), expected)
    assert decoder._graphs == recorded


@pytest.fixture
def small_pages(monkeypatch):
    """64 tokens a page."""
    monkeypatch.setattr("solera.engines.pages.PAGE", 64)


class Watched(ContinuousDecoder):
    """Has memory for `room` tokens. Notes how many rows are under way, and how many bytes are allocated."""

    room = 64 * 4000

    def __init__(self, *given, **options) -> None:
        super().__init__(*given, **options)
        self.seen = list[tuple[int, int]]()

    def _room(self) -> int:
        return self.room

    def steps(self, memory, rows, kind, tokens) -> None:
        self.seen.append((self.rows.taken, torch.cuda.memory_allocated()))
        super().steps(memory, rows, kind, tokens)


def with_long_context(model: LanguageModel) -> LanguageModel:
    model.module.config.max_position_embeddings = model.max_length = 4096
    return model


def many_jobs(count: int, sampling: Sampling) -> list[Job]:
    """Prompts of up to 150 tokens, each for four jobs."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(2, 11, int(rng.integers(1, 150))).tolist()) for _ in range(-(-count // 4))]
    return [Job(prompts[n // 4], sampling, n, sampling.max_tokens) for n in range(count)]


def all_written(decoder: ContinuousDecoder, jobs: list[Job]) -> Decoded:
    return Decoded.of([each for _, several in turns(decoder, jobs) for each in several], jobs)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("compute", [torch.float16, torch.float32], ids=str)
def test_keys_and_values_in_pages_give_the_bits_of_those_in_one_piece(tiny, monkeypatch, compute, compiled):
    """With 1,024 tokens a page, every text lies in one page. Pages lie in many segments. Nothing ends early."""
    model, results = planned(with_long_context(tiny), compute), []
    for tokens in (1024, 128):
        monkeypatch.setattr("solera.engines.pages.PAGE", tokens)
        monkeypatch.setattr("solera.engines.pages.SEGMENT", 8 * tokens * bytes_per_token(model))
        decoder = Watched(model, (VOCABULARY + 1,), 256, compiled=compiled)
        decoder.room = 1024 * 1000
        results.append(all_written(decoder, many_jobs(200, Sampling(1.3, 300))))
    whole, paged = results
    assert np.array_equal(whole.token_BT, paged.token_BT)
    assert np.array_equal(whole.logp_BT, paged.logp_BT)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("pages", [4000, 110])
def test_responses_of_many_pages_are_those_of_the_cpu(tiny, pages, compiled, monkeypatch):
    """With memory for 110 pages rows give way and begin again. The decoder expects short responses, so it begins with
    too many; none ends early."""
    jobs = many_jobs(80, Sampling(1.3, 150))
    texts, seeds = [job.token_ids for job in jobs], [job.seed for job in jobs]
    with_long_context(tiny)
    expected = decode(tiny.copy(torch.float32), texts, seeds, jobs[0].sampling, (VOCABULARY + 1,))
    decoder = Watched(planned(tiny, torch.float32), (VOCABULARY + 1,), 256, compiled=compiled)
    decoder.room = 64 * pages
    decoder.lengths += [1] * 1000
    gave_way, give_way = [], Rows._give_way
    monkeypatch.setattr(Rows, "_give_way", lambda rows, slot: gave_way.append(slot) or give_way(rows, slot))
    for _ in range(2):
        assert_written(all_written(decoder, jobs), expected)
    assert bool(gave_way) == (pages == 110)


@pytest.mark.parametrize("compiled", [False, True])
def test_long_prompts_in_parts_give_what_the_cpu_gives(tiny, monkeypatch, compiled):
    """Parts of 100 tokens beside rows that are written; prompts of up to 640."""
    monkeypatch.setattr("solera.engines.prompts.PART", 100)
    with_long_context(tiny)
    rng, sampling = np.random.default_rng(0), Sampling(1.3, 30)
    prompts = [tuple(rng.integers(2, 11, length).tolist()) for length in (1, 64, 100, 101, 102, 165, 193, 400, 640)]
    jobs = [Job(prompt, sampling, 2 * p + g, 30) for p, prompt in enumerate(prompts) for g in range(2)]
    texts, seeds = [job.token_ids for job in jobs], [job.seed for job in jobs]
    expected = decode(tiny.copy(torch.float32), texts, seeds, sampling, (VOCABULARY + 1,))
    decoder = Watched(planned(tiny, torch.float32), (VOCABULARY + 1,), 64, compiled=compiled)
    for _ in range(2):
        decoder.seen.clear()
        assert_written(all_written(decoder, jobs), expected)
        rows, _ = zip(*decoder.seen, strict=True)
        assert rows[0] == 8 < max(rows)  # the first four prompts are short


@pytest.mark.parametrize("compute", [torch.float16, torch.bfloat16], ids=str)
def test_a_long_prompt_in_parts_is_as_exact_as_in_one_piece(tiny, monkeypatch, compute):
    """Log-probabilities of tokens after 3,000 others, against a float32 pass: with parts of 256 and in one."""
    with_long_context(tiny)
    prompt = tuple(np.random.default_rng(0).integers(2, 11, 3000).tolist())
    cpu, errors = tiny.copy(compute).copy(torch.float32), []
    for part in (10_000, 256):
        monkeypatch.setattr("solera.engines.prompts.PART", part)
        model = with_long_context(on_gpu(tiny, torch.float32))
        model.can_take_plans = True
        engine = InProcessEngine(model.for_compute(compute, copied=True), (VOCABULARY + 1,), 8, compute)
        wanted = [(prompt, Sampling(1.0, 20), seed) for seed in range(8)]
        errors.append(
            np.mean([np.abs(got.behaviour_logp_T - fresh_logp(cpu, prompt, got, 1.0)) for got in ask(engine, wanted)])
        )
    print(f"{compute}: mean error in one piece {errors[0]:.5f}, in parts {errors[1]:.5f}")
    assert errors[1] < max(1.5 * errors[0], 1e-3)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_host_does_not_wait_for_the_gpu_to_admit_prompts_and_to_read_what_ended(tiny, monkeypatch, compiled):
    """torch warns where a copy or a value would wait for all work. Waiting for one event is allowed."""
    monkeypatch.setattr("solera.engines.prefill.USES", 1)
    decoder = Watched(planned(with_long_context(tiny), torch.float16), (END,), 256, compiled=compiled)
    jobs = many_jobs(480, Sampling(1.3, 300))
    all_written(decoder, jobs)  # compiles, and records graphs
    for first in (160, 200, 300):
        all_written(decoder, jobs[first : first + 40])  # and those of prompts
    assert decoder.admit(jobs[:160]) == 160
    ended = decoder.advance()
    recorded = set(decoder.prefill_graphs.graphs) if decoder.prefill_graphs else set()
    assert bool(recorded) == compiled
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waited:
            warnings.simplefilter("always")
            for first in (160, 200, 300):
                assert decoder.admit(jobs[first : first + 40]) == 40
                for _ in range(3):
                    ended += decoder.advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {f"{each.filename}:{each.lineno}" for each in waited if "synchroniz" in str(each.message)} == set()
    assert len(ended) > 40
    assert not compiled or set(decoder.prefill_graphs.graphs) == recorded


def filling(model: LanguageModel) -> Watched:
    """A decoder whose pages are there. Their first segment is in one piece."""
    decoder = Watched(model, (END,), 64, compiled=True)
    decoder.room = 128 * 16 * 200
    decoder._prepare_pages()
    return decoder


def groups_of(decoder: Watched, lengths: list[tuple[int, list[int]]], seed: int = 0) -> list[PromptGroup]:
    """Prompts of these lengths, and responses to each."""
    rng, pages = np.random.default_rng(seed), decoder.pages

    def drawn(length: int) -> Stretch:
        return Stretch(rng.integers(2, 11, length), pages.take(pages.count(length)))

    return [(drawn(prompt), [drawn(response) for response in responses]) for prompt, responses in lengths]


@torch.no_grad()
def kept(decoder: Watched, groups: list[PromptGroup]) -> torch.Tensor:
    """The keys and values of these texts, after they were computed: `[2 · layers, N, heads, D]`."""
    for pools in decoder.pages.pools:
        for pool in pools:
            pool.zero_()
    decoder.fill(groups)
    page_N, at_N = torch.from_numpy(PromptPass.of(groups, decoder.pages.tokens).line_4N[2:]).cuda()
    assert page_N.min() > 0 and page_N.max() < len(decoder.pages.pools[0][0])
    return torch.stack([pool[page_N, at_N] for pools in decoder.pages.pools for pool in pools])


@torch.no_grad()
def kept_without_graphs(decoder: Watched, groups: list[PromptGroup]) -> torch.Tensor:
    graphs, decoder.prefill_graphs = decoder.prefill_graphs, None
    try:
        return kept(decoder, groups)
    finally:
        decoder.prefill_graphs = graphs


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


LENGTHS: dict[int, list[tuple[int, list[int]]]] = {
    256: [(90, []), (1, [4]), (0, [7])],
    384: [(150, [60, 40]), (61, [9])],
    1536: [(100 + n, []) for n in range(12)],
    2048: [(200, [30 + n for n in range(20)]), (700, [])],
}
"""Texts that make a padded pass of so many tokens. The third is 1,266 tokens, the last 1,690."""


def wide_or_short(tiny: LanguageModel, compute: torch.dtype) -> LanguageModel:
    model = on_gpu(tiny, torch.float32)
    model.can_take_plans = True
    return with_long_context(model).for_compute(compute, copied=True)


@pytest.mark.parametrize("compute", [torch.float16, torch.bfloat16], ids=str)
def test_a_pass_has_the_same_bits_before_its_graph_is_recorded_and_after(tiny, compute):
    """And those of a pass without padding, but for rounding. The second texts of a size are computed by a graph that
    was recorded with the first."""
    decoder = filling(wide_or_short(tiny, compute))
    for size, lengths in LENGTHS.items():
        groups = groups_of(decoder, lengths)
        several = [kept(decoder, groups) for _ in range(6)]
        assert decoder.prefill_graphs.uses[size] == 6
        assert size in decoder.prefill_graphs.graphs
        assert all(torch.equal(several[0], each) for each in several)
        assert error(several[0], kept_without_graphs(decoder, groups)) < 4 * torch.finfo(compute).eps
        others = groups_of(decoder, lengths[::-1], seed=1)
        again = kept(decoder, others)
        assert decoder.prefill_graphs.uses[size] == 7
        assert error(again, kept_without_graphs(decoder, others)) < 4 * torch.finfo(compute).eps
        decoder.reset()
    assert set(decoder.prefill_graphs.graphs) == set(LENGTHS)


def test_a_graph_of_prompts_computes_with_weights_that_came_later(tiny):
    model = wide_or_short(tiny, torch.float16)
    decoder = filling(model)
    groups = groups_of(decoder, LENGTHS[384])
    before = [kept(decoder, groups) for _ in range(4)][-1]
    assert set(decoder.prefill_graphs.graphs) == {384}
    with torch.no_grad():
        for parameter in model.parameters().values():
            parameter.mul_(1.1)
    after = kept(decoder, groups)
    assert error(after, kept_without_graphs(decoder, groups)) < 4 * torch.finfo(torch.float16).eps
    assert error(after, before) > 0.05


def test_many_short_texts_are_computed_without_a_graph(tiny):
    decoder = filling(wide_or_short(tiny, torch.float16))
    groups = groups_of(decoder, [(1, []) for _ in range(180)])
    several = [kept(decoder, groups) for _ in range(4)]
    assert not decoder.prefill_graphs.uses
    assert all(torch.equal(kept_without_graphs(decoder, groups), each) for each in several)
    assert several[0].any(dim=-1).all()


def test_without_memory_for_graphs_passes_are_computed_without_them(tiny):
    decoder = filling(wide_or_short(tiny, torch.float16))
    decoder.prefill_graphs.nbytes = 2**50
    groups = groups_of(decoder, LENGTHS[384])
    several = [kept(decoder, groups) for _ in range(5)]
    assert not decoder.prefill_graphs.graphs
    assert decoder.prefill_graphs.uses[384] == 5
    assert all(torch.equal(several[0], each) for each in several)


def test_graphs_of_prompts_share_memory_that_nobody_counts_as_free(monkeypatch):
    """Recorded from the smallest to the largest: each would not find room in the memory of those before."""
    monkeypatch.setattr("solera.engines.prefill.USES", 1)
    gc.collect()
    free = free_bytes(torch.device("cuda"))
    decoder = filling(smollm2_layers())
    graphs = decoder.prefill_graphs
    assert graphs.most == 16_384
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    with_pages = free_bytes(torch.device("cuda"))
    assert free - with_pages > graphs.nbytes
    before, tokens = torch.cuda.memory_reserved(), 256
    while tokens <= graphs.most:
        groups = groups_of(decoder, [(min(2048, tokens - at), []) for at in range(0, tokens, 2048)])
        kept(decoder, groups)
        decoder.reset()
        tokens *= 2
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    assert set(graphs.graphs) == {256, 512, 1024, 2048, 4096, 8192, 16_384}
    taken = torch.cuda.memory_reserved() - before
    print(f"graphs of prompts take {taken / 2**20:.0f} MiB, {graphs.nbytes / 2**20:.0f} were set aside")
    assert taken < graphs.nbytes + 160 * 2**20  # and workspaces of cuBLAS
    assert torch.cuda.memory_allocated() < held + 160 * 2**20


@pytest.mark.usefixtures("small_pages")
def test_when_memory_is_short_rows_wait_and_more_run_than_could_be_reserved(tiny):
    """Responses of at most ten pages, most of them shorter than one."""
    jobs = many_jobs(200, Sampling(1.3, 640))
    decoder = Watched(planned(with_long_context(tiny), torch.float32), (END,), 256, compiled=False)
    decoder.room = 64 * 200
    written = all_written(decoder, jobs)
    prompts = sum(-(-(len(prompt) - 1) // 64) for prompt in {job.token_ids for job in jobs})
    rows, _ = zip(*decoder.seen, strict=True)
    print(
        f"at most {max(rows)} rows, where {(200 - prompts) // 10} could be reserved beside {prompts} pages of prompts"
    )
    assert len(written.length_B) == 200
    assert rows[0] < 200
    assert max(rows) > 3 * ((200 - prompts) // 10)


@pytest.mark.usefixtures("small_pages")
def test_memory_falls_when_rows_have_ended(tiny):
    decoder = Watched(planned(with_long_context(tiny), torch.float32), (END,), 256, compiled=False)
    decoder.room = 64 * 1600  # in segments of 100 pages
    jobs = many_jobs(200, Sampling(1.3, 100))
    all_written(decoder, jobs)  # tables and graphs are there then
    at_rest, decoder.seen = torch.cuda.memory_allocated(), []
    all_written(decoder, jobs)
    _, memory = zip(*decoder.seen, strict=True)
    page = 64 * bytes_per_token(decoder.model)
    assert max(memory) > at_rest + 150 * page
    assert torch.cuda.memory_allocated() < at_rest + page


@pytest.mark.parametrize("beside", [False, True])
def test_answers_come_while_others_are_written_and_are_those_of_the_cpu(tiny, monkeypatch, beside):
    """Long limit, short responses: most rows end many chunks before the last."""
    asked = ragged_requests(30, 6, Sampling(1.3, 96))
    expected = ask(InProcessEngine(tiny.copy(torch.float32), (END,), 64, torch.float32), asked)
    engine = InProcessEngine(planned(tiny, torch.float32), (END,), 64, torch.float32, beside=beside, early=True)
    given = []
    advance = engine.decoder.advance
    monkeypatch.setattr(engine.decoder, "advance", lambda: given.append(advance()) or given[-1])
    for _ in range(2):
        given.clear()
        for got, wanted in zip(ask(engine, asked), expected, strict=True):
            assert got.token_ids_T.tolist() == wanted.token_ids_T.tolist()
            np.testing.assert_allclose(got.behaviour_logp_T, wanted.behaviour_logp_T, atol=1e-4)
        assert sum(map(bool, given)) > 3
        assert sum(map(len, given)) == len(asked)


@pytest.mark.parametrize("beside", [False, True])
def test_second_turns_begin_while_first_ones_are_still_written(tiny, monkeypatch, beside):
    """What they hold is what a CPU writes for each text alone, whenever it began. No graph is recorded anew."""
    cpu = InProcessEngine(tiny.copy(torch.float32), (END,), 256, torch.float32)
    asked = ragged_requests(30, 6, Sampling(1.3, 60))
    first = ask(cpu, asked)
    again = [((3, 4, *each.token_ids_T.tolist()), Sampling(1.3, 60), 7 + n) for n, each in enumerate(first)]
    expected = ask(cpu, again)
    engine = InProcessEngine(planned(tiny, torch.float32), (END,), 256, torch.float32, beside=beside, early=True)
    ask(engine, again)  # makes memory for all of them
    joined, admit = [], engine.decoder.admit

    def admitting(jobs):
        busy, count = engine.decoder.busy, admit(jobs)
        joined.append(count if busy else 0)
        return count

    async def both(request, then):
        await engine.generate(*request)
        return await engine.generate(*then)

    async def gather():
        return await asyncio.gather(*map(both, asked, again))

    monkeypatch.setattr(engine.decoder, "admit", admitting)
    memory = engine.decoder.memory
    for got, wanted in zip(asyncio.run(gather()), expected, strict=True):
        assert got.token_ids_T.tolist() == wanted.token_ids_T.tolist()
        np.testing.assert_allclose(got.behaviour_logp_T, wanted.behaviour_logp_T, atol=1e-4)
    assert sum(joined) > 30
    assert engine.decoder.memory is memory


@pytest.mark.parametrize("slots", [8, 256])
def test_a_response_ends_with_the_token_that_completes_a_stop_string(tiny, slots):
    """With few slots others wait for those that end so. Tokens are spelt as letters."""

    def spell(ids):
        return "".join("abcdefghijk"[i] for i in ids)

    engine = InProcessEngine(planned(tiny, torch.float32), (END,), slots, torch.float32, spell=spell)
    asked = ragged_requests(30, 6, Sampling(1.3, 40))
    free = ask(engine, asked)
    stopped = ask(engine, [(ids, dataclasses.replace(s, stop=("ee", "jd", "h")), seed) for ids, s, seed in asked])
    cut = 0
    for whole, got in zip(free, stopped, strict=True):
        text = spell(whole.token_ids_T)
        ends = [text.index(stop) + len(stop) for stop in ("ee", "jd", "h") if stop in text]
        length = min([*ends, len(text)])
        cut += length < len(text)
        assert got.token_ids_T.tolist() == whole.token_ids_T[:length].tolist()
        assert got.finish_reason == ("stop" if ends else whole.finish_reason)
    assert cut > 20


def test_compiled_layers_write_the_same_with_weights_that_came_later(tiny):
    """Query, key and value are one product then, and values a part of it."""
    prompts, seeds = requests()
    other = planned(tiny, torch.float32)
    with torch.no_grad():
        for parameter in other.parameters().values():
            parameter.mul_(1.1)
    decoder = ContinuousDecoder(other, (END,), 200, compiled=True)
    written(decoder, prompts, seeds, SAMPLING)
    with torch.no_grad():
        for own, new in zip(other.parameters().values(), tiny.parameters().values(), strict=True):
            own.copy_(new)
    expected = decode(tiny.copy(torch.float32), prompts, seeds, SAMPLING, (END,))
    assert_written(written(decoder, prompts, seeds, SAMPLING), expected)


def test_the_kernel_draws_from_the_distribution():
    """χ² over 1,000 tokens, 200,000 seeded samples, against its 0.999 quantile; the log-probabilities are exact."""
    from solera.engines import kernels

    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16).repeat(2000, 1)
    logp = torch.log_softmax(logits[0].double() / 0.7, 0)
    seen = torch.zeros(1000, device="cuda")
    for start in range(100):
        numbers = uniforms(np.arange(2000 * start, 2000 * (start + 1), dtype=np.uint64), 1)[:, 0]
        token, said = kernels.sample(logits, torch.from_numpy(numbers).to("cuda"), 0.7)
        assert (said - logp[token]).abs().max() < 1e-5
        seen += torch.bincount(token, minlength=1000)
    expected = logp.exp() * 200_000
    large = expected >= 5
    chi2 = float(((seen - expected)[large] ** 2 / expected[large]).sum())
    degrees = int(large.sum())
    assert degrees > 500
    assert chi2 < degrees * (1 - 2 / (9 * degrees) + 3.0902 * (2 / (9 * degrees)) ** 0.5) ** 3


@pytest.mark.parametrize("entropic", [False, True])
def test_the_head_and_its_backward_are_those_of_log_softmax(entropic):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=generator).to("cuda", torch.bfloat16).requires_grad_(True)
    weight = (torch.randn(5000, 64, generator=generator) * 0.3).to("cuda", torch.bfloat16).requires_grad_(True)
    target = torch.randint(0, 5000, (300,), generator=generator).to("cuda")
    outer, inner = torch.randn(2, 300, generator=generator).to("cuda")
    logp, entropy = ScoredHead.apply(hidden, weight, target, 0.8, 128, entropic)
    (logp * outer + (entropy * inner if entropic else 0)).sum().backward()
    exact = [value.detach().double().requires_grad_(True) for value in (hidden, weight)]
    all_logp = torch.log_softmax(exact[0] @ exact[1].T / 0.8, -1)
    expected = all_logp.gather(1, target[:, None])[:, 0], -(all_logp.exp() * all_logp).sum(-1)
    (expected[0] * outer + (expected[1] * inner if entropic else 0)).sum().backward()
    assert (logp - expected[0]).abs().mean() < 0.01
    assert (entropy - expected[1]).abs().mean() < 0.01
    for got, truth in zip((hidden, weight), exact, strict=True):
        assert (got.grad - truth.grad).norm() < 0.01 * truth.grad.norm()


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)], ids=["all", "hidden", "weight"])
def test_the_head_computes_only_the_gradients_that_are_needed(needed):
    """Products of N·H·V: the logits again, and one for each gradient. A frozen weight takes no memory either."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=generator).to("cuda", torch.bfloat16).requires_grad_(needed[0])
    weight = torch.randn(50_000, 64, generator=generator).to("cuda", torch.bfloat16).requires_grad_(needed[1])
    target = torch.randint(0, 50_000, (300,), generator=generator).to("cuda")
    logp, _ = ScoredHead.apply(hidden, weight, target, 0.8, 4, False)
    logp.sum().backward(retain_graph=True)  # the first product of a thread takes 32 MiB of workspace, and keeps it
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with FlopCounterMode(display=False) as work:
        logp.sum().backward()
    assert work.get_total_flops() == (1 + sum(needed)) * 2 * 300 * 64 * 50_000
    assert [value.grad is not None for value in (hidden, weight)] == list(needed)
    taken = torch.cuda.max_memory_allocated() - before
    assert (taken > 4 * 50_000 * 64) == needed[1]  # the gradient is summed in float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "group", "dim"), [(3, 3, 64), (2, 6, 128), (1, 4, 96), (1, 1, 256), (2, 2, 16)])
def test_attention_of_packed_texts_errs_by_its_rounding_and_repeats_itself(heads, group, dim, dtype):
    """Against float64 on a CPU: groups with one prompt, texts shorter and longer than a tile."""
    texts, place = [], 0
    for prefix, tails in ((150, [3, 300, 64, 1]), (64, [65]), (1, [130, 2]), (500, [])):
        texts.append(Text(place, prefix))
        start, place = place, place + prefix
        for tail in tails:
            texts.append(Text(place, tail, start, prefix))
            place += tail
    plan, generator = PackedTexts.of(texts), torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    given = drawn(1, heads * group, place, dim), drawn(1, heads, place, dim), drawn(1, heads, place, dim)
    pull = drawn(1, place, heads * group, dim)

    def computed(device: str, number: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(device, number).requires_grad_(True) for x in given]
        out = plan.to(torch.device(device)).attend(torch.nn.Identity(), *leaves, dim**-0.5)
        out.backward(pull.to(device, number))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    exact, once, again = computed("cpu", torch.float64), computed("cuda", dtype), computed("cuda", dtype)
    for true, ours, same in zip(exact, once, again, strict=True):
        assert torch.equal(ours, same)
        assert (ours.cpu().double() - true).norm() < 3 * torch.finfo(dtype).eps * true.norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_learning_in_bfloat16_errs_no_more_than_plain_bfloat16(tiny, compiled):
    """Both against float64 at the same point: weights that bfloat16 can hold."""
    rounded = on_gpu(tiny, torch.bfloat16)

    def error(dtype: torch.dtype, compute: torch.dtype, packs: bool, **learn: int) -> float:
        point = rounded.copy(dtype)
        point.module.requires_grad_(True)
        point.can_take_plans = packs
        learner = make_learner(point, compute=compute, compiled=compiled, **learn)
        assert learner.compute_weights.model.takes_plans == packs
        learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
        got = torch.cat([p.grad.flatten() for p in point.parameters().values()]).double()
        return float((got - truth).norm() / truth.norm())

    exact = rounded.copy(torch.float64)
    exact.module.requires_grad_(True)
    truth = gradient(exact, make_groups())
    plain = error(torch.bfloat16, torch.float32, packs=False, pack_tokens=0)
    wide, short = (
        error(torch.float32, dtype, True, micro_batch_tokens=40) for dtype in (torch.bfloat16, torch.float16)
    )
    print(f"error of the gradient: plain bfloat16 {plain:.4f}, packed {wide:.4f}, packed float16 {short:.4f}")
    assert wide < 1.2 * plain
    assert short < 0.3 * plain


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("compute", [torch.float16, torch.bfloat16], ids=str)
def test_recomputed_activations_give_the_same_bits_in_less_memory(compute, compiled):
    """Twelve layers, 8,192 tokens in one pass. What is kept is about what is estimated."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 4}
    module = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)).to("cuda")
    ids, at = torch.randint(0, 100, (1, 8192), device="cuda"), torch.arange(8192, device="cuda")[None]
    plan = PackedTexts.of([Text(0, 8192)]).to(torch.device("cuda"))
    grads, taken = [], []
    for recomputes in (False, True, False):
        masters = LanguageModel(copy.deepcopy(module).eval())
        masters.can_take_plans = True
        weights = ComputeWeights(masters, compute, trained=True, compiled=compiled)
        weights.recompute(recomputes)
        for _ in range(2):  # compiled in the first
            weights.release()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with weights.learning():
                weights.model.hidden(ids, at, plan=plan).float().pow(2).mean().mul(weights.loss_scale).backward()
            taken.append((torch.cuda.max_memory_allocated() - before) / 8192 / weights.bytes_per_token(recomputes))
        grads.append(torch.cat([p.grad.flatten() for p in weights.model.parameters().values() if p.grad is not None]))
    print(f"memory of activations over its estimate: kept {taken[1]:.2f}, recomputed {taken[3]:.2f}")
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(grads[0], grads[1])
    assert taken[1] < 1.5
    assert taken[3] < 1.5


def some_groups(seed: int, tokens: int) -> list[Group]:
    """Groups of four responses of 20 to 90 tokens, of about so many tokens in all."""
    rng, groups, total = np.random.default_rng(seed), list[Group](), 0
    while total < tokens:
        key = len(groups)
        prompt = tuple(rng.integers(2, VOCABULARY, int(rng.integers(5, 40))).tolist())
        rollouts = []
        for member in range(4):
            length = int(rng.integers(20, 90))
            written, logp = rng.integers(2, VOCABULARY, length).astype(np.int32), -rng.exponential(2.0, length)
            turn = Sequence.turns((prompt, Completion(written, logp.astype(np.float32), ((length, 0),), "stop")))
            rewards = (Reward(float(member % 2) + 0.5 * float(rng.integers(0, 2))),)
            rollouts.append(Rollout(f"prompt/{key}", (turn,), rewards, lineage="test", id=4 * key + member))
            total += length
        total += len(prompt)
        groups.append(Group(f"prompt/{key}", tuple(rollouts)))
    return groups


def recording_learner(kind: str, records: bool, seed: int = 0, **learn) -> Learner:
    """Three layers with tied embeddings. It pads all the same if it does not record."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, head_dim=64, initializer_range=0.1, tie_word_embeddings=True, attn_implementation="sdpa",
        eos_token_id=END, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LanguageModel(LlamaForCausalLM(config).eval().to("cuda"))
    model.check()
    if kind == "lora":
        pytest.importorskip("peft")
        model = loading.with_adapter(model, LoraConfig(3, 6.0), "nowhere", seed=0)
    if kind == "lean":
        model, learn = model.in_bfloat16(), {**learn, "memory": "lean"}
    compute = torch.bfloat16 if kind in ("bfloat16", "lean") else torch.float16
    learner = make_learner(model, compute=compute, compiled=True, **{"lr": 1e-3, "graphs": True, **learn})
    assert learner.compute_weights.padded == MOST_PLACES
    if not records:
        learner.compute_weights._recorded = None
    return learner


def weights_after(learner: Learner, seed: int, tokens: int) -> torch.Tensor:
    learner.update(collate(some_groups(seed, tokens), learner.objective, now=learner.version, lineage="test", seed=0))
    return torch.cat([p.detach().flatten() for p in learner.model.parameters().values()])


def assert_updates_are_equal(learners: list[Learner], tokens: list[int], first: int = 0) -> None:
    """To the bit, with other data in each update."""
    for seed, count in enumerate(tokens, first):
        made = [weights_after(learner, seed, count) for learner in learners]
        assert all(torch.equal(made[0], other) for other in made[1:]), f"update {seed} of {count}: {apart(learners)}"


def apart(learners: list[Learner]) -> str:
    """The scales of their losses, and by how much weights differ from those of the last one. A pass whose gradients
    were not finite is computed again with a smaller scale, which changes the last bits in float16."""
    *others, plain = (learner.model.parameters() for learner in learners)
    unlike = {
        name: float((weight - plain[name]).detach().abs().max())
        for several in others
        for name, weight in several.items()
        if not torch.equal(weight, plain[name])
    }
    return f"scales {[learner.compute_weights.loss_scale for learner in learners]}, largest differences {unlike}"


def replayed_sizes(learner: Learner) -> set[int]:
    recorded = learner.compute_weights.recorded
    return set() if recorded is None else set(recorded.passes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("vocabulary", "places"), [(11, 20_544), (11, 900), (50_000, 20_544)])
def test_an_embeddings_gradient_is_summed_in_a_fixed_order(vocabulary, places, dtype):
    """With few tokens, torch's own kernel gives other bits from time to time. Expected: sums in float64."""
    generator = torch.Generator("cuda").manual_seed(0)
    token_N = torch.randint(vocabulary, (places,), device="cuda", generator=generator)
    grad_NH = torch.randn(places, 192, device="cuda", generator=generator).to(dtype)
    first, *others = (sums_in_order(grad_NH, token_N, vocabulary, unused=3) for _ in range(20))
    expected = torch.zeros(vocabulary, 192, dtype=torch.float64, device="cuda").index_add_(0, token_N, grad_NH.double())
    expected[3] = 0
    assert all(torch.equal(first, other) for other in others)
    rounding = torch.finfo(dtype).eps + 20 * torch.finfo(torch.float32).eps  # of the result, and of 2,000 additions
    assert (first - expected).abs().max() < rounding * expected.abs().max()
    torch_own = [torch.ops.aten.embedding_dense_backward(grad_NH, token_N, vocabulary, 3, False) for _ in range(20)]
    print(f"of 20 gradients of torch's own kernel {sum(not torch.equal(torch_own[0], o) for o in torch_own)} differ")


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "lean", "lora"])
def test_replayed_updates_give_the_bits_of_padded_ones(kind):
    """Three sizes in turn, with other data and weights each time; the last is larger than any before."""
    learners = [recording_learner(kind, records) for records in (True, False)]
    assert_updates_are_equal(learners, [900, 1900, 900, 1900, 900, 1900, 900, 1900, 950, 850, 1800, *[2900] * 5, 900])
    assert {1088, 3136} <= replayed_sizes(learners[0])


@pytest.mark.parametrize("kind", ["float16", "lean"])
def test_replayed_micro_batches_add_up(kind):
    """Several in each of two minibatches, two passes over them."""
    learn = {"micro_batch_tokens": 1088, "minibatches": 2, "passes": 2}
    learners = [recording_learner(kind, records, **learn) for records in (True, False)]
    assert_updates_are_equal(learners, [4500] * 6)
    assert 1088 in replayed_sizes(learners[0])


@pytest.mark.parametrize("kind", ["float16", "lean", "lora"])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_what_is_only_scored_is_replayed_with_the_same_bits(kind, minibatches):
    """Watched responses, and before a first step between minibatches all others. Nothing is compiled for them."""
    learners = [recording_learner(kind, records, minibatches=minibatches) for records in (True, False)]
    compiled = []
    for seed in range(5):
        groups = [flattened(group) if key % 2 else group for key, group in enumerate(some_groups(seed, 5000))]
        batch = collate(groups, learners[0].objective, now=seed, lineage="test", seed=0)
        assert batch.watched
        ours, plain = (learner.update(batch) for learner in learners)
        assert np.array_equal(ours.log_ratio_T, plain.log_ratio_T)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 1088 in replayed_sizes(learners[0]) and len(replayed_sizes(learners[0])) > 1
    assert len(set(compiled)) == 1


def flattened(group: Group) -> Group:
    """The same responses with equal rewards."""
    return Group(group.prompt_key, tuple(dataclasses.replace(each, rewards=(Reward(1.0),)) for each in group.rollouts))


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "lora"])
def test_scoring_as_an_earlier_version_gives_its_bits_and_leaves_no_trace(kind):
    """Between replayed updates. Expected: what that version scored, and a learner that never looked back."""
    learners = [recording_learner(kind, records=True) for _ in range(2)]
    assert_updates_are_equal(learners, [900, 900])
    looking, dtype = learners[0], str(learners[0].compute_weights.compute)
    rollouts = tuple(rollout for group in some_groups(7, 900) for rollout in group.rollouts if rollout.length)
    sent = {name: tensor.clone() for name, tensor in looking.weights(dtype).tensors}
    manifest, before = looking.manifest(dtype), looking.score(rollouts).logp_T
    assert_updates_are_equal(learners, [900], first=2)
    assert not np.array_equal(looking.score(rollouts).logp_T, before)
    scored, held = looking.score_as(Weights("test", 2, iter(sent.items())), rollouts)
    assert np.array_equal(scored.logp_T, before)
    assert sorted(held.tensors) == sorted(manifest.tensors)
    assert_updates_are_equal(learners, [900, 900], first=3)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_a_replayed_gradient_is_that_of_an_unpadded_pass(kind):
    learners = [recording_learner(kind, records, lr=0.0) for records in (True, False)]
    learners[1].compute_weights.padded = 0
    for seed in range(5):
        for learner in learners:
            weights_after(learner, seed, 1900)
        ours, plain = (
            torch.cat([p.grad.flatten() for p in learner.model.parameters().values()]) for learner in learners
        )
        assert (ours - plain).norm() < 0.01 * plain.norm()
    assert replayed_sizes(learners[0])


def test_a_replayed_gradient_that_overflows_is_computed_again():
    learners = [recording_learner("float16", records) for records in (True, False)]
    assert_updates_are_equal(learners, [900] * 4)
    for learner in learners:
        learner.compute_weights.loss_scale = 2.0**60
    assert_updates_are_equal(learners, [900] * 2, first=4)
    assert replayed_sizes(learners[0]) and learners[0].compute_weights.loss_scale < 2.0**40


def test_updates_are_recorded_while_an_engine_decodes(tiny):
    """Neither disturbs the other."""
    engine = InProcessEngine(planned(tiny, torch.float32), (END,), 64, torch.float32, beside=True, early=True)
    asked = ragged_requests(30, 6, Sampling(1.3, 60))
    expected = [each.token_ids_T.tolist() for each in ask(engine, asked)]
    got, ended = list[list[list[int]]](), threading.Event()

    def write() -> None:
        while not ended.is_set():
            got.append([each.token_ids_T.tolist() for each in ask(engine, asked)])

    learners = [recording_learner("float16", records) for records in (True, False)]
    with ThreadPoolExecutor() as beside:
        writing = beside.submit(write)
        try:
            assert_updates_are_equal(learners, [900] * 4 + [1900] * 4 + [2900] * 4 + [900] * 4)
        finally:
            ended.set()
        writing.result()
    assert {1088, 3136} <= replayed_sizes(learners[0])
    assert len(got) > 3 and all(one == expected for one in got)


def test_where_memory_ends_nothing_is_recorded_and_all_memory_is_given_back():
    learners = [recording_learner("float16", records) for records in (True, False)]
    assert_updates_are_equal(learners, [20_000] * FIRST_USES)
    gc.collect()
    torch.cuda.empty_cache()
    weights, before = learners[0].compute_weights, torch.cuda.memory_reserved()
    rollouts = collate(some_groups(0, 20_000), learners[0].objective, now=2, lineage="test", seed=0).rollouts
    micros = [micro.to(torch.device("cuda")) for micro in learners[0]._cut(rollouts)]
    activations = sum(micro.token_RL.numel() for micro in micros) * weights.bytes_per_token(recomputes=False)
    assert weights.record(micros) and replayed_sizes(learners[0])
    held = torch.cuda.memory_reserved() - before
    weights.release()
    given_back = before + held - torch.cuda.memory_reserved()  # not the workspaces of another stream's products
    print(f"activations {activations / 2**20:.0f} MiB, held {held / 2**20:.0f}, given back {given_back / 2**20:.0f}")
    assert held > given_back > activations / 2
    weights._recorded = RecordedBody(weights.model, weights.padded)
    for _ in range(FIRST_USES):
        assert weights.record(micros)
    with limited(torch.device("cuda"), (torch.cuda.memory_allocated() + activations / 2) / 2**30):
        assert not weights.record(micros)
    assert weights.recorded is None
    assert_updates_are_equal(learners, [20_000] * 3)


def test_a_run_with_replayed_updates_is_the_same_stopped_or_not(short_run, tmp_path, monkeypatch):
    """The resumed run replays later than the one that was not stopped."""
    replays, forward = list[int](), Pass.forward
    monkeypatch.setattr(Pass, "forward", lambda one, given: replays.append(given.shape[1]) or forward(one, given))
    settings = (
        'run = { steps = 30, device = "cuda" }\nmodel = { compile = true, compute = "float16" }\n'
        "collect = { prompts = 16 }\nsync = { period = 4 }\nlearn = { graphs = true }"
    )
    short_run(settings, name="whole")
    whole, calls = len(replays), iter(range(1000))
    with monkeypatch.context() as patch:
        patch.setattr(running.Interruption, "wanted", lambda self: next(calls) == 13)
        with pytest.raises(running.InterruptedRunError):
            short_run(settings, name="stopped")
    running.resume(tmp_path / "stopped")
    assert whole > len(replays) - whole > 5
    ours, theirs = (tmp_path / name / "model" / "model.safetensors" for name in ("stopped", "whole"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_recording_compiles_nothing_again():
    """Static inputs look to torch's compiler like those of a plain pass."""
    learner = recording_learner("float16", records=True)
    compiled = []
    for seed, tokens in enumerate([1900] * 4 + [2900] * 4):
        weights_after(learner, seed, tokens)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert replayed_sizes(learner) and len(set(compiled)) == 1


def test_a_replay_does_not_wait_for_the_gpu():
    """torch warns where it would."""
    learner = recording_learner("float16", records=True)
    for seed in range(4):
        weights_after(learner, seed, 1900)
    recorded = learner.compute_weights.recorded
    batch = collate(some_groups(0, 1900), learner.objective, now=4, lineage="test", seed=0)
    (micro,) = [micro.to(torch.device("cuda")) for micro in learner._cut(batch.rollouts)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        hidden = recorded.hidden(micro)
        hidden.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_gradient_too_large_for_float16_is_taken_again_with_less(tiny):
    """Scaled far too much the first passes overflow; the last gives the gradient of a pass that is scaled right."""

    def learned(scale: float) -> tuple[torch.Tensor, dict[str, float]]:
        point = on_gpu(tiny, torch.float32)
        point.module.requires_grad_(True)
        point.can_take_plans = True
        learner = make_learner(point, compute=torch.float16)
        learner.compute_weights.loss_scale = scale
        update = learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
        assert 1 < learner.compute_weights.loss_scale <= min(scale, 2.0**20)  # the next step begins with what worked
        return torch.cat([p.grad.flatten() for p in point.parameters().values()]), update.metrics

    (right, expected), (much, got) = learned(2.0**15), learned(2.0**60)
    assert (much - right).norm() < 0.01 * right.norm()
    assert got == pytest.approx(expected, rel=0.01)


def test_autocast_keeps_float32_weights_and_a_gradient_of_the_right_direction(tiny):
    expected = gradient(tiny, make_groups()).float()
    moved = LanguageModel(tiny.copy(torch.float32).module.to("cuda").requires_grad_(True))
    learner = make_learner(moved, compute=torch.bfloat16)
    learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
    got = torch.cat([p.grad.flatten() for p in moved.parameters().values()])
    assert got.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got.cpu(), expected, dim=0) > 0.98


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_training_on_the_gpu_learns(short_run, compute):
    result = short_run(
        f'run = {{ steps = 100, device = "cuda" }}\nmodel = {{ compute = "{compute}" }}\n'
        "collect = { prompts = 32 }\nevaluate = { problems = 200 }"
    )
    assert result.accuracy_after > 0.8
    at_age_0 = [
        row["divergence/tv_token"]
        for row in result.metrics[:100]
        if row["age/max"] == 0 and "divergence/tv_token" in row
    ]
    assert max(at_age_0) < (1e-5 if compute == "float32" else 0.05)  # what is left at age 0 is the engine's own error


@pytest.mark.parametrize("compiled", ["true", "false"])
def test_a_batch_written_while_another_is_learned_from_is_the_same(short_run, compiled):
    def told(overlap: str) -> Result:
        return short_run(
            f'run = {{ steps = 40, device = "cuda" }}\nmodel = {{ compile = {compiled} }}\n'
            f"collect = {{ prompts = 32, overlap = {overlap} }}\nlearn = {{ lr = 3e-4 }}\nsync = {{ period = 8 }}",
            name=f"overlap-{overlap}",
        )

    def written(result: Result) -> list[tuple[float | None, ...]]:
        names = ("reward/mean", "response/length", "tokens/trained", "age/mean", "learn/grad_norm")
        return [tuple(row.get(name) for name in names) for row in result.metrics[:-1]]

    beside, alone = told("true"), told("false")
    assert written(beside) == written(alone)
    assert beside.accuracy_after == alone.accuracy_after > 0.6


@pytest.mark.parametrize("compiled", ["true", "false"])
def test_at_v_1_the_engine_writes_with_the_learners_own_weights(short_run, monkeypatch, compiled):
    shared = []
    sharing = LanguageModel.sharing
    monkeypatch.setattr(LanguageModel, "sharing", lambda model: shared.append((model, sharing(model))) or shared[-1][1])
    result = short_run(
        f'run = {{ steps = 60, device = "cuda" }}\nmodel = {{ compile = {compiled} }}\nsync = {{ period = 1 }}\n'
        "collect = { prompts = 32 }\nevaluate = { problems = 200 }"
    )
    ((theirs, own),) = shared
    assert all(own.parameters()[name] is parameter for name, parameter in theirs.parameters().items())
    assert result.accuracy_after > 0.8
    assert max(row["divergence/tv_token"] for row in result.metrics[:60] if "divergence/tv_token" in row) < 0.05


@pytest.mark.parametrize(
    ("objective", "compute", "compiled"),
    [("grpo", "float16", "true"), ("gspo", "float16", "false"), ("grpo", "bfloat16", "false")],
)
def test_the_same_seed_gives_the_same_run_stopped_or_not(
    short_run, tmp_path, monkeypatch, objective, compute, compiled
):
    def told(result: Result, name: str) -> tuple[object, ...]:
        rows = [(row.get("reward/mean"), row.get("learn/grad_norm")) for row in result.metrics]
        return rows, (tmp_path / name / "model" / "model.safetensors").read_bytes()

    settings = (
        f'run = {{ steps = 30, device = "cuda" }}\n'
        f'model = {{ compile = {compiled}, compute = "{compute}" }}\n'
        f'collect = {{ prompts = 32 }}\nsync = {{ period = 4 }}\nobjective = {{ name = "{objective}" }}'
    )
    whole = told(short_run(settings, name="whole"), "whole")
    calls = iter(range(1000))
    with monkeypatch.context() as patch:
        patch.setattr(running.Interruption, "wanted", lambda self: next(calls) == 13)
        with pytest.raises(running.InterruptedRunError):
            short_run(settings, name="stopped")
    assert told(running.resume(tmp_path / "stopped"), "stopped") == whole


@pytest.mark.parametrize(("compiled", "period"), [("true", 1), ("false", 1), ("true", 4)])
def test_lean_learns_and_the_same_seed_gives_the_same_run_stopped_or_not(
    short_run, tmp_path, monkeypatch, compiled, period
):
    settings = (
        f'run = {{ steps = 60, device = "cuda" }}\nmodel = {{ compile = {compiled} }}\nlearn = {{ memory = "lean" }}\n'
        f"collect = {{ prompts = 32 }}\nsync = {{ period = {period} }}\nevaluate = {{ problems = 200 }}"
    )
    whole = short_run(settings, name="whole")
    assert whole.accuracy_after > 0.8
    calls = iter(range(1000))
    with monkeypatch.context() as patch:
        patch.setattr(running.Interruption, "wanted", lambda self: next(calls) == 23)
        with pytest.raises(running.InterruptedRunError):
            short_run(settings, name="stopped")
    running.resume(tmp_path / "stopped")
    ours, theirs = (tmp_path / name / "model" / "model.safetensors" for name in ("stopped", "whole"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_the_compiled_update_is_the_plain_one():
    """Same noise, same float32 arithmetic: a fused multiply-add may move a number across a step now and then."""
    made = []
    for compiled in (False, True):
        weights = [
            torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).cuda().bfloat16())
            for shape in ((700, 300), (64,), (4096, 512))
        ]
        optimiser = LeanAdamW(weights, LearnConfig(), seed=0, compiled=compiled)
        for step in range(10):
            for weight in weights:
                noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
                weight.grad = noise.cuda().bfloat16()
            optimiser.step(1e-3, optimiser.norm(1.0), 1.0)
        made.append(weights)
    for plain, fused in zip(*made, strict=True):
        assert (plain != fused).float().mean() < 1e-2
        torch.testing.assert_close(plain.float(), fused.float(), rtol=2.0**-6, atol=2e-3)


def test_a_run_takes_no_more_memory_than_it_may(short_run):
    """Keys and values of the slots alone would be larger; slots and micro-batches follow from what may be taken."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.get_per_process_memory_fraction()
    allowed = torch.cuda.memory_reserved() / 2**30 + 0.75  # of what other tests hold nothing can be taken
    torch.cuda.reset_peak_memory_stats()
    result = short_run(
        f'run = {{ steps = 20, device = "cuda", gpu_memory = {allowed} }}\nmodel = {{ compile = false }}\n'
        "collect = { prompts = 64, group_size = 16 }\nsampling = { max_tokens = 16 }"
    )
    assert result.accuracy_after > 0.3
    assert torch.cuda.max_memory_reserved() <= allowed * 2**30
    assert torch.cuda.get_per_process_memory_fraction() == before


def test_what_is_free_ends_at_the_limit():
    device = torch.device("cuda")
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()  # by what other tests have compiled
    assert free_bytes(device) > 8 * 2**30
    with limited(device, held / 2**30 + 2.0):
        assert abs(free_bytes(device) - 2 * 2**30) < 2**20
        taken = torch.empty(2**30, dtype=torch.uint8, device=device)
        assert abs(free_bytes(device) - 2**30) < 2**20
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 * 2**29, dtype=torch.uint8, device=device)
        del taken
    assert free_bytes(device) > 8 * 2**30


@pytest.mark.parametrize("short", [False, True])
def test_recording_gives_unused_memory_back_only_if_memory_is_short(short):
    device, number = torch.device("cuda", torch.cuda.current_device()), torch.zeros(1, device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    taken = torch.empty(2**30, dtype=torch.uint8, device=device)
    del taken
    graph, pool, stream = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    with limited(device, (torch.cuda.memory_reserved() + 2**26) / 2**30 if short else None):
        assert torch.cuda.memory_reserved() >= reserved + 2**30
        left = torch.cuda.memory_reserved()
        stream.wait_stream(torch.cuda.current_stream())
        with recording(graph, pool, stream):
            number += torch.ones(1, device=device)
        assert (torch.cuda.memory_reserved() < left - 2**29) == short
    assert number.item() == 0
    graph.replay()
    assert number.item() == 1


@pytest.mark.parametrize(("embedding", "expected"), [(1.0, "torch.float16"), (90_000.0, "torch.bfloat16")])
def test_the_arithmetic_is_chosen_by_the_models_numbers(short_run, tmp_path, monkeypatch, embedding, expected):
    """Of a token with a large embedding float16 would make no number at all."""
    model, codec = loading.load("embedded", torch.device("cuda"))
    with torch.no_grad():
        model.module.get_input_embeddings().weight[codec.encode("=")[0]] = embedding
    loading.save(model, codec, tmp_path / "model")
    used, load = [], InProcessEngine.load
    monkeypatch.setattr(InProcessEngine, "load", lambda self, *given: used.append(self.dtype) or load(self, *given))
    short_run(
        f'run = {{ steps = 1, device = "cuda" }}\nmodel = {{ compile = false, path = "{tmp_path / "model"}" }}\n'
        "collect = { prompts = 4 }"
    )
    assert set(used) == {expected}


def test_weights_that_give_no_probabilities_are_named(tiny):
    model = planned(tiny, torch.float16)
    engine = InProcessEngine(model, (END,), 64, torch.float16)
    with torch.no_grad():
        next(iter(model.parameters().values())).fill_(float("inf"))
    with pytest.raises(SoleraError, match=r"a log-probability is no number.*need model.compute = .bfloat16"):
        ask(engine, ragged_requests(4, 4))


def smollm2_layers() -> LanguageModel:
    """Three compiled layers of SmolLM2's sizes, with random weights."""
    shape = LlamaConfig(
        vocab_size=100, hidden_size=576, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, attn_implementation="sdpa",
    )  # fmt: skip
    model = LanguageModel(LlamaForCausalLM(shape).to("cuda", torch.float16)).with_plans()
    model.compile_layers()
    return model


def hidden_of(model: LanguageModel, tokens: int) -> torch.Tensor:
    """Of texts of 256 tokens."""
    at = torch.arange(tokens, device="cuda")
    plan = PackedTexts.of([Text(start, 256) for start in range(0, tokens, 256)]).to(torch.device("cuda"))
    return model.hidden(at[None] % 100, at[None] % 256, plan=plan)


def test_compiled_layers_keep_for_the_way_back_what_products_and_attention_gave():
    """Beside the input of each of three layers: queries, keys, values, attention, the middle of the layer, gate and up:
    1 + 1 + 2·⅓ + 1 + 1 + 2·8⁄3 = 10 numbers a token and unit of width; torch alone keeps 14.7."""
    model = smollm2_layers()
    own, kept, tokens = {p.data_ptr() for p in model.module.parameters()}, {}, 4096

    def keep(value: torch.Tensor) -> torch.Tensor:
        if value.data_ptr() not in own and value.dtype == torch.float16:
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        hidden = hidden_of(model, tokens)
    hidden.float().sum().backward()
    assert sum(kept.values()) / tokens / 576 / 2 / 3 < 12.5


def test_a_batch_of_other_size_is_not_compiled_again():
    """torch's own fusion of norms would compile anew below 9,103 tokens of this width: 5·2²⁰ / 576."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = smollm2_layers()
    compiled = []
    for tokens in (12_288, 8_192, 1_024, 20_480):
        hidden_of(model, tokens).float().sum().backward()
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled == [1, 1, 1, 1]


def test_the_engine_shares_the_gpu_with_the_learner_without_touching_it():
    model, codec = loading.load("embedded", torch.device("cuda"))
    engine = InProcessEngine(model, codec.end_token_ids, 64, torch.bfloat16)
    before = {name: parameter.clone() for name, parameter in model.parameters().items()}
    asyncio.run(engine.generate(codec.encode("3+4="), Sampling(1.0, 4), 0))
    for name, parameter in model.parameters().items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, before[name])


def lora_run(root: Path, name: str, compiled: bool) -> str:
    return f"""
        run = {{ root = "{root}", name = "{name}", steps = 60, device = "cuda" }}
        model = {{ compile = {str(compiled).lower()} }}
        lora = {{ rank = 16, alpha = 32.0, export = "adapter" }}
        collect = {{ prompts = 32 }}
        objective = {{ beta = 0.001 }}
        sync = {{ period = 2 }}
        learn = {{ lr = 3e-3 }}
        evaluate = {{ every = 0, problems = 200 }}
        checkpoint = {{ every = 20, keep = 9 }}
        report = {{ tensorboard = false, progress = false }}
    """


@pytest.mark.parametrize("compiled", [False, True])
def test_the_synced_adapter_gives_the_engine_the_learners_probabilities(tiny, compiled):
    pytest.importorskip("peft")
    base = on_gpu(tiny, torch.float32)
    base.check()
    model = loading.with_adapter(base, LoraConfig(3, 6.0), "nowhere", seed=0)
    engine = InProcessEngine(
        model.for_compute(torch.bfloat16, copied=True), (END,), 64, torch.bfloat16, compiled=compiled
    )
    learner = make_learner(
        model, resolve(ObjectiveConfig("reinforce")), compute=torch.bfloat16, compiled=compiled, lr=0.05
    )
    assert engine.model.takes_plans and learner.compute_weights.separate
    learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
    weights = learner.weights(engine.dtype)
    assert [spec.name for spec in learner.manifest(engine.dtype).tensors] == list(model.parameters())
    policy = LanguageModel(learner.compute_weights.model.copy(torch.float32).module.to("cpu"))
    policy.module.requires_grad_(False).set_attn_implementation("sdpa")

    def error() -> float:
        wanted, differences = ragged_requests(60, 6), []
        for (prompt, sampling, _), completion in zip(wanted, ask(engine, wanted), strict=True):
            exact = fresh_logp(policy, prompt, completion, sampling.temperature)
            differences += list(np.abs(completion.behaviour_logp_T - exact))
        return float(np.mean(differences))

    assert error() > 0.1  # the engine's adapters are still the first ones
    engine.load(weights)
    assert error() < 0.02


@pytest.mark.parametrize("compiled", [False, True])
def test_adapters_learn_and_go_on_after_a_stop(tmp_path, monkeypatch, compiled):
    pytest.importorskip("peft")
    whole = running.train(parse(lora_run(tmp_path, "whole", compiled), "test"))
    assert whole.accuracy_after > whole.accuracy_before + 0.2
    calls = iter(range(1000))
    with monkeypatch.context() as patch:
        patch.setattr(running.Interruption, "wanted", lambda self: next(calls) == 50)
        with pytest.raises(running.InterruptedRunError):
            running.train(parse(lora_run(tmp_path, "stopped", compiled), "test"))
    resumed = running.resume(tmp_path / "stopped")
    assert [row["step"] for row in resumed.metrics] == [row["step"] for row in whole.metrics]
    names = ("reward/mean", "learn/grad_norm")
    told = [[tuple(row.get(name) for name in names) for row in result.metrics] for result in (whole, resumed)]
    assert told[0] == told[1]


SMOL = os.environ.get("SOLERA_SMOLLM2")
"""A folder with SmolLM2-135M-Instruct."""


@pytest.mark.skipif(not SMOL, reason="SOLERA_SMOLLM2 names no folder")
@pytest.mark.parametrize(
    ("compute", "compiled"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)]
)
def test_behaviour_logp_of_a_real_model_is_within_a_hundredth_and_does_not_drift(compute, compiled):
    """16 bits against a float32 pass of the same weights, beside what a plain pass in 16 bits makes of them."""
    model, codec = loading.load(SMOL, torch.device("cuda"))
    engine = InProcessEngine(model.for_compute(compute, copied=True), codec.end_token_ids, 64, compute, compiled)
    plain = model.copy(compute)
    questions = [f"Tell me {n} facts about the number {n}." for n in range(2, 18)]
    prompts = [codec.chat([{"role": "user", "content": text}]) for text in questions]
    wanted = [(prompt, Sampling(1.0, 256), 10 * p + g) for p, prompt in enumerate(prompts) for g in range(4)]
    ours, theirs, apart, late = [], [], [], []
    for (prompt, _, _), completion in zip(wanted, ask(engine, wanted), strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids_T.tolist()]], device="cuda")

        def logp(policy: LanguageModel, ids: torch.Tensor = ids, start: int = len(prompt)) -> np.ndarray:
            with torch.no_grad():
                logits = policy.module(input_ids=ids).logits[0, start - 1 : -1].float()
            return torch.log_softmax(logits, -1).gather(1, ids[0, start:, None])[:, 0].cpu().numpy()

        exact, half = logp(model), logp(plain)
        ours += list(np.abs(completion.behaviour_logp_T - exact))
        late += list(np.abs(completion.behaviour_logp_T - exact)[192:])
        theirs += list(np.abs(half - exact))
        apart += list(np.abs(completion.behaviour_logp_T - half))
    print(
        f"mean |difference| from float32: ours {np.mean(ours):.5f} (from token 192: {np.mean(late):.5f}), a plain pass "
        f"{np.mean(theirs):.5f}; ours from the plain pass {np.mean(apart):.5f}"
    )
    assert np.mean(ours) <= 0.01 and np.mean(ours) < np.mean(theirs)
    assert np.mean(late) < 1.5 * np.mean(ours)
    assert compute == torch.bfloat16 or np.mean(apart) <= 0.01  # a plain bfloat16 pass is further than that from itself


def test_digests_are_those_of_the_cpu():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(BLOCK + 70_001, generator=generator)
    named = {
        "long": values, "short": values[:3], "sliced": values[5:40_000], "turned": values[:6000].view(60, 100).T,
        "half": values[:50_000].bfloat16(), "double": values[:777].double(), "one": values[:1], "again": values[:3],
    }  # fmt: skip
    assert describe((name, value.cuda()) for name, value in named.items()) == describe(named.items())


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("in_flight", ["keep", "drain"])
def test_weights_in_flight_match_a_forward_pass_of_each_version(tiny, beside, in_flight):
    versions = some_versions(tiny)
    model = planned(tiny, torch.float32)
    engine = slowly(InProcessEngine(model, (END,), 64, torch.float32, beside=beside, early=True), seconds=0.01)
    crossed = written_across_versions(engine, versions, in_flight)
    assert_each_span_is_of_its_version(crossed, versions, tolerance=2e-4)
    several = sum(len(completion.versions) > 1 for _, completion in crossed)
    assert several >= 5 if in_flight == "keep" else several == 0


@pytest.mark.parametrize("compute", [torch.float16, torch.bfloat16], ids=str)
def test_weights_in_flight_with_graphs_of_prompts(tiny, monkeypatch, compute):
    """What is under way is computed again by graphs. Versions are those that the engine's type can hold."""
    monkeypatch.setattr("solera.engines.prefill.USES", 1)
    versions = [version.copy(compute).copy(torch.float32) for version in some_versions(tiny)]
    engine = InProcessEngine(wide_or_short(tiny, compute), (END,), 64, compute, compiled=True, beside=True, early=True)
    ask(engine, ragged_requests(10, 4, LONG))  # compiles
    crossed = written_across_versions(slowly(engine, seconds=0.01), versions, "keep")
    assert_each_span_is_of_its_version(crossed, versions, tolerance=0.1 if compute == torch.float16 else 0.5)
    assert sum(len(completion.versions) > 1 for _, completion in crossed) >= 5
    assert engine.decoder.prefill_graphs.graphs


def nccl_pair(*given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.nccl_pair", "first", *given]
    root = Path(__file__).parents[1]
    return subprocess.run(command, check=False, cwd=root, capture_output=True, text=True, timeout=300)


def test_weights_travel_over_nccl_and_a_lost_peer_costs_its_group_only():
    ended = nccl_pair("first")
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lost = [line for line in ended.stdout.splitlines() if line.startswith("SIG")]
    assert [line.split()[0] for line in lost] == ["SIGKILL", "SIGSTOP", "SIGKILL"]
    assert all(float(line.split()[2]) < 30 for line in lost), lost  # the limit is 10 s
    assert ended.stdout.startswith("alone after 2.") and ended.stdout.endswith("this process goes on\n")


def test_nccl_between_two_processes_on_one_gpu_is_one_clear_error():
    ended = nccl_pair()
    assert ended.returncode == 1
    said = [line for line in ended.stderr.splitlines() if "EngineError: " in line]
    print(said)
    assert "the processes did not meet" in said[-1] and "uplicate GPU" in said[-1]


def test_ranks_that_share_a_gpu_gather_their_weights(tmp_path):
    """They talk over gloo. The weights are gathered in CPU memory."""
    spec = dataclasses.replace(spec_of(ObjectiveConfig("grpo"), float32_llama, lr=1e-3), device="cuda")
    ranks = Ranks(Processes(2, partial(make_rank, spec), 60.0), 60.0)
    try:
        sharded, whole = ShardedLearner(spec, ranks), float32_llama()
        assert sharded.manifest("float32").tensors == describe(whole.parameters().items())
        batch = collate(make_groups(), spec.objective, now=0, lineage="test", seed=0)
        assert np.isfinite(sharded.update(batch).metrics["learn/grad_norm"])
        sharded.save(tmp_path / "saved")
        moved = dict(sharded.weights("bfloat16").tensors)
        assert sharded.manifest("bfloat16").tensors == describe(moved.items())
        sharded.restore("test", 1, tmp_path / "saved")
    finally:
        ranks.close()


class OverNccl(GroupPeers):
    """Ranks that share a GPU and still use NCCL, which takes them for ranks on several machines."""

    def __init__(self, seat: Seat, device: str) -> None:
        os.environ |= {"NCCL_HOSTID": f"rank {seat.rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
        super().__init__(seat, device)

    def _have_own_gpus(self) -> bool:
        return True


class SlowOnGpu(Rank):
    """The last rank's GPU needs longer for each of the two layers. Its host does not."""

    def __init__(self, spec: LearnerSpec, peers: GroupPeers) -> None:
        super().__init__(spec, peers)
        for layer in self.learner.model.module.model.layers if peers.rank == peers.count - 1 else ():
            layer.register_forward_pre_hook(lambda *_: torch.cuda._sleep(400_000_000))  # 0.2 s at 2 GHz


def make_slow_rank(spec: LearnerSpec, peers: type[GroupPeers], seat: Seat) -> Rank:
    return SlowOnGpu(spec, peers(seat, spec.device))


@pytest.mark.parametrize("peers", [GroupPeers, OverNccl])
def test_each_rank_tells_how_long_its_gpu_waited_for_a_slow_one(peers):
    spec = dataclasses.replace(spec_of(ObjectiveConfig("grpo"), float32_llama), device="cuda")
    ranks = Ranks(Processes(2, partial(make_slow_rank, spec, peers), 60.0), 60.0)
    try:
        sharded = ShardedLearner(spec, ranks)
        batch = collate(make_groups(), spec.objective, now=0, lineage="test", seed=0)
        told = [sharded.update(batch).metrics for _ in range(3)][-1]
        print({name: value for name, value in told.items() if name.startswith("rank/")})
        assert told["rank/0/waiting"] > 0.3
        assert told["rank/0/waiting"] - told["rank/1/waiting"] > 0.2
    finally:
        ranks.close()


def test_a_rank_sends_its_weights_to_an_engine_on_its_gpu_as_handles(tmp_path, monkeypatch):
    """The rank uses the memory of a message again at once, so each must have been copied before."""
    pytest.importorskip("ray")
    assert_a_rank_sends("cuda", "handle", tmp_path, monkeypatch)


def assert_a_rank_sends(device: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = 0.4 if device == "cuda" else 0.0
    source, said = loading.Source("embedded"), list[str]()
    spec = dataclasses.replace(spec_of(ObjectiveConfig("grpo"), embedded, lr=1e-2), device=device)
    host = Actors(1, partial(noting_rank, spec, tmp_path / "ways"), 120.0, None, cpus=2, gpus=share)
    ranks = Ranks(host, 120.0)
    engine = EngineSpec(source, torch.float32, 64, 1, device, share)
    pool = ActorPool(engine, 1, cpus=2, address=None, timeout=120.0, tell=lambda tokens: None, say=said.append)
    monkeypatch.setattr(messages, "MESSAGE_BYTES", 100_000)  # five messages
    try:
        sharded = ShardedLearner(spec, ranks)
        for version in range(1, 11):
            batch = collate(make_groups(version), spec.objective, now=version - 1, lineage="test", seed=0)
            sharded.update(batch)
            held = pool.load(sharded.weights("torch.float32"))
            again = dict(sharded.weights("torch.float32").tensors)  # gathered another time
            assert held.version == version and held.tensors == describe(again.items())
            kept = dict(pool.weights().tensors)
            assert all(torch.equal(kept[name], tensor) for name, tensor in again.items())
    finally:
        pool.close()
        ranks.close()
    assert not said
    ways = (tmp_path / "ways").read_text().split()
    assert set(ways) == {way} and len(ways) == 10 * 5
