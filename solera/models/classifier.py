"""Rewards from a Hugging Face sequence classifier, such as a reward model."""

import threading
import time
from collections import Counter
from typing import Any

from solera.errors import SoleraError, one_line

BATCH = 32
MOST_TOKENS = 4096


class Classifier:
    """A reward function. Name it in `reward.functions` as `file.py:NAME`.

    `path` is a folder or hub name. The reward is the model's output if it has only one, otherwise the probability of
    `label` (a name or a number). The text is the model's chat template of the prompt and the response; without a
    template, prompt and response are its two texts. The same text is computed once, `batch` texts at a time. Texts are
    cut off on the left at `most_tokens`. The model loads with the first call, on `device` (by default, a GPU if there
    is one).
    """

    def __init__(
        self,
        path: str,
        label: str | int | None = None,
        *,
        batch: int = BATCH,
        most_tokens: int = MOST_TOKENS,
        device: str | None = None,
    ) -> None:
        self.path, self.label, self.batch, self.most_tokens, self.device = path, label, batch, most_tokens, device
        self._model: Any = None
        self._tokenizer: Any = None
        self._output = 0
        self._known = dict[tuple[str, str | None], float]()
        self._counts = Counter[str]()
        self._lock = threading.Lock()

    def __call__(self, prompts: list[Any], completions: list[Any]) -> list[float]:
        with self._lock:
            self._load()
            began = time.monotonic()
            texts = [self._texts(*pair) for pair in zip(prompts, completions, strict=True)]
            new = sorted(
                {text for text in texts if text not in self._known}, key=lambda text: len(text[0] + (text[1] or ""))
            )
            for first in range(0, len(new), self.batch):
                some = new[first : first + self.batch]
                self._known |= dict(zip(some, self._scores(some), strict=True))
            self._counts.update(texts=len(new), cached=len(texts) - len(new))
            self._counts["seconds"] += time.monotonic() - began  # type: ignore[assignment]
            return [self._known[text] for text in texts]

    def take_metrics(self) -> dict[str, float]:
        """Texts computed, texts known already, and seconds since the last call, as `classifier/…`."""
        counts, self._counts = self._counts, Counter()
        return {f"classifier/{name}": value for name, value in counts.items()}

    def _load(self) -> None:
        if self._model is not None:
            return
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path, truncation_side="left", padding_side="right")
            model = AutoModelForSequenceClassification.from_pretrained(self.path).to(device).eval()
        except Exception as error:  # packages of others raise anything
            raise SoleraError(f"classifier {self.path}: cannot be loaded: {one_line(error)}") from error
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
        self._output = self._place(model.config)
        self._model, self._tokenizer = model, tokenizer

    def _place(self, config: Any) -> int:
        """Which output is the reward."""
        names = {config.id2label[place]: place for place in range(config.num_labels)}
        if config.num_labels == 1 and self.label is None:
            return 0
        place = names.get(self.label, self.label) if isinstance(self.label, str) else self.label
        if not isinstance(place, int) or not 0 <= place < config.num_labels:
            raise SoleraError(
                f"classifier {self.path}: label is {self.label!r}; it must be one of {', '.join(names)}, or its number"
            )
        return place

    def _texts(self, prompt: Any, completion: Any) -> tuple[str, str | None]:
        response = completion if isinstance(completion, str) else completion[-1]["content"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self._tokenizer.chat_template is None:
            return "\n".join(message["content"] for message in messages), response
        said = [*messages, {"role": "assistant", "content": response}]
        return self._tokenizer.apply_chat_template(said, tokenize=False), None

    def _scores(self, texts: list[tuple[str, str | None]]) -> list[float]:
        import torch

        first, second = [text for text, _ in texts], [text for _, text in texts]
        pairs = {} if second[0] is None else {"text_pair": second}
        special = not pairs and self._tokenizer.chat_template is not None
        inputs = self._tokenizer(
            first, **pairs, add_special_tokens=not special, truncation=True, max_length=self.most_tokens, padding=True,
            return_tensors="pt", return_token_type_ids=False,
        ).to(self._model.device)  # fmt: skip
        with torch.inference_mode():
            logits = self._model(**inputs).logits.float()
        one = self._model.config.num_labels == 1
        return (logits if one else logits.softmax(-1))[:, self._output].tolist()
