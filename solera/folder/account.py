"""The account of a run's tokens: generated = trained + waiting + being written + dropped, by reason, + other + lost."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MASKED, LEFTOVER, TOO_OLD, SUPERSEDED, UNSTORED, ABORTED = (
    "masked", "leftover", "too_old", "superseded", "unstored", "aborted",
)  # fmt: skip
"""Why tokens are dropped (docs/store.md)."""


@dataclass(frozen=True)
class Account:
    """What became of every token that the engines of a run have sampled, from its beginning and across restarts."""

    generated: int = 0
    """Counted at the engines."""
    trained: int = 0
    """Of rollouts that were in the loss when they were drawn first."""
    waiting: int = 0
    """Of rollouts in the store that can still be drawn."""
    writing: int = 0
    """Of responses that are being written, or whose group is not complete yet."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """By reason."""
    other: Mapping[str, int] = field(default_factory=dict)
    """Not for training: `probe`, `canary`, `evaluation`."""
    lost: int = 0
    """Of responses that were under way when the run was killed."""
    since: int = 0
    """The step with which the account begins. Above 0 if an earlier version of Solera began the run."""
    reached: int = -1
    """The last problem of the task's stream that was drawn."""

    @property
    def difference(self) -> int:
        """Tokens that were generated and are in no other number. The account balances if it is 0."""
        rest = self.trained + self.waiting + self.writing + self.lost
        return self.generated - rest - sum(self.dropped.values()) - sum(self.other.values())

    @property
    def stored(self) -> int:
        """Tokens in the store, superseded ones included."""
        return (
            self.trained + self.waiting + sum(self.dropped.get(r, 0) for r in (MASKED, LEFTOVER, TOO_OLD, SUPERSEDED))
        )

    def told(self) -> str:
        """In one line, without the numbers that are 0.

        >>> Account(generated=9, trained=5, dropped={"masked": 3, "leftover": 0}, other={"probe": 1}).told()
        '9 generated = 5 trained + 3 dropped (masked) + 1 other (probe)'
        """
        parts = {"trained": self.trained, "waiting": self.waiting, "being written": self.writing}
        parts |= {f"dropped ({reason.replace('_', ' ')})": tokens for reason, tokens in self.dropped.items()}
        parts |= {f"other ({purpose})": tokens for purpose, tokens in self.other.items()} | {"lost": self.lost}
        parts["unexplained"] = self.difference
        said = " + ".join(f"{tokens} {name}" for name, tokens in parts.items() if tokens) or "0"
        return f"{self.generated} generated = {said}" + (f" (since step {self.since})" if self.since else "")

    def metrics(self) -> dict[str, int]:
        """By the names that `account.jsonl` has."""
        plain = {name: getattr(self, name) for name in ("generated", "trained", "waiting", "writing")}
        named = {
            **plain, **{f"dropped/{reason}": tokens for reason, tokens in self.dropped.items()},
            **{f"other/{purpose}": tokens for purpose, tokens in self.other.items()}, "lost": self.lost,
        }  # fmt: skip
        return {f"tokens/{name}": tokens for name, tokens in named.items()}


def account_of(fields: dict[str, Any] | None) -> Account | None:
    """An account that was written as JSON. Older checkpoints have none."""
    if fields is None:
        return None
    account = Account(**fields)
    numbers = [value for value in vars(account).values() if not isinstance(value, dict)]
    numbers += [*account.dropped.values(), *account.other.values()]
    if any(type(number) is not int for number in numbers):
        raise ValueError("the numbers of the account of tokens must be whole")
    return account


def append_account(path: Path, step: int, account: Account) -> None:
    """Add a line to `account.jsonl`. Lines are never taken back: a resumed run goes on counting what it had lost."""
    with path.open("a+b") as lines:
        lines.seek(max(0, lines.tell() - 1))
        end = b"\n" if lines.read() not in (b"", b"\n") else b""  # of a line that a kill cut off
        lines.write(end + json.dumps({"step": step, **account.metrics()}).encode() + b"\n")
