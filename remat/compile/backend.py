"""``torch.compile(model, backend="remat", options={"budget": ...})``.

An entry point registers it, so nothing need be imported. Dynamo traces and guards as ever, and
Inductor makes the code. In between, Inductor hands its joint graph to our partitioner, which cuts
it into forward and backward by a plan under the budget. So guards, graph breaks, views and mutated
buffers stay dynamo's and AOTAutograd's; with an export of our own the guards would be ours. Where
no gradients are asked for, Inductor runs as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._guards import CompileContext
from torch._inductor.compile_fx import compile_fx

from remat.compile.given_up import refuse_given_up_frames, refuse_lstm
from remat.compile.one_shape import device_of, has_symbols, of_one_shape, refuse_data_dependent
from remat.compile.options import read_options
from remat.compile.pieces import handing_out
from remat.compile.piecewise import PlannedPieces, planned_pieces
from remat.compile.place import Place
from remat.compile.shared_budget import forget_graphs, shared_budget, watched
from remat.compile.size_table import SizeTable
from remat.compile.start import Start
from remat.compile.whole_model import whole_model
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.over_ranks.refusals import refuse_compiled_writes
from remat.ranks.compiling import CompiledLater, compiled_alike
from remat.rewriter.guards.compiled_autograd import refuse_compiled_autograd
from remat.rewriter.inductor.partition import FusedStep, Pair, Partitioner, planned
from remat.rewriter.inductor.subgraphs import refuse_lost_gradients, refuse_regions


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
    CaptureError : a shape depends on data, compiled autograd is on, forward has a part of which
        torch's own gradients are wrong, a collective in place on what is differentiated, or DDP
        cuts a graph whose sizes the user has marked.
    AgreementError : another rank has failed to compile the same graph.

    A frame that dynamo gives up never comes here: `given_up` refuses it.
    """
    if has_symbols(gm) and handing_out() is None and _has_gradients(gm, example_inputs):
        place = _place_of_graph(gm, example_inputs, options, mode)
        return _of_many_sizes(gm, place)
    with compiled_alike(gm, example_inputs) as later:
        place = _place_of_graph(gm, example_inputs, options, mode)
        cut = handing_out()
        if cut is not None:
            pieces = planned_pieces(cut, place.asked, place.shared, place.frame)
            return _piece(gm, of_one_shape(gm, example_inputs), place, pieces, later)
        if has_symbols(gm):
            return _without_gradients(gm, example_inputs, later)
        return _planned(gm, example_inputs, place, later)


def _place_of_graph(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any] | None, mode: str | None
) -> Place:
    """Where the graph stands; raises what can be said against it before it is traced."""
    asked = read_options(options, mode=mode)
    device = device_of(inputs)
    if torch.is_grad_enabled():
        refuse_compiled_autograd()
        refuse_regions(gm.graph)
    if _has_gradients(gm, inputs):
        refuse_data_dependent(gm)
        refuse_compiled_writes(gm)
        refuse_lost_gradients(gm.graph)
        refuse_lstm(gm, device)
    place = Place(asked, shared_budget(options), whole_model(), _frame())
    place.shared.runs_on(device)
    return place


def _has_gradients(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether backward may come."""
    tensors = [value for value in [*inputs, *gm.parameters()] if isinstance(value, Tensor)]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _of_many_sizes(gm: fx.GraphModule, place: Place) -> SizeTable:
    """What plans for each size when it first comes."""

    def compile_one(one: fx.GraphModule, inputs: Sequence[Any], number: int, sizes: str) -> Any:
        at = dataclasses.replace(place, frame=(*place.frame, number), sizes=sizes)
        with compiled_alike(one, inputs) as later:
            return _planned(one, inputs, at, later)

    return SizeTable(gm, compile_one)


def _planned(gm: fx.GraphModule, inputs: Sequence[Any], place: Place, later: CompiledLater) -> Any:
    """The code for one shape."""
    start = Start(place, gm, inputs)
    partitioner = Partitioner(start.plan, _n_visible(gm), lambda: start.name)
    call = _code(gm, inputs, partitioner, later)
    if not partitioner.was_called:
        start.go_without_a_graph()
    if place.frame not in place.shared.noted:
        return call
    return watched(call, place.shared, place.frame)


def _piece(
    gm: fx.GraphModule, inputs: Sequence[Any], place: Place, pieces: PlannedPieces,
    later: CompiledLater,
) -> Any:  # fmt: skip
    """The code for one of the pieces into which DDP cuts a model."""
    call = _code(gm, inputs, Partitioner(pieces.plan, _n_visible(gm)), later)
    shared, frame = place.shared, place.frame
    if frame not in shared.noted:
        return call
    run = watched(call, shared, frame, is_first=pieces.is_first, is_last=pieces.is_last)
    pieces.at += 1
    return run


def _without_gradients(gm: fx.GraphModule, inputs: Sequence[Any], later: CompiledLater) -> Any:
    """Inductor's own code, for all sizes at once."""
    partitioner = Partitioner(_refuse_gradients, _n_visible(gm), lambda: "without gradients")
    return _code(gm, inputs, partitioner, later)


def _refuse_gradients(_: FusedStep) -> Pair:
    raise CaptureError(
        "a graph of symbolic sizes turns gradients on, and is called without: call it with "
        "gradients on, or compile with dynamic=False"
    )


def _code(
    gm: fx.GraphModule, inputs: Sequence[Any], partitioner: Partitioner, later: CompiledLater
) -> Any:
    with planned(partitioner) as patches:
        compiler = later.alike(partitioner.compile_inner)
        return compile_fx(gm, list(inputs), compiler, config_patches=patches)


def _n_visible(gm: fx.GraphModule) -> int:
    """How many results the user sees."""
    return len(pytree.tree_leaves(gm.graph.find_nodes(op="output")[0].args))


backend.reset = forget_graphs  # pyright: ignore[reportFunctionMemberAccess]
refuse_given_up_frames(backend)


def _frame() -> tuple[int, int]:
    """Dynamo's number of the frame that is compiled, and that of its compilation."""
    compiled = CompileContext.current_compile_id()
    if compiled is None:
        return 0, 0
    return compiled.frame_id or 0, compiled.frame_compile_id or 0
