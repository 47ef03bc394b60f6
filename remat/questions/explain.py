"""What `remat explain` and `remat.explain` return: why a plan is as it is, and what would be else.

Every figure is one of `simulate` or of a real solve that is made here; `seconds` says how long
these took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.one_call import infeasible_text, unmodified
from remat.questions.against_greedy import AgainstGreedy, against_greedy
from remat.questions.least_budget import LeastBudget, least_budget
from remat.questions.simple_rules import Rule, simple_rules
from remat.questions.solved_options import asked_again, schedule_of
from remat.questions.sweep import price_json
from remat.questions.why import Why, why
from remat.schedules.verdicts.forced import Forced, forced
from remat.schedules.verdicts.peak_holders import PeakHolders, peak_holders
from remat.solver.budgets.front import GIB, Price
from remat.solver.budgets.worth import price_of_gib
from remat.solver.result import Result

EACH_S = 10.0
"""Seconds that each further solve may take."""
T = TypeVar("T")


class Explanation(msgspec.Struct, frozen=True):
    """Why a plan is as it is.

    Attributes
    ----------
    status, solver, budget_bytes, peak_bytes, time_us, overhead, lower_bound_us, gap : of the plan.
    unmodified_bytes, base_us : peak of the unmodified step, and its time: every op once.
    at_peak : who holds the memory at the peak. least : what sets the least feasible budget.
    price : what `price.step_bytes` more would save, and as many less would cost; the step is a GiB,
        or 5 % of the peak where that is less. forced : what was forced, and by what.
    rules : simple rules beside the plan, those that fit first. greedy : `cut` and greedy solvers.
    why : answers to what was asked about single values. seconds : of each part.
    """

    model: str
    device: str
    prices: str
    status: str
    solver: str
    budget_bytes: int
    peak_bytes: int
    time_us: float
    overhead: float
    lower_bound_us: float
    gap: float
    unmodified_bytes: int
    base_us: float
    at_peak: PeakHolders
    least: LeastBudget
    price: Price
    forced: tuple[Forced, ...]
    rules: tuple[Rule, ...]
    greedy: AgainstGreedy
    why: tuple[Why, ...]
    seconds: dict[str, float]

    @property
    def is_whole_gib(self) -> bool:
        """Whether the price is that of a GiB, and not of 5 % of the peak."""
        return self.price.step_bytes == GIB

    @property
    def simple(self) -> Rule | None:
        """The fastest rule that fits and is within 1 % of the plan, if something is recomputed."""
        if self.time_us <= self.base_us:
            return None
        return next((rule for rule in self.rules if rule.is_close), None)

    def as_json(self) -> dict[str, Any]:
        """Plain bytes, microseconds and names, for `--json`."""
        said = {**msgspec.to_builtins(self), "price": price_json(self.price)}
        simple = msgspec.to_builtins(self.simple)
        return {**said, "is_whole_gib": self.is_whole_gib, "simple": simple}

    def __str__(self) -> str:
        from remat.questions.paragraphs import explanation_screen
        from remat.questions.tables import rendered

        return rendered(explanation_screen(self))

    __repr__ = __str__


class _Parts:
    """Times each part, and tells which one is at hand."""

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self.tell = tell
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, make: Callable[[], T]) -> T:
        if self.tell is not None:
            self.tell(name)
        began_s = time.monotonic()
        made = make()
        self.seconds[name] = round(time.monotonic() - began_s, 3)
        return made


def explain(
    graph: TrainingGraph,
    result: Result,
    *,
    why_of: str | Iterable[str] = (),
    each_s: float = EACH_S,
    tell: Callable[[str], None] | None = None,
) -> Explanation:
    """Why a plan is as it is: its peak, the least budget, the worth of memory, what was forced.

    Parameters
    ----------
    result : with a schedule of `graph`. Further solves go by its solver, options and pins.
    why_of : globs over modules, values, ops and lines; for up to three forward ops, why they are
        kept or recomputed, by a solve each in which that is turned round.
    each_s : seconds that each further solve may take.
    tell : called with the name of each part before it begins.

    Raises
    ------
    BudgetError : nothing fits, so there is no plan to explain. GlobError : a glob matches nothing.
    """
    if result.schedule is None:
        raise BudgetError(infeasible_text(result))
    globs = (why_of,) if isinstance(why_of, str) else tuple(why_of)
    parts, schedule = _Parts(tell), schedule_of(result)
    asked = asked_again(schedule)
    answers = parts.timed("why", lambda: why(graph, result, globs, each_s=each_s))
    price = parts.timed("price", lambda: price_of_gib(graph, result, time_limit_s=each_s, **asked))
    least = parts.timed("least", lambda: least_budget(graph, asked, each_s))
    rules = parts.timed("rules", lambda: simple_rules(graph, result))
    greedy = parts.timed(
        "greedy", lambda: against_greedy(graph, result.budget_bytes, each_s=each_s)
    )
    return Explanation(
        model=graph.name,
        device=graph.device,
        prices=graph.prices,
        status=result.status,
        solver=result.solver,
        budget_bytes=result.budget_bytes,
        peak_bytes=result.peak_bytes,
        time_us=result.time_us,
        overhead=result.overhead,
        lower_bound_us=result.lower_bound_us,
        gap=result.gap,
        unmodified_bytes=unmodified(graph).peak_bytes,
        base_us=graph.time_us,
        at_peak=peak_holders(graph, schedule),
        least=least,
        price=price,
        forced=forced(graph, schedule),
        rules=rules,
        greedy=greedy,
        why=answers,
        seconds=parts.seconds,
    )
