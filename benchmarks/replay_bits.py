#!/usr/bin/env python3
"""Which pass gives other bits: a plain or a replayed one, forward or backward, and in which tensor?

    python -m benchmarks.replay_bits [--kind float16] [--rounds 10] [--tokens 2900 20000] [--nan] [--deterministic]

Each round records one size with a new learner. Then it compares, bit for bit and with the last plain pass: the first
and the second replay, two plain passes, and a third replay. With `--nan`, all memory that the graphs share is filled
with NaN before each replay, so a pass that reads what it has not written shows. With `--deterministic`, torch warns of
operations whose sums have no fixed order, and fills `torch.empty` with NaN.
"""

import argparse
import gc

import torch

from solera.training.collation import collate


def learner_of(kind: str, seed: int):
    if torch.cuda.is_available():
        from tests.test_gpu import recording_learner

        return recording_learner(kind, records=True, seed=seed)
    from tests.learner.test_graphs import llama, make_learner, pads

    return pads(make_learner(llama("tied"), lr=1e-2), records=True)


def groups_of(seed: int, tokens: int):
    if torch.cuda.is_available():
        from tests.test_gpu import some_groups

        return some_groups(seed, tokens)
    from tests.learner.test_invariance import make_groups

    return make_groups(seed)


def one_pass(learner, micro, recorded, grad_RLH):
    """Hidden states and gradients, by name."""
    model = learner.compute_weights.model
    named = {name: p for name, p in model.parameters().items() if p.requires_grad}
    if recorded is not None:
        hidden_RLH = recorded.hidden(micro)
        assert hidden_RLH is not None, "not recorded"
    else:
        hidden_RLH = model.hidden(micro.token_RL, micro.position_RL, micro.mask(), plan=micro.texts)
    grads = torch.autograd.grad(hidden_RLH, list(named.values()), grad_RLH, allow_unused=True)
    found = {name: grad.clone() for name, grad in zip(named, grads, strict=True) if grad is not None}
    return {"hidden": hidden_RLH.detach().clone(), **found}


def nan_graph(recorded):
    """Fills the free memory of the graphs' pool. Keep it: deleting it may take the workspaces of the stream away."""
    if recorded._place is None:
        return None
    stream, pool = recorded._place
    sizes = [
        s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", ())) == tuple(pool)
    ]
    print(f"  the graphs share {sum(sizes) / 2**20:.0f} MiB in {len(sizes)} segments")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        held = [
            torch.full((n // 2,), torch.nan, dtype=torch.float16, device="cuda") for n in sorted(sizes, reverse=True)
        ]
        del held
    return graph


def apart(one, other):
    return {
        name: f"{int((one[name] != other[name]).sum())} of {one[name].numel()} numbers, by up to "
        f"{float((one[name].double() - other[name].double()).abs().max()):.2g}; "
        f"{int((~one[name].isfinite()).sum())} not finite"
        for name in one
        if not torch.equal(one[name], other[name])
    }


def compare(kind: str, seed: int, tokens: int, nan: bool) -> tuple[int, object]:
    """Record one size and compare its passes. Returns how many tensors differ, and a graph that must be kept."""
    learner = learner_of(kind, seed)
    weights = learner.compute_weights
    dtype, device = weights.model.module.dtype, weights.model.device
    batch = collate(groups_of(seed, tokens), learner.objective, now=0, lineage="test", seed=0)
    micro = learner._cut(batch.rollouts)[0].to(device)
    for _ in range(2):  # a size is recorded at its second use
        one_pass(learner, micro, None, torch.zeros_like(weights.model.embed(micro.token_RL)).to(dtype))
        assert weights.record([micro])
    filler = nan_graph(weights.recorded) if nan else None
    hidden = weights.model.module.config.get_text_config().hidden_size
    grad_RLH = torch.zeros(1, micro.token_RL.numel(), hidden, dtype=dtype, device=device)
    torch.manual_seed(seed)
    grad_RLH[0, micro.predictor_T] = torch.randn(len(micro.predictor_T), hidden).to(grad_RLH)
    found = {}
    for name in ("replay 1", "replay 2", "plain 1", "plain 2", "replay 3"):
        if filler is not None and name.startswith("replay"):
            filler.replay()
        found[name] = one_pass(learner, micro, weights.recorded if name.startswith("replay") else None, grad_RLH)
    truth, wrong = found.pop("plain 2"), 0
    for name, each in found.items():
        for tensor, how in apart(each, truth).items():
            wrong += 1
            places = micro.token_RL.numel()
            print(f"seed {seed}, {tokens} tokens, {places} places: {name}: {tensor}: {how}", flush=True)
    return wrong, filler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="float16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2900, 20_000])
    parser.add_argument("--nan", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    given = parser.parse_args()
    if given.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    kept, wrong = [], 0
    for seed in range(given.rounds):
        for tokens in given.tokens:
            differ, filler = compare(given.kind, seed, tokens, given.nan)
            wrong += differ
            kept.append(filler)
            gc.collect()
    print(f"{wrong} tensors differ")


if __name__ == "__main__":
    main()
