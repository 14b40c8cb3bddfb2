"""The verdict on an update, given the confidence interval of its improvement."""

CERTIFIED, INCONCLUSIVE, HARMFUL = 1, 0, -1
STATE_WORDS = {CERTIFIED: "certified", INCONCLUSIVE: "inconclusive", HARMFUL: "harmful"}


def state(low: float, high: float) -> int:
    """Certified if the whole interval is above 0, harmful if it is below 0, otherwise inconclusive.

    >>> STATE_WORDS[state(0.01, 0.03)], STATE_WORDS[state(-0.01, 0.03)], STATE_WORDS[state(-0.02, -0.01)]
    ('certified', 'inconclusive', 'harmful')
    """
    return CERTIFIED if low > 0 else HARMFUL if high < 0 else INCONCLUSIVE
