"""Answers of a judge, kept in memory and in a file, so that a run can be repeated without asking again."""

import json
import threading
from pathlib import Path
from typing import NamedTuple

from solera.errors import SoleraError


class Answer(NamedTuple):
    """What a judge wrote, and the tokens that it cost."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class AnswerCache:
    """One JSON object per line: the key of the request and the answer. Lines are only added. A last line that a kill
    has cut off is removed."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._answers = dict[str, Answer]()
        if path is not None and path.is_file():
            self._read(path)

    def get(self, key: str) -> Answer | None:
        return self._answers.get(key)

    def put(self, key: str, answer: Answer) -> None:
        with self._lock:
            if key in self._answers:
                return
            self._answers[key] = answer
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, **answer._asdict()}) + "\n")

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                fields = json.loads(line)
                key = fields.pop("key")
                self._answers[key] = Answer(**fields)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise SoleraError(f"{path}, line {number}: not an answer of a judge; remove the line") from error
        if len(whole) < len(content):
            with path.open("r+b") as file:
                file.truncate(len(whole))
