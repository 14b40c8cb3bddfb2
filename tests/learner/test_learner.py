"""The learner's passes, minibatches, versions, reference and schedule."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from solera.config import LearnConfig, ObjectiveConfig
from solera.errors import SoleraError
from solera.learner.portions import split
from solera.learner.schedule import learning_rate
from solera.models.language_model import LanguageModel
from solera.records import Group, Reward, Sampling, Sequence
from solera.training.collation import collate, count_live_groups
from tests.conftest import VOCABULARY, random_prompt, random_rollout
from tests.learner.test_invariance import GRPO, make_groups, make_learner


def flat(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters().values()])


@pytest.mark.parametrize(("passes", "minibatches", "steps"), [(1, 1, 1), (3, 1, 3), (1, 4, 4), (2, 3, 6), (1, 50, 6)])
def test_passes_times_minibatches_optimiser_steps_and_one_version(tiny, passes, minibatches, steps):
    learner = make_learner(tiny, lr=1e-3, passes=passes, minibatches=minibatches)
    learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
    assert learner._optimiser.steps == steps  # six groups are left after the mask
    assert learner.version == 1


def test_minibatches_are_whole_groups(tiny):
    batch = collate(make_groups(), make_learner(tiny).objective, now=0, lineage="test", seed=0)
    for minibatches in range(1, 9):
        ranges = list(split(batch, minibatches))
        assert [i for chosen in ranges for i in chosen] == list(range(len(batch.rollouts)))
        keys = [{batch.rollouts[i].prompt_key for i in chosen} for chosen in ranges]
        assert sum(map(len, keys)) == len(set().union(*keys)) == 6


def test_nothing_to_learn_advances_the_version_without_a_step(tiny):
    rng = np.random.default_rng(0)
    prompt = random_prompt(rng)
    group = Group("prompt/0", tuple(random_rollout(rng, 0, prompt, 1.0, id=i) for i in range(4)))
    learner, before = make_learner(tiny, lr=1e-3), flat(tiny)
    batch = collate([group], learner.objective, now=0, lineage="test", seed=0)
    update = learner.update(batch)
    assert learner.version == 1
    assert torch.equal(flat(tiny), before)
    assert set(update.response_T.tolist()) == {0, 1, 2, 3}
    assert [use.advantage for use in batch.uses] == [None] * 4
    assert learner.update(collate([], learner.objective, now=1, lineage="test", seed=0)).response_T.tolist() == []


def test_momentum_does_not_move_the_weights_while_there_is_nothing_to_learn(tiny):
    rng, learner = np.random.default_rng(0), make_learner(tiny, lr=1e-3)
    start = flat(tiny)
    learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
    learned, prompt = flat(tiny), random_prompt(rng)
    assert not torch.equal(learned, start)
    group = Group("prompt/0", tuple(random_rollout(rng, 0, prompt, 0.0, id=i) for i in range(4)))
    learner.update(collate([group], learner.objective, now=1, lineage="test", seed=0))
    assert torch.equal(flat(tiny), learned)
    assert (learner._optimiser.steps, learner.version) == (1, 2)


def trained(model: LanguageModel) -> LanguageModel:
    copy = model.copy(torch.float64)
    copy.module.requires_grad_(True)
    return copy


@pytest.fixture
def deep() -> LanguageModel:
    """A random Llama in float64 with enough layers that recomputing activations saves memory."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.3, eos_token_id=1, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LanguageModel(LlamaForCausalLM(config).double().eval())


class Full:
    """Raises torch's error at these calls of the model's second layer: forward, or backward through it. Counts from 1,
    and counts a layer that is computed again."""

    def __init__(self, model: LanguageModel, calls: set[int], backward: bool = False) -> None:
        self.calls, self.count = calls, 0
        layer = model.body.layers[1]
        if backward:
            layer.register_full_backward_pre_hook(self)
        else:
            layer.register_forward_pre_hook(self)

    def __call__(self, *_) -> None:
        self.count += 1
        if self.count in self.calls:
            raise torch.OutOfMemoryError("CUDA out of memory")


def learned(learner, version: int) -> dict[str, float]:
    batch = collate(make_groups(), learner.objective, now=version, lineage="test", seed=0)
    return learner.update(batch).metrics


