"""Ranks that are not there: torch's fake process group, in which collectives do nothing.

One process then traces what one rank of a thousand runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch.distributed as dist

from remat.graph_capture.errors import CaptureError

BACKEND = "fake"
WORLD = 4096
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
        """Whether groups were made here, given as a graph names them."""
        return {group.group_name for group in self._known.values()}.issuperset(named)


@contextlib.contextmanager
def fake_ranks(world_size: int = WORLD) -> Generator[FakeGroups]:
    """In the block this process is rank 0 of so many.

    Raises
    ------
    CaptureError : this process has a process group already.
    """
    # Registers the backend that does nothing.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise CaptureError(
            "a cluster is planned over a fake process group, and this process has a real one: "
            "plan in a process of its own, or before init_process_group"
        )
    dist.init_process_group(BACKEND, rank=0, world_size=world_size, store=FakeStore())
    try:
        yield FakeGroups()
    finally:
        dist.destroy_process_group()


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether a group is torch's fake one, in which there are no other ranks."""
    return dist.get_backend(group) == BACKEND
