"""Keeps what ``torch.compile(backend="remat")`` has planned in this process, for the user."""

from __future__ import annotations

from collections import deque

import msgspec

from remat.formats import bytes_text
from remat.schedules.schedule import Schedule
from remat.screen.stages import stopwatch_of_call

MOST_KEPT = 64
"""Plans that are kept; the oldest go first."""
_plans: deque[CompiledPlan] = deque(maxlen=MOST_KEPT)


class CompiledPlan(msgspec.Struct, frozen=True):
    """One compiled training graph.

    Attributes
    ----------
    frame : dynamo's number of the graph, of its compilation, and, where that serves several sizes,
        that of the size. sizes : these, by dimension; empty where it serves one.
    budget_bytes : what it was planned for. peak_bytes : of its code, replayed, with `held_bytes`.
    baseline_peak_bytes : the same for the code that torch makes without a budget.
    held_bytes : of parameters, buffers, inputs, and what earlier graphs hold.
    saved_bytes : what forward leaves for backward.
    overhead : over computing each kernel once, by the prices of kernels; 0 where torch's own cut
        fits. gap : how far that can be from the best, at the target that was solved for; None where
        nothing is proved.
    recomputed : kernels and calls that run again. replays : candidates whose code was replayed; 0
        for a plan that an earlier process has kept.
    seconds : that the search took. schedule : None where torch's own cut fits.
    """

    frame: str
    budget_bytes: int
    peak_bytes: int
    baseline_peak_bytes: int
    held_bytes: int
    saved_bytes: int
    overhead: float
    gap: float | None
    recomputed: int
    replays: int
    seconds: float
    schedule: Schedule | None = None
    sizes: str = ""

    def __repr__(self) -> str:
        at = f" at {self.sizes}" if self.sizes else ""
        return (
            f"CompiledPlan(graph {self.frame}{at}: peak {bytes_text(self.peak_bytes)} of "
            f"{bytes_text(self.budget_bytes)}, as torch compiles it "
            f"{bytes_text(self.baseline_peak_bytes)}; {self.recomputed} computed again, overhead "
            f"{100 * self.overhead:.1f} %, {self.replays} replays, {self.seconds:.1f} s)"
        )


def remember(plan: CompiledPlan, *, verbose: bool) -> None:
    """Keep a plan, and say what it is."""
    _plans.append(plan)
    stopwatch_of_call(verbose=verbose).say(f"remat: {plan!r}")


def compiled_plans() -> tuple[CompiledPlan, ...]:
    """Plans of graphs that torch.compile has compiled here, the oldest first; 64 are kept."""
    return tuple(_plans)
