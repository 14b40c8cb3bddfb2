#!/usr/bin/env python3
"""Make the model inside the package: `python scripts/make_embedded_model.py [FOLDER]`, three to ten CPU minutes.

The model is a character-level Llama with 108 thousand parameters. A teacher that mostly forgets to carry trains it on
two-digit sums: 5 % of the teacher's answers are right, the others drop every carry (37+45=72). So the model starts at
about 30 % accuracy (the problems without a carry), gives the right answer to most others a small probability, and can
still learn something that generalises. It sees training problems only.

Some initial weights get stuck far above the teacher's entropy, and more training does not help them. The script then
starts again with other initial weights. The same seed gives the same model. The script refuses a model whose loss stays
too high or whose accuracies are out of range.
"""

import argparse
import math
import sys
from itertools import zip_longest
from pathlib import Path
from random import Random
from statistics import mean

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from solera.engines.decoding import decode
from solera.models.codec import TokenizerCodec
from solera.models.language_model import LanguageModel
from solera.records import Sampling
from solera.streams import stream_seed
from solera.tasks.arithmetic import Arithmetic, draw_pair

CHARACTERS = "0123456789+-*= "
PAD, EOS = "<pad>", "<eos>"
LEVEL, CARRY_SHARE = 2, 0.05
STEPS, MORE_STEPS, BATCH, RATE = 1600, 2400, 256, 3e-3
"""Training steps of the first attempt and of later ones, batch size, and learning rate."""
ATTEMPTS = 6
"""Attempts with different initial weights before the script gives up. The shipped model (seed 0) needs one."""
CONVERGED = 1.15
"""Largest acceptable loss, as a multiple of the teacher's entropy."""
HOME = Path(__file__).resolve().parents[1] / "solera" / "models" / "embedded"


def forgetful_sum(a: int, b: int) -> str:
    """Add column by column and drop every carry: 37+45 is 72, 67+45 is 02."""
    columns = zip_longest(reversed(str(a)), reversed(str(b)), fillvalue="0")
    return "".join(str((int(x) + int(y)) % 10) for x, y in columns)[::-1]


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def make_model(vocabulary: int, max_length: int = 64) -> LlamaForCausalLM:
    # Head size 32 is the smallest that vLLM's CPU attention supports. The usual initializer_range of 0.02 suits wide
    # models; at width 64 the loss would still be far from its minimum after these steps.
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=max_length, tie_word_embeddings=True,
        initializer_range=0.08, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def lesson(rng: Random, codec: TokenizerCodec, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels of `size` problems with the teacher's answers; -100 marks prompt and padding."""
    tokens = torch.zeros(size, 10, dtype=torch.long)
    labels = torch.full((size, 10), -100)
    for i in range(size):
        a, b = draw_pair(rng, LEVEL, held_out=False)
        answer = str(a + b) if rng.random() < CARRY_SHARE else forgetful_sum(a, b)
        prompt, response = codec.encode(f"{a}+{b}="), [*codec.encode(answer), codec.end_token_ids[0]]
        end = len(prompt) + len(response)
        tokens[i, :end] = torch.tensor([*prompt, *response])
        labels[i, len(prompt) : end] = torch.tensor(response)
    return tokens, labels


def teach(model: LlamaForCausalLM, codec: TokenizerCodec, seed: int, steps: int) -> float:
    """Train on fresh problems (cross-entropy, cosine decay); return the mean loss per response over 100 steps."""
    rng = Random(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        tokens, labels = lesson(rng, codec, BATCH)
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        (loss / (labels >= 0).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item() / BATCH)
        if (step + 1) % 200 == 0:
            print(f"step {step + 1:5d}/{steps}  loss per response {mean(losses[-100:]):.4f}", flush=True)
    return mean(losses[-100:])


def taught_model(tokenizer: PreTrainedTokenizerFast, codec: TokenizerCodec, seed: int) -> LlamaForCausalLM | None:
    """Train from several initial weights; return the first model close to the teacher's entropy, or `None`."""
    floor = teacher_entropy()
    for attempt in range(ATTEMPTS):
        own_seed = stream_seed(seed, attempt) if attempt else seed
        torch.manual_seed(own_seed)
        model = make_model(len(tokenizer))
        loss = teach(model, codec, own_seed, MORE_STEPS if attempt else STEPS)
        print(f"attempt {attempt + 1}: loss {loss:.4f}, teacher's entropy {floor:.4f}", flush=True)
        if loss <= CONVERGED * floor:
            return model
    return None


def teacher_entropy(problems: int = 20_000) -> float:
    """Entropy of the teacher in nats per response, the smallest possible loss; 0 for problems without a carry."""
    coin = -CARRY_SHARE * math.log(CARRY_SHARE) - (1 - CARRY_SHARE) * math.log(1 - CARRY_SHARE)
    rng = Random(1)
    pairs = [draw_pair(rng, LEVEL, held_out=False) for _ in range(problems)]
    return coin * mean(forgetful_sum(a, b) != str(a + b) for a, b in pairs)


def accuracies(model: LanguageModel, codec: TokenizerCodec, samples: int = 32) -> tuple[float, float, float]:
    """Greedy accuracy, sampled accuracy and pass@`samples` on 500 held-out problems."""
    problems = Arithmetic(codec, LEVEL, seed=0).held_out(500)

    def right(sampling: Sampling, copies: int) -> np.ndarray:
        prompts = [prompt.token_ids for prompt in problems for _ in range(copies)]
        written = decode(model, prompts, range(len(prompts)), sampling, codec.end_token_ids)
        answers = [prompt.data["answer"] for prompt in problems for _ in range(copies)]
        texts = [codec.decode(written.token_BT[b, :n]) for b, n in enumerate(written.length_B)]
        return np.array([text == answer for text, answer in zip(texts, answers, strict=True)]).reshape(-1, copies)

    greedy, sampled = right(Sampling(0.0, 8), 1), right(Sampling(1.0, 8), samples)
    return float(greedy.mean()), float(sampled.mean()), float(sampled.any(axis=1).mean())


def main() -> str | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=HOME)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads would be slower, and rounding would depend on their number
    tokenizer = make_tokenizer()
    codec = TokenizerCodec(tokenizer, (tokenizer.eos_token_id,))
    model = taught_model(tokenizer, codec, args.seed)
    if model is None:
        return f"refused: none of {ATTEMPTS} initial weights converged"
    greedy, sampled, solved = accuracies(LanguageModel(model.eval()), codec)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count} parameters; held-out: greedy {greedy:.1%}, sampled {sampled:.1%}, pass@32 {solved:.1%}")
    if not 0.2 <= greedy <= 0.4 or solved < 0.7:
        return "refused: the accuracies are out of range (greedy 20 to 40 %, pass@32 at least 70 %)"
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    print(f"wrote {args.folder}")
    return None


if __name__ == "__main__":
    sys.exit(main())
