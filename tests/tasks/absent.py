"""A grader whose package is not installed."""


def prepare() -> None:
    import no_such_package  # noqa: F401
