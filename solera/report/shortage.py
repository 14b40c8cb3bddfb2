"""Report whether draws fill their batches."""

from collections.abc import Callable

from solera.config import DrawConfig, writes
from solera.protocols import Metrics

ENOUGH = 0.5
"""No report if a batch has at least this share of the requested groups."""
REMEDIES = {
    "unrewarded": "wait for a reward: add it with solera data reward",
    "too_old": "are older than draw.max_age: raise it, or sync more often",
    "used_up": "were used draw.max_uses times: raise it, or import more",
    "incomplete": (
        "are in groups without enough rewarded members: import more answers to each prompt, or lower "
        "draw.min_rewarded or collect.group_size"
    ),
    "leftover": (
        "are left over from groups that lacked rewards when their batch was drawn: make sure that every "
        "response gets a reward, lower draw.min_rewarded, or, if rewards come late, set draw.leftovers to "
        '"keep"'
    ),
    "flat": "are in groups whose rewards differ by less than draw.min_spread: lower it",
}
NO_MORE = "the store has no more: import more, or lower collect.prompts"
UNGRADED = "the others have no reward: make sure that every response gets one, or add it with solera data reward"
UNMET = (
    "answer prompts that another origin of draw.shares did not answer often enough: let it answer the task's own "
    'prompts, or set draw.mix to "between"'
)


class Shortage:
    """A sink that reports once which filter leaves a batch less than half full, and what to do."""

    def __init__(self, draw: DrawConfig, prompts: int, say: Callable[[str], None]) -> None:
        self._remedies = REMEDIES | ({"incomplete": UNMET, "leftover": UNMET} if draw.mix == "within" else {})
        self._nothing = UNGRADED if writes(draw) else NO_MORE
        self._prompts = prompts
        self._say = say
        self._said = False

    def log(self, step: int, metrics: Metrics) -> None:
        drawn = metrics.get("groups/drawn", self._prompts)
        if self._said or drawn >= ENOUGH * self._prompts:
            return
        passed = {reason: metrics.get(f"draw/{reason}", 0) for reason in self._remedies}
        reason = max(passed, key=lambda reason: passed[reason])
        why = self._nothing
        if passed[reason]:
            why = f"{passed[reason]:,.0f} rollouts {self._remedies[reason]}"
        self._say(f"step {step}: {drawn:.0f} of collect.prompts = {self._prompts} groups drawn; {why} (docs/store.md)")
        self._said = True

    def close(self) -> None:
        pass
