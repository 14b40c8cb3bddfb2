"""One update: `i` passes over a batch, each cut into minibatches of whole groups and micro-batches by token budget."""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from solera.batch import Batch, Scored, Update
from solera.config import LearnConfig
from solera.errors import SoleraError
from solera.learner.compute_weights import FEWEST_TOKENS, ComputeWeights
from solera.learner.contribution import contribution
from solera.learner.optimisers import optimiser_of
from solera.learner.peers import Alone, Peers
from solera.learner.portions import Findings, Portion, conclude, portions_of
from solera.learner.prepared import Minibatch, TrainingMicroBatch, contributions, log_ratios, prepare
from solera.learner.reference import Reference
from solera.learner.rows import MicroBatch, flat_micro_batches, longest_text, micro_batches
from solera.learner.schedule import learning_rate
from solera.learner.scoring import score
from solera.learner.shards import read_shards, write_shards
from solera.models.digest import describe, locate
from solera.models.extent import WIDER
from solera.models.language_model import LanguageModel
from solera.models.memory import RECORDING, set_aside
from solera.objectives.objective import Objective
from solera.objectives.token_statistics import TokenStatistics
from solera.objectives.tokens import BehaviourLogp, ProximalLogp, Tokens
from solera.protocols import Weights
from solera.records import Manifest, Rollout, Span
from solera.records import Sequence as Text

RECOMPUTED = "recomputed in the backward pass, which takes about a third more time"
LARGE_REWARD = 1000.0
"""From which on a reward is the first to be suspected where a gradient is not finite."""


@dataclass(eq=False)
class BackwardPass:
    """What a backward pass over a minibatch found in each micro-batch, and the norm of the gradient it left."""

    losses: list[Tensor] = field(default_factory=list)
    statistics: list[TokenStatistics] = field(default_factory=list)
    contributions: list[Tensor] = field(default_factory=list)
    norm: Tensor = field(default_factory=lambda: torch.zeros(()))


