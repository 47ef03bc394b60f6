"""The training graph in integers, as every formulation and search reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import msgspec

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TANGENTS, TrainingGraph, cached_on


@dataclass(frozen=True)
class Problem:
    """The graph in integers: ops 0..n-1 in captured order, values with a producer 0..m-1."""

    graph: TrainingGraph
    inputs: tuple[tuple[int, ...], ...]  # resident values are left out
    outputs: tuple[tuple[int, ...], ...]
    # At op t's first run: inputs, for the last forward op the forward outputs; entry n is the end.
    needs: tuple[tuple[int, ...], ...]
    producer: tuple[int, ...]
    size_bytes: tuple[int, ...]
    cost_us: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    no_recompute: tuple[bool, ...]
    forward_outputs: tuple[int, ...]  # live when forward ends
    held: frozenset[int]  # in the caller's hands from stage `n_forward` on
    n_forward: int
    resident_bytes: int  # live throughout
    names: tuple[str, ...]

    @property
    def n_ops(self) -> int:
        """Number of ops, also the index of the closing stage."""
        return len(self.inputs)

    @property
    def n_values(self) -> int:
        return len(self.producer)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each op the stages that need a value it makes: of ops, and n for the end."""
        found: list[dict[int, None]] = [{} for _ in range(self.n_ops)]
        for stage, needed in enumerate(self.needs):
            for v in needed:
                found[self.producer[v]][stage] = None
        return tuple(tuple(stages) for stages in found)

    @cached_property
    def last_need(self) -> tuple[int, ...]:
        """For each value the last stage that needs it, -1 for none."""
        last = [-1] * self.n_values
        for stage, needed in enumerate(self.needs):
            for v in needed:
                last[v] = stage
        return tuple(last)

    @cached_property
    def last_forward_read(self) -> tuple[int, ...]:
        """For each value the last forward op that reads it, -1 for none."""
        last = [-1] * self.n_values
        for op in range(self.n_forward):
            for v in self.inputs[op]:
                last[v] = op
        return tuple(last)

    @cached_property
    def own_bytes(self) -> tuple[int, ...]:
        """Outputs and workspace of each op; 0 for the end."""
        own = zip(self.output_bytes, self.workspace_bytes, strict=True)
        return (*(outputs + workspace for outputs, workspace in own), 0)

    @cached_property
    def working_set_bytes(self) -> tuple[int, ...]:
        """Bytes that no schedule can avoid while each op first runs, resident ones left out; and at
        the end."""
        reads = (sum(self.size_bytes[v] for v in inputs) for inputs in self.needs)
        return tuple(read + own for read, own in zip(reads, self.own_bytes, strict=True))

    @classmethod
    def of(cls, graph: TrainingGraph) -> Problem:
        return cached_on(graph, "problem", lambda: cls._indexed(graph))  # several solvers ask

    @classmethod
    def _indexed(cls, graph: TrainingGraph) -> Problem:
        made = [value for value in graph.values if value.producer]
        index = {value.name: i for i, value in enumerate(made)}
        inputs = tuple(_indices(op.inputs, index) for op in graph.ops)
        outputs = tuple(_indices(op.outputs, index) for op in graph.ops)
        needs = [*inputs, _indices(graph.outputs, index)]
        forward_outputs = _indices(graph.forward_outputs, index)
        if graph.n_forward:
            last = graph.n_forward - 1  # forward returns after its last op
            extra = (v for v in forward_outputs if v not in outputs[last])
            needs[last] = tuple(dict.fromkeys((*needs[last], *extra)))
        size_bytes = tuple(value.size_bytes for value in made)
        return cls(
            graph=graph, inputs=inputs, outputs=outputs, needs=tuple(needs),
            producer=tuple(graph.op_index[value.producer] for value in made),
            size_bytes=size_bytes, cost_us=tuple(op.cost_us for op in graph.ops),
            workspace_bytes=tuple(op.workspace_bytes for op in graph.ops),
            output_bytes=tuple(sum(size_bytes[v] for v in made_by) for made_by in outputs),
            no_recompute=tuple(bool(op.no_recompute) for op in graph.ops),
            forward_outputs=forward_outputs,
            held=frozenset(forward_outputs) & frozenset(_indices(graph.outputs, index)),
            n_forward=graph.n_forward, resident_bytes=graph.resident.total_bytes,
            names=tuple(value.name for value in made),
        )  # fmt: skip


def inverted(lists: Iterable[Iterable[int]], count: int) -> list[list[int]]:
    """For each of `count` numbers the places of the lists that have it, ascending."""
    found: list[list[int]] = [[] for _ in range(count)]
    for place, numbers in enumerate(lists):
        for number in numbers:
            found[number].append(place)
    return found


def _indices(names: Iterable[str], index: dict[str, int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(index[name] for name in names if name in index))


def largest_working_set_bytes(problem: Problem) -> int:
    """The most that the first run of an op needs, resident bytes left out."""
    return max(problem.working_set_bytes[:-1], default=0)


def least_needed_bytes(problem: Problem) -> int:
    """No schedule in captured order has a lower peak: what some op or the end needs, all told."""
    end_bytes = sum(problem.size_bytes[v] for v in problem.needs[problem.n_ops])
    return problem.resident_bytes + max(end_bytes, largest_working_set_bytes(problem))


def bytes_across(problem: Problem, last: Sequence[int], ops: Iterable[int]) -> list[int]:
    """Bytes made before each place by `ops` and last read, by `last`, at it or after."""
    change = [0] * (problem.n_ops + 2)
    for op in ops:
        for v in problem.outputs[op]:
            if last[v] > op:
                change[op + 1] += problem.size_bytes[v]
                change[last[v] + 1] -= problem.size_bytes[v]
    return list(accumulate(change))


def can_copy(graph: TrainingGraph) -> bool:
    return graph.links is not None and graph.links.host_bytes > 0


def without_links(graph: TrainingGraph) -> TrainingGraph:
    return graph if graph.links is None else msgspec.structs.replace(graph, links=None)


# First computations come in the order of the given graph: a free order is a graph with another one.

Order = tuple[int, ...]


def predecessors(graph: TrainingGraph) -> list[list[int]]:
    producers = ([graph.value_by_name[name].producer for name in op.inputs] for op in graph.ops)
    # Resident values have none.
    before = [list(dict.fromkeys(graph.op_index[p] for p in found if p)) for found in producers]
    for first, following in pairwise(graph.ordered_ops):  # random ops and effects stay in order
        before[graph.op_index[following]].append(graph.op_index[first])
    # Forward before backward is left to `is_allowed`: as edges it would be quadratic.
    opening = [i for i, op in enumerate(graph.ops) if op.target == TANGENTS]
    for i, op in enumerate(graph.ops):
        if op.phase == "backward" and i not in opening:
            before[i] += opening
    return before


def is_allowed(graph: TrainingGraph, order: Sequence[int]) -> bool:
    if sorted(order) != list(range(len(graph.ops))):
        return False
    position = {op: i for i, op in enumerate(order)}
    if any(op >= graph.n_forward for op in order[: graph.n_forward]):
        return False
    before = predecessors(graph)
    return all(position[b] < position[op] for op in order for b in before[op])


def reordered(graph: TrainingGraph, order: Sequence[int]) -> TrainingGraph:
    """SolverError where an op comes before what it must follow."""
    if not is_allowed(graph, order):
        raise SolverError(f"the ops of {graph.name} cannot run in this order")
    return msgspec.structs.replace(graph, ops=tuple(graph.ops[i] for i in order))
