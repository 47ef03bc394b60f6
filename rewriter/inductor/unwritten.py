"""What kernels allocate, without the text of their C++.

Writing kernels takes nearly half of the time of lowering a graph, and a replay does not read them.
Which buffers a kernel makes, takes over or never stores follows from the buffers that it reads and
writes, in the order of `CppKernelProxy.codegen_nodes`. Whether loops are fused at an outer level
follows from their tiling too. So only these two are carried out. For plans of seven models, all 44
graphs that were lowered had the same events with the text, in 260 s, and without it, in 152 s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

from torch._inductor import config
from torch._inductor.codegen.cpp import (
    CppKernel,
    CppKernelProxy,
    CppScheduling,
    KernelGroup,
    LoopNest,
    TilingSelect,
)
from torch._inductor.codegen.cpp_utils import LocalBufferContext
from torch._inductor.loop_body import MemoryUsageType
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V

_READS = (MemoryUsageType.LOAD, MemoryUsageType.LOAD_SEED, MemoryUsageType.BUCKETIZE)
_WRITES = (MemoryUsageType.STORE, MemoryUsageType.STORE_REDUCTION)


@contextlib.contextmanager
def kernels_unwritten() -> Generator[None]:
    """Let C++ kernels that Inductor generates have no body."""
    backend: Any = CppScheduling
    group: Any = KernelGroup
    proxy, finalize = backend.kernel_proxy_cls, group.finalize_kernel
    backend.kernel_proxy_cls, group.finalize_kernel = _Unwritten, _schedule
    try:
        yield
    finally:
        backend.kernel_proxy_cls, group.finalize_kernel = proxy, finalize


def _schedule(group: Any, kernel: Any, nodes: Iterable[SchedulerNode]) -> None:
    """`KernelGroup.finalize_kernel` without the loops."""
    group.scheduled_nodes += nodes


class _Unwritten(CppKernelProxy):
    """Several nodes as one kernel. Its loops are tiled only if somebody asks for them."""

    _nodes: list[SchedulerNode]
    _tiled: LoopNest | None = None

    @property
    def loop_nest(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The loops as Inductor tiles them."""
        if self._tiled is None:
            self._tiled = self._tile()
        return self._tiled

    @loop_nest.setter
    def loop_nest(self, value: Any) -> None:
        self._tiled = value

    def codegen_nodes(self, nodes: list[SchedulerNode]) -> None:
        """Note in the graph what the kernel does to its buffers."""
        self._nodes = nodes
        sizes = [node.group[1] for node in nodes]
        self.set_ranges(*max(sizes, key=lambda ranges: len(ranges[1])))
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
        with config.patch(inplace_buffers=False):
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
    """By name, the buffers outside a kernel that a buffer of its own stands for."""
    context: Any = V.local_buffer_context
    return context.global_to_local if isinstance(context, LocalBufferContext) else {}


def _use(kernel: Any, node: SchedulerNode, stored: set[str]) -> None:
    """Name the buffers of one node. What the same kernel stored before is not loaded."""
    usage = node._body.memory_usage
    local = _local()
    for entry in (entry for kind in _READS for entry in usage[kind]):
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