@pytest.mark.parametrize(
    ("failing", "backward"), [(2, False), (3, False), (1, True), (2, True)],
    ids=["forward", "forward, with half of the gradient", "backward", "backward, with half of the gradient"],
)  # fmt: skip
def test_where_memory_ends_activations_are_recomputed_and_nothing_else_changes(deep, failing, backward):
    """Three forward passes: one over responses that are only watched, then two that are differentiated."""
    usual, learner = (make_learner(trained(deep), lr=1e-3, micro_batch_tokens=129, pack_tokens=0) for _ in range(2))
    full, said = Full(learner.model, {failing}, backward), []
    learner._say = said.append
    for version in range(3):
        assert learned(learner, version) == learned(usual, version)
        assert torch.equal(flat(learner.model), flat(usual.model))
    assert full.count > failing
    assert said == [
        "a GPU's memory ended in batch 0: from now on activations are recomputed in the backward pass, which takes "
        "about a third more time"
    ]
    assert learner.compute_weights.recomputes
    assert not learner.model.module.training


def test_recomputed_activations_give_the_same_gradient(deep):
    """Two passes of the second layer: kept activations need them once, recomputed ones twice."""
    passes = []
    models = [trained(deep), trained(deep)]
    for model, saving in zip(models, (False, True), strict=True):
        learner = make_learner(model, micro_batch_tokens=258, pack_tokens=0)
        counted = Full(model, {1} if saving else set())
        learned(learner, 0)
        passes.append(counted.count)
    assert passes == [2, 1 + 2 * 2]
    for kept, again in zip(*(model.parameters().values() for model in models), strict=True):
        torch.testing.assert_close(again.grad, kept.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("failing", [{1, 2}, {2, 3}], ids=["at once", "with half of the gradient"])
def test_where_that_is_not_enough_the_batch_is_learned_from_in_smaller_parts(deep, failing):
    usual = make_learner(trained(deep), lr=1e-3)
    learner = make_learner(trained(deep), lr=1e-3, micro_batch_tokens=258, pack_tokens=0)
    said, parts, cutting = [], [], learner._cut

    def cut(rollouts):
        micros = cutting(rollouts)
        parts.append(len(micros))
        return micros

    Full(learner.model, failing)
    learner._cut, learner._say = cut, said.append
    assert learned(learner, 0)["learn/grad_norm"] == pytest.approx(learned(usual, 0)["learn/grad_norm"], rel=1e-6)
    assert said[1:] == ["a GPU's memory ended in batch 0: 129 tokens at a time from now on"]
    assert 2 <= parts[0] == parts[1] < parts[2]
    assert (learner.version, learner._optimiser.steps) == (1, 1)
    assert torch.allclose(flat(learner.model), flat(usual.model), rtol=0, atol=1e-6)
    learned(learner, 1)
    assert parts[3:] == [parts[2]]  # it stays with what fitted


def test_memory_that_ends_while_scoring_is_not_saved_by_recomputing(deep):
    """Passes without gradients keep no activations."""
    learner = make_learner(trained(deep), lr=1e-3, micro_batch_tokens=300, minibatches=2)
    said = []
    learner._say = said.append
    Full(learner.model, {1})
    learned(learner, 0)
    assert said == ["a GPU's memory ended in batch 0: 150 tokens at a time from now on"]
    assert not learner.compute_weights.recomputes


@pytest.mark.parametrize(
    ("tokens", "recomputes"), [(4096, False), (4095, True), (40_000, False)], ids=["enough", "too little", "much"]
)
def test_activations_are_recomputed_where_too_few_tokens_would_fit(deep, tokens, recomputes):
    learner, said = make_learner(trained(deep), lr=1e-3), []
    learner._say, weights = said.append, learner.compute_weights
    weights._free = lambda: int(tokens * 1.5 * weights.bytes_per_token(recomputes=False)) + 2
    for version in range(2):
        learned(learner, version)
    assert weights.recomputes == recomputes
    assert len(said) == recomputes
    share = weights.bytes_per_token(recomputes=False) / weights.bytes_per_token(recomputes=recomputes)
    assert weights.tokens_at_once(None) == min(32_768, int(tokens * share))


def test_a_text_that_does_not_fit_is_recomputed_and_the_next_batch_is_not(deep, monkeypatch):
    monkeypatch.setattr("solera.learner.compute_weights.WORTHWHILE_TOKENS", 1)
    learner, said, rng = make_learner(trained(deep), lr=1e-3), [], np.random.default_rng(0)
    learner._say, weights = said.append, learner.compute_weights
    weights._free = lambda: int(10 * 1.5 * weights.bytes_per_token(recomputes=False)) + 2
    recomputed = []
    for version, prompt in enumerate([(2,), (2, 3, 4, 5, 6, 7, 8, 9, 10, 2), (2,), (3,) * 10]):
        rollouts = tuple(random_rollout(rng, 0, prompt, float(i), id=i) for i in range(4))
        learner.update(collate([Group("prompt/0", rollouts)], learner.objective, now=version, lineage="test", seed=0))
        recomputed.append(weights.recomputes)
        longest = max(len(rollout.sequences[0].token_ids_T) for rollout in rollouts)
        assert recomputed[-1] == (longest > 10)
    assert recomputed == [False, True, False, True]
    assert len(said) == 1
    assert said[0].startswith("too little GPU memory is free for the activations of batch 1, whose longest text has 1")


def test_memory_that_nothing_helps_against_ends_the_update(deep):
    learner, said = make_learner(deep, lr=1e-3, micro_batch_tokens=1024), []
    learner._say = said.append
    Full(learner.model, set(range(100)))
    with pytest.raises(torch.OutOfMemoryError):
        learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
    assert [sentence.split(": ")[1].split(",")[0] for sentence in said] == [
        "from now on activations are recomputed in the backward pass",
        "512 tokens at a time from now on", "256 tokens at a time from now on",
    ]  # fmt: skip
    assert learner.version == 0


def test_memory_that_ends_after_a_step_is_not_tried_again(tiny):
    """The weights have moved: the same batch again would be another update."""
    learner, calls = make_learner(tiny, lr=1e-3, passes=2), []
    scoring = learner._score

    def score(weights, micro):
        calls.append(micro)
        if learner._optimiser.steps:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return scoring(weights, micro)

    learner._score = score
    with pytest.raises(torch.OutOfMemoryError):
        learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
    assert learner._optimiser.steps == 1


def test_batch_accounts_for_everything_drawn():
    groups = make_groups()
    from solera.objectives.objective import compose
    from solera.objectives.table import resolve

    batch = collate(groups, compose(resolve(GRPO)), now=5, lineage="test", seed=0)
    assert batch.metrics["reward/zero_variance_fraction"] == pytest.approx(1 / 7)
    assert len(batch.uses) == 28
    assert {use.age for use in batch.uses} == {5, None}  # the empty response has no version
    assert batch.metrics["age/max"] == 5
    assert count_live_groups(groups) == 6
    foreign = collate(groups, compose(resolve(GRPO)), now=5, lineage="another", seed=0)
    assert "age/mean" not in foreign.metrics


def test_a_response_without_log_probabilities_is_refused_by_an_objective_that_needs_them(tiny):
    rng = np.random.default_rng(0)
    group = make_groups()[0]
    first = group.rollouts[0].sequences[0]
    text = Sequence(first.token_ids_T, first.spans, None)
    foreign = random_rollout(rng, 0, (2,), 1.0, id=77, origin="model:other")
    object.__setattr__(foreign, "sequences", (text,))
    with pytest.raises(SoleraError, match="rollout 77 from 'model:other' has no log-probabilities"):
        collate(
            [Group("prompt/0", (*group.rollouts, foreign))], make_learner(tiny).objective, now=0, lineage="test", seed=0
        )


def test_a_response_of_a_truncated_sampler_is_refused(tiny):
    group = make_groups()[0]
    greedy = dataclasses.replace(group.rollouts[0], sampling=Sampling(0.0, 8), id=5)
    with pytest.raises(SoleraError, match="rollout 5 was sampled greedily"):
        collate(
            [Group("prompt/0", (greedy, *group.rollouts[1:]))],
            make_learner(tiny).objective,
            now=0,
            lineage="test",
            seed=0,
        )


@pytest.mark.parametrize(("period", "ema"), [(2, None), (None, 0.25), (None, None)])
def test_the_reference_is_swapped_mixed_or_frozen(tiny, period, ema):
    objective = ObjectiveConfig("grpo", beta=0.1, ref_period=period, ref_ema=ema)
    learner = make_learner(tiny, objective, lr=1e-2)
    start = flat(tiny)
    expected = start.clone()
    for version in range(1, 5):
        learner.update(collate(make_groups(version), learner.objective, now=version - 1, lineage="test", seed=0))
        if ema:
            expected = (1 - ema) * expected + ema * flat(tiny)
        elif period and version % period == 0:
            expected = flat(tiny)
        assert torch.allclose(flat(learner.reference.model), expected, atol=1e-5)
    assert torch.equal(expected, start) == (period is None and ema is None)


def test_kl_to_the_reference_is_zero_while_it_is_the_policy(tiny):
    learner = make_learner(tiny, ObjectiveConfig("grpo", beta=0.1))
    update = learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
    assert update.metrics["kl/ref"] == pytest.approx(0.0, abs=1e-4)


def test_weights_name_every_tensor_once_with_its_version(tiny):
    learner = make_learner(tiny)
    learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
    weights, manifest = learner.weights("torch.float64"), learner.manifest("torch.float64")
    assert (weights.lineage, weights.version) == (manifest.lineage, manifest.version) == ("test", 1)
    tensors = dict(weights.tensors)
    assert [spec.name for spec in manifest.tensors] == list(tensors)
    assert all(spec.shape == tuple(tensors[spec.name].shape) for spec in manifest.tensors)


def test_gradient_clipping_bounds_the_step(tiny):
    learner = make_learner(tiny, grad_clip=1e-3)
    update = learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
    clipped = torch.cat([p.grad.flatten() for p in tiny.parameters().values()])
    assert update.metrics["learn/grad_norm"] > 1e-2
    assert torch.linalg.norm(clipped).item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("times", "says"), [(1.0, "lower learn.lr$"), (1e6, r"scale the rewards down, the largest is 2.5e\+06$")]
)
def test_a_gradient_that_is_not_finite_stops_the_run(tiny, times, says):
    learner, groups = make_learner(tiny), []
    for group in make_groups():
        larger = [tuple(Reward(times * reward.value) for reward in rollout.rewards) for rollout in group.rollouts]
        several = zip(group.rollouts, larger, strict=True)
        groups.append(Group(group.prompt_key, tuple(dataclasses.replace(one, rewards=given) for one, given in several)))
    next(iter(tiny.parameters().values())).data.fill_(torch.inf)
    with pytest.raises(SoleraError, match=f"the gradient of batch 0 is not finite: {says}"):
        learner.update(collate(groups, learner.objective, now=0, lineage="test", seed=0))


