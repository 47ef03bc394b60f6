"""What backward reads of forward, and what becomes of it: kept, hosted or made again.

Published policies choose among these for each value. Here such a choice becomes a base with copies
to place: what is made again is made just in time, and what is hosted arrives right before its use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from remat.graph_capture.links import Links
from remat.solver.local_search.repair import GapMove, apply, carriable
from remat.solver.offload.arrivals import Base, base_of, hosting, movable
from remat.solver.problem import Problem
from remat.solver.stage import UnreachableError, recomputed_in
from remat.solver.state import State
from remat.solver.templates.module_blocks import NO_BLOCK, module_blocks
from remat.solver.templates.template import read_in_backward, unavoidable


class Choice(NamedTuple):
    """Values that leave the device, and values that are made again; all others are kept."""

    hosted: frozenset[int]
    again: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Saved:
    """What backward reads of forward, with what a policy may ask of each value.

    Attributes
    ----------
    least_bytes : smaller values are never released: their copies would be all latency.
    """

    problem: Problem
    links: Links
    least_bytes: int

    @cached_property
    def values(self) -> list[int]:
        """Values that backward reads and that the caller does not hold anyway."""
        handed = frozenset(self.problem.forward_outputs)
        return [v for v in read_in_backward(self.problem) if v not in handed]

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.problem.size_bytes[v] for v in self.values)

    @cached_property
    def large(self) -> list[int]:
        """Those that may leave the device."""
        moves, size_bytes = movable(self.problem), self.problem.size_bytes
        return [v for v in self.values if moves[v] and size_bytes[v] >= self.least_bytes]

    @cached_property
    def begin_us(self) -> npt.NDArray[np.float64]:
        """When each op begins if each runs once; one more entry is the end of the step."""
        return np.concatenate(([0.0], np.cumsum(self.problem.cost_us)))

    @property
    def forward_us(self) -> float:
        """When forward ends."""
        return float(self.begin_us[self.problem.n_forward])

    @cached_property
    def last_read(self) -> dict[int, int]:
        """The last forward op that reads each value, or the op that makes it."""
        last = {v: self.problem.producer[v] for v in self.values}
        for stage in range(self.problem.n_forward):
            last.update((v, stage) for v in self.problem.needs[stage] if v in last)
        return last

    @cached_property
    def first_read(self) -> dict[int, int]:
        """The first backward op that reads each value; the number of ops for the end."""
        first: dict[int, int] = {}
        for stage in range(self.problem.n_forward, self.problem.n_ops + 1):
            for v in self.problem.needs[stage]:
                first.setdefault(v, stage)
        return {v: first[v] for v in self.values}

    @cached_property
    def layer(self) -> dict[int, int]:
        """The repeated block whose op makes each value; `NO_BLOCK` outside of all."""
        of_op = module_blocks(self.problem.graph).of_op
        return {v: of_op[self.problem.producer[v]] for v in self.values}

    def in_layers(self, values: Iterable[int]) -> dict[int, list[int]]:
        """Those of `values` in each layer, layers in order; what is in none is left out."""
        layers: dict[int, list[int]] = {}
        for v in values:
            if self.layer[v] != NO_BLOCK:
                layers.setdefault(self.layer[v], []).append(v)
        return dict(sorted(layers.items()))

    @cached_property
    def again_us(self) -> dict[int, float]:
        """Time to make each value again from the others; infinite where a pin forbids it."""
        return {v: self._again_us(v) for v in self.values}

    def _again_us(self, v: int) -> float:
        problem, saved = self.problem, frozenset(self.values)
        waiting = [problem.producer[v]]
        seen = set(waiting)
        took_us = 0.0
        while waiting:
            op = waiting.pop()
            if problem.pinned[op]:
                return float("inf")
            took_us += problem.cost_us[op]
            for below in (problem.producer[u] for u in problem.inputs[op] if u not in saved):
                if below not in seen:
                    seen.add(below)
                    waiting.append(below)
        return took_us

    def released(self, hosted: Collection[int], kept: Collection[int]) -> Choice:
        """The choice that keeps and hosts these; the rest is made again."""
        again = frozenset(self.values).difference(hosted, kept)
        return Choice(frozenset(hosted), again)

    def base(self, choice: Choice) -> Base | None:
        """What `choice` comes to; None where a pin forbids to make a value again."""
        problem = self.problem
        hosted = frozenset(problem.producer[v] for v in choice.hosted)
        mine = hosting(problem, hosted, self.links)
        kept = unavoidable(problem)
        for v in (*self.values, *problem.forward_outputs):
            kept[v] = 1
        for v in (*choice.hosted, *choice.again):
            kept[v] = problem.pinned[problem.producer[v]] and v not in choice.hosted
        try:
            state = State.from_recomputed(mine, _just_in_time(mine, kept))
        except UnreachableError:
            return None
        _carry(state, hosted, kept)
        return base_of(state, hosted)


def _carry(state: State, hosted: frozenset[int], kept: bytearray) -> None:
    """Keep what is kept, also where another result of its op arrives: a run makes all anew."""
    for stage in range(state.problem.n_forward, state.problem.n_ops + 1):
        for op in [op for op in state.stages[stage].recomputed if op in hosted]:
            for v, before in carriable(state, op, stage):
                if kept[v]:
                    apply(state, GapMove(v, before, stage, 1))


def _just_in_time(problem: Problem, kept: bytearray) -> list[list[int]]:
    """Ops to run again in each stage, where backward finds `kept` alone."""
    available = bytearray(b"\1" * problem.n_values)
    stages: list[list[int]] = []
    for t in range(problem.n_ops + 1):
        if t == problem.n_forward:
            available = bytearray(kept)
        stages.append(recomputed_in(problem, available, (), t))
        for op in (*stages[-1], t) if t < problem.n_ops else stages[-1]:
            for v in problem.outputs[op]:
                available[v] = 1
    return stages
