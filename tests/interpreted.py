"""What Triton's interpreter computes with our kernels on a CPU: `TRITON_INTERPRET=1 python -m tests.interpreted NAME`.

Each check compares with torch in float64, or with what a CPU uses in the kernel's place.
"""

import itertools
import random
import sys
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from solera.engines.kv_cache import attend_pages, attend_to_pages
from solera.engines.pages import PAGE, Pages
from solera.models.digest import BLOCK, _weights
from solera.streams import uniforms


class Shapes(NamedTuple):
    """What `Pages` asks of a model."""

    key_value_shapes: list[tuple[int, int]]
    key_value_dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")


def paged(shapes: Shapes, in_one: bool, texts: list[int]) -> tuple[Pages, list[list[int]]]:
    """Pages, in many segments, and those of texts of these lengths, in no order."""
    pages = Pages(shapes, PAGE * 900, in_one=in_one)
    taken = pages.take(800)
    random.Random(len(texts)).shuffle(taken)
    return pages, [[taken.pop() for _ in range(pages.count(length))] for length in texts]


def table_of(prompts: list[list[int]], responses: list[list[int]]) -> torch.Tensor:
    lines = [before + after for before, after in zip(prompts, responses, strict=True)]
    width = max(map(len, lines))
    return torch.tensor([line + [-(10**6)] * (width - len(line)) for line in lines])


def attention() -> None:
    """Groups with one prompt, prompts of no length, responses that have just begun, odd sizes of heads; texts of many
    pages in segments that lie anywhere. Three tokens: the last sees the keys of those before. One row has ended."""
    from solera.engines import kernels

    shapes = (
        (3, 3, 64, [33, 40], [0, 0, 1, 1, 1], [0, 49, 7, 31, 16]),
        (2, 1, 48, [0, 1, 64, 129], [0, 1, 1, 2, 3, 3], [0, 63, 64, 31, 160, 3]),
        (1, 7, 32, [9, 200, 127], [0, 1, 0, 1, 2, 2], [5, 61, 70, 128, 62, 190]),
        (1, 3, 16, [256, 300, 383, 385, 31], [0, 1, 2, 3, 4, 1], [127, 260, 253, 1, 400, 0]),
    )
    for (heads, group, dim, prompts, prompt_of, written), few in itertools.product(shapes, (0, kernels.FEW_PROGRAMS)):
        kernels.FEW_PROGRAMS = few
        rows, sizes = len(written), Shapes([(1, 16), (heads, dim)])
        texts = [*prompts, *(length + 3 for length in written)]
        contents = [torch.randn(2, length, heads, dim) for length in texts]
        steps = [torch.randn(3, rows, heads * group, dim) for _ in range(3)]
        length = torch.tensor([prompts[p] for p in prompt_of])
        alive = (torch.arange(rows) != 1).long()
        outs = []
        for in_one in (True, False):
            pages, pages_of = paged(sizes, in_one, texts)
            table = table_of([pages_of[p] for p in prompt_of], pages_of[len(prompts) :])
            if in_one:
                table = table.clip(min=0)
            pool_key, pool_value = pages.pools[1]
            for own, (key, value) in zip(pages_of, contents, strict=True):
                n = torch.arange(len(key))
                if not len(key):
                    continue
                page, at = torch.tensor(own)[n // PAGE], n % PAGE
                if in_one:
                    pool_key[page, at], pool_value[page, at] = key, value
                else:
                    assert len(pages._segments) > 8
                    kernels.keep(key.transpose(0, 1).contiguous().transpose(0, 1), value, *pages.pools[1], page, at)
            attend = attend_pages if in_one else kernels.decode_attention
            for step, (query, both, _) in enumerate(steps):
                key, value = both[:, :heads], torch.cat([both, both[:, :heads]], 1)[:, -heads:]
                plan = table, length, torch.tensor(written) + step, alive
                out = attend(query, key, value, *pages.pools[1], *plan, 0.125)
                outs.append(out[alive > 0])
                if not in_one:  # a row that has ended reads no key but the new one
                    torch.testing.assert_close(out[alive == 0], value[alive == 0].repeat_interleave(group, 1))
        torch.testing.assert_close(torch.stack(outs[3:]), torch.stack(outs[:3]), atol=2e-6, rtol=0)


def parts() -> None:
    """Parts of texts behind their beginnings and behind prompts that end within a page; sizes of heads, tiles and pages
    that do not go together."""
    from solera.engines import kernels

    shapes = (
        (3, 3, 64, 130, 0, 70),
        (2, 1, 48, 33, 33, 65),
        (1, 7, 32, 64, 60, 10),
        (1, 2, 16, 70, 200, 129),
        (2, 2, 16, 9, 5, 3),
    )
    for heads, group, dim, turn, shared, count in shapes:
        whole, lengths = shared + count, [min(turn, shared + count), max(0, shared + count - turn)]
        key, value = torch.randn(2, whole, heads, dim)
        query = torch.randn(heads * group, count, dim).transpose(0, 1)
        outs = []
        for in_one in (True, False):
            pages, pages_of = paged(Shapes([(1, 16), (heads, dim)]), in_one, lengths)
            own, n = torch.tensor([*pages_of[0], *pages_of[1]]), torch.arange(whole)
            place = n + torch.where(n < turn, 0, -turn % PAGE)
            page, at = own[place // PAGE], place % PAGE
            if in_one:
                pages.pools[1][0][page, at], pages.pools[1][1][page, at] = key, value
                outs.append(attend_to_pages(query, *pages.pools[1], own, turn, shared, 0.125))
            else:
                kernels.keep(key, value, *pages.pools[1], page, at)
                outs.append(kernels.attend_to_pages(query, *pages.pools[1], own, turn, shared, 0.125))
        sees = n <= shared + torch.arange(count)[:, None]
        keys, values = (x.double().repeat_interleave(group, 1) for x in (key, value))
        score = torch.einsum("mhd,nhd->hmn", query.double(), keys) * 0.125
        exact = torch.einsum("hmn,nhd->mhd", score.masked_fill(~sees, -torch.inf).softmax(-1), values)
        for out in outs:
            torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=0)


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
        more = plan.padded(len(plan.query_tiles) + 3)  # empty tiles change nothing
        given = (*mine, more.query_tiles, more.key_tiles)
        out, norm = torch.ops.solera.attend_in_order(*given, 0.125)
        assert torch.equal(ordered.attend(*given, 0.125), out)
        torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=0)
        out.backward(grad)
        for ours, theirs in zip(mine, exact, strict=True):
            torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=2e-5, rtol=0)
        torch.library.opcheck(torch.ops.solera.attend_in_order.default, (*given, 0.125))
        back = (*(x.detach() for x in (*given, out, norm)), grad, 0.125)
        torch.library.opcheck(torch.ops.solera.differentiate_in_order.default, back)


