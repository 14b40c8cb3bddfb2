"""Turn the text of a problem into the tokens of a prompt."""

import re
from typing import Any

from solera.errors import SoleraError
from solera.protocols import Codec

PLACE = "{prompt}"


def encode_problem(codec: Codec, template: str, problem: str) -> tuple[int, ...]:
    """Apply the template to a problem: as a user message if the model has a chat template, else as plain text."""
    text = template.replace(PLACE, problem)
    ids = codec.chat([{"role": "user", "content": text}]) if codec.chats else codec.encode(text)
    refuse_unknown(codec, ids, text)
    return ids


def encode_prompt(codec: Codec, template: str | None, prompt: Any) -> tuple[int, ...]:
    """Encode text (with its template, if any) or chat messages."""
    if not isinstance(prompt, str):
        return codec.chat(prompt)
    return encode_problem(codec, template, prompt) if template else codec.encode(prompt)


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
