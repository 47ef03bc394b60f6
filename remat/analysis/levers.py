"""What each lever of a plan brings, and what it costs: every figure from `simulate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from remat.analysis.plan_figures import chunks_of
from remat.formats import bytes_text, percent_text
from remat.graph_capture.graph import ACCUMULATE, KEPT, UPDATE, Op, TrainingGraph
from remat.schedules.derived import graph_of_schedule, unchunked
from remat.schedules.outcome import Result
from remat.schedules.schedule import Compute, Schedule
from remat.schedules.simulate import simulate
from remat.schedules.value_report.peak_holders import counterfactual_schedule
from remat.solver.problem import Problem
from remat.solver.reductions.updates import late_sequence
from remat.solver.state import schedule_of

# A plan with one lever off: the same ops in the same order, simulated. No solver is asked.

_Off = tuple[TrainingGraph, Schedule]  # a graph without a lever, and the plan on it


def without_recomputation(graph: TrainingGraph, schedule: Schedule) -> _Off:
    planned = graph_of_schedule(graph, schedule)
    if schedule.moves:  # a plan made anew would have no copies: take runs out
        for name in [name for name, runs in schedule.computations().items() if runs > 1]:
            schedule = counterfactual_schedule(planned, schedule, name)
        return planned, schedule
    return _in_order(planned, schedule, dict.fromkeys(_runs(schedule)))


def without_copies(graph: TrainingGraph, schedule: Schedule) -> _Off:
    # Without links, so that a solver that is asked cannot copy either.
    planned = msgspec.structs.replace(graph_of_schedule(graph, schedule), links=None)
    return _in_order(planned, schedule, _runs(schedule))


def without_chunks(graph: TrainingGraph, schedule: Schedule) -> _Off:
    """Regions as they were captured: first runs in captured order, others where they stood."""
    captured, order, begun = unchunked(graph), list[str](), 0
    ran = set[str]()
    for name in _runs(schedule):
        if (at := captured.op_index.get(name, -1)) >= begun:
            order += [op.name for op in captured.ops[begun : at + 1]]
            begun = at + 1
        elif name in ran:
            order.append(name)
        if at >= 0:
            ran.add(name)
    return _in_order(captured, schedule, [*order, *(op.name for op in captured.ops[begun:])])


def without_updates(graph: TrainingGraph, schedule: Schedule) -> _Off:
    planned = graph_of_schedule(graph, schedule)
    updates = {op.name for op in planned.ops if op.target == UPDATE}
    if planned.resident.gradients_bytes:  # summed gradients are released as they are made
        ops = tuple(_without_update(planned, op) for op in planned.ops)
        return _in_order(msgspec.structs.replace(planned, ops=ops), schedule, _runs(schedule))
    taken = [op for op in planned.ops if op.name in updates]
    gradients = [name for op in taken for name in _gradients(planned, op)]
    # The optimizer takes as long behind backward, and runs once: it has an op of its own.
    step = msgspec.structs.replace(
        taken[-1], target="remat.optimizer", inputs=tuple(dict.fromkeys(gradients)),
        workspace_bytes=0, cost_us=sum(op.cost_us for op in taken),
    )  # fmt: skip
    ops = (*(op for op in planned.ops if op.name not in updates), step)
    # The optimizer takes gradients at the end of the step, so they stay till then: none is freed.
    outputs = tuple(dict.fromkeys((*planned.outputs, *gradients)))
    off = msgspec.structs.replace(planned, ops=ops, outputs=outputs)
    order = (*(name for name in _runs(schedule) if name not in updates), step.name)
    return _in_order(off, schedule, order)


def _without_update(graph: TrainingGraph, op: Op) -> Op:
    """An op that updates parameters as one that only releases their gradients."""
    if op.target != UPDATE:
        return op
    read = tuple(_gradients(graph, op))
    # A plan may have them in another order than the captured one, as each stands for itself.
    return msgspec.structs.replace(
        op, target=ACCUMULATE, inputs=read, workspace_bytes=0, no_recompute=f"{KEPT} its gradient"
    )


def _gradients(graph: TrainingGraph, op: Op) -> list[str]:
    # What an update reads beside gradients, parameters, no op makes.
    return [name for name in op.inputs if graph.value_by_name[name].producer]


def _runs(schedule: Schedule) -> list[str]:
    return [step.op for step in schedule.steps if isinstance(step, Compute)]


def _in_order(graph: TrainingGraph, schedule: Schedule, names: Iterable[str]) -> _Off:
    problem, order = Problem.of(graph), [graph.op_index[name] for name in names]
    made = schedule_of(problem, late_sequence(problem, order))  # reads may stand elsewhere now
    return graph, schedule.with_steps(graph, made.steps)  # `recompute` may allow custom ops twice


RECOMPUTATION, UPDATES = "recomputation", "updates during backward"
OFFLOAD = "copies to the host and back"
_ROUNDING = 1e-9  # largest part of a step by which times differ that are sums of the same costs
_SolveWithout = Callable[[TrainingGraph], Result]


class LeverEffect(msgspec.Struct, frozen=True):
    name: str
    peak_bytes: int
    off_bytes: int  # peak of the same plan without the lever
    extra: float  # time that the lever takes, as a part of the step with every op once
    solved: bool = False  # a solver was asked for a plan without the lever, at this budget
    off_fits: bool = False
    off_overhead: float = 0.0
    off_least_bytes: int = 0  # where nothing fits, the least peak known; 0 where none is

    @property
    def saved_bytes(self) -> int:
        return self.off_bytes - self.peak_bytes

    def __str__(self) -> str:
        saved = f"{'-' if self.saved_bytes > 0 else '+'}{bytes_text(abs(self.saved_bytes))}"
        said = (
            f"{saved if self.saved_bytes else 'nothing off this peak'} for "
            f"{percent_text(self.extra)} of a step; without, this plan peaks at "
            f"{bytes_text(self.off_bytes)}"
        )
        return f"{self.name}: {said}" + (f". {self._solved_text()}" if self.solved else "")

    def _solved_text(self) -> str:
        if self.off_fits:
            return f"Without it, the overhead is {percent_text(self.off_overhead)}"
        least = f"; the lowest known peak is {bytes_text(self.off_least_bytes)}"
        return "Without it, nothing fits" + (least if self.off_least_bytes else "")


def levers_of(
    graph: TrainingGraph, schedule: Schedule, solve_without: _SolveWithout | None = None
) -> tuple[LeverEffect, ...]:
    """The levers that a plan uses; `solve_without` solves a graph that lacks one, at its budget."""
    planned, found = graph_of_schedule(graph, schedule), list[LeverEffect]()
    if any(value.home for value in planned.values):  # parameters below the device need copies
        return ()
    if max(schedule.computations().values(), default=0) > 1:
        off = without_recomputation(graph, schedule)
        found.append(_beside(RECOMPUTATION, planned, schedule, off, None))
    if schedule.moves:
        off = without_copies(graph, schedule)
        found.append(_beside(OFFLOAD, planned, schedule, off, solve_without))
        return tuple(found)  # chunks and updates could not be taken out without the copies
    for one in [chunks_of(graph, schedule)] if schedule.chunks else []:
        name = ", ".join(region.name for region in one)
        off = without_chunks(graph, schedule)
        found.append(_beside(name, planned, schedule, off, solve_without))
    if schedule.updates:
        off = without_updates(graph, schedule)
        found.append(_beside(UPDATES, planned, schedule, off, solve_without))
    return tuple(found)


def levers_text(graph: TrainingGraph, schedule: Schedule | None) -> str:
    """What each lever of a plan saves, and for what part of the step; "" where it uses none."""
    if schedule is None or graph.hash not in (schedule.graph_hash, schedule.captured_hash):
        return ""
    if schedule.moves and graph.links is None:  # a plan at hand may be told without
        return ""
    said = [
        f"{one.name}: {bytes_text(max(0, one.saved_bytes))} less"
        + f" for {percent_text(one.extra)}" * (graph.time_us > 0)  # a plan at hand has no costs
        for one in levers_of(graph, schedule)
    ]
    return "".join(f"{one}; " for one in said)


def _beside(
    name: str, planned: TrainingGraph, schedule: Schedule, off: _Off,
    solve_without: _SolveWithout | None,
) -> LeverEffect:  # fmt: skip
    here, there = simulate(planned, schedule), simulate(*off)
    more = (here.time_us - there.time_us) / planned.base_us if planned.base_us else 0.0
    extra = more if abs(more) > _ROUNDING else 0.0  # the order of a sum alone, not even its sign
    lever = LeverEffect(name, here.peak_bytes, there.peak_bytes, extra)
    if solve_without is None:
        return lever
    result = solve_without(off[0])
    return msgspec.structs.replace(
        lever, solved=True, off_fits=result.schedule is not None, off_overhead=result.overhead,
        off_least_bytes=result.least_feasible_bytes,
    )  # fmt: skip
