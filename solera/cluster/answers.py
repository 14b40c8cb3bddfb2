"""How requests to an engine in a Ray actor travel, and its answers: many of them in few objects."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from solera.errors import SoleraError
from solera.protocols import Work
from solera.records import Completion, FinishReason, Sampling

Request = tuple[int, tuple[int, ...], Sampling, int]
"""A number, and what `generate` is given. Plain tuples pickle fast, and objects that several of them share, such as the
prompt of a group, are pickled once."""
Outcome = Completion | SoleraError


class Answers(NamedTuple):
    """The outcomes of some requests. Also what the engine did so far."""

    numbers: list[int]
    """The requests that were answered with a completion. The next fields have one entry for each."""
    lengths: list[int]
    versions: list[tuple[tuple[int, int], ...]]
    reasons: list[FinishReason]
    lineages: list[str | None]
    tokens_N: npt.NDArray[np.int32]
    """The tokens of all completions, one after the other."""
    logp_N: npt.NDArray[np.float32]
    failed: dict[int, SoleraError]
    sampled: int
    work: Work


def packed(outcomes: Mapping[int, Outcome], sampled: int, work: Work) -> Answers:
    written = {number: each for number, each in outcomes.items() if isinstance(each, Completion)}
    completions = written.values()
    return Answers(
        list(written),
        [len(each.token_ids_T) for each in completions],
        [each.versions for each in completions],
        [each.finish_reason for each in completions],
        [each.lineage for each in completions],
        np.concatenate([np.zeros(0, np.int32), *(each.token_ids_T for each in completions)]),
        np.concatenate([np.zeros(0, np.float32), *(each.behaviour_logp_T for each in completions)]),
        {number: each for number, each in outcomes.items() if isinstance(each, SoleraError)},
        sampled,
        work,
    )


def unpacked(answers: Answers, samplings: Mapping[int, Sampling]) -> dict[int, Outcome]:
    """The outcomes of those requests that `samplings` knows. Arrays are copied: all of them may lie in one piece of
    Ray's shared memory."""
    outcomes, end = dict[int, Outcome](answers.failed), 0
    each = zip(answers.numbers, answers.lengths, answers.versions, answers.reasons, answers.lineages, strict=True)
    for number, length, versions, reason, lineage in each:
        start, end = end, end + length
        if number in samplings:
            tokens_T, logp_T = answers.tokens_N[start:end], answers.logp_N[start:end]
            outcomes[number] = Completion(
                tokens_T.astype(np.int32), logp_T.astype(np.float32), versions, reason, lineage, samplings[number]
            )
    return outcomes
