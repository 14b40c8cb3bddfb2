"""What the loop and the learner exchange can travel between processes."""

import dataclasses
import pickle

import numpy as np
import pytest

from solera.batch import Scored
from solera.diagnosis.mismatch import Mismatch
from solera.records import Sequence
from solera.training.collation import collate
from solera.training.step_metrics import off_policy_metrics
from tests.learner.test_contribution import mixed_groups
from tests.learner.test_invariance import make_groups, make_learner
from tests.learner.test_learner import trained


def test_a_batch_and_an_update_that_were_sent_give_the_same_step(tiny):
    """The learner gets a copy of the batch, and its update comes back as a copy: no number changes."""
    kept, sent = (make_learner(trained(tiny)) for _ in range(2))
    kept.version = sent.version = 7
    batch = collate(mixed_groups(), kept.objective, now=7, lineage="test", seed=0)
    update = kept.update(batch)
    returned = pickle.loads(pickle.dumps(sent.update(pickle.loads(pickle.dumps(batch)))))
    assert returned.metrics == update.metrics
    given = Mismatch(np.inf, print), 7, "test"
    found = off_policy_metrics(batch, returned, *given)
    assert found == off_policy_metrics(batch, update, *given)
    assert {"tokens/effective", "divergence/origin_human/kl"} <= found.keys()


def test_scored_tokens_carry_what_their_rollouts_say():
    first, second, third = (r for r in make_groups()[0].rollouts[:3])
    (text,) = second.sequences
    foreign = dataclasses.replace(second, sequences=(Sequence(text.token_ids_T, text.spans, None),))
    lengths = [rollout.length for rollout in (first, foreign, third)]
    scored = Scored.of((first, foreign, third), np.zeros(sum(lengths), np.float32))
    assert scored.response_T.tolist() == [0] * lengths[0] + [1] * lengths[1] + [2] * lengths[2]
    known = [*first.sequences[0].span_logp, *[np.nan] * lengths[1], *third.sequences[0].span_logp]
    assert scored.behaviour_logp_T.tolist() == pytest.approx(known, nan_ok=True)
    with pytest.raises(AssertionError, match="one log-probability for each token"):
        Scored.of((first,), np.zeros(lengths[0] + 1, np.float32))
