"""One update: `i` passes over a batch, each cut into minibatches of whole groups and micro-batches by token budget."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from solera.batch import Batch, FloatArray, Parts, Scored, Update
from solera.config import LearnConfig
from solera.errors import SoleraError
from solera.learner.compute_weights import ComputeWeights
from solera.learner.contribution import QUANTITIES, contribution, shares
from solera.learner.reference import Reference
from solera.learner.rows import MicroBatch, flat_micro_batches, micro_batches
from solera.learner.schedule import learning_rate
from solera.learner.scoring import score
from solera.models.digest import describe, locate
from solera.models.extent import WIDER
from solera.models.language_model import LanguageModel
from solera.models.memory import RECORDING
from solera.objectives.objective import Objective
from solera.objectives.token_statistics import TokenStatistics
from solera.objectives.tokens import BehaviourLogp, ProximalLogp, Responses, Tokens
from solera.protocols import Weights
from solera.records import Manifest, Rollout

LARGE_REWARD = 1000.0
"""From which on a reward is the first to be suspected where a gradient is not finite."""


@dataclass(eq=False)
class TrainingMicroBatch:
    """A micro-batch and what the objective needs beside the model. All of it is constant through the passes.

    `number_B` are the numbers of the minibatch's responses in `Batch.scored`.
    """

    micro: MicroBatch
    responses: Responses
    number_B: Tensor
    taking_T: Tensor | None
    """Places of the tokens that take part, where some are only watched."""
    part_T: Tensor
    """The part of the batch's responses (`batch.Parts`) that each token that takes part belongs to."""
    turn_advantage_T: Tensor | None
    """Of all its tokens, if turns have their own advantages."""
    proximal_logp_T: Tensor | None = None
    ref_logp_T: Tensor | None = None
    contribution: Tensor | None = None
    """What its responses have done to the policy (`learner/contribution.py`)."""

    @property
    def only_watched(self) -> bool:
        return self.taking_T is not None and not len(self.taking_T)

    def take(self, value_T: Tensor) -> Tensor:
        """Of the tokens that take part."""
        return value_T if self.taking_T is None else value_T[self.taking_T]


@dataclass(eq=False)
class BackwardPass:
    """What a backward pass over a minibatch found in each micro-batch, and the norm of the gradient it left."""

    losses: list[Tensor] = field(default_factory=list)
    statistics: list[TokenStatistics] = field(default_factory=list)
    contributions: list[Tensor] = field(default_factory=list)
    norm: Tensor = field(default_factory=lambda: torch.zeros(()))


