"""What an objective did to the tokens of a batch, kept as sums so that micro-batches and passes can be added."""

from dataclasses import dataclass

import torch
from torch import Tensor

from solera.objectives.terms import Term


@dataclass(frozen=True, eq=False)
class TokenStatistics:
    """Sums of several quantities over three kinds of tokens: with positive advantage, with negative advantage, and all
    tokens in the loss.

    `sums` has one row for each of `names` and one column for each kind. It is computed as one product of two small
    matrices, because on a small batch the number of operations determines the time.
    """

    names: tuple[str, ...]
    sums: Tensor
    seen: tuple[str, ...]
    acts: bool
    clips: bool
    silenced_T: Tensor | None = None
    """Marks the tokens whose gradient the clip removed. `None` in a sum of statistics."""

    @classmethod
    @torch.no_grad()
    def of(cls, term: Term, advantage_T: Tensor, weight_T: Tensor, seen: dict[str, Tensor]) -> "TokenStatistics":
        """`weight_T` is each token's weight in the loss. The quantities in `seen` are averaged over tokens whose weight
        is above 0."""
        values: dict[str, Tensor] = {"all": torch.ones_like(weight_T), **seen}
        if term.weight_T is not None:
            values |= {"weight": term.weight_T, "moved": term.weight_T != 0, "size": (term.loss_T * weight_T).abs()}
        clips = term.silenced_T is not None and term.ratio_T is not None
        if term.silenced_T is not None:
            values["silenced"] = term.silenced_T
        if term.silenced_T is not None and term.ratio_T is not None:
            values["high"] = term.silenced_T & (term.ratio_T > 1)
        kinds = torch.stack([advantage_T > 0, advantage_T < 0, weight_T > 0]).to(weight_T.dtype)
        sums = torch.stack([each.to(weight_T.dtype) for each in values.values()]) @ kinds.T
        return cls(tuple(values), sums, tuple(seen), term.weight_T is not None, clips, term.silenced_T)

    def __add__(self, other: "TokenStatistics") -> "TokenStatistics":
        assert self.names == other.names, "statistics of one objective"
        return TokenStatistics(self.names, self.sums + other.sums, self.seen, self.acts, self.clips)

    def on_host(self) -> "TokenStatistics":
        """The sums alone, for another process."""
        return TokenStatistics(self.names, self.sums.cpu(), self.seen, self.acts, self.clips)

    def metrics(self) -> dict[str, float]:
        """Return the metrics that docs/metrics.md explains. A metric whose denominator is 0 is left out."""
        lines = dict(zip(self.names, self.sums.tolist(), strict=True))
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
