"""What Inductor may put together in a planned step: kernels between the same two calls.

Left alone, Inductor fuses kernels that read the same buffers, however far apart they are. A kernel
that is computed again then runs beside its first run, and its result is held from then on: the
schedule is undone. For a CPU, Inductor also puts all kernels between two calls into one function,
which holds what any of them reads or writes until it returns. So planned steps forbid fusions
across a call, and each kernel gets a function of its own. The code of a ResNet-18's plan for 36 MB
took 61 MB without this, and takes 36 MB with it.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Generator
from typing import Any
from weakref import WeakKeyDictionary

from remat.graph_capture.torch_private.inductor import (
    BaseSchedulerNode,
    CppScheduling,
    InductorChoices,
    Scheduler,
    V,
    inductor_config,
)


class _BetweenCalls(InductorChoices):
    """Inductor's own choices, without fusions across a call."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: WeakKeyDictionary[Scheduler, list[int]] = WeakKeyDictionary()

    def can_fuse(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        scheduler: Scheduler,
        node1: BaseSchedulerNode,
        node2: BaseSchedulerNode,
        shared_data_score: int,
    ) -> bool:
        if self._call_between(scheduler, node1, node2):
            return False
        return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

    def _call_between(
        self, scheduler: Scheduler, node1: BaseSchedulerNode, node2: BaseSchedulerNode
    ) -> bool:
        if scheduler not in self._calls:
            self._calls[scheduler] = [n.min_order for n in scheduler.nodes if n.is_extern()]
        # `min_order` and `max_order` keep the order before anything was fused.
        calls = self._calls[scheduler]
        first = min(node1.min_order, node2.min_order)
        last = max(node1.max_order, node2.max_order)
        return bisect_left(calls, first) != bisect_left(calls, last)


@contextlib.contextmanager
def calls_in_order(is_asked: bool) -> Generator[None]:
    # Torch's own cut keeps Inductor's choices, which make it up to 4 % faster.
    if not is_asked:
        yield
        return
    backend: Any = CppScheduling
    # 0: each C++ kernel gets a function of its own.
    most, backend.MAX_FUSED_KERNEL_ARGS_NUM = backend.MAX_FUSED_KERNEL_ARGS_NUM, 0
    try:
        with (
            V.set_choices_handler(_BetweenCalls()),
            inductor_config.patch(allow_buffer_reuse=False),  # reuse raises the peak
        ):
            yield
    finally:
        backend.MAX_FUSED_KERNEL_ARGS_NUM = most
