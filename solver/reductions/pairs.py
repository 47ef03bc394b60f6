"""What no plan keeps together: one row for each pair of levers, asked before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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


class Pair(NamedTuple):
    """Two levers of `ASKED`, why they do not go together, and what to do.

    Options in braces are written as the user has them, in Python or on the command line.
    """

    one: str
    other: str
    why: str
    instead: str


PAIRS = (
    Pair(
        "copies", "recompute",
        "{recompute} is not planned with copies to the host",
        "leave it out, or leave out {host}",
    ),
    Pair(
        "copies", "free order",
        "order free is not planned with copies to the host",
        "take order fixed, or leave out {host}",
    ),
)  # fmt: skip


def refuse_pairs(question: Question) -> None:
    """Refuse a question that asks for both levers of a row.

    Raises
    ------
    SolverError : says why they do not go together, and what to do instead.
    """
    for pair in PAIRS:
        if ASKED[pair.one](question) and ASKED[pair.other](question):
            named = {name: option(name) for name in ("recompute", "host")}
            raise SolverError(f"{pair.why}: {pair.instead}".format_map(named))
