"""What Triton's interpreter computes with our kernels on a CPU: `TRITON_INTERPRET=1 python -m tests.interpreted NAME`.

Each check compares with torch in float64, or with what a CPU uses in the kernel's place.
"""

import sys

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from solera.engines.kv_cache import attend_pool
from solera.models.digest import BLOCK, _weights
from solera.streams import uniforms


def attention() -> None:
    """Groups with one prompt, prompts of no length, responses that have just begun, odd sizes of heads."""
    from solera.engines import kernels

    shapes = (
        (3, 3, 64, [0, 0, 40, 40, 40], [33, 33, 40, 40, 40], [0, 49, 7, 31, 16]),
        (2, 1, 48, [0, 0, 0, 1, 1, 1], [0, 1, 1, 20, 20, 20], [0, 49, 7, 31, 16, 3]),
        (1, 7, 32, [0, 9, 0, 9], [9, 9, 9, 9], [5, 6, 70, 2]),
    )
    for heads, group, dim, starts, lengths, written in shapes:
        rows, limit, prompts = len(starts), 80, max(map(sum, zip(starts, lengths, strict=True)))
        pools = torch.randn(2, prompts + rows * limit, heads, dim)
        query, key = torch.randn(rows, heads * group, dim), torch.randn(rows, heads, dim)
        value = torch.randn(rows, 3 * heads, dim)[:, 2 * heads :]
        stretches = starts, lengths, [prompts + row * limit for row in range(rows)], written
        results = []
        for attend in (attend_pool, kernels.decode_attention):
            mine = pools.clone()
            out = attend(query, key, value, *mine, *map(torch.tensor, stretches), 0.125)
            results.append((out, mine))
        (wanted, wanted_pools), (got, got_pools) = results
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=0)
        assert torch.equal(got_pools, wanted_pools)


def packed() -> None:
    """Texts shorter and longer than a tile, groups with one prefix, odd sizes of heads; gradients against float64."""
    from solera.models import attention, ordered

    rows = ([(70, [3, 150, 64]), (1, [])], [(5, [1, 9]), (130, []), (64, [65])])
    for lines, heads, group, dim in ((rows[0], 2, 3, 64), (rows[1], 1, 2, 48), (rows[1], 2, 1, 32)):
        texts, place = [], 0
        for prefix, tails in lines:
            texts.append(attention.Text(place, prefix))
            start, place = place, place + prefix
            for tail in tails:
                texts.append(attention.Text(place, tail, start, prefix))
                place += tail
        plan = attention.PackedTexts.of(texts)
        query = torch.randn(heads * group, place, dim).transpose(0, 1)
        key, value = torch.randn(place, heads, dim), torch.randn(place, 3, heads, dim)[:, 1]
        grad = torch.randn(place, heads * group, dim)
        exact = [x.double().requires_grad_(True) for x in (query, key, value)]
        keys = [x if plan.key_K is None else x.index_select(0, plan.key_K) for x in exact[1:]]
        wanted = attention._text_by_text(exact[0], *keys, plan, 0.125)
        wanted.backward(grad.double())
        mine = [x.clone().requires_grad_(True) for x in (query, key, value)]
        given = (*mine, plan.query_tiles, plan.key_tiles)
        out, norm = torch.ops.solera.attend_in_order(*given, 0.125)
        assert torch.equal(ordered.attend(*given, 0.125), out)
        torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=0)
        out.backward(grad)
        for ours, theirs in zip(mine, exact, strict=True):
            torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=2e-5, rtol=0)
        torch.library.opcheck(torch.ops.solera.attend_in_order.default, (*given, 0.125))
        back = (*(x.detach() for x in (*given, out, norm)), grad, 0.125)
        torch.library.opcheck(torch.ops.solera.differentiate_in_order.default, back)


