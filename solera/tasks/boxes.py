"""A small environment with a tool: follow a trail of boxes to a code that only the last box holds.

The prompt names the first box. `open` shows what is in a box: `see box 7`, or `code 42`. The policy must end with the
code of its trail. All other boxes hold wrong codes. The code is drawn at random from 90 numbers, and the prompt says
nothing about it. So no policy that answers in one turn is right more often than once in 90.
"""

from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from random import Random

from solera.protocols import Codec, Generate
from solera.records import Prompt, Reward, Rollout
from solera.tasks.agent import Agent
from solera.tasks.conversation import Limits
from solera.tasks.tools import Toolbox

BOXES = 10
LONGEST_TRAIL = 3
CODES = range(10, 100)
TURNS = LONGEST_TRAIL + 2
"""Most turns of an episode: one more than the longest trail needs."""
HELD_OUT_SHARE = 8
FIRST_HELD_OUT = 1 << 40
"""Seed of the first held-out problem."""


@dataclass(frozen=True)
class Trail:
    """The boxes to open, in order, and what is in each of the ten."""

    boxes: tuple[int, ...]
    contents: tuple[str, ...]

    @property
    def start(self) -> str:
        """The prompt."""
        return f"box {self.boxes[0]}"

    @property
    def code(self) -> str:
        """What the policy must find: `code 42`."""
        return self.contents[self.boxes[-1]]

    @property
    def held_out(self) -> bool:
        """Whether it belongs to evaluation. A hash of the boxes and the code decides."""
        return blake2b(self.key.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0

    @property
    def key(self) -> str:
        return f"boxes/{'-'.join(map(str, self.boxes))}/{self.code.removeprefix('code ')}"


def draw_trail(rng: Random, held_out: bool, longest: int = LONGEST_TRAIL) -> Trail:
    """Draw a trail of one to `longest` boxes from one side of the split."""
    while True:
        boxes = tuple(rng.sample(range(BOXES), rng.randint(1, longest)))
        code, *others = rng.sample(CODES, 1 + BOXES)
        contents = [f"code {other}" for other in others]
        for box, following in pairwise(boxes):
            contents[box] = f"see box {following}"
        contents[boxes[-1]] = f"code {code}"
        if (trail := Trail(boxes, tuple(contents))).held_out == held_out:
            return trail


class Boxes:
    """The task. Use it with the model `embedded_agent`, which knows how to write a call and rarely does the rest."""

    turns = TURNS

    def __init__(self, codec: Codec) -> None:
        self.agent = Agent(codec, [_Opener(()).open], Limits(turns=self.turns), call_format="hermes")

    def prompt(self, index: int) -> Prompt:
        return self._prompt(draw_trail(Random(index), held_out=False))

    def held_out(self, count: int) -> list[Prompt]:
        return [self._prompt(draw_trail(Random(FIRST_HELD_OUT + n), held_out=True)) for n in range(count)]

    async def run(self, prompt: Prompt, generate: Generate) -> Rollout:
        chat = self.agent.start(prompt, generate)
        tools = Toolbox([_Opener(prompt.data["contents"]).open])
        while await self.agent.step(chat, tools):
            pass
        said = chat.messages[-1]
        right = said["role"] == "assistant" and said["content"] == prompt.data["answer"]
        return chat.rollout(prompt, Reward(float(right)))

    def _prompt(self, trail: Trail) -> Prompt:
        return self.agent.prompt(trail.key, trail.start, contents=trail.contents, answer=trail.code)


class OneTurn(Boxes):
    """The same problems and the same model, with a single turn: it cannot read what a box holds."""

    turns = 1


class _Opener:
    def __init__(self, contents: tuple[str, ...]) -> None:
        self.contents = contents

    async def open(self, box: int) -> str:
        """Show what is in a box.

        Args:
            box: The number of the box, 0 to 9.
        """
        return self.contents[box]