def padded() -> None:
    """A pass padded to a fixed number of tokens and tiles: the same attention to the bit, and the same keys and values
    in every page but that of nobody, of which only the first place changes."""
    from solera.engines import kernels
    from solera.engines.pages import NOBODY
    from solera.engines.prefill import Pass, size_of, tiles_of
    from solera.engines.prompts import Stretch
    from solera.models import attention, ordered

    heads, group, dim, lengths = 2, 3, 16, [(70, [3, 150]), (0, [9]), (1, []), (40, [1, 64])]
    flat = [length for prompt, tails in lengths for length in (prompt, *tails)]
    wanted = Pages(Shapes([(1, 16), (heads, dim)]), PAGE * 900, in_one=False)
    taken = [wanted.take(wanted.count(length)) for length in flat]
    given = iter([Stretch(np.arange(length), own) for length, own in zip(flat, taken, strict=True)])
    plain = Pass.of([(next(given), [next(given) for _ in tails]) for _, tails in lengths], PAGE)
    size = size_of(plain.tokens)
    more = plain.padded(size)
    query, key, value = (torch.randn(size, n, dim) for n in (heads * group, heads, heads))
    outs, kept = [], []
    for each, tiles in ((plain, None), (more, tiles_of(size))):
        texts = attention.PackedTexts.of(each.texts)
        texts = texts if tiles is None else texts.padded(tiles)
        mine = [x[: each.tokens] for x in (query, key, value)]
        outs.append(ordered.attend(*mine, texts.query_tiles, texts.key_tiles, 0.25)[: plain.tokens])
        pools = [torch.zeros(60, PAGE, heads, dim) for _ in range(2)]
        kernels.keep(*mine[1:], *pools, *(torch.from_numpy(line) for line in each.line_4N[2:]))
        kept.append(torch.stack(pools))
    assert plain.tokens < size and torch.equal(*outs)
    assert torch.equal(kept[0][:, NOBODY + 1 :], kept[1][:, NOBODY + 1 :])
    assert kept[1][:, NOBODY, 0].any() and not kept[1][:, NOBODY, 1:].any()
    for key_pool, own, start, length in zip(
        itertools.repeat(kept[1][0]), taken, itertools.accumulate([0, *flat]), flat, strict=False
    ):
        stored = key_pool[torch.tensor(own, dtype=torch.int64)].flatten(0, 1)[:length]
        assert torch.equal(stored, key[start : start + length])


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


