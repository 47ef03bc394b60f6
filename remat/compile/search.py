"""The search for a compiled step that fits: solve, generate code, replay its peak, move on.

A schedule's peak in the graph of kernels and the peak of the code that Inductor makes of it
can differ by some per cent either way. So the target of the solver is moved until the replayed
peak is right below the limit. The replayed peak alone decides what fits.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field

import remat.solver as solvers
from remat.budgets import UNBOUNDED_BYTES
from remat.compile.options import CompileOptions
from remat.formats import bytes_text
from remat.rewriter.inductor.lowering import ReplayError
from remat.rewriter.inductor.partition import FusedStep, Pair, draws_once
from remat.rewriter.inductor.replay import Replay
from remat.schedules.schedule import Schedule, Step
from remat.schedules.simulate import simulate
from remat.solver.result import Result

_LOG = logging.getLogger("remat")
CLOSE = 0.97
"""Part of the limit from which on a plan is not tried to be improved."""
CHEAP = 0.005
"""Overhead below which it is not either: each try costs seconds."""
NARROW = 1.01
"""Ratio of a target that does not fit to one that does, below which nothing is tried between."""
STEP = 0.995
"""How far below a target that did not fit the next one is, at least."""
LOOSER = (1.02, 1.06)
"""Times the lowest peak in the graph: the code of such plans may need less than that one's."""
UNCERTAIN = 1.1
"""What a peak that could not be replayed is multiplied by."""


@dataclass(frozen=True)
class Candidate:
    """Two graphs, what their code allocates, and the schedule that they carry out.

    `schedule` and `result` are None where the step is as torch compiles it.
    """

    pair: Pair
    replay: Replay
    schedule: Schedule | None = None
    result: Result | None = None
    model_peak_bytes: int = 0
    time_us: float = 0.0
    overhead: float = 0.0


@dataclass
class PlanSearch:
    """Candidates of one step, each replayed once."""

    step: FusedStep
    options: CompileOptions
    tried: dict[tuple[Step, ...], Candidate] = field(
        default_factory=dict[tuple[Step, ...], Candidate]
    )

    def stock(self) -> Candidate:
        """The step as torch compiles it."""
        pair = self.step.stock()
        return Candidate(pair, self._replayed(pair, 0))

    def within(self, limit_bytes: int, stock: Candidate) -> Candidate | None:
        """The fastest candidate found whose code allocates no more than the limit.

        Torch's own cut is, where it fits, unless it writes masks as bool, which is slow on a CPU.
        """
        is_pinned = bool(self.options.keep or self.options.recompute)
        fits = stock.replay.peak_bytes <= limit_bytes and draws_once(stock.pair)
        if fits and not is_pinned and not self.step.n_masks:
            return stock
        found = self._planned_within(limit_bytes)
        return stock if found is None and fits and not is_pinned else found

    def _planned_within(self, limit_bytes: int) -> Candidate | None:
        best: Candidate | None = None
        fitting, failing = 0, UNBOUNDED_BYTES
        target = limit_bytes
        for _ in range(self.options.replays):
            before = len(self.tried)
            found = self.solved(target) or self.solved(0)
            if found is None:
                break
            if found.replay.peak_bytes <= limit_bytes:
                best = found if best is None else min(best, found, key=lambda c: c.time_us)
                fitting = max(fitting, target)
                if _is_enough(found, limit_bytes):
                    break
            else:
                failing = min(failing, target)
            target = _next_target(found, limit_bytes, target, fitting, failing)
            is_least = found.result is not None and found.result.schedule is None
            if failing <= NARROW * fitting or (is_least and len(self.tried) == before):
                break
        if best is None:
            least = self.least()
            best = least if least and least.replay.peak_bytes <= limit_bytes else None
        return best

    def least(self) -> Candidate | None:
        """The candidate of the lowest replayed peak that is found, near the lowest of the graph."""
        first = self.solved(0)
        if first is None:
            return None
        for factor in LOOSER:
            if len(self.tried) < self.options.replays:
                self.solved(int(factor * first.model_peak_bytes))
        return min(self.tried.values(), key=lambda c: (c.replay.peak_bytes, c.time_us))

    def solved(self, target_bytes: int) -> Candidate | None:
        """A schedule for a target in the graph of kernels; the least one where none fits."""
        result = solvers.solve(
            self.step.graph, max(0, target_bytes), self.options.solver,
            time_limit_s=self.options.time_limit_s,
            keep=self.options.keep, recompute=self.options.recompute,
        )  # fmt: skip
        schedule = result.schedule or result.least_schedule
        if schedule is None or schedule.graph_hash != self.step.graph.hash:
            return None
        if schedule.steps not in self.tried:
            self.tried[schedule.steps] = self._candidate(schedule, result)
        found = self.tried[schedule.steps]
        _LOG.debug(
            "target %d: %s, %d in the graph, %d replayed, overhead %.4f",
            target_bytes, result.status, found.model_peak_bytes,
            found.replay.peak_bytes, found.overhead,
        )  # fmt: skip
        return found

    def _candidate(self, schedule: Schedule, result: Result) -> Candidate:
        judged = simulate(self.step.graph, schedule)
        pair = self.step.emit(schedule)
        return Candidate(
            pair, self._replayed(pair, judged.peak_bytes), schedule, result,
            judged.peak_bytes, judged.time_us, judged.overhead,
        )  # fmt: skip

    def _replayed(self, pair: Pair, model_peak_bytes: int) -> Replay:
        try:
            return self.step.replay(pair)
        except ReplayError as error:
            peak_bytes = int(UNCERTAIN * (model_peak_bytes or self._store_all_bytes()))
            warnings.warn(
                f"{error}. Peaks of this compiled step are estimated from its graph instead, as "
                f"{bytes_text(peak_bytes)} here, and can be a third too low: leave room",
                stacklevel=2,
            )
            return Replay(peak_bytes, peak_bytes, peak_bytes)

    def _store_all_bytes(self) -> int:
        return solvers.solve(self.step.graph, UNBOUNDED_BYTES, "store_all").peak_bytes


def _is_enough(found: Candidate, limit_bytes: int) -> bool:
    return found.overhead <= CHEAP or found.replay.peak_bytes >= CLOSE * limit_bytes


def _next_target(
    found: Candidate, limit_bytes: int, target: int, fitting: int, failing: int
) -> int:
    """Where the replayed peak would meet the limit if it stayed as far from that in the graph.

    It may move faster than that, with what other calls have left: so no further than in proportion.
    """
    room_bytes = limit_bytes - found.replay.peak_bytes
    ratio = limit_bytes / max(1, found.replay.peak_bytes)
    if room_bytes >= 0:
        reached = max(found.model_peak_bytes, int(target / NARROW))
        guess = min(reached + room_bytes, int(max(reached, target) * ratio))
    else:
        least = min(target, found.model_peak_bytes)
        guess = min(max(least + room_bytes, int(least * ratio)), int(STEP * least))
    if fitting and failing < UNBOUNDED_BYTES and not fitting < guess < failing:
        return (fitting + failing) // 2
    return guess
