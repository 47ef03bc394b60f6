"""The search for a compiled step that fits: solve, generate code, replay its peak, move on.

Fusion and the order of kernels are only known once the code is generated. So the code of each
candidate is generated, up to where the C++ or Triton compiler would start, and what it allocates
and frees is replayed. `target_search` moves the target until the replayed peak is right below the
limit.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from dataclasses import dataclass, field

import remat.solver as solvers
from remat.budgets import UNBOUNDED_BYTES
from remat.compile.compile_options import CompileOptions
from remat.compile.graph_context import n_run_again
from remat.compile.target_search import fastest_within
from remat.formats import bytes_text
from remat.graph_capture.graph import TrainingGraph
from remat.progress import Stopwatch, stopwatch_of_call
from remat.rewriter.inductor.lowering import ReplayError
from remat.rewriter.inductor.partition import FusedStep, Pair
from remat.rewriter.inductor.replay import ReplayedMemory
from remat.schedules.schedule import Schedule, Step
from remat.schedules.simulate import simulate
from remat.solver.result import Result

_LOG = logging.getLogger("remat")
CLOSE_ENOUGH = 0.97
"""A plan whose peak is at least this part of the limit is good enough."""
CHEAP = 0.005
"""So is one of at most this overhead: each try costs seconds."""
_LOOSER = (1.02, 1.06)
"""Targets above the lowest peak of a schedule, as factors: their code may need less memory."""
_UNCERTAIN = 1.1
"""Factor on the peak of a schedule whose code could not be replayed."""


@dataclass(frozen=True)
class Candidate:
    """Two graphs, what their code allocates, and the schedule that they carry out.

    `schedule` is None where the step is as torch compiles it; `result` too, and where another rank
    has chosen. `gap` is None where nothing is proved.
    """

    pair: Pair
    replay: ReplayedMemory
    schedule: Schedule | None = None
    result: Result | None = None
    schedule_peak_bytes: int = 0
    time_us: float = 0.0
    overhead: float = 0.0
    gap: float | None = 0.0

    @property
    def code_peak_bytes(self) -> int:
        return self.replay.peak_bytes

    @property
    def recomputed(self) -> int:
        return n_run_again(self.schedule)

    @property
    def is_least(self) -> bool:
        """Whether it is the least schedule known, as none fits the target."""
        return self.result is not None and self.result.schedule is None


@dataclass
class PlanSearch:
    step: FusedStep
    options: CompileOptions
    tried: dict[tuple[Step, ...], Candidate] = field(
        default_factory=dict[tuple[Step, ...], Candidate]
    )
    stages: Stopwatch = field(init=False)

    def __post_init__(self) -> None:
        self.stages = stopwatch_of_call(verbose=self.options.verbose)

    def stock(self) -> Candidate:
        """As torch compiles it; with everything kept, where torch's own cut is wrong."""
        pair = self.step.stock()
        if self.step.is_valid(pair):
            return Candidate(pair, self._replayed(pair, 0))
        kept = self.solved(UNBOUNDED_BYTES)
        assert kept is not None, "keeping everything always fits"
        return kept

    @property
    def may_take_stock(self) -> bool:
        """Torch's own cut knows nothing of what the user has pinned."""
        return not (self.options.keep or self.options.recompute)

    def within(self, limit_bytes: int, stock: Candidate) -> Candidate | None:
        fits = stock.code_peak_bytes <= limit_bytes and self.may_take_stock
        # Torch's cut keeps masks as bool, which is slow to write on a CPU. On an AVX-512 machine a
        # GPT-2 with dropout took 25.5 % more than eager by torch's cut, and 5.5 % more by a plan
        # that recomputes nothing and keeps masks as bytes.
        if fits and not self.step.n_masks:
            return stock
        found = self._planned_within(limit_bytes)
        return stock if found is None and fits else found

    def _planned_within(self, limit_bytes: int) -> Candidate | None:
        best = fastest_within(
            limit_bytes,
            # Where no schedule is found for a target, the least one may still have code that fits.
            lambda target_bytes: self.solved(target_bytes) or self.solved(0),
            tries=self.options.replays,
            is_enough=lambda found: _is_enough(found, limit_bytes),
        )
        if best is not None:
            return best
        least = self.least()
        return least if least and least.code_peak_bytes <= limit_bytes else None

    def least(self) -> Candidate | None:
        """The candidate of the lowest replayed peak, among those of the lowest schedules."""
        first = self.solved(0)
        if first is None:
            return None
        for factor in _LOOSER:
            if len(self.tried) < self.options.replays:
                self.solved(int(factor * first.schedule_peak_bytes))
        return min(self.tried.values(), key=lambda c: (c.code_peak_bytes, c.time_us))

    def solved(self, target_bytes: int, graph: TrainingGraph | None = None) -> Candidate | None:
        """A schedule for a target, with its code; the least one known where none fits."""
        with self.stages.show(f"compiling: a schedule of {bytes_text(max(0, target_bytes))}"):
            return self._solved(target_bytes, graph or self.step.graph)

    def _solved(self, target_bytes: int, graph: TrainingGraph) -> Candidate | None:
        result = solvers.solve_within(
            graph, max(0, target_bytes), self.options.solver,
            time_limit_s=self.options.time_limit_s,
            keep=self.options.keep, recompute=self.options.recompute,
            gap=self.options.gap,
        )  # fmt: skip
        schedule = result.schedule or result.least_schedule
        # Sizes are not in the hash, so `graph` with what is live beside it has the step's.
        if schedule is None or schedule.graph_hash != self.step.graph.hash:
            return None
        # Two targets often give the same schedule, and its code costs seconds.
        if schedule.steps not in self.tried:
            self.tried[schedule.steps] = self._candidate(graph, schedule, result)
        found = self.tried[schedule.steps]
        _LOG.debug(
            "target %d: %s, %d in the graph, %d replayed, overhead %.4f",
            target_bytes, result.status, found.schedule_peak_bytes,
            found.code_peak_bytes, found.overhead,
        )  # fmt: skip
        return found

    def of(self, schedule: Schedule | None, gap: float | None) -> Candidate:
        """For what another rank has chosen, `schedule` None for torch's own cut."""
        if schedule is None:
            pair = self.step.stock()
            return Candidate(pair, self._replayed(pair, 0))
        schedule.check_made_for(self.step.graph)
        found = self._candidate(self.step.graph, schedule, None)
        return dataclasses.replace(found, gap=gap)

    def _candidate(
        self, graph: TrainingGraph, schedule: Schedule, result: Result | None
    ) -> Candidate:
        judged = simulate(graph, schedule)
        pair = self.step.emit(schedule)
        return Candidate(
            pair, self._replayed(pair, judged.peak_bytes), schedule, result,
            judged.peak_bytes, judged.time_us, judged.overhead, result.gap if result else None,
        )  # fmt: skip

    def _replayed(self, pair: Pair, schedule_peak_bytes: int) -> ReplayedMemory:
        try:
            return self.step.replay(pair)
        except ReplayError as error:
            peak_bytes = int(_UNCERTAIN * (schedule_peak_bytes or self._store_all_bytes()))
            warnings.warn(
                f"{error}. Peaks of this compiled step are estimated from its graph instead, as "
                f"{bytes_text(peak_bytes)} here, and can be a third too low: leave room",
                stacklevel=2,
            )
            return ReplayedMemory(peak_bytes, peak_bytes, peak_bytes)

    def _store_all_bytes(self) -> int:
        return solvers.solve_within(self.step.graph, UNBOUNDED_BYTES, "store_all").peak_bytes


def _is_enough(found: Candidate, limit_bytes: int) -> bool:
    return is_good_enough(found.overhead, found.code_peak_bytes, limit_bytes)


def is_good_enough(overhead: float, peak_bytes: int, limit_bytes: int) -> bool:
    """Whether to stop at a plan that fits: each further try costs seconds."""
    return overhead <= CHEAP or peak_bytes >= CLOSE_ENOUGH * limit_bytes