def test_schedule():
    assert [learning_rate(LearnConfig(lr=1.0, warmup=4), k, 100) for k in (0, 3, 4, 99)] == [0.25, 1.0, 1.0, 1.0]
    cosine = LearnConfig(lr=1.0, warmup=0, decay="cosine")
    assert learning_rate(cosine, 50, 100) == pytest.approx(0.5)
    assert learning_rate(cosine, 99, 100) < 0.001


def test_logits_of_a_batch_are_never_held_at_once(tiny, monkeypatch):
    sizes = []
    real = type(tiny).logits
    monkeypatch.setattr(type(tiny), "logits", lambda self, hidden: sizes.append(len(hidden)) or real(self, hidden))
    learner = make_learner(tiny, logit_chunk=5)
    learner.update(collate(make_groups(), learner.objective, now=0, lineage="test", seed=0))
    assert max(sizes) == 5


def test_a_few_masked_groups_are_watched_for_the_divergences_and_change_no_gradient(tiny):
    """Half the groups have equal rewards: one of them is scored, and speaks for all of them."""
    rng = np.random.default_rng(3)
    groups = []
    for key in range(8):
        prompt = random_prompt(rng)
        rewards = [1.0] * 4 if key % 2 else [0.0, 1.0, 0.0, 1.0]
        members = (random_rollout(rng, key, prompt, r, id=4 * key + i) for i, r in enumerate(rewards))
        groups.append(Group(f"prompt/{key}", tuple(members)))
    live = [group for group in groups if group.rollouts[0].reward == 0.0]
    batch = collate(groups, make_learner(tiny).objective, now=0, lineage="test", seed=0)
    assert len(batch.rollouts) == 16 and len(batch.watched) == 4
    assert batch.watched_for == 4.0
    assert {rollout.prompt_key for rollout in batch.watched} < {f"prompt/{key}" for key in (1, 3, 5, 7)}
    chosen = {tuple(r.id for r in collate(groups, make_learner(tiny).objective, now=k, lineage="test", seed=0).watched)
              for k in range(20)}  # fmt: skip
    assert len(chosen) > 3
    gradients = []
    for several in (groups, live):
        learner = make_learner(tiny)
        batch = collate(several, learner.objective, now=0, lineage="test", seed=0)
        update = learner.update(batch)
        gradients.append(torch.cat([p.grad.flatten() for p in tiny.parameters().values()]).clone())
        assert batch.stands_for_B[np.unique(update.response_T)].sum() == 4 * len(several)
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-9)


