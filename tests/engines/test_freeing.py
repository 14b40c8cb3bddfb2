"""An engine that gives up its memory between two batches writes what it would have written."""

import pytest
import torch

from solera.engines.in_process import InProcessEngine
from solera.engines.pages import PAGE
from tests.conftest import END
from tests.engines.test_in_process import ask, ragged_requests


@pytest.mark.parametrize("planned", [False, True], ids=["plain", "continuous"])
def test_after_free_an_engine_writes_the_same(tiny, planned):
    model = tiny.copy(torch.float32)
    model = model.with_plans() if planned else model
    engine = InProcessEngine(model, (END,), 8, torch.float32, beside=True)  # which keeps its memory by itself
    engine.decoder._room = lambda: 64 * PAGE  # segments of four pages
    requests = ragged_requests(6, 3)
    first = ask(engine, requests)
    before = planned and engine.decoder.pages.total
    engine.free()
    assert not planned or 0 < 2 * engine.decoder.pages.total < before
    again = ask(engine, requests)
    assert [each.token_ids_T.tolist() for each in first] == [each.token_ids_T.tolist() for each in again]
    assert engine.sampled == 2 * sum(len(each.token_ids_T) for each in first)
