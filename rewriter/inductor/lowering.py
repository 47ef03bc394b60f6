"""What Inductor's generated code allocates and frees, read off before anything is compiled.

Only this file reads Inductor's private code: the lines of its wrapper, up to
`GraphLowering.codegen`. An unknown line is an error: callers warn, and estimate the peak.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from torch import fx

from remat.graph_capture.devices.known_devices import allocator_rounding
from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.nodes import copy_of, tensors_of
from remat.graph_capture.torch_private.core import FakeTensor, HigherOrderOperator, pytree
from remat.graph_capture.torch_private.inductor import (
    CppKernel,
    CppKernelProxy,
    CppScheduling,
    GraphLowering,
    InductorError,
    KernelGroup,
    LocalBufferContext,
    LoopNest,
    MemoryUsageType,
    SchedulerNode,
    TilingSelect,
    V,
    compile_fx_inner,
    inductor_config,
    inductor_graph,
    ir,
    wrapper_lines,
)
from remat.rewriter.inductor.fused_nodes import subgraphs


def _as_laid_out(kernel: Any) -> fx.Node | None:
    """The fx node behind a kernel, with the strides that its tensor arguments really have."""
    if (origin := _origin(kernel)) is None:
        return None
    leaves = pytree.tree_leaves((origin.args, origin.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    real = list(kernel.inputs)
    graph = fx.Graph()
    stand_in: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(tensors):
        if node not in stand_in:
            stand_in[node] = graph.placeholder(f"arg{len(stand_in)}_1")
            # With another number of inputs it is not known which belongs to which.
            layout = real[i].maybe_get_layout() if len(real) == len(tensors) else None
            stand_in[node].meta["val"] = _laid_out(node.meta.get("val"), layout)
    given = tuple(origin.args), dict(origin.kwargs)
    args, kwargs = pytree.tree_map_only(fx.Node, stand_in.__getitem__, given)
    made = graph.create_node("call_function", origin.target, args, kwargs)
    made.meta["val"] = origin.meta.get("val")
    return made


def _origin(kernel: Any) -> fx.Node | None:
    own = _inside(kernel.get_origin_node(), kernel.op_overload)
    if own is not None and own.op == "call_function" and own.target == kernel.op_overload:
        return own
    same = [node for node in kernel.origins if node.target == kernel.op_overload]
    if own is None and len(same) != 1:
        return None
    return own if own is not None and own.op == "call_function" else same[0]


def _inside(node: fx.Node | None, target: Any) -> fx.Node | None:
    """The call of `target` in a graph that the node runs; other nodes as they are."""
    if node is None or not isinstance(node.target, HigherOrderOperator):
        return node
    # Inductor puts ops whose order counts into a graph of their own.
    called = [call for graph in subgraphs(node) for call in graph.nodes if call.target == target]
    return called[0] if len(called) == 1 else None


def _laid_out(like: Any, layout: Any) -> Any:
    if not isinstance(like, FakeTensor) or layout is None:
        return like
    size, stride = [int(n) for n in layout.size], [int(n) for n in layout.stride]
    if size != list(like.shape) or stride == list(like.stride()):
        return like
    with like.fake_mode:
        return torch.empty_strided(size, stride, dtype=like.dtype, device=like.device)


# Writing kernels takes nearly half of the time of lowering, and a replay does not read them. What
# buffers a kernel makes follows from those that it reads and writes, in the order of
# `CppKernelProxy.codegen_nodes`, and from its tiling, so only these are carried out. All 44 graphs
# of seven models had the same events without the text, in 152 s in place of 260.

_READS = (MemoryUsageType.LOAD, MemoryUsageType.LOAD_SEED, MemoryUsageType.BUCKETIZE)
_WRITES = (MemoryUsageType.STORE, MemoryUsageType.STORE_REDUCTION)


@contextlib.contextmanager
def skip_kernel_codegen() -> Generator[None]:
    with (
        mock.patch.object(CppScheduling, "kernel_proxy_cls", _SkippedKernel),
        mock.patch.object(KernelGroup, "finalize_kernel", _schedule),
    ):
        yield


def _schedule(group: Any, kernel: Any, nodes: Iterable[SchedulerNode]) -> None:
    group.scheduled_nodes += nodes  # `KernelGroup.finalize_kernel` without the loops


class _SkippedKernel(CppKernelProxy):
    """Several nodes as one kernel. Its loops are tiled only if somebody asks for them."""

    _nodes: list[SchedulerNode]
    _tiled: LoopNest | None = None

    @property
    def loop_nest(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._tiled is None:
            self._tiled = self._tile()
        return self._tiled

    @loop_nest.setter
    def loop_nest(self, value: Any) -> None:
        self._tiled = value

    def codegen_nodes(self, nodes: list[SchedulerNode]) -> None:
        self._nodes = nodes
        self.set_ranges(*max([node.group[1] for node in nodes], key=lambda ranges: len(ranges[1])))
        kernel = CppKernel(self.kernel_group.args, self.num_threads)
        stored: set[str] = set()
        with kernel:
            for node in nodes:
                node.decide_inplace_update()
                node.mark_run()
                _use(kernel, node, stored)
        V.graph.removed_buffers |= kernel.removed_buffers
        V.graph.inplaced_to_remove |= kernel.inplaced_to_remove

    def _tile(self) -> LoopNest:
        self.legalize_lowp_fp_dtype(self._nodes)
        self.data_type_propagation(self._nodes)
        nest = LoopNest.build(self)
        if not self.picked_vec_isa or not self.itervars:
            return nest
        bodies = [_localized(partial(_body, node)) for node in self._nodes]
        sizes = [node.group[1] for node in self._nodes]
        with inductor_config.patch(inplace_buffers=False):
            # torch 2.11 gives these two alone, later releases more.
            factors, indices, *_ = TilingSelect().select_tiling(bodies, sizes)
        for index in indices:
            nest.tile(index, factor=factors[0])
        return nest


def _body(node: SchedulerNode, *index_vars: Any) -> Any:
    return node._body(*index_vars)


def _localized(body: Callable[..., Any]) -> Any:
    """`body` on the kernel's own buffers, which stand for buffers outside."""
    if not _local():
        return body
    wrapped: Any = V.local_buffer_context.localize_function(body)
    wrapped.original_fn = body
    return wrapped


