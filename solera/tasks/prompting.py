"""From a problem's text to the tokens that a model is shown."""

from solera.protocols import Codec

PLACE = "{prompt}"


def encode_problem(codec: Codec, template: str, problem: str) -> tuple[int, ...]:
    """The problem in its template: as the user's message where the model has a chat template, else as plain text."""
    text = template.replace(PLACE, problem)
    return codec.chat([{"role": "user", "content": text}]) if codec.chats else codec.encode(text)
