"""What torch's compiler is told beside its defaults. Importing this brings the compiler along, a second of a start."""

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
    """A product that a graph asks for several times is computed once; torch itself sees to that in training only."""

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
"""Learner, reference and engine share what is compiled of a layer, with and without gradients, plans of three kinds and
shapes: with torch's own limit of 8, one of them could fall back to what is not compiled, without a word."""
OPTIONS: dict[str, Any] = {"joint_custom_pre_pass": ComputedOnce(), "deterministic": True}
"""Never the fastest of several kernels, which is now one and now another: they sum in orders of their own."""
COMPUTED_AGAIN = {
    f"ban_recompute_{kind}": False for kind in ("used_far_apart", "long_fusible_chains", "materialized_backward")
}


def fuse(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """torch's compiler. For the way back a layer keeps what products and attention gave; norms, activations and
    rotations, a third of what torch itself would keep, are computed again."""
    with partitioning.patch(COMPUTED_AGAIN):
        return compile_fx(graph, inputs, config_patches=OPTIONS)
