"""Why a plan is as it is, and how that is shown.

Every figure is one of `simulate` or of a real solve made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from remat.analysis.budget_sweep import price_json, price_text
from remat.analysis.levers import LeverEffect, levers_of
from remat.analysis.plan_figures import InChunks, chunks_of
from remat.analysis.plan_report import (
    holders_table,
    short_line,
    short_path,
    short_target,
    tensor_text,
)
from remat.analysis.why import (
    AgainstGreedy,
    LeastBudget,
    Rule,
    Turned,
    Why,
    against_greedy,
    least_budget,
    required_schedule,
    simple_rules,
    solve_arguments,
    why,
)
from remat.budgets import unmodified
from remat.formats import (
    GIB,
    KIB,
    NO_BOUND,
    Answer,
    bytes_text,
    fine_time_text,
    gap_text,
    percent_text,
    plain_table,
    rows_table,
)
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.simulate import bound_of
from remat.schedules.value_report.peak_holders import (
    ForcedOps,
    PeakHolders,
    forced_ops,
    peak_holders,
)
from remat.schedules.value_report.rows import FoldedRow
from remat.solved import infeasible_text
from remat.solver import TABLE, solve_within
from remat.solver.budgets.front import GibPrice
from remat.solver.budgets.sweep import PINS, price_of_gib
from remat.solver.search import Clock, is_interrupted, one_job

FURTHER_SOLVE_S = 10.0  # seconds that each further solve may take
_T = TypeVar("_T")
_SAME = 1e-4  # two steps whose times differ by less than this part are said to be equally long
_SHOWN = 3  # most values that a sentence names


def _place_of_peak(held: PeakHolders) -> str:
    return " ".join(part for part in (held.module, short_line(held.source)) if part) or held.op


def _least_text(least: LeastBudget, solver: str) -> str:
    held = least.at_peak
    asked = solver if solver in TABLE else "auto"  # as `solve_arguments` has it
    text = f"{bytes_text(least.least_bytes)} is the lowest peak that {asked} knows"
    text += f"; {short_target(held.target)} of {_place_of_peak(held)} sets it, in {held.phase}"
    biggest = ", ".join(
        f"{short_target(row.first.target)} of {short_path(row.module) or 'the model'} "
        f"{bytes_text(row.size_bytes)}"
        for row in held.values[:_SHOWN]
    )
    if biggest:
        text += f", with {biggest} live"
    if least.floor is not None:
        place = least.floor.module or least.floor.name
        text += (
            f". Below {bytes_text(least.floor.size_bytes)}, set by {least.floor.name} of {place}, "
            "outputs of the step would have to be computed again"
        )
    if least.proved_bytes:
        text += f". No schedule in captured order needs less than {bytes_text(least.proved_bytes)}"
    return text


def _forced_text(one: ForcedOps) -> str:
    ops = f"{one.ops} op" + ("s" if one.ops != 1 else "")
    # Less is not worth a word.
    held = f", {bytes_text(one.kept_bytes)} kept" if one.kept_bytes >= KIB else ""
    where = f" ({', '.join(map(short_path, one.places))})" if one.places else ""
    return f"{one.reason}: {ops}{held}{where}" if one.ops else one.reason


def _rule_text(simple: Rule | None, nearest: Rule | None) -> str:
    """Whether a simple rule would do as well; `nearest` is the fastest that fits."""
    if simple is not None:
        return (
            f"{simple.says}: within 1 % of this plan, {percent_text(simple.overhead)} overhead at "
            f"a peak of {bytes_text(simple.peak_bytes)}. Take that: it is simpler"
        )
    if nearest is None:
        return "no simple rule fits this budget"
    return (
        f"none is within 1 % of this plan; the nearest that fits ({nearest.says}) is "
        f"{percent_text(nearest.slower)} slower"
    )


def _greedy_text(greedy: AgainstGreedy) -> str:
    best = greedy.best
    if not greedy.cut.fits:
        others = f"{best.solver} did" if best.fits else "no greedy solver did"
        return f"found nothing at this budget; {others}"
    ours = f"cut {percent_text(greedy.cut.overhead)}"
    if greedy.slower is None:
        return f"{ours}; none of {', '.join(one.solver for one in greedy.tried)} finds a plan"
    text = f"{ours}, best greedy ({best.solver}) {percent_text(best.overhead)}"
    if greedy.slower < _SAME:
        return f"{text}: cut is not better here"
    dearer = [
        f"{short_path(place.module) or 'the model'} {fine_time_text(place.extra_us)}"
        for place in greedy.dearer
    ]
    where = f"; greedy recomputes more in {', '.join(dearer)}" if dearer else ""
    return f"{text}: cut's step is {percent_text(greedy.slower)} shorter{where}"


def why_text(one: Why, budget_bytes: int) -> str:
    row = one.row
    place = " ".join(part for part in (row.module, short_line(row.source)) if part)
    tensor = f"{row.dtype} {list(row.shape)}" if row.dtype else ""
    facts = (
        row.value, f"{short_target(row.target)} of {place or 'the model'}", tensor,
        bytes_text(row.size_bytes),
    )  # fmt: skip
    head = ", ".join(fact for fact in facts if fact) + ": "
    if row.verdict == "offload":  # first: a value that is not made again may still be copied
        return head + _offloaded_text(one, budget_bytes)
    if one.forced:  # no solve was made for it
        return f"{head}{row.verdict_text}; there is no choice: {one.forced}"
    if row.verdict == "free":
        return f"{head}not kept, and never recomputed: nothing in backward reads it"
    if row.verdict == "recompute" or one.runs_us:
        again, stayed = fine_time_text(one.runs_us), _staying_text(one, budget_bytes)
        return f"{head}{row.verdict_text}, {again} a step; {stayed}. {_turned_text(one.turned)}"
    cost = fine_time_text(row.cost_us)
    return f"{head}kept; one run of its op takes {cost}. {_turned_text(one.turned)}"


def _offloaded_text(one: Why, budget_bytes: int) -> str:
    again = f", and is recomputed, {fine_time_text(one.runs_us)} a step" if one.runs_us else ""
    other = f"It must not run again: {one.forced}" if one.forced else _turned_text(one.turned)
    copying, running = fine_time_text(one.copying_us), fine_time_text(one.row.cost_us)
    return (
        f"goes to the host{again}, since copying costs {copying} a step here and recomputing "
        f"{running}; {_staying_text(one, budget_bytes)}. {other}"
    )


def _staying_text(one: Why, budget_bytes: int) -> str:
    peak, over_bytes = bytes_text(one.staying_bytes), one.staying_bytes - budget_bytes
    over = f", {bytes_text(over_bytes)} over the budget" if over_bytes > 0 else ", which fits"
    return f"if it stayed and nothing else changed, the peak would be {peak}{over}"


def _turned_text(turned: Turned | None) -> str:
    if turned is None:
        return ""
    doing = "kept" if turned.pin == "keep" else "recomputed"
    if not turned.fits:
        return f"Solved again with it {doing}: found no plan that fits"
    if turned.extra_us > 0:
        cost = f"the step takes {fine_time_text(turned.extra_us)} more"
    elif turned.extra_us < 0:
        less = fine_time_text(-turned.extra_us)
        cost = f"the step takes {less} less, so this plan is not the best"
    else:
        cost = "the step takes as long"
    text = f"Solved again with it {doing}: {cost}"
    if turned.dropped:
        text += f"; recomputed then, but not now: {_named(turned.dropped)}"
    if turned.spared:
        text += f"; recomputed now, but not then: {_named(turned.spared)}"
    return text


def _named(rows: tuple[FoldedRow, ...]) -> str:
    said = [
        f"{short_target(row.first.target)} of {short_path(row.module) or 'the model'}"
        + (f" x{row.count}" if row.count > 1 else "")
        + f" ({tensor_text(row)}, {bytes_text(row.size_bytes)})"
        for row in rows[:_SHOWN]
    ]
    more = len(rows) - _SHOWN
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")


class Explanation(Answer, frozen=True):
    model: str
    device: str
    cost_origin: str = msgspec.field(name="prices")  # the key of older releases
    status: str  # this and the next seven are of the plan
    solver: str
    budget_bytes: int
    peak_bytes: int
    time_us: float
    overhead: float
    lower_bound_us: float
    gap: float | None
    unmodified_bytes: int  # peak of the unmodified step
    base_us: float  # every op once
    at_peak: PeakHolders  # who holds the memory at the peak
    least: LeastBudget  # what sets the least feasible budget
    price: GibPrice  # of a step of memory: a GiB, or 5 % of the peak if less
    forced: tuple[ForcedOps, ...]  # what left no choice, and for how many ops
    rules: tuple[Rule, ...]  # those that fit first
    greedy: AgainstGreedy  # `cut` beside greedy solvers
    why: tuple[Why, ...]  # answers about single values
    seconds: dict[str, float]  # of each part
    chunks: tuple[InChunks, ...] = msgspec.field(default=(), name="pieces")
    levers: tuple[LeverEffect, ...] = ()
    moves: bool = False  # whether values are copied to the host and back

    @property
    def is_whole_gib(self) -> bool:
        return self.price.step_bytes == GIB

    @property
    def is_recomputing(self) -> bool:
        """Whether the plan computes again, or waits."""
        return self.time_us > self.base_us

    @property
    def bound_overhead(self) -> float | None:
        """No schedule's overhead is proved to be below this; None where nothing is proved."""
        return bound_of(self.lower_bound_us, self.base_us)

    @property
    def simple(self) -> Rule | None:
        """The fastest rule that fits and is within 1 % of the plan, if something is recomputed."""
        if not self.is_recomputing:  # a step that computes nothing again needs no rule
            return None
        return next((rule for rule in self.rules if rule.is_close), None)

    @property
    def nearest(self) -> Rule | None:
        return next((rule for rule in self.rules if rule.fits), None)

    def as_json(self) -> dict[str, Any]:
        said = {**super().as_json(), "price": price_json(self.price)}
        simple = msgspec.to_builtins(self.simple)
        return {**said, "is_whole_gib": self.is_whole_gib, "simple": simple}

    def screen(self, width: int = 100) -> RenderableType:
        rows = rows_table((Text(name, style="bold"), said) for name, said in sentences(self))
        held, rules = self.at_peak, self.rules and self.is_recomputing
        again = f", run {held.run} of it" if held.run > 1 else ""
        reached = Text(
            f"The peak is reached in {held.phase or 'nothing'}, when {short_target(held.target)} "
            f"of {_place_of_peak(held)} runs{again}."
        )
        parts = _plan_line(self), Text(), reached, holders_table(held), Text(), rows
        return Group(*parts, *((Text(), _rules_table(self)) if rules else ()))


