"""Detect passwords in URLs before a URL reaches a file, a log or a page."""

from collections.abc import Iterable
from urllib.parse import unquote_plus, urlsplit

MAY_HOLD_SECRETS = ("store.url", "engine.urls", "engine.args")
"""Fields whose values never appear in messages."""
SCHEMES = ("postgresql", "postgresql+psycopg")
HIDDEN = "postgresql://***:***@***"
"""Shown instead of a URL with a password."""
NO_PASSWORD = (
    "store.url holds a password, which would be written to the run's config and reports: remove it, and set PGPASSWORD "
    "in the environment or write ~/.pgpass"
)
NO_URL = (
    "store.url is not the URL of a PostgreSQL database; use postgresql+psycopg://USER@HOST/DATABASE, or remove it for "
    "a SQLite file in the run's folder"
)

SECRET_OPTIONS = (("--api-k", "an API key", "VLLM_API_KEY"), ("--hf-t", "a Hugging Face token", "HF_TOKEN"))
"""The options of `vllm serve` that take a secret: how they begin (argparse completes a name), what they take, and the
environment variable to set instead."""


def is_database_url(url: str) -> bool:
    """Whether it is a valid URL with a known scheme."""
    try:
        parts = urlsplit(url)
        return parts.scheme in SCHEMES and url.startswith(f"{parts.scheme}://") and (parts.port or 0) >= 0
    except ValueError:  # an invalid port, or unbalanced brackets
        return False


def is_server_url(url: str) -> bool:
    """Whether it is the address of a server and nothing else: no user or password, no path, no query.

    >>> is_server_url("http://127.0.0.1:8000"), is_server_url("http://me:secret@host"), is_server_url("host:8000")
    (True, False, False)
    """
    try:
        parts = urlsplit(url)
        rest = (parts.username, parts.password, parts.query, parts.fragment, parts.path.strip("/"))
        return parts.scheme in ("http", "https") and bool(parts.hostname) and not any(rest) and (parts.port or 1) > 0
    except ValueError:  # an invalid port, or unbalanced brackets
        return False


def has_option(arguments: Iterable[str], start: str) -> bool:
    """Whether an option begins with `start`, in any spelling that vLLM accepts.

    >>> has_option(["--api_key=secret"], "--api-k"), has_option(["--api-server-count", "2"], "--api-k")
    (True, False)
    """
    return any(argument.partition("=")[0].replace("_", "-").startswith(start) for argument in arguments)


def holds_password(url: str) -> bool:
    """Whether the URL contains a password, or may contain one. Parsers disagree about where the host ends if a password
    contains `/`, `?` or `#`; the `@` after it reveals it.

    >>> holds_password("postgresql://me@db.example/runs?sslmode=require"), holds_password("postgresql://me:a/b@db/runs")
    (False, True)
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return True
    user, _, _ = parts.netloc.rpartition("@")
    rest = "?".join((parts.path, parts.query, parts.fragment))
    return ":" in unquote_plus(user) or "@" in rest or "password=" in unquote_plus(rest).lower()
