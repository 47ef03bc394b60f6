"""Where the two graphs of a compiled step get their memory from: torch's allocator, or an arena.

Only the graphs are served from an arena. What the user runs between forward and backward, and what
guards and hooks allocate, is not in the way of the calls that were counted.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from remat.rewriter.graphs.codegen import Boxed

PassKind = Literal["forward", "backward"]


class _Source(Protocol):
    """Runs a graph, and gives it memory meanwhile."""

    def run(self, phase: PassKind, graph: Boxed, args: list[Any]) -> Any: ...


class StepAllocator:
    """The place at which an arena is put around the graphs of one compiled step.

    Copies of a module share its step, and so its arena. A `source` of None leaves all requests to
    torch's allocator. Forward's graph returns `n_results` to the user, then what backward reads.
    """

    def __init__(self) -> None:
        self.source: _Source | None = None
        self.n_results = 0

    def around(self, phase: PassKind, graph: Boxed) -> Boxed:
        def run(args: list[Any]) -> Any:
            source = self.source  # read at each call: an arena is opened and closed between steps
            return graph(args) if source is None else source.run(phase, graph, args)

        # AOTAutograd then passes inputs in a list, which the graph empties.
        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run
