"""Ways in which weights do not arrive: by an engine that says what its script says, and by the real one, whose digests
are of the memory it writes with."""

import asyncio
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from solera.config import InFlight, LearnConfig, ObjectiveConfig
from solera.engines.in_process import InProcessEngine
from solera.errors import SoleraError
from solera.evaluate.accuracy import Evaluator
from solera.folder.checkpoint import Saver
from solera.learner.learner import Learner
from solera.models.digest import describe
from solera.models.language_model import LanguageModel
from solera.objectives.objective import compose
from solera.objectives.table import resolve
from solera.protocols import Weights, Work
from solera.records import Manifest, Prompt, Sampling
from solera.sync.proof import SyncFaultError
from solera.training.delivery import Delivery
from tests.conftest import END, VOCABULARY

NORM, QUERY, KEY = (f"model.layers.0.{n}.weight" for n in ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj"))
SAMPLING = Sampling(1.0, 8)
PROMPTS = [Prompt("a", (3, 4, 5)), Prompt("b", (6, 7))]
Stamp = tuple[str, int]
"""Lineage and version: all that an engine is told besides the tensors."""


@pytest.fixture
def learner() -> Learner:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        head_dim=8, max_position_embeddings=64, initializer_range=0.3, eos_token_id=END, bos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    model = LanguageModel(LlamaForCausalLM(config).eval())
    return Learner(
        model, compose(resolve(ObjectiveConfig("grpo"))), LearnConfig(lr=3e-4), lineage="run", temperature=1.0, limit=8,
        steps=10, compute=torch.float32, reference=None,
    )  # fmt: skip


def learn(learner: Learner, size: float = 1e-3) -> None:
    """A batch's worth of change to every weight."""
    generator = torch.Generator().manual_seed(learner.version)
    with torch.no_grad():
        for parameter in learner.model.parameters().values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    learner.version += 1


class Faulty:
    """The real engine behind a wrapper, honest until `fault` is set to one of the methods below."""

    def __init__(self, learner: Learner, dtype: torch.dtype = torch.float32) -> None:
        self.engine = InProcessEngine(learner.model.copy(dtype), (END,), max_rows=8, compute=dtype)
        self.dtype = self.engine.dtype
        self.fault, self.late, self.generated = "", list[Weights](), 0
        self.history: list[tuple[Stamp, dict[str, torch.Tensor]]] = []

    @property
    def work(self) -> Work:
        return self.engine.work

    def load(self, weights: Weights, in_flight: InFlight = "drain") -> Manifest:
        stamp, sent = (weights.lineage, weights.version), {name: tensor.clone() for name, tensor in weights.tensors}
        held = getattr(self, self.fault or "honest")(stamp, sent)
        self.history.append((stamp, sent))
        return held

    async def generate(self, *request):
        self.generated += 1
        completion = await self.engine.generate(*request)
        if self.late:
            self.engine.load(self.late.pop())
        return completion

    def honest(self, stamp: Stamp, sent: dict[str, torch.Tensor]) -> Manifest:
        return self.engine.load(Weights(*stamp, iter(sent.items())))

    def nothing_delivered(self, stamp, sent):
        return self.engine.held

    def one_tensor_missing(self, stamp, sent):
        return self.honest(stamp, {name: tensor for name, tensor in sent.items() if name != KEY})

    def one_tensor_stale(self, stamp, sent):
        return self.honest(stamp, sent | {KEY: self.history[-1][1][KEY]})

    def tensors_swapped(self, stamp, sent):
        return self.honest(stamp, sent | {KEY: sent[QUERY], QUERY: sent[KEY]})

    def bit_damage(self, stamp, sent):
        sent[NORM].view(torch.int32)[3] ^= 1  # the last bit of one number
        return self.honest(stamp, sent)

    def wrong_cast(self, stamp, sent):
        return self.honest(stamp, {name: tensor.half().float() for name, tensor in sent.items()})

    def wrong_dtype(self, stamp, sent):
        self.honest(stamp, sent)
        return Manifest(*stamp, describe((n, t.bfloat16()) for n, t in sent.items()))

    def older_version(self, stamp, sent):
        return self.honest(*self.history[0])

    def another_lineage(self, stamp, sent):
        return self.honest(("other", stamp[1]), sent)

    def delivered_late(self, stamp, sent):
        self.late.append(Weights(*stamp, iter(sent.items())))
        return self.honest(stamp, self.history[-1][1])

    def stamped_not_applied(self, stamp, sent):
        self.engine.held = Manifest(*stamp, self.engine.held.tensors)
        return self.engine.held

    def read_not_applied(self, stamp, sent):
        return self.honest(stamp, self.history[-1][1])

    def claimed_unread(self, stamp, sent):
        """Says what an honest engine would, as far as it goes without reading a value."""
        self.engine.held = Manifest(*stamp, tuple(s._replace(digest=0) for s in self.engine.held.tensors))
        return self.engine.held

    def parcel_not_applied(self, stamp, sent):
        """Digests of what it was given, not of what it writes with."""
        self.engine.held = Manifest(*stamp, describe(sent.items()))
        return self.engine.held

    def parcel_late(self, stamp, sent):
        self.late.append(Weights(*stamp, iter(sent.items())))
        return self.parcel_not_applied(stamp, sent)

    def parcel_late_unstamped(self, stamp, sent):
        self.late.append(Weights(*stamp, iter(sent.items())))
        return Manifest(*stamp, describe(sent.items()))


def delivery(
    learner: Learner,
    engine: Faulty,
    retry: bool = False,
    said: list[str] | None = None,
    goes_on: bool = False,
) -> Delivery:
    """With `goes_on`, to a learner that goes on before the canary is there."""
    say = [].append if said is None else said.append
    later = (lambda rollouts: learner.score_as(engine.engine.weights(), rollouts)) if goes_on else None
    return Delivery(learner, engine, PROMPTS, SAMPLING, retry=retry, say=say, score_as_engine=later)


FAULTS = {
    "nothing_delivered": "nothing arrived, the engine still holds version 2",
    "one_tensor_missing": f"tensor {KEY} did not arrive",
    "one_tensor_stale": f"tensor {KEY} is stale: it still has its values of version 2",
    "tensors_swapped": rf"tensor {QUERY} \(and 1 more\) is swapped: it arrived with the values of {KEY}",
    "bit_damage": f"tensor {NORM} arrived with other values than were sent: damaged",
    "wrong_cast": "arrived with other values than were sent: .*rounded through another type",
    "wrong_dtype": "arrived as torch.bfloat16 .*sent as torch.float32",
    "older_version": "an older version arrived, the engine holds version 0",
    "another_lineage": r"weights of another run \(other, sent run\)",
    "delivered_late": r"delivered after the next generation had begun \(log-probabilities differ",
    "stamped_not_applied": "version 3 is stamped but not applied: all tensors are those of version 2",
    "read_not_applied": "version 3 is stamped but not applied: all tensors are those of version 2",
    "claimed_unread": "arrived with other values than were sent",
}
PARCEL_FAULTS = {
    "parcel_not_applied": r"says it holds these weights but does not write with them \(log-probabilities differ",
    "parcel_late": r"delivered after the next generation had begun \(log-probabilities differ",
    "parcel_late_unstamped": r"delivered after the next generation had begun \(stamped with version 2 of this run\)",
}


@pytest.mark.parametrize("fault", FAULTS | PARCEL_FAULTS)
def test_each_fault_is_caught_at_that_sync_and_named(learner, fault):
    engine = Faulty(learner)
    deliver = delivery(learner, engine).deliver
    for _ in range(3):
        assert deliver()["sync/faults"] == 0
        learn(learner)
    engine.fault = fault
    with pytest.raises(SyncFaultError, match=f"^sync of version 3: .*{(FAULTS | PARCEL_FAULTS)[fault]}") as stopped:
        deliver()
    assert isinstance(stopped.value, SoleraError)
    assert "\n" not in str(stopped.value)


@pytest.mark.parametrize("fault", FAULTS | PARCEL_FAULTS)
def test_each_fault_is_caught_although_the_learner_goes_on(learner, fault):
    engine = Faulty(learner)
    sender = delivery(learner, engine, goes_on=True)

    def sync() -> None:
        sender.deliver()
        learn(learner, 1e-2)
        sender.finish()

    for _ in range(3):
        sync()
    engine.fault = fault
    with pytest.raises(SyncFaultError, match=r"^sync of version 3: "):
        sync()


def test_a_canary_that_nobody_waited_for_is_scored_with_the_weights_that_wrote_it(learner):
    """The learner has taken a large step meanwhile, and keeps what it learned."""
    engine = Faulty(learner)
    sender = delivery(learner, engine, goes_on=True)
    for number in range(50):
        assert "time/sync/proof" in sender.deliver() and not sender.is_proved
        learn(learner, [1e-1, 1e-2, 1e-5, 0.0][number % 4])
        learned = {name: tensor.clone() for name, tensor in learner.model.parameters().items()}
        assert sender.finish()["time/sync/proof"] > 0 and sender.is_proved
        assert all(torch.equal(tensor, learned[name]) for name, tensor in learner.model.parameters().items())
    assert sender.finish() == {}
    assert engine.generated == 50 * len(PROMPTS)


def test_what_is_asked_right_after_a_sync_does_not_join_its_canary(learner, monkeypatch):
    """What is asked in one turn of the event loop is one batch of the engine, and only small ones go first."""
    engine, together = Faulty(learner), list[int]()
    sender, submit = delivery(learner, engine, goes_on=True), engine.engine._submit
    monkeypatch.setattr(engine.engine, "_submit", lambda asked: (together.append(len(asked.answers)), submit(asked)))

    async def keep_busy() -> None:
        time.sleep(0.3)

    sender.events.begin(keep_busy())
    sender.deliver()
    sender.events.run(engine.generate((3, 4, 5), SAMPLING, 9))
    assert together == [len(PROMPTS), 1]


@pytest.mark.parametrize("fault", FAULTS)
def test_those_of_an_honest_account_are_caught_without_a_canary_too(learner, fault):
    engine = Faulty(learner)
    sender = delivery(learner, engine)
    for _ in range(3):
        sender.deliver()
        learn(learner)
        sender._next_canary = math.inf
    assert engine.generated == len(PROMPTS)  # at the first sync only
    engine.fault = fault
    with pytest.raises(SyncFaultError, match=f"^sync of version 3: .*{FAULTS[fault]}"):
        sender.deliver()


@pytest.mark.parametrize("fault", FAULTS | PARCEL_FAULTS)
def test_retry_sends_once_more_and_says_why(learner, fault):
    engine, said = Faulty(learner), list[str]()
    sender = delivery(learner, engine, retry=True, said=said)
    for _ in range(2):
        sender.deliver()
        learn(learner)

    def once(stamp, sent) -> Manifest:
        engine.fault = ""
        return getattr(engine, fault)(stamp, sent)

    engine.once, engine.fault = once, "once"
    assert sender.deliver()["sync/faults"] == 1
    assert len(said) == 1 and said[0].startswith("sync of version 2: ") and said[0].endswith("; sending again")
    assert engine.engine.held == learner.manifest("torch.float32")


def test_a_fault_that_stays_stops_the_run_after_one_retry(learner):
    engine, said = Faulty(learner), list[str]()
    sender = delivery(learner, engine, retry=True, said=said)
    sender.deliver()
    learn(learner)
    engine.fault = "nothing_delivered"
    with pytest.raises(SyncFaultError, match="nothing arrived"):
        sender.deliver()
    assert len(said) == 1 and len(engine.history) == 3


def test_weights_too_coarse_to_show_a_small_step_are_caught_by_bits(learner):
    """In bfloat16 the two sides differ by more than a small step moves either: what gives it away is that nothing
    moved at all."""
    engine = Faulty(learner, torch.bfloat16)
    deliver = delivery(learner, engine).deliver
    deliver()
    engine.fault = "parcel_not_applied"

    def learn_until_caught() -> None:
        for _ in range(100):
            learn(learner, 3e-3)
            deliver()

    with pytest.raises(SyncFaultError, match=r"does not write with them .*did not change by one bit"):
        learn_until_caught()
    assert learner.version > 1  # steps too small to show add up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_alarm_in_clean_syncs(learner, dtype):
    """Many: steps large and small, and none at all; fewer in bfloat16, where sums round."""
    engine = Faulty(learner, dtype)
    sender = delivery(learner, engine)
    for number in range(400 if dtype == torch.float32 else 200):
        sender.deliver()
        learn(learner, [1e-2, 1e-4, 1e-6, 1e-8, 0.0][number % 5])
        engine.history.clear()
    assert engine.engine.held.version == learner.version - 1


def test_the_sender_casts_to_the_engines_type(learner):
    def cast() -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, p.detach().bfloat16()) for name, p in learner.model.parameters().items())

    weights = learner.weights("torch.bfloat16")
    assert learner.manifest("torch.bfloat16").tensors == describe(cast())
    assert all(
        torch.equal(tensor, expected) for (_, tensor), (_, expected) in zip(weights.tensors, cast(), strict=True)
    )