def test_packed_end_to_end_watched_responses_have_a_pass_without_a_gradient(tiny):
    """Every text is computed once, and the update tells the same as if all of them shared one pass."""
    together, packed = trained(tiny), trained(tiny).with_plans()
    learners = [make_learner(model, lr=1e-3) for model in (together, packed)]
    batch = collate(make_groups(), learners[0].objective, now=0, lineage="test", seed=0)
    expected = learners[0].update(batch)
    passes = []
    note = lambda _, given: passes.append((torch.is_grad_enabled(), given[0].shape[1]))  # noqa: E731
    packed.body.layers[0].register_forward_pre_hook(note)
    found = learners[1].update(batch)
    count = [sum(map(len, texts(several))) for several in (batch.watched, batch.rollouts)]
    assert batch.watched and passes == [(False, count[0]), (True, count[1])]
    assert found.metrics["tokens/computed"] == sum(count)
    assert torch.allclose(flat(packed), flat(together), rtol=0, atol=1e-9)
    assert by_response(found) == pytest.approx(by_response(expected), abs=1e-6)


def texts(rollouts) -> list[list[int]]:
    """What a row has of each prompt and its different responses."""
    prompts = {tuple(r.sequences[0].token_ids_T[: r.sequences[0].spans[0].start].tolist()) for r in rollouts}
    whole = {tuple(r.sequences[0].token_ids_T.tolist()): r.sequences[0].spans[0].start for r in rollouts}
    return [*map(list, prompts), *(list(text[start:]) for text, start in whole.items())]


