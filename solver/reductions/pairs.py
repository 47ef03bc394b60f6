"""What no plan keeps together: one row for each pair of levers, asked before anything runs."""

from __future__ import annotations

from collections.abc import Callable

from remat.graph_capture.errors import SolverError, option
from remat.solver.reductions.copy_support import can_copy, plans_copies
from remat.solver.reductions.reduction import Question


def _copies(question: Question) -> bool:
    return can_copy(question.graph) and plans_copies(question.solver)


ASKED: dict[str, Callable[[Question], bool]] = {
    "copies": _copies,
    "recompute": lambda question: bool(question.recompute),
    "free order": lambda question: question.options.get("order") == "free",
}
"""Whether a question asks for a lever."""


LEVER_PAIRS = {
    ("copies", "recompute"): (
        "{recompute} is not planned with copies to the host: leave it out, or leave out {host}"
    ),
    ("copies", "free order"): (
        "order free is not planned with copies to the host: take order fixed, or leave out {host}"
    ),
}
"""Two levers of `ASKED`, why they do not go together, and behind the colon what to do instead.
Options in braces are written as the user has them, in Python or on the command line."""


def refuse_pairs(question: Question) -> None:
    """Raises SolverError, which says why they do not go together and what to do instead."""
    for one, other in LEVER_PAIRS:
        if ASKED[one](question) and ASKED[other](question):
            raise SolverError(_text_of(one, other))


def _text_of(one: str, other: str) -> str:
    named = {name: option(name) for name in ("recompute", "host")}
    return LEVER_PAIRS[one, other].format_map(named)
