"""Random conversations through a chat template, and a check of their tokens that does not use `Conversation`."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from solera.models.codec import TokenizerCodec
from solera.records import Completion, Prompt, Reward, Rollout, Sampling
from solera.tasks.conversation import Conversation
from solera.tasks.episodes import Episode

FOLDER = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Template:
    """A chat template, its special tokens, and how it writes tool calls; `None` if it has none."""

    file: str
    special: tuple[str, ...]
    bos: str
    ends: tuple[str, ...]
    calls: str | None
    rewrites: bool
    """Whether it ever renders an earlier message in another way, or a message in another way than it was written."""

    @property
    def source(self) -> str:
        return (FOLDER / f"{self.file}.jinja").read_text()


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "<|python_tag|>",
)  # fmt: skip
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>")
_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip
TEMPLATES = {
    each.file: each
    for each in (
        Template("llama3_1", _LLAMA, "<|begin_of_text|>", ("<|eot_id|>", "<|eom_id|>"), "llama", rewrites=True),
        Template("qwen2_5", (*_IM, "<tool_call>", "</tool_call>"), "", ("<|im_end|>",), "hermes", rewrites=False),
        Template(
            "qwen3", (*_IM, "<tool_call>", "</tool_call>", "<think>", "</think>"), "", ("<|im_end|>",), "hermes",
            rewrites=True,
        ),
        Template("gemma3", _GEMMA, "<bos>", ("<end_of_turn>",), None, rewrites=True),
        Template("mistral_nemo", _MISTRAL, "<s>", ("</s>",), "mistral", rewrites=True),
        Template("smollm2", _IM, "", ("<|im_end|>",), None, rewrites=False),
    )
}  # fmt: skip
TEXTS = [
    "What is 17 * 23?", " the rain in Spain", "Straße, naïve café — 日本語 🙂👍🏽", "def f(x):\n    return x + 1\n",
    "\n\n", " ", "  two spaces  ", "jsonpenderer", '{"a": [1, 2.50, false], "b": null}', "<|im_end|>", "[/INST] </s>",
    "Line one\r\nline two\t", "", "1", "It is 391.", "…", "<answer>", "a" * 40, "\u200bzero width", "İstanbul",
]  # fmt: skip
TOOLS = [
    {"type": "function", "function": {
        "name": "add", "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    }},
]  # fmt: skip


def small_tokenizer(template: Template, kind: str = "byte_level") -> PreTrainedTokenizerFast:
    """A tokenizer of a few hundred tokens with the template's special ones, of one of the two usual kinds."""
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:  # as SentencePiece does it: a space is a letter, unknown letters are spelt in bytes
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<0x00>"))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )  # fmt: skip
        alphabet = [*sorted({letter for text in TEXTS[:4] for letter in text if letter != " "}), "▁"]
    bytes_ = [] if kind == "byte_level" else [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=list(alphabet), special_tokens=bytes_
    )
    tokenizer.train_from_iterator([*TEXTS, template.source, json.dumps(TOOLS)] * 3, trainer)
    return finished(tokenizer, template)


def finished(tokenizer: Tokenizer, template: Template) -> PreTrainedTokenizerFast:
    """The tokenizer with the template and its special tokens."""
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in template.special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template.source, bos_token=template.bos or None,
        eos_token=template.ends[0],
    )  # fmt: skip


def codec_of(tokenizer: PreTrainedTokenizerFast, template: Template) -> TokenizerCodec:
    return TokenizerCodec(tokenizer, tuple(tokenizer.convert_tokens_to_ids(end) for end in template.ends))


