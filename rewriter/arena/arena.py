"""The arena of a rewritten module: it serves each request of a step from its planned place."""

from __future__ import annotations

import warnings
import weakref
from types import TracebackType
from typing import Any, Self

import numpy as np

from remat.rewriter.arena.library import Counts, arena_library
from remat.rewriter.arena.recording import Requests
from remat.rewriter.arena.step_allocator import PassKind, StepAllocator
from remat.rewriter.graphs.codegen import Boxed
from remat.schedules.layout import Layout, check_layout

_PATIENCE = 64
"""Graphs that may run until what the user has kept no longer is in the way."""


class Arena:
    """One range of memory, in which each request of a training step has a planned place.

    It serves the training steps of one rewritten module, and of its copies, until it is closed. A
    request that is not as planned, or whose place is still taken, is served by torch's allocator:
    a plan that does not hold costs memory and never bits. Such misses are warned about once.
    Blocks that outlive the step, as gradients do, stay valid for as long as anything holds them,
    also once the arena is closed; its memory goes with the last one.

    Gradients that are kept until the next step needs their places, as where micro-batches are
    added up, are in the way until they are dropped. From then on torch's allocator serves them.

    Attributes
    ----------
    layout : where each request lies.
    """

    def __init__(self, memory: StepAllocator, requests: Requests, layout: Layout) -> None:
        check_layout(requests.buffers, layout)
        self.layout = layout
        self._memory, self._library = memory, arena_library()
        self._parts = {
            "forward": (0, requests.n_forward),
            "backward": (requests.n_forward, len(requests)),
        }
        # -1 leaves a request to torch's allocator.
        offsets = np.full(len(requests), -1, np.int64)
        offsets[requests.is_placed] = layout.offsets_bytes
        self._number = self._library.open(
            requests.size_bytes,
            offsets,
            requests.outlives.astype(np.int64),
            max(layout.arena_bytes, 1),  # the system maps no 0 bytes
        )
        self._close = weakref.finalize(self, self._library.close, self._number)
        # Blocks are given back until the process has ended, and its end frees all.
        self._close.atexit = False
        self._has_warned, self._patience = False, _PATIENCE
        self._last_counts = Counts()
        memory.source = self

    @property
    def arena_bytes(self) -> int:
        """Bytes that the arena takes from the system, once a step has touched them."""
        return self.layout.arena_bytes

    @property
    def counts(self) -> Counts:
        """What became of the requests of all steps so far."""
        return self._library.counts(self._number) if self.is_open else self._last_counts

    @property
    def is_open(self) -> bool:
        """Whether steps are served from it."""
        return self._close.alive

    def close(self) -> None:
        """Leave all steps to torch's allocator from now on."""
        # A second close must not take away the arena that came after.
        if self._memory.source is self:
            self._memory.source = None
        # The library has no counts of a closed arena.
        self._last_counts = self.counts
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, phase: PassKind, graph: Boxed, args: list[Any]) -> Any:
        """What the graph returns. This thread is armed while it runs, and not after."""
        # Beginning another would disarm this thread for the graph that it runs within.
        if self._library.is_armed():
            return graph(args)
        counts = Counts()
        try:
            # Inside, since Ctrl-C may be heard right after it.
            self._library.begin(self._number, *self._parts[phase])
            results = graph(args)
        finally:
            counts = self._library.end()
        if counts.misses and not self._has_warned:
            self._patience -= 1
            # What is missed since the user still holds blocks is forgiven at first: they may go.
            if counts.unplanned or counts.occupied or not self._patience:
                self._warn(phase, counts)
        return results

    def _warn(self, phase: PassKind, counts: Counts) -> None:
        self._has_warned = True
        warnings.warn(
            f"{counts.misses} of {counts.misses + counts.hits} requests of a {phase}, "
            f"{counts.missed_bytes} bytes, were not served from the arena but by torch's "
            f"allocator: {counts.unplanned} were not planned, and {counts.occupied + counts.kept} "
            "found their place taken. Results are the same, and more memory is in use. Drop what "
            "an earlier step has left before the next begins, or close the arena and make another. "
            "This is said once; the arena's counts go on",
            stacklevel=2,
        )

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"Arena({state}, {self.layout!r}, {self.counts!r})"
