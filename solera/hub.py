"""Whether the hub of models and datasets answers: asked first, for its own library tries for a minute."""

import ssl
from functools import lru_cache
from pathlib import Path

from solera.errors import one_line

UNREACHED = ("ConnectError", "ConnectTimeout", "ProxyError", "OfflineModeIsEnabled")
"""Errors where nobody took the call, of httpx or its successor. A hub that is slow to answer has taken it."""


def absent() -> str:
    """Why nothing comes from the hub, nor from its cache."""
    why, error = "cannot be reached (or HF_HUB_OFFLINE is set)", _unreached()
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    if error is not None:
        why = f"answers, but a secure connection fails: {one_line(error)}"
    if isinstance(error, ssl.SSLCertVerificationError):
        why += " (SSL_CERT_FILE names the certificates to trust)"
    return f"the hub {why}, and there is no copy in its cache"


def call() -> None:
    """Refused with a ConnectionError where nobody takes the call within HF_HUB_ETAG_TIMEOUT. One call a process: each
    cell of a sweep would wait for its own."""
    if (error := _unreached()) is not None:
        raise ConnectionError(absent()) from error


@lru_cache(maxsize=1)
def _unreached() -> BaseException | None:
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
