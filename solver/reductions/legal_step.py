"""What holds between levers, checked where `REMAT_CHECK` is 1: of pairs of graphs, and of answers.

tinygrad runs such rules between passes too (https://github.com/tinygrad/tinygrad, spec.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from remat.graph_capture.errors import GraphError, SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.simulate import simulate

_SAME = 1e-9  # largest relative difference of two times that come from the same sum


def _broken_by_change(before: TrainingGraph, after: TrainingGraph) -> Iterator[str]:
    """Rules that a lever breaks which asks the rest of `after` in place of `before`."""
    if before.inputs != after.inputs or before.device != after.device:
        yield "the batch and the device stay the same"
    # A lever may take outputs away, as updates do, never invent one.
    if not set(after.outputs) <= set(before.outputs):
        yield "results of the step are as asked"
    if not set(after.forward_outputs) <= set(before.forward_outputs):
        yield "results of forward are as asked"
    both = set(before.ordered_ops) & set(after.ordered_ops)
    of_both = [[op for op in one.ordered_ops if op in both] for one in (before, after)]
    if of_both[0] != of_both[1]:
        yield "draws and side effects keep their order"
    held = {*before.forward_outputs, *before.outputs}  # chunks make others of the same names
    for value in after.values:
        if value.producer and value.name not in held:
            continue
        known = before.value_by_name.get(value.name)
        if known is not None and (known.size_bytes, known.shape) != (value.size_bytes, value.shape):
            yield f"no value of the caller changes its size, as {value.name} does"
            return


def _broken_by_answer(graph: TrainingGraph, budget_bytes: int, answer: Result) -> Iterator[str]:
    if answer.schedule is None:
        if answer.status not in ("infeasible", "none found", "time limit"):
            yield "an answer without a schedule is infeasible, none found or cut short"
        return
    if answer.peak_bytes > budget_bytes:
        yield "the peak is within the budget"
    if answer.lower_bound_us > answer.time_us * (1 + _SAME):
        yield "no bound is above the time"
    if answer.status == "optimal" and (answer.gap or 0.0) > _SAME:
        yield "an optimal answer meets its bound"
    found = simulate(graph, answer.schedule)  # which refuses a schedule that breaks a rule
    is_same_time = abs(found.time_us - answer.time_us) <= _SAME * max(found.time_us, 1.0)
    if found.peak_bytes != answer.peak_bytes or not is_same_time:
        yield "figures are the simulator's"


def require_legal_change(before: TrainingGraph, after: TrainingGraph, lever: str) -> None:
    """Raise `GraphError` for the first rule that what a lever asks the rest breaks."""
    for rule in _broken_by_change(before, after):
        raise GraphError(f"lever {lever} broke a rule of a legal step: {rule}")


def require_legal_answer(graph: TrainingGraph, budget_bytes: int, answer: Result, who: str) -> None:
    """Raise `SolverError` for the first rule that the answer to a question breaks."""
    for rule in _broken_by_answer(graph, budget_bytes, answer):
        raise SolverError(f"the answer of {who} breaks a rule: {rule}")
