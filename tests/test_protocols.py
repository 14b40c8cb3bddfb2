"""A second engine and a second learner, made for this test, train the demo through the protocols alone."""

import asyncio
import copy
import hashlib
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import solera.models
from solera.batch import Batch, Scored, Update
from solera.config import InFlight, load
from solera.diagnosis.mismatch import Mismatch
from solera.evaluate.accuracy import Evaluator
from solera.evaluate.attempts import Exam
from solera.folder.checkpoint import Saver
from solera.models.loading import load_reader
from solera.objectives.objective import compose
from solera.objectives.table import resolve_config
from solera.protocols import Engine, Learner, Supply, Weights, Work
from solera.records import Completion, Manifest, Sampling, TensorSpec
from solera.store.ledger import Ledger
from solera.sync.rules import SyncState, sync_rule
from solera.tasks.arithmetic import Arithmetic
from solera.tasks.rewards import build_rewards
from solera.tasks.single_turn import SingleTurn
from solera.training.delivery import Delivery
from solera.training.loop import Loop
from solera.training.probe import Probe
from solera.training.supply import LockStep

MODEL = Path(solera.models.__file__).parent / "embedded"
DEMO = Path(__file__).parents[1] / "recipes" / "demo.toml"
STEPS = 30


def specs(named) -> tuple[TensorSpec, ...]:
    def digest(tensor: torch.Tensor) -> int:
        return int.from_bytes(hashlib.blake2b(tensor.detach().numpy().tobytes(), digest_size=7).digest())

    return tuple(TensorSpec(name, tuple(t.shape), str(t.dtype), digest(t)) for name, t in named)


class PlainEngine:
    """Decodes all requests of one turn of the event loop together, without a cache."""

    dtype, work, slots = "torch.float32", Work(), 1024

    def __init__(self, module, end: int) -> None:
        self.module, self.end, self.held = module, end, Manifest("", 0, ())
        self.waiting: list[tuple] = []

    def load(self, weights: Weights, in_flight: InFlight = "drain") -> Manifest:
        own = dict(self.module.named_parameters())
        with torch.no_grad():
            names = [name for name, tensor in weights.tensors if own[name].copy_(tensor) is not None]
        self.held = Manifest(weights.lineage, weights.version, specs((name, own[name]) for name in names))
        return self.held

    def weights(self) -> Weights:
        return Weights(self.held.lineage, self.held.version, iter(self.module.named_parameters()))

    def close(self) -> None:
        return

    async def generate(self, token_ids, sampling, seed) -> Completion:
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((token_ids, sampling, seed, answer))
        await asyncio.sleep(0)  # everyone who asks now is answered together
        if self.waiting:
            requests, self.waiting = self.waiting, []
            self._answer(requests)
        return await answer

    @torch.no_grad()
    def _answer(self, requests: list[tuple]) -> None:
        sampling, rows = requests[0][1], len(requests)
        width = max(len(ids) for ids, *_ in requests)
        tokens = torch.zeros(rows, width + sampling.max_tokens, dtype=torch.long)
        for row, (ids, *_) in enumerate(requests):
            tokens[row, : len(ids)] = torch.tensor(ids)
        place = torch.tensor([len(ids) for ids, *_ in requests])
        logps, ended = torch.zeros(rows, sampling.max_tokens), torch.zeros(rows, dtype=torch.bool)
        uniform = torch.stack([torch.rand(sampling.max_tokens, generator=seeded(seed)) for *_, seed, _ in requests])
        written = torch.zeros(rows, dtype=torch.long)
        for step in range(sampling.max_tokens):
            row = torch.nonzero(~ended)[:, 0]
            if not len(row):
                break
            at = place[row] + step
            logits = self.module(tokens[row, : int(at.max())], use_cache=False).logits[torch.arange(len(row)), at - 1]
            logp = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
            chosen = logp.argmax(-1)
            if sampling.temperature:
                chosen = (logp.exp().cumsum(-1) < uniform[row, step, None]).sum(-1).clamp_max(logp.shape[1] - 1)
            tokens[row, at], logps[row, step] = chosen, logp.gather(1, chosen[:, None])[:, 0]
            written[row] += 1
            ended[row] = chosen == self.end
        for row, (ids, _, _, answer) in enumerate(requests):
            count = int(written[row])
            answer.set_result(Completion(
                tokens[row, len(ids) : len(ids) + count].int().numpy(), logps[row, :count].numpy(),
                ((count, self.held.version),), "stop" if ended[row] else "length", self.held.lineage, sampling,
            ))  # fmt: skip


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed % 2**63)


