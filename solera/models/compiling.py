"""Settings for torch's compiler. Importing this module loads the compiler, which takes a second."""

from typing import Any

import torch
import torch._dynamo
from torch._functorch import config as partitioning
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx

torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
"""Learner, reference and engine share the compiled layers, with and without gradients, with three kinds of plans and
shapes. With torch's limit of 8, one of them could silently fall back to uncompiled code."""
OPTIONS: dict[str, Any] = {"deterministic": True}
"""Never pick the fastest of several kernels: the choice varies, and each kernel sums in a different order."""
if hasattr(config.triton, "mix_order_reduction"):
    # It pays for large inputs only, so a batch of fewer tokens would be compiled again, for seconds.
    OPTIONS["triton.mix_order_reduction"] = False
COMPUTED_AGAIN = {
    f"ban_recompute_{kind}": False for kind in ("used_far_apart", "long_fusible_chains", "materialized_backward")
}


def fuse(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Compile with torch. For the backward pass, a layer keeps the results of products and attention. Norms,
    activations and rotations, a third of what torch would keep, are recomputed."""
    with partitioning.patch(COMPUTED_AGAIN):
        return compile_fx(graph, inputs, config_patches=OPTIONS)
