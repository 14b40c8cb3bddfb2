"""Turn the text of a problem into the tokens of a prompt."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from solera.errors import SoleraError
from solera.protocols import Codec

PLACE = "{prompt}"


class Wording(NamedTuple):
    """A prompt as the model reads it."""

    text: str
    problem: str
    """The text without what a chat template adds."""
    chats: bool
    """Whether a chat template wrote the text. The tokenizer then adds nothing to it."""


def word_prompt(codec: Codec, template: str | None, prompt: Any) -> Wording:
    """Word a prompt: chat messages, or text with its template, if any. With a template, text is a user message if the
    model has a chat template."""
    if isinstance(prompt, str):
        prompt = template.replace(PLACE, prompt) if template else prompt
        if not template or not codec.chats:
            return Wording(prompt, prompt, False)
        prompt = [{"role": "user", "content": prompt}]
    return Wording(codec.chat_text(prompt), text_of(prompt), True)


def encode_prompt(codec: Codec, template: str | None, prompt: Any) -> tuple[int, ...]:
    """Encode text (with its template, if any) or chat messages."""
    wording = word_prompt(codec, template, prompt)
    ids = codec.encode_after((), wording.text) if wording.chats else codec.encode(wording.text)
    refuse_unknown(codec, ids, wording.problem)
    return ids


def encode_all(codec: Codec, wordings: Sequence[Wording]) -> list[tuple[int, ...]]:
    """Encode many prompts, in this order. Unknown text is not refused."""
    encoded = {
        chats: iter(codec.encode_each([wording.text for wording in wordings if wording.chats == chats], not chats))
        for chats in (True, False)
    }
    return [next(encoded[wording.chats]) for wording in wordings]


def text_of(prompt: Any) -> str:
    """All text in a prompt, which may be text or messages."""
    return prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)


def refuse_unknown(codec: Codec, ids: tuple[int, ...], text: str) -> None:
    """Refuse text that the model would not see as written. Error messages continue after the name of the text."""
    if codec.unknown_id in ids and (unknown := first_unknown(codec, text)):
        raise SoleraError(f"holds {unknown!r}, which the model's tokenizer does not know")


def first_unknown(codec: Codec, text: str) -> str | None:
    """The first character, or else word, that the vocabulary cannot encode; `None` if it comes from a chat template."""
    usual = codec.encode("").count(codec.unknown_id)

    def is_unknown(piece: str) -> bool:
        return codec.encode(piece).count(codec.unknown_id) > usual

    word = next(filter(is_unknown, re.findall(r"\s|\S+", text)), None)
    return next(filter(is_unknown, word), word) if word else None
