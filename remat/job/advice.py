"""What to do about a run: no plan is needed, or its prices are not those of this hour."""

from __future__ import annotations

from remat.formats import bytes_text, percent_text
from remat.job.pipeline import Report
from remat.job.rows import FAR, Row

OFF = 0.1
"""A measured overhead of the plan that is this far from the predicted one is told."""

FASTER = 0.01
"""A plan that takes this much less time than the unmodified step, with checkpoints, is told."""


def advice_on_run(report: Report) -> tuple[str, ...]:
    """Sentences for the screen and for ``--json``."""
    needed = _no_plan(report.rows, report.result.budget_bytes)
    return (*needed, *(_far_apart(report.rows) or _off(report.rows[-1])))


def _no_plan(rows: tuple[Row, ...], budget_bytes: int) -> tuple[str, ...]:
    unmodified, plan = rows[0], rows[-1]
    if unmodified.peak_bytes > budget_bytes:
        return ()
    needs = f"the unmodified step needs {bytes_text(unmodified.peak_bytes)} and fits already"
    if plan.overhead < -FASTER:
        return (
            f"{needs}, with checkpoints of its own. This plan computes less again: by prices it "
            f"takes {percent_text(-plan.overhead)} less time",
        )
    return (f"{needs}: train without a plan",)


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


def _off(plan: Row) -> tuple[str, ...]:
    """Of the plan's overhead, where steps as such took about as long as predicted."""
    measured = plan.measured_overhead
    if measured is None or abs(measured - plan.overhead) < OFF:
        return ()
    return (
        f"the clock said {percent_text(measured)} overhead where prices say "
        f"{percent_text(plan.overhead)}: other programs that run meanwhile do that. Run it "
        "again on a quiet machine before you rely on either",
    )
