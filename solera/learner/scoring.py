"""Log-probabilities and entropy of taken tokens, in chunks, so that the logits of a batch are never held at once."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from solera.learner.graphs import RecordedBody
from solera.learner.head import ScoredHead
from solera.learner.rows import MicroBatch
from solera.models.language_model import LanguageModel


def score(
    model: LanguageModel,
    micro: MicroBatch,
    temperature: float,
    chunk: int,
    *,
    differentiable_entropy: bool = False,
    recorded: RecordedBody | None = None,
    may_replay: bool = False,
) -> tuple[Tensor, Tensor]:
    """`log π(token)` at the run's temperature and the policy's entropy where it was taken. `[T], [T]` in float32.

    `may_replay`: the same micro-batch may be replayed at another time.
    """
    hidden_RLH = None if recorded is None else recorded.hidden(micro)
    if hidden_RLH is None:
        hidden_RLH = _hidden(model, micro, may_replay and micro.padded_places is not None)
    hidden_TH = hidden_RLH.flatten(0, 1)[micro.predictor_T]
    if model.multiplies_exactly(hidden_TH):
        return ScoredHead.apply(
            hidden_TH, model.head.weight, micro.target_T, temperature, chunk, differentiable_entropy
        )
    if len(hidden_TH) <= chunk:
        return _score_chunk(model, hidden_TH, micro.target_T, temperature, differentiable_entropy)
    parts = [
        # The chunk's logits are thrown away and computed again in the backward pass.
        checkpoint(_score_chunk, model, hidden, target, temperature, differentiable_entropy, use_reentrant=False)
        for hidden, target in zip(hidden_TH.split(chunk), micro.target_T.split(chunk), strict=True)
    ]
    return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _hidden(model: LanguageModel, micro: MicroBatch, as_recorded: bool) -> Tensor:
    """Hidden states of a plain pass. `as_recorded`: by the code that is compiled for training, which recorded passes
    run. What torch compiles for passes without a gradient may give other last bits."""
    wanted = torch.is_grad_enabled()
    with torch.set_grad_enabled(wanted or as_recorded):
        hidden_RLH = model.hidden(micro.token_RL, micro.position_RL, micro.mask(), plan=micro.texts)
    return hidden_RLH if wanted else hidden_RLH.detach()


def _score_chunk(
    model: LanguageModel, hidden_TH: Tensor, target_T: Tensor, temperature: float, differentiable_entropy: bool
) -> tuple[Tensor, Tensor]:
    logits_TV = model.logits(hidden_TH)
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    logp_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    for_entropy_TV = logp_TV if differentiable_entropy else logp_TV.detach()
    entropy_T = -(for_entropy_TV.exp() * for_entropy_TV).sum(dim=-1)
    return logp_TV.gather(1, target_T[:, None])[:, 0], entropy_T
