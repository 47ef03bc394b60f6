"""Sweeps: one solver at many budgets, each solve serving the others.

A schedule serves every budget that its peak is within, and a bound holds at every smaller one, so
time never rises with the budget. One by one, it stops where nothing runs again. `jobs` run side by
side through joblib, here or on the cluster of its backend (dask, ray).
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor
from typing import Any, cast

from msgspec.structs import replace

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.derived import fastest_us
from remat.schedules.outcome import Result
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.budgets.front import Front, GibPrice, Point, checked_step
from remat.solver.policies.template import StoreAll
from remat.solver.problem import Problem, least_needed_bytes
from remat.solver.result import INTERRUPTED, at_least_budget, evaluate_schedule
from remat.solver.search import Clock, is_interrupted, note_interrupt, one_job
from remat.solver.stopping import FIRST_SOLVE, NAMING, ONE_BUDGET, SECOND_SOLVE
from remat.solver.table import make_solver

PINS = ("keep", "recompute")  # options that every solver takes


def spread_budgets(
    graph: TrainingGraph, count: int, unmodified_bytes: int = 0, *, time_limit_s: float = 60.0,
    **options: object,
) -> tuple[list[int], list[Result]]:  # fmt: skip
    """The same budgets for each solver, and the outcome at the least if it is at hand."""
    if count < 1:
        raise SolverError(f"ask for 1 budget or more, not {count}")
    high_bytes = unmodified_bytes or _keeping_all_bytes(graph)
    # Other options are one solver's, and the budgets are for all.
    pins: dict[str, Any] = {name: options[name] for name in PINS if name in options}
    lost = solve_within(graph, 0, time_limit_s=time_limit_s, **pins)  # it names the least peak
    least_bytes = lost.least_feasible_bytes or least_needed_bytes(Problem.of(graph))
    room_bytes = max(high_bytes - least_bytes, 0)
    parts = range(count) if count > 1 else [1]  # one budget is the unmodified peak
    asked = {high_bytes - room_bytes + room_bytes * k // max(count - 1, 1) for k in parts}
    least = at_least_budget(graph, lost)
    return sorted(asked), [] if least is None else [least]


def _keeping_all_bytes(graph: TrainingGraph) -> int:
    return simulate(graph, StoreAll().schedule(graph)).peak_bytes


BUDGETS = 12  # budgets of a sweep that names none

_BudgetsDone = Callable[[int, int], None]  # called with how many budgets are done, and of how many


def sweep_budgets(
    graph: TrainingGraph, budgets: int | Iterable[int] = BUDGETS, solver: str = "auto", *,
    time_limit_s: float = 60.0, jobs: int = 1, progress: _BudgetsDone | None = None,
    at_hand: Sequence[Result] = (), unmodified_bytes: int = 0, **options: object,
) -> Front:  # fmt: skip
    """Solve at several budgets and merge what is found; `time_limit_s` is for all together."""
    clock = Clock(time_limit_s)
    check_jobs(jobs)
    # An unknown solver or option is refused before anything is solved.
    make_solver(solver, **{k: v for k, v in options.items() if k not in PINS})
    # Eager may keep more than a plan needs, as masks of dropout: callers may know its peak.
    unmodified_bytes = unmodified_bytes or _keeping_all_bytes(graph)
    with one_job():
        if isinstance(budgets, int):
            limit_s = NAMING.of(time_limit_s)
            budgets, least = spread_budgets(
                graph, budgets, unmodified_bytes, time_limit_s=limit_s, **options
            )
            at_hand = (*at_hand, *least)
        asked = sorted(set(budgets))
        if not asked or asked[0] < 0:
            raise SolverError(f"budgets must be one or more sizes in bytes, not {asked}")
        if jobs == 1 or is_interrupted():  # workers take too long to begin after Ctrl-C
            found = _one_by_one(graph, asked, solver, options, clock, progress)
        else:
            found = _side_by_side(graph, asked, solver, options, clock, jobs)
    known = merge_results(graph, found, [r for r in at_hand if r.solver == solver])
    points = (Point(r.budget_bytes, replace(r, least_schedule=None)) for r in known)
    sizes = least_needed_bytes(Problem.of(graph)), unmodified_bytes
    return Front(graph.name, graph.hash, solver, graph.time_us, *sizes, tuple(points))


def check_jobs(jobs: int) -> None:
    if jobs == 0 or jobs < -1:
        raise SolverError(f"jobs must be 1 or more, or -1 for every core, not {jobs}")


def _one_by_one(
    graph: TrainingGraph, budgets: Sequence[int], solver: str, options: dict[str, Any],
    clock: Clock, progress: _BudgetsDone | None,
) -> list[Result]:  # fmt: skip
    found: list[Result] = []
    for budget_bytes in budgets:  # a schedule that runs nothing again serves all looser budgets
        if progress:
            progress(len(found), len(budgets))
        last = found[-1] if found else None
        left_s = max(clock.left_s, 0.0)
        part_s = min(ONE_BUDGET.of(left_s / (len(budgets) - len(found))), left_s)
        if last is not None and _is_ideal(graph, last):
            message = "" if last.floor else last.message  # a floor's is about the smaller budget
            facts = {"budget_bytes": budget_bytes, "message": message}
            found.append(replace(last, wall_s=0.0, floor=None, **facts))
        elif is_interrupted():
            found.append(_untried(graph, solver, budget_bytes))
        else:
            try:
                found += [solve_within(graph, budget_bytes, solver, time_limit_s=part_s, **options)]
            except KeyboardInterrupt:
                note_interrupt()  # from outside of a search, which would have ended with its best
                found.append(_untried(graph, solver, budget_bytes))
    return found


def _is_ideal(graph: TrainingGraph, result: Result) -> bool:
    return result.schedule is not None and result.time_us <= fastest_us(graph) * (1 + 1e-9)


def _untried(graph: TrainingGraph, solver: str, budget_bytes: int) -> Result:
    return Result(
        status="time limit", solver=solver, budget_bytes=budget_bytes,
        lower_bound_us=fastest_us(graph), message=f"{INTERRUPTED} before this budget was tried",
    )  # fmt: skip


def _side_by_side(
    graph: TrainingGraph, budgets: Sequence[int], solver: str, options: dict[str, Any],
    clock: Clock, jobs: int,
) -> list[Result]:  # fmt: skip
    from unittest import mock

    joblib: Any = importlib.import_module("joblib")  # joblib ships no types, and one job needs none
    at_once = min(joblib.effective_n_jobs(jobs), len(budgets))
    each_s = max(clock.left_s, 0.0) * at_once / len(budgets)  # that many at a time have more
    task = joblib.delayed(solve_within)
    tasks = [task(graph, one, solver, time_limit_s=each_s, **options) for one in budgets]
    found: list[Result] = []
    try:
        with mock.patch.dict(os.environ, PYTHONSAFEPATH="1"):  # our folder may hold a joblib.py
            answers = joblib.Parallel(n_jobs=jobs, return_as="generator")(tasks)
            found.extend(cast("Iterable[Result]", answers))  # what came before an error stays
    except KeyboardInterrupt:
        note_interrupt()
    except BrokenExecutor as error:
        said = str(error).split(".")[0]
        warnings.warn(f"a worker of the sweep died: {said}. The rest is solved here", stacklevel=3)
    return found + _one_by_one(graph, budgets[len(found) :], solver, options, clock, None)


def merge_results(
    graph: TrainingGraph, found: Sequence[Result], at_hand: Sequence[Result] = ()
) -> list[Result]:
    """Each of `found`, by rising budget, with the best schedule of all and the best bound."""
    known = sorted(
        (result for result in (*found, *at_hand) if result.schedule is not None),
        key=lambda result: (result.time_us, result.peak_bytes),
    )
    bound_us = 0.0
    best: list[Result] = []
    for own in reversed(found):  # a bound holds at every smaller budget
        bound_us = max(bound_us, own.lower_bound_us)
        fits = (result for result in known if result.peak_bytes <= own.budget_bytes)
        best.append(_adopting(graph, own, next(fits, None), bound_us))
    return best[::-1]


def _adopting(
    graph: TrainingGraph, own: Result, better: Result | None, bound_us: float
) -> Result:  # fmt: skip
    if better is None or better.schedule is None:
        return own
    adopted = evaluate_schedule(
        graph, replace(better.schedule, budget_bytes=own.budget_bytes),
        budget_bytes=own.budget_bytes, lower_bound_us=min(bound_us, better.time_us),
        wall_s=own.wall_s, cut_short=own.status == "time limit",
        message=own.message if better is own else "",
    )  # fmt: skip
    return replace(adopted, floor=own.floor)


def least_peak(
    graph: TrainingGraph, time_limit_s: float = 60.0, *, solver: str = "auto", **options: Any
) -> Result:
    """The outcome at the least peak that `solver` knows: the least budget to ask for."""
    clock = Clock(time_limit_s)
    first_s = FIRST_SOLVE.of(time_limit_s)
    with one_job():
        # At 0 the result names the least peak known.
        named = solve_within(graph, 0, solver, time_limit_s=first_s, **options)
        if named.schedule is not None or not (known_bytes := named.least_feasible_bytes):
            return named
        at_hand = at_least_budget(graph, named)
        if is_interrupted() and at_hand is not None:
            return replace(at_hand, message=named.message)
        # That schedule was not chosen for its time: one of its budget may be faster.
        left_s = SECOND_SOLVE.of(clock.left_s, time_limit_s)
        found = solve_within(graph, known_bytes, solver, time_limit_s=left_s, **options)
    if found.schedule is not None or at_hand is None:
        return found
    bound_us = min(max(found.lower_bound_us, at_hand.lower_bound_us), at_hand.time_us)
    return replace(
        at_hand, lower_bound_us=bound_us, wall_s=named.wall_s + found.wall_s, message=found.message
    )


def price_of_gib(
    graph: TrainingGraph, result: Result, *, solver: str = "auto", step_bytes: int = 0,
    time_limit_s: float = 60.0, **options: Any,
) -> GibPrice:  # fmt: skip
    """What a GiB more than the budget of `result` would save, and one less would cost."""
    if result.schedule is None:
        raise SolverError(
            f"ask at {result.least_feasible_bytes or 'more'} bytes: nothing fits "
            f"{result.budget_bytes} bytes, so memory has no price there"
        )
    result = result.of_tensors
    step_bytes = checked_step(step_bytes, result.peak_bytes)
    low_bytes = max(result.budget_bytes - step_bytes, 0)
    more = less = result
    # Nothing is faster than no recomputation, nor dearer where it fits: neither takes a solve.
    if not _is_ideal(graph, result):
        above_bytes = result.budget_bytes + step_bytes
        more = solve_within(graph, above_bytes, solver, time_limit_s=time_limit_s, **options)
    if result.peak_bytes > low_bytes:
        less = solve_within(graph, low_bytes, solver, time_limit_s=time_limit_s, **options)
    here_us = min(r.time_us for r in (result, less) if r.schedule is not None)
    more_us = min(here_us, more.time_us) if more.schedule is not None else here_us
    less_us = less.time_us if less.schedule is not None else None
    return GibPrice(result.budget_bytes, step_bytes, here_us, more_us, less_us)
