"""What is said where no schedule fits."""

from __future__ import annotations

from remat.formats import bytes_text
from remat.solver.result import Result


def infeasible_text(result: Result) -> str:
    """One sentence each: what was asked, what is possible, what holds it, what to try.

    And, where the budget is below it, the floor; and what is proved to be needed.
    """
    asked, least = bytes_text(result.budget_bytes), result.least_feasible_bytes
    if not least:
        return f"no schedule within {asked} was found. {result.message or 'Raise the budget'}"
    rest = least - sum(item.size_bytes for item in result.held_at_peak)
    held = ", ".join(
        [f"resident and workspace {bytes_text(rest)}"]
        + [
            f"{item.module or item.name} {bytes_text(item.size_bytes)}"
            for item in result.held_at_peak[:3]
        ]
    )
    least_mib = -(-least // 2**20)
    return (
        f"budget {asked} is below {bytes_text(least)}, the least that a schedule is known to "
        f"reach; its peak is held by {held}. {_floor_text(result)}Try --budget {least_mib}MiB, "
        "a smaller batch, or --budget min"
    )


def _floor_text(result: Result) -> str:
    """Sentences on the floor and on what is proved, each ending in a space."""
    text = ""
    if result.floor:
        place = result.floor.module or result.floor.name
        text = (
            f"The floor, below which outputs of the step must be recomputed, is "
            f"{bytes_text(result.floor.size_bytes)}, at {place}. "
        )
    if result.least_bound_bytes:
        text += f"No schedule needs less than {bytes_text(result.least_bound_bytes)}. "
    return text
