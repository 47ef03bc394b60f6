"""What is said where no schedule fits."""

from __future__ import annotations

from remat.formats import budget_text, bytes_text
from remat.graph_capture.errors import option
from remat.solver.result import INTERRUPTED, OUT_OF_TIME, Result


def infeasible_text(result: Result) -> str:
    """One sentence each: what was asked, what is possible, what holds it, what to try.

    And, where the budget is below it, the floor; and what is proved to be needed. A search that
    the time limit or Ctrl-C ended is told apart: it names what did.
    """
    asked, least = bytes_text(result.budget_bytes), result.least_feasible_bytes
    if result.message.startswith((OUT_OF_TIME, INTERRUPTED)):
        return _late_text(result)
    if not least:
        is_late = result.status == "time limit"
        advice = "Allow a longer time limit" if is_late else "Raise the budget"
        return f"no schedule within {asked} was found. {result.message or advice}"
    rest = least - sum(item.size_bytes for item in result.held_at_peak)
    held = ", ".join(
        [f"resident and workspace {bytes_text(rest)}"]
        + [
            f"{item.module or item.name} {bytes_text(item.size_bytes)}"
            for item in result.held_at_peak[:3]
        ]
    )
    ways = [text for text in (result.otherwise, option("budget", budget_text(least))) if text]
    return (
        f"budget {asked} is below {bytes_text(least)}, the least that a schedule is known to "
        f"reach; its peak is held by {held}. {_floor_text(result)}Try {', '.join(ways)}, "
        f"a smaller batch, or {option('budget', 'min')}"
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
        place = result.floor.module or result.floor.name
        text = (
            f"The floor, below which outputs of the step must be recomputed, is "
            f"{bytes_text(result.floor.size_bytes)}, at {place}. "
        )
    if result.least_bound_bytes:
        text += f"No schedule needs less than {bytes_text(result.least_bound_bytes)}. "
    return text
