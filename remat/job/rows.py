"""The rows of `remat run`: schedules of one step, as predicted and as measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from remat.graph_capture.graph import TrainingGraph
from remat.questions.reserved import reserved_beside
from remat.schedules.reserved import Reserved
from remat.solver.result import Result

if TYPE_CHECKING:
    from remat.rewriter.checking.check import Check

EXACT = 1e-9
"""Of a step: times that differ by less are the same sum in another order."""
FAR = 1.25
"""A measured step that is longer or shorter than the predicted one by this is told."""


@dataclass(frozen=True)
class Row:
    """One schedule, predicted and, where it was run, measured.

    `overhead` is over the unmodified step, whose own checkpoints take time too. `reserved` is what
    the allocator of a CUDA device is predicted to take, None on a CPU;
    `reserved_bytes` is what it was seen to hold. A measured step is its measured overhead on top of
    the unmodified step as it was measured.
    """

    name: str
    peak_bytes: int
    time_us: float
    overhead: float
    reserved: Reserved | None = None
    measured_peak_bytes: int | None = None
    measured_step_us: float | None = None
    measured_overhead: float | None = None
    reserved_bytes: int | None = None


def predicted_row(graph: TrainingGraph, name: str, result: Result, base_us: float) -> Row:
    """A row with what `simulate` says of a schedule, where the unmodified step takes `base_us`."""
    reserved = reserved_beside(graph, result)
    # It is below zero where the plan is faster than the user's own checkpoints.
    is_same = abs(result.time_us - base_us) <= EXACT * base_us
    overhead = 0.0 if is_same else result.time_us / base_us - 1
    return Row(name, result.peak_bytes, result.time_us, overhead, reserved)


def quicker_than_priced(row: Row) -> bool:
    """Whether a step took far less than its prices say, so that these were taken in a busy time."""
    return row.measured_step_us is not None and FAR * row.measured_step_us < row.time_us


def rows_as_run(rows: Sequence[Row], check: Check, of_chen: Check | None) -> tuple[Row, ...]:
    """The rows of the unmodified step, of `chen_sqrt` and of the plan with what was measured."""
    base, chen, plan = rows
    base = replace(
        base, measured_peak_bytes=check.baseline_peak_bytes,
        measured_step_us=check.baseline_step_us, measured_overhead=0.0,
        reserved_bytes=check.baseline_reserved_bytes,
    )  # fmt: skip
    base_us = check.baseline_step_us
    ran = chen if of_chen is None else _as_run(chen, of_chen, base_us)
    return base, ran, _as_run(plan, check, base_us)


def _as_run(row: Row, check: Check, base_us: float) -> Row:
    """A row with what its own check measured.

    Each plan is timed in turn with the unmodified step, which may take longer in one check than in
    another. So its step is told as that overhead on top of the unmodified step of the first row:
    the two columns then say the same.
    """
    return replace(
        row, measured_peak_bytes=check.plan_peak_bytes,
        measured_step_us=base_us * (1 + check.overhead),
        measured_overhead=check.overhead, reserved_bytes=check.plan_reserved_bytes,
    )  # fmt: skip
