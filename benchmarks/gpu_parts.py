"""Decoding and learning on one GPU, part by part: correctness first, then time. A model of SmolLM2-135M's size."""

import argparse
import json
import statistics
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from solera.config import LearnConfig, ObjectiveConfig
from solera.engines.continuous import ContinuousDecoder
from solera.learner.batch import collate
from solera.learner.learner import Learner
from solera.models.language_model import LanguageModel
from solera.objectives.objective import compose
from solera.objectives.table import resolve
from solera.process import torch_for
from solera.records import Completion, Group, Reward, Rollout, Sampling, Sequence
from solera.streams import uniforms

SMOL = dict(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    rope_theta=100000.0,
)


def make(sizes: dict) -> LanguageModel:
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=2, initializer_range=0.05)
    module = LlamaForCausalLM(config).to("cuda").eval()
    model = LanguageModel(module)
    model.check()
    return model


def prompts_of(rng, count, group):
    prompts = [tuple(int(i) for i in rng.integers(3, 49000, rng.integers(60, 160))) for _ in range(count)]
    return [prompt for prompt in prompts for _ in range(group)]


def check_decoding(model, compute, say):
    rng = np.random.default_rng(1)
    prompts, sampling = prompts_of(rng, 8, 4), Sampling(1.0, 64)
    u = uniforms(np.arange(len(prompts), dtype=np.uint64), 64)
    plain = model.copy(compute)
    engine = (model.copy(compute)).with_plans()
    for compiled in (False, True) if compute == torch.bfloat16 else (False,):
        decoder = ContinuousDecoder(engine, (2,), 16, compiled=compiled)
        start = time.perf_counter()
        got = decoder.decode(prompts, u, sampling)
        took = time.perf_counter() - start
        differences = []
        for b, prompt in enumerate(prompts):
            n = got.length_B[b]
            ids = torch.tensor([[*prompt, *got.token_BT[b, :n].tolist()]], device="cuda")
            with torch.no_grad():
                logits = plain.module(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
            logp = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
            differences.append(np.abs(logp - got.logp_BT[b, :n]))
        first, last = np.mean([d[:16].mean() for d in differences]), np.mean([d[-16:].mean() for d in differences])
        say(
            f"decode {compute} compiled={compiled}: mean |d logp| {np.mean(np.concatenate(differences)):.5f} first16 {first:.5f} last16 {last:.5f} max {max(d.max() for d in differences):.4f} ({took:.1f} s)"
        )


def time_decoding(model, rows, limit, compiled, say, rounds=3):
    rng = np.random.default_rng(2)
    prompts, sampling = prompts_of(rng, rows // 8, 8), Sampling(1.0, limit)
    decoder = ContinuousDecoder(model.copy(torch.bfloat16).with_plans(), (), rows, compiled=compiled)
    u = uniforms(np.arange(len(prompts), dtype=np.uint64), limit)
    start = time.perf_counter()
    decoder.decode(prompts, u, sampling)
    first, times = time.perf_counter() - start, []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = decoder.decode(prompts, u, sampling)
        times.append(time.perf_counter() - start)
    took = statistics.median(times)
    say(
        f"decode {rows} x {limit} compiled={compiled}: {took:.3f} s = {out.length_B.sum() / took / 1e3:.0f} k tokens/s, {took / limit * 1e3:.2f} ms a token; first call {first:.1f} s; peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    )
    return decoder, prompts, u, sampling


def profile(decoder, prompts, u, sampling, say):
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
        decoder.decode(prompts, u, sampling)
        torch.cuda.synchronize()
    say(p.key_averages().table(sort_by="cuda_time_total", row_limit=22, max_name_column_width=70))


def make_batch(rng, learner, prompts, group, mean_length):
    groups, number = [], 0
    for p in range(prompts):
        prompt = tuple(int(i) for i in rng.integers(3, 49000, rng.integers(60, 160)))
        members = []
        for _ in range(group):
            length = int(np.clip(rng.normal(mean_length, 40), 20, 256))
            completion = Completion(
                rng.integers(3, 49000, length).astype(np.int32),
                -rng.exponential(2.0, length).astype(np.float32),
                ((length, 0),),
                "stop",
            )
            members.append(
                Rollout(
                    f"p/{p}",
                    (Sequence.turns((prompt, completion)),),
                    (Reward(float(rng.random())),),
                    lineage="t",
                    id=number,
                )
            )
            number += 1
        groups.append(Group(f"p/{p}", tuple(members)))
    return collate(groups, learner.objective, now=0, lineage="t", seed=0)


def make_learner(model, compute, compiled, **learn):
    return Learner(
        model,
        compose(resolve(ObjectiveConfig("grpo"))),
        LearnConfig(lr=1e-6, warmup=0, **learn),
        lineage="t",
        temperature=1.0,
        limit=256,
        steps=10,
        compute=compute,
        reference=None,
        compiled=compiled,
    )


def time_learning(model, say, compiled, budget, chunk=4096, group=8):
    rng = np.random.default_rng(3)
    learner = make_learner(model, torch.bfloat16, compiled, micro_batch_tokens=budget, logit_chunk=chunk)
    batch = make_batch(rng, learner, 64, group, 210)
    tokens = sum(len(r.sequences[0].token_ids_T) for r in batch.rollouts)
    computed = sum(m.token_RL.numel() for m in learner._cut(batch.rollouts))
    start = time.perf_counter()
    learner.update(batch)
    torch.cuda.synchronize()
    first, times = time.perf_counter() - start, []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        start = time.perf_counter()
        learner.update(batch)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    took = statistics.median(times)
    size = sum(p.numel() for p in model.parameters().values())
    say(
        f"learn compiled={compiled} budget={budget} chunk={chunk}: {took:.3f} s, {tokens} tokens in texts, {computed} computed, {computed / took / 1e3:.0f} k/s, {6 * size * computed / took / 1e12 / 790:.1%} of 790 TFLOP/s; first {first:.1f} s; peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    )
    return learner, batch


def profile_learning(learner, batch, say):
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
        learner.update(batch)
        torch.cuda.synchronize()
    say(p.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=70))


def check_gradient(model, say):
    """Errors against float64, of ours and of the plain bfloat16 model row by row."""
    rng = np.random.default_rng(4)
    sizes = dict(lr=0.0, grad_clip=1e9)

    def grads(learner, batch):
        learner.update(batch)
        return torch.cat([p.grad.flatten().double().cpu() for p in learner.model.parameters().values()])

    def learner_of(module, compute, compiled=False, **learn):
        return Learner(
            module,
            compose(resolve(ObjectiveConfig("grpo", epsilon_low=0.9, epsilon_high=9.0))),
            LearnConfig(**{**sizes, "warmup": 0, **learn}),
            lineage="t",
            temperature=1.0,
            limit=256,
            steps=10,
            compute=compute,
            reference=None,
            compiled=compiled,
        )

    def fresh(dtype, can):
        copy = model.copy(dtype)
        copy.module.requires_grad_(True)
        copy.can_take_plans = can
        return copy

    rounded = model.copy(torch.bfloat16)  # the same point for all

    def point(dtype, can):
        copy = rounded.copy(dtype)
        copy.module.requires_grad_(True)
        copy.can_take_plans = can
        return copy

    exact = learner_of(point(torch.float64, False), torch.float32)
    batch = make_batch(rng, exact, 4, 4, 100)
    truth = grads(exact, batch)

    def error(g):
        return float((g - truth).norm() / truth.norm())

    plain = learner_of(point(torch.bfloat16, False), torch.float32, pack_tokens=0, micro_batch_tokens=10**6)
    say(f"gradient error, plain bfloat16: {error(grads(plain, batch)):.5f}")
    cast = learner_of(point(torch.float32, False), torch.bfloat16, pack_tokens=0)
    say(f"gradient error, autocast: {error(grads(cast, batch)):.5f}")
    for compiled in (False, True):
        ours = learner_of(
            point(torch.float32, True), torch.bfloat16, compiled, micro_batch_tokens=1500, logit_chunk=256
        )
        say(f"gradient error, packed bfloat16 compiled={compiled}: {error(grads(ours, batch)):.5f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="check,decode,gradient,learn,profile")
    args = parser.parse_args()
    say = lambda text: print(text, flush=True)
    parts = args.parts.split(",")
    say(f"{torch.__version__} {torch.cuda.get_device_name()}")
    with (
        torch_for(torch.device("cuda"), None)
        if False
        else torch.no_grad()
        if False
        else __import__("contextlib").nullcontext()
    ):
        torch.backends.cuda.enable_cudnn_sdp(False)
        model = make(SMOL)
        say(f"can take plans: {model.can_take_plans}")

        def attempt(name, work):
            if name not in parts:
                return
            import traceback

            try:
                work()
            except Exception:
                traceback.print_exc()
            torch.cuda.empty_cache()

        attempt(
            "check", lambda: (check_decoding(model, torch.float32, say), check_decoding(model, torch.bfloat16, say))
        )
        attempt("gradient", lambda: check_gradient(model, say))
        for compiled in (False, True):
            attempt("decode", lambda: time_decoding(model, 512, 256, compiled, say))
        attempt("decode", lambda: time_decoding(model, 1024, 256, True, say))
        model.module.requires_grad_(True)
        for compiled, budget, chunk in ((False, 16384, 4096), (True, 16384, 4096), (True, 32768, 8192)):
            attempt("learn", lambda: time_learning(model, say, compiled, budget, chunk))
        attempt("profile", lambda: profile(*time_decoding(model, 512, 64, True, say), say))
        attempt("profile", lambda: profile_learning(*time_learning(model, say, True, 32768, 8192), say))


if __name__ == "__main__":
    main()
