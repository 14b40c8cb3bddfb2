"""What a run asks of its process while it trains: garbage collection, threads, kernels, memory."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from solera.config import RunConfig
from solera.models.language_model import LanguageModel
from solera.models.memory import limited

SMALL_MODEL = 5_000_000
"""Parameters below which a second CPU thread costs more than it brings."""


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Look for reference cycles less often, and not among what was there before.

    Hundreds of small records are born and die at every step; at Python's own pace the collector walks through all of
    torch's and transformers' objects to find nothing, for a tenth of a small step's time.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def torch_for(model: LanguageModel, run: RunConfig) -> Iterator[None]:
    """Threads and kernels of torch that suit the model and its ever-changing shapes, and a GPU's memory as far as the
    run may take it; afterwards as they were."""
    small = sum(parameter.numel() for parameter in model.parameters().values()) < SMALL_MODEL
    threads_before, cudnn_before = torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()
    (mkldnn_before, *_) = torch.backends.mkldnn.set_flags(_enabled=torch.backends.mkldnn.enabled)
    if run.threads or small:
        torch.set_num_threads(run.threads or 1)
    if small:
        torch.backends.mkldnn.set_flags(_enabled=False)  # its set-up takes longer than a small matrix product
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew, 100 ms, for every shape; each batch has another
    try:
        with limited(model.device, run.gpu_memory):
            yield
    finally:
        torch.set_num_threads(threads_before)
        torch.backends.mkldnn.set_flags(_enabled=mkldnn_before)
        torch.backends.cuda.enable_cudnn_sdp(cudnn_before)
