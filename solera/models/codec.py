"""Text to token ids and back, without the work per call that a tokenizer's convenience layer does."""

from typing import Any

import numpy as np
import numpy.typing as npt


class TokenizerCodec:
    """The Codec of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, end_token_ids: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.end_token_ids = end_token_ids
        fast = getattr(tokenizer, "backend_tokenizer", None)
        self._encode = (lambda text: fast.encode(text).ids) if fast is not None else tokenizer.encode
        self._decode = fast.decode if fast is not None else tokenizer.decode

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode(text))

    def decode(self, token_ids_T: npt.NDArray[np.int32]) -> str:
        token_ids = token_ids_T.tolist()
        if token_ids and token_ids[-1] in self.end_token_ids:
            token_ids.pop()
        return self._decode(token_ids, skip_special_tokens=False)
