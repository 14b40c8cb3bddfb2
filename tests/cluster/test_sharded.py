"""A learner over two and three processes does what a learner in one process does."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from solera import protocols
from solera.config import LoraConfig, ObjectiveConfig
from solera.errors import SoleraError
from solera.hub import Snapshot
from solera.learner.learner import Learner
from solera.learner.reference import Reference
from solera.models.adapter import add_adapter
from solera.models.digest import describe
from solera.models.language_model import LanguageModel
from solera.models.loading import Source
from solera.models.unloaded import Unloaded
from solera.objectives.table import TABLE
from solera.records import Group
from solera.sharded.rank import LearnerSpec
from solera.sharded.ranks import Ranks
from solera.training.collation import collate
from tests.cluster.ranks import (
    adapted_llama,
    begin,
    float32_llama,
    gradient,
    llama,
    loaded_whole,
    read_whole,
    spec_of,
    start,
    tied_llama,
)
from tests.conftest import END, VOCABULARY
from tests.learner.test_invariance import GRPO, make_groups
from tests.models.architectures import make

pytestmark = pytest.mark.cluster
CUTS = ({"pack_tokens": 1000}, {"pack_tokens": 0, "micro_batch_tokens": 1}, {"micro_batch_tokens": 40})


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = start(request.param)
    yield started
    started.close()


def alone(spec: LearnerSpec) -> Learner:
    model, objective = spec.load(), spec.objective
    reference = Reference(model, objective.ref_period, objective.ref_ema) if objective.uses_reference else None
    return Learner(
        model, objective, spec.config, lineage=spec.lineage, temperature=spec.temperature, limit=spec.limit,
        steps=spec.steps, compute=spec.compute, reference=reference,
    )  # fmt: skip


def batch_of(groups: list[Group], learner: protocols.Learner, spec: LearnerSpec):
    return collate(groups, spec.objective, now=learner.version, lineage="test", seed=0)


def gradient_alone(learner: Learner) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in learner.model.parameters().values()])


def by_response(update) -> dict[int, list[float]]:
    return {int(b): update.log_ratio_T[update.response_T == b].tolist() for b in np.unique(update.response_T)}


def compare(ranks: Ranks, spec: LearnerSpec, groups: list[Group], updates: int = 1) -> None:
    """Gradient, metrics and log ratios of both learners. In float64 only the order of sums differs."""
    single, sharded = alone(spec), begin(ranks, spec)
    for _ in range(updates):
        batch = batch_of(groups, single, spec)
        expected, found = single.update(batch), sharded.update(batch)
    whole, together = gradient_alone(single), gradient(ranks)
    assert torch.linalg.norm(whole) > 1e-6
    assert torch.linalg.norm(together - whole) <= 1e-12 * torch.linalg.norm(whole)
    assert [name for name in found.metrics if not name.startswith("rank/")] == list(expected.metrics)
    for name in set(expected.metrics) - {"tokens/computed"}:  # each rank pads by itself
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5, abs=1e-9), name
    for number, ratios in by_response(expected).items():
        assert by_response(found)[number] == pytest.approx(ratios, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_gradient_of_every_objective_is_that_of_one_process(ranks, cut):
    for name in TABLE:
        compare(ranks, spec_of(ObjectiveConfig(name), **cut), make_groups())


@pytest.mark.parametrize("groups", [1, 2], ids=["one group", "two groups"])
def test_a_rank_without_work_takes_part(ranks, groups):
    """With one group only one rank has tokens. Objectives with a statistic of the whole minibatch are cut in more ways.
    Two objectives have no gradient with one group, so they get two."""
    several, need_two = ("grpo", "m2po", "opmd_pairwise"), ("rec_twoside_is", "rec_twoside_nois")
    for name in [name for name in TABLE if name not in need_two] if groups == 1 else [*several, *need_two]:
        for cut in CUTS if name in several else CUTS[2:]:
            compare(ranks, spec_of(ObjectiveConfig(name), **cut), make_groups()[4 : 4 + groups])


def test_ranks_compute_in_bfloat16_with_float32_weights_and_gradients(ranks):
    exact = spec_of(GRPO, float32_llama)
    rounded = replace(exact, compute=torch.bfloat16)
    gradients = {}
    for spec in (exact, rounded):
        single, sharded = alone(spec), begin(ranks, spec)
        batch = batch_of(make_groups(), single, spec)
        single.update(batch)
        sharded.update(batch)
        gradients[spec.compute] = gradient_alone(single), gradient(ranks)
    (in_float32, _), (whole, together) = gradients[torch.float32], gradients[torch.bfloat16]
    assert together.dtype == torch.float32
    assert torch.linalg.norm(together - whole) <= 2e-2 * torch.linalg.norm(whole)
    assert torch.linalg.norm(together - in_float32) >= 1e-4 * torch.linalg.norm(in_float32)  # it is bfloat16


@pytest.mark.parametrize(
    "learn",
    [{"passes": 2, "minibatches": 3}, {"gradient_checkpointing": True}, {"logit_chunk": 3}, {"grad_clip": 1e-3}],
    ids=str,
)
def test_passes_minibatches_checkpointing_and_clipping(ranks, learn):
    objective = ObjectiveConfig("off_policy_grpo", beta=0.1, entropy_bonus=0.05, epsilon=2.0, ref_ema=0.5)
    compare(ranks, spec_of(objective, **learn, micro_batch_tokens=40), make_groups())


@pytest.mark.parametrize("reference", [{}, {"ref_ema": 0.5}], ids=["adapters off", "a copy"])
def test_adapters_alone_are_trained(tmp_path, ranks, reference):
    objective = ObjectiveConfig("grpo", beta=0.1, **reference)
    spec = spec_of(objective, adapted_llama, lr=1e-2, passes=2, gradient_checkpointing=True, micro_batch_tokens=40)
    compare(ranks, spec, make_groups(), updates=2)
    sharded = begin(ranks, spec)
    names = [name for name, _ in sharded.weights("float64").tensors]
    assert names and all("lora_" in name for name in names)
    assert not sharded.export(tmp_path / "exported") and not (tmp_path / "exported").exists()


def test_tied_embeddings_stay_tied(ranks):
    spec = spec_of(GRPO, tied_llama, lr=1e-2)
    compare(ranks, spec, make_groups(), updates=3)
    begun = begin(ranks, spec)
    assert "lm_head.weight" not in dict(begun.weights("float64").tensors)
    assert sum(ranks.call("parts", [()] * ranks.count)) == sum(p.numel() for p in llama(True).parameters().values())


def large_llama(folder: Path) -> tuple[LlamaForCausalLM, int]:
    """113 million weights and their bytes. A rank keeps a part of them; a whole model would show in its memory."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        tie_word_embeddings=True, eos_token_id=END, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    whole = LlamaForCausalLM(config)
    whole.save_pretrained(folder)
    size = 4 * sum(p.numel() for p in whole.parameters())
    assert size > 400e6
    return whole, size


