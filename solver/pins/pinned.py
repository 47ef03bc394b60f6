"""Pins: parts of the model that the user wants kept, or recomputed.

Solves: least time under a budget on the true peak where the values of ops pinned by `keep`
are made once, and those of ops pinned by `recompute` are not carried from forward into
backward. Any solver of the table does the work, on a graph that says the same: kept ops must
not run twice; a recomputed op that backward needs has a twin in backward, right before its
first reader there, through which backward reads. A schedule of that graph is one of
the real graph, twins being second runs. It may still carry a forbidden value, to recompute an
op that has no twin: then further runs are put in, and if that exceeds the budget the solver is
asked again for less. Runs that turn out needless are left out last. All figures come from the
real graph. So pins are another graph, not an option of solvers, and no solver need know of them.

Bound: the larger of the time of every op and every twin once, and the bound of `cut` where
only `keep` holds. Both are proved for every schedule that keeps the pins; the solver's bound
on the graph with twins is not, since it fixes when a twin first runs.
Shortcomings: with `recompute` the gap is rarely closed, and twins come just in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from remat.graph_capture.errors import option
from remat.graph_capture.graph import KEPT, TrainingGraph
from remat.schedules.schedule import Option, Schedule
from remat.schedules.simulate import simulate
from remat.schedules.simulation import Simulation
from remat.schedules.verdicts.globs import is_freed
from remat.solver.bounds.any_order_cut import free_bound_us
from remat.solver.clock import Clock
from remat.solver.cuts.cut import Cut
from remat.solver.interrupts import note_interrupt
from remat.solver.pins.globs import Globs, Pins, as_globs
from remat.solver.pins.twins import (
    leave_out_runs,
    renewed_sequence,
    said_of_twins,
    with_twins,
    without_twins,
)
from remat.solver.problem import Problem
from remat.solver.result import KNOWN, Result, infeasible, judged
from remat.solver.search import Listener, Progress
from remat.solver.sequence import schedule_of
from remat.solver.stopping import FIRST_PINNED, PINNED, PINNED_BOUND, TIGHTER
from remat.solver.table import make_solver


def solve_pinned(
    graph: TrainingGraph,
    budget_bytes: int,
    solver: str,
    keep: Globs,
    recompute: Globs,
    *,
    time_limit_s: float = 60.0,
    progress: Listener | None = None,
    **options: object,
) -> Result:
    """The schedule of least time found that fits and keeps the pins.

    `keep` and `recompute` are globs over module paths; the other arguments are those of
    `remat.solver.solve`. The schedule's options name the globs.

    Raises
    ------
    SolverError : a glob that matches nothing, an op pinned both ways, a solver or option
        that is unknown.
    """
    asked = {"keep": as_globs(keep), "recompute": as_globs(recompute)}
    graph = freed_graph(graph, asked["recompute"])
    pins = Pins.of(graph, **asked)
    named: dict[str, Option] = {name: ", ".join(globs) for name, globs in asked.items() if globs}
    return solve_for_pins(
        graph, budget_bytes, solver, pins, named,
        time_limit_s=time_limit_s, progress=progress, **options,
    )  # fmt: skip


def solve_for_pins(
    graph: TrainingGraph,
    budget_bytes: int,
    solver: str,
    pins: Pins,
    named: dict[str, Option] | None = None,
    *,
    time_limit_s: float = 60.0,
    progress: Listener | None = None,
    **options: object,
) -> Result:
    """As `solve_pinned`, for ops that are pinned one by one.

    Parameters
    ----------
    named : what the schedule's options say of the pins.
    """
    search = _PinnedSearch(
        graph, pins, budget_bytes, solver, options, named or {}, Clock(time_limit_s), progress
    )  # fmt: skip
    return search.solve_with_twins() if pins.again else search.solve_kept()


def freed_graph(graph: TrainingGraph, recompute: tuple[str, ...]) -> TrainingGraph:
    """`graph` in which the custom ops that `recompute` names may run twice."""
    if not any(is_freed(op, recompute) for op in graph.ops):
        return graph
    ops = [
        msgspec.structs.replace(op, pinned="") if is_freed(op, recompute) else op
        for op in graph.ops
    ]
    return msgspec.structs.replace(graph, ops=tuple(ops))


def kept_graph(graph: TrainingGraph, kept: dict[str, str]) -> TrainingGraph:
    """`graph` in which the ops of `kept` must not run twice."""
    ops = [
        msgspec.structs.replace(op, pinned=f"{KEPT} {option('keep', kept[op.name])}")
        if op.name in kept and not op.pinned
        else op
        for op in graph.ops
    ]
    return msgspec.structs.replace(graph, ops=tuple(ops))


@dataclass(slots=True)
class _PinnedSearch:
    graph: TrainingGraph
    pins: Pins
    budget_bytes: int
    solver: str
    options: dict[str, object]
    named: dict[str, Option]
    clock: Clock
    progress: Listener | None
    cut_short: bool = False
    kept: TrainingGraph = field(init=False)
    twinned: TrainingGraph = field(init=False)
    problem: Problem = field(init=False)
    again: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.kept = kept_graph(self.graph, self.pins.kept)
        self.problem = Problem.of(self.graph)
        self.again = frozenset(self.graph.op_index[name] for name in self.pins.again)
        self.twinned = with_twins(self.kept, self.again)

    def solve_kept(self) -> Result:
        """Solve where only `keep` holds: the solver's own bound is then right."""
        result = self._ask(self.kept, self.budget_bytes, self.clock.time_limit_s)
        if result.schedule is None:
            least = result.least_schedule
            return msgspec.structs.replace(result, least_schedule=least and self._stamped(least))
        found = judged(
            self.graph,
            self._stamped(result.schedule),
            budget_bytes=self.budget_bytes,
            lower_bound_us=result.lower_bound_us,
            wall_s=self.clock.elapsed_s,
            cut_short=self.cut_short,
            message=result.message,
        )
        return msgspec.structs.replace(found, floor=result.floor)

    def solve_with_twins(self) -> Result:
        """Solve the graph with twins, for less and less, until its schedule fits."""
        target_bytes, limit_s = self.budget_bytes, FIRST_PINNED.of(self.clock.time_limit_s)
        for _ in range(TIGHTER.most):
            result = self._ask(self.twinned, target_bytes, limit_s)
            if result.schedule is None:
                return self._with_least(result)
            sequence, found = self._renewed(result.schedule)
            if found.peak_bytes <= self.budget_bytes:
                return self._finished(result, sequence)
            over_bytes = found.peak_bytes - self.budget_bytes
            target_bytes -= max(over_bytes, target_bytes // 50, 1)
            limit_s = self.clock.left_s / 2
        return self._with_least(self._ask(self.twinned, 0, self.clock.left_s / 2))

    def _with_least(self, lost: Result) -> Result:
        """The outcome for the least peak that the solver names on the graph with twins."""
        least_bytes = lost.least_feasible_bytes or lost.peak_bytes
        result = self._ask(self.twinned, least_bytes, self.clock.left_s) if least_bytes else lost
        if result.schedule is None:
            return self._unnamed(result)
        sequence, found = self._renewed(result.schedule)
        if found.peak_bytes <= self.budget_bytes:
            return self._finished(result, sequence)
        text = (
            f"no schedule found that fits {self.budget_bytes} bytes with these pins; "
            f"{found.peak_bytes} {KNOWN}"
        )
        found_none = infeasible(
            self.graph,
            self._schedule(sequence, result.schedule),
            found,
            self.budget_bytes,
            self.clock.elapsed_s,
            f"{text}. {said_of_twins(lost.message)}" if lost.message else text,
        )
        return msgspec.structs.replace(found_none, status=lost.status)

    def _unnamed(self, result: Result) -> Result:
        return msgspec.structs.replace(
            result,
            budget_bytes=self.budget_bytes,
            least_feasible_bytes=0,
            least_schedule=None,
            held_at_peak=(),
            lower_bound_us=self.graph.time_us,
            least_bound_bytes=0,
            floor=None,
            wall_s=self.clock.elapsed_s,
            message=said_of_twins(result.message),
        )

    def _finished(self, result: Result, sequence: Sequence[int]) -> Result:
        """Leave out runs that are not needed within the budget, and prove what can be."""
        assert result.schedule is not None
        bound_us = self.twinned.time_us
        schedule = self._schedule(sequence, result.schedule)
        try:
            shorter = leave_out_runs(
                self.problem, sequence, self.again, self.budget_bytes, self.clock.left_s
            )
            schedule = self._schedule(shorter, result.schedule)
            if simulate(self.graph, schedule).time_us > bound_us * (1 + 1e-9):
                bound_us = max(bound_us, self._bound_with_keep_us())
        except KeyboardInterrupt:
            note_interrupt()
            self.cut_short = True
        return judged(
            self.graph,
            schedule,
            budget_bytes=self.budget_bytes,
            lower_bound_us=bound_us,
            wall_s=self.clock.elapsed_s,
            cut_short=self.cut_short,
            message=without_twins(result.message),
        )

    def _bound_with_keep_us(self) -> float:
        limit_s = PINNED_BOUND.of(self.clock.left_s)
        if limit_s <= 0:
            return 0.0
        if self.options.get("order") == "free":
            return free_bound_us(self.kept, self.budget_bytes, time_limit_s=limit_s)
        return Cut(time_limit_s=limit_s).solve(self.kept, self.budget_bytes).lower_bound_us

    def _ask(self, graph: TrainingGraph, budget_bytes: int, limit_s: float) -> Result:
        limit_s = PINNED.of(limit_s, self.clock.time_limit_s)
        listener = self._tell if self.progress else None
        made = make_solver(self.solver, time_limit_s=limit_s, progress=listener, **self.options)
        result = made.solve(graph, budget_bytes)
        self.cut_short = self.cut_short or result.status == "time limit"
        return result

    def _tell(self, state: Progress) -> None:
        """Pass on what the solver says, as overheads over the real step."""
        assert self.progress is not None
        scale = self.twinned.time_us / self.graph.time_us if self.graph.time_us else 1.0
        best = state.best_overhead
        self.progress(
            Progress(
                self.clock.elapsed_s,
                None if best is None else (1 + best) * scale - 1,
                scale - 1 if self.again else state.bound_overhead,
                without_twins(state.doing),
            )
        )

    def _renewed(self, schedule: Schedule) -> tuple[list[int], Simulation]:
        """The schedule as a sequence of the real graph that keeps the pins, and its figures."""
        sequence = renewed_sequence(self.problem, schedule, self.again)
        return sequence, simulate(self.graph, self._schedule(sequence, schedule))

    def _schedule(self, sequence: Sequence[int], source: Schedule) -> Schedule:
        """The schedule of a sequence, by the solver and with the options of `source`."""
        made = schedule_of(self.problem, sequence)
        return self._stamped(msgspec.structs.replace(source, steps=made.steps))

    def _stamped(self, schedule: Schedule) -> Schedule:
        """`schedule`, made for a graph with pins, as one of the real graph."""
        return Schedule.for_graph(
            self.graph,
            schedule.steps,
            budget_bytes=self.budget_bytes,
            solver=schedule.solver,
            options=schedule.options | self.named,
        )
