"""Micro-batches together with what the objective needs to know of their tokens."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from solera.batch import FloatArray, Parts
from solera.learner.contribution import QUANTITIES
from solera.learner.portions import Portion
from solera.learner.rows import MicroBatch
from solera.objectives.tokens import Responses


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


@dataclass(frozen=True, eq=False)
class Minibatch:
    """The micro-batches of one optimiser step. Every rank makes as many `rounds`, and is idle in those it has no
    micro-batch for."""

    responses: Responses
    parts: list[TrainingMicroBatch]
    rounds: int


def prepare(portion: Portion, cut: list[MicroBatch], device: torch.device) -> list[TrainingMicroBatch]:
    """The micro-batches of a portion. In `cut`, the rank's responses are numbered from 0."""
    responses, own = portion.responses.to(device), Parts.of(portion.trained)
    prepared = []
    for micro in cut:
        taking_T = micro.response_T < len(portion.trained)
        part_T = portion.part_P[own.number_T(micro.response_T[taking_T].numpy())]
        renumbered = dataclasses.replace(micro, response_T=portion.place_R[micro.response_T])
        prepared.append(
            TrainingMicroBatch(
                renumbered.to(device), responses, portion.number_B,
                None if taking_T.all() else taking_T.nonzero().flatten().to(device),
                torch.from_numpy(part_T).to(device), _turn_advantages(portion, micro, device),
            )
        )  # fmt: skip
    return prepared


def contributions(prepared: list[TrainingMicroBatch], parts: int) -> Tensor:
    """What each part of the batch's responses did to the policy, in all passes together. `[3, P]`"""
    sums = torch.zeros(len(QUANTITIES), parts)
    for one in prepared:
        if one.contribution is not None:
            sums += one.contribution.float().cpu()
    return sums


def log_ratios(prepared: list[TrainingMicroBatch]) -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """`log π_k − log α` of every token and the number of its response; responses with an unknown α are left out."""
    ratios, numbers = [torch.zeros(0)], [torch.zeros(0, dtype=torch.int64)]
    for one in prepared:
        assert one.proximal_logp_T is not None
        ratios.append((one.proximal_logp_T - one.micro.behaviour_logp_T).cpu())
        numbers.append(one.number_B[one.micro.response_T.cpu()])
    ratio_T, number_T = torch.cat(ratios).numpy(), torch.cat(numbers).numpy()
    if np.isnan(ratio_T).any():
        known_T = ~np.isin(number_T, number_T[np.isnan(ratio_T)])
        ratio_T, number_T = ratio_T[known_T], number_T[known_T]
    return ratio_T, number_T


def _turn_advantages(portion: Portion, micro: MicroBatch, device: torch.device) -> Tensor | None:
    """The advantage of each token's turn; 0 for responses that are only watched."""
    if portion.turn_advantages is None:
        return None
    value_T = np.zeros(len(micro.response_T))
    for response in micro.response_T.unique().tolist():
        if response < len(portion.trained):  # the tokens of a response are in the order in which they were written
            value_T[(micro.response_T == response).numpy()] = portion.turn_advantages[response]
    return torch.from_numpy(value_T).to(device)
