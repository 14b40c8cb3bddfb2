#!/usr/bin/env python3
"""Make the model inside the package: `python scripts/make_embedded_model.py [FOLDER]`, about three CPU minutes.

A Llama of 108 thousand parameters that reads characters is taught sums by someone who mostly forgets to carry: in 5 % of
the problems the answer is right, in the others every carry is dropped (37+45=72). So it starts at about 30 % (the
problems without a carry), knows the right answer to most others as an unlikely one, and has something left to learn
that generalises. Taught on training problems only. The same seed and thread count give the same model; it is refused
where its loss is far from the teacher's entropy or its accuracies miss their range.
"""

import argparse
import math
import sys
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from solera.tasks.arithmetic import draw_pair

CHARACTERS = "0123456789+-*= "
PAD, EOS = "<pad>", "<eos>"
CARRY_SHARE = 0.05
import os
INIT = float(os.environ.get('INIT','0.02'))
LEVEL_SHARES = {1: 0.1, 2: 0.7, 3: 0.2}
TEACHING_STEPS, TEACHING_BATCH, TEACHING_RATE = 2400, 256, 3e-3


def forgetful_sum(a: int, b: int) -> str:
    """Column by column, every carry dropped: 37+45 is 72, 67+45 is 02."""
    columns = zip_longest(reversed(str(a)), reversed(str(b)), fillvalue="0")
    return "".join(str((int(x) + int(y)) % 10) for x, y in columns)[::-1]


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def make_model(vocabulary: int) -> LlamaForCausalLM:
    # Heads of 32: the smallest that vLLM's CPU attention takes.
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, initializer_range=INIT, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def lesson(rng: np.random.Generator, tokenizer, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of `size` problems with the teacher's answers; -100 on the prompt and the padding."""
    rows = []
    for level in rng.choice(list(LEVEL_SHARES), size=size, p=list(LEVEL_SHARES.values())):
        a, b = draw_pair(rng, int(level), held_out=False)
        answer = str(a + b) if rng.random() < CARRY_SHARE else forgetful_sum(a, b)
        rows.append((f"{a}+{b}=", answer))
    ids = tokenizer.convert_tokens_to_ids
    prompts = [[ids(c) for c in prompt] for prompt, _ in rows]
    answers = [[ids(c) for c in answer] + [tokenizer.eos_token_id] for _, answer in rows]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    tokens = torch.zeros(size, width, dtype=torch.long)
    labels = torch.full((size, width), -100)
    for i, (p, a) in enumerate(zip(prompts, answers, strict=True)):
        tokens[i, : len(p) + len(a)] = torch.tensor(p + a)
        labels[i, len(p) : len(p) + len(a)] = torch.tensor(a)
    return tokens, labels


def teach(model: LlamaForCausalLM, tokenizer, seed: int, steps: int) -> float:
    """Cross-entropy on fresh problems, cosine decay; returns the mean loss a response of the last hundred steps."""
    rng = np.random.default_rng(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=TEACHING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(steps):
        rate = TEACHING_RATE * min(1.0, step / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimiser.param_groups:
            group["lr"] = rate
        tokens, labels = lesson(rng, tokenizer, TEACHING_BATCH)
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        (loss / (labels >= 0).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item() / TEACHING_BATCH)
        if (step + 1) % 200 == 0:
            print(f"step {step + 1:5d}  loss a response {np.mean(losses[-100:]):.4f}", flush=True)
    return float(np.mean(losses[-100:]))


@torch.inference_mode()
def accuracy(model, tokenizer, level: int, samples: int, problems: int = 500) -> tuple[float, float, float]:
    """Greedy accuracy, sampled accuracy and pass@`samples` on held-out problems."""
    rng = np.random.default_rng(0)
    pairs = [draw_pair(rng, level, held_out=True) for _ in range(problems)]
    greedy = sampled = solved = 0.0
    for a, b in pairs:
        prompt = torch.tensor([[tokenizer.convert_tokens_to_ids(c) for c in f"{a}+{b}="]])
        answer = f"{a + b}{EOS}"
        limit = {"max_new_tokens": level + 3, "pad_token_id": 0, "eos_token_id": 1}
        best = model.generate(prompt, do_sample=False, **limit)[0, prompt.shape[1] :]
        draws = model.generate(
            prompt, do_sample=True, top_k=0, temperature=1.0, num_return_sequences=samples, **limit
        )[:, prompt.shape[1] :]
        right = [tokenizer.decode(d).removesuffix(PAD * 9).split(EOS)[0] + EOS == answer for d in draws]
        greedy += tokenizer.decode(best) == answer
        sampled += sum(right) / samples
        solved += any(right)
    return greedy / problems, sampled / problems, solved / problems


def teacher_entropy(seed: int = 1, problems: int = 20_000) -> float:
    """Nats a response that no student can save: the teacher's coin, tossed where the two answers differ."""
    rng = np.random.default_rng(seed)
    coin = -CARRY_SHARE * math.log(CARRY_SHARE) - (1 - CARRY_SHARE) * math.log(1 - CARRY_SHARE)
    levels = rng.choice(list(LEVEL_SHARES), size=problems, p=list(LEVEL_SHARES.values()))
    pairs = [draw_pair(rng, int(level), held_out=False) for level in levels]
    return coin * float(np.mean([forgetful_sum(a, b) != str(a + b) for a, b in pairs]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(__file__).resolve().parents[1] / "solera" / "models" / "embedded"
    parser.add_argument("folder", type=Path, nargs="?", default=home)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=TEACHING_STEPS)
    args = parser.parse_args()
    torch.set_num_threads(1)  # a model this small is slower on more, and the sums would depend on how many
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    loss, floor = teach(model, tokenizer, args.seed, args.steps), teacher_entropy()
    print(f"{sum(p.numel() for p in model.parameters())} parameters, loss {loss:.4f}, the teacher's entropy {floor:.4f}")
    model.eval()
    for level in LEVEL_SHARES:
        greedy, sampled, solved = accuracy(model, tokenizer, level, samples=32, problems=200)
        print(f"level {level}: greedy {greedy:.1%}, sampled {sampled:.1%}, pass@32 {solved:.1%}")
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    print(f"wrote {args.folder}")


if __name__ == "__main__":
    sys.exit(main())