def _rules_table(found: Explanation) -> Table:
    table = plain_table("rule", "peak", "overhead", "slower")
    for rule in found.rules:
        peak = bytes_text(rule.peak_bytes) if rule.peak_bytes or rule.fits else "-"
        figures = percent_text(rule.overhead), percent_text(rule.slower)
        table.add_row(Text(rule.says), peak, *(figures if rule.fits else ("does not fit", "-")))
    return table


def _plan_line(found: Explanation) -> Text:
    proved = ", proved" if found.status == "optimal" else ""
    bound = NO_BOUND
    if found.bound_overhead is not None:
        least = percent_text(found.bound_overhead)
        bound = f"no less than {least} ({gap_text(found.gap)}{proved})"
    return Text.assemble(
        (found.model, "bold"),
        f": peak {bytes_text(found.peak_bytes)} of {bytes_text(found.budget_bytes)} "
        f"(unmodified {bytes_text(found.unmodified_bytes)}), "
        f"{percent_text(found.overhead)} overhead, {bound}, by {found.solver or 'hand'}",
    )


def sentences(found: Explanation) -> Iterator[tuple[str, str]]:
    yield "least", _least_text(found.least, found.solver)
    yield "memory", price_text(found.price)
    for one in found.chunks:
        yield "chunks", str(one)
    for i, one in enumerate(found.levers):
        yield "levers" if i == 0 else "", str(one)  # named once, at its first line
    for i, one in enumerate(found.forced):
        yield "forced" if i == 0 else "", _forced_text(one)
    if not found.forced:
        yield "forced", "nothing: there is no pin, and no op that must run only once"
    if found.is_recomputing:
        yield "rule", _rule_text(found.simple, found.nearest)
    elif found.moves:
        yield "rule", "nothing is recomputed: what does not fit is offloaded to the host"
    else:
        yield "rule", "nothing is recomputed: the step fits as it is"
    yield "cut", _greedy_text(found.greedy)
    for one in found.why:
        yield "why", why_text(one, found.budget_bytes)
    yield "took", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.seconds.items())


