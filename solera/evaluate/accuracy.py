"""Accuracy of the learner's current weights on held-out problems."""

from dataclasses import dataclass

from solera.collector import attempt_all
from solera.errors import SoleraError
from solera.protocols import Engine, Task
from solera.records import Prompt, Sampling
from solera.streams import stream_seed


@dataclass(frozen=True)
class Evaluator:
    """Attempts the same held-out problems once each. `engine` sees the learner's weights, not the lagged copy."""

    task: Task
    engine: Engine
    prompts: list[Prompt]
    sampling: Sampling
    every: int

    def due(self, version: int) -> bool:
        """Before the first batch, and then at every period. (After the last one the loop asks in any case.)"""
        return version == 0 or (self.every > 0 and version % self.every == 0)

    def evaluate(self) -> dict[str, float]:
        """Mean reward over the problems: pass@1 where a reward is 0 or 1."""
        seeds = ((prompt, stream_seed(i)) for i, prompt in enumerate(self.prompts))
        rewards = [rollout.reward for rollout in attempt_all(self.task, self.engine, seeds, self.sampling)]
        graded = [reward for reward in rewards if reward is not None]
        if not graded:
            raise SoleraError("evaluation: the task graded none of its held-out problems")
        return {"eval/pass@1": sum(graded) / len(graded)}