def by_response(update) -> list[float]:
    return update.log_ratio_T[np.argsort(update.response_T, kind="stable")].tolist()


def test_tokens_computed_are_those_of_every_forward_pass(tiny):
    """One text a micro-batch: its prompt and its response. A text that was written twice is computed once."""
    learner = make_learner(tiny, pack_tokens=0, micro_batch_tokens=1)
    batch = collate(make_groups(), learner.objective, now=0, lineage="test", seed=0)
    texts = {tuple(rollout.sequences[0].token_ids_T.tolist()) for rollout in batch.scored}
    assert learner.update(batch).metrics["tokens/computed"] == sum(map(len, texts))


def test_the_loss_is_reported_whole_however_it_is_cut(tiny):
    groups = make_groups()
    losses = []
    for cut in ({"pack_tokens": 1000}, {"pack_tokens": 0, "micro_batch_tokens": 1}):
        learner = make_learner(tiny, ObjectiveConfig("reinforce"), **cut)
        batch = collate(groups, learner.objective, now=0, lineage="test", seed=0)
        losses.append(learner.update(batch).metrics["learn/loss"])
    expected = total = 0.0
    for rollout, advantage in zip(batch.rollouts, batch.advantage_B.tolist(), strict=True):
        (sequence,) = rollout.sequences
        ids = torch.tensor(sequence.token_ids_T.tolist())[None]
        logp = torch.log_softmax(tiny.module(input_ids=ids).logits[0] / 0.8, -1)
        for t in np.flatnonzero(sequence.mask_T):
            expected -= advantage * logp[t - 1, ids[0, t]].item()
            total += 1
    assert losses == pytest.approx([expected / total] * 2, rel=1e-5)
