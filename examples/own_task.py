"""A custom task: a sum with two tries. After a wrong first answer the model sees the question again. A correct second
answer earns half the reward.

    python examples/own_task.py [STEPS]
    solera train --task examples/own_task.py:TwoTries
"""

import sys
from random import Random

import solera


class TwoTries:
    """Provides an endless stream of training problems, some held-out problems, and the episode itself."""

    def __init__(self, codec: solera.Codec) -> None:
        self.codec = codec

    def prompt(self, index: int) -> solera.Prompt:
        rng = Random(index)
        return self._problem(rng.randrange(10, 100), rng.randrange(1, 80, 2))  # train on odd second numbers

    def held_out(self, count: int) -> list[solera.Prompt]:
        rng = Random(-1)
        return [self._problem(rng.randrange(10, 100), rng.randrange(0, 80, 2)) for _ in range(count)]  # the even ones

    async def run(self, prompt: solera.Prompt, generate: solera.Generate) -> solera.Rollout:
        first = await generate(prompt.token_ids)
        if self._right(first, prompt):
            return solera.Rollout.of(prompt, first, rewards=(solera.Reward(1.0),))
        again = prompt.token_ids
        second = await generate((*prompt.token_ids, *first.token_ids_T.tolist(), *again))
        reward = solera.Reward(0.5 if self._right(second, prompt) else 0.0)
        return solera.Rollout.of(prompt, first, again, second, rewards=(reward,))

    def _right(self, answer: solera.Completion, prompt: solera.Prompt) -> bool:
        return self.codec.decode(answer.token_ids_T) == prompt.data["answer"]

    def _problem(self, a: int, b: int) -> solera.Prompt:
        text = f"{a}+{b}="
        return solera.Prompt(f"two_tries/{text}", self.codec.encode(text), {"prompt": text, "answer": str(a + b)})


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    config = solera.Config(
        run=solera.RunConfig(steps=steps), evaluate=solera.EvaluateConfig(problems=100, threshold=1.0)
    )
    result = solera.train(config, task=TwoTries)
    print(f"{result.accuracy_before:.0%} right at the first try before, {result.accuracy_after:.0%} after")
