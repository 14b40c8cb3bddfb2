"""Two reward functions of one's own for sums: one in Solera's signature, one in TRL's."""


def digits(rollout, row):
    """The share of the answer's digits that stand in their place, counted from the right."""
    if len(rollout.text) != len(row["answer"]):
        return 0.0
    return sum(a == b for a, b in zip(rollout.text, row["answer"], strict=True)) / len(row["answer"])


def carried(completions, answer, carries, **kwargs):
    """One for a right answer to a sum with a carry; no opinion on the others."""
    return [float(c == a) if k else None for c, a, k in zip(completions, answer, carries, strict=True)]
