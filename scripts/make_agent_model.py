#!/usr/bin/env python3
"""Make the model `embedded_agent`: `python scripts/make_agent_model.py [FOLDER]`, about three CPU minutes.

The model has the shape of the embedded one and a chat template. A careless teacher trains it on the task
`solera.tasks.boxes`: at most turns it guesses a code instead of opening a box, it often opens a wrong box, and it often
reports another code than the one it has read. The teacher shows trails of one and two boxes; trails of three are left
for reinforcement learning. So the model can write a call, but finds few codes.

The same seed gives the same model. The script refuses a model that does not write calls, or that finds too few or too
many codes.
"""

import argparse
import math
import string
import sys
from pathlib import Path
from random import Random
from statistics import mean

import torch
from make_embedded_model import EOS, PAD, RATE, make_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from solera.engines.in_process import InProcessEngine
from solera.models.codec import TokenizerCodec
from solera.models.language_model import LanguageModel
from solera.records import Sampling
from solera.tasks.boxes import BOXES, CODES, Boxes, Trail, draw_trail
from solera.tasks.episodes import attempt_all

CALLS, RIGHT_BOX, RIGHT_CODE = 0.4, 0.6, 0.6
"""How often the teacher opens a box where it should, opens the box that it should, and reports the code it has read."""
LONGEST_TAUGHT = 2
STEPS, BATCH, LENGTH = 500, 256, 40
USER, TOOL, ASSISTANT = "<user>", "<tool>", "<assistant>"
CALL = '<tool_call>{"name": "open", "arguments": {"box": BOX}}</tool_call>'
WORDS = ["<tool_call>", '{"name": "open", "arguments": {"box": ', "}}", "</tool_call>", "see ", "box ", "code "]
"""Texts that are one token each. The others are single characters."""
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{{ '<eos>' if m.role == 'assistant' }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
HOME = Path(__file__).resolve().parents[1] / "solera" / "models" / "embedded_agent"


def make_tokenizer() -> PreTrainedTokenizerFast:
    letters = [letter for letter in string.printable if letter.isprintable() or letter == "\n"]
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, USER, TOOL, ASSISTANT, *WORDS, *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    escaped = "|".join("".join(f"\\{c}" if c in '{}"<>/' else c for c in word) for word in WORDS)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{escaped}|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, chat_template=TEMPLATE,
        additional_special_tokens=[USER, TOOL, ASSISTANT],
    )  # fmt: skip


def teachers_turn(rng: Random, said: str) -> tuple[str, int | None]:
    """What the teacher writes after `said`, and the box that it opens, if any."""
    if said.startswith("code "):
        return (said if rng.random() < RIGHT_CODE else f"code {rng.choice(CODES)}"), None
    if rng.random() >= CALLS:
        return f"code {rng.choice(CODES)}", None
    box = int(said[-1]) if rng.random() < RIGHT_BOX else rng.randrange(BOXES)
    return CALL.replace("BOX", str(box)), box


def episode(rng: Random, trail: Trail) -> list[tuple[bool, str]]:
    """The texts of an episode, and whether the teacher wrote them."""
    said, role, parts = trail.start, USER, list[tuple[bool, str]]()
    for _ in range(Boxes.turns):
        written, box = teachers_turn(rng, said)
        parts += [(False, f"{role}{said}{ASSISTANT}"), (True, f"{written}{EOS}")]
        if box is None:
            break
        said, role = trail.contents[box], TOOL
    return parts


def lesson(rng: Random, codec: TokenizerCodec, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of `size` episodes; -100 marks what the teacher did not write."""
    tokens, labels = torch.zeros(size, LENGTH, dtype=torch.long), torch.full((size, LENGTH), -100)
    for i in range(size):
        end = 0
        for written, text in episode(rng, draw_trail(rng, held_out=False, longest=LONGEST_TAUGHT)):
            ids = torch.tensor(codec.encode(text))[: LENGTH - end]
            tokens[i, end : end + len(ids)] = ids
            if written:
                labels[i, end : end + len(ids)] = ids
            end += len(ids)
    return tokens, labels


def teach(model: LlamaForCausalLM, codec: TokenizerCodec, seed: int) -> None:
    """Train on fresh episodes (cross-entropy, cosine decay)."""
    rng, losses = Random(seed), list[float]()
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        tokens, labels = lesson(rng, codec, BATCH)
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            print(f"step {step + 1:5d}/{STEPS}  loss per token {mean(losses[-100:]):.4f}", flush=True)


def measured(model: LanguageModel, codec: TokenizerCodec, temperature: float) -> tuple[float, float, float]:
    """On 500 held-out problems: codes found, calls per episode, and the share of calls that fail."""
    engine = InProcessEngine(model, codec.end_token_ids, 500, torch.float32, spell=codec.decode)
    task = Boxes(codec)
    attempts = [(prompt, number) for number, prompt in enumerate(task.held_out(500))]
    made = attempt_all(task, engine, attempts, Sampling(temperature, 16))
    calls, errors = (sum(getattr(rollout.facts, name) for rollout in made) for name in ("calls", "errors"))
    return mean(rollout.reward for rollout in made), calls / len(made), errors / max(calls, 1)


def main() -> str | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=HOME)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # rounding would depend on the number of threads
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    codec = TokenizerCodec(tokenizer, (tokenizer.eos_token_id,))
    model = make_model(len(tokenizer), max_length=512)
    teach(model, codec, args.seed)
    language_model = LanguageModel(model.eval())
    found, calls, failed = measured(language_model, codec, 1.0)
    greedy = measured(language_model, codec, 0.0)[0]
    count = sum(p.numel() for p in model.parameters())
    print(f"{count} parameters; held-out: sampled {found:.1%}, greedy {greedy:.1%}; calls {calls:.2f}, "
          f"failed {failed:.1%}")  # fmt: skip
    if not 0.03 <= found <= 0.12 or greedy > 0.05 or failed > 0.05:
        return "refused: out of range (sampled 3 to 12 %, greedy at most 5 %, at most 5 % of calls failed)"
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    print(f"wrote {args.folder}")
    return None


if __name__ == "__main__":
    sys.exit(main())