class Learner:
    """The policy being trained: its weights, AdamW, and a version that counts the batches learned from.

    With `learn.memory = "lean"`, the model has bfloat16 weights (`LanguageModel.in_bfloat16`), and `seed` is that of
    their stochastic rounding.
    """

    def __init__(
        self,
        model: LanguageModel,
        objective: Objective,
        config: LearnConfig,
        *,
        lineage: str,
        temperature: float,
        limit: int,
        steps: int,
        compute: torch.dtype,
        reference: Reference | None,
        compiled: bool = False,
        say: Callable[[str], None] = lambda sentence: None,
        peers: Peers | None = None,
        seed: int = 0,
    ) -> None:
        assert objective.uses_reference == (reference is not None)
        self.model = model
        self.objective = objective
        self.config = config
        self.lineage = lineage
        self.version = 0
        self.temperature = temperature
        self.limit = limit
        self.steps = steps
        self.compute = str(compute).removeprefix("torch.")
        self.compute_weights = ComputeWeights(model, compute, trained=True, compiled=compiled, records=config.graphs)
        self.reference = reference
        self.peers: Peers = peers or Alone()
        self._say = say
        self._moved = False
        """Whether the present update cannot be begun again: it has taken a step, or is counted."""
        parameters = list(model.parameters().values())
        self._optimiser = optimiser_of(parameters, config, seed, self.compute_weights.compiled)
        self.compute_weights.recompute(config.gradient_checkpointing)
        self._recomputes = config.gradient_checkpointing
        """Whether every batch recomputes activations. Otherwise a batch does so if its texts are too long."""
        self._told = config.gradient_checkpointing
        self._differentiates = False
        """Whether the present update has come to its backward passes, which need memory for activations."""
        self._set_aside()

    def weights(self, dtype: str) -> Weights:
        """The current weights under their version, cast to `dtype`, for whoever takes them."""
        return Weights(self.lineage, self.version, ((name, p.detach()) for name, p in self._cast(dtype)))

    def manifest(self, dtype: str, shared: bool = False) -> Manifest:
        """What `weights` are, to compare with what arrived, or with what an engine that shares them has."""
        return Manifest(self.lineage, self.version, (locate if shared else describe)(self._cast(dtype)))

    def _cast(self, dtype: str) -> Iterator[tuple[str, Tensor]]:
        """One by one: all of them together may not fit beside the model."""
        kind = getattr(torch, dtype.removeprefix("torch."))
        own = self.compute_weights.model
        named = (own if own.module.dtype == kind else self.model).parameters()
        return ((name, self.model.whole(p.detach().to(kind))) for name, p in named.items())

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the weights."""
        numbers = self.compute_weights.state() | {"recomputes": self._recomputes}
        reference = self.reference and self.reference.state()
        return {"optimiser": self._optimiser.state_dict(), "reference": reference, "numbers": numbers}

    def save(self, folder: Path) -> None:
        """Write `state()` to a folder. Each rank writes its own part."""
        write_shards(folder, self.state(), self.model.parameters(), self.peers.group)

    def restore(self, lineage: str, version: int, state: dict[str, Any] | Path) -> None:
        """Continue from `state`, or from the folder that ranks saved it to. The weights are loaded already."""
        self.lineage, self.version = lineage, version
        if isinstance(state, Path):
            state = read_shards(state, self.model.parameters(), self.peers.group)
            state["optimiser"]["param_groups"] = self._optimiser.state_dict()["param_groups"]
        self._optimiser.load_state_dict(state["optimiser"])
        if self.reference is not None:
            self.reference.restore(state["reference"])
        if numbers := state.get("numbers"):  # checkpoints of earlier versions have none
            self._recomputes |= bool(numbers["recomputes"])
            self.compute_weights.restore(numbers)
        self._set_aside()

    def _set_aside(self) -> None:
        """Gradients and moments that the first update will allocate are not free for others. A resumed run, which does
        not have them yet, must divide its work as one that has."""
        set_aside(self, (self.compute_weights.missing_on_masters + self._optimiser.missing_bytes) // self.peers.count)

    def close(self) -> None:
        """There is nothing to end."""

    def update(self, batch: Batch) -> Update:
        """Learn from a batch and advance the version; without anything left in the batch, advance it only."""
        version = self.version
        (portions,) = portions_of(batch, self.objective, self.config.minibatches, self.limit, ranks=1)
        return conclude(batch, [self.learn(portions)], version, self.lineage)

    def learn(self, portions: list[Portion]) -> Findings:
        """Learn from this rank's portions of a batch, together with the other ranks.

        If a GPU's memory is full before the weights have moved, the batch is learned from again with less memory.
        """
        while True:
            self._moved = self._differentiates = False
            self._choose_activations(portions)
            tokens = self.compute_weights.tokens_at_once(self.config.micro_batch_tokens)
            try:
                with RECORDING:
                    return self._learn(portions)
            except torch.OutOfMemoryError:
                # The other ranks are in the middle of a pass, in which this one has to take part.
                if self._moved or self.peers.count > 1 or not self._take_less(tokens):
                    raise
            self.compute_weights.release()  # only now: the error's traceback held the activations

    def _choose_activations(self, portions: list[Portion]) -> None:
        """Recompute activations if those of the batch's longest text do not fit. All ranks decide alike."""
        weights = self.compute_weights
        longest = max((longest_text(portion.rollouts) for portion in portions), default=0)
        wanted = self._recomputes or weights.should_recompute(longest)
        weights.recompute(self.peers.most(int(wanted)) > 0)
        if weights.recomputes and not self._told:
            self._told = True
            self._say(
                f"too little GPU memory is free for the activations of batch {self.version}, whose longest text has "
                f"{longest} tokens: they are {RECOMPUTED}"
            )

    def _take_less(self, tokens: int) -> bool:
        """Memory ran out with so many tokens at a time: recompute activations, or take half of the tokens from now on.
        False if neither would help."""
        weights, where = self.compute_weights, f"a GPU's memory ended in batch {self.version}"
        if self._differentiates and weights.can_recompute and not weights.recomputes:
            self._recomputes = self._told = True
            weights.take_at_most(tokens)
            self._say(f"{where}: from now on activations are {RECOMPUTED}")
            return True
        weights.take_at_most(tokens // 2)
        if tokens > FEWEST_TOKENS:
            self._say(f"{where}: {tokens // 2} tokens at a time from now on")
        return tokens > FEWEST_TOKENS

    def _learn(self, portions: list[Portion]) -> Findings:
        prepared = [self._prepare(portion) for portion in portions]
        parts = [part for several in prepared for part in several]
        if not self.compute_weights.record([part.micro for part in parts]):
            self._say(f"a GPU's memory ended in batch {self.version}: no pass is recorded as a CUDA graph from now on")
        minibatches = [
            self._minibatch(part_of, trained)
            for part_of, trained in zip(portions, prepared, strict=True)
            if len(part_of.responses.length_B)
        ]
        rate = learning_rate(self.config, self.version, self.steps)
        self._score_constants(parts, proximal=len(minibatches) > 1)
        statistics: list[TokenStatistics] = []
        passes, count = range(self.config.passes), portions[0].parts
        steps = [self._step(minibatch, count, rate, statistics) for _ in passes for minibatch in minibatches]
        self._moved = True
        self.version += 1
        self._set_aside()
        if self.reference is not None:
            self.reference.follow(self.model, self.version)
        return Findings(
            rate,
            steps,
            reduce(operator.add, statistics).on_host() if statistics else None,
            contributions(parts, count),
            sum(part.micro.token_RL.numel() for part in parts),
            *log_ratios(parts),
        )

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> Scored:
        """Score responses, none of them empty, under the current policy. Nothing is learned."""
        micros = self._cut(tuple(rollouts), padded=0)
        with RECORDING:
            moved = [micro.to(self.model.device) for micro in micros]
            logps = [logp_T.cpu() for logp_T in self._score_all(self.compute_weights, moved)]
        if not logps:
            return Scored.of(rollouts, np.zeros(0, np.float32))
        order_T = torch.cat([micro.response_T for micro in micros]).argsort(stable=True)
        return Scored.of(rollouts, torch.cat(logps)[order_T].numpy())  # a response never spans two micro-batches

    def score_as(self, weights: Weights, rollouts: Sequence[Rollout]) -> tuple[Scored, Manifest]:
        """Score responses under other weights of the same model and type. Also returns with what they were scored."""
        with self.compute_weights.holding(weights.tensors) as held:
            scored = self.score(rollouts)
            return scored, Manifest(weights.lineage, weights.version, describe(held.items()))

    def _prepare(self, portion: Portion) -> list[TrainingMicroBatch]:
        """This rank's micro-batches of one minibatch, watched responses included."""
        return prepare(portion, self._cut_portion(portion), self.model.device)

    def _cut_portion(self, portion: Portion) -> list[MicroBatch]:
        """Packed end to end, watched responses have passes of their own where that costs less. Padded rows are few and
        short: one more pass would cost more."""
        weights, trained = self.compute_weights, portion.trained
        tokens = int(portion.responses.length_B.sum()) // self.peers.count  # all ranks must cut alike
        if not (weights.model.takes_plans and weights.scores_apart(tokens)):
            return self._cut(portion.rollouts)
        watched = self._cut(portion.rollouts[len(trained) :])
        return self._cut(trained) + [micro.after(len(trained)) for micro in watched]

    def _minibatch(self, portion: Portion, parts: list[TrainingMicroBatch]) -> Minibatch:
        trained = [part for part in parts if not part.only_watched]
        return Minibatch(portion.responses, trained, self.peers.most(len(trained)))

    def _cut(self, rollouts: tuple[Rollout, ...], padded: int | None = None) -> list[MicroBatch]:
        budget = self.peers.least(self.compute_weights.tokens_at_once(self.config.micro_batch_tokens))
        return self._lay_out(rollouts, budget, padded)

    def _lay_out(self, rollouts: tuple[Rollout, ...], budget: int, padded: int | None = None) -> list[MicroBatch]:
        """`padded`: places up to which micro-batches are padded. Unset: those that recorded passes take."""
        if self.compute_weights.model.takes_plans:
            return flat_micro_batches(rollouts, budget, self.compute_weights.padded if padded is None else padded)
        return micro_batches(rollouts, budget, self.config.pack_tokens if self.model.takes_any_mask else 0)

    @torch.no_grad()
    def _score_constants(self, parts: list[TrainingMicroBatch], proximal: bool) -> None:
        """Score π_ref, and π_k where the first pass will not see it whole (it steps between minibatches)."""
        chosen = [part for part in parts if proximal or part.only_watched]
        scored = self._score_all(self.compute_weights, [part.micro for part in chosen])
        for part, logp_T in zip(chosen, scored, strict=True):
            part.proximal_logp_T = logp_T
        if self.reference is not None:
            trained = [part for part in parts if not part.only_watched]
            with self.reference.scoring(self.compute_weights) as weights:
                scored = self._score_all(weights, [part.micro for part in trained], replays=False)
            for part, logp_T in zip(trained, scored, strict=True):
                part.ref_logp_T = logp_T

    def _score_all(self, weights: ComputeWeights, micros: list[MicroBatch], replays: bool = True) -> list[Tensor]:
        """`log π(token)` of each micro-batch. All ranks make equally many forward passes. The learner's recorded passes
        are those of a model with adapters, which the reference may switch off."""
        rounds = self.peers.most(len(micros))
        scored = [self._score(weights, micro, replays)[0] for micro in micros]
        for _ in range(rounds - len(micros)):
            self._score(weights, self._idle())
        return scored

    def _step(
        self, minibatch: Minibatch, count: int, rate: float, statistics: list[TokenStatistics]
    ) -> tuple[float, float]:
        """One optimiser step; returns this rank's part of the loss, and the gradient's norm before clipping."""
        self._differentiates = True
        with self.compute_weights.learning():
            scale = self.compute_weights.loss_scale
            found = self._differentiate(minibatch, count, scale)
            while scale > 1 and not math.isfinite(found.norm):
                scale /= 16
                found = self._differentiate(minibatch, count, scale)
            self.compute_weights.keep_scale(scale)
        statistics += found.statistics
        for part, moved in zip(minibatch.parts, found.contributions, strict=True):
            part.contribution = moved if part.contribution is None else part.contribution + moved
        size = float(found.norm)
        if not math.isfinite(size):
            wider = None if self.config.memory == "lean" else WIDER.get(self.compute_weights.compute)
            largest = float(minibatch.responses.reward_B.abs().max())
            too_large = f"scale the rewards down, the largest is {largest:g}"
            raise SoleraError(
                f"the gradient of batch {self.version} is not finite: "
                + (too_large if largest > LARGE_REWARD else "lower learn.lr")
                + (f', or set model.compute to "{wider}"' if wider else "")
            )
        self._moved = True
        self._optimiser.step(rate, found.norm, self.compute_weights.left(scale))
        self.compute_weights.follow()
        return float(torch.stack(found.losses).sum()) if found.losses else 0.0, size

    def _differentiate(self, minibatch: Minibatch, count: int, scale: float) -> BackwardPass:
        """Leave the gradient on the masters. The loss is multiplied by `scale` on its way through the model."""
        self._optimiser.clear()
        statistic, found = self._statistic(minibatch), BackwardPass()
        for part in minibatch.parts:
            tokens = self._tokens(part)
            tokens.logp_T.retain_grad()
            if self._seen_at_once(minibatch):
                statistic = self.objective.statistic_of([tokens])
            loss, statistics = self.objective.loss(dataclasses.replace(tokens, statistic=statistic))
            (loss if scale == 1 else loss * scale).backward()
            self.compute_weights.pass_on_gradients(scale)
            found.losses.append(loss.detach())
            found.statistics.append(statistics)
            found.contributions.append(contribution(tokens, part.part_T, count, statistics.silenced_T, scale))
        for _ in range(minibatch.rounds - len(minibatch.parts)):
            (self._score(self.compute_weights, self._idle())[0].sum() * 0).backward()
            self.compute_weights.pass_on_gradients(scale)
        found.norm = self.model.whole(self._optimiser.norm(self.compute_weights.left(scale)))
        return found

    def _seen_at_once(self, minibatch: Minibatch) -> bool:
        return self.peers.count == 1 and len(minibatch.parts) == 1

    @torch.no_grad()
    def _statistic(self, minibatch: Minibatch) -> Tensor | None:
        """What the objective must know of the policy on the whole minibatch; of a single part, its own pass tells."""
        if self.objective.statistic is None or self._seen_at_once(minibatch):
            return None
        tokens = [self._tokens(part) for part in minibatch.parts]
        for _ in range(minibatch.rounds - len(tokens)):
            self._score(self.compute_weights, self._idle())
        if self.peers.count > 1:  # each rank may have a GPU of its own
            tokens = self.peers.gather([each.to(torch.device("cpu")) for each in tokens])
        statistic = self.objective.statistic_of(tokens)
        return None if statistic is None else statistic.to(self.model.device)

    def _idle(self) -> MicroBatch:
        """A text of two tokens, for a rank that has no micro-batch while others have. Its weight is 0."""
        text = Text(np.zeros(2, np.int32), (Span(1, 2, 0),), None)
        (micro,) = self._lay_out((Rollout("idle", (text,)),), budget=2)
        return micro.to(self.model.device)

    def _tokens(self, part: TrainingMicroBatch) -> Tokens:
        """What the objective sees of a part under the current policy, which is π_k at the first look."""
        micro = part.micro
        logp_T, entropy_T = self._score(self.compute_weights, micro)
        if part.proximal_logp_T is None:
            part.proximal_logp_T = logp_T.detach()
        behaviour_logp_T = BehaviourLogp(part.take(micro.behaviour_logp_T))
        proximal_logp_T = ProximalLogp(part.take(part.proximal_logp_T))
        return Tokens(
            logp_T=part.take(logp_T),
            behaviour_logp_T=self.objective.known_behaviour(behaviour_logp_T, proximal_logp_T),
            proximal_logp_T=proximal_logp_T,
            entropy_T=part.take(entropy_T),
            response_T=part.take(micro.response_T),
            responses=part.responses,
            ref_logp_T=None if part.ref_logp_T is None else part.take(part.ref_logp_T),
            turn_advantage_T=None if part.turn_advantage_T is None else part.take(part.turn_advantage_T),
        )

    def _score(self, weights: ComputeWeights, micro: MicroBatch, replays: bool = True) -> tuple[Tensor, Tensor]:
        with weights.autocast():
            return weights.model.run(
                score,
                micro,
                self.temperature,
                self.config.logit_chunk,
                differentiable_entropy=self.objective.entropy_bonus > 0,
                recorded=weights.recorded if replays else None,
                may_replay=weights.may_replay and replays,
            )
