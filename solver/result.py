"""What every solver returns: a status, a schedule, its figures and a proven bound."""

from __future__ import annotations

import msgspec

from remat.formats import bytes_text, exact_bytes_text
from remat.graph_capture.devices.known_devices import has_cuda_allocator
from remat.graph_capture.errors import option
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.derived import fastest_us
from remat.schedules.outcome import Holding, Result, Status
from remat.schedules.schedule import Option, Schedule
from remat.schedules.simulate import Simulation, simulate
from remat.solver.recompute_summary import attention_of

INTERRUPTED = "interrupted"  # how the message of a solve begins that Ctrl-C ended
OUT_OF_TIME = "the time limit of"  # how it begins where the clock ended a solve without a schedule
NONE_FITS = "no schedule fits"  # how the message of a solve begins that has proved it
KNOWN = "bytes are known to be enough"  # behind a peak, in a message without a schedule
TOO_LARGE = "more than most_ops"  # in the message of a solver that left a graph alone for its size


def evaluate_schedule(
    graph: TrainingGraph, schedule: Schedule, *, budget_bytes: int, lower_bound_us: float,
    wall_s: float = 0.0, cut_short: bool = False, message: str = "",
) -> Result:  # fmt: skip
    """Judge a schedule; if it does not fit, none is found, and its peak is the least known."""
    if (simulation := simulate(graph, schedule)).peak_bytes > budget_bytes:
        return without_fit(graph, schedule, simulation, budget_bytes, wall_s, message)
    bound_us = max(lower_bound_us, fastest_us(graph))
    proved = simulation.time_us <= bound_us * (1 + 1e-9)  # times are sums of floats
    return Result(
        status="optimal" if proved else ("time limit" if cut_short else "feasible"),
        solver=schedule.solver,
        budget_bytes=budget_bytes,
        schedule=schedule,
        peak_bytes=simulation.peak_bytes,
        time_us=simulation.time_us,
        overhead=simulation.overhead,
        # Rounding may put the bound above the time.
        lower_bound_us=min(bound_us, simulation.time_us) if proved else bound_us,
        wall_s=wall_s,
        attention=attention_of(graph, schedule),
        message=message,
    )


def least_budget_message(budget_bytes: int, least_bytes: int, rest: str, *, is_proved: bool) -> str:
    proof = NONE_FITS if is_proved else "no schedule found that fits"
    text = f"{proof} {exact_bytes_text(budget_bytes)}; {least_bytes} {KNOWN}"
    return f"{text}. {rest}" if rest else text


def without_least_budget(message: str) -> str:
    """What a message of `least_budget_message` says beyond those bytes; another, whole."""
    return message.rpartition(KNOWN)[2].removeprefix(". ")


def with_time_limit_message(result: Result, time_limit_s: float) -> Result:
    """Where the clock ended the search without a schedule, the message says so first."""
    # It says nothing about the budget: more time is what to ask for.
    is_late = result.schedule is None and result.status == "time limit"
    if not is_late or result.message.startswith(INTERRUPTED) or TOO_LARGE in result.message:
        return result
    ask = f"allow a longer one ({option('time_limit_s')})"
    text = f"{OUT_OF_TIME} {time_limit_s:.3g} s ended the search: {ask}"
    named, longer, rest = result.message.partition(ask)  # a part of it may have named another
    is_named = longer and named.startswith(OUT_OF_TIME)
    rest = rest.removeprefix(". ") if is_named else result.message
    return msgspec.structs.replace(result, message=f"{text}. {rest}" if rest else text)


def renamed(result: Result, solver: str, options: dict[str, Option]) -> Result:
    """`result` as one of another solver, which had this one do its work."""
    named = {
        name: msgspec.structs.replace(schedule, solver=solver, options=options)
        for name in ("schedule", "least_schedule")
        for schedule in (getattr(result, name),)
        if schedule is not None
    }
    return msgspec.structs.replace(result, solver=solver, **named)


def status_without(*, is_proved: bool, is_late: bool) -> Status:
    """Of a result without a schedule: a search that ends without one has proved nothing."""
    if is_proved:
        return "infeasible"
    return "time limit" if is_late else "none found"


def without_fit(
    graph: TrainingGraph, schedule: Schedule, simulation: Simulation, budget_bytes: int,
    wall_s: float, message: str,
) -> Result:  # fmt: skip
    module = {op.name: op.module for op in graph.ops}
    held = [
        Holding(name, value.size_bytes, module.get(value.producer, ""))
        for name in simulation.held_at_peak
        for value in (graph.value_by_name[name],)
    ]
    return Result(
        status="none found", solver=schedule.solver, budget_bytes=budget_bytes, wall_s=wall_s,
        least_feasible_bytes=simulation.peak_bytes, least_schedule=schedule,
        held_at_peak=tuple(held), message=message,
    )  # fmt: skip


def with_weaker_proofs(result: Result, least_us: float, without: str) -> Result:
    """What a solver proves that leaves some plans out, as a proof for all; its schedule stays.

    `least_us` is a bound for all, and `without` names what the plans have that it leaves out.
    """
    if result.schedule is None:
        text = result.message
        if text and not text.startswith((OUT_OF_TIME, INTERRUPTED)):
            text = f"Without {without}: {text}"
        status = "none found" if result.status == "infeasible" else result.status
        return msgspec.structs.replace(
            result, status=status, lower_bound_us=least_us, least_bound_bytes=0, floor=None,
            message=text,
        )  # fmt: skip
    proved = result.time_us <= least_us * (1 + 1e-9)
    status = "feasible" if result.status == "optimal" and not proved else result.status
    bound_us = min(least_us, result.time_us)
    return msgspec.structs.replace(result, status=status, lower_bound_us=bound_us, floor=None)


def update_peak_bytes(graph: TrainingGraph) -> int:
    """What is in memory while the optimizer steps; 0 where it takes nothing for itself."""
    resident = graph.resident
    if not (resident.update_bytes and has_cuda_allocator(graph.device)):
        return 0
    made = sum(v.size_bytes for v in graph.values if v.kind == "gradient" and v.producer)
    made_bytes = 0 if resident.gradients_bytes else made  # or they are added to those there
    return resident.total_bytes + made_bytes + resident.update_bytes


def below_update(graph: TrainingGraph, found: Result, budget_bytes: int) -> Result:
    """No schedule within the budget, though forward and backward may fit, as `found` says."""
    if found.schedule is None:
        return msgspec.structs.replace(found, budget_bytes=budget_bytes)
    return Result(
        status="infeasible", solver=found.solver, budget_bytes=budget_bytes, wall_s=found.wall_s,
        least_feasible_bytes=update_peak_bytes(graph), least_schedule=found.schedule,
        message=found.message,
        otherwise=f"AdamW(..., fused=True) with {option('optimizer', 'adamw-fused')}, as AdamW's "
        f"own step takes {bytes_text(graph.resident.update_bytes)} more by default",
    )  # fmt: skip


def at_least_budget(graph: TrainingGraph, lost: Result) -> Result | None:
    """The schedule of the least budget that `lost` names; None where it is not at hand."""
    least = lost.least_schedule
    # With pins, it is one of the graph with them.
    if least is None or graph.hash not in (least.graph_hash, least.captured_hash):
        return None
    budget_bytes = lost.least_feasible_bytes
    return evaluate_schedule(
        graph, msgspec.structs.replace(least, budget_bytes=budget_bytes),
        budget_bytes=budget_bytes, lower_bound_us=0.0, wall_s=lost.wall_s, cut_short=True,
    )  # fmt: skip
