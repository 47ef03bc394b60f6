"""Schedules of plan caches on disk, for the processes after this one: a file for each question.

A question is a priced graph, with every op, size and price in it, a budget and the options of the
solve. A file is not believed (`graph_capture/files/kept_files.py`): its schedule is judged by
`simulate` on the graph at hand, which holds its peak against the budget as it is now.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec
import torch

from remat.budgets import Budget
from remat.caches.sources import sources_key
from remat.graph_capture.errors import PlanError
from remat.graph_capture.files.json_text import decoded
from remat.graph_capture.files.kept_files import KeptFiles
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.solved import Solved
from remat.solver.result import INTERRUPTED, Result, judged

SCHEMA_VERSION = 1
FILES = KeptFiles(
    "plans", "each process plans anew", "planned", most_files=256, most_bytes=1 << 24
)  # fmt: skip
ADDRESS = " at 0x"
"""In the text of an option that says no more than where it lies."""
NEAR, CHEAP = 0.97, 0.005
"""What is free is never the same twice: a plan for so large a part of it is taken, or of so little
overhead."""


class KeptSolve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schedule, and what was proved of it.

    Attributes
    ----------
    key : of the question. budget_bytes : what the budget was when it was solved.
    """

    key: str
    schedule: Schedule
    lower_bound_us: float
    budget_bytes: int
    schema_version: int = SCHEMA_VERSION


def keeps_solves() -> bool:
    """Whether plans may be kept and taken; not where the user has torch keep nothing."""
    return not torch.compiler.config.force_disable_caches


def kept_solve(
    graph: TrainingGraph,
    budget: Budget,
    asked: str,
    in_pieces: Callable[[TrainingGraph], TrainingGraph],
) -> Solved | None:
    """What was kept of this question, judged; None where it is to be solved.

    Parameters
    ----------
    asked : the options of the solve, in words. in_pieces : prices what may run in pieces.
    """
    key = _question_key(graph, budget, asked)
    if not key:
        return None
    found: list[Solved] = []

    def take(data: bytes) -> KeptSolve:
        kept = decoded(data, KeptSolve)
        if (kept.key, kept.schema_version) == (key, SCHEMA_VERSION):
            of_kept = in_pieces(graph) if kept.schedule.pieces and not graph.regions else graph
            found.append(Solved(of_kept, _judged(of_kept, kept)))
        return kept

    if FILES.read(_file_of(key), take) is None or not found:
        return None
    return found[0] if _suits(found[0].result, budget, graph) else None


def keep_solve(graph: TrainingGraph, budget: Budget, asked: str, result: Result) -> None:
    """Keep what was found, for `kept_solve`; not what Ctrl-C has ended."""
    key = _question_key(graph, budget, asked)
    if key and result.schedule is not None and not result.message.startswith(INTERRUPTED):
        kept = KeptSolve(key, result.schedule, result.lower_bound_us, result.budget_bytes)
        FILES.write(_file_of(key), msgspec.json.encode(kept))


def _judged(graph: TrainingGraph, kept: KeptSolve) -> Result:
    """The outcome of a kept schedule.

    Raises
    ------
    RematError : it is none of the graph, is above its budget, or takes less than its bound.
    """
    result = judged(
        graph, kept.schedule,
        budget_bytes=kept.budget_bytes, lower_bound_us=kept.lower_bound_us,
    )  # fmt: skip
    if result.schedule is None:
        raise PlanError("its peak is above its budget")
    if not 0 <= kept.lower_bound_us <= (1 + 1e-9) * result.time_us:
        raise PlanError("its bound is above its time")
    return result


def _suits(found: Result, budget: Budget, graph: TrainingGraph) -> bool:
    """Whether it is what would be planned now."""
    if budget.kind == "min":
        return True
    now_bytes = budget.bytes_for(graph)
    if budget.kind != "auto":
        return found.budget_bytes == now_bytes
    is_enough = found.overhead <= CHEAP or found.budget_bytes >= NEAR * now_bytes
    return found.peak_bytes <= now_bytes and is_enough


def _question_key(graph: TrainingGraph, budget: Budget, asked: str) -> str:
    """SHA-256 of all that a plan depends on; empty where that has no lasting text."""
    if ADDRESS in asked or not keeps_solves():
        return ""
    # The lines of the user's files move while the step stays the same.
    ops = tuple(msgspec.structs.replace(op, source="") for op in graph.ops)
    digest = hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(graph, ops=ops)))
    around = repr(budget), asked, str(torch.version.git_version), sources_key()
    digest.update(msgspec.json.encode(around))
    return digest.hexdigest()


def _file_of(key: str) -> str:
    return f"{key[:32]}.json"
