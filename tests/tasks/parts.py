"""Small parts that the tests of tasks share: a codec of letters, problems from a list, one response graded."""

import asyncio
from pathlib import Path

import numpy as np

from solera.config import Config, RewardConfig, SamplingConfig, TaskConfig
from solera.objectives.table import resolve_config
from solera.records import Completion, Prompt, Reward
from solera.tasks.rewards import build_rewards

END = 0


class Letters:
    """A token is a character; 0 ends a text."""

    unknown_id = None
    chats = False

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def encode_each(self, texts, whole) -> list[tuple[int, ...]]:
        return [self.encode(text) for text in texts]

    def encode_after(self, given, text) -> tuple[int, ...]:
        return self.encode(text)

    def chat_text(self, messages) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def decode(self, token_ids_T) -> str:
        return "".join(chr(token) for token in token_ids_T if token != END)


class Listed:
    """Problems from rows in memory."""

    def __init__(self, *rows: dict):
        self.rows = rows
        self.columns = frozenset(column for row in rows for column in row)

    def prompt(self, index: int) -> Prompt:
        return Prompt(f"row/{index}", (1, 2), self.rows[index])

    def place(self, prompt: Prompt) -> str:
        return f"data.jsonl:{int(prompt.key[4:]) + 1}"


def completion(text: str, finished: bool = True) -> Completion:
    ids = np.array([*map(ord, text), *([END] if finished else [])], np.int32)
    return Completion(ids, np.zeros(len(ids), np.float32), ((len(ids), 0),), "stop" if finished else "length")


def grade_all(
    problems: Listed, texts: list[str], finished: bool = True, max_tokens: int = 16, **reward
) -> list[tuple[Reward, ...]]:
    """The rewards of one response to each problem, all in flight together."""
    task, sampling = TaskConfig("jsonl", path="data.jsonl"), SamplingConfig(max_tokens=max_tokens)
    config = resolve_config(Config(task=task, reward=RewardConfig(**reward), sampling=sampling))
    rewards = build_rewards(config, Letters(), problems)

    async def gather() -> list[tuple[Reward, ...]]:
        asked = [rewards(problems.prompt(i), completion(text, finished)) for i, text in enumerate(texts)]
        return await asyncio.gather(*asked)

    return asyncio.run(gather())


def write_rewards(folder: Path, source: str) -> str:
    """A file of reward functions; returns its path."""
    (folder / "rewards.py").write_text(source)
    return str(folder / "rewards.py")
