"""How a schedule was solved, so that the same can be solved at another budget."""

from __future__ import annotations

from typing import Any

from remat.schedules.schedule import Schedule
from remat.solver import TABLE, option_names
from remat.solver.result import Result

PINS = ("keep", "recompute")
"""Options that every solver takes."""


def solved_by(schedule: Schedule) -> str:
    """The solver of the table that made it; ``auto`` where none of the table did."""
    return schedule.solver if schedule.solver in TABLE else "auto"


def pins_of(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """The globs that `keep` and `recompute` were given, empty where there were none."""
    return {
        name: tuple(part for part in str(schedule.options.get(name, "")).split(", ") if part)
        for name in PINS
    }


def asked_again(schedule: Schedule) -> dict[str, Any]:
    """Arguments by which `solve` solves as the schedule was: solver, its options, pins."""
    name = solved_by(schedule)
    known = option_names(name)
    options = {key: value for key, value in schedule.options.items() if key in known}
    return {"solver": name, **options, **pins_of(schedule)}


def planned(result: Result) -> Schedule:
    """The schedule of a result that has one."""
    assert result.schedule is not None, "checked before: nothing fits"
    return result.schedule
