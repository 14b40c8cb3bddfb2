"""What a step consumed: how far from the policy its authors were, by age and by origin, and how much of it counted."""

from collections.abc import Sequence

import numpy as np
import torch

from solera.diagnosis.divergence import Apart, age_label
from solera.diagnosis.mismatch import Mismatch
from solera.learner.batch import Batch
from solera.learner.learner import Update

Labels = Sequence[str | None]


def account(batch: Batch, update: Update, mismatch: Mismatch, now: int, lineage: str) -> dict[str, float]:
    """Figures of the policy that met the batch (version `now`) against whoever wrote it, from the training pass."""
    if not update.rollouts:
        return {}
    ages = [rollout.age(now, lineage) for rollout in update.rollouts]
    apart = Apart(update.log_ratio_T, update.response_T, update.stands_for_B)
    whole = apart.figures()
    metrics = {f"divergence/{name}": value for name, value in whole.items()}
    for labels in ([age_label(age) for age in ages], [f"origin_{rollout.origin}" for rollout in update.rollouts]):
        metrics |= _apart_by(apart, labels)
    fresh_B = torch.tensor([age == 0 for age in ages])
    return metrics | _effective(apart, batch, update) | mismatch.measure(update.log_ratio_T, update.response_T, fresh_B)


def _apart_by(apart: Apart, labels: Labels) -> dict[str, float]:
    """`divergence/<label>/…`; nothing where all responses are alike, since the whole batch's figures are theirs."""
    if len(set(labels)) < 2:
        return {}
    found = apart.by(labels)
    return {f"divergence/{label}/{name}": value for label, figures in found.items() for name, value in figures.items()}


def _effective(apart: Apart, batch: Batch, update: Update) -> dict[str, float]:
    """Tokens trained on, less what their authors' distance from the policy takes away: `ess` of them count."""
    trained = set(map(id, batch.rollouts))
    chosen_B = np.array([id(rollout) in trained for rollout in update.rollouts])
    if not chosen_B.any():
        return {}
    tokens = batch.metrics["tokens/trained"]
    effective = apart.figures(chosen_B)["ess"] * tokens
    return {"tokens/effective": effective, "waste/stale": tokens - effective}
