"""Text to token ids and back, without the work per call that a tokenizer's convenience layer does."""

from typing import Any

import numpy as np
import numpy.typing as npt

from solera.errors import SoleraError, one_line


class TokenizerCodec:
    """The Codec of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, end_token_ids: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.end_token_ids = end_token_ids
        fast = getattr(tokenizer, "backend_tokenizer", None)
        unknown = getattr(fast.model, "unk_token", None) if fast is not None else tokenizer.unk_token
        self.unknown_id: int | None = tokenizer.convert_tokens_to_ids(unknown) if unknown else None
        self.chats: bool = tokenizer.chat_template is not None
        self._encode = (lambda text: fast.encode(text).ids) if fast is not None else tokenizer.encode
        self._decode = fast.decode if fast is not None else tokenizer.decode

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode(text))

    def response(self, text: str, ended: bool) -> tuple[int, ...]:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        end = self.tokenizer.eos_token_id
        return (*ids, self.end_token_ids[0] if end is None else end) if ended else tuple(ids)

    def chat(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        if not self.chats:
            raise SoleraError(
                "holds chat messages, but the model has no chat template: write the prompt as text, or use a model "
                "that has one"
            )
        try:
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise SoleraError(f"is refused by the model's chat template: {one_line(error)}") from error
        return tuple(ids)

    def decode(self, token_ids_T: npt.NDArray[np.int32]) -> str:
        token_ids = token_ids_T.tolist()
        if token_ids and token_ids[-1] in self.end_token_ids:
            token_ids.pop()
        return self._decode(token_ids, skip_special_tokens=False)
