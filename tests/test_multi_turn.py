"""A task of two turns fits the records, the store and the learner as they are."""

import asyncio
import random

import numpy as np
import torch

from solera.config import CollectConfig, Config, EvaluateConfig, ReportConfig, RunConfig, SyncConfig
from solera.engines.in_process import InProcessEngine
from solera.models import loading
from solera.records import PolicyVersion, Prompt, Reward, Rollout, Sampling, Span
from solera.report.sinks import JsonLines, read_metrics
from solera.run.build import build_loop
from solera.run.parts import Parts, resolved
from solera.run.running import train
from solera.store.ledger import Ledger
from solera.sync.rules import SyncState
from solera.tasks.episodes import attempt_all
from solera.training.supply import LockStep

NOW = PolicyVersion("test", 0)


class GuessTwice:
    """The user asks for a sum, answers the first guess with the same question again; one point for each right guess."""

    def __init__(self, codec):
        self.codec = codec

    def prompt(self, index: int) -> Prompt:
        text = f"{index % 90}+{(index * 7) % 90}="
        return Prompt(f"twice/{text}", self.codec.encode(text), {"answer": str(index % 90 + (index * 7) % 90)})

    def held_out(self, count: int) -> list[Prompt]:
        return [self.prompt(1000 + i) for i in range(count)]

    async def run(self, prompt, generate) -> Rollout:
        first = await generate(prompt.token_ids)
        said = tuple(first.token_ids_T.tolist())
        second = await generate((*prompt.token_ids, *said, *prompt.token_ids))
        right = sum(self.codec.decode(guess.token_ids_T) == prompt.data["answer"] for guess in (first, second))
        return Rollout.of(prompt, first, prompt.token_ids, second, rewards=(Reward(float(right)),))


def test_two_turns_through_store_and_learner(tmp_path):
    config = resolved(
        Config(
            run=RunConfig(steps=3, device="cpu"),
            collect=CollectConfig(prompts=12, group_size=6),
            evaluate=EvaluateConfig(problems=5),
        )
    )
    model, codec = loading.load("embedded", torch.device("cpu"))
    store, sink = Ledger(tmp_path / "store.db"), JsonLines(tmp_path / "metrics.jsonl")
    loop = build_loop(Parts(config, model, codec, GuessTwice(codec), torch.float32), store, sink, tmp_path)
    loop.run(SyncState())
    sink.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert any(row.get("tokens/trained", 0) > 0 for row in rows)
    assert rows[0]["divergence/tv_token"] < 1e-6  # behaviour_logp of both turns is the learner's own at age 0
    further = LockStep(
        loop.supply.task, loop.engine, store, sampling=Sampling(1.0, 8), group_size=6, reserve=0, seed=9
    )  # fmt: skip
    further.position = loop.supply.position
    further.wait(1, NOW)
    (group,) = store.draw(1, 6)
    for rollout in group.rollouts:
        (sequence,) = rollout.sequences
        asked = len(codec.encode(group.prompt_key.removeprefix("twice/")))
        first, second = sequence.spans
        assert (first.start, second.start - first.stop) == (asked, asked)
        assert sequence.mask_T.sum() == rollout.length == first.stop - first.start + second.stop - second.start
        assert isinstance(first, Span)
    store.close()


def test_turns_of_one_episode_draw_different_numbers():
    model, codec = loading.load("embedded", torch.device("cpu"))
    engine = InProcessEngine(model, codec.end_token_ids, 1024, torch.float32)
    seen = []

    class Same:
        async def run(self, prompt, generate):
            turns = [await generate(prompt.token_ids) for _ in range(2)]
            seen.append(tuple(tuple(t.token_ids_T.tolist()) for t in turns))
            return Rollout.of(prompt, turns[0])

    prompt = Prompt("p", codec.encode("57+68="))
    attempt_all(Same(), engine, [(prompt, seed) for seed in range(200)], Sampling(3.0, 6))
    assert np.mean([a == b for a, b in seen]) < 0.5


class Impatient(GuessTwice):
    """Its tool takes another time at every call, and in every run."""

    async def run(self, prompt, generate) -> Rollout:
        first = await generate(prompt.token_ids)
        await asyncio.sleep(random.uniform(0, 0.03))
        given = (*prompt.token_ids, *first.token_ids_T.tolist(), *prompt.token_ids)
        second = await generate(given, max_tokens=4, stop="9")
        right = sum(self.codec.decode(guess.token_ids_T) == prompt.data["answer"] for guess in (first, second))
        return Rollout.of(prompt, first, prompt.token_ids, second, rewards=(Reward(float(right)),))


def test_with_deterministic_two_runs_are_the_same_to_the_bit_however_long_tools_take(tmp_path):
    rows, weights = [], []
    for run in range(2):
        config = Config(
            run=RunConfig(steps=3, device="cpu", root=str(tmp_path), name=str(run)),
            collect=CollectConfig(prompts=8, group_size=4, deterministic=True),
            evaluate=EvaluateConfig(every=2, problems=5),
            sync=SyncConfig(period=2),
            report=ReportConfig(tensorboard=False, progress=False, page=False),
        )
        told = train(config, task=Impatient).metrics
        rows.append([{name: v for name, v in row.items() if not name.startswith("time/")} for row in told])
        weights.append((tmp_path / str(run) / "model" / "model.safetensors").read_bytes())
    assert rows[0] == rows[1]
    assert weights[0] == weights[1]
