"""What is said when no schedule fits the budget."""

from __future__ import annotations

from remat.formats import bytes_text
from remat.solver.result import INTERRUPTED, Result


def infeasible_text(result: Result) -> str:
    """What was asked, what is possible, what holds that peak, and what to try.

    The floor too, if the budget is below it; and the bytes that are proved to be needed.
    """
    asked, least = bytes_text(result.budget_bytes), result.least_feasible_bytes
    if result.status == "time limit" and not result.message.startswith(INTERRUPTED):
        return _out_of_time_text(result)
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


def _out_of_time_text(result: Result) -> str:
    """A search that was cut short says nothing against the budget, so this asks for more time."""
    least = result.least_feasible_bytes
    known = f"; the least found to fit until then is {bytes_text(least)}" if least else ""
    return (
        f"no schedule within {bytes_text(result.budget_bytes)} was found before the time limit, "
        f"after {result.wall_s:.1f} s{known}. {_floor_text(result)}Give a longer --time-limit "
        "(time_limit_s), or a larger budget"
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
