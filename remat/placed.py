"""Where the buffers of a planned step lie in one arena."""

from __future__ import annotations

from typing import Any

from remat.formats import bytes_text, percent_text
from remat.graph_capture.errors import LayoutError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.layout import Layout, alignment_on, buffers_of, check_layout
from remat.schedules.schedule import Schedule
from remat.solver.layout.placing import place_buffers


def place(
    graph: TrainingGraph, schedule: Schedule, *, alignment_bytes: int | None = None
) -> Layout:
    """Offsets for all buffers of `schedule` in one arena, near the most live bytes.

    Parameters
    ----------
    schedule : of `graph`; that of a result, or of a plan.
    alignment_bytes : a power of two that divides each offset; None takes that of torch's allocator
        for the device of the graph, 512 for CUDA and 64 for a CPU.

    Returns
    -------
    Layout : judged by `remat.schedules.layout.check_layout`. What is resident is not in its arena.

    Raises
    ------
    ScheduleError : the schedule is of another graph, or invalid, or is none. LayoutError : the
        alignment is no power of two.
    """
    buffers = buffers_of(graph, schedule)
    if alignment_bytes is None:
        alignment_bytes = alignment_on(graph.device)
    return place_buffers(buffers, alignment_bytes=alignment_bytes)


def check_kept_layout(layout: Layout, graph: TrainingGraph, schedule: Schedule, name: str) -> None:
    """Hold a layout from a file to the buffers of `schedule`.

    Raises
    ------
    LayoutError : it is one of another plan, or was edited; the message names the file.
    """
    try:
        check_layout(buffers_of(graph, schedule), layout)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from error


def layout_json(layout: Layout) -> dict[str, Any]:
    """What is said of a layout with `--json`: all but its offsets."""
    return {
        "arena_bytes": layout.arena_bytes,
        "load_bytes": layout.load_bytes,
        "gap": layout.gap,
        "alignment_bytes": layout.alignment_bytes,
        "placed_by": layout.placed_by,
    }


def arena_text(layout: Layout) -> str:
    """``1.34 GiB, 0.0 % above the most live bytes``."""
    return f"{bytes_text(layout.arena_bytes)}, {percent_text(layout.gap)} above the most live bytes"
