"""Which planned steps a CUDA graph can repeat, and why not the others.

A graph repeats kernels. It does not repeat what the host did between them, and nothing may move.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx, nn

from remat.graph_capture.devices.known_devices import CUDA
from remat.graph_capture.distributed.collectives import collectives_in
from remat.graph_capture.distributed.dtensors import has_dtensors
from remat.graph_capture.errors import DeviceError, RewriteError
from remat.graph_capture.joint.nodes import drawn_on, is_custom, tensors_of
from remat.graph_capture.tracing.option_pairs import require_compatible
from remat.rewriter.compiled import CompiledStep
from remat.rewriter.graphs.rng import draw_noting

_CAPTURED_ON = [CUDA]  # of devices whose work can be captured
_OF_VALUES = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})


def require_graph_device(model: nn.Module) -> torch.device:
    """The one CUDA device that `model` is on; a `DeviceError` says to move it there."""
    found = {tensor.device: None for tensor in (*model.parameters(), *model.buffers())}
    if len(found) == 1 and next(iter(found)).type in _CAPTURED_ON and torch.cuda.is_available():
        return next(iter(found))
    places = ", ".join(map(str, found)) or "no device"
    raise DeviceError(
        "move the model to one CUDA device before it is planned, or leave out cuda_graphs=True: "
        f"CUDA graphs repeat the kernels of one device, and this {type(model).__name__} is on "
        f"{places}"
    )


def require_capturable(model: nn.Module, step: CompiledStep) -> torch.device:
    """The device of a step that can be captured; a `RewriteError` says what stands in the way."""
    require_compatible(
        cuda_graphs=True, compile=step.by_inductor, float_inputs=step.floats, host=step.tier
    )
    if step.gradient_gates is not None:
        raise RewriteError(
            "plan with remat.rematerialize(..., cuda_graphs=True): this plan releases gradients "
            "while backward runs, and a graph gives them out at its end"
        )
    if step.gradients.writes_batch:
        raise RewriteError(
            "let forward work on a copy, or leave out cuda_graphs=True: the step writes to its "
            "batch, and a graph has a batch of its own"
        )
    if step.backward.graph.find_nodes(op="call_function", target=draw_noting):
        raise RewriteError(
            "leave out cuda_graphs=True: an op of backward draws random numbers that it draws "
            "again, and only forward notes how far the stream has moved"
        )
    device = require_graph_device(model)
    if has_dtensors(model):
        raise RewriteError(
            "leave out cuda_graphs=True: parameters are DTensors, whose parts move between steps"
        )
    for graph in (step.forward, step.backward):
        require_capturable_ops(graph, device)
    return device


def require_capturable_ops(gm: fx.GraphModule, device: torch.device) -> None:
    """Refuse the first op that does more than run kernels on `device`."""
    if found := collectives_in(gm):
        raise _unrepeatable(found[0], "other ranks take part in it, and wait on their hosts")
    for node in gm.graph.nodes:
        if node.op == "call_function" and is_custom(node):
            raise _unrepeatable(node, "a custom op may do more on the host than start kernels")
        if not _OF_VALUES.isdisjoint(getattr(node.target, "tags", ())):
            raise _unrepeatable(node, "its result depends on values that the host must wait for")
        if _is_elsewhere(node, device):
            raise _unrepeatable(
                node, f"it works on {drawn_on(node)}, and a graph on {device} alone"
            )


def _is_elsewhere(node: fx.Node, device: torch.device) -> bool:
    # Saved states of the random stream are the host's, and made by functions of ours.
    is_op = node.op == "placeholder" or hasattr(node.target, "_schema")
    return is_op and any(t is not None and t.device != device for t in _tensors(node))


def _tensors(node: fx.Node) -> Iterable[torch.Tensor | None]:
    return () if str(node.name).startswith("rng_state_") else tensors_of(node)


def _unrepeatable(node: fx.Node, why: str) -> RewriteError:
    return RewriteError(
        f"leave out cuda_graphs=True, or leave {node.target} out of the step: a CUDA graph cannot "
        f"repeat it ({node.name}), as {why}"
    )
