"""``torch.compile(model, backend="remat", options={"budget": ...})``.

Our partitioner cuts Inductor's joint graph by a plan; with an export, guards would be ours.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from remat.compile.given_up import refuse_given_up_frames, refuse_lstm
from remat.compile.graph_context import GraphContext, read_options
from remat.compile.planned_subgraphs import PlannedSubgraphs, planned_subgraphs
from remat.compile.shared_budget import forget_graphs, shared_budget, watched, whole_model
from remat.compile.specialize import (
    device_of_inputs,
    has_symbols,
    numbered,
    refuse_data_dependent,
    specialized,
    symbols_of,
)
from remat.compile.start import Start
from remat.compile.subgraphs import submod_compiler
from remat.graph_capture.distributed.rank_refusals import refuse_compiled_writes
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.torch_private.core import (
    CompileContext,
    FakeTensor,
    TracingContext,
    compile_context,
    disable_current_modes,
    pytree,
    tracing,
)
from remat.graph_capture.torch_private.inductor import compile_fx
from remat.ranks.one_plan import CompiledLater, compiled_alike
from remat.rewriter.guards.backward import refuse_compiled_autograd
from remat.rewriter.inductor.fused_nodes import refuse_lost_gradients, refuse_regions
from remat.rewriter.inductor.partition import FusedStep, Pair, Partitioner, planned

# Dynamo compiles a graph of symbolic sizes once. Each size is planned as if it were the only one.

_MOST_SIZES = 16  # sizes whose code is kept; of those beyond, what was not used for longest goes
_WAY_OUT = (
    'remat.rematerialize(model, budget=..., dynamic="auto") makes one plan for a range of sizes, '
    "without Inductor's code"
)
_Compiled = Callable[..., Any]
_CompileOne = Callable[[fx.GraphModule, Sequence[Any], int, str], _Compiled]
"""Compiles a graph of one shape on fake inputs; takes the number and the text of its sizes too."""


class SizeTable:
    """Runs a graph of symbolic sizes; plans for each size when it first comes."""

    def __init__(
        self, gm: fx.GraphModule, compile_one: _CompileOne, most: int = _MOST_SIZES
    ) -> None:
        self._gm, self._compile_one, self._most = gm, compile_one, most
        self._symbols = symbols_of(gm)
        n_inputs = len(gm.graph.find_nodes(op="placeholder"))
        self._others = [i for i in range(n_inputs) if i not in self._symbols]
        self._compile_id = CompileContext.current_compile_id()
        self._calls: OrderedDict[tuple[float, ...], _Compiled] = OrderedDict()
        self._numbers: dict[tuple[float, ...], int] = {}
        self._has_told_of_dropping = False

    def __call__(self, *args: Any) -> Any:
        given = [args[i] for i in self._symbols]  # Dynamo passes a float as a tensor
        sizes = tuple(one.item() if isinstance(one, Tensor) else one for one in given)
        if (call := self._calls.get(sizes)) is None:
            call = self._calls[sizes] = self._planned(sizes, args)
            self._keep_few()
        self._calls.move_to_end(sizes)
        return call(*[args[i] for i in self._others])  # one size's code has numbers for symbols

    def _planned(self, sizes: tuple[float, ...], args: Sequence[Any]) -> _Compiled:
        """The code for sizes that come for the first time, or that were dropped."""
        # A size that was dropped keeps its number, and with it its frame in the shared budget.
        number = self._numbers.setdefault(sizes, len(self._numbers))
        if number == 1:
            self._warn_of_planning(sizes)
        numbers = dict(zip(self._symbols, sizes, strict=True))
        devices = {t.device.index for t in args if isinstance(t, Tensor) and t.is_cuda}
        # As dynamo does around compilations: restore the random stream, close what traces.
        with disable_current_modes(), torch.random.fork_rng(sorted(devices)):
            gm, inputs = numbered(self._gm, numbers, args)
            mode: Any = next(t.fake_mode for t in inputs if isinstance(t, FakeTensor))
            context = CompileContext(self._compile_id)
            text = ", ".join(f"{self._symbols[i]} = {size}" for i, size in numbers.items())
            with tracing(TracingContext(mode)), compile_context(context):
                return self._compile_one(gm, inputs, number, text)

    def _warn_of_planning(self, sizes: tuple[float, ...]) -> None:
        first = next(iter(self._numbers))
        named = zip(self._symbols.values(), first, sizes, strict=True)
        changed = [f"{name} was {was} and is {size}" for name, was, size in named if was != size]
        warnings.warn(
            f"{_WAY_OUT}.\n"
            f"{', '.join(changed)}: under torch.compile each size is planned when it first comes, "
            f"and the code for {self._most} is kept",
            stacklevel=4,
        )

    def _keep_few(self) -> None:
        if len(self._calls) <= self._most:
            return
        self._calls.popitem(last=False)
        if not self._has_told_of_dropping:
            self._has_told_of_dropping = True
            warnings.warn(
                f"Pad batches to fewer sizes. {_WAY_OUT}.\n"
                f"There were {len(self._numbers)} sizes, and the code for {self._most} is kept, "
                "so a size that returns may be planned again",
                stacklevel=4,
            )


def backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:  # fmt: skip
    """Compile one graph of dynamo's.

    Raises
    ------
    BudgetError : no budget, one that cannot be read, or, when the graph first runs, one that no
        plan fits. SolverError : an unknown option or solver.
    DeviceError : the model is on several devices, or neither on a CPU nor on a CUDA device.
    CaptureError : a shape depends on data, compiled autograd is on, forward has a part of which
        torch's own gradients are wrong, a collective in place on what is differentiated, or DDP
        cuts a graph whose sizes the user has marked.
    AgreementError : another rank has failed to compile the same graph.
    """
    # A frame that dynamo gives up never comes here: `given_up` refuses it.
    if has_symbols(gm) and submod_compiler() is None and _has_gradients(gm, example_inputs):
        context = _context_of_graph(gm, example_inputs, options, mode)
        return _of_many_sizes(gm, context)  # nothing is compiled before a size comes: no ranks meet
    with compiled_alike(gm, example_inputs) as later:
        context = _context_of_graph(gm, example_inputs, options, mode)
        if (cut := submod_compiler()) is not None:
            subgraphs = planned_subgraphs(cut, context)
            return _subgraph(gm, specialized(gm, example_inputs), context, subgraphs, later)
        if has_symbols(gm):
            # Inductor's own code for all sizes; called only if gradients are asked for after all.
            refusing = Partitioner(_refuse_gradients, _n_visible(gm), lambda: "without gradients")
            return _code(gm, example_inputs, refusing, later)
        return _planned(gm, example_inputs, context, later)


def _context_of_graph(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any] | None, mode: str | None
) -> GraphContext:
    asked = read_options(options, mode=mode)
    device = device_of_inputs(inputs)
    if torch.is_grad_enabled():
        refuse_compiled_autograd()
        refuse_regions(gm.graph)
    if _has_gradients(gm, inputs):
        refuse_data_dependent(gm)
        refuse_compiled_writes(gm)
        refuse_lost_gradients(gm.graph)
        refuse_lstm(gm, device)
    compiled: Any = CompileContext.current_compile_id()  # None if called without dynamo
    frame = (compiled.frame_id or 0, compiled.frame_compile_id or 0) if compiled else (0, 0)
    context = GraphContext(asked, shared_budget(options), whole_model(), frame)
    context.shared.runs_on(device)
    return context


def _has_gradients(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    tensors = [value for value in [*inputs, *gm.parameters()] if isinstance(value, Tensor)]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _of_many_sizes(gm: fx.GraphModule, context: GraphContext) -> SizeTable:
    def compile_one(one: fx.GraphModule, inputs: Sequence[Any], number: int, sizes: str) -> Any:
        # Each size is a graph of its own in the shared budget.
        at = dataclasses.replace(context, frame=(*context.frame, number), sizes=sizes)
        with compiled_alike(one, inputs) as later:
            return _planned(one, inputs, at, later)

    return SizeTable(gm, compile_one)


def _planned(
    gm: fx.GraphModule, inputs: Sequence[Any], context: GraphContext, later: CompiledLater
) -> Any:
    start = Start(context, gm, inputs)
    partitioner = Partitioner(start.plan, _n_visible(gm), lambda: start.name)
    call = _code(gm, inputs, partitioner, later)
    if not partitioner.was_called:
        start.go_without_a_graph()  # torch has the code cached, or there are no gradients
    if context.frame not in context.shared.noted:  # without gradients it leaves nothing open
        return call
    return watched(call, context.shared, context.frame)


def _subgraph(
    gm: fx.GraphModule, inputs: Sequence[Any], context: GraphContext, subgraphs: PlannedSubgraphs,
    later: CompiledLater,
) -> Any:  # fmt: skip
    call = _code(gm, inputs, Partitioner(subgraphs.plan, _n_visible(gm)), later)
    shared, frame = context.shared, context.frame
    if frame not in shared.noted:
        return call
    run = watched(call, shared, frame, is_first=subgraphs.is_first, is_last=subgraphs.is_last)
    subgraphs.at += 1  # after `watched`, which asks whether this one is the first or the last
    return run


def _refuse_gradients(_: FusedStep) -> Pair:
    raise CaptureError(
        "call it with gradients on, or compile with dynamic=False: a graph of symbolic sizes "
        "turns gradients on, and is called without them"
    )


def _code(
    gm: fx.GraphModule, inputs: Sequence[Any], partitioner: Partitioner, later: CompiledLater
) -> Any:
    with planned(partitioner) as patches:
        compiler = later.alike(partitioner.compile_inner)
        return compile_fx(gm, list(inputs), compiler, config_patches=patches)


def _n_visible(gm: fx.GraphModule) -> int:
    return len(pytree.tree_leaves(gm.graph.find_nodes(op="output")[0].args))


backend.reset = forget_graphs  # pyright: ignore[reportFunctionMemberAccess]
refuse_given_up_frames(backend)
