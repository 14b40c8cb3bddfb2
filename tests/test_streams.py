"""Seeds of many streams at once are those of each stream alone."""

import numpy as np

from solera.streams import stream_seed, stream_seeds


def test_many_seeds_are_those_of_one_after_the_other():
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 2**64, (5, 40), dtype=np.uint64)
    assert stream_seeds(*whole).tolist() == [stream_seed(*parts) for parts in whole.T.tolist()]
    signed = rng.integers(-(2**63), 2**63, (2, 40))
    assert stream_seeds(*signed).tolist() == [stream_seed(*parts) for parts in signed.T.tolist()]


def test_the_members_of_a_batch_are_broadcast():
    for seed in (0, 7, 2**64 - 1, 2**70 + 3):
        prompt_P = stream_seeds(seed, np.arange(5, 9))
        seed_PG = stream_seeds(prompt_P[:, None], np.arange(3))
        assert seed_PG.tolist() == [
            [stream_seed(stream_seed(seed, index), g) for g in range(3)] for index in range(5, 9)
        ]
