"""What a schedule keeps of what backward reads, and what it computes again, by kind of op.

Attention is counted apart, by cores (`attention_core`), be it one fused op or written out. Its
output is kept if the op that makes it runs once.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.as_planned import as_planned
from remat.schedules.schedule import Schedule
from remat.solver.attention_core import (
    BATCHED_PRODUCT,
    NO_CORE,
    attention_cores,
    is_fused_attention,
    op_kind,
)
from remat.solver.problem import Problem


class Attention(msgspec.Struct, frozen=True):
    """How many attention outputs backward needs, and how many of them are computed again."""

    outputs: int
    recomputed: int

    def __str__(self) -> str:
        if self.recomputed:
            return f"recomputes {self.recomputed} of {_outputs(self.outputs)}"
        return f"keeps {'all ' if self.outputs > 1 else ''}{_outputs(self.outputs)}"


class Kind(NamedTuple):
    """Forward ops of one kind, and how many of them run again.

    An op counts if backward reads from it, or if it runs again. `recomputed_us` is the time of
    the further runs.
    """

    kind: str
    ops: int
    recomputed: int
    recomputed_us: float


def attention_of(graph: TrainingGraph, schedule: Schedule) -> Attention | None:
    """What `schedule` does with attention; None without attention or recomputation."""
    graph = as_planned(graph, schedule)
    runs = schedule.computations()
    if all(count == 1 for count in runs.values()):
        return None
    makers = attention_outputs(graph)
    recomputed = sum(runs[graph.ops[op].name] > 1 for op in makers)
    return Attention(len(makers), recomputed) if makers else None


def attention_outputs(graph: TrainingGraph) -> list[int]:
    """The op that makes the output of each attention from which backward reads."""
    problem = Problem.of(graph)
    read = _read_by_backward(problem)
    makers: dict[int, int] = {}
    needed: set[int] = set()
    for op, core in enumerate(attention_cores(problem)):
        kind = op_kind(graph.ops[op].target)
        if core == NO_CORE:
            continue
        if kind in BATCHED_PRODUCT or is_fused_attention(kind):
            makers[core] = op
        if op in read:
            needed.add(core)
    return [op for core, op in makers.items() if core in needed]


def kinds_of(graph: TrainingGraph, schedule: Schedule) -> tuple[Kind, ...]:
    """Each kind of forward op that counts, most time of further runs first."""
    graph = as_planned(graph, schedule)
    runs = schedule.computations()
    read = _read_by_backward(Problem.of(graph))
    found: dict[str, Kind] = {}
    for i, op in enumerate(graph.ops[: graph.n_forward]):
        again = runs[op.name] - 1
        if i in read or again > 0:
            kind = op_kind(op.target)
            old = found.get(kind, Kind(kind, 0, 0, 0.0))
            spent_us = old.recomputed_us + again * op.cost_us
            found[kind] = Kind(kind, old.ops + 1, old.recomputed + (again > 0), spent_us)
    return tuple(sorted(found.values(), key=lambda kind: (-kind.recomputed_us, kind.kind)))


def kinds_text(kinds: tuple[Kind, ...], most: int = 4) -> str:
    """``gelu 12 of 12, add 3 of 24``: the kinds that cost most to run again, then the rest."""
    again = [kind for kind in kinds if kind.recomputed]
    parts = [f"{kind.kind} {kind.recomputed} of {kind.ops}" for kind in again[:most]]
    rest = sum(kind.recomputed for kind in again[most:])
    return ", ".join([*parts, f"{rest} others"] if rest else parts)


def _read_by_backward(problem: Problem) -> set[int]:
    """Forward ops whose values backward reads."""
    reads = problem.inputs[problem.n_forward :]
    makers = {problem.producer[v] for values in reads for v in values}
    return {op for op in makers if op < problem.n_forward}


def _outputs(count: int) -> str:
    return f"{count} attention output" + ("s" if count != 1 else "")