# Further solves, each of which takes a while, make the answer.


def explain(
    graph: TrainingGraph, result: Result, *, why_of: str | Iterable[str] = (),
    each_s: float = FURTHER_SOLVE_S, progress: Callable[[str], None] | None = None,
) -> Explanation:  # fmt: skip
    """Why a plan is as it is: who holds its peak, the least budget, what memory is worth."""
    if result.schedule is None:
        raise BudgetError(infeasible_text(result))
    result = result.of_tensors  # further solves are for these
    globs = (why_of,) if isinstance(why_of, str) else tuple(why_of)
    schedule, seconds = required_schedule(result), dict[str, float]()
    asked, budget_bytes = solve_arguments(schedule), result.budget_bytes

    def timed(name: str, make: Callable[[], _T]) -> _T:
        if progress is not None:
            progress(name)
        clock = Clock()
        made = make()
        if is_interrupted():
            raise KeyboardInterrupt  # parts of an explanation would mislead
        seconds[name] = round(clock.elapsed_s, 3)
        return made

    with one_job():
        # First, as a glob that matches nothing is refused before the long solves.
        answers = timed("why", lambda: why(graph, result, globs, each_s=each_s))
        price = timed("price", lambda: price_of_gib(graph, result, time_limit_s=each_s, **asked))
        least = timed("least", lambda: least_budget(graph, schedule, asked, each_s))
        rules = timed("rules", lambda: simple_rules(graph, result))
        levers = timed("levers", lambda: _levers(graph, result, each_s))
        greedy = timed("greedy", lambda: against_greedy(graph, budget_bytes, each_s=each_s))
    return Explanation(
        model=graph.name, device=graph.device, cost_origin=graph.cost_origin,
        status=result.status, solver=result.solver, budget_bytes=budget_bytes,
        peak_bytes=result.peak_bytes, time_us=result.time_us, overhead=result.overhead,
        lower_bound_us=result.lower_bound_us, gap=result.gap,
        unmodified_bytes=unmodified(graph).peak_bytes, base_us=graph.time_us,
        at_peak=peak_holders(graph, schedule), least=least, price=price,
        forced=forced_ops(graph, schedule), rules=rules, greedy=greedy, why=answers,
        seconds=seconds, chunks=chunks_of(graph, schedule), levers=levers, moves=schedule.moves,
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
