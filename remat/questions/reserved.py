"""What a plan makes the allocator of a CUDA device reserve, predicted without one.

A budget bounds what is allocated. What runs out is what is reserved: see docs/reserved.md.
"""

from __future__ import annotations

from remat.budgets import unmodified_step
from remat.checks import EXPANDABLE_CONF
from remat.formats import bytes_text
from remat.graph_capture.devices.device_table import (
    has_cuda_allocator,
    is_in_table,
    modelled_device,
)
from remat.graph_capture.errors import BudgetError, DeviceError, ScheduleError, option
from remat.graph_capture.graph import TrainingGraph
from remat.infeasible import infeasible_text
from remat.schedules.buffers import buffers_of
from remat.schedules.reserved import (
    DEFAULT,
    EXPANDABLE,
    N_STEPS,
    Reserved,
    reserved_of,
    retries_within,
)
from remat.schedules.schedule import Schedule
from remat.solver.result import Result


def predict_reserved(graph: TrainingGraph, plan: Result | Schedule | None = None) -> Reserved:
    """What torch's CUDA caching allocator takes from the device for three steps of a plan.

    Nothing runs: the allocator is replayed, once as it is and once with expandable segments.

    Parameters
    ----------
    graph : captured for a CUDA device of this machine, or for one of the table, as ``"h100"``.
    plan : of that graph. None is the unmodified step.

    Returns
    -------
    Reserved : bytes in both settings, resident tensors included.

    Raises
    ------
    DeviceError : the graph is of a device without that allocator. BudgetError : nothing fits, so
        there is no plan. ScheduleError : the plan is of another graph.
    """
    if not isinstance(graph, TrainingGraph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(
            f"reserved bytes are predicted of a graph, and this is {type(graph).__name__}: pass "
            "what remat.capture returned, and a result or its schedule"
        )
    if not has_cuda_allocator(graph.device):
        raise DeviceError(
            f"reserved bytes are those of CUDA devices, and the graph is of {graph.device}: "
            f"capture it for one, such as {option('device', 'h100')}"
        )
    if plan is None:
        step = unmodified_step(graph)
        graph, plan = step.graph, step.result
    if not isinstance(plan, Result):
        return reserved_of(graph, plan)
    if plan.schedule is None:
        raise BudgetError(infeasible_text(plan))
    return reserved_of(graph, plan.schedule)


def reserved_beside(graph: TrainingGraph, result: Result) -> Reserved | None:
    """The same as a figure beside others; None where there is no such allocator, or no plan."""
    if result.schedule is None or not has_cuda_allocator(graph.device):
        return None
    return reserved_of(graph, result.schedule)


def shortage_text(graph: TrainingGraph, schedule: Schedule) -> str:
    """What becomes of a plan that would reserve more than a device of the table has; else empty."""
    if not is_in_table(graph.device):
        return ""
    device_bytes = modelled_device(graph.device).memory_bytes
    if reserved_of(graph, schedule).default.reserved_bytes <= device_bytes:
        return ""
    buffers = buffers_of(graph, schedule)
    retries = retries_within(buffers, DEFAULT, device_bytes)
    better = retries_within(buffers, EXPANDABLE, device_bytes)
    said = f"on the {bytes_text(device_bytes)} of {graph.device}, {_outcome_text(retries)}"
    if better is None or (retries is not None and better >= retries):
        return f"{said}: take a smaller budget"
    said = f"{said}: start with {EXPANDABLE_CONF}"
    return f"{said}, and {_outcome_text(better)}" if better else said


def _outcome_text(retries: int | None) -> str:
    if retries is None:
        return "a step runs out of memory"
    return f"the allocator gives memory back {retries} times in {N_STEPS} steps, and waits"


def reserved_text(plan: Reserved, without: Reserved | None = None) -> str:
    """``1.80 GiB predicted (expandable 1.40 GiB)``, and what it is without the plan, if given."""
    said = f"{bytes_text(plan.default.reserved_bytes)} predicted ({_expandable_text(plan)})"
    if without is None:
        return said
    unmodified_bytes = without.default.reserved_bytes
    return f"{said}, unmodified {bytes_text(unmodified_bytes)} ({_expandable_text(without)})"


def _expandable_text(reserved: Reserved) -> str:
    return f"expandable {bytes_text(reserved.expandable.reserved_bytes)}"
