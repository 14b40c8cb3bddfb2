"""The one exception a user is meant to see: what was wrong, where, and what to do, in a single line."""


class SoleraError(Exception):
    """A mistake in what the user gave us. The command line prints it as one line and exits with status 2."""


def one_line(error: BaseException) -> str:
    """What another package's error says, without its line breaks."""
    return " ".join(str(error).split())[:300] or type(error).__name__
