"""What holds the memory at the peak of a schedule; its parts sum to the peak."""

from __future__ import annotations

from collections import Counter

import msgspec

from remat.graph_capture.errors import option
from remat.graph_capture.graph import Op, TrainingGraph
from remat.schedules.derived import graph_of_schedule
from remat.schedules.kept_in_forward import live_after_forward
from remat.schedules.schedule import Compute, Schedule, Step, fetched_value, freed_value
from remat.schedules.simulate import Simulation, simulate
from remat.schedules.value_report.globs import may_run_twice, recompute_globs
from remat.schedules.value_report.rows import FoldedRow, fold_rows, value_rows


class PeakHolders(msgspec.Struct, frozen=True):
    peak_bytes: int
    step: int  # index of the step that reaches the peak
    op: str
    target: str
    phase: str
    module: str
    source: str
    run: int  # which run of its op, from 1
    resident: dict[str, int]  # bytes by category, without those of 0
    workspace_bytes: int
    copies_bytes: int  # second copies that it makes of values that are live already
    values: tuple[FoldedRow, ...]  # equal layers folded, largest first

    @property
    def place(self) -> str:
        return " ".join(part for part in (self.module, self.source) if part) or self.op


def peak_holders(
    graph: TrainingGraph, schedule: Schedule, simulation: Simulation | None = None
) -> PeakHolders:
    graph = graph_of_schedule(graph, schedule)
    found = simulation or simulate(graph, schedule)
    step = schedule.steps[found.peak_step]
    op = graph.ops[graph.op_index[step.op]] if isinstance(step, Compute) else None  # or a fetch
    rows = tuple(row for row in value_rows(graph, schedule) if row.at_peak)
    resident = {
        name.removesuffix("_bytes"): size for name, size in graph.resident.parts().items() if size
    }
    known = sum(resident.values()) + sum(row.size_bytes for row in rows)
    facts = (op.name, op.target, op.phase, op.module, op.source) if op else ("", "", "", "", "")
    run = sum(one == step for one in schedule.steps[: found.peak_step + 1]) if op else 0
    workspace_bytes = found.workspace_at_peak_bytes
    # The rest is second copies, since the parts sum to the peak.
    copies_bytes = found.peak_bytes - known - workspace_bytes
    values = tuple(sorted(fold_rows(rows), key=lambda row: -row.size_bytes))
    peak = found.peak_bytes, found.peak_step
    return PeakHolders(*peak, *facts, run, resident, workspace_bytes, copies_bytes, values)


RETURNED_TO_CALLER = "returned to the caller"
DRAWS = "it draws random numbers, and runs again from a saved state of the stream"


class ForcedOps(msgspec.Struct, frozen=True):
    """Forward ops that one reason leaves no choice for."""

    reason: str
    ops: int
    kept_bytes: int  # live when forward ends
    cost_us: float  # of one run each
    places: tuple[str, ...]  # modules


def forced_ops(graph: TrainingGraph, schedule: Schedule, most: int = 3) -> tuple[ForcedOps, ...]:
    """What was forced, by reason; the reason that holds most comes first."""
    graph = graph_of_schedule(graph, schedule)
    live, runs = live_after_forward(graph, schedule), schedule.computations()
    asked = recompute_globs(schedule)
    by_reason: dict[str, list[Op]] = {}
    for op in graph.ops[: graph.n_forward]:
        for reason in _reasons(graph, op, runs, is_freed=may_run_twice(op, asked)):
            by_reason.setdefault(reason, []).append(op)
    for name in ("keep", "recompute"):  # the user's pins may concern ops that nothing else forces
        if name in schedule.options and not any(name in reason for reason in by_reason):
            by_reason[f"pinned by {option(name, schedule.options[name])}"] = []
    found = [_forced(graph, reason, ops, live, most) for reason, ops in by_reason.items()]
    return tuple(sorted(found, key=lambda one: (-one.kept_bytes, -one.ops)))


def _reasons(graph: TrainingGraph, op: Op, runs: Counter[str], *, is_freed: bool) -> list[str]:
    # Reasons that differ in the module alone count as one.
    why = op.no_recompute.replace(f"{op.module}.", "") if op.module else op.no_recompute
    reasons = [why] if why and not is_freed else []
    if set(graph.outputs).intersection(op.outputs):
        reasons.append(RETURNED_TO_CALLER)
    # An op that draws may run again, but its stream's state is kept.
    states = (graph.value_by_name[name].kind == "rng_state" for name in op.inputs)
    if runs[op.name] > 1 and any(states):
        reasons.append(DRAWS)
    return reasons


def _forced(
    graph: TrainingGraph, reason: str, ops: list[Op], live: frozenset[str], most: int
) -> ForcedOps:
    names = {name for op in ops for name in op.outputs}
    rows = fold_rows([row for row in value_rows(graph) if row.value in names])
    ranked = sorted(rows, key=lambda row: -row.size_bytes)
    places = dict.fromkeys(row.module for row in ranked if row.module)
    return ForcedOps(
        reason=reason,
        ops=len(ops),
        kept_bytes=sum(graph.value_by_name[name].size_bytes for name in names & live),
        cost_us=sum(op.cost_us for op in ops),
        places=tuple(places)[:most],
    )


def counterfactual_schedule(graph: TrainingGraph, schedule: Schedule, op: str) -> Schedule:
    """`schedule` without further runs of `op`: its values are kept until their last use."""
    # Ops that ran again only to feed `op` still do: the peak shows what these values cost.
    held = set(graph.ops[graph.op_index[op]].outputs)
    first, *further = [i for i, step in enumerate(schedule.steps) if step == Compute(op)]
    last_there = dict.fromkeys(held, max([first, *further]))
    for i, step in enumerate(schedule.steps):
        if not isinstance(step, Compute) and fetched_value(step) in held:
            last_there[step.value] = max(last_there[step.value], i)

    def stays(i: int, step: Step) -> bool:
        if isinstance(step, Compute):  # free the op's values only once, after their last use
            return i not in further
        return step.value not in held or (freed_value(step) in held and i > last_there[step.value])

    steps = [step for i, step in enumerate(schedule.steps) if stays(i, step)]
    return schedule.with_steps(graph, steps)
