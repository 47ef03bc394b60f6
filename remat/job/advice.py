"""What to do about a run: no plan is needed, or its prices are not those of this hour."""

from __future__ import annotations

from remat.formats import bytes_text
from remat.job.pipeline import Report, Row

FAR = 1.25
"""A measured step that is longer or shorter than the predicted one by this is told."""


def advice_on_run(report: Report) -> tuple[str, ...]:
    """Sentences for the screen and for ``--json``."""
    return (*_no_plan(report.rows[0], report.result.budget_bytes), *_far_apart(report.rows))


def _no_plan(unmodified: Row, budget_bytes: int) -> tuple[str, ...]:
    if unmodified.peak_bytes > budget_bytes:
        return ()
    return (
        f"the unmodified step needs {bytes_text(unmodified.peak_bytes)} and fits already: train "
        "without a plan",
    )


def _far_apart(rows: tuple[Row, ...]) -> tuple[str, ...]:
    """Of all rows: one that was measured in a slow spell says little."""
    measured = [(row.measured_step_us, row.time_us) for row in rows if row.time_us]
    ratios = [is_us / said_us for is_us, said_us in measured if is_us]
    if not ratios or (max(ratios) >= 1 / FAR and min(ratios) <= FAR):
        return ()
    worst = max(ratios) if min(ratios) > FAR else min(ratios)
    return (
        f"steps took {worst:.2f} times as long as predicted: the machine was busy, now or when ops "
        "were measured. On a quiet one, --measure-again measures them anew",
    )
