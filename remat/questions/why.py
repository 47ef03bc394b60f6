"""Why a plan keeps a value or computes it again.

No reason is made up. Only two things are said, and both can be checked: the peak that the
simulator gives the same schedule with the value left in place, and what a real solve finds with
the op pinned the other way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from remat.graph_capture.errors import option
from remat.graph_capture.graph import Op, TrainingGraph
from remat.questions.solved_options import PINS, asked_again, pins_of, planned
from remat.schedules.as_planned import as_planned
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.schedules.verdicts.folding import FoldedRow, folded
from remat.schedules.verdicts.rows import ValueRow, matching, value_rows
from remat.schedules.verdicts.staying import staying
from remat.solver.pins.globs import Pins, why_not_again
from remat.solver.pins.pinned import solve_for_pins
from remat.solver.result import Result

MOST = 3
"""Most ops that are asked about, those of the largest values first. Each takes a solve."""


class Turned(msgspec.Struct, frozen=True):
    """A real solve at the same budget, in which an op is pinned the other way.

    Attributes
    ----------
    pin : ``keep`` or ``recompute``. fits : whether a schedule was found. extra_us : its time less
        the plan's; below 0 where the plan was not the best. overhead : its own.
    dropped : other values that are made again in that schedule and not in the plan, layers
        folded, largest first. spared : the other way round.
    """

    pin: str
    fits: bool
    extra_us: float
    overhead: float
    dropped: tuple[FoldedRow, ...]
    spared: tuple[FoldedRow, ...]


class Why(msgspec.Struct, frozen=True):
    """One forward op, what the plan does with its values, and what else could be done.

    Attributes
    ----------
    row : its largest value.
    runs_us : time of its further runs. forced : why there is no choice; empty where there is one.
    staying_bytes : the peak if its values stayed and nothing else changed; 0 where they do.
    copying_us : what the step then takes less, where they are copied to the host and back.
    turned : the solve with the pin; None where the op is forced or nothing reads its values.
    """

    row: ValueRow
    runs_us: float
    forced: str
    staying_bytes: int
    turned: Turned | None
    copying_us: float = 0.0


def why(
    graph: TrainingGraph, result: Result, globs: Iterable[str], *, each_s: float = 10.0
) -> tuple[Why, ...]:
    """Answers for the forward ops that the globs name, at most `MOST`, largest values first.

    Parameters
    ----------
    each_s : seconds for each solve, of which there is one for each op.

    Raises
    ------
    GlobError : a glob matches nothing, or nothing in forward.
    """
    schedule, asked = planned(result), tuple(globs)
    if not asked:
        return ()
    graph = as_planned(graph, schedule)
    pins = Pins.of(graph, **pins_of(schedule))
    rows = [row for row in value_rows(graph, schedule) if row.phase == "forward"]
    largest: dict[str, ValueRow] = {}
    for row in sorted(matching(rows, asked), key=_most_telling):
        largest.setdefault(row.op, row)
    return tuple(_why(graph, result, row, pins, each_s) for row in list(largest.values())[:MOST])


def _most_telling(row: ValueRow) -> tuple[bool, int]:
    """Sorts values that backward reads before the others, and large ones before small ones."""
    return row.verdict == "free", -row.size_bytes


def _why(graph: TrainingGraph, result: Result, row: ValueRow, pins: Pins, each_s: float) -> Why:
    schedule = planned(result)
    op = graph.ops[graph.op_index[row.op]]
    runs = schedule.computations()[op.name]
    forced = _forced(graph, op, runs, pins)
    is_moved = row.verdict == "offload"
    leaves = runs > 1 or is_moved
    stayed = simulate(graph, staying(graph, schedule, op.name)) if leaves else None
    has_choice = not forced and (leaves or row.verdict == "keep")
    return Why(
        row=row,
        runs_us=(runs - 1) * op.cost_us,
        forced=forced,
        staying_bytes=stayed.peak_bytes if stayed else 0,
        turned=_turned(graph, result, op, pins, each_s) if has_choice else None,
        copying_us=result.time_us - stayed.time_us if stayed and is_moved else 0.0,
    )


def _forced(graph: TrainingGraph, op: Op, runs: int, pins: Pins) -> str:
    """Why there is no choice; empty where there is one."""
    if runs > 1:
        pin = pins.again.get(op.name)
        return f"pinned by {option('recompute', pin)}" if pin else ""
    if op.name in pins.kept:
        return f"pinned by {option('keep', pins.kept[op.name])}"
    return why_not_again(op, set(graph.outputs))


def _turned(graph: TrainingGraph, result: Result, op: Op, pins: Pins, each_s: float) -> Turned:
    """Solve with the op kept where it is recomputed, and the other way round."""
    schedule = planned(result)
    is_recomputed = schedule.computations()[op.name] > 1
    one = {op.name: op.name}
    turned = (
        Pins(pins.kept | one, pins.again) if is_recomputed else Pins(pins.kept, pins.again | one)
    )
    asked = {name: given for name, given in asked_again(schedule).items() if name not in PINS}
    found = solve_for_pins(graph, result.budget_bytes, pins=turned, time_limit_s=each_s, **asked)
    pin = "keep" if is_recomputed else "recompute"
    if found.schedule is None:
        return Turned(pin, False, 0.0, 0.0, (), ())
    changes = _changes(graph, op, schedule, found.schedule)
    return Turned(pin, True, found.time_us - result.time_us, found.overhead, *changes)


def _changes(
    graph: TrainingGraph, op: Op, before: Schedule, after: Schedule
) -> tuple[tuple[FoldedRow, ...], tuple[FoldedRow, ...]]:
    """Forward values of others that are made again more in `after`, and more in `before`."""
    old = {row.value: row for row in value_rows(graph, before) if row.phase == "forward"}
    new = {row.value: row for row in value_rows(graph, after) if row.phase == "forward"}
    for name in op.outputs:
        del old[name], new[name]
    dropped = [new[name] for name in new if new[name].again > old[name].again]
    spared = [old[name] for name in old if old[name].again > new[name].again]
    return _largest(dropped), _largest(spared)


def _largest(rows: Sequence[ValueRow]) -> tuple[FoldedRow, ...]:
    return tuple(sorted(folded(rows), key=lambda row: (-row.size_bytes, -row.cost_us)))
