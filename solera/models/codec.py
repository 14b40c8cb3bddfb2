"""Convert text to token ids and back, without the overhead of a tokenizer's convenience layer."""

import json
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from solera.errors import SoleraError, one_line

NO_LETTER = 0x10FFFF
"""A character that represents no byte."""
REMEMBERED = 256
"""Texts whose tokens are remembered: members of a group begin with the same text, and tools repeat their answers."""

AT_ONCE = 1024
"""Texts that a tokenizer encodes together, on all cores. Its results take about 100 bytes per token."""


class TokenizerCodec:
    """The Codec of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, end_token_ids: tuple[int, ...], max_length: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.end_token_ids = end_token_ids
        fast = self._fast = getattr(tokenizer, "backend_tokenizer", None)
        unknown = getattr(fast.model, "unk_token", None) if fast is not None else tokenizer.unk_token
        self.unknown_id: int | None = tokenizer.convert_tokens_to_ids(unknown) if unknown else None
        self.chats: bool = tokenizer.chat_template is not None
        self._encode = (lambda text: fast.encode(text).ids) if fast is not None else tokenizer.encode
        self._decode = fast.decode if fast is not None else tokenizer.decode
        self._encode_part = lru_cache(REMEMBERED)(self._encoded_part)
        self._spelling = Spelling(fast) if fast is not None and _is_byte_level(fast) else None

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode(text))

    def encode_each(self, texts: Sequence[str], whole: bool) -> list[tuple[int, ...]]:
        fast = self._fast
        if fast is None:
            return [tuple(self.tokenizer.encode(text, add_special_tokens=whole)) for text in texts]
        size = AT_ONCE if fast.padding is None else 1  # such a tokenizer pads each text of a batch to the longest
        batches = (texts[start : start + size] for start in range(0, len(texts), size))
        return [
            tuple(each.ids) for batch in batches for each in fast.encode_batch_fast(batch, add_special_tokens=whole)
        ]

    def _encoded_part(self, text: str) -> tuple[int, ...]:
        """Without the tokens that a tokenizer adds around a text."""
        if self._fast is None:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return tuple(self._fast.encode(text, add_special_tokens=False).ids)  # a third of the time

    def response(self, text: str, ended: bool) -> tuple[int, ...]:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        end = self.tokenizer.eos_token_id
        return (*ids, self.end_token_ids[0] if end is None else end) if ended else tuple(ids)

    def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **template_kwargs: Any
    ) -> tuple[int, ...]:
        return self.encode_after((), self.chat_text(messages, tools, **template_kwargs))

    def chat_text(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **template_kwargs: Any
    ) -> str:
        if not self.chats and not template_kwargs.get("chat_template"):
            raise SoleraError(
                "holds chat messages, but the model has no chat template: write the prompt as text, or choose a "
                "model that has one (--model)"
            )
        settings = {"add_generation_prompt": True, **template_kwargs, "tokenize": False}
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools or None, **settings)
        except Exception as error:  # a template is code of the model's author and may raise anything
            raise SoleraError(f"is refused by the model's chat template: {one_line(error)}") from error

    def encode_after(self, given: tuple[int, ...], text: str) -> tuple[int, ...]:
        if not given:
            return self._encode_part(text)
        # A special token is a border: the tokens behind it do not depend on those before it.
        anchor = self._spell_last(given)
        ids = self._encode_part(anchor + text)
        if ids[:1] == given[-1:]:
            return ids[1:]
        return self._encode_part(text)

    def text_after(self, given: tuple[int, ...], written: tuple[int, ...]) -> str:
        if self._spelling is not None:
            return self._spelling.text(np.array(written, np.int32)) if written else ""
        # A decoder of the SentencePiece kind drops the space before the first token of a text.
        before, last = self._spell_last(given), list(given[-1:])
        return self._decode([*last, *written], skip_special_tokens=False)[len(before) :]

    def _spell_last(self, given: tuple[int, ...]) -> str:
        return self._decode(list(given[-1:]), skip_special_tokens=False)

    def decode(self, token_ids_T: npt.NDArray[np.int32]) -> str:
        length = len(token_ids_T)
        if length and token_ids_T.item(-1) in self.end_token_ids:
            length -= 1
        if self._spelling is not None:
            return self._spelling.text(token_ids_T[:length])
        return self._decode(token_ids_T.tolist()[:length], skip_special_tokens=False)


class Spelling:
    """The bytes of every token, if text is just the concatenation of these bytes.

    This builds a response of 256 tokens in a tenth of the tokenizer's time. The whole table is built at the first text,
    because even after thousands of responses, most have a token that none had before.
    """

    def __init__(self, fast: Any) -> None:
        self._fast = fast
        self._bytes_V = np.full(0, None)

    def text(self, token_ids_T: npt.NDArray[np.int32]) -> str:
        try:
            spelled = b"".join(self._bytes_V.take(token_ids_T).tolist())
        except IndexError:  # the first text, or a model with more tokens than its tokenizer
            known, highest = self._fast.get_vocab_size(), int(token_ids_T.max())
            self._bytes_V = self._spell(known if highest < known else 2 * highest)
            return self.text(token_ids_T)
        return spelled.decode("utf-8", "replace")

    def _spell(self, tokens: int) -> npt.NDArray[Any]:
        spelled_V = np.full(tokens, None)
        spelled_V[:] = [_bytes_of(self._fast.id_to_token(token_id) or "") for token_id in range(tokens)]
        return spelled_V


def _bytes_of(token: str) -> bytes:
    try:
        return token.translate(_byte_of_letter()).encode("latin-1")
    except UnicodeEncodeError:  # a character that represents no byte: the token stands for itself
        return token.encode()


def _is_byte_level(fast: Any) -> bool:
    return fast.decoder is not None and json.loads(fast.decoder.__getstate__())["type"] == "ByteLevel"


@cache
def _byte_of_letter() -> dict[int, int]:
    """The alphabet of a byte-level vocabulary: printable bytes stand for themselves, and the others are mapped to
    further characters."""
    hidden = [byte for byte in range(256) if not chr(byte).isprintable() or byte == ord(" ")]
    return dict.fromkeys(hidden, NO_LETTER) | {256 + n: byte for n, byte in enumerate(hidden)}
