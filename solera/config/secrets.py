"""Passwords in URLs, found before a URL reaches a file, a log or a page."""

from urllib.parse import unquote_plus, urlsplit

MAY_HOLD_SECRETS = ("store.url",)
"""Fields whose values are not repeated in messages."""
SCHEMES = ("postgresql", "postgresql+psycopg")
HIDDEN = "postgresql://***:***@***"
"""Shown in place of a URL with a password."""
NO_PASSWORD = (
    "store.url holds a password, which would be written to the run's config and reports: remove it, and set PGPASSWORD "
    "in the environment or write ~/.pgpass"
)
NO_URL = (
    "store.url is not the URL of a PostgreSQL database; use postgresql+psycopg://USER@HOST/DATABASE, or remove it for "
    "a SQLite file in the run's folder"
)


def is_database_url(url: str) -> bool:
    """Whether it can be read as a URL of a known scheme."""
    try:
        parts = urlsplit(url)
        return parts.scheme in SCHEMES and url.startswith(f"{parts.scheme}://") and (parts.port or 0) >= 0
    except ValueError:  # a port that is no number, brackets that do not match
        return False


def holds_password(url: str) -> bool:
    """Whether a password is in it, or may be. A password with `/`, `?` or `#` in it ends the host for some parsers and
    not for others; what gives it away is the `@` after it.

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
