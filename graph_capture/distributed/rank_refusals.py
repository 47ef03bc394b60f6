"""What a plan holds of a model on several ranks, and what it cannot: watched while it is traced."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.distributed.collectives import (
    NAMES,
    NAMESPACE,
    collectives_in,
    is_collective,
    members_of,
    op_name,
    run_functionally,
    skip_wait,
)
from remat.graph_capture.distributed.dtensors import has_dtensors, is_distributed
from remat.graph_capture.distributed.sharding import Sharding
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.provenance import line_of_user
from remat.graph_capture.torch_private.core import TraceObserver, pytree

_FUNCTIONAL = "torch.distributed._functional_collectives"


def modes_among_ranks(kind: str) -> tuple[AbstractContextManager[Any], ...]:
    """What watches a trace where there are other ranks; `kind` is the class of the model."""
    return (_AmongRanks(kind),) if dist.is_available() and dist.is_initialized() else ()


class _AmongRanks(TraceObserver):
    """While forward is traced: `dist.all_reduce` and its like become ops, or are refused."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "namespace", "") == NAMESPACE:
            # A trace would lose what is written to a tensor that autograd has saved.
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
            known = func._opname in NAMES and not needs_grad
            found = run_functionally(func, args) if known else None
            if found is None:
                raise CaptureError(_in_place_text(self.kind, func._opname))
            return found
        # On a CUDA device a DTensor draws by offsets that torch keeps outside of the graph.
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            refuse_draw(self.kind, str(func), pytree.tree_leaves((args, kwargs)))
        return func(*args, **kwargs)


def refuse_range_of_dtensors(model: nn.Module) -> None:
    if has_dtensors(model):  # the sizes of a part depend on those of the whole
        raise CaptureError(
            "leave out dynamic, plan at the largest size, and pad batches to it: "
            f"{type(model).__name__} has DTensors as parameters, whose plans are for one size"
        )


def refuse_buckets_of_dtensors(model: nn.Module, sharding: Sharding) -> None:
    if sharding.has_buckets and has_dtensors(model):
        raise CaptureError(
            "shard the blocks over that dimension of the mesh by fully_shard, with blocks= and "
            f"remat.Sharding('fsdp2', {sharding.world_size}): {type(model).__name__} has DTensors "
            "as parameters, which DistributedDataParallel replaces once the plan is made"
        )


def refuse_range_over_ranks(joint: fx.GraphModule) -> None:
    # Each rank picks a schedule by the size of its own batch, and others might pick another.
    if any(len(members_of(node)) > 1 for node in collectives_in(joint)):
        raise CaptureError(
            "plan for one size: the step has collectives, and ranks could run them in different "
            "orders over a range of sizes"
        )


def refuse_draw(kind: str, op: str, read: Iterable[Any]) -> None:
    if any(is_distributed(leaf) and leaf.device.type != CPU for leaf in read):
        raise CaptureError(
            "set the dropout to 0, or put it where the tensor is local (use_local_output=True, or "
            f".to_local()): forward of {kind} draws random numbers for a DTensor with "
            f"{op}{line_of_user()}.\n"
            "On CUDA torch counts these outside the graph, so they could not be drawn again"
        )


def refuse_compiled_writes(gm: fx.GraphModule) -> None:
    """Refuse, in dynamo's graph, a collective in place on what is differentiated."""
    # Dynamo has a functional one and a copy in its place, so it differentiates what eager does not.
    for node in gm.graph.find_nodes(op="call_method", target="copy_"):
        written, source = node.args[:2]
        made = skip_wait(source) if isinstance(source, fx.Node) else None
        if made is None or not is_collective(made) or written not in made.all_input_nodes:
            continue
        if written.meta["example_value"].requires_grad:
            raise CaptureError(_in_place_text("the compiled graph", op_name(made)))


def _in_place_text(kind: str, name: str) -> str:
    called = NAMES.get(name, name.strip("_"))
    return (
        f"use the functional form, such as x = {_FUNCTIONAL}.all_reduce(x, 'sum', group), which "
        f"is also differentiated: forward of {kind} calls "
        f"torch.distributed.{called}{line_of_user()}, which writes to its argument where autograd "
        "does not see it.\n"
        "Or sum a tensor that needs no gradient, such as x.detach().clone(), with dist.all_reduce"
    )


def _after(wrapped: str) -> str:
    return f"plan the model inside it (its .module), and wrap the result: {wrapped}"


_WAYS_OUT = {  # by the name of a wrapper's class: what to do, and why it is refused
    "DistributedDataParallel": (
        _after("DistributedDataParallel(remat.rematerialize(model, ...))"),
        "its gradients would be reduced in the first step alone",
    ),
    "FullyShardedDataParallel": (
        "plan the original model, and call fully_shard on the result (docs/distributed.md)",
        "its hooks gather and reduce outside a plan",
    ),
    "ShardedDataParallel": (
        _after("DistributedDataParallel(...)"),
        "its gradients would be reduced in the first step alone",
    ),
    "DataParallel": (
        _after("DistributedDataParallel(remat.rematerialize(model, ...))"),
        "it copies the model to other devices at each step",
    ),
    "DeepSpeedEngine": (
        _after("deepspeed.initialize(model=remat.rematerialize(model, ...))"),
        "its backward and step would bypass the plan",
    ),
    "OptimizedModule": (
        "use the original module, its ._orig_mod. For Inductor's code pass compile=True, or plan "
        'with torch.compile(model, backend="remat")',
        "torch.compile's code cannot be traced",
    ),
}


def refuse_wrappers(model: nn.Module) -> None:
    for path, module in model.named_modules():
        place = path or "the model"
        if hasattr(type(module), "_remat_original_module"):
            raise CaptureError(
                f"leave {place} as it is, or restore its original (its .original_module) and plan "
                "the whole: it already follows a plan"
            )
        for kind in type(module).__mro__:
            if kind.__name__ in _WAYS_OUT:  # by name: to import their classes takes long
                way_out, why = _WAYS_OUT[kind.__name__]
                by = "torch.compile" if kind.__name__ == "OptimizedModule" else kind.__name__
                found = f"{place} is wrapped by {by}"
                raise CaptureError(f"{found}: {way_out}. Planned as it is, {why}")