class Author:
    """An engine that writes random text in an unusual spelling, and gives every token a log-probability of its own."""

    def __init__(self, rng: Random, tokenizer: PreTrainedTokenizerFast, template: Template) -> None:
        self.rng, self.tokenizer, self.template = rng, tokenizer, template
        self.asked: list[tuple[list[int], list[int]]] = []
        self.said = ""
        self.calls: list[dict] = []
        self._number = 0

    async def generate(self, token_ids, sampling, seed) -> Completion:
        written = self._written()
        self.asked.append((list(token_ids), written))
        logp = -np.arange(self._number + 1, self._number + 1 + len(written), dtype=np.float32)
        self._number += len(written)
        reason = "stop" if written[-1] in self._ends else "length"
        return Completion(np.array(written, np.int32), logp, ((len(written), 4),), reason, "run", sampling)

    @property
    def _ends(self) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids(end) for end in self.template.ends]

    def _written(self) -> list[int]:
        rng = self.rng
        if rng.random() < 0.1:  # anything at all
            self.calls = []
            ids = [rng.randrange(len(self.tokenizer)) for _ in range(rng.randrange(1, 9))]
        else:
            text = self._text()
            cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(4))))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            ids = [i for piece in pieces for i in self.tokenizer.encode(piece, add_special_tokens=False)]
        return [*ids, rng.choice(self._ends)] if rng.random() < 0.85 or not ids else ids

    def _text(self) -> str:
        rng = self.rng
        text = " ".join(rng.choices(TEXTS, k=rng.randrange(1, 4)))
        text = text.strip() if rng.random() < 0.7 else text
        if "</think>" in self.template.special and rng.random() < 0.6:
            text = rng.choice(
                [f"<think>\n{text}\n</think>\n\nSo {text}", f"<think>{text}</think>{text}", f"</think>{text}"]
            )
        self.calls = []
        if self.template.calls is None or rng.random() < 0.4:
            return text
        for _ in range(1 if self.template.calls == "llama" else rng.randrange(1, 4)):
            self.calls.append(
                {"name": "add", "arguments": {"a": rng.randrange(99), "b": rng.choice([0.5, False, "x"])}}
            )
        return self._spelt_calls(text)

    def _spelt_calls(self, text: str) -> str:
        narrow = {"separators": (",", ":")} if self.rng.random() < 0.5 else {}
        if self.template.calls == "hermes":
            calls = "\n".join(f"<tool_call>\n{json.dumps(call, **narrow)}\n</tool_call>" for call in self.calls)
            return f"{text}\n{calls}"
        if self.template.calls == "llama":
            call = {"name": "add", "parameters": self.calls[0]["arguments"]}
            return json.dumps(call, **narrow)
        shown = [call | {"id": f"call0000{n}"} for n, call in enumerate(self.calls)] if not narrow else self.calls
        return f"[TOOL_CALLS]{json.dumps(shown, **narrow)}"


def converse(rng: Random, codec: TokenizerCodec, template: Template) -> tuple[Rollout, Author, list[str]]:
    """One random conversation, and the texts that the template made of it before each turn."""
    tokenizer = codec.tokenizer
    author = Author(rng, tokenizer, template)
    tools = TOOLS if template.calls is not None and rng.random() < 0.8 else None
    start = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.5 else []
    start.append({"role": "user", "content": rng.choice(TEXTS)})
    prompt = Prompt("p", codec.chat(start, tools))
    episode = Episode(author, prompt, Sampling(1.0, 64), seed=0)
    shown: list[str] = []

    async def talk() -> Rollout:
        chat = Conversation(codec, episode.generate, start, tools)
        for _ in range(rng.randrange(1, 6)):
            shown.append(
                tokenizer.apply_chat_template(chat.messages, tools, add_generation_prompt=True, tokenize=False)
            )
            await chat.say()
            _answer(chat, author, rng, template)
        return chat.rollout(prompt, Reward(1.0))

    return episode.checked(asyncio.run(talk())), author, shown


def _answer(chat: Conversation, author: Author, rng: Random, template: Template) -> None:
    results = [{"role": "tool", "content": rng.choice(TEXTS)} for _ in author.calls]
    if not results:
        chat.add({"role": "user", "content": rng.choice(TEXTS)})
        return
    if template.calls == "mistral":
        calls = [{"id": f"call0000{n}", "type": "function", "function": c} for n, c in enumerate(author.calls)]
        chat.messages[-1] = {"role": "assistant", "content": "", "tool_calls": calls}
        results = [result | {"tool_call_id": f"call0000{n}"} for n, result in enumerate(results)]
    chat.add(*results)


def check(rollout: Rollout, author: Author, shown: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    """Every sampled token is trained on exactly once, after exactly the tokens that it was sampled after, with its own
    log-probability; and the model was shown what the template makes of the conversation."""
    turns, number = iter(author.asked), 0
    for sequence in rollout.sequences:
        ids = sequence.token_ids_T.tolist()
        for start, stop, version in sequence.spans:
            given, written = next(turns)
            assert (ids[:start], ids[start:stop], version) == (given, written, 4)
        wanted = -np.arange(number + 1, number + 1 + sequence.length, dtype=np.float32)
        assert np.array_equal(sequence.span_logp, wanted)
        number += sequence.length
    assert next(turns, None) is None
    for (given, _), text in zip(author.asked, shown, strict=True):
        seen = tokenizer.decode(given, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert seen == text or "\ufffd" in seen + text


def waiting_tool(count: int, asynchronous: bool) -> Callable[..., Any]:
    """A tool of which each call waits until `count` calls are in progress."""
    threads, tasks = threading.Barrier(count), asyncio.Barrier(count)

    def slow(n: int) -> int:
        """Wait for the others."""
        threads.wait(60)
        return n

    async def slow_too(n: int) -> int:
        """Wait for the others."""
        await tasks.wait()
        return n

    return slow_too if asynchronous else slow
