"""Two custom reward functions for sums: one with Solera's signature, one with TRL's."""


def digits(rollout, row):
    """The share of digits that match the answer's digits; 0 if the lengths differ."""
    if len(rollout.text) != len(row["answer"]):
        return 0.0
    return sum(a == b for a, b in zip(rollout.text, row["answer"], strict=True)) / len(row["answer"])


def carried(completions, answer, carries, **kwargs):
    """1 for a correct answer to a sum with a carry, 0 for a wrong one; no opinion on other sums."""
    return [float(c == a) if k else None for c, a, k in zip(completions, answer, carries, strict=True)]