def _local() -> dict[str, Any]:
    context: Any = V.local_buffer_context
    return context.global_to_local if isinstance(context, LocalBufferContext) else {}


def _use(kernel: Any, node: SchedulerNode, stored: set[str]) -> None:
    usage = node._body.memory_usage
    local = _local()
    for entry in (entry for kind in _READS for entry in usage[kind]):
        # What the kernel stored before is not loaded.
        if entry.buffer_name not in stored and entry.buffer_name not in local:
            kernel.args.input(entry.buffer_name)
    for entry in (entry for kind in _WRITES for entry in usage[kind]):
        name = str(entry.buffer_name)
        if name in local:
            continue
        kernel.store_buffer_names.add(name)
        if entry.mode != "atomic_add":
            stored.update((name, *node.get_output(name).get_mutations()))
        if name not in V.graph.removed_buffers:
            kernel.args.output(name)


_EventKind = Literal["allocate", "free", "alias", "rename", "call"]

_WITHOUT_MEMORY = frozenset(
    {
        "AssertDivByZeroLine", "AssertSizeStrideLine", "CommentLine", "DynamicScalarLine",
        "EnterDeviceContextManagerLine", "EnterDeviceContextManagerWithStreamInfoLine",
        "ExitDeviceContextManagerLine", "ExitDeviceContextManagerWithStreamInfoLine",
        "IndexPutFallbackLine", "KernelCallLine", "KernelDefinitionLine", "LineContext",
        "GroupedAssertSizeStrideLine", "NullLine", "ScatterFallbackLine", "UnbackedSymbolDefsLine",
        "str",
    }
)  # fmt: skip


class ReplayError(RewriteError):
    """Inductor's code has something that the replay does not know."""


class Event(NamedTuple):
    kind: _EventKind
    name: str  # made or dropped
    of: str = ""  # whose storage it may share
    sizes_bytes: tuple[int, ...] = ()  # of each element of a tuple
    element: int | None = None  # which of `of` is meant
    node: fx.Node | None = None  # the call, its arguments as laid out


