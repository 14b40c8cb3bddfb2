"""Accuracy on held-out problems during training."""

from collections.abc import Callable
from dataclasses import dataclass

from solera.evaluate.attempts import Exam
from solera.evaluate.statistics import estimate
from solera.records import Sampling


@dataclass(frozen=True)
class Evaluator:
    """Attempts the same held-out problems each time. Usually the exam's engine uses the learner's current weights, not
    the run's engine with its older copy."""

    exam: Exam
    sampling: Sampling
    samples: int
    every: int
    on_engine: bool = False
    """Whether the exam's engine is the run's own (a server), with the weights that were published last."""
    refresh: Callable[[], None] = lambda: None
    """Gives the exam's engine the learner's current weights, if it has a copy of them."""

    def due(self, version: int) -> bool:
        """Whether to evaluate before the first batch, and then at every period. After the last batch the loop always
        evaluates."""
        return version == 0 or (self.every > 0 and version % self.every == 0)

    def evaluate(self) -> dict[str, float]:
        """Share of attempts that pass, with its interval, the mean reward, the share of identical responses and, with
        several attempts, pass@n."""
        if not self.on_engine:
            self.refresh()
        attempts = self.exam.attempt(self.sampling, self.samples)
        accuracy = estimate(attempts.rate_P(), share=True)
        reward = estimate(attempts.reward_P(), share=False)
        assert accuracy is not None and reward is not None  # an exam without a graded attempt is refused
        metrics = {"eval/pass@1": accuracy.value, "eval/reward": reward.value, "eval/alike": attempts.alike}
        if accuracy.low is not None and accuracy.high is not None:
            metrics |= {"eval/pass@1_low": accuracy.low, "eval/pass@1_high": accuracy.high}
        if self.samples > 1 and (several := estimate(attempts.pass_at_P(self.samples), share=True)):
            metrics[f"eval/pass@{self.samples}"] = several.value
        if len(tasks := attempts.tasks()) > 1:
            for name, part in tasks.items():
                if own := estimate(part.rate_P(), share=True):
                    metrics[f"eval/pass@1/{name}"] = own.value
        if self.on_engine:
            metrics["eval/version"] = self.exam.engine.version
        if attempts.ungraded:
            metrics["eval/ungraded"] = attempts.ungraded
        return metrics