def test_a_run_stops_or_goes_on_as_configured(short_run, monkeypatch):
    real, calls = InProcessEngine.load, []

    def forgets_the_second(self, weights, in_flight="drain"):
        calls.append(weights.version)
        return self.held if len(calls) == 2 else real(self, weights)

    monkeypatch.setattr(InProcessEngine, "load", forgets_the_second)
    with pytest.raises(SyncFaultError, match="sync of version 2: nothing arrived, the engine still holds version 0"):
        short_run("sync = { period = 2 }", name="stops")
    calls.clear()
    result = short_run('sync = { period = 2, on_fault = "retry" }', name="goes-on")
    assert calls == [0, 2, 2, 4]
    assert [row["sync/faults"] for row in result.metrics if "sync/faults" in row] == [0, 1, 0]


def test_a_canary_stops_a_streaming_run_whose_learner_went_on(short_run, monkeypatch):
    """The engine takes the weights, but writes with others: the canary tells."""
    real, loaded = InProcessEngine.load, []

    def load(self, weights, in_flight="drain"):
        held = real(self, weights, in_flight)
        loaded.append(held.version)
        if len(loaded) == 2:  # after the digests: only who looks at what is written can know
            monkeypatch.setattr(self.decoder, "model", self.model.copy(torch.float32))
            for parameter in self.decoder.model.parameters().values():
                parameter.data.mul_(1.5)
        return held

    monkeypatch.setattr(InProcessEngine, "load", load)
    with pytest.raises(SyncFaultError, match=r"sync of version 3: the engine says it holds these weights but does not"):
        short_run('run = { steps = 9 }\ncollect = { mode = "stream" }\nsync = { period = 3 }')
    assert loaded == [0, 3]


