"""The scale of a loss on its way through float16: what worked stays, and grows again."""

import torch

from solera.learner.working import CALM, Working


def test_a_scale_that_worked_stays_and_doubles_after_a_calm_while(tiny):
    working = Working(tiny.copy(torch.float32), torch.float32, trained=True)
    working.loss_scale = working._most_scale = 64.0
    seen = []
    for failed in [False, True, *[False] * (2 * CALM), True, *[False] * (3 * CALM)]:
        working.keep_scale(working.loss_scale / 16 if failed else working.loss_scale)
        seen.append(working.loss_scale)
    assert seen[:2] == [64, 4]
    assert seen[1 + CALM - 1 : 1 + CALM + 1] == [4, 8]
    assert seen[1 + 2 * CALM : 1 + 2 * CALM + 2] == [16, 1]
    assert seen[-1] == 8


def test_without_float16_the_scale_is_one(tiny):
    working = Working(tiny.copy(torch.float32), torch.float32, trained=True)
    for _ in range(3 * CALM):
        working.keep_scale(working.loss_scale)
    assert working.loss_scale == 1


def test_it_never_grows_beyond_where_it_began(tiny):
    working = Working(tiny.copy(torch.float32), torch.float32, trained=True)
    working.loss_scale = working._most_scale = 4.0
    working.keep_scale(1.0)
    for _ in range(9 * CALM):
        working.keep_scale(working.loss_scale)
    assert working.loss_scale == 4
