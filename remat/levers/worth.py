"""What each lever of a plan brings, and what it costs: every figure from `simulate`."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from remat.formats import bytes_text, percent_text
from remat.graph_capture.graph import TrainingGraph
from remat.levers.without import (
    Off,
    without_copies,
    without_pieces,
    without_recomputation,
    without_updates,
)
from remat.questions.pieces import pieces_of
from remat.schedules.as_planned import as_planned
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.solver.result import Result

RECOMPUTATION, UPDATES = "recomputation", "updates during backward"
OFFLOAD = "copies to the host and back"
SolveWithout = Callable[[TrainingGraph], Result]


class Lever(msgspec.Struct, frozen=True):
    """One lever of a plan, beside the same plan with that lever off.

    Attributes
    ----------
    name : what it is, such as ``head and its loss in 8 pieces``.
    peak_bytes, off_bytes : peaks of the plan, and of the plan without the lever.
    extra : time that the lever takes, as a part of the step with every op once.
    solved : whether a solver was asked for a plan without the lever. off_fits, off_overhead : of
        that one, at the budget of the plan. off_least_bytes : the least peak known without the
        lever, where nothing fits; 0 where none is.
    """

    name: str
    peak_bytes: int
    off_bytes: int
    extra: float
    solved: bool = False
    off_fits: bool = False
    off_overhead: float = 0.0
    off_least_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        """By how much the lever lowers the peak of the plan."""
        return self.off_bytes - self.peak_bytes

    def __str__(self) -> str:
        said = (
            f"{self._saved_text()} for {percent_text(self.extra)} of a step; without, this plan "
            f"peaks at {bytes_text(self.off_bytes)}"
        )
        return f"{self.name}: {said}" + (f". {self._solved_text()}" if self.solved else "")

    def _saved_text(self) -> str:
        if self.saved_bytes == 0:
            return "nothing off this peak"
        return f"{'-' if self.saved_bytes > 0 else '+'}{bytes_text(abs(self.saved_bytes))}"

    def _solved_text(self) -> str:
        if self.off_fits:
            return f"Solved without, the overhead is {percent_text(self.off_overhead)}"
        least = f"; the least known is {bytes_text(self.off_least_bytes)}"
        return "Solved without, nothing fits" + (least if self.off_least_bytes else "")


def levers_of(
    graph: TrainingGraph, schedule: Schedule, solve_without: SolveWithout | None = None
) -> tuple[Lever, ...]:
    """The levers that `schedule` uses, each beside the same plan without it.

    Parameters
    ----------
    graph : as captured, with the regions that may run in pieces.
    solve_without : solves a graph for the budget of the plan; asked of each graph without links,
        pieces or updates. None asks for none.

    Returns
    -------
    tuple of Lever : of a schedule that copies, only recomputation and the copies: pieces and
        updates could not be taken out without them. None where parameters live below the device.
    """
    planned, found = as_planned(graph, schedule), list[Lever]()
    if any(value.home for value in planned.values):
        return ()
    if max(schedule.computations().values(), default=0) > 1:
        off = without_recomputation(graph, schedule)
        found.append(_beside(RECOMPUTATION, planned, schedule, off, None))
    if schedule.moves:
        off = without_copies(graph, schedule)
        found.append(_beside(OFFLOAD, planned, schedule, off, solve_without))
        return tuple(found)
    for one in [pieces_of(graph, schedule)] if schedule.pieces else []:
        name = ", ".join(piece.name for piece in one)
        off = without_pieces(graph, schedule)
        found.append(_beside(name, planned, schedule, off, solve_without))
    if schedule.updates:
        off = without_updates(graph, schedule)
        found.append(_beside(UPDATES, planned, schedule, off, solve_without))
    return tuple(found)


def _beside(
    name: str,
    planned: TrainingGraph,
    schedule: Schedule,
    off: Off,
    solve_without: SolveWithout | None,
) -> Lever:
    here, there = simulate(planned, schedule), simulate(*off)
    extra = (here.time_us - there.time_us) / planned.base_us if planned.base_us else 0.0
    lever = Lever(name, here.peak_bytes, there.peak_bytes, extra)
    if solve_without is None:
        return lever
    result = solve_without(off[0])
    return msgspec.structs.replace(
        lever, solved=True, off_fits=result.schedule is not None, off_overhead=result.overhead,
        off_least_bytes=result.least_feasible_bytes,
    )  # fmt: skip
