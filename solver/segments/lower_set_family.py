"""Lower sets of the forward graph: all of them, or the family of Kusumoto et al. 2019.

A lower set holds with each op every op that it reads from. The graph here is that of the
forward ops that backward may run again, by position in captured order; what comes from
pinned ops, and what the caller holds, stays in any case and is left out. Lower sets are
integers, bit p for position p. The paper is named in `lower_set`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from remat.solver.problem import Problem
from remat.solver.stage import recomputed_in

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ForwardGraph:
    """The forward ops that backward may run again.

    Attributes
    ----------
    ops : their ids, ascending; a position is an index into it. fixed : 1 for values that
        always stay, or are made in backward. below : positions that each position reads.
    """

    problem: Problem
    ops: tuple[int, ...]
    fixed: bytes
    below: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, problem: Problem) -> ForwardGraph:
        """All that backward reads and that may be made again, with what that reads in turn."""
        made_in_forward = range(problem.n_forward)
        fixed = bytes(
            problem.pinned[op] or v in problem.held or op not in made_in_forward
            for v, op in enumerate(problem.producer)
        )
        roots = dict.fromkeys(
            v for stage in range(problem.n_forward, problem.n_ops + 1) for v in problem.needs[stage]
        )
        again = recomputed_in(problem, fixed, list(roots), problem.n_ops, own_needs=False)
        ops = tuple(sorted(again))
        position = {op: p for p, op in enumerate(ops)}
        reads = ([v for v in problem.inputs[op] if not fixed[v]] for op in ops)
        below = tuple(
            tuple(dict.fromkeys(position[problem.producer[v]] for v in values)) for values in reads
        )
        return cls(problem, ops, fixed, below)

    @property
    def everything(self) -> int:
        """The lower set of all positions."""
        return (1 << len(self.ops)) - 1

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each value the positions that read it."""
        found: list[list[int]] = [[] for _ in range(self.problem.n_values)]
        for p, op in enumerate(self.ops):
            for v in self.problem.inputs[op]:
                found[v].append(p)
        return tuple(tuple(positions) for positions in found)

    @cached_property
    def read_in_backward(self) -> frozenset[int]:
        """Values that backward, or the end of the step, reads."""
        stages = self.problem.needs[self.problem.n_forward :]
        return frozenset(v for needed in stages for v in needed)

    def loose_outputs(self, position: int) -> list[int]:
        """Outputs of a position's op that do not always stay."""
        return [v for v in self.problem.outputs[self.ops[position]] if not self.fixed[v]]

    def always_bytes(self) -> int:
        """Resident bytes, and values of forward that stay whatever the lower sets."""
        problem = self.problem
        return problem.resident_bytes + sum(
            problem.size_bytes[v]
            for v, op in enumerate(problem.producer)
            if op < problem.n_forward
            and self.fixed[v]
            and (v in problem.held or v in self.read_in_backward or self.readers[v])
        )


def all_lower_sets(graph: ForwardGraph, most: int) -> list[int] | None:
    """Every lower set, the empty one first, by size; None where there are more than `most`."""
    needs = [sum(1 << q for q in below) for below in graph.below]
    found = {0: None}
    waiting = [0]
    while waiting:
        following: dict[int, None] = {}
        for mask in waiting:
            for p, need in enumerate(needs):
                if not mask >> p & 1 and not need & ~mask:
                    following[mask | 1 << p] = None
            if len(found) + len(following) > most:
                return None
        found.update(following)
        waiting = list(following)
    return _by_size(found)


def pruned_lower_sets(graph: ForwardGraph, most: int) -> list[int]:
    """Each position with all it depends on, and the prefixes; at most `most`, by size.

    Of too many, those of the fewest boundary bytes are taken, evenly spread over sizes.
    """
    found = {0: None, graph.everything: None}
    closed: list[int] = []
    for p, below in enumerate(graph.below):
        mask = 1 << p
        for q in below:
            mask |= closed[q]
        closed.append(mask)
        found[mask] = found[(2 << p) - 1] = None
    return _thinned(graph, _by_size(found), most)


def _by_size(masks: dict[int, None]) -> list[int]:
    return sorted(masks, key=lambda mask: (mask.bit_count(), mask))


def _thinned(graph: ForwardGraph, masks: list[int], most: int) -> list[int]:
    inner = masks[1:-1]
    groups = max(most - 2, 1)
    if len(inner) <= groups:
        return masks
    boundary = boundary_bytes(graph, inner)
    edges = [len(inner) * i // groups for i in range(groups + 1)]
    spread = (range(low, high) for low, high in pairwise(edges))
    chosen = [min(group, key=lambda i: (boundary[i], i)) for group in spread]
    return [masks[0], *(inner[i] for i in chosen), masks[-1]]


def boundary_bytes(graph: ForwardGraph, masks: Sequence[int]) -> list[int]:
    """For each lower set the bytes that positions outside of it read from it."""
    pairs = [
        (v, p, q)
        for p in range(len(graph.ops))
        for v in graph.loose_outputs(p)
        for q in graph.readers[v]
    ]
    values, made, read = np.array(pairs, np.int64).reshape(-1, 3).T
    sizes = np.array(graph.problem.size_bytes, np.int64)
    found: list[int] = []
    for mask in masks:
        row = bits_of(mask, len(graph.ops))
        crossing = np.unique(values[row[made] & ~row[read]])
        found.append(int(sizes[crossing].sum()))
    return found


def bits_of(mask: int, count: int) -> Flags:
    """Whether each of `count` positions is in the lower set."""
    packed = np.frombuffer(mask.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").astype(np.bool_)