class Learner:
    """The policy being trained: float32 weights, AdamW, and a version that counts the batches learned from."""

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
        self.compute_weights = ComputeWeights(model, compute, trained=True, compiled=compiled)
        self.reference = reference
        self._say = say
        self._moved = False
        """Whether the present update cannot be begun again: it has taken a step, or is counted."""
        self._parameters = list(model.parameters().values())
        self._optimiser = torch.optim.AdamW(
            self._parameters,
            lr=learning_rate(config, 0, steps),
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        if config.gradient_checkpointing:
            self.compute_weights.model.module.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )

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
        return ((name, p.to(kind)) for name, p in named.items())

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the weights."""
        return {"optimiser": self._optimiser.state_dict(), "reference": self.reference and self.reference.state()}

    def restore(self, lineage: str, version: int, state: dict[str, Any]) -> None:
        """Continue from `state`. The weights are loaded already."""
        self.lineage, self.version = lineage, version
        self._optimiser.load_state_dict(state["optimiser"])
        if self.reference is not None:
            self.reference.restore(state["reference"])

    def update(self, batch: Batch) -> Update:
        """Learn from a batch and advance the version; without anything left in the batch, advance it only.

        Where a GPU's memory ends before the weights have moved, the batch is learned from in smaller parts.
        """
        while True:
            self._moved = False
            tokens = self.compute_weights.tokens_at_once(self.config.micro_batch_tokens)
            try:
                with RECORDING:
                    return self._update(batch)
            except torch.OutOfMemoryError:
                if self._moved or not self.compute_weights.take_less(tokens):
                    raise
            self._say(f"a GPU's memory ended in batch {self.version}: {tokens // 2} tokens at a time from now on")

    def _update(self, batch: Batch) -> Update:
        ranges = list(_split(batch, self.config.minibatches)) or [range(0)]
        written = Parts.of(batch.rollouts)
        prepared = [self._prepare(batch, written, chosen) for chosen in ranges]
        parts = [part for minibatch in prepared for part in minibatch]
        minibatches = [trained for several in prepared if (trained := [p for p in several if not p.only_watched])]
        rate = learning_rate(self.config, self.version, self.steps)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._score_constants(parts, proximal=len(minibatches) > 1)
        statistics: list[TokenStatistics] = []
        passes, count = range(self.config.passes), len(written.response_P)
        steps = [self._step(minibatch, count, statistics) for _ in passes for minibatch in minibatches]
        metrics = self._shares(written, parts)
        self._moved = True
        self.version += 1
        if self.reference is not None:
            self.reference.follow(self.model, self.version)
        metrics |= reduce(operator.add, statistics).metrics() if statistics else {}
        if steps:
            metrics["learn/loss"], metrics["learn/grad_norm"] = (
                sum(each) / len(steps) for each in zip(*steps, strict=True)
            )
        metrics |= {"learn/lr": rate, "tokens/computed": sum(part.micro.token_RL.numel() for part in parts)}
        return Update(metrics, *self._log_ratios(parts))

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> Scored:
        """Score responses, none of them empty, under the current policy. Nothing is learned."""
        micros = self._cut(tuple(rollouts))
        with RECORDING:
            logps = [self._score(self.compute_weights, micro.to(self.model.device))[0].cpu() for micro in micros]
        order_T = torch.cat([micro.response_T for micro in micros]).argsort(stable=True)
        return Scored.of(rollouts, torch.cat(logps)[order_T].numpy())  # a response never spans two micro-batches

    def _prepare(self, batch: Batch, written: Parts, chosen: range) -> list[TrainingMicroBatch]:
        """Micro-batches of one minibatch; the loss's denominators are counted over all of it before it is cut.

        The first minibatch brings along the watched responses, which are scored with it and kept from the objective.
        """
        watched = batch.watched if chosen.start == 0 else ()
        rollouts, device = batch.rollouts[chosen.start : chosen.stop] + watched, self.model.device
        length_B = torch.tensor([rollout.length for rollout in rollouts[: len(chosen)]], dtype=torch.float64)
        advantage_B, reward_B, group_B = (
            torch.from_numpy(value_B[chosen.start : chosen.stop])
            for value_B in (batch.advantage_B, batch.reward_B, batch.group_B)
        )
        responses = Responses(
            advantage_B=advantage_B.to(device),
            reward_B=reward_B.float().to(device),
            length_B=length_B.float().to(device),
            group_B=group_B.to(device),
            groups=batch.groups,
            weight_B=self.objective.aggregation(length_B, group_B, self.limit).float().to(device),
        )
        number_B = _numbers(batch, chosen, len(watched))
        return [
            TrainingMicroBatch(
                micro.to(device), responses, number_B, _taking(micro, len(chosen), device),
                _parts_taking(micro, chosen, written).to(device), _turn_advantages(batch, chosen, micro, device),
            )
            for micro in self._cut(rollouts)
        ]  # fmt: skip

    def _cut(self, rollouts: tuple[Rollout, ...]) -> list[MicroBatch]:
        budget = self.compute_weights.tokens_at_once(self.config.micro_batch_tokens)
        if self.compute_weights.model.takes_plans:
            return flat_micro_batches(rollouts, budget)
        return micro_batches(rollouts, budget, self.config.pack_tokens if self.model.takes_any_mask else 0)

    @torch.no_grad()
    def _score_constants(self, parts: list[TrainingMicroBatch], proximal: bool) -> None:
        """Score π_ref, and π_k where the first pass will not see it whole (it steps between minibatches)."""
        for part in parts:
            if proximal or part.only_watched:
                with nullcontext() if proximal else self.compute_weights.uncompiled():
                    part.proximal_logp_T = self._score(self.compute_weights, part.micro)[0]
            if self.reference is not None and not part.only_watched:
                with self.reference.scoring(self.compute_weights) as weights:
                    part.ref_logp_T = self._score(weights, part.micro)[0]

    def _step(
        self, minibatch: list[TrainingMicroBatch], parts: int, statistics: list[TokenStatistics]
    ) -> tuple[float, float]:  # fmt: skip
        """One optimiser step; returns the loss, and the gradient's norm before clipping."""
        with self._checkpointing():
            scale = self.compute_weights.loss_scale
            found = self._differentiate(minibatch, parts, scale)
            while scale > 1 and not math.isfinite(found.norm):
                scale /= 16
                found = self._differentiate(minibatch, parts, scale)
            self.compute_weights.keep_scale(scale)
        statistics += found.statistics
        for part, moved in zip(minibatch, found.contributions, strict=True):
            part.contribution = moved if part.contribution is None else part.contribution + moved
        norm, size = found.norm, float(found.norm)
        if size > self.config.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.config.grad_clip, norm)
        if not math.isfinite(size):
            wider = WIDER.get(self.compute_weights.compute)
            largest = max(float(part.responses.reward_B.abs().max()) for part in minibatch)
            too_large = f"scale the rewards down, the largest is {largest:g}"
            raise SoleraError(
                f"the gradient of batch {self.version} is not finite: "
                + (too_large if largest > LARGE_REWARD else "lower learn.lr")
                + (f', or set model.compute to "{wider}"' if wider else "")
            )
        self._moved = True
        self._optimiser.step()
        self.compute_weights.follow()
        return float(torch.stack(found.losses).sum()), size

    @contextmanager
    def _checkpointing(self) -> Iterator[None]:
        """transformers checkpoints in training mode only, and keeps no cache then: evaluation must not meet it."""
        module = self.compute_weights.model.module
        if self.config.gradient_checkpointing:
            module.train()
        try:
            yield
        finally:
            if self.config.gradient_checkpointing:
                module.eval()

    def _differentiate(self, minibatch: list[TrainingMicroBatch], parts: int, scale: float) -> BackwardPass:
        """Leave the gradient on the masters. The loss is multiplied by `scale` on its way through the model."""
        self._optimiser.zero_grad(set_to_none=True)
        statistic, found = self._statistic(minibatch), BackwardPass()
        for part in minibatch:
            tokens = self._tokens(part)
            tokens.logp_T.retain_grad()
            if len(minibatch) == 1:
                statistic = self.objective.statistic_of([tokens])
            loss, statistics = self.objective.loss(dataclasses.replace(tokens, statistic=statistic))
            (loss if scale == 1 else loss * scale).backward()
            self.compute_weights.pass_on_gradients(scale)
            found.losses.append(loss.detach())
            found.statistics.append(statistics)
            found.contributions.append(contribution(tokens, part.part_T, parts, statistics.silenced_T, scale))
        found.norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        return found

    @torch.no_grad()
    def _statistic(self, minibatch: list[TrainingMicroBatch]) -> Tensor | None:
        """What the objective must know of the policy on the whole minibatch; of a single part, its own pass tells."""
        if self.objective.statistic is None or len(minibatch) == 1:
            return None
        return self.objective.statistic_of([self._tokens(part) for part in minibatch])

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

    def _score(self, weights: ComputeWeights, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        with weights.autocast():
            return score(
                weights.model,
                micro,
                self.temperature,
                self.config.logit_chunk,
                differentiable_entropy=self.objective.entropy_bonus > 0,
            )

    def _shares(self, written: Parts, parts: list[TrainingMicroBatch]) -> dict[str, float]:
        """Who moved the policy, in all passes together."""
        sums = torch.zeros(len(QUANTITIES), len(written.response_P))
        for part in parts:
            if part.contribution is not None:
                sums += part.contribution.float().cpu()
        return shares(written, sums, self.version, self.lineage)

    def _log_ratios(self, parts: list[TrainingMicroBatch]) -> tuple[FloatArray, npt.NDArray[np.int64]]:
        """`log π_k − log α` of every token and the number of its response; responses with an unknown α are left out."""
        ratios, numbers = [torch.zeros(0)], [torch.zeros(0, dtype=torch.int64)]
        for part in parts:
            assert part.proximal_logp_T is not None
            ratios.append((part.proximal_logp_T - part.micro.behaviour_logp_T).cpu())
            numbers.append(part.number_B[part.micro.response_T.cpu()])
        ratio_T, number_T = torch.cat(ratios).numpy(), torch.cat(numbers).numpy()
        if np.isnan(ratio_T).any():
            known_T = ~np.isin(number_T, number_T[np.isnan(ratio_T)])
            ratio_T, number_T = ratio_T[known_T], number_T[known_T]
        return ratio_T, number_T


def _split(batch: Batch, minibatches: int) -> Iterator[range]:
    """Responses of each minibatch: whole groups, as even as they go."""
    if not batch.groups:
        return
    count = min(minibatches, batch.groups)
    starts = [*np.searchsorted(batch.group_B, np.arange(batch.groups)).tolist(), len(batch.rollouts)]
    edges = [starts[round(m * batch.groups / count)] for m in range(count + 1)]
    for start, stop in itertools.pairwise(edges):
        yield range(start, stop)


def _taking(micro: MicroBatch, trained: int, device: torch.device) -> Tensor | None:
    taking_T = micro.response_T < trained
    return None if taking_T.all() else taking_T.nonzero().flatten().to(device)


def _parts_taking(micro: MicroBatch, chosen: range, written: Parts) -> Tensor:
    """The part of each token of the responses `chosen`. The others are only watched."""
    response_T = micro.response_T[micro.response_T < len(chosen)].numpy()
    return torch.from_numpy(written.number_T(response_T + chosen.start))


def _turn_advantages(batch: Batch, chosen: range, micro: MicroBatch, device: torch.device) -> Tensor | None:
    """The advantage of each token's turn; 0 for responses that are only watched."""
    if batch.turn_advantages is None:
        return None
    value_T = np.zeros(len(micro.response_T))
    for response in micro.response_T.unique().tolist():
        if response < len(chosen):  # the tokens of a response are in the order in which they were written
            value_T[(micro.response_T == response).numpy()] = batch.turn_advantages[chosen.start + response]
    return torch.from_numpy(value_T).to(device)


def _numbers(batch: Batch, chosen: range, watched: int) -> Tensor:
    trained = len(batch.rollouts)
    return torch.cat([torch.arange(chosen.start, chosen.stop), torch.arange(trained, trained + watched)])
