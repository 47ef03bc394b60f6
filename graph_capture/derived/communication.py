"""Ops that stand for what wrappers of data parallelism do, and the buffers that they make.

When a wrapper communicates is fixed, so it is part of the graph, not of the schedule. Each is an
op, pinned where it stands. Its buffer is a value, read by the op that lets go of it. As workspaces
of the ops beside them, buffers were wrong wherever an op of forward runs again in backward.
Solvers see these as any op; the knapsack over blocks is told what they hold live.
"""

from __future__ import annotations

import msgspec

from remat.graph_capture.graph import Op, Phase, Value

GATHER, UNSHARD, RESHARD = "remat.all_gather", "remat.unshard", "remat.reshard"
COPY_IN, REDUCE = "remat.copy_in", "remat.reduce_scatter"
BEFORE_BLOCK, BEHIND_BLOCK = (GATHER, UNSHARD), (RESHARD, COPY_IN, REDUCE)
"""What runs right before a block's forward or backward, and right after."""
COMMUNICATION = (*BEFORE_BLOCK, *BEHIND_BLOCK)

GLOO_COPIES = 1
"""Copies of a whole buffer that gloo makes while it gathers or reduces. CPUs use gloo."""


def copies_on(device: str) -> int:
    """Copies of a buffer that a collective makes on a device."""
    return GLOO_COPIES if device == "cpu" else 0


def communication_op(
    target: str,
    phase: Phase,
    module: str,
    inputs: tuple[str, ...],
    made: tuple[Value, ...] = (),
    workspace_bytes: int = 0,
    place: str | None = None,
) -> tuple[Op, tuple[Value, ...]]:
    """An op of its own name, and the values that it makes.

    Parameters
    ----------
    module : where it runs. place : what it is for, which its name tells; None for the module.
    """
    name = f"{target.removeprefix('remat.')}_{phase}_{module if place is None else place}"
    values = tuple(msgspec.structs.replace(value, producer=name) for value in made)
    op = Op(
        name, target, phase, inputs, tuple(value.name for value in values),
        workspace_bytes=workspace_bytes, module=module, price="estimated",
        pinned="all ranks take part in it",
    )  # fmt: skip
    return op, values
