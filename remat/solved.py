"""A graph with what was solved on it, and what a plan keeps of both."""

from __future__ import annotations

from typing import Any

import msgspec

from remat.formats import budget_text, bytes_text, gap_text, percent_text
from remat.graph_capture.devices.known_devices import CPU, has_cuda_allocator
from remat.graph_capture.errors import option
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.family import Family
from remat.schedules.outcome import Check, Result
from remat.schedules.plan import Prediction, RunOrder
from remat.schedules.schedule import Schedule
from remat.solver.result import INTERRUPTED, OUT_OF_TIME


class Solved(msgspec.Struct, frozen=True):
    graph: TrainingGraph
    result: Result


def facts_of(found: Solved, order: RunOrder | None = None) -> dict[str, Any]:
    graph, result, schedule = found.graph, found.result, found.result.schedule
    assert schedule is not None
    prediction = Prediction(
        peak_bytes=result.peak_bytes, time_us=result.time_us, overhead=result.overhead,
        lower_bound_us=result.lower_bound_us, gap=result.gap, cost_origin=graph.cost_origin,
        status=result.status, order=order,
    )  # fmt: skip
    # A schedule of the step before it is sharded was not made for this graph.
    is_of_graph = graph.hash in (schedule.graph_hash, schedule.captured_hash)
    return {"prediction": prediction, "costed": graph if is_of_graph else None}


def budget_said(budget_bytes: int, device: str, reserved_bytes: int = 0) -> str:
    """A budget, and on a CUDA device what it bounds; `reserved_bytes` as of a `Result`."""
    bounded = "reserved" if reserved_bytes else "allocated"
    return bytes_text(budget_bytes) + f" of {bounded} memory" * has_cuda_allocator(device)


def planned_text(
    what: str, solved: Solved, check: Check | None, seconds: float, levers: str = "", *,
    is_compared: bool = False,
) -> str:  # fmt: skip
    """A plan in one line; `is_compared`: what its first step gives is compared, and no more.

    `levers` as of `levers_text`.
    """
    checked = "its first step is compared with eager" if is_compared else _checked_text(check)
    found = solved.result
    budget = budget_said(found.budget_bytes, solved.graph.device, found.reserved_bytes)
    return (
        f"remat: {what}: {_peaks_text(found.peak_bytes, check, found.reserved_bytes)}, budget "
        f"{budget}; overhead {percent_text(found.overhead)}, {gap_text(found.gap)}; "
        f"{levers}{checked}; {seconds:.1f} s"
    )


def at_hand_text(
    what: str, schedule: Schedule, peak_bytes: int, check: Check | None, seconds: float, *,
    is_compared: bool, levers: str = "", device: str = CPU, reserved_bytes: int = 0,
) -> str:  # fmt: skip
    runs_once = all(n == 1 for n in schedule.computations().values())
    is_plain = runs_once and not (schedule.captured_hash or schedule.moves)
    how = "runs as it is" if is_plain else "a schedule at hand"
    checked = "its first step is compared with eager" if is_compared else _checked_text(check)
    budget = budget_said(schedule.budget_bytes, device, reserved_bytes)
    return (
        f"remat: {what}: {how}, {_peaks_text(peak_bytes, check, reserved_bytes)}, budget "
        f"{budget}; {levers}{checked}; {seconds:.1f} s"
    )


def _peaks_text(peak_bytes: int, check: Check | None, reserved_bytes: int) -> str:
    measured = f", {bytes_text(check.plan_peak_bytes)} measured" if check else ""
    text = f"peak {bytes_text(peak_bytes)} predicted{measured}"
    if not reserved_bytes:
        return text
    held = check and check.plan_reserved_bytes
    measured = f", {bytes_text(held)} measured" if held else ""
    return f"{text}, reserved {bytes_text(reserved_bytes)} predicted{measured}"


def family_text(
    family: Family, check: Check | None, seconds: float, device: str = CPU, *,
    inputs: str = "", levers: str = "",
) -> str:  # fmt: skip
    top, ranges = family.top, ", ".join(map(str, family.symbols))
    budget = budget_said(family.budget_bytes, device)
    checked = _checked_text(check)
    return (
        f"remat: {family.model} for {ranges}{inputs}: {len(family.members)} schedules, peak "
        f"{bytes_text(family.peak_bytes)}, budget {budget}; overhead "
        f"{percent_text(top.overhead)} at the largest; {levers}{checked}; {seconds:.1f} s"
    )


def _checked_text(check: Check | None) -> str:
    if check is None:
        return "not compared with eager"
    if check.tolerance:
        return f"within {check.tolerance:g} of eager"
    return "as near to eager as eager is to itself" if check.unsteady else "equal to eager"


# What is said where no schedule fits.


def infeasible_text(result: Result) -> str:
    """A sentence each: what was asked, is possible, holds it, is to be tried, ended the search."""
    asked, least = bytes_text(result.budget_bytes), result.least_feasible_bytes
    if result.message.startswith((OUT_OF_TIME, INTERRUPTED)):
        return _late_text(result)
    if not least:
        is_late = result.status == "time limit"
        advice = "allow a longer time limit" if is_late else "raise the budget"
        return f"no schedule within {asked} was found: {result.message or advice}"
    rest = least - sum(item.size_bytes for item in result.held_at_peak)
    values = [(item.module or item.name, item.size_bytes) for item in result.held_at_peak[:3]]
    is_reserved = bool(result.reserved_bytes)
    held = [("resident, workspace and gaps" if is_reserved else "resident and workspace", rest)]
    held += values
    least_text = "lowest peak that a schedule is known to reach.\nThat peak is held by"
    if is_reserved:
        least_text = "least that a schedule is known to reserve.\nThat is held by"
    holders = ", ".join(f"{name} {bytes_text(size)}" for name, size in held)
    ways = [text for text in (result.otherwise, option("budget", budget_text(least))) if text]
    return (
        f"try {', '.join(ways)}, a smaller batch, or {option('budget', 'min')}: budget {asked} is "
        f"below {bytes_text(least)}, the {least_text} {holders}. {_floor_text(result)}".rstrip(". ")
    )


def _late_text(result: Result) -> str:
    """What ended the search, and what was known by then: nothing is said about the budget."""
    limit = result.message.split(". ")[0]
    text = f"no schedule within {bytes_text(result.budget_bytes)} was found yet: {limit}"
    if not result.least_feasible_bytes:
        return text
    return f"{text}. By then a schedule of {bytes_text(result.least_feasible_bytes)} was known"


def _floor_text(result: Result) -> str:
    """Sentences on the floor and on what is proved, each ending in a space."""
    text = ""
    if result.floor:
        floor, place = bytes_text(result.floor.size_bytes), result.floor.module or result.floor.name
        text = f"Below {floor}, set by {place}, outputs of the step must be recomputed. "
    if result.least_bound_bytes:
        text += f"No schedule needs less than {bytes_text(result.least_bound_bytes)}. "
    return text
