"""Why a plan keeps a value or computes it again: by the simulator, and by solves with pins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

import remat.solver as solvers
from remat.analysis.plan_figures import SAME_SPEED, candidates, fastest_nth
from remat.graph_capture.eager_step import with_eager_sizes
from remat.graph_capture.errors import option
from remat.graph_capture.graph import Op, TrainingGraph
from remat.schedules.derived import graph_of_schedule
from remat.schedules.outcome import Holding, Result
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.schedules.value_report.globs import Pins, why_not_again
from remat.schedules.value_report.peak_holders import (
    PeakHolders,
    counterfactual_schedule,
    peak_holders,
)
from remat.schedules.value_report.rows import (
    FoldedRow,
    Indices,
    ValueRow,
    boxes,
    fold_rows,
    matching,
    split_indices,
    value_rows,
    written,
)
from remat.solver import TABLE, option_names, solve_within
from remat.solver.budgets.sweep import PINS, least_peak
from remat.solver.reductions.pins import PinnedOps, freed_graph
from remat.solver.reductions.reduction import Question, fold
from remat.solver.reductions.updates import UpdatePlacement

_MOST = 3  # Most ops that are asked about, those of the largest values first. Each takes a solve.


class Turned(msgspec.Struct, frozen=True):
    pin: str  # ``keep`` or ``recompute``
    fits: bool
    extra_us: float  # less the plan's time; below 0 where the plan was not the best
    overhead: float
    dropped: tuple[FoldedRow, ...]  # other values made again there alone, largest first
    spared: tuple[FoldedRow, ...]  # and in the plan alone


class Why(msgspec.Struct, frozen=True):
    row: ValueRow  # its largest value
    runs_us: float  # of its further runs
    forced: str  # why there is no choice; empty where there is one
    staying_bytes: int  # the peak if its values stayed and nothing else changed; 0 where they do
    turned: Turned | None  # None where the op is forced or nothing reads its values
    copying_us: float = 0.0  # what the step takes less without its copies to the host and back


def why(
    graph: TrainingGraph, result: Result, globs: Iterable[str], *, each_s: float = 10.0
) -> tuple[Why, ...]:
    """Answers for the forward ops that the globs name, at most `_MOST`, largest values first."""
    schedule, asked = required_schedule(result), tuple(globs)
    if not asked:
        return ()
    asked_pins = _pins_of(schedule)
    graph = freed_graph(graph_of_schedule(graph, schedule), asked_pins["recompute"])
    pins = Pins.of(graph, **asked_pins)
    rows = [row for row in value_rows(graph, schedule) if row.phase == "forward"]
    largest: dict[str, ValueRow] = {}
    # What backward does not read is freed by any plan, which explains nothing: that comes last.
    for row in sorted(matching(rows, asked), key=lambda r: (r.verdict == "free", -r.size_bytes)):
        largest.setdefault(row.op, row)  # an op is pinned as a whole, so it is asked about once
    return tuple(_why(graph, result, row, pins, each_s) for row in list(largest.values())[:_MOST])


def _why(graph: TrainingGraph, result: Result, row: ValueRow, pins: Pins, each_s: float) -> Why:
    schedule = required_schedule(result)
    op = graph.ops[graph.op_index[row.op]]
    runs = schedule.computations()[op.name]
    forced = _forced(graph, op, runs, pins)
    is_moved = row.verdict == "offload"
    leaves = runs > 1 or is_moved
    stayed = simulate(graph, counterfactual_schedule(graph, schedule, op.name)) if leaves else None
    has_choice = not forced and (leaves or row.verdict == "keep")
    return Why(
        row=row, runs_us=(runs - 1) * op.cost_us, forced=forced,
        staying_bytes=stayed.peak_bytes if stayed else 0,
        turned=_turned(graph, result, op, pins, each_s) if has_choice else None,
        copying_us=result.time_us - stayed.time_us if stayed and is_moved else 0.0,
    )  # fmt: skip


def _forced(graph: TrainingGraph, op: Op, runs: int, pins: Pins) -> str:
    if runs > 1:
        pin = pins.again.get(op.name)  # an op that does run again is forced by nothing but a pin
        return f"pinned by {option('recompute', pin)}" if pin else ""
    if op.name in pins.kept:
        return f"pinned by {option('keep', pins.kept[op.name])}"
    return why_not_again(op, set(graph.outputs))


def _turned(graph: TrainingGraph, result: Result, op: Op, pins: Pins, each_s: float) -> Turned:
    schedule = required_schedule(result)
    is_recomputed = schedule.computations()[op.name] > 1
    kept, again = ({op.name: op.name}, {}) if is_recomputed else ({}, {op.name: op.name})
    turned = Pins(pins.kept | kept, pins.again | again)
    # Globs of pins are in `pins` already, by op.
    asked = {name: given for name, given in solve_arguments(schedule).items() if name not in PINS}
    question = Question(graph, result.budget_bytes, asked.pop("solver"), each_s, options=asked)
    # No solver alone knows that nothing reads a parameter after its update.
    found = fold(question, (UpdatePlacement(), PinnedOps(turned)))
    pin = "keep" if is_recomputed else "recompute"
    if found.schedule is None:
        return Turned(pin, False, 0.0, 0.0, (), ())
    old, new = (
        {row.value: row for row in value_rows(graph, one) if row.phase == "forward"}
        for one in (schedule, found.schedule)
    )
    for name in op.outputs:
        del old[name], new[name]
    dropped = _largest([new[name] for name in new if new[name].again > old[name].again])
    spared = _largest([old[name] for name in old if old[name].again > new[name].again])
    return Turned(pin, True, found.time_us - result.time_us, found.overhead, dropped, spared)


def _largest(rows: Sequence[ValueRow]) -> tuple[FoldedRow, ...]:
    return tuple(sorted(fold_rows(rows), key=lambda row: (-row.size_bytes, -row.cost_us)))


_GREEDY = ("msps", "dtr", "largest", "chen_greedy")  # three that evict, one by segments
_PLACES = 3  # most modules that are named


class _Tried(msgspec.Struct, frozen=True):
    solver: str
    fits: bool
    overhead: float
    wall_s: float


class _Elsewhere(msgspec.Struct, frozen=True):
    module: str
    extra_us: float  # of recomputing by the greedy plan, beyond that of `cut`


class AgainstGreedy(msgspec.Struct, frozen=True):
    cut: _Tried
    tried: tuple[_Tried, ...]  # the best first
    slower: float | None  # time of the best over that of `cut`, minus one; None if either failed
    places: tuple[_Elsewhere, ...]  # where the best greedy plan spends most in excess

    @property
    def best(self) -> _Tried:
        return self.tried[0]

    @property
    def dearer(self) -> tuple[_Elsewhere, ...]:
        return tuple(place for place in self.places if place.extra_us > 0)


def against_greedy(
    graph: TrainingGraph, budget_bytes: int, *, each_s: float = 10.0
) -> AgainstGreedy:
    """`cut` has `each_s` seconds, the greedy solvers of `_GREEDY` as many together."""
    cut = solvers.solve_within(graph, budget_bytes, "cut", time_limit_s=each_s)
    found: list[Result] = []
    for name in _GREEDY:
        left_s = each_s - sum(one.wall_s for one in found)
        if left_s > 0 or not found:  # the first in any case, so that one can be compared
            found.append(solvers.solve_within(graph, budget_bytes, name, time_limit_s=left_s))
    found.sort(key=lambda one: (one.schedule is None, one.time_us))
    best = found[0]
    slower, places = None, tuple[_Elsewhere, ...]()
    if cut.schedule is not None and best.schedule is not None:
        slower = best.time_us / cut.time_us - 1
        places = _places(graph, cut.schedule, best.schedule)
    return AgainstGreedy(_tried(cut), tuple(map(_tried, found)), slower, places)


def _tried(result: Result) -> _Tried:
    return _Tried(result.solver, result.schedule is not None, result.overhead, result.wall_s)


def _places(graph: TrainingGraph, cut: Schedule, greedy: Schedule) -> tuple[_Elsewhere, ...]:
    ours, theirs = _spent(graph, cut), _spent(graph, greedy)
    extra_us = {name: theirs[name] - ours[name] for name in ours}
    found = [_Elsewhere(name, us) for name, us in extra_us.items() if us]
    return tuple(sorted(found, key=lambda one: -one.extra_us)[:_PLACES])


def _spent(graph: TrainingGraph, schedule: Schedule) -> dict[str, float]:
    """Time of recomputations by module; modules whose paths differ in indices alone are one."""
    runs = schedule.computations()
    places: dict[str, set[Indices]] = {}
    spent_us: dict[str, float] = {}
    for op in graph.ops:
        pattern, indices = split_indices(op.module)
        places.setdefault(pattern, set()).add(indices)
        spent_us[pattern] = spent_us.get(pattern, 0.0) + (runs[op.name] - 1) * op.cost_us
    boxes_of = {one: [written(one, box) for box in boxes(places[one])] for one in spent_us}
    return {", ".join(boxes_of[pattern]): us for pattern, us in spent_us.items()}


_RULES = {  # solvers of the table that carry out a rule, and what the rule says
    "full": "checkpoint every layer",
    "selective": "recompute the core of each attention",
    "keep_attention_output": "checkpoint every layer, keeping attention's output",
    "norms_and_activations": "recompute normalisations and activations",
}


class Rule(msgspec.Struct, frozen=True):
    name: str  # of the solver
    says: str  # what to do
    fits: bool
    peak_bytes: int  # where it does not fit, the lowest known; 0 where that is not known
    overhead: float
    slower: float  # than the plan, as a fraction of its time; below 0 where it is faster

    @property
    def is_close(self) -> bool:
        return self.fits and self.slower <= SAME_SPEED


def simple_rules(graph: TrainingGraph, result: Result) -> tuple[Rule, ...]:
    """Each rule at the budget of a result that has a schedule: those that fit first, by time."""
    rules = [_by_solver(graph, result, name) for name in _RULES]
    rules += filter(None, [_every_nth(graph, result)])
    return tuple(sorted(rules, key=lambda rule: (not rule.fits, rule.slower, rule.peak_bytes)))


def _by_solver(graph: TrainingGraph, result: Result, name: str) -> Rule:
    # Who follows a rule runs eager's ops, with masks as eager has them.
    found = solvers.solve_within(with_eager_sizes(graph), result.budget_bytes, name)
    slower = found.time_us / result.time_us - 1 if found.schedule and result.time_us else 0.0
    fits = found.schedule is not None
    return Rule(name, _RULES[name], fits, found.peak_bytes, found.overhead, slower)


def _every_nth(graph: TrainingGraph, result: Result) -> Rule | None:
    """The fastest n that fits, else the one of the lowest peak; None where no layer repeats."""
    found = list(candidates(graph, result.time_us))
    if not found:
        return None
    best = fastest_nth(found, result.budget_bytes)
    shown = best or min(found, key=lambda one: one.peak_bytes)
    says, figures = f"checkpoint {shown.which} of {shown.where}", (shown.overhead, shown.slower)
    return Rule("every_n_layers", says, best is not None, shown.peak_bytes, *figures)


def _pins_of(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    texts = {name: str(schedule.options.get(name, "")) for name in PINS}
    return {name: tuple(filter(None, text.split(", "))) for name, text in texts.items()}


def solve_arguments(schedule: Schedule) -> dict[str, Any]:
    # One of the user's own, or a schedule by hand, cannot be asked again.
    name = schedule.solver if schedule.solver in TABLE else "auto"
    known = option_names(name)
    options = {key: value for key, value in schedule.options.items() if key in known}
    return {"solver": name, **options, **_pins_of(schedule)}


def required_schedule(result: Result) -> Schedule:
    assert result.schedule is not None, "checked earlier: nothing fits"
    return result.schedule


class LeastBudget(msgspec.Struct, frozen=True):
    least_bytes: int
    at_peak: PeakHolders  # the op that runs then sets it
    floor: Holding | None  # below it outputs would be computed twice; None if not looked for
    proved_bytes: int  # a bound on the peak of any schedule; 0 where none was proved


def least_budget(
    graph: TrainingGraph, plan: Schedule, asked: Mapping[str, Any], time_limit_s: float
) -> LeastBudget:
    """The least peak that the solver knows for a graph, or that of `plan` if it is lower."""
    # Nothing fits into 0 bytes, so the result of that solve names the least budget.
    named = solve_within(graph, 0, time_limit_s=time_limit_s, **asked)
    schedule: Schedule | None = named.least_schedule
    if schedule is None or schedule.graph_hash != graph.hash:  # pins add clones: another graph
        schedule = least_peak(graph, time_limit_s, **asked).schedule
    held = peak_holders(graph, schedule) if schedule is not None else None
    of_plan = peak_holders(graph, plan)
    if held is None or of_plan.peak_bytes < held.peak_bytes:  # a plan with copies can be below
        held = of_plan
    return LeastBudget(held.peak_bytes, held, named.floor, named.least_bound_bytes)
