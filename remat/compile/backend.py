"""``torch.compile(model, backend="remat", options={"budget": ...})``.

An entry point registers it, so nothing need be imported. Dynamo traces and guards as ever, and
Inductor makes the code. In between, Inductor hands its joint graph to our partitioner, which cuts
it into forward and backward by a plan under the budget. So guards, graph breaks, views and mutated
buffers stay dynamo's and AOTAutograd's; with an export of our own the guards would be ours. Where
no gradients are asked for, Inductor runs as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._guards import CompileContext
from torch._inductor.compile_fx import compile_fx

from remat.compile.on_device import device_of
from remat.compile.one_shape import of_one_shape
from remat.compile.options import read_options
from remat.compile.pieces import handing_out
from remat.compile.piecewise import PlannedPieces, planned_pieces
from remat.compile.place import Place
from remat.compile.shared_budget import forget_graphs, shared_budget, watched
from remat.compile.start import Start
from remat.compile.whole_model import whole_model
from remat.ranks.compiling import CompiledLater, compiled_alike
from remat.rewriter.guards.compiled_autograd import refuse_compiled_autograd
from remat.rewriter.inductor.partition import Partitioner, planned
from remat.rewriter.inductor.subgraphs import refuse_regions


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """Compile one graph of dynamo's.

    Raises
    ------
    BudgetError : no budget, one that cannot be read, or, when the graph is first run, one
        that no plan fits.
    SolverError : an unknown option or solver.
    DeviceError : the model is on several devices, or neither on a CPU nor on a CUDA device.
    CaptureError : symbolic shapes were asked for, a shape depends on data, compiled autograd is on,
        or forward has a part of which torch's own gradients are wrong.
    AgreementError : another rank has failed to compile the same graph.
    """
    with compiled_alike(gm, example_inputs) as later:
        return _compiled(gm, example_inputs, options, mode, later)


def _compiled(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any] | None,
    mode: str | None,
    later: CompiledLater,
) -> Any:
    asked = read_options(options, mode=mode)
    device = device_of(example_inputs)
    if torch.is_grad_enabled():
        refuse_compiled_autograd()
        refuse_regions(gm.graph)
    place = Place(asked, shared_budget(options), whole_model(), _frame())
    place.shared.runs_on(device)
    cut = handing_out()
    pieces = None if cut is None else planned_pieces(cut, asked, place.shared, place.frame)
    inputs = of_one_shape(gm, example_inputs)
    outputs = gm.graph.find_nodes(op="output")[0].args
    n_visible = len(pytree.tree_leaves(outputs))
    if pieces is None:
        start = Start(place, gm, inputs)
        partitioner = Partitioner(start.plan, n_visible, lambda: start.name)
    else:
        start, partitioner = None, Partitioner(pieces.plan, n_visible)
    with planned(partitioner) as patches:
        compiler = later.alike(partitioner.compile_inner)
        call: Any = compile_fx(gm, inputs, compiler, config_patches=patches)
    if start and not partitioner.was_called:
        start.go_without_a_graph()
    return _watched(call, place, pieces)


def _watched(call: Any, place: Place, pieces: PlannedPieces | None) -> Any:
    """`call`, told of to the graphs that share its budget; as it is without gradients."""
    shared, frame = place.shared, place.frame
    if frame not in shared.noted:
        return call
    if pieces is None:
        return watched(call, shared, frame)
    run = watched(call, shared, frame, is_first=pieces.is_first, is_last=pieces.is_last)
    pieces.at += 1
    return run


backend.reset = forget_graphs  # pyright: ignore[reportFunctionMemberAccess]


def _frame() -> tuple[int, int]:
    """Dynamo's number of the frame that is compiled, and that of its compilation."""
    compiled = CompileContext.current_compile_id()
    if compiled is None:
        return 0, 0
    return compiled.frame_id or 0, compiled.frame_compile_id or 0
