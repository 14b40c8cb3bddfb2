"""Tells vLLM about Solera's weight-transfer backend. vLLM finds it through the entry point `vllm.general_plugins`."""

BACKEND = "solera"
"""The name of the backend in `--weight-transfer-config`."""
WORKER = "solera.engines.vllm.worker"
"""The module with the backend. vLLM imports it when it needs it."""


def register() -> None:
    """Called by vLLM in each of its processes, perhaps more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, WORKER, "SoleraTransfer")