def sampling() -> None:
    """The token that float64 says, but where the uniform number lies within float32's error of a border."""
    from solera.engines import kernels

    for vocabulary in (1000, 4096, 9000):
        logits = 3 * torch.randn(60, vocabulary)
        logits[:30, vocabulary // 2 :] = -torch.inf
        uniform = torch.from_numpy(uniforms(np.arange(60, dtype=np.uint64), 1)[:, 0].copy())
        uniform[0], uniform[1], uniform[31] = 0.0, 1 - 2**-24, 1 - 2**-24
        token, logp = kernels.sample(logits, uniform, 0.7)
        all_logp = torch.log_softmax(logits.double() / 0.7, 1)
        said = all_logp.gather(1, token[:, None])[:, 0]
        torch.testing.assert_close(logp.double(), said, atol=1e-5, rtol=0)
        below = all_logp.exp().cumsum(1).gather(1, token[:, None])[:, 0]
        assert (uniform.double() < below + 1e-6).all()
        assert (below - said.exp() - 1e-6 < uniform.double()).all()
    nothing = kernels.sample(torch.full((2, 5000), torch.nan), torch.tensor([0.1, 0.9]), 1.0)
    assert nothing[1].isnan().all()
    assert ((nothing[0] >= 0) & (nothing[0] < 5000)).all()


def scoring() -> None:
    from solera.learner import kernels

    logits = (2 * torch.randn(20, 5000)).requires_grad_(True)
    target, outer, inner = torch.randint(0, 5000, (20,)), torch.randn(20), torch.randn(20)
    exact = logits.detach().double().requires_grad_(True)
    all_logp = torch.log_softmax(exact / 0.8, -1)
    wanted = all_logp.gather(1, target[:, None])[:, 0], -(all_logp.exp() * all_logp).sum(-1)
    (wanted[0] * outer + wanted[1] * inner).sum().backward()
    logp, entropy, lse = kernels.score(logits.detach(), target, 0.8)
    torch.testing.assert_close(logp.double(), wanted[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), wanted[1], atol=1e-5, rtol=0)
    grad = kernels.differentiate(logits.detach(), target, entropy, lse, outer, inner, 0.8, torch.float32)
    torch.testing.assert_close(grad.double(), exact.grad, atol=1e-6, rtol=0)


def head() -> None:
    """The head's gradients against float64, and the work done for them: one product of N·H·V for the logits again, and
    one for each gradient that somebody needs."""
    from solera.learner.head import ScoredHead

    target, outer = torch.randint(0, 500, (30,)), torch.randn(30)
    for needed in ((True, True), (True, False), (False, True)):
        hidden, weight = (
            torch.randn(30, 16).requires_grad_(needed[0]),
            torch.randn(500, 16).requires_grad_(needed[1]),
        )
        exact = [value.detach().double().requires_grad_() for value in (hidden, weight)]
        wanted = torch.log_softmax(exact[0] @ exact[1].T / 0.8, -1).gather(1, target[:, None])[:, 0]
        (wanted * outer).sum().backward()
        logp, _ = ScoredHead.apply(hidden, weight, target, 0.8, 8, False)
        with FlopCounterMode(display=False) as work:
            (logp * outer).sum().backward()
        for got, truth, need in zip((hidden, weight), exact, needed, strict=True):
            if need:
                torch.testing.assert_close(got.grad.double(), truth.grad, atol=1e-4, rtol=1e-4)
            else:
                assert got.grad is None
        assert work.get_total_flops() == (1 + sum(needed)) * 2 * 30 * 16 * 500


def digests() -> None:
    """Whole numbers that wrap round, summed by numpy."""
    from solera.models import kernels

    weights = _weights(torch.device("cpu"))
    blocks = [torch.randint(-(2**31), 2**31, (size,), dtype=torch.int32) for size in (1, 3, 20_000)]
    assert BLOCK >= 20_000
    with np.errstate(over="ignore"):
        wanted = [
            int((block.numpy().astype(np.int64) * weights[: len(block)].numpy()).sum(dtype=np.int64))
            for block in blocks
        ]
    assert kernels.weighted_sums(blocks, weights).tolist() == wanted


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
