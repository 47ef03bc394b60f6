"""One budget for the several graphs that a model breaks into.

All graphs are compiled during the first forward, in their order, before any backward runs. So
graph k runs, forward and backward, while what graphs 0 to k - 1 have saved is still held, and
what later graphs save is gone again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remat.formats import bytes_text
from remat.graph_capture.errors import BudgetError
from remat.rewriter.inductor_partition import FusedStep
from remat.rewriter.inductor_replay import Replay

Frame = tuple[int, int]


@dataclass(frozen=True)
class _Noted:
    """Bytes of one compiled graph."""

    static_bytes: int
    dynamic_bytes: int
    saved_bytes: int
    peak_bytes: int
    stock_saved_bytes: int
    stock_peak_bytes: int


@dataclass
class SharedBudget:
    """What is known of the graphs of one call of torch.compile, by dynamo's frame and compilation.

    A frame that is compiled again, for another shape, replaces nothing: of its compilations
    the one that holds most counts.
    """

    noted: dict[Frame, _Noted] = field(default_factory=dict[Frame, _Noted])

    def held_bytes(self, frame: Frame, static_bytes: int, dynamic_bytes: int) -> int:
        """Bytes that are there before the graph of `frame` allocates anything."""
        mine = static_bytes + dynamic_bytes
        return mine + sum(self._left(f, is_stock=False) for f in self._earlier(frame))

    def base_bytes(self, frame: Frame, alone_bytes: int) -> int:
        """The peak of all graphs so far as torch compiles them."""
        before = self._earlier(frame)
        left = sum(self._left(f, is_stock=True) for f in before)
        held = sum(self._left(f, is_stock=False) for f in before)
        return max([alone_bytes - held + left, *(self._peak(f, is_stock=True) for f in before)])

    def note(self, frame: Frame, step: FusedStep, chosen: Replay, stock: Replay) -> None:
        """Keep what a compiled graph takes."""
        self.noted[frame] = _Noted(
            step.static_bytes, step.dynamic_bytes, chosen.saved_bytes, chosen.peak_bytes,
            stock.saved_bytes, stock.peak_bytes,
        )  # fmt: skip

    def require(self, budget_bytes: int) -> None:
        """Later parameters are there while earlier graphs run: they must fit with them.

        Raises
        ------
        BudgetError : they do not.
        """
        for frame in {number for number, _ in self.noted}:
            peak_bytes = self._peak(frame, is_stock=False)
            if peak_bytes > budget_bytes:
                raise BudgetError(
                    f"the model breaks into {len(self.noted)} graphs, and graph {frame} needs "
                    f"{bytes_text(peak_bytes)} with the parameters of those after it, above the "
                    f"budget of {bytes_text(budget_bytes)}: it was planned before they were "
                    "known. Give a larger budget, or compile with fullgraph=True to find and "
                    "remove the breaks"
                )

    def _earlier(self, frame: Frame) -> list[int]:
        return sorted({number for number, _ in self.noted if number < frame[0]})

    def _of(self, number: int) -> list[_Noted]:
        return [noted for (other, _), noted in self.noted.items() if other == number]

    def _left(self, number: int, *, is_stock: bool) -> int:
        return max(
            n.static_bytes + n.dynamic_bytes + (n.stock_saved_bytes if is_stock else n.saved_bytes)
            for n in self._of(number)
        )

    def _peak(self, number: int, *, is_stock: bool) -> int:
        """Of a graph with all that is held beside it."""
        own = max(
            n.static_bytes + n.dynamic_bytes + (n.stock_peak_bytes if is_stock else n.peak_bytes)
            for n in self._of(number)
        )
        numbers = {other for other, _ in self.noted}
        before = sum(self._left(n, is_stock=is_stock) for n in numbers if n < number)
        after = sum(max(n.static_bytes for n in self._of(o)) for o in numbers if o > number)
        return own + before + after


_known: dict[int, tuple[Mapping[str, Any] | None, SharedBudget]] = {}


def shared_budget(options: Mapping[str, Any] | None) -> SharedBudget:
    """That of the one call of torch.compile which these options came with.

    Dynamo hands every graph of a model the same options object; it is kept, so that its
    identity stays its own.
    """
    held = _known.setdefault(id(options), (options, SharedBudget()))
    return held[1]


def forget_graphs() -> None:
    """Forget all graphs, as dynamo does when it is reset: it will number new ones on."""
    _known.clear()
