"""The answer of `explain`: why a plan is as it is, and its screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from remat.formats import NO_BOUND, bytes_text, gap_text, percent_text
from remat.levers.worth import Lever
from remat.questions.against_greedy import AgainstGreedy
from remat.questions.least_budget import LeastBudget
from remat.questions.paragraphs import (
    forced_text,
    greedy_text,
    least_text,
    peak_text,
    price_said,
    rule_text,
    why_text,
)
from remat.questions.pieces import InPieces
from remat.questions.simple_rules import Rule
from remat.questions.sweep import price_json
from remat.questions.tables import holders_table, plain_table, rendered
from remat.questions.why import Why
from remat.schedules.simulate import bound_of
from remat.schedules.verdicts.forced import Forced
from remat.schedules.verdicts.peak_holders import PeakHolders
from remat.solver.budgets.price import GIB, GibPrice


class Explanation(msgspec.Struct, frozen=True):
    """Why a plan is as it is.

    Attributes
    ----------
    status, solver, budget_bytes, peak_bytes, time_us, overhead, lower_bound_us, gap : of the plan.
    unmodified_bytes, base_us : peak of the unmodified step, and its time: every op once.
    at_peak : who holds the memory at the peak. least : what sets the least feasible budget.
    price : what `price.step_bytes` more would save, and as many less would cost; the step is a GiB,
        or 5 % of the peak where that is less. forced : what left no choice, and for how many ops.
    rules : simple rules, those that fit first. greedy : `cut` beside greedy solvers.
    why : answers to what was asked about single values. seconds : of each part.
    pieces : what runs in pieces. levers : what each lever brings. moves : whether it copies values
        to the host and back.
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
    gap: float | None
    unmodified_bytes: int
    base_us: float
    at_peak: PeakHolders
    least: LeastBudget
    price: GibPrice
    forced: tuple[Forced, ...]
    rules: tuple[Rule, ...]
    greedy: AgainstGreedy
    why: tuple[Why, ...]
    seconds: dict[str, float]
    pieces: tuple[InPieces, ...] = ()
    levers: tuple[Lever, ...] = ()
    moves: bool = False

    @property
    def is_whole_gib(self) -> bool:
        """Whether the price is that of a GiB, and not of 5 % of the peak."""
        return self.price.step_bytes == GIB

    @property
    def is_recomputing(self) -> bool:
        """Whether the plan takes longer than every op once: it computes again, or waits."""
        return self.time_us > self.base_us

    @property
    def bound_overhead(self) -> float | None:
        """No schedule's overhead is proved to be below this; None where nothing is proved."""
        return bound_of(self.lower_bound_us, self.base_us)

    @property
    def simple(self) -> Rule | None:
        """The fastest rule that fits and is within 1 % of the plan, if something is recomputed."""
        if not self.is_recomputing:
            return None
        return next((rule for rule in self.rules if rule.is_close), None)

    @property
    def nearest(self) -> Rule | None:
        """The fastest rule that fits."""
        return next((rule for rule in self.rules if rule.fits), None)

    def as_json(self) -> dict[str, Any]:
        """Plain bytes, microseconds and names, for `--json`."""
        said = {**msgspec.to_builtins(self), "price": price_json(self.price)}
        simple = msgspec.to_builtins(self.simple)
        return {**said, "is_whole_gib": self.is_whole_gib, "simple": simple}

    def __str__(self) -> str:
        return rendered(explanation_screen(self))

    __repr__ = __str__


def explanation_screen(found: Explanation) -> RenderableType:
    """All that was asked, the plan's figures first."""
    parts: list[RenderableType] = [_plan_line(found), Text(), peak_text(found.at_peak)]
    parts += [holders_table(found.at_peak), Text()]
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, said in sentences(found):
        grid.add_row(Text(name, style="bold"), Text(said))
    parts.append(grid)
    if found.rules and found.is_recomputing:
        parts += [Text(), rules_table(found)]
    return Group(*parts)


def _plan_line(found: Explanation) -> Text:
    """Peak, budget, overhead and bound of the plan."""
    proved = ", proved" if found.status == "optimal" else ""
    bound = NO_BOUND
    if found.bound_overhead is not None:
        least = percent_text(found.bound_overhead)
        bound = f"no less than {least} ({gap_text(found.gap)}{proved})"
    return Text.assemble(
        (found.model, "bold"),
        f": peak {bytes_text(found.peak_bytes)} of {bytes_text(found.budget_bytes)} "
        f"(unmodified {bytes_text(found.unmodified_bytes)}), "
        f"{percent_text(found.overhead)} overhead, {bound}, by {found.solver}",
    )


def sentences(found: Explanation) -> Iterator[tuple[str, str]]:
    """Each question in one word, with its answer."""
    yield "least", least_text(found.least, found.solver)
    yield "memory", price_said(found.price, is_whole_gib=found.is_whole_gib)
    for one in found.pieces:
        yield "pieces", str(one)
    for i, one in enumerate(found.levers):
        yield "levers" if i == 0 else "", str(one)
    for i, one in enumerate(found.forced):
        yield "forced" if i == 0 else "", forced_text(one)
    if not found.forced:
        yield "forced", "nothing: no pin, and no op that must not run twice"
    if found.is_recomputing:
        yield "rule", rule_text(found.simple, found.nearest)
    elif found.moves:
        yield "rule", "nothing is recomputed: what does not fit goes to the host and back"
    else:
        yield "rule", "nothing is recomputed: the step fits as it is, and needs no rule"
    yield "cut", greedy_text(found.greedy)
    for one in found.why:
        yield "why", why_text(one, found.budget_bytes)
    solves = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.seconds.items())
    yield "took", solves


def rules_table(found: Explanation) -> Table:
    """Each rule: what it takes, and how much slower the step is than the plan's."""
    table = plain_table("rule", "peak", "overhead", "slower")
    for rule in found.rules:
        table.add_row(Text(rule.says), *_rule_figures(rule))
    return table


def _rule_figures(rule: Rule) -> tuple[str, str, str]:
    if not rule.fits:
        peak = bytes_text(rule.peak_bytes) if rule.peak_bytes else "-"
        return peak, "does not fit", "-"
    return bytes_text(rule.peak_bytes), percent_text(rule.overhead), percent_text(rule.slower)
