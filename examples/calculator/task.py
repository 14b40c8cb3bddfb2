"""Arithmetic with and without a calculator, at the same number of sampled tokens.

    python examples/calculator/problems.py problems.jsonl
    solera train --task examples/calculator/task.py:WithCalculator --model FOLDER    # FOLDER: a small chat model
    solera train --task examples/calculator/task.py:Alone --model FOLDER

Both tasks read `problems.jsonl` in the working folder, or the file that the environment variable PROBLEMS names.
"""

import json
import os
import re
from pathlib import Path

import solera
from solera.tasks.shipped_tools import calculator

BUDGET = 128
"""Tokens that the policy may write in one episode."""
TURNS = 2
HELD_OUT = 1000
"""The first problems of the file are held out."""
QUESTION = "Solve the following multiplication: %s. Give only the result as your final answer."
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'
SOLVED = {
    "17 * 23": ("17 * 20 = 340. 17 * 3 = 51. 340 + 51 = 391.", "391"),
    "214 * 11": ("214 * 10 = 2140. 214 * 1 = 214. 2140 + 214 = 2354.", "2354"),
    "35 * 120": ("35 * 100 = 3500. 35 * 20 = 700. 3500 + 700 = 4200.", "4200"),
}
"""Solved problems that begin every prompt."""


def numbers(text: str) -> list[str]:
    return re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))


class Arithmetic:
    """Problems of the file. The answer is the last number of the last turn."""

    tools: tuple = ()
    turns = 1

    def __init__(self, codec: solera.Codec) -> None:
        lines = Path(os.environ.get("PROBLEMS", "problems.jsonl")).read_text().splitlines()
        self.rows = [json.loads(line) for line in lines]
        self.agent = solera.Agent(codec, self.tools, solera.Limits(turns=self.turns))

    def solved(self, expression: str, working: str, answer: str) -> list[str]:
        """A solved problem, the user and the policy in turn."""
        return [QUESTION % expression, f"{working} The answer is {answer}."]

    def problem(self, row: dict[str, str]) -> solera.Prompt:
        said = [text for expression, shown in SOLVED.items() for text in self.solved(expression, *shown)]
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate([*said, row["question"]])]
        return self.agent.prompt(f"calculator/{row['question']}", messages, answer=row["answer"])

    def prompt(self, index: int) -> solera.Prompt:
        training = self.rows[HELD_OUT:]
        return self.problem(training[index % len(training)])

    def held_out(self, count: int) -> list[solera.Prompt]:
        return [self.problem(row) for row in self.rows[: min(count, HELD_OUT)]]

    async def run(self, prompt: solera.Prompt, generate: solera.Generate) -> solera.Rollout:
        chat = await self.agent.talk(prompt, generate, max_tokens=BUDGET // self.turns)
        said = chat.messages[-1]
        right = said["role"] == "assistant" and numbers(said["content"])[-1:] == [prompt.data["answer"]]
        return chat.rollout(prompt, solera.Reward(float(right)))


class Alone(Arithmetic):
    """One turn with the whole budget."""


class WithCalculator(Arithmetic):
    """Two turns with half the budget each: a call of the calculator, and the answer."""

    tools = (calculator,)
    turns = TURNS

    def solved(self, expression: str, working: str, answer: str) -> list[str]:
        result = f"<tool_response>\n{answer}\n</tool_response>"
        return [QUESTION % expression, CALL % expression, result, f"The answer is {answer}."]