def test_a_streaming_run_learns_nothing_that_unproved_weights_wrote(short_run, monkeypatch):
    deliver, update, current, seen = Delivery.deliver, Learner.update, list[Delivery](), set[tuple[bool, bool]]()

    def delivering(self):
        current[:] = [self]
        return deliver(self)

    def updating(self, batch):
        spans = [span for rollout in batch.rollouts for text in rollout.sequences for span in text.spans]
        (sender,) = current
        seen.add((sender.is_proved, sender.engine.version in {span.version for span in spans}))
        return update(self, batch)

    monkeypatch.setattr(Delivery, "deliver", delivering)
    monkeypatch.setattr(Learner, "update", updating)
    short_run('run = { steps = 20 }\ncollect = { mode = "stream" }\nsync = { period = 2 }')
    assert (False, False) in seen and (False, True) not in seen and (True, True) in seen


def slow_canaries(monkeypatch, wrong_from: int | None = None) -> None:
    """A canary takes a second. Updates take so long that the engine is ahead of them. From the delivery
    `wrong_from` on, canaries say that the engine computes with other weights."""
    write, update = Delivery._write, Learner.update
    written = itertools.count()

    async def slowly(self, engine, asked=lambda: None):
        completions = await write(self, engine, asked)
        await asyncio.sleep(1.0)
        if wrong_from is None or next(written) < wrong_from:
            return completions
        return [dataclasses.replace(each, behaviour_logp_T=each.behaviour_logp_T - 1) for each in completions]

    def updating(self, batch):
        time.sleep(0.1)
        return update(self, batch)

    monkeypatch.setattr(Delivery, "_write", slowly)
    monkeypatch.setattr(Learner, "update", updating)


