"""One budget for the several graphs that a model breaks into, and for several calls of one.

While a graph runs, what the forwards before it have saved is still held, and what later forwards
save is not there: not yet in forward, no more in backward. The forwards before it are the open
ones: their autograd node lives, and their backward has not run. Dynamo's numbers of frames cannot
say this: they say neither that two graphs belong to one model nor that a graph is called twice.

All graphs of a model are compiled in its first forward, before any backward. So a graph finds the
same forwards open when it is compiled as in every later step, unless the program changes. Then a
forward that no longer fits is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch._subclasses.fake_tensor import FakeTensor

from remat.formats import bytes_text
from remat.graph_capture.errors import BudgetError
from remat.rewriter.guards.open_forwards import OpenForwards
from remat.rewriter.inductor.replay import Replay

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
    budget_bytes: int


class Measured(Protocol):
    """A graph whose bytes are noted: one step, or the pieces of one."""

    @property
    def static_bytes(self) -> int:
        """Of parameters and buffers."""
        ...

    @property
    def dynamic_bytes(self) -> int:
        """Of all other inputs."""
        ...

    def left_by_others_bytes(self, found: Replay) -> int:
        """What the other calls have left by the time the last one runs."""
        ...


@dataclass
class SharedBudget:
    """The graphs of one call of torch.compile, by dynamo's frame and compilation.

    Attributes
    ----------
    noted : bytes of each graph. forwards : the open forwards of these graphs.
    """

    noted: dict[Frame, _Noted] = field(default_factory=dict[Frame, _Noted])
    forwards: OpenForwards = field(default_factory=OpenForwards)

    def held_bytes(self, frame: Frame, static_bytes: int, dynamic_bytes: int) -> int:
        """Bytes that are held before the graph of `frame` allocates anything."""
        before = self.forwards.graphs()
        own = 0 if frame[0] in {number for number, _ in before} else static_bytes
        return own + dynamic_bytes + self._left(before, is_stock=False)

    def base_bytes(self, frame: Frame, alone_bytes: int) -> int:
        """The peak that all graphs so far have as torch compiles them."""
        before = self.forwards.graphs()
        left, held = self._left(before, is_stock=True), self._left(before, is_stock=False)
        peaks = [self._peak(before, k, is_stock=True) for k in range(len(before))]
        return max([alone_bytes - held + left, *peaks])

    def note(
        self, frame: Frame, step: Measured, chosen: Replay, stock: Replay, budget_bytes: int
    ) -> None:
        """Keep what a compiled graph takes, and what it was planned for.

        Raises
        ------
        BudgetError : its parameters do not fit beside the forwards before it, which were planned
            before these were known.
        """
        peaks = [one.peak_bytes - step.left_by_others_bytes(one) for one in (chosen, stock)]
        self.noted[frame] = _Noted(
            step.static_bytes, step.dynamic_bytes, chosen.saved_bytes, peaks[0],
            stock.saved_bytes, peaks[1], budget_bytes,
        )  # fmt: skip
        frames = [*self.forwards.graphs(), frame]
        for k in range(len(frames)):
            peak_bytes = self._peak(frames, k, is_stock=False)
            if peak_bytes > budget_bytes:
                raise BudgetError(
                    f"the model breaks into {len(set(frames))} graphs, and graph {frames[k][0]} "
                    f"needs {bytes_text(peak_bytes)} with the parameters of those after it, above "
                    f"the budget of {bytes_text(budget_bytes)}: it was planned before they were "
                    "known. Give a larger budget, or compile with fullgraph=True to find and "
                    "remove the breaks"
                )

    def require_room(self, frame: Frame) -> None:
        """Refuse a forward for which those that are open leave too little.

        Raises
        ------
        BudgetError : more of them are open than when its graph was planned.
        """
        before = self.forwards.graphs()
        if not before:
            return
        budget_bytes = self.noted[frame].budget_bytes
        peak_bytes = self._peak([*before, frame], len(before), is_stock=False)
        if peak_bytes > budget_bytes:
            again = before.count(frame)
            raise BudgetError(
                f"graph {frame[0]}/{frame[1]} is called with {len(before)} forwards open, whose "
                f"backward is still to come, {again} of them its own, and would need "
                f"{bytes_text(peak_bytes)} with what these have saved, above the budget of "
                f"{bytes_text(budget_bytes)}: it was planned for fewer. Call backward before the "
                "next forward, put no_grad around forwards that need no backward, or give "
                f'options={{"calls": {again + 1}, ...}}, which plans for so many'
            )

    def _left(self, frames: Sequence[Frame], *, is_stock: bool) -> int:
        """What forwards leave: inputs and saved bytes for each, parameters once for each graph."""
        noted = [self.noted[frame] for frame in frames]
        saved = sum(n.stock_saved_bytes if is_stock else n.saved_bytes for n in noted)
        return saved + sum(n.dynamic_bytes for n in noted) + self._static_bytes(frames)

    def _static_bytes(self, frames: Sequence[Frame]) -> int:
        """Bytes of parameters; compilations of one frame share theirs."""
        largest: dict[int, int] = {}
        for frame in frames:
            known = largest.get(frame[0], 0)
            largest[frame[0]] = max(known, self.noted[frame].static_bytes)
        return sum(largest.values())

    def _peak(self, frames: Sequence[Frame], k: int, *, is_stock: bool) -> int:
        """Peak of the k-th forward, with what those before it leave and all parameters."""
        own = self.noted[frames[k]]
        parameters = self._static_bytes(frames) - self._static_bytes(frames[:k])
        peak_bytes = own.stock_peak_bytes if is_stock else own.peak_bytes
        left = self._left(frames[:k], is_stock=is_stock)
        return left + parameters + own.dynamic_bytes + peak_bytes


def watched(
    call: Callable[..., Any],
    shared: SharedBudget,
    frame: Frame,
    *,
    is_first: bool = True,
    is_last: bool = True,
) -> Callable[..., Any]:
    """`call`, a compiled training graph, that counts as open from each run until its backward.

    Of a graph in pieces, the first asks for room, and the last has the results.
    """

    def run(*args: Any) -> Any:
        if any(isinstance(value, FakeTensor) for value in args):
            # DDP's pieces run once on fake tensors, for the shapes that the next piece gets.
            return call(*args)
        if is_first:
            shared.require_room(frame)
        output = call(*args)
        if is_last:
            shared.forwards.watch(frame, output)
        return output

    return run


_known: dict[int, tuple[Mapping[str, Any] | None, SharedBudget]] = {}


def shared_budget(options: Mapping[str, Any] | None) -> SharedBudget:
    """The budget of the calls of torch.compile that these options came with.

    Dynamo hands every graph of a model the same options object. The object is kept, so that no
    other takes its id. Models that share one share their budget while they are trained together.
    If they take turns, the forwards of one are closed when the other runs.
    """
    held = _known.setdefault(id(options), (options, SharedBudget()))
    return held[1]


def forget_graphs() -> None:
    """Forget all graphs, as dynamo does when it is reset."""
    _known.clear()
