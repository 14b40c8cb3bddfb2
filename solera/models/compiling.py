"""Settings for torch's compiler. Importing this module loads the compiler, which takes a second."""

from typing import Any

import torch
import torch._dynamo
from torch._functorch import config as partitioning
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

_PURE = (
    torch.ops.aten.permute.default, torch.ops.aten.view.default, torch.ops.aten.mm.default, torch.ops.aten.mm.dtype,
    torch.ops.prims.convert_element_type.default,
)  # fmt: skip


class ComputedOnce(CustomGraphPass):
    """Compute a product once if a graph contains it several times. torch does this only in training."""

    def __call__(self, graph: Graph) -> None:
        seen: dict[Any, Node] = {}
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in _PURE:
                same = seen.setdefault((node.target, node.args, *node.kwargs.items()), node)
                if same is not node:
                    node.replace_all_uses_with(same)
                    graph.erase_node(node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
"""Learner, reference and engine share the compiled layers, with and without gradients, with three kinds of plans and
shapes. With torch's limit of 8, one of them could silently fall back to uncompiled code."""
OPTIONS: dict[str, Any] = {"joint_custom_pre_pass": ComputedOnce(), "deterministic": True}
"""Never pick the fastest of several kernels: the choice varies, and each kernel sums in a different order."""
COMPUTED_AGAIN = {
    f"ban_recompute_{kind}": False for kind in ("used_far_apart", "long_fusible_chains", "materialized_backward")
}


def fuse(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Compile with torch. For the backward pass, a layer keeps the results of products and attention. Norms,
    activations and rotations, a third of what torch would keep, are recomputed."""
    with partitioning.patch(COMPUTED_AGAIN):
        return compile_fx(graph, inputs, config_patches=OPTIONS)
