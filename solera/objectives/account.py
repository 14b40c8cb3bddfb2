"""What an objective did to the tokens of a batch, kept as sums so that micro-batches and passes can be added."""

from dataclasses import dataclass

import torch
from torch import Tensor

from solera.objectives.terms import Term


@dataclass(frozen=True, eq=False)
class Account:
    """Sums of token quantities over tokens with positive advantage, with negative advantage, and over all in the loss.

    `sums` has one row per quantity in `asked` and these three columns. It is computed as one matrix product because on
    a small batch the number of operations dominates the time.
    """

    asked: tuple[str, ...]
    sums: Tensor
    seen: tuple[str, ...]
    acts: bool
    clips: bool
    silenced_T: Tensor | None = None
    """Tokens whose gradient the clip removed. `None` in a sum of accounts."""

    @classmethod
    @torch.no_grad()
    def of(cls, term: Term, advantage_T: Tensor, weight_T: Tensor, seen: dict[str, Tensor]) -> "Account":
        """`weight_T` is each token's weight in the loss. Tokens with a positive weight count in the means of `seen`."""
        asked: dict[str, Tensor] = {"all": torch.ones_like(weight_T), **seen}
        if term.weight_T is not None:
            asked |= {"weight": term.weight_T, "moved": term.weight_T != 0, "size": (term.loss_T * weight_T).abs()}
        clips = term.silenced_T is not None and term.ratio_T is not None
        if term.silenced_T is not None:
            asked["silenced"] = term.silenced_T
        if term.silenced_T is not None and term.ratio_T is not None:
            asked["high"] = term.silenced_T & (term.ratio_T > 1)
        kinds = torch.stack([advantage_T > 0, advantage_T < 0, weight_T > 0]).to(weight_T.dtype)
        sums = torch.stack([value.to(weight_T.dtype) for value in asked.values()]) @ kinds.T
        return cls(tuple(asked), sums, tuple(seen), term.weight_T is not None, clips, term.silenced_T)

    def __add__(self, other: "Account") -> "Account":
        assert self.asked == other.asked, "accounts of one objective"
        return Account(self.asked, self.sums + other.sums, self.seen, self.acts, self.clips)

    def metrics(self) -> dict[str, float]:
        """The metrics explained in docs/metrics.md. A metric whose denominator is 0 is left out."""
        lines = dict(zip(self.asked, self.sums.tolist(), strict=True))
        better, worse, taking = ({name: line[column] for name, line in lines.items()} for column in range(3))
        shares = {name: (taking[name], taking["all"]) for name in self.seen}
        if self.acts:
            acting = {name: better[name] + worse[name] for name in lines}
            shares |= {
                "weight/mean": (acting["weight"], acting["all"]),
                "tokens/masked": (taking["all"] - acting["moved"], taking["all"]),
                "loss/positive_share": (better["size"], acting["size"]),
                "loss/negative_share": (worse["size"], acting["size"]),
                "clip/fraction": (acting.get("silenced", 0.0), acting["all"]),
            }
        if self.acts and self.clips:
            shares |= {
                "clip/high": (acting["high"], acting["all"]),
                "clip/low": (acting["silenced"] - acting["high"], acting["all"]),
                "clip/positive": (better["silenced"], better["all"]),
                "clip/negative": (worse["silenced"], worse["all"]),
            }
        return {name: part / whole for name, (part, whole) in shares.items() if whole}
