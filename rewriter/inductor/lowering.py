"""What Inductor's generated code allocates and frees, read off before anything is compiled.

This file, `calls` and `unwritten` are the only ones that read Inductor's private code. It runs
`compile_fx_inner` on copies of the two graphs, up to and including `GraphLowering.codegen`. Then it
reads the lines of the wrapper that this leaves behind: allocations, frees, reuses, and calls of
kernels that are not generated. A line of an unknown kind is an error, not a guess. Callers then
warn, and estimate the peak from the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, fx
from torch._inductor import compile_fx, config, ir
from torch._inductor.codegen import wrapper as lines_of
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering

from remat.graph_capture.devices.device_table import allocated_on
from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.nodes import copy_of, tensors_of
from remat.rewriter.inductor.calls import as_laid_out
from remat.rewriter.inductor.unwritten import kernels_unwritten

EventKind = Literal["allocate", "free", "alias", "rename", "call"]

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


@dataclass(frozen=True)
class Event:
    """One thing that the generated code does to memory.

    Attributes
    ----------
    name : of the buffer that it makes or drops. of : the buffer whose storage it shares.
    sizes_bytes : of the storages made; a call that returns a tuple makes one for each element.
    element : which element of the tuple `of` is meant.
    node : the call as an fx node, its arguments as they are laid out. Its workspace can be
        measured from that.
    """

    kind: EventKind
    name: str
    of: str = ""
    sizes_bytes: tuple[int, ...] = ()
    element: int | None = None
    node: fx.Node | None = None


@dataclass(frozen=True)
class Lowered:
    """The events of one graph, its inputs, and for each output the buffer that holds it.

    `output_strides` are those that the generated code gives to its outputs.
    """

    events: tuple[Event, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    output_strides: tuple[tuple[int, ...] | None, ...]


def lower(
    gm: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool, visible: Sequence[int]
) -> Lowered:
    """Lower a copy of `gm` as Inductor will, and stop before its compiler runs.

    Parameters
    ----------
    inputs : fake tensors, one for each placeholder.
    visible : which outputs users see. Inductor keeps their strides.

    Raises
    ------
    ReplayError : the generated code has lines of an unknown kind.
    """
    graph = copy_of(gm)
    graph.graph.find_nodes(op="output")[0].meta["user_visible_output_idxs"] = list(visible)
    # Of code that Inductor has cached, there would be no lines to read.
    with _stopped_after_codegen() as found, config.patch(fx_graph_cache=False):
        try:
            compile_fx.compile_fx_inner(
                graph, list(inputs), is_backward=is_backward, static_input_idxs=()
            )
        except InductorError:
            if not found:
                raise
    if isinstance(found[0], ReplayError):
        raise found[0]
    return found[0]


class _Stopped(Exception):  # noqa: N818
    """Raised to leave Inductor where its compiler would start."""


@contextlib.contextmanager
def _stopped_after_codegen() -> Generator[list[Any]]:
    """In here, lowering a graph puts what its code does into the list, and stops."""
    found: list[Any] = []

    def stop(graph: GraphLowering) -> None:
        with kernels_unwritten():
            graph.codegen()
        try:
            found.append(_read(graph))
        except ReplayError as error:
            found.append(error)
        raise _Stopped

    kept = GraphLowering.compile_to_module
    GraphLowering.compile_to_module = stop  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield found
    finally:
        GraphLowering.compile_to_module = kept


def _read(graph: GraphLowering) -> Lowered:
    wrapper: Any = graph.wrapper_code
    kept = {name for name in graph.get_output_names() if name}
    events = [e for line in wrapper.lines for e in _events(graph, line, kept)]
    outputs = list(graph.graph_outputs or ())
    strides = [_stride(output) for output in outputs]
    names = [_buffer_of(output) for output in outputs]
    return Lowered(tuple(events), tuple(graph.graph_input_names), tuple(names), tuple(strides))


def _stride(output: Any) -> tuple[int, ...] | None:
    stride = output.maybe_get_stride()
    return None if stride is None else tuple(int(n) for n in stride)


def _buffer_of(output: Any) -> str | None:
    """The buffer or input that holds an output; None for constants."""
    if output.maybe_get_layout() is None:
        return None
    while not isinstance(output, ir.Buffer):
        output = output.data
    return output.get_name()


def _events(graph: GraphLowering, line: Any, kept: set[str]) -> Iterator[Event]:
    kind = type(line).__name__
    if kind == "FreeIfNotReusedLine":
        if not line.is_reused:
            yield Event("free", line.node.get_name())
    elif kind in _READERS:
        yield from _READERS[kind](graph, line, kept)
    elif kind not in _WITHOUT_MEMORY:
        raise ReplayError(f"Inductor's code has a {kind}, which the replay of peaks does not know")


def _allocate(graph: GraphLowering, line: Any, kept: set[str]) -> Iterator[Event]:
    yield Event("allocate", line.node.get_name(), sizes_bytes=(_size_bytes(graph, line.node),))


def _size_bytes(graph: GraphLowering, buffer: Any) -> int:
    elements = graph.sizevars.optimization_hint(graph.get_allocation_storage_size(buffer))
    size_bytes = int(elements) * buffer.get_dtype().itemsize
    return allocated_on(str(buffer.get_device()))(size_bytes)


def _allocated_bytes(tensor: Tensor) -> int:
    return allocated_on(str(tensor.device))(tensor.untyped_storage().nbytes())


def _free(graph: GraphLowering, line: Any, kept: set[str]) -> Iterator[Event]:
    yield Event("free", line.node.get_name())


def _reuse(graph: GraphLowering, line: Any, kept: set[str]) -> Iterator[Event]:
    old, new = line.node.get_name(), line.reused_as.get_name()
    is_dropped = line.delete_old and old not in kept
    yield Event("rename" if is_dropped else "alias", new, of=old)


def _reinterpret(graph: GraphLowering, line: Any, kept: set[str]) -> Iterator[Event]:
    yield Event("alias", line.reused_as.get_name(), of=line.node.get_name())


def _call_out(graph: GraphLowering, line: Any, kept: set[str]) -> Iterator[Event]:
    yield Event("call", line.node.get_name(), node=as_laid_out(line.node))


def _call(graph: GraphLowering, line: Any, kept: set[str]) -> Iterator[Event]:
    node = as_laid_out(line.node)
    name = line.node.get_name()
    if type(line.node.layout).__name__ == "MultiOutputLayout":
        if node is None:
            raise ReplayError(f"the results of {line.node.get_kernel_name()} are not known")
        sizes = [0 if t is None else _allocated_bytes(t) for t in tensors_of(node)]
        yield Event("call", name, sizes_bytes=tuple(sizes), node=node)
    elif type(line.node.layout).__name__ in ("NoneLayout", "MutationLayoutSHOULDREMOVE"):
        yield Event("call", name, node=node)
    else:
        yield Event("call", name, sizes_bytes=(_size_bytes(graph, line.node),), node=node)


def _element(graph: GraphLowering, line: Any, kept: set[str]) -> Iterator[Event]:
    index = line.indices[-1][1] if line.indices else 0
    yield Event("alias", line.result_name, of=line.arg_name, element=int(index))


_READERS: dict[str, Callable[[GraphLowering, Any, set[str]], Iterator[Event]]] = {
    "AllocateLine": _allocate,
    "FreeLine": _free,
    "ReuseLine": _reuse,
    "ReinterpretLine": _reinterpret,
    "ExternKernelOutLine": _call_out,
    "ExternKernelAllocLine": _call,
    "MultiOutputLine": _element,
}
assert set(_READERS) <= set(dir(lines_of)), "Inductor has renamed lines of its wrapper"
