"""What can be said of an update, given the interval of its improvement."""

CERTIFIED, INCONCLUSIVE, HARMFUL = 1, 0, -1
STATE_WORDS = {CERTIFIED: "certified", INCONCLUSIVE: "inconclusive", HARMFUL: "harmful"}


def state(low: float, high: float) -> int:
    """Certified where the whole interval lies above 0, harmful where it lies below, else inconclusive.

    >>> STATE_WORDS[state(0.01, 0.03)], STATE_WORDS[state(-0.01, 0.03)], STATE_WORDS[state(-0.02, -0.01)]
    ('certified', 'inconclusive', 'harmful')
    """
    return CERTIFIED if low > 0 else HARMFUL if high < 0 else INCONCLUSIVE
