"""Compare one update of our learner with a plain one: seconds, share of the GPU's peak speed, and peak memory.

python benchmarks/learning.py MODEL [--prompts 64 --group 8 --rows 128 --rounds 5 --micro 0 24576 --compute float16]

Both get the same responses of random tokens. Two thirds of them have 256 tokens, the others fewer; prompts have 90.
The plain learner is the Hugging Face module in bfloat16: `rows` padded responses at a time with their prompts, all
logits at once, log-softmax in float32, AdamW on the bfloat16 weights. Ours takes at most `micro` tokens at a time (0
means the default); each value of `--micro` makes one more learner. Peak memory is measured over two updates, without
what the other learners hold. Then all are timed in turn.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch

from solera.batch import Batch
from solera.bench.bench import PEAK_FLOPS
from solera.config import LearnConfig, ObjectiveConfig
from solera.learner.compute_weights import MOST_TOKENS
from solera.learner.learner import Learner
from solera.models import loading
from solera.models.language_model import LanguageModel
from solera.objectives.objective import compose
from solera.objectives.table import resolve
from solera.records import Completion, Group, Reward, Rollout, Sequence
from solera.training.collation import collate

PROMPT, LIMIT = 90, 256


def groups_of(prompts: int, members: int, vocabulary: int) -> list[Group]:
    rng = np.random.default_rng(0)

    def rollout(key: str, number: int, prompt: tuple[int, ...]) -> Rollout:
        length = LIMIT if number % 3 else int(rng.integers(20, LIMIT))
        tokens = rng.integers(0, vocabulary, length, np.int32)
        written = Completion(tokens, np.full(length, -2.0, np.float32), ((length, 0),), "length", "bench")
        return Rollout(key, (Sequence.turns((prompt, written)),), (Reward(float(rng.random())),), id=number)

    groups = []
    for p in range(prompts):
        prompt = tuple(rng.integers(0, vocabulary, PROMPT).tolist())
        several = tuple(rollout(f"prompt/{p}", p * members + g, prompt) for g in range(members))
        groups.append(Group(f"prompt/{p}", several))
    return groups


def load(name: str) -> LanguageModel:
    model, _ = loading.load(name, torch.device("cuda"))
    return model


def ours(
    name: str, batch_of: Callable[[Learner], Batch], compute: torch.dtype, micro: int
) -> tuple[Callable[[], None], list[int]]:
    config = LearnConfig(lr=1e-6, warmup=0, micro_batch_tokens=micro or None)
    learner = Learner(
        load(name), compose(resolve(ObjectiveConfig("grpo"))), config, lineage="bench",
        temperature=1.0, limit=LIMIT, steps=1000, compute=compute, reference=None, compiled=True,
    )  # fmt: skip
    computed: list[int] = []

    def update() -> None:
        computed.append(int(learner.update(batch_of(learner)).metrics["tokens/computed"]))

    return update, computed


def plain(name: str, batch: Batch, rows: int) -> tuple[Callable[[], None], list[int]]:
    module = load(name).copy(torch.bfloat16).module.requires_grad_(True)
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)
    computed: list[int] = []

    def update() -> None:
        optimiser.zero_grad(set_to_none=True)
        total = 0
        for start in range(0, len(batch.rollouts), rows):
            chosen = [rollout.sequences[0] for rollout in batch.rollouts[start : start + rows]]
            longest = max(len(sequence.token_ids_T) for sequence in chosen)
            ids, weight = torch.zeros(len(chosen), longest, dtype=torch.int64), torch.zeros(len(chosen), longest)
            attended = torch.zeros(len(chosen), longest, dtype=torch.int64)
            for b, sequence in enumerate(chosen):
                size = len(sequence.token_ids_T)
                ids[b, :size], attended[b, :size] = torch.from_numpy(sequence.token_ids_T), 1
                share = float(batch.advantage_B[start + b]) / sequence.length / len(batch.rollouts)
                weight[b, PROMPT:size] = share
            ids, attended, weight = ids.cuda(), attended.cuda(), weight.cuda()
            logits = module(input_ids=ids, attention_mask=attended).logits[:, :-1].float()
            logp = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
            (-torch.exp(logp - logp.detach()) * weight[:, 1:]).sum().backward()
            total += ids.numel()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        computed.append(total)

    return update, computed


def measured(update: Callable[[], None]) -> tuple[float, int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    update()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name, default in (("prompts", 64), ("group", 8), ("rows", 128), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--micro", type=int, nargs="+", default=[0])
    parser.add_argument("--compute", default="float16")
    given = parser.parse_args()
    base = load(given.model)
    groups = groups_of(given.prompts, given.group, base.head.weight.shape[0])
    parameters = sum(p.numel() for p in base.parameters().values())
    del base
    batch = collate(groups, compose(resolve(ObjectiveConfig("grpo"))), now=0, lineage="bench", seed=0)

    def fresh(learner: Learner) -> Batch:
        return collate(groups, learner.objective, now=learner.version, lineage="bench", seed=0)

    updates, computed, peaks = {}, {}, {}
    compute = getattr(torch, given.compute)
    makes = {
        f"ours, at most {micro or MOST_TOKENS:,}": partial(ours, given.model, fresh, compute, micro)
        for micro in given.micro
    }
    for name, make in {**makes, "plain": partial(plain, given.model, batch, given.rows)}.items():
        torch.cuda.empty_cache()
        others = torch.cuda.memory_allocated()
        updates[name], computed[name] = make()
        peaks[name] = max(measured(updates[name])[1] for _ in range(2)) - others
    seconds = {name: [] for name in updates}
    for _ in range(given.rounds):
        for name, update in updates.items():
            seconds[name].append(measured(update)[0])
    for name, several in seconds.items():
        share = 6 * parameters * computed[name][-1] / median(several) / PEAK_FLOPS["NVIDIA H200"]
        print(
            f"{name}: {median(several):.3f} s ({min(several):.3f}–{max(several):.3f}), {computed[name][-1]:,} tokens "
            f"computed, {share:.1%} of 790 TFLOP/s, peak {peaks[name] / 2**30:.1f} GiB"
        )


if __name__ == "__main__":
    main()
