"""Ranks that are not there: torch's fake process group, in which collectives do nothing.

One process then traces what one rank of a thousand runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from remat.graph_capture.distributed.collectives import is_collective_target
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.nodes import TORCHS_NAMESPACES
from remat.graph_capture.torch_private.core import (
    DispatchKey,
    OpOverload,
    fake_store,
    has_kernel,
    pytree,
)
from remat.graph_capture.tracing.op_watcher import OpWatcher

_BACKEND = "fake"
_WORLD = 4096
"""Ranks of the fake world. It has no threads and no memory of its own."""


class FakeGroups:
    """Groups of the fake world, made when first asked for."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Any] = {}

    def group(self, ranks: int, apart: int = 1) -> Any:
        """The group of rank 0 with so many ranks, of which neighbours lie so far apart."""
        key = ranks, apart
        if key not in self._known:
            self._known[key] = dist.new_group([apart * i for i in range(ranks)])
        return self._known[key]

    def has(self, named: tuple[Any, ...]) -> bool:
        """Whether groups, as a graph names them, were made here."""
        return {group.group_name for group in self._known.values()}.issuperset(named)


@contextlib.contextmanager
def fake_ranks(world_size: int = _WORLD) -> Generator[FakeGroups]:
    """In the block this process is rank 0 of so many."""
    if dist.is_initialized():
        raise CaptureError(
            "a cluster is planned over a fake process group, and this process has a real one: "
            "plan in a process of its own, or before init_process_group"
        )
    dist.init_process_group(_BACKEND, rank=0, world_size=world_size, store=fake_store())
    try:
        yield FakeGroups()
    finally:
        dist.destroy_process_group()


def is_fake(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == _BACKEND


_ALIASES = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
"""Under which a kernel for several devices is registered."""
_Result = TypeVar("_Result")


class NeedsOtherRanksError(RuntimeError):
    """An op was run alone that communicates with other ranks."""


class _LocalExecution(OpWatcher):
    """Fails where a collective would wait for other ranks, also inside of an op of somebody's."""

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_collective_target(str(func)):
            raise NeedsOtherRanksError(
                f"{func} waits for other ranks, and ops are timed on one alone"
            )
        key = _kernel_of(func, pytree.tree_leaves((args, kwargs)))
        if key is None:
            return func(*args, **kwargs)
        # The mode is off in here. On again, it sees what the kernel of somebody's op runs.
        with self:
            return func._op_dk(key, *args, **kwargs)


def _kernel_of(func: Any, read: list[Any]) -> DispatchKey | None:
    """Where the kernel of an op is that is not torch's; None of torch's, and of one without."""
    tensors = [leaf for leaf in read if isinstance(leaf, Tensor)]
    if not isinstance(func, OpOverload) or func.namespace in TORCHS_NAMESPACES or not tensors:
        return None
    own = "CUDA" if any(tensor.is_cuda for tensor in tensors) else "CPU"
    # `custom_op` has one for all devices under an alias. To call another key than that of the
    # registration ends the process.
    for key in (own, *_ALIASES):
        if has_kernel(func.name(), key):
            return getattr(DispatchKey, key)
    return None


def run_locally(run: Callable[[], _Result]) -> _Result:
    """What `run` returns on one rank; a collective raises, where it would wait for ever."""
    with _LocalExecution():
        return run()