class PlainLearner:
    """REINFORCE with the batch's advantages: mean over tokens, AdamW, one step a batch."""

    lineage, version, compute = "plain", 0, "float32"

    def __init__(self, module, lr: float) -> None:
        self.module = module
        self.optimiser = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.0)

    def _logp(self, rollouts) -> torch.Tensor:
        """Of every token that the policy wrote, rollout by rollout."""
        sequences = [rollout.sequences[0] for rollout in rollouts]
        tokens = torch.zeros(len(sequences), max(len(s.token_ids_T) for s in sequences), dtype=torch.long)
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence.token_ids_T)] = torch.from_numpy(sequence.token_ids_T)
            mask[row, : len(sequence.token_ids_T)] = torch.from_numpy(sequence.mask_T)
        logp = torch.log_softmax(self.module(tokens, use_cache=False).logits[:, :-1], -1)
        return logp.gather(2, tokens[:, 1:, None])[..., 0][mask[:, 1:]]

    def close(self) -> None:
        pass

    @torch.no_grad()
    def score(self, rollouts) -> Scored:
        return Scored.of(rollouts, self._logp(rollouts).numpy())

    def update(self, batch: Batch) -> Update:
        self.version += 1
        if not batch.rollouts:
            return Update({}, np.zeros(0, np.float32), np.zeros(0, np.int64))
        logp_T = self._logp(batch.rollouts)
        before = Scored.of(batch.rollouts, logp_T.detach().numpy())
        loss = -(logp_T * torch.from_numpy(batch.advantage_B).float()[before.response_T]).mean()
        self.optimiser.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimiser.step()
        metrics = {"learn/loss": loss.item(), "learn/grad_norm": norm.item()}
        return Update(metrics, before.logp_T - before.behaviour_logp_T, before.response_T)

    def weights(self, dtype: str) -> Weights:
        return Weights(self.lineage, self.version, ((name, p.detach()) for name, p in self.module.named_parameters()))

    def manifest(self, dtype: str, shared: bool = False) -> Manifest:
        return Manifest(self.lineage, self.version, specs(self.module.named_parameters()))

    def state(self):
        return {"optimiser": self.optimiser.state_dict()}

    def restore(self, lineage, version, state) -> None:
        self.lineage, self.version = lineage, version
        self.optimiser.load_state_dict(state["optimiser"])


class Rows:
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log(self, step, metrics) -> None:
        self.logged.append(dict(metrics))

    def close(self) -> None: ...


def test_another_engine_and_another_learner_train_the_demo(tmp_path):
    """With the settings of `recipes/demo.toml`, except for the number of steps, and the usual store, task and loop."""
    config, reader = resolve_config(load(DEMO)), load_reader("embedded")
    problems = Arithmetic(reader.codec, config.task.level, config.run.seed)
    task = SingleTurn(problems, build_rewards(config, reader.codec, problems))
    module = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    (end,) = reader.codec.end_token_ids
    learner: Learner = PlainLearner(module, config.learn.lr)
    engine: Engine = PlainEngine(copy.deepcopy(module), end)
    examined: Engine = PlainEngine(module, end)  # always has the learner's weights
    sampling = Sampling(config.sampling.temperature, config.sampling.max_tokens)
    store, sink, said = Ledger(tmp_path / "store.db"), Rows(), list[str]()
    supply: Supply = LockStep(
        task, engine, store, sampling=sampling, group_size=config.collect.group_size, reserve=0, seed=config.run.seed
    )
    held_out = task.held_out(config.evaluate.problems)
    loop = Loop(
        steps=STEPS, seed=config.run.seed, collect=config.collect, objective=compose(config.objective), supply=supply,
        engine=engine, store=store, learner=learner,
        delivery=Delivery(learner, engine, held_out[:2], sampling, retry=False, say=said.append),
        probe=Probe(
            config.diagnose, task, engine, store, learner, held_out, sampling=sampling, seed=config.run.seed,
            interval=config.sync.period, say=said.append,
        ),
        mismatch=Mismatch(1e-4, said.append), rule=sync_rule(config.sync),
        evaluator=Evaluator(Exam(task, examined, held_out, 1.0, 4096), Sampling(0.0, sampling.max_tokens), 1, 0),
        sink=sink, saver=Saver(tmp_path / "checkpoints", 0, 1, module.save_pretrained), stop=lambda: False,
        mask_truncated=False,
    )  # fmt: skip
    assert loop.run(SyncState())
    store.close()
    rows = sink.logged
    assert len(rows) == STEPS + 1
    assert rows[0]["eval/pass@1"] < 0.4 and rows[-1]["eval/pass@1"] >= 0.6
    assert [row["sync/version"] for row in rows[:-1]] == [step // 10 * 10 for step in range(STEPS)]
    assert [row["age/max"] for row in rows[:-1]] == [step % 10 for step in range(STEPS)]
    assert max(row["mismatch/logp"] for row in rows if "mismatch/logp" in row) < 1e-4
    apart = [row["divergence/tv_token"] for row in rows[:-1]]  # the policy moves away from the engine's until a sync
    assert max(apart[::10]) < 1e-5
    assert min(apart[9::10]) > 1e-3
    assert said == []
