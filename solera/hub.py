"""Whether the hub of models and datasets answers: asked first, for its own library tries for a minute."""

from functools import lru_cache
from pathlib import Path

UNREACHED = ("ConnectError", "ConnectTimeout", "ProxyError", "OfflineModeIsEnabled")
"""Errors where nobody took the call, of httpx or its successor. A hub that is slow to answer has taken it."""
ABSENT = "the hub cannot be reached (or HF_HUB_OFFLINE is set), and no copy is in its cache"


@lru_cache(maxsize=1)  # which does not keep an error: the network may come back
def call() -> None:
    """Refused with a ConnectionError where nobody takes the call within HF_HUB_ETAG_TIMEOUT."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # whatever else it is, the hub's library meets it again and says so
        if type(error).__name__ in UNREACHED:
            raise ConnectionError(ABSENT) from error


def copy_of(model: str) -> str | None:
    """The folder of the cache that holds the model, or at least its config."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json")
    return str(Path(config).parent) if isinstance(config, str) else None
