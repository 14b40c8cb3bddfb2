"""The in-process engine: what it samples, what it says it sampled with, and what it does not compute twice."""

import asyncio
import gc
import threading
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from solera.engines.decoding import PlainDecoder, decode
from solera.engines.in_process import InProcessEngine
from solera.engines.jobs import Job
from solera.engines.sampling import sample
from solera.engines.submission import Submission, hand_out
from solera.errors import BadRequestError, SoleraError
from solera.learner.learner import Weights
from solera.models.language_model import LanguageModel
from solera.records import Completion, Sampling
from solera.streams import uniforms
from tests.conftest import END, VOCABULARY, random_prompt

SAMPLING = Sampling(temperature=1.3, max_tokens=12)


@pytest.fixture
def model(tiny) -> LanguageModel:
    return tiny.copy(torch.float32)


@pytest.fixture
def engine(model) -> InProcessEngine:
    return InProcessEngine(model, (END,), max_rows=64, compute=torch.float32)


def ask(engine: InProcessEngine, requests: list[tuple[tuple[int, ...], Sampling, int]]) -> list[Completion]:
    async def gather():
        return await asyncio.gather(*(engine.generate(*request) for request in requests))

    return asyncio.run(gather())


def ragged_requests(
    count: int, group: int, sampling: Sampling = SAMPLING
) -> list[tuple[tuple[int, ...], Sampling, int]]:
    rng = np.random.default_rng(0)
    prompts = [random_prompt(rng) for _ in range(count)]
    return [(prompt, sampling, 1000 * p + g) for p, prompt in enumerate(prompts) for g in range(group)]


@torch.no_grad()
def fresh_logp(model: LanguageModel, prompt: tuple[int, ...], completion: Completion, temperature: float) -> np.ndarray:
    """Log-probabilities from one plain forward pass over the whole text."""
    ids = torch.tensor([*prompt, *completion.token_ids_T.tolist()])
    logp = torch.log_softmax(model.module(input_ids=ids[None]).logits[0].double() / temperature, -1)
    places = torch.arange(len(prompt) - 1, len(ids) - 1)
    return logp[places, ids[places + 1]].numpy()


def test_behaviour_logp_is_that_of_a_fresh_forward_pass(engine, model):
    requests = ragged_requests(count=30, group=6)
    lengths = set()
    for (prompt, _, _), completion in zip(requests, ask(engine, requests), strict=True):
        expected = fresh_logp(model, prompt, completion, SAMPLING.temperature)
        assert np.abs(completion.behaviour_logp_T - expected).max() < 1e-4
        lengths.add(len(completion.token_ids_T))
    assert {1, SAMPLING.max_tokens} <= lengths  # some end at once, some are cut off


@pytest.mark.parametrize("lengths", [(5,) * 6, (1, 9, 3, 17, 2, 2)])
def test_a_beginning_that_all_texts_share_is_computed_once(model, monkeypatch, lengths):
    """The second batch joins the first while it is being written, after the longest text has left."""
    monkeypatch.setattr("solera.engines.decoding.SHARED", 20)
    rng = np.random.default_rng(0)
    start = rng.integers(2, VOCABULARY, 20).tolist()
    texts = [(*start, n + 2, *rng.integers(2, VOCABULARY, length - 1).tolist()) for n, length in enumerate(lengths)]
    once = Sampling(SAMPLING.temperature, 1)
    first, late = (
        [Job(text, sampling, seed + n, sampling.max_tokens)
         for n, text in enumerate(texts) for sampling in [once if n == 3 else SAMPLING]]
        for seed in (0, 100)
    )  # fmt: skip
    decoder = PlainDecoder(model, (END,), 64)
    decoder.admit(first)
    written = [*decoder.advance(), *decoder.advance()]
    assert len(written) < 6 and decoder.admit(late[:3]) == 3
    while decoder.busy:
        written += decoder.advance()
    assert decoder.prefilled == 20 + sum(lengths) + 20 + sum(lengths[:3])
    assert {each.job for each in written} == {*first, *late[:3]}
    for each in written:
        completion = Completion(each.token_ids_T, each.logp_T, ((len(each.logp_T), 0),), "stop")
        expected = fresh_logp(model, each.job.token_ids, completion, SAMPLING.temperature)
        np.testing.assert_allclose(each.logp_T, expected, atol=2e-5)