class Lowered(NamedTuple):
    """Events of one graph, its inputs, and for each output the buffer that holds it."""

    events: tuple[Event, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    output_strides: tuple[tuple[int, ...] | None, ...]


def lower(
    gm: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool, visible: Sequence[int],
    donated: Sequence[int] = (),
) -> Lowered:  # fmt: skip
    """Lower a copy of `gm` on fake `inputs`, and stop before a compiler runs; or `ReplayError`.

    Backward may write to the inputs `donated`.
    """
    graph = copy_of(gm)
    graph.graph.find_nodes(op="output")[0].meta["user_visible_output_idxs"] = list(visible)
    # Of code that Inductor has cached, there would be no lines to read.
    uncached = inductor_config.patch(fx_graph_cache=False)
    leave = mock.patch.object(inductor_graph, "get_donated_idxs", return_value=list(donated))
    with _stopped_after_codegen() as found, uncached, leave:
        try:
            compile_fx_inner(graph, list(inputs), is_backward=is_backward, static_input_idxs=())
        except InductorError:
            if not found:  # a failure of Inductor's own, not our stop
                raise
    if isinstance(found[0], ReplayError):
        raise found[0]
    return found[0]


class _Stopped(Exception):  # noqa: N818
    """Raised to leave Inductor where its compiler would start."""


@contextlib.contextmanager
def _stopped_after_codegen() -> Generator[list[Any]]:
    found: list[Any] = []

    def stop(graph: GraphLowering) -> None:
        with skip_kernel_codegen():
            graph.codegen()
        try:
            found.append(_read(graph))
        except ReplayError as error:  # Inductor would wrap it into an error of its own
            found.append(error)
        raise _Stopped

    with mock.patch.object(GraphLowering, "compile_to_module", stop):
        yield found


def _read(graph: GraphLowering) -> Lowered:
    wrapper: Any = graph.wrapper_code
    kept = {name for name in graph.get_output_names() if name}
    events = [e for line in wrapper.lines if (e := _event(graph, line, kept))]
    outputs: list[Any] = list(graph.graph_outputs or ())
    known = [output.maybe_get_stride() for output in outputs]
    strides = tuple(None if stride is None else tuple(map(int, stride)) for stride in known)
    names = tuple(map(_buffer_of, outputs))
    return Lowered(tuple(events), tuple(graph.graph_input_names), names, strides)


def _buffer_of(output: Any) -> str | None:
    if output.maybe_get_layout() is None:
        return None
    while not isinstance(output, ir.Buffer):
        output = output.data
    return output.get_name()


_WITH_MEMORY = (
    "AllocateLine", "FreeLine", "FreeIfNotReusedLine", "ReuseLine", "ReinterpretLine",
    "ExternKernelOutLine", "ExternKernelAllocLine", "MultiOutputLine",
)  # fmt: skip
assert set(_WITH_MEMORY) <= set(dir(wrapper_lines)), "Inductor has renamed lines in its wrapper"


def _event(graph: GraphLowering, line: Any, kept: set[str]) -> Event | None:
    kind = type(line).__name__
    if kind == "MultiOutputLine":
        index = line.indices[-1][1] if line.indices else 0
        return Event("alias", line.result_name, of=line.arg_name, element=int(index))
    if kind not in _WITH_MEMORY:
        if kind in _WITHOUT_MEMORY:
            return None
        # An error, not a guess: callers then warn, and estimate the peak from the graph.
        raise ReplayError(f"Inductor's code has a {kind}, which the replay of peaks does not know")
    name: str = line.node.get_name()
    if kind == "AllocateLine":
        return Event("allocate", name, sizes_bytes=(_size_bytes(graph, line.node),))
    if kind == "ReuseLine":
        is_dropped = line.delete_old and name not in kept  # what the graph returns is held
        return Event("rename" if is_dropped else "alias", line.reused_as.get_name(), of=name)
    if kind == "ReinterpretLine":
        return Event("alias", line.reused_as.get_name(), of=name)
    if kind.startswith("Extern"):
        node = _as_laid_out(line.node)
        makes = kind == "ExternKernelAllocLine"
        sizes = _sizes_made(graph, line.node, node) if makes else ()
        return Event("call", name, sizes_bytes=sizes, node=node)
    # What is reused lives on under another name.
    return None if kind == "FreeIfNotReusedLine" and line.is_reused else Event("free", name)


def _size_bytes(graph: GraphLowering, buffer: Any) -> int:
    elements = graph.sizevars.optimization_hint(graph.get_allocation_storage_size(buffer))
    size_bytes = int(elements) * buffer.get_dtype().itemsize
    return allocator_rounding(str(buffer.get_device()))(size_bytes)


def _sizes_made(graph: GraphLowering, kernel: Any, node: fx.Node | None) -> tuple[int, ...]:
    layout = type(kernel.layout).__name__
    if layout in ("NoneLayout", "MutationLayoutSHOULDREMOVE"):  # writes to what is there
        return ()
    if layout != "MultiOutputLayout":
        return (_size_bytes(graph, kernel),)
    if node is None:
        raise ReplayError(f"the results of {kernel.get_kernel_name()} are not known")
    return tuple(
        0 if t is None else allocator_rounding(str(t.device))(t.untyped_storage().nbytes())
        for t in tensors_of(node)
    )
