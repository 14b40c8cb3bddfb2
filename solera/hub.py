"""Whether the hub of models and datasets answers: asked first, for its own library tries for a minute."""

from functools import lru_cache
from pathlib import Path

UNREACHED = ("ConnectError", "ConnectTimeout", "ProxyError", "OfflineModeIsEnabled")
"""Errors where nobody took the call, of httpx or its successor. A hub that is slow to answer has taken it."""
ABSENT = "the hub cannot be reached (or HF_HUB_OFFLINE is set), and no copy is in its cache"


def call() -> None:
    """Refused with a ConnectionError where nobody takes the call within HF_HUB_ETAG_TIMEOUT. One call a process: each
    cell of a sweep would wait for its own."""
    if (error := _unreached()) is not None:
        raise ConnectionError(ABSENT) from error


@lru_cache(maxsize=1)
def _unreached() -> Exception | None:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # whatever else it is, the hub's library meets it again and says so
        return error if type(error).__name__ in UNREACHED else None
    return None


def copy_of(model: str) -> str | None:
    """The folder of the cache that holds the model, or at least its config."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model, "config.json")
    except ValueError:  # no name that a hub would have
        return None
    return str(Path(config).parent) if isinstance(config, str) else None
