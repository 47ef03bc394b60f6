"""Fixed rules of recomputation: from which ops run again to a schedule and a Result.

A template says which values forward keeps for backward. Forward frees the rest after its last
use there, and backward makes it again, once, a segment at a time. A segment is a connected part
of what runs again. It runs when backward first reads a value of it, and it makes all that
backward reads of it. Each value is freed after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from remat.graph_capture.errors import SolverError
from remat.solver.problem import Problem
from remat.solver.result import Result
from remat.solver.search import Search
from remat.solver.stage import recomputed_in


@dataclass(frozen=True, slots=True)
class Template:
    """What backward finds as forward made it; the rest of forward runs again.

    Attributes
    ----------
    kept : 1 for each value that backward finds; 0 for values that it makes, again or first.
    just_in_time : backward makes again only what it reads next, not a whole segment.
    """

    kept: bytearray
    just_in_time: bool = False


Templates = Callable[[Problem], Iterable[Template]]


def solve_templates(search: Search, templates: Templates, absent: str) -> Result:
    """The fastest that fits of the unmodified step and of `templates`, tried in turn.

    Parameters
    ----------
    search : Search
        One solve, just begun.
    templates : callable
        Gives the templates of a problem; none if the rule does not apply.
    absent : str
        The message if there is none.
    """
    with search.until_interrupted():
        if not search.offer_sequence(range(search.problem.n_ops), or_least=True):
            _try_templates(search, templates, absent)
    return search.result()


def _try_templates(search: Search, templates: Templates, absent: str) -> None:
    search.message = absent
    for template in templates(search.problem):
        search.message = ""
        sequence = template_sequence(search.problem, template)
        search.offer_sequence(sequence, or_least=True)
        search.say("the next setting of the template")
        if search.out_of_time():
            return


def template_sequence(problem: Problem, template: Template) -> list[int]:
    """The ops of the step in the order in which `template` runs them."""
    available = bytearray(template.kept)
    segments = _Segments(problem, template.kept)
    sequence = list(range(problem.n_forward))
    for t in range(problem.n_forward, problem.n_ops + 1):
        gone = [v for v in problem.needs[t] if not available[v]]
        if gone:
            wanted = gone if template.just_in_time else segments.read_with(gone)
            order = recomputed_in(problem, available, wanted, t, own_needs=False)
            order = order if template.just_in_time else sorted(order)
            sequence += order
            _mark(problem, available, order)
        if t < problem.n_ops:
            sequence.append(t)
            _mark(problem, available, (t,))
    return sequence


def _mark(problem: Problem, available: bytearray, ops: Iterable[int]) -> None:
    for op in ops:
        for v in problem.outputs[op]:
            available[v] = 1


def regions(problem: Problem, again: Sequence[bool], region: Sequence[int]) -> Template:
    """The template that runs forward ops `again`, each in the region of a checkpoint call.

    Forward keeps what other ops make, what a forward op of another region reads, what comes
    from pinned ops, and what is in the caller's hands.
    """
    kept = unavoidable(problem)
    for v, op in enumerate(problem.producer):
        if op < problem.n_forward and not again[op]:
            kept[v] = 1
    for op in range(problem.n_forward):
        for v in problem.inputs[op]:
            if region[problem.producer[v]] != region[op]:
                kept[v] = 1
    return Template(kept)


def unavoidable(problem: Problem) -> bytearray:
    """1 for values of forward that cannot be made again, or that the caller holds."""
    kept = bytearray(problem.n_values)
    for v, op in enumerate(problem.producer):
        if op < problem.n_forward and (problem.pinned[op] or v in problem.held):
            kept[v] = 1
    return kept


def read_in_backward(problem: Problem) -> list[int]:
    """Values of forward that backward reads, or that must be live at the end."""
    needs = problem.needs[problem.n_forward :]
    read = dict.fromkeys(v for values in needs for v in values)
    return [v for v in read if problem.producer[v] < problem.n_forward]


class _Segments:
    """Connected parts of what runs again, and what backward reads of each."""

    def __init__(self, problem: Problem, kept: bytearray) -> None:
        self.producer = problem.producer
        self.parent = list(range(problem.n_ops))
        for op in range(problem.n_forward):
            if not all(kept[v] for v in problem.outputs[op]):
                for v in problem.inputs[op]:
                    if not kept[v]:
                        self.parent[self.root(op)] = self.root(problem.producer[v])
        self.read: dict[int, list[int]] = {}
        for v in read_in_backward(problem):
            if not kept[v]:
                self.read.setdefault(self.root(problem.producer[v]), []).append(v)

    def root(self, op: int) -> int:
        while self.parent[op] != op:
            self.parent[op] = self.parent[self.parent[op]]
            op = self.parent[op]
        return op

    def read_with(self, values: Iterable[int]) -> list[int]:
        """All that backward reads of the segments that `values` lie in."""
        reached = dict.fromkeys(self.root(self.producer[v]) for v in values)
        return [v for root in reached for v in self.read[root]]


def check_choice(option: str, found: str, allowed: Sequence[str]) -> None:
    """Raise `SolverError` unless `found` is one of the values `allowed` for `option`."""
    if found not in allowed:
        raise SolverError(f"{option} must be one of {', '.join(allowed)}, not '{found}'")
