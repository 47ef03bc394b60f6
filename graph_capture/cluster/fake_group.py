"""Ranks that are not there: torch's fake process group, in which collectives do nothing.

One process then traces what one rank of a thousand runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch.distributed as dist

from remat.graph_capture.errors import CaptureError

WORLD = 4096
"""Ranks of the fake world. It has no threads and no memory of its own."""


class FakeGroups:
    """Groups of the fake world by their size, made when first asked for."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Any] = {}

    def group(self, kind: str, ranks: int) -> Any:
        """A group of its own for each kind, so that a trace can tell them apart by name."""
        if (kind, ranks) not in self._known:
            self._known[kind, ranks] = dist.new_group(list(range(ranks)))
        return self._known[kind, ranks]

    def names(self) -> dict[str, tuple[str, int]]:
        """Kind and ranks by the name that a trace has."""
        return {group.group_name: key for key, group in self._known.items()}


@contextlib.contextmanager
def fake_world() -> Generator[FakeGroups]:
    """In the block this process is rank 0 of `WORLD` ranks.

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
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    try:
        yield FakeGroups()
    finally:
        dist.destroy_process_group()