def test_a_short_shared_beginning_is_not_worth_it(engine):
    requests = [((*[3] * 20, n), SAMPLING, n) for n in range(2, 6)]
    ask(engine, requests)
    assert engine.work.prefilled == 4 * 21


def test_finish_reason_and_end_token(engine):
    for completion in ask(engine, ragged_requests(20, 4)):
        ids = completion.token_ids_T.tolist()
        assert END not in ids[:-1]
        assert completion.finish_reason == ("stop" if ids[-1] == END else "length")
        assert completion.finish_reason == "stop" or len(ids) == SAMPLING.max_tokens
        assert sum(count for count, _ in completion.versions) == len(ids)


def test_samples_follow_the_distribution(model):
    """χ² over all continuations of two tokens, 20,000 seeded samples, against its 0.999 quantile."""
    prompt, count = (3, 7, 2), 20_000
    sampling = Sampling(temperature=1.5, max_tokens=2)
    drawn = decode(model, [prompt] * count, range(count), sampling, (END,))
    with torch.no_grad():
        first = torch.log_softmax(model.module(torch.tensor([prompt])).logits[0, -1].double() / 1.5, -1).exp().numpy()
        texts = torch.tensor([[*prompt, token] for token in range(VOCABULARY)])
        second = torch.log_softmax(model.module(texts).logits[:, -1].double() / 1.5, -1).exp().numpy()
    expected = {(END,): first[END] * count}
    for a in range(VOCABULARY):
        for b in range(VOCABULARY):
            if a != END:
                expected[(a, b)] = first[a] * second[a, b] * count
    observed = dict.fromkeys(expected, 0)
    for row, length in zip(drawn.token_BT.tolist(), drawn.length_B.tolist(), strict=True):
        observed[tuple(row[:length])] += 1
    large = [text for text in expected if expected[text] >= 5]
    rest = sum(expected[text] for text in expected if expected[text] < 5)
    rest_seen = sum(observed[text] for text in expected if expected[text] < 5)
    chi2 = sum((observed[t] - expected[t]) ** 2 / expected[t] for t in large) + (rest_seen - rest) ** 2 / max(
        rest, 1e-9
    )
    degrees = len(large)
    assert degrees > 30
    # Wilson–Hilferty's approximation of the χ² quantile at 0.999 (z = 3.0902).
    assert chi2 < degrees * (1 - 2 / (9 * degrees) + 3.0902 * (2 / (9 * degrees)) ** 0.5) ** 3


def test_uniforms_are_uniform_and_of_their_seed_alone():
    numbers = uniforms(np.arange(5000, dtype=np.uint64), 20)
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 150  # χ² with 99 degrees, the 0.999 quantile is 148.2
    assert abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1]) < 0.05
    assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.05
    assert np.array_equal(uniforms(np.array([7], np.uint64), 20)[0], numbers[7])


def test_a_uniform_at_the_edge_never_draws_an_impossible_token():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0, -torch.inf]] * 2)
    top, bottom = np.float32(1 - 2**-22), np.float32(0)
    tokens, _ = sample(logits, torch.tensor([top, bottom]), 1.0, 1.0)
    assert tokens.tolist() == [3, 0]


def test_a_response_does_not_depend_on_its_company(engine):
    requests = ragged_requests(8, 4)
    together = ask(engine, requests)
    for request, completion in zip(requests, together, strict=True):
        (alone,) = ask(engine, [request])
        assert np.array_equal(alone.token_ids_T, completion.token_ids_T)


def test_greedy_is_what_transformers_generates(engine, model):
    requests = ragged_requests(12, 1, Sampling(temperature=0.0, max_tokens=10))
    for (prompt, _, _), completion in zip(requests, ask(engine, requests), strict=True):
        expected = model.module.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=10
        )[0, len(prompt) :]
        assert completion.token_ids_T.tolist() == expected.tolist()
        assert not completion.behaviour_logp_T.any()  # a choice that could not be otherwise


