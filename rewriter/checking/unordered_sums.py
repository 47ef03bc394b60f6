"""Steps on a CPU that sum in no fixed order, so that eager itself does not repeat its bits.

Writing to indices with `accumulate`, which is also what backward of `x[indices]` does, adds from
all threads at once. In torch 2.11 to 2.14 that holds for float32 alone; sums by `index_add`,
`scatter_add` and embeddings have an order on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from remat.graph_capture.joint.nodes import plain_name

ACCUMULATE_AT = {"index_put": 3, "_unsafe_index_put": 3, "_index_put_impl": 3, "put": 3}
"""Ops that add so, each with the place of its argument `accumulate`."""


class InOneOrder(TorchDispatchMode):
    """Within the block such sums have one order, in which a rewritten step and eager are compared.

    Their bits then are the same or not. Without it, a plan that is wrong by a little could not be
    told from one that is right. These ops run as torch's deterministic setting has them. The
    setting itself is one that plans are made for: a rewritten module refuses to run in another.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the op."""
        if plain_name(func) not in ACCUMULATE_AT:
            return func(*args, **(kwargs or {}))
        torch.use_deterministic_algorithms(True)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.use_deterministic_algorithms(False)


def sums_in_no_order(module: nn.Module) -> bool:
    """Whether a rewritten part of `module` holds such an op, and threads for it."""
    kinds: list[Any] = [type(m) for m in module.modules()]  # of its own, which holds the plan
    steps = [kind._remat_compiled_step for kind in kinds if hasattr(kind, "_remat_compiled_step")]
    return any(add_in_no_order(graph) for one in steps for graph in (one.forward, one.backward))


def add_in_no_order(gm: fx.GraphModule) -> bool:
    """Whether a graph holds such an op, and there are threads for it."""
    if torch.get_num_threads() == 1 or torch.are_deterministic_algorithms_enabled():
        return False
    return any(_adds_at_once(node) for node in gm.graph.nodes)


def _adds_at_once(node: fx.Node) -> bool:
    at = ACCUMULATE_AT.get(plain_name(node.target))
    if at is None:
        return False
    value = node.meta.get("val")
    has_order = isinstance(value, Tensor) and value.dtype != torch.float32
    return not has_order and bool(_argument(node, at, "accumulate"))


def _argument(node: fx.Node, at: int, name: str) -> Any:
    return node.args[at] if len(node.args) > at else node.kwargs.get(name, False)
