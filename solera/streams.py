"""Random numbers that depend only on their purpose, never on what was drawn before."""

from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST_UNIFORM = 1.0 - 2.0**-22
"""Far enough below 1 that float32 does not round it to 1, so that a draw never passes the end of a distribution."""
_LIMIT = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_TURN = 0xD1B54A32D192ED03


def stream_seed(*parts: int) -> int:
    """Combine several numbers (run, prompt, member of the group, turn) into one 64-bit seed.

    >>> stream_seed(0, 1, 2) == stream_seed(0, 1, 2), stream_seed(0, 1, 2) == stream_seed(0, 2, 1)
    (True, False)
    """
    state = 0
    for part in parts:  # the finaliser of SplitMix64 over each number in turn
        state = (state * _TURN + part + _GOLDEN) & _LIMIT
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _LIMIT
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _LIMIT
        state ^= state >> 31
    return state


def stream_seeds(*parts: int | npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint64]:
    """`stream_seed` for arrays, which are broadcast.

    >>> stream_seeds(0, np.arange(3)).tolist() == [stream_seed(0, index) for index in range(3)]
    True
    """
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            number = np.uint64(part & _LIMIT) if isinstance(part, int) else part.astype(np.uint64)
            state = _finalised(state * np.uint64(_TURN) + number + np.uint64(_GOLDEN))
    return state


def uniforms(seed_B: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.float32]:
    """`count` numbers in [0, 1) for each seed, from the generator SplitMix64, all rows at once.

    The numbers of a response depend only on its seed, not on the rest of its batch. `[B] -> [B, count]`
    """
    with np.errstate(over="ignore"):
        state_BT = _finalised(seed_B[:, None] + np.uint64(_GOLDEN) * np.arange(1, count + 1, dtype=np.uint64))
    uniform_BT = (state_BT >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.minimum(uniform_BT, LARGEST_UNIFORM).astype(np.float32)


def _finalised(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The bit mixing of SplitMix64, for arrays."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
