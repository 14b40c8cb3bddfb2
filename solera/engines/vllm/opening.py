"""Connects to a vLLM server that runs, and checks it."""

from collections.abc import Callable
from typing import NamedTuple

from solera.engines.jobs import Spell
from solera.engines.vllm import checks
from solera.engines.vllm.client import VllmEngine
from solera.engines.vllm.counter import TokenCounter
from solera.engines.vllm.http import CONTROL, Http
from solera.engines.vllm.launch import Launched
from solera.engines.vllm.transport import Transport
from solera.engines.vllm.updates import Updates, lineage_of
from solera.models.merging import Base


class Reading(NamedTuple):
    """How responses end, and how tokens are spelled."""

    end_token_ids: tuple[int, ...]
    spell: Spell


def connect(
    url: str,
    ours: checks.Ours,
    reading: Reading,
    transport: Callable[[Http], Transport],
    *,
    timeout: float,
    base: Callable[[], Base] | None = None,
    launched: Launched | None = None,
    counter: Callable[[Http, str], TokenCounter] = lambda http, holds: TokenCounter(http),
) -> VllmEngine:
    """One server, checked. `counter` is given the lineage of the weights that the server holds. `base` returns the
    frozen weights of a model with adapters."""
    http = Http(url, min(CONTROL, timeout))
    try:
        release, facts = checks.release_at(http), checks.check(http, ours)
        if http.get("/is_paused")["is_paused"]:  # by a trainer that was killed during a sync
            http.post("/resume")
        updates = Updates(http, release, transport(http), base)
        counted = counter(http, lineage_of(updates.ask_workers("solera_held")["label"]))
    except BaseException:
        http.close()
        raise
    return VllmEngine(
        http, release, facts, updates, counted, end_token_ids=reading.end_token_ids, spell=reading.spell,
        launched=launched,
    )  # fmt: skip
