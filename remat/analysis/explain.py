"""Makes the answer of `explain`; every figure is one of `simulate` or of a real solve made here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from remat.analysis.explanation import Explanation
from remat.analysis.levers import LeverEffect, levers_of
from remat.analysis.memory_figures import chunks_of
from remat.analysis.why import (
    against_greedy,
    least_budget,
    required_schedule,
    simple_rules,
    solve_arguments,
    why,
)
from remat.budgets import unmodified
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.value_report.peak_holders import forced_ops, peak_holders
from remat.solved import infeasible_text
from remat.solver import solve_within
from remat.solver.budgets.sweep import PINS, price_of_gib
from remat.solver.search import Clock, is_interrupted, one_job

FURTHER_SOLVE_S = 10.0  # seconds that each further solve may take
_T = TypeVar("_T")


class _Parts:
    def __init__(self, progress: Callable[[str], None] | None) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, make: Callable[[], _T]) -> _T:
        if self.progress is not None:
            self.progress(name)
        clock = Clock()
        made = make()
        if is_interrupted():
            raise KeyboardInterrupt  # parts of an explanation would mislead
        self.seconds[name] = round(clock.elapsed_s, 3)
        return made


def explain(
    graph: TrainingGraph, result: Result, *, why_of: str | Iterable[str] = (),
    each_s: float = FURTHER_SOLVE_S, progress: Callable[[str], None] | None = None,
) -> Explanation:  # fmt: skip
    """Why a plan is as it is: who holds its peak, the least budget, what memory is worth."""
    with one_job():
        return _explained(graph, result, why_of, each_s, _Parts(progress))


def _explained(
    graph: TrainingGraph, result: Result, why_of: str | Iterable[str], each_s: float, parts: _Parts
) -> Explanation:
    if result.schedule is None:
        raise BudgetError(infeasible_text(result))
    globs = (why_of,) if isinstance(why_of, str) else tuple(why_of)
    schedule = required_schedule(result)
    asked = solve_arguments(schedule)
    # First, as a glob that matches nothing is refused before the long solves.
    answers = parts.timed("why", lambda: why(graph, result, globs, each_s=each_s))
    price = parts.timed("price", lambda: price_of_gib(graph, result, time_limit_s=each_s, **asked))
    least = parts.timed("least", lambda: least_budget(graph, schedule, asked, each_s))
    rules = parts.timed("rules", lambda: simple_rules(graph, result))
    levers = parts.timed("levers", lambda: _levers(graph, result, each_s))
    budget_bytes = result.budget_bytes
    greedy = parts.timed("greedy", lambda: against_greedy(graph, budget_bytes, each_s=each_s))
    return Explanation(
        model=graph.name, device=graph.device, cost_origin=graph.cost_origin,
        status=result.status, solver=result.solver, budget_bytes=budget_bytes,
        peak_bytes=result.peak_bytes, time_us=result.time_us, overhead=result.overhead,
        lower_bound_us=result.lower_bound_us, gap=result.gap,
        unmodified_bytes=unmodified(graph).peak_bytes, base_us=graph.time_us,
        at_peak=peak_holders(graph, schedule), least=least, price=price,
        forced=forced_ops(graph, schedule), rules=rules, greedy=greedy, why=answers,
        seconds=parts.seconds, chunks=chunks_of(graph, schedule), levers=levers,
        moves=schedule.moves,
    )  # fmt: skip


def _levers(graph: TrainingGraph, result: Result, each_s: float) -> tuple[LeverEffect, ...]:
    schedule = required_schedule(result)
    asked = solve_arguments(schedule)

    def solve_without(off: TrainingGraph) -> Result:
        if off.links is None and graph.links is not None:  # its solver may need links: ask `auto`
            pins = {name: asked[name] for name in PINS if name in asked}
            return solve_within(off, result.budget_bytes, time_limit_s=each_s, **pins)
        return solve_within(off, result.budget_bytes, time_limit_s=each_s, **asked)

    return levers_of(graph, schedule, solve_without)