def test_top_p_draws_from_the_renormalised_nucleus():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = torch.linspace(0, 0.9999, 1000)
    tokens, logp = sample(probabilities.log().expand(1000, 4), draws, 1.0, 0.7)
    assert torch.bincount(tokens, minlength=4).tolist() == pytest.approx([625, 375, 0, 0], abs=2)
    assert logp[tokens == 1][0].item() == pytest.approx(np.log(0.3 / 0.8), abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_each_text_is_computed_once_and_finished_rows_leave(model, monkeypatch, seed):
    rows = []
    real = LanguageModel.hidden
    monkeypatch.setattr(
        LanguageModel, "hidden", lambda self, ids, *rest: rows.append(len(ids)) or real(self, ids, *rest)
    )
    prompts = [(3, 4, 5)] * 16 + [(6, 7)] * 16
    drawn = decode(model, prompts, [99 * seed + b for b in range(32)], SAMPLING, (END, 4, 5))
    assert rows[0] == 2  # two prompts, thirty-two rows
    for step, computed in enumerate(rows[1:], 1):
        going_on = [b for b in range(32) if drawn.length_B[b] > step]
        texts = {(prompts[b], *drawn.token_BT[b, :step].tolist()) for b in going_on}
        assert computed == len(texts)
    assert rows[1] < 32


def test_more_requests_than_rows_are_written_in_turns(engine):
    requests = ragged_requests(40, 4)
    engine.decoder.max_rows = 7
    in_turns = ask(engine, requests)
    engine.decoder.max_rows = 1000
    at_once = ask(engine, requests)
    for a, b in zip(in_turns, at_once, strict=True):
        assert np.array_equal(a.token_ids_T, b.token_ids_T)


def test_an_error_reaches_everyone_who_waits(engine, monkeypatch):
    def broken(*_):
        raise MemoryError("full")

    monkeypatch.setattr(LanguageModel, "hidden", broken)
    for request in range(2):
        with pytest.raises(MemoryError):
            ask(engine, [((3,), SAMPLING, request), ((4,), SAMPLING, 1)])


@pytest.mark.parametrize("token_id", [VOCABULARY, -1, 10**9])
def test_a_text_that_the_model_cannot_read_is_refused_alone(engine, token_id):
    async def gather():
        texts = [(3,), (3, token_id), (4, 5)]
        asked = (engine.generate(text, SAMPLING, 7) for text in texts)
        return await asyncio.gather(*asked, return_exceptions=True)

    first, refused, last = asyncio.run(gather())
    assert isinstance(refused, BadRequestError) and f"token id {token_id} is not one of" in str(refused)
    for text, answer in (((3,), first), ((4, 5), last)):
        assert answer.token_ids_T.tolist() == ask(engine, [(text, SAMPLING, 7)])[0].token_ids_T.tolist()


@pytest.fixture(params=["plain", "continuous"])
def either(request, tiny) -> InProcessEngine:
    """Decoding as on a CPU, and as on a GPU."""
    model = tiny.copy(torch.float32)
    model = model.with_plans() if request.param == "continuous" else model
    return InProcessEngine(model, (END,), max_rows=64, compute=torch.float32)


def test_a_text_that_fills_the_context_is_cut_there_and_others_are_not(either):
    """The model reads 128 tokens. A response is the beginning of what it would be with more room."""
    rng = np.random.default_rng(1)
    lengths = (3, 100, 116, 117, 120, 126, 127, 128, 129, 600)
    texts = [tuple(int(i) for i in rng.integers(2, VOCABULARY, length)) for length in lengths]
    requests = [(text, SAMPLING, 50 * n + g) for n, text in enumerate(texts) for g in range(8)]
    answers = ask(either, requests)
    either.model.max_length = None
    with_room = ask(either, [request for request in requests if len(request[0]) < 128])
    cut = 0
    for (text, _, _), answer in zip(requests, answers, strict=True):
        room = max(0, min(SAMPLING.max_tokens, 128 - len(text)))
        ids = answer.token_ids_T.tolist()
        assert len(ids) <= room
        assert answer.finish_reason == ("stop" if END in ids else "length")
        assert len(ids) == room or ids[-1] == END
        cut += answer.finish_reason == "length" and room < SAMPLING.max_tokens
        if room:
            whole = with_room.pop(0)
            assert ids == whole.token_ids_T.tolist()[:room]
            assert answer.behaviour_logp_T == pytest.approx(whole.behaviour_logp_T[:room], abs=1e-5)
        assert answer.sampling == SAMPLING
    assert cut > 30


def test_load_copies_weights_and_stamps_what_is_written(engine, model, tiny):
    sender = tiny.copy(torch.float32)
    with torch.no_grad():
        for parameter in sender.parameters().values():
            parameter.mul_(1.1)
    weights = Weights("run", 17, iter(sender.parameters().items()))
    held = engine.load(weights)
    assert (held.lineage, held.version) == ("run", 17)
    for name, parameter in model.parameters().items():
        assert torch.equal(parameter, sender.parameters()[name])
    with torch.no_grad():
        next(iter(sender.parameters().values())).zero_()
    assert next(iter(model.parameters().values())).any()  # a copy, so that a lag is real
    (completion,) = ask(engine, [((3,), SAMPLING, 0)])
    assert (completion.versions[0][1], completion.lineage) == (17, "run")


def test_load_refuses_what_does_not_fit(engine):
    with pytest.raises(SoleraError, match="tensor nonsense"):
        engine.load(Weights("run", 1, iter([("nonsense", torch.zeros(2))])))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_weights_that_give_no_probabilities_are_named(engine, model, temperature):
    with torch.no_grad():
        next(iter(model.parameters().values())).fill_(float("inf"))
    with pytest.raises(SoleraError, match=r"weights of version 0 a log-probability is no number: they have diverged$"):
        ask(engine, ragged_requests(2, 2, Sampling(temperature, 4)))


@pytest.mark.parametrize("early", [True, False])
def test_an_event_loop_is_woken_once_for_the_results_of_several_submissions(monkeypatch, early):
    """One job of the last submission is still being written."""

    async def hand() -> tuple[int, list[bool]]:
        loop, woken = asyncio.get_running_loop(), list[object]()
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: woken.append(call) or wake(*call))
        submissions, answers = [Submission(loop) for _ in range(3)], list[asyncio.Future]()
        for seed, submission in enumerate(submissions * 2):
            answers.append(loop.create_future())
            submission.answers[Job((2, 3), Sampling(1.0, 4), seed, 4)] = answers[-1]
        for submission in submissions:
            submission.seal()
        jobs = [job for submission in submissions for job in submission.waiting]
        for job, submission in zip(jobs[:-1], [each for each in submissions for _ in range(2)], strict=False):
            submission.settle(job, SoleraError(str(job.seed)))
        hand_out(submissions, early)
        await asyncio.sleep(0)
        for seed, answer in enumerate(answers):
            assert not answer.done() or str(answer.exception()) == str(seed)
        return len(woken), [answer.done() for answer in answers]

    assert asyncio.run(hand()) == (1, [True, True, early, True, True, False])