def test_no_rank_holds_a_model_that_is_loaded_from_its_files(tmp_path, ranks):
    whole, size = large_llama(tmp_path)
    spec = spec_of(GRPO, partial(Source(str(tmp_path)).for_rank, True))
    before = ranks.call("forget_peak", [()] * ranks.count)
    sharded = begin(ranks, spec)
    for most, held in zip(ranks.call("peak", [()] * ranks.count), before, strict=True):
        assert most - held < size / ranks.count + 0.2 * size  # its part, one layer, and what torch and gloo need
    assert sharded.manifest("float32").tensors == describe(LanguageModel(whole).parameters().items())
    before = ranks.call("forget_peak", [()] * ranks.count)
    assert sharded.export(tmp_path / "exported")
    for most, held in zip(ranks.call("peak", [()] * ranks.count), before, strict=True):
        assert most - held < size / ranks.count + 0.2 * size  # the tensors that it writes
    files = sorted((tmp_path / "exported").glob("*.safetensors"))
    assert len(files) == ranks.count and max(f.stat().st_size for f in files) < 1.1 * size / ranks.count
    whole.config.save_pretrained(tmp_path / "exported")
    read = LlamaForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    assert read.keys() == whole.state_dict().keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in whole.state_dict().items())


def test_no_rank_holds_the_base_of_its_adapters(tmp_path, ranks):
    """It is named by its hub name here, and lies in a folder like that of the hub's cache."""
    whole, size = large_llama(tmp_path / "1234")
    snapshot = Snapshot("owner/name", str(tmp_path / "1234"), ("config.json", "model.safetensors"))
    lora = LoraConfig(rank=4, alpha=8.0)
    spec = spec_of(GRPO, partial(Source("owner/name", lora, seed=5, snapshot=snapshot).for_rank, True))
    before = ranks.call("forget_peak", [()] * ranks.count)
    sharded = begin(ranks, spec)
    for most, held in zip(ranks.call("peak", [()] * ranks.count), before, strict=True):
        assert most - held < size / ranks.count + 0.2 * size
    expected = add_adapter(whole, lora, "owner/name", seed=5)
    assert sharded.manifest("float32").tensors == describe(LanguageModel(whole, expected).parameters().items())
    named = {name: p for name, p in whole.named_parameters() if "lora_" not in name}
    assert len(named) == 2 + 9 * 12
    assert ranks.call("frozen", [()] * ranks.count)[0] == describe(named.items())


