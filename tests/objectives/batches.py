"""Seeded batches with every kind of raggedness, as lists for the oracle and as padded arrays for what it judges."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.objectives.oracle import Response

Batch = list[list[Response]]

EDGE = 0.25
"""Log-ratio of the tokens of `edges` that lie exactly on a bound of the band."""


def edge_options() -> dict[str, float]:
    """Half-widths whose bounds are, bit for bit, the exponentials of ±EDGE, and of −2·EDGE and 6·EDGE for the ring."""
    at = {k: torch.exp(torch.tensor([k * EDGE], dtype=torch.float64)).item() for k in (-2, -1, 1, 6)}
    options = {"epsilon_low": 1 - at[-1], "epsilon_high": at[1] - 1, "ring_low": 1 - at[-2], "ring_high": at[6] - 1}
    assert [1 - options["ring_low"], 1 - options["epsilon_low"]] == [at[-2], at[-1]]
    assert [1 + options["epsilon_high"], 1 + options["ring_high"]] == [at[1], at[6]]
    return options


def response(rng: random.Random, reward: float | None, log_ratio: Callable[[], float], mask: list[bool]) -> Response:
    """Log-probabilities around −1.5; behaviour, proximal and reference each a draw of `log_ratio` away."""
    T = len(mask)
    logp = [-rng.uniform(0.05, 3.0) for _ in range(T)]
    return Response(
        reward=reward,
        mask=mask,
        logp=torch.tensor(logp, dtype=torch.float64),
        behaviour=[value - log_ratio() for value in logp],
        proximal=[value - log_ratio() for value in logp],
        ref=[value - log_ratio() for value in logp],
        entropy=torch.tensor([rng.uniform(0.0, 2.0) for _ in range(T)], dtype=torch.float64),
        uniform=rng.random(),
    )


def ragged_mask(rng: random.Random, longest: int = 6) -> list[bool]:
    """Up to `longest` tokens with holes, at least one of them answered for."""
    mask = [rng.random() < 0.75 for _ in range(rng.randint(1, longest))]
    mask[rng.randrange(len(mask))] = True
    return mask


def binary(rng: random.Random) -> float:
    return float(rng.random() < 0.4)


def real(rng: random.Random) -> float:
    return rng.gauss(0.3, 0.8)


def tied(rng: random.Random) -> float:
    """Eighths: sums of a few are exact, so ties with each other and with the mean are the same in any order."""
    return rng.randint(-2, 6) / 8


def drawn(rng: random.Random, sizes: list[int], reward: Callable[[random.Random], float], spread: float) -> Batch:
    def log_ratio() -> float:
        return rng.gauss(0.0, spread)

    return [[response(rng, reward(rng), log_ratio, ragged_mask(rng)) for _ in range(size)] for size in sizes]


def plain(seed: int) -> Batch:
    """Groups of one size, binary rewards, near on-policy."""
    return drawn(random.Random(seed), [4, 4, 4], binary, 0.25)


def stale(seed: int) -> Batch:
    """Groups of different sizes, real-valued rewards, far off-policy."""
    return drawn(random.Random(seed), [5, 2, 3], real, 1.0)


def ties(seed: int) -> Batch:
    """Tied rewards, some groups all equal, a group of one; ratios that are equal in size on several tokens."""
    rng = random.Random(seed)
    batch = drawn(rng, [6, 3, 1, 5], tied, 0.5)
    equal = tied(rng)
    for member in batch[1]:
        member.reward = equal
    for member in batch[0][:3]:
        T = len(member.mask)
        member.logp = torch.full((T,), -1.0, dtype=torch.float64)
        member.behaviour = [-1.0 - rng.choice([-0.5, -0.25, 0.0, 0.25, 0.5]) for _ in range(T)]
    return batch


def gaps(seed: int) -> Batch:
    """Missing rewards, responses without a token, groups of one, a group missing whole, one left with equal rewards."""
    rng = random.Random(seed)
    batch = drawn(rng, [5, 4, 3, 1, 2, 2], tied, 0.4)
    batch[0][1].reward = None
    batch[0][2].mask = [False] * len(batch[0][2].mask)
    batch[1][0].reward, batch[1][1].reward, batch[1][2].reward, batch[1][3].reward = 1.0, 0.5, 0.5, 0.5
    batch[1][0].mask = [False] * len(batch[1][0].mask)
    for member in batch[2]:
        member.reward = None
    batch[4][0].reward = None
    return batch


def huge(seed: int) -> Batch:
    """Log-ratios of ±19 … ±10,000 among ordinary ones."""
    rng = random.Random(seed)

    def log_ratio() -> float:
        size = rng.choice([0.0, 0.3, 3.0, 19.0, 25.0, 800.0, 1e4])
        return rng.choice([-1.0, 1.0]) * size * rng.uniform(0.9, 1.0)

    return [[response(rng, real(rng), log_ratio, ragged_mask(rng)) for _ in range(size)] for size in (4, 3, 2)]


def edges(seed: int) -> Batch:
    """Ratios exactly on the bounds that `edge_options` sets, and exactly 1."""
    rng = random.Random(seed)
    batch = drawn(rng, [4, 3], tied, 0.5)
    batch[0][0].reward, batch[0][1].reward, batch[1][0].reward, batch[1][1].reward = 1.0, 0.0, 1.0, 0.0
    for member in (member for group in batch for member in group):
        T = len(member.mask)
        member.logp = torch.tensor([rng.randint(-16, -1) / 8 for _ in range(T)], dtype=torch.float64)
        member.behaviour = [value - rng.choice([-2, -1, 0, 1, 6]) * EDGE for value in member.logp.tolist()]
        member.proximal = [value - rng.choice([-1, 0, 1]) * EDGE for value in member.logp.tolist()]
    return batch


def on_policy(seed: int) -> Batch:
    """Behaviour and proximal are the policy itself."""
    batch = drawn(random.Random(seed), [4, 3], binary, 0.5)
    batch[0][0].reward, batch[0][1].reward, batch[1][0].reward, batch[1][1].reward = 1.0, 0.0, 1.0, 0.0
    for member in (member for group in batch for member in group):
        member.behaviour = member.proximal = member.logp.tolist()
    return batch


def unlucky(seed: int) -> Batch:
    """Long failures, short successes: Σ A·n is far below zero."""
    rng = random.Random(seed)
    batch = drawn(rng, [4, 5], binary, 0.4)
    for group in batch:
        for i, member in enumerate(group):
            member.reward = float(i == 0)
            length = 1 if i == 0 else rng.randint(2, 6)
            group[i] = response(rng, member.reward, lambda: rng.gauss(0.0, 0.4), [True] * length)
    return batch


def balanced(seed: int) -> Batch:
    """All of one length: Σ A·n is zero but for rounding, of either sign."""
    rng = random.Random(seed)
    sizes = (3, 5, 6)
    return [[response(rng, real(rng), lambda: rng.gauss(0.0, 0.4), [True] * 3) for _ in range(n)] for n in sizes]


def equal_squares(seed: int) -> Batch:
    """Candidates of m2po whose mean (log ρ)² fits once one of several equal ones is gone: they go together."""
    rng = random.Random(seed)
    batch = [[response(rng, reward, lambda: 0.0, [True] * 4) for reward in (1.0, 0.0)]]
    for member, sign in zip(batch[0], (1.0, -1.0), strict=True):
        member.logp = torch.full((4,), -1.0, dtype=torch.float64)
        member.behaviour = [-1.0 - sign * size for size in (0.25, 0.25, 0.125, 0.125)]
    return batch


def absurd(seed: int) -> Batch:
    """Finite numbers that are no log-probabilities: up to +1,000."""
    rng = random.Random(seed)
    batch = drawn(rng, [4, 3], real, 0.5)
    for member in (member for group in batch for member in group):
        lift = rng.choice([0.0, 30.0, 1000.0])
        member.logp = member.logp + lift
        member.behaviour = [value + lift for value in member.behaviour or []]
        member.proximal = [value + lift for value in member.proximal]
        member.ref = [value + lift for value in member.ref]
    return batch


def foreign(seed: int) -> Batch:
    """Some responses written by nobody knows whom."""
    batch = drawn(random.Random(seed), [4, 3, 2], real, 0.5)
    for group in batch:
        group[0].behaviour = None
    return batch


def nothing(seed: int) -> Batch:
    """No reward has arrived."""
    batch = drawn(random.Random(seed), [2, 1], binary, 0.3)
    for member in (member for group in batch for member in group):
        member.reward = None
    return batch


KINDS: dict[str, Callable[[int], Batch]] = {
    kind.__name__: kind for kind in (plain, stale, ties, gaps, huge, edges, on_policy, unlucky, nothing)
}
"""All but `foreign`, which most objectives refuse."""


def padded(batch: Batch, seed: int, garbage: bool = True) -> tuple[dict[str, Any], list[Response]]:
    """The arguments of `padded_loss` with rows in shuffled order, and the responses in that order.

    Where the mask is False the arrays hold NaN, infinities and absurd numbers."""
    rng = random.Random(seed)
    rows = [(g, member) for g, group in enumerate(batch) for member in group]
    rng.shuffle(rows)
    B, T = len(rows), max(len(member.mask) for _, member in rows) + 1
    mask_BT = torch.zeros(B, T, dtype=torch.bool)
    for b, (_, member) in enumerate(rows):
        mask_BT[b, : len(member.mask)] = torch.tensor(member.mask)

    def spread(values: Callable[[Response], list[float] | None]) -> Tensor:
        absurd = [float("nan"), float("inf"), -float("inf"), 1e300, -7.0] if garbage else [0.0]
        array_BT = [rng.choices(absurd, k=T) for _ in range(B)]  # lists: a tensor takes longer to fill than to make
        for filled_T, (_, member) in zip(array_BT, rows, strict=True):
            row = values(member)
            for t in member.tokens:
                filled_T[t] = float("nan") if row is None else row[t]
        return torch.tensor(array_BT, dtype=torch.float64)

    missing = float("nan")
    arguments = {
        "logp_BT": spread(lambda member: member.logp.tolist()).requires_grad_(),
        "mask_BT": mask_BT,
        "reward_B": torch.tensor([missing if m.reward is None else m.reward for _, m in rows], dtype=torch.float64),
        "group_B": torch.tensor([g for g, _ in rows]),
        "behaviour_logp_BT": spread(lambda member: member.behaviour),
        "proximal_logp_BT": spread(lambda member: member.proximal),
        "ref_logp_BT": spread(lambda member: member.ref),
        "entropy_BT": spread(lambda member: member.entropy.tolist()).requires_grad_(),
        "uniform_B": torch.tensor([member.uniform for _, member in rows], dtype=torch.float64),
    }
    return arguments, [member for _, member in rows]
