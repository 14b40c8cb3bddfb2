#!/usr/bin/env python3
"""How long 256 episodes with slow tools take, compared with one: `python benchmarks/slow_tools.py [--repeats 8]`.

Each episode has three turns of 8 tokens and three calls of a tool that takes half a second. The prompt has about 270
tokens, most of which describe the tool. The model is small and random. The table shows the fastest of some repetitions,
because other processes on the machine can only make a run slower.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from solera.engines.in_process import InProcessEngine
from solera.models.language_model import LanguageModel
from solera.models.small import suit
from solera.records import Prompt, Reward, Rollout, Sampling
from solera.tasks.agent import Agent
from solera.tasks.episodes import attempt_all
from solera.tasks.tool_calls import Call
from tests.tasks.chatting import TEMPLATES, codec_of, small_tokenizer
from tests.test_agents import chat_model

TEMPLATE = TEMPLATES["qwen2_5"]
CODEC = codec_of(small_tokenizer(TEMPLATE), TEMPLATE)


def look(name: str, where: str = "here") -> str:
    """Look something up in a list that is kept somewhere, and say what it is known for."""
    time.sleep(0.5)
    return "It is 391."


async def look_too(name: str, where: str = "here") -> str:
    """Look something up in a list that is kept somewhere, and say what it is known for."""
    await asyncio.sleep(0.5)
    return "It is 391."


class ThreeCalls:
    """Calls the tool after each turn, whatever the policy wrote."""

    def __init__(self, tool: Callable[..., Any]) -> None:
        self.call = Call(tool.__name__, {"name": "x"})
        self.agent = Agent(CODEC, [tool])

    async def run(self, prompt: Prompt, generate: Any) -> Rollout:
        chat = self.agent.start(prompt, generate)
        for _ in range(3):
            await chat.say()
            results = await self.agent.tools.answer([self.call], chat.seconds_left)
            chat.add({"role": "tool", "content": results[0].text})
        return chat.rollout(prompt, Reward(1.0))


def measured(model: LanguageModel, tool: Callable[..., Any], episodes: int, prompts: int) -> float:
    engine = InProcessEngine(model, CODEC.end_token_ids, 1024, torch.float32, spell=CODEC.decode)
    task = ThreeCalls(tool)
    asked = [task.agent.prompt(f"p{n}", f"What is {n} * 23? Think, then use the tool.") for n in range(prompts)]
    attempts = [(asked[n * prompts // episodes], n) for n in range(episodes)]
    start = time.perf_counter()
    attempt_all(task, engine, attempts, Sampling(1.0, 8))  # type: ignore[arg-type]
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = chat_model(Path(folder))
    suit(model.module)
    measured(model, look_too, 2, 1)  # warm-up
    best = dict[tuple[str, int, int], float]()
    for _ in range(args.repeats):
        for tool in (look_too, look):
            for episodes, prompts in ((1, 1), (256, 1), (256, 32)):
                case = (tool.__name__, episodes, prompts)
                best[case] = min(best.get(case, 1e9), measured(model, tool, episodes, prompts))
    print("| tool | episodes | prompts | seconds | times one |\n| --- | --- | --- | --- | --- |")
    for (name, episodes, prompts), seconds in best.items():
        kind = "synchronous" if name == "look" else "asynchronous"
        print(f"| {kind} | {episodes} | {prompts} | {seconds:.2f} | {seconds / best[name, 1, 1]:.2f} |")


if __name__ == "__main__":
    main()
