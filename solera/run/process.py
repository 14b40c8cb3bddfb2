"""Process-wide settings while a run trains: garbage collection, threads, kernels, GPU memory."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from solera.config import RunConfig
from solera.models.language_model import LanguageModel
from solera.models.memory import limited
from solera.models.small import is_small, suit


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Run the garbage collector less often, and skip objects that existed before.

    Every step creates and frees hundreds of small records. With Python's defaults the collector walks through all of
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
    """Set torch's threads, kernels and GPU memory limit for this model and run. Restore them afterwards."""
    threads_before, cudnn_before = torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()
    (mkldnn_before, *_) = torch.backends.mkldnn.set_flags(_enabled=torch.backends.mkldnn.enabled)
    if run.threads or is_small(model.module):
        torch.set_num_threads(run.threads or 1)
    suit(model.module)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew, 100 ms, for every shape; each batch has another
    try:
        with limited(model.device, run.gpu_memory):
            yield
    finally:
        torch.set_num_threads(threads_before)
        torch.backends.mkldnn.set_flags(_enabled=mkldnn_before)
        torch.backends.cuda.enable_cudnn_sdp(cudnn_before)
