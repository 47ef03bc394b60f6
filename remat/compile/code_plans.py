"""For `rematerialize(compile=True)`: targets are lowered until a plan's code fits the budget."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeVar

import msgspec
from torch import nn

from remat.budgets import parse_budget
from remat.compile.plan_search import PlanWithCode, fastest_within
from remat.formats import budget_text, bytes_text
from remat.graph_capture.errors import BudgetError, option
from remat.graph_capture.sizes.symbols import corner
from remat.graph_capture.tracing.traced_step import Trace
from remat.rewriter.checking.audit import of_steps
from remat.rewriter.graphs.updating import Updates
from remat.rewriter.inductor.code_by_size import planned_at
from remat.rewriter.inductor.compiler import code_peak_bytes
from remat.rewriter.inductor.lowering import ReplayError
from remat.rewriter.rewriting import module_for, rewrite, trace_of_schedule
from remat.rewriter.user_module.module import RematModule
from remat.schedules.family import Family
from remat.schedules.schedule import Schedule
from remat.solved import Solved, facts_of

_LOG = logging.getLogger("remat")
_P = TypeVar("_P")
_TRIES = 6  # most plans whose code is generated; each takes some seconds


class TracesOfPlans:
    """The trace of each plan of a model: as captured, or with chunks in it."""

    def __init__(self, model: nn.Module, captured: Trace) -> None:
        self.model, self.captured = model, captured
        self._with_edits: dict[str, Trace] = {}

    def of(self, schedule: Schedule) -> Trace:
        # Solves for lower targets still read the captured one, so it is not edited in place.
        made_for = schedule.graph_hash
        if made_for == self.captured.graph.hash:
            return self.captured
        if made_for not in self._with_edits:
            recipe = self.captured.recipe
            self._with_edits[made_for] = trace_of_schedule(self.model, recipe, schedule)
        return self._with_edits[made_for]


def with_fitting_code(
    traces: TracesOfPlans, solve: Callable[[int], Solved], first: Solved,
    budget: str | SupportsIndex,
) -> Solved:  # fmt: skip
    """Solved for `budget` or less, so that the code keeps to it; `BudgetError` if none does."""
    # Nothing is below the least peak; `rewrite` then warns by how much the code is above.
    return first if _is_least(budget) else _plan_for_code(traces, solve, first)


def compiled_module(
    traces: TracesOfPlans, found: Solved, budget: str | SupportsIndex, *, audit: bool,
    updates: Updates | None = None,
) -> tuple[RematModule, bool]:  # fmt: skip
    """By Inductor's code, for what `with_fitting_code` found; and whether `budget` binds it."""
    schedule, facts = found.result.schedule, facts_of(found)
    assert schedule is not None
    model, traced = traces.model, traces.of(schedule)
    if _is_least(budget):
        asked: Any = {"compile": True, "audit": audit, "updates": updates}
        return rewrite(model, schedule, trace=traced, **facts, **asked), False
    kept: Any = {"by_inductor": True, "audit": of_steps(audit), "updates": updates}
    return module_for(model, schedule, traced, **facts, **kept), True


def _is_least(budget: str | SupportsIndex) -> bool:
    return parse_budget(budget).kind == "min"


def _plan_for_code(traces: TracesOfPlans, solve: Callable[[int], Solved], first: Solved) -> Solved:
    def with_code(target_bytes: int) -> PlanWithCode[Solved] | None:
        # No second solve for the budget that was solved for already.
        found = first if target_bytes >= limit_bytes else solve(max(1, target_bytes))
        result = found.result
        if result.schedule is None:
            return None
        code_bytes = _code_peak_bytes(traces.of(result.schedule), result.schedule)
        return PlanWithCode(found, result.peak_bytes, code_bytes, result.time_us)

    limit_bytes = first.result.budget_bytes
    found = _first_within(limit_bytes, with_code)
    # What was asked for is what binds the code, not the target that it was reached by.
    result = msgspec.structs.replace(found.result, budget_bytes=limit_bytes)
    return msgspec.structs.replace(found, result=result)


def family_with_fitting_code(
    model: nn.Module, traced: Trace, solve: Callable[[str | SupportsIndex], Family],
    budget: str | SupportsIndex,
) -> Family:  # fmt: skip
    """Schedules for a range, the last of whose code keeps to `budget` at the largest sizes."""
    first = solve(budget)
    largest = corner(first.symbols, "high")

    def code_bytes_of(family: Family) -> int:
        return _code_peak_bytes(*planned_at(model, traced, family.top.schedule, largest))

    def with_code(target_bytes: int) -> PlanWithCode[Family] | None:
        # Bounds of an op's bytes and no reserved memory: as the budget was when it was parsed.
        found = first if target_bytes >= limit_bytes else solve(f"{target_bytes}B allocated")
        return PlanWithCode(found, found.top.peak_bytes, code_bytes_of(found), found.top.overhead)

    limit_bytes = first.budget_bytes
    if _is_least(budget):
        limit_bytes = max(limit_bytes, code_bytes_of(first))
    found = _first_within(limit_bytes, with_code)
    return msgspec.structs.replace(found, budget_bytes=limit_bytes)


def _first_within(limit_bytes: int, with_code: Callable[[int], PlanWithCode[_P] | None]) -> _P:
    peaks: list[int] = []

    def noted(target_bytes: int) -> PlanWithCode[_P] | None:
        if (found := with_code(target_bytes)) is not None:
            peaks.append(found.code_peak_bytes)
        return found

    # The first plan that fits is taken: a closer one would cost seconds for each further try.
    best = fastest_within(limit_bytes, noted, tries=_TRIES, is_enough=lambda _: True)
    if best is not None:
        return best.plan
    raise BudgetError(
        f"give {option('budget', budget_text(min(peaks)))}, or leave out compile=True, where the "
        f"schedule's peak holds: compiled, no plan was found within {bytes_text(limit_bytes)}, and "
        f"the lowest peak of Inductor's code for {len(peaks)} plans is {bytes_text(min(peaks))}"
    )


def _code_peak_bytes(traced: Trace, schedule: Schedule) -> int:
    """0, with a warning, where the code cannot be replayed."""
    try:
        peak_bytes = code_peak_bytes(traced, schedule)
    except ReplayError as error:
        warnings.warn(f"the compiled peak is not known: {error}", stacklevel=2)
        return 0
    _LOG.debug("%d bytes in code", peak_bytes)
    return peak_bytes
