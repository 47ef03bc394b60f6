"""Which graphs are planned with copies, and what holds for them of solvers that copy nothing."""

from __future__ import annotations

import msgspec

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.solver.reductions.reduction import Question, Reduction, Rest
from remat.solver.result import Result
from remat.solver.table import solver_class

_ALONE = "Without copies"
"""How a proof begins that holds for recomputation alone."""


def can_copy(graph: TrainingGraph) -> bool:
    return graph.links is not None and graph.links.host_bytes > 0


def without_links(graph: TrainingGraph) -> TrainingGraph:
    return graph if graph.links is None else msgspec.structs.replace(graph, links=None)


def plans_copies(solver: str) -> bool:
    return getattr(solver_class(solver), "copies", False)


def require_no_homes(graph: TrainingGraph, solver: str) -> None:
    """Raises SolverError: a value has a home, or an op updates values in place."""
    moved = [value.name for value in graph.values if value.home is not None]
    moved += [name for op in graph.ops for name in op.updates]
    if moved:
        raise SolverError(
            f"solver '{solver}' sends activations alone, and {moved[0]} is to be moved too: "
            "capture without an optimizer that is to move"
        )


class WithoutCopies(Reduction[None]):
    """Weakens what a solver proves that does not know of copies; its schedule stays."""

    def accepts(self, question: Question) -> bool:
        return can_copy(question.graph) and not plans_copies(question.solver)

    def solve(self, question: Question, rest: Rest) -> Result:
        return _for_any_copies(question.graph, rest(question))


def _for_any_copies(graph: TrainingGraph, result: Result) -> Result:
    if result.schedule is None:
        # What it proves holds without copies alone: of the bound each op's time once is left, and
        # of a proof that nothing fits its sentence.
        text = f"{_ALONE}: {result.message}" if result.message else ""
        return msgspec.structs.replace(
            result, lower_bound_us=graph.time_us, least_bound_bytes=0, floor=None, message=text
        )
    proved = result.time_us <= graph.time_us * (1 + 1e-9)
    status = "feasible" if result.status == "optimal" and not proved else result.status
    return msgspec.structs.replace(
        result, status=status, lower_bound_us=min(graph.time_us, result.time_us), floor=None
    )