class Interrupted(asyncio.SelectorEventLoop):
    """Between two lines of the first request in this loop, something else happens."""

    def __init__(self, meanwhile) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def call_soon(self, callback, *given, context=None):
        if getattr(callback, "__name__", "") == "_submit" and (meanwhile := self.meanwhile):
            self.meanwhile = None
            meanwhile()
        return super().call_soon(callback, *given, context=context)


def test_event_loops_of_two_threads_may_ask_at_the_same_time(engine):
    asked = ragged_requests(2, 1)
    expected = [each.token_ids_T.tolist() for each in ask(engine, asked)]
    other, answers = asyncio.new_event_loop(), list[Future]()
    thread = threading.Thread(target=other.run_forever)
    thread.start()

    def ask_in_the_other() -> None:
        answers.append(asyncio.run_coroutine_threadsafe(engine.generate(*asked[1]), other))
        answers[0].result(30)

    with asyncio.Runner(loop_factory=lambda: Interrupted(ask_in_the_other)) as runner:
        first = runner.run(asyncio.wait_for(engine.generate(*asked[0]), 30))
    other.call_soon_threadsafe(other.stop)
    thread.join()
    other.close()
    assert [first.token_ids_T.tolist(), answers[0].result().token_ids_T.tolist()] == expected


def test_a_request_that_was_given_up_leaves_nothing_behind_while_others_are_written(engine, monkeypatch):
    """In a streaming run, the engine is never idle. The decoder forgets the last one when another request joins."""
    goes_on, advance = threading.Event(), engine.decoder.advance
    monkeypatch.setattr(engine.decoder, "advance", lambda: advance() if goes_on.wait(0.001) else [])
    first, *others = ragged_requests(5, 1)

    def given_up() -> int:
        gc.collect()
        return sum(isinstance(each, Job) and each.cancelled for each in gc.get_objects())

    async def run() -> int:
        long = asyncio.ensure_future(engine.generate(*first))
        for request in others:
            short = asyncio.ensure_future(engine.generate(*request))
            await asyncio.sleep(0.02)
            short.cancel()
            await asyncio.gather(short, return_exceptions=True)
            del short
        for _ in range(100):
            await asyncio.sleep(0.02)
            if (left := given_up()) <= 1:
                break
        goes_on.set()
        await long
        return left

    assert asyncio.run(run()) <= 1
