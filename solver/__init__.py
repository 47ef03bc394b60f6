"""Solvers: a training graph and a budget in, a schedule and a proven bound out. No torch.

A solver is one file with a frozen dataclass whose fields are its options, and one row of
`TABLE`; it is imported when first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import cast

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.derived import unchunked
from remat.solver.policies.fallback import simple_rule_fallback
from remat.solver.reductions.copy_support import (
    can_copy,
    for_any_copies,
    plans_copies,
    require_planned_with_copies,
)
from remat.solver.reductions.pin_globs import Globs, as_globs
from remat.solver.reductions.updates import has_updates, solve_with_updates
from remat.solver.result import Holding, Result, with_time_limit_message
from remat.solver.search import Listener, Progress, one_job
from remat.solver.stopping import DEFAULT_GAP, gap_for
from remat.solver.table import (
    TABLE,
    TAKE_CHUNKS,
    Solver,
    budget_as_int,
    check_number,
    make_solver,
    option_names,
    solver_class,
)

__all__ = [
    "TABLE",
    "Globs",
    "Holding",
    "Progress",
    "Result",
    "Solver",
    "make_solver",
    "option_names",
    "solve_within",
    "solver_class",
]


def solve_within(
    graph: TrainingGraph,
    budget_bytes: int,
    solver: str = "auto",
    *,
    time_limit_s: float = 60.0,
    progress: Listener | None = None,
    keep: Globs = (),
    recompute: Globs = (),
    known_us: float = inf,
    at_hand: Result | None = None,
    **options: object,
) -> Result:
    """Find the schedule of least time whose true peak is within `budget_bytes`.

    Parameters
    ----------
    graph : TrainingGraph
        One training step.
    budget_bytes : int
        On the peak, resident bytes included.
    solver : str
        A name of `TABLE`.
    time_limit_s : float
        The best schedule found by then is returned, with status ``time limit`` if that
        cut the search short.
    progress : callable
        Called with a `Progress` now and then.
    keep, recompute : globs
        Over module paths: forward ops there are never recomputed, or what backward reads of
        them is not carried from forward into backward; see `remat.solver.reductions.pins`.
    known_us : float
        The time of a schedule that is known: a solver that proves a bound may end where none can
        be faster by more than its gap.
    at_hand : Result
        The outcome for a graph with regions if all of them run whole, where it is known.
    **options : object
        Fields of the solver.

    Raises
    ------
    SolverError : unknown solver or option, a value or budget without meaning, or a glob that
        matches nothing or is pinned both ways. That nothing fits is a `Result`, no error.
    """
    budget_bytes = budget_as_int(budget_bytes)
    check_number("time_limit_s", time_limit_s)

    def ask(one: TrainingGraph, size_bytes: int, limit_s: float, known_us: float = inf) -> Result:
        return solve_within(
            one, size_bytes, solver, time_limit_s=limit_s, progress=progress,
            keep=keep, recompute=recompute, known_us=known_us, at_hand=None, **options,
        )  # fmt: skip

    if can_copy(graph):
        order = options.get("order")
        require_planned_with_copies(solver, recompute=bool(as_globs(recompute)), order=order)
    with one_job():
        if solver not in TAKE_CHUNKS:
            graph = unchunked(graph)
        if graph.regions:
            from remat.solver.reductions.chunked_regions import solve_in_chunks

            def of_this_budget(one: TrainingGraph, limit_s: float, known_us: float) -> Result:
                return ask(one, budget_bytes, limit_s, known_us)

            gap = _gap_asked(graph, solver, options)
            found = solve_in_chunks(graph, budget_bytes, of_this_budget, time_limit_s, gap, at_hand)
            return with_time_limit_message(found, time_limit_s)
        if has_updates(graph):
            found = solve_with_updates(graph, budget_bytes, ask, time_limit_s)
            return with_time_limit_message(found, time_limit_s)
        if keep or recompute:
            from remat.solver.reductions.pins import solve_pinned

            found = solve_pinned(
                graph, budget_bytes, solver, keep, recompute,
                time_limit_s=time_limit_s, progress=progress, **options,
            )  # fmt: skip
        else:
            if known_us < inf and "known_us" in option_names(solver):
                options["known_us"] = known_us
            made = make_solver(solver, time_limit_s=time_limit_s, progress=progress, **options)
            found = made.solve(graph, budget_bytes)
            # Whoever names a solver wants its schedule; 0 bytes ask for the least peak known. Where
            # one schedule is known, a search may end without another.
            if known_us == inf and (
                solver == "auto" or (solver in TAKE_CHUNKS and not budget_bytes)
            ):
                found = simple_rule_fallback(graph, budget_bytes, found, time_limit_s)
        if can_copy(graph) and not plans_copies(solver):
            found = for_any_copies(graph, found)
        return with_time_limit_message(found, time_limit_s)


def _gap_asked(graph: TrainingGraph, solver: str, options: Mapping[str, object]) -> float:
    """The gap to which that solver works with these options; 0 for one that proves an optimum."""
    given = options.get("gap", DEFAULT_GAP if "gap" in option_names(solver) else 0.0)
    check_number("gap", given)
    return gap_for(len(graph.ops), cast("float", given))
