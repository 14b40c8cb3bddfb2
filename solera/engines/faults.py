"""Errors of engines, by what can be done about them."""

from solera.errors import SoleraError


class EngineError(SoleraError):
    """An engine did not answer, or could not do what it was asked. Another engine may."""


class GarbageError(EngineError):
    """An engine answered with something that cannot be right. It is not trusted until it has new weights."""


class TakenError(EngineError):
    """Somebody else sends weights to the engine. Sending ours again would only disturb them."""


class NoEngineError(SoleraError):
    """No engine is left."""


class DivergedError(SoleraError):
    """The weights give probabilities that are no numbers. No engine can do anything about that."""