STREAM = 'collect = { mode = "stream", max_age = 12 }\nevaluate = { every = 0, problems = 8 }\n'


def test_a_streaming_run_learns_while_a_canary_is_slow_but_saves_nothing_unproved(short_run, monkeypatch):
    slow_canaries(monkeypatch)
    deliver, update, save = Delivery.deliver, Learner.update, Saver.save
    current, unproved, saved = list[Delivery](), list[int](), list[bool]()

    def delivering(self):
        current[:] = [self]
        unproved.append(0)
        return deliver(self)

    def updating(self, batch):
        unproved[-1] += not current[0].is_proved
        return update(self, batch)

    def saving(self, *given):
        saved.append(current[0].is_proved)
        return save(self, *given)

    monkeypatch.setattr(Delivery, "deliver", delivering)
    monkeypatch.setattr(Learner, "update", updating)
    monkeypatch.setattr(Saver, "save", saving)
    result = short_run(f"run = {{ steps = 24 }}\nsync = {{ period = 6 }}\ncheckpoint = {{ every = 7 }}\n{STREAM}")
    assert max(unproved) > 1
    assert len(saved) == 4 and all(saved)
    rows = [row for row in result.metrics if "time/sync" in row]
    assert all(row["time/sync/proof"] <= row["time/sync"] for row in rows)
    assert any(row["time/sync/proof"] > 0.1 for row in rows)  # a checkpoint had to wait for it