def writing() -> None:
    """The end of a step against torch's operations: rows that go on, end with a token, reach their limit, are dead."""
    from solera.engines import kernels
    from solera.engines.tables import Memory, RowTable

    rows, requests, limit, vocabulary, ends = 40, 50, 12, 5000, torch.tensor([7, 4000, 11])
    memory = Memory.allocate(torch.device("cpu"), rows, requests, limit, 0)
    memory.uniform_BT.uniform_()
    table = RowTable(*memory.row_table)
    table.request.copy_(torch.randperm(requests)[:rows])
    table.position.copy_(torch.arange(rows))
    table.limit.copy_(torch.randint(1, limit + 1, (rows,)))
    table.step.copy_((torch.rand(rows) * table.limit).long())
    table.alive.copy_(torch.rand(rows) < 0.8)
    before = {name: getattr(table, name).clone() for name in table._fields}
    logits = torch.randn(rows, vocabulary)
    logits[:10, 4000] = 30.0
    kernels.write(logits, 0.9, ends, memory, table)
    uniform = memory.uniform_BT[before["request"], before["step"]]
    token, logp = kernels.sample(logits, uniform, 0.9)
    assert torch.equal(table.token, token)
    assert (token[:10] == 4000).all()
    for row in range(rows):
        request, step = int(before["request"][row]), int(before["step"][row])
        ended = int(token[row]) in (7, 4000, 11)
        goes_on = bool(before["alive"][row]) and not ended and step + 1 < int(before["limit"][row])
        if before["alive"][row]:
            assert int(memory.token_BT[request, step]) == int(token[row])
            assert float(memory.logp_BT[request, step]) == float(logp[row])
            assert (int(memory.length_B[request]), bool(memory.finished_B[request])) == (step + 1, ended)
        else:
            assert not memory.token_BT[request].any()
            assert not memory.length_B[request]
        assert int(table.alive[row]) == goes_on
        assert int(table.step[row]) == step + goes_on
        assert int(table.position[row]) == row + goes_on


@torch.no_grad()
def layers() -> None:
    """Whole models of each known architecture against their Hugging Face modules: a few tokens one after another, with
    keys and values in the pool, and a prompt with two texts that continue it."""
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    from solera.engines.fused import FusedModel
    from solera.engines.kv_cache import Decoding, Places, Prefilling
    from solera.models.attention import PackedTexts, Text
    from solera.models.language_model import LanguageModel

    sizes = {
        "vocab_size": 50, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    }  # fmt: skip
    settings = (
        LlamaConfig(**sizes),
        MistralConfig(**sizes, sliding_window=None),
        Qwen2Config(**sizes),
        Qwen3Config(**sizes),
    )
    for config in settings:
        module = AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in module.named_parameters():
            parameter.data.normal_(std=0.3)
            parameter.data += 1.0 if "norm" in name else 0.0
        model = LanguageModel(module).with_plans()
        fused = FusedModel.of(model)
        assert fused is not None, config.model_type
        rows, length = 5, torch.tensor([7, 7, 5, 5, 0])
        table = torch.tensor([[0, 2, 0, 0], [0, 3, 0, 0], [1, 4, 0, 0], [1, 5, 0, 0], [6, 0, 0, 0]])
        shapes = model.key_value_shapes
        pools = [torch.randn(2, 7, 64, heads, dim) for heads, dim in shapes]
        results = []
        for run in (model.hidden, fused.hidden):
            own = [pool.clone() for pool in pools]
            for layer, (key, value) in zip(model.attentions, own, strict=True):
                layer.pool_key, layer.pool_value = key, value
            states = []
            for step in range(3):
                token, plan = (
                    torch.arange(rows) * 3 + step,
                    Decoding(table, length, torch.full((rows,), step), torch.ones(rows, dtype=torch.long)),
                )
                if run == model.hidden:
                    state = model.hidden(token[:, None], (length + step)[:, None], plan=plan)[:, -1]
                else:
                    state = fused.hidden(token, length + step, plan)
                states.append(state)
            results.append((torch.stack(states), torch.stack(own)))
        (wanted, wanted_pools), (got, got_pools) = results
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got_pools, wanted_pools, atol=1e-4, rtol=1e-4)
        texts = PackedTexts.of([Text(0, 9), Text(9, 4, 0, 9), Text(13, 6, 0, 9)])
        position = torch.tensor([*range(9), *range(9, 13), *range(9, 15)])
        plan = Prefilling(texts, Places(torch.tensor([1] * 9 + [2] * 4 + [5] * 6), torch.arange(19) % 13))
        filled = []
        for fused_too in (False, True):
            own = [pool.clone() for pool in pools]
            for layer, (key, value) in zip(model.attentions, own, strict=True):
                layer.pool_key, layer.pool_value = key, value
            token = torch.arange(19) * 2
            with torch.no_grad():
                if fused_too:
                    fused.fill(token, position, plan)
                else:
                    model.hidden(token[None], position[None], plan=plan)
            filled.append(torch.stack(own))
        assert not torch.equal(filled[0], torch.stack(pools))
        torch.testing.assert_close(filled[1], filled[0], atol=1e-4, rtol=1e-4)


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
