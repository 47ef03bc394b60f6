"""What verbs print of a plan for a range: the range, its certificate, schedules and curve."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat.checks import advice_of
from remat.formats import bytes_text, percent_text, time_text
from remat.job.json_report import check_json
from remat.job.over_range import RangeReport
from remat.job.screen import equal_text
from remat.questions.tables import plain_table
from remat.ranges.curve import Curve
from remat.schedules.family import Family, sizes_text
from remat.screen.stages import took_text


def show_range_report(console: Console, report: RangeReport) -> None:
    """One screen: range and budget, the curve, schedules, certificate, what is equal."""
    show_family(console, report.family, report.curve)
    table = Table.grid(padding=(0, 2, 0, 0))
    if report.check:
        at = f" at {sizes_text(report.sizes)}" if report.sizes else ""
        table.add_row("equal", Text(f"{equal_text(report.check)}{at}"))
        for advice in advice_of(report.check, report.family.budget_bytes):
            table.add_row("advice", Text(advice))
    if report.unchecked:
        table.add_row("not run", Text(report.unchecked))
    table.add_row("took", took_text(report.seconds))
    console.print(table)


def show_family(console: Console, family: Family, curve: Curve) -> None:
    """The curve of overheads against size, and what is proved of all sizes."""
    ranges, budget = ", ".join(map(str, family.symbols)), bytes_text(family.budget_bytes)
    console.print(Text.assemble((family.model, "bold"), f" over {ranges}, budget {budget}\n"))
    console.print(_curve_table(curve))
    console.print()
    console.print(_certificate(family))


def _curve_table(curve: Curve) -> Table:
    table = plain_table("sizes", "schedule", "peak", "step", "overhead")
    for point in curve.points:
        table.add_row(
            sizes_text(point.sizes),
            str(point.member + 1),
            bytes_text(point.peak_bytes),
            time_text(point.time_us),
            percent_text(point.overhead),
        )
    return table


def _certificate(family: Family) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    peak = bytes_text(family.peak_bytes)
    table.add_row(
        "certificate", Text(f"no size needs more than {peak}, by the {family.certificate}")
    )
    bound, top = percent_text(family.top.lower_overhead), sizes_text(family.top.sizes)
    table.add_row("lower bound", f"{bound} overhead at this budget at {top}")
    off = percent_text(family.prices_error)
    table.add_row("prices", f"of three sizes, fitted between; {off} off at the middle")
    return table


def range_json(family: Family, curve: Curve) -> dict[str, Any]:
    """The entry ``range`` of the JSON object: symbols, certificate, schedules and curve."""
    members = [
        {
            "sizes": member.sizes,
            "corners": list(member.corners),
            "peak_bytes": member.peak_bytes,
            "overhead": member.overhead,
            "lower_overhead": member.lower_overhead,
        }
        for member in family.members
    ]
    return {
        "symbols": msgspec.to_builtins(family.symbols),
        "budget_bytes": family.budget_bytes,
        "peak_bytes": family.peak_bytes,
        "certificate": family.certificate,
        "prices_error": family.prices_error,
        "schedules": members,
        "curve": msgspec.to_builtins(curve.points),
    }


def range_report_json(report: RangeReport) -> dict[str, Any]:
    """The object that verbs print with ``--dynamic`` and ``--json``."""
    family = report.family
    return {
        "model": family.model,
        "budget_bytes": family.budget_bytes,
        "range": range_json(family, report.curve),
        "sizes": report.sizes,
        "check": check_json(report.check, family.budget_bytes) if report.check else None,
        "unchecked": report.unchecked,
        "failures": report.failures,
        "seconds": {name: round(value, 3) for name, value in report.seconds.items()},
    }
