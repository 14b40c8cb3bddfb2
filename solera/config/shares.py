"""How many groups of a batch each share of `[draw]` takes."""

from solera.config.sections import DrawConfig, shares_of


def apportion(count: int, shares: list[float]) -> list[int]:
    """Whole numbers that add up to `count`, as close to the shares as possible; ties go to the earlier share.

    >>> apportion(8, [0.5, 0.3, 0.2]), apportion(3, [0.5, 0.5])
    ([4, 2, 2], [2, 1])
    """
    exact = [count * share / sum(shares) for share in shares]
    whole = [int(value + 1e-9) for value in exact]
    by_rest = sorted(range(len(shares)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_rest[: count - sum(whole)]:
        whole[i] += 1
    return whole


def new_per_batch(draw: DrawConfig, groups: int) -> int:
    """The fewest groups of a batch that the run generates for it.

    >>> new_per_batch(DrawConfig(), 32), new_per_batch(DrawConfig("replay", fresh=0.25), 32)
    (32, 8)
    """
    if draw.policy == "replay":
        return apportion(groups, [draw.fresh, 1 - draw.fresh])[0]
    if draw.policy == "mixed" and draw.mix == "between":
        shares = shares_of(draw)
        return dict(zip(shares, apportion(groups, list(shares.values())), strict=True)).get("self", 0)
    return groups
