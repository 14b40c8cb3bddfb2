"""Check whether the Hugging Face hub answers (its own library would retry for a minute), and find its copies."""

import ssl
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from solera.errors import one_line

UNREACHED = ("ConnectError", "ConnectTimeout", "ProxyError", "OfflineModeIsEnabled")
"""Errors of httpx (or its successor) that mean that nothing answered. A slow hub has answered."""


def absent() -> str:
    """Why neither the hub nor its cache can supply a file."""
    why, error = "cannot be reached (or HF_HUB_OFFLINE is set)", _unreached()
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    if error is not None:
        why = f"answers, but a secure connection fails: {one_line(error)}"
    if isinstance(error, ssl.SSLCertVerificationError):
        why += " (SSL_CERT_FILE names the certificates to trust)"
    return f"the hub {why}, and there is no copy in its cache"


def call() -> None:
    """Raise ConnectionError if the hub does not answer within HF_HUB_ETAG_TIMEOUT. Checked once per process, so that
    the cells of a sweep do not each wait."""
    if (error := _unreached()) is not None:
        raise ConnectionError(absent()) from error


@lru_cache(maxsize=1)
def _unreached() -> BaseException | None:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # the hub's library will meet any other error again and report it
        return error if type(error).__name__ in UNREACHED else None
    return None


def copy_of(model: str) -> str | None:
    """The folder of the cache that holds the model, or at least its config."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model, "config.json")
    except ValueError:  # not a valid hub name
        return None
    return str(Path(config).parent) if isinstance(config, str) else None


@dataclass(frozen=True)
class Snapshot:
    """The files of one revision of a model that a machine has in its cache, for processes on any machine."""

    model: str
    """Its hub name."""
    folder: str
    """On the machine that made this."""
    files: tuple[str, ...]

    @property
    def revision(self) -> str:
        return Path(self.folder).name

    def here(self) -> str:
        """Return a folder with the same files on this machine. What its cache lacks is fetched from the hub. Raises
        ConnectionError if the hub does not answer."""
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        if all((Path(self.folder) / file).is_file() for file in self.files):
            return self.folder
        cached = [try_to_load_from_cache(self.model, file, revision=self.revision) for file in self.files]
        if not all(isinstance(path, str) for path in cached):
            call()
        found = [hf_hub_download(self.model, file, revision=self.revision) for file in self.files]
        return str(Path(found[0]).parent)


def snapshot_of(model: str) -> Snapshot | None:
    """The revision that this machine loaded last by the model's name. `None` if it has no safetensors files."""
    folder = copy_of(model)
    files = sorted(file.name for file in Path(folder).iterdir() if file.is_file()) if folder else []
    weights = any(file.endswith(".safetensors") for file in files)
    return Snapshot(model, folder, tuple(files)) if folder and weights else None