@pytest.mark.parametrize("steps", [4, 6], ids=["before the end", "at the end"])
def test_a_canary_that_comes_late_stops_the_run_all_the_same(short_run, monkeypatch, steps):
    """The second sync is that of version 3. Nothing is saved, and all that is learned from was written before."""
    slow_canaries(monkeypatch, wrong_from=1)
    evaluated = list[int]()
    evaluate = Evaluator.evaluate

    def evaluating(self):
        evaluated.append(1)
        return evaluate(self)

    monkeypatch.setattr(Evaluator, "evaluate", evaluating)
    with pytest.raises(SyncFaultError, match=r"^sync of version 3: .*does not write with them"):
        short_run(f"run = {{ steps = {steps} }}\nsync = {{ period = 3 }}\ncheckpoint = {{ every = 0 }}\n{STREAM}")
    assert len(evaluated) == 1  # at the start


def test_an_engine_that_shares_the_learners_memory_is_always_up_to_date(learner):
    """Nothing is copied and no digest taken; a parameter that no longer is the learner's is a fault."""
    engine = InProcessEngine(learner.compute_weights.model.sharing(), (END,), 8, torch.float32, shared=True)
    sharing = Delivery(learner, engine, PROMPTS, SAMPLING, retry=False, say=print, shared=True)
    sharing.deliver()
    for _ in range(3):
        learn(learner)
        own, theirs = engine.model.parameters(), learner.model.parameters()
        assert all(own[name].data_ptr() == theirs[name].data_ptr() for name in own)
        sharing.deliver()
        assert (engine.held.lineage, engine.held.version) == ("run", learner.version)
    assert dict(engine.weights().tensors) == {}
    own[KEY] = torch.nn.Parameter(own[KEY].clone())
    learn(learner)
    with pytest.raises(SyncFaultError, match=f"tensor {KEY} arrived with other values"):
        sharing.deliver()