@pytest.mark.parametrize("reference", [{}, {"ref_ema": 0.5}], ids=["adapters off", "a copy"])
def test_adapters_over_a_base_in_its_files_learn_as_over_a_loaded_one(ranks, reference):
    objective, source = ObjectiveConfig("grpo", beta=0.1, **reference), Source("embedded", LoraConfig(rank=2), seed=3)
    seen = []
    for load in (partial(source.for_rank, True), partial(loaded_whole, source)):
        spec = spec_of(objective, load, lr=1e-2, passes=2)
        sharded = begin(ranks, spec)
        for _ in range(2):
            sharded.update(batch_of(make_groups(), sharded, spec))
        assert not sharded.export(Path("nowhere"))
        seen.append((gradient(ranks), sharded.manifest("float32").tensors))
    assert isinstance(source.for_rank(True), Unloaded) and torch.linalg.norm(seen[0][0]) > 1e-6
    assert torch.equal(seen[0][0], seen[1][0]) and seen[0][1] == seen[1][1]


def test_no_rank_holds_a_mixture_of_experts(tmp_path, ranks):
    """120 million weights. The controller writes such a model: its files have other names than its parameters."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=256, moe_intermediate_size=384, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=4, num_experts=32, num_experts_per_tok=2, eos_token_id=END, bos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    whole = Qwen3MoeForCausalLM(config)
    whole.save_pretrained(tmp_path)
    size = 4 * sum(p.numel() for p in whole.parameters())
    assert size > 450e6
    before = ranks.call("forget_peak", [()] * ranks.count)
    sharded = begin(ranks, spec_of(GRPO, partial(Source(str(tmp_path)).for_rank, True)))
    for most, held in zip(ranks.call("peak", [()] * ranks.count), before, strict=True):
        assert most - held < size / ranks.count + 0.25 * size  # its part, one layer of experts with its file, and torch
    assert sharded.manifest("float32").tensors == describe(LanguageModel(whole).parameters().items())
    assert not sharded.export(tmp_path / "exported") and not (tmp_path / "exported").exists()


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen3_moe"])
def test_a_model_left_in_its_files_learns_like_a_loaded_one(tmp_path, ranks, name):
    make(name).float().save_pretrained(tmp_path)
    packs = read_whole(tmp_path).takes_any_mask
    opened = partial(Source(str(tmp_path)).for_rank, packs)
    assert isinstance(opened(), Unloaded)
    seen = []
    for load in (opened, partial(read_whole, tmp_path)):
        spec = spec_of(GRPO, load, lr=1e-3)
        sharded = begin(ranks, spec)
        for _ in range(2):
            sharded.update(batch_of(make_groups(), sharded, spec))
        seen.append((gradient(ranks), sharded.manifest("float32").tensors))
    assert torch.linalg.norm(seen[0][0]) > 1e-6
    assert torch.equal(seen[0][0], seen[1][0]) and seen[0][1] == seen[1][1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(6, 4), (7, 3), (5,), (1, 4)], ids=str)
def test_a_divided_tensor_is_gathered_with_its_bits(ranks, shape, dtype):
    """Also if ranks have parts of different sizes, and if some have none."""
    for found in ranks.call("gathered", [(shape, dtype)] * ranks.count):
        assert torch.equal(found["ours"], found["whole"]) and torch.equal(found["ours"], found["torch's"])
        assert torch.allclose(found["sum"], ranks.count * found["whole"])
        flat_N = found["whole"].flatten()
        assert torch.equal(found["together"], torch.cat([flat_N, torch.arange(6.0), flat_N]).bfloat16())


def test_weights_come_one_by_one_with_the_digests_of_one_process(ranks):
    spec = spec_of(GRPO, float32_llama)
    single, sharded = alone(spec), begin(ranks, spec)
    for dtype in ("float32", "torch.bfloat16"):
        assert sharded.manifest(dtype) == single.manifest(dtype)
        expected, weights = list(single.weights(dtype).tensors), sharded.weights(dtype)
        assert (weights.lineage, weights.version) == ("test", 0)
        for (name, tensor), (same, value) in zip(weights.tensors, expected, strict=True):
            assert name == same and torch.equal(tensor, value)


def test_training_repeats_bit_for_bit_and_follows_one_process(ranks):
    spec = spec_of(ObjectiveConfig("grpo", beta=0.05), float32_llama, lr=1e-3, passes=2, grad_clip=0.5)
    digests = []
    for _ in range(2):
        sharded = begin(ranks, spec)
        for step in range(6):
            sharded.update(batch_of(make_groups(step), sharded, spec))
        digests.append(sharded.manifest("float32"))
    assert digests[0] == digests[1] and digests[0].version == 6
    single = alone(spec)
    for step in range(6):
        single.update(batch_of(make_groups(step), single, spec))
    tensors = dict(sharded.weights("float32").tensors)
    for name, parameter in single.model.parameters().items():
        assert torch.allclose(tensors[name], parameter, rtol=0, atol=1e-4), name


def test_a_hundred_steps_repeat_bit_for_bit(ranks):
    steps = 100 if ranks.count == 2 else 10
    spec = spec_of(ObjectiveConfig("grpo", beta=0.05), float32_llama, lr=1e-3)
    digests = []
    for _ in range(2):
        sharded = begin(ranks, spec)
        for step in range(steps):
            sharded.update(batch_of(make_groups(step)[:2], sharded, spec))
        digests.append(sharded.manifest("float32"))
    assert digests[0] == digests[1] and digests[0].version == steps
    assert digests[0].tensors != begin(ranks, spec).manifest("float32").tensors


def test_each_rank_tells_its_tokens_its_memory_and_how_long_it_waited_for_a_slow_one(ranks):
    spec, last = spec_of(GRPO), ranks.count - 1
    sharded, groups = begin(ranks, spec), make_groups()
    batch = batch_of(groups, sharded, spec)
    ranks.call("slow_down", [*[(0.0,)] * last, (0.2,)])  # two layers, so 0.4 s in each forward pass of the last rank
    told = sharded.update(batch).metrics
    assert told["rank/0/waiting"] > 0.35
    assert told["rank/0/waiting"] - told[f"rank/{last}/waiting"] > 0.2
    tokens = [told[f"rank/{rank}/tokens"] for rank in range(ranks.count)]
    assert sum(tokens) == sum(len(s.token_ids_T) for r in batch.scored for s in r.sequences)
    largest = max(sum(len(s.token_ids_T) for r in group.rollouts for s in r.sequences) for group in groups)
    assert max(tokens) - min(tokens) <= largest  # groups stay whole
    assert all(0.05 < told[f"rank/{rank}/memory"] < 20 for rank in range(ranks.count))  # GiB


def test_scores_come_in_the_order_of_the_rollouts(ranks):
    spec = spec_of(GRPO, micro_batch_tokens=20)
    rollouts = [r for group in make_groups() for r in group.rollouts if r.length]
    for several in (rollouts, rollouts[:1]):
        found, expected = begin(ranks, spec).score(several), alone(spec).score(several)
        assert np.allclose(found.logp_T, expected.logp_T, rtol=0, atol=1e-12)
        assert (found.response_T == expected.response_T).all()


def test_nothing_to_learn_advances_the_version_only(ranks):
    spec = spec_of(GRPO, lr=1e-2)
    sharded = begin(ranks, spec)
    before = sharded.manifest("float64")
    update = sharded.update(batch_of(make_groups()[3:4], sharded, spec))  # equal rewards: watched, not learned from
    assert sorted(by_response(update)) == [0, 1, 2, 3]
    after = sharded.manifest("float64")
    assert (sharded.version, after.version) == (1, 1)
    assert after.tensors == before.tensors


def test_a_gradient_that_is_not_finite_is_the_users_error():
    ranks = start(2)
    broken = {name: p.detach().clone() for name, p in llama().parameters().items()}
    next(iter(broken.values())).fill_(torch.inf)
    spec = spec_of(GRPO, partial(llama, state=broken))
    sharded = begin(ranks, spec)
    with pytest.raises(SoleraError, match=r"^the gradient of batch 0 is not finite: lower learn.lr$"):
        sharded.update(batch_of(make_groups(), sharded, spec))
    with pytest.raises(SoleraError, match="ranks have ended"):
        sharded.manifest("float64")
