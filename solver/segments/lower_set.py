"""Segments of forward between lower sets, by dynamic programming.

Also called: graph-theoretic recomputation, the canonical strategy, time-centric.
Paper: M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama, "A Graph Theoretic Framework
of Recomputation Algorithms for Memory-Efficient Backpropagation", 2019,
https://arxiv.org/abs/1905.11722.
Solves: least time run again over sequences L1 ⊂ L2 ⊂ ... of lower sets under a limit on a
model of memory. What crosses a lower set stays; the rest of a segment runs again when
backward first reads from it, but for the last, with which backward begins. The limit is
swept, the schedule of each sequence is judged by its true peak, and filled with what fits.
Family: all lower sets where they are at most `most_lower_sets`, else, as in the paper, each
op with all it depends on, and here the prefixes too, thinned to `_APPROXIMATE_SETS`.
Optimal: under that model, for sequences of the family, while no labels are left out; not for
the true peak, whose transients the model leaves out. No bound beyond every op once.
Cost: O(sets² · (ops + labels · log)) for each of some 30 limits; 5,000 ops take seconds
before the fill. Shortcomings: a segment comes back as a whole; what stays, stays until its
last use; pinned ops and the caller's values count as always there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.solver.local_search.repair import offer_filled
from remat.solver.problem import Problem, bytes_across, inverted
from remat.solver.search import Listener, Search, check_least
from remat.solver.segments.chen_sqrt import NO_SEGMENT, segmented_state
from remat.solver.state import State, recomputed_in, store_all_state

# A lower set holds with each op every op that it reads from, as an integer with bit p for position
# p of the forward ops that may run again; what stays in any case is left out.

_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ForwardGraph:
    """The forward ops that backward may run again."""

    problem: Problem
    ops: tuple[int, ...]  # ascending; a position is an index into it
    fixed: bytes  # 1 for values that always stay, or are made in backward
    below: tuple[tuple[int, ...], ...]  # positions that each position reads

    @classmethod
    def of(cls, problem: Problem) -> ForwardGraph:
        made_in_forward = range(problem.n_forward)
        fixed = bytes(
            problem.no_recompute[op] or v in problem.held or op not in made_in_forward
            for v, op in enumerate(problem.producer)
        )
        roots = dict.fromkeys(
            v for stage in range(problem.n_forward, problem.n_ops + 1) for v in problem.needs[stage]
        )
        # At the end of the step, every op can run again.
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
        return (1 << len(self.ops)) - 1

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        reads = (self.problem.inputs[op] for op in self.ops)
        return tuple(map(tuple, inverted(reads, self.problem.n_values)))

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
    found, waiting = {0: None}, [0]
    while waiting:
        following: dict[int, None] = {}
        for mask in waiting:
            for p, need in enumerate(needs):
                if not mask >> p & 1 and not need & ~mask:
                    following[mask | 1 << p] = None
            if len(found) + len(following) > most:  # early: their number may be exponential
                return None
        found.update(following)
        waiting = list(following)
    return _by_size(found)


def pruned_lower_sets(graph: ForwardGraph, most: int) -> list[int]:
    """Each position with all it depends on, and the prefixes; at most `most`, by size."""
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
    boundary = _boundary_bytes(graph, inner)
    edges = [len(inner) * i // groups for i in range(groups + 1)]
    spread = (range(low, high) for low, high in pairwise(edges))
    # Of each stretch of sizes the fewest boundary bytes.
    chosen = [min(group, key=lambda i: (boundary[i], i)) for group in spread]
    return [masks[0], *(inner[i] for i in chosen), masks[-1]]


def _boundary_bytes(graph: ForwardGraph, masks: Sequence[int]) -> list[int]:
    """The bytes that positions outside of each lower set read from it."""
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
        row = _bits_of(mask, len(graph.ops))
        crossing = np.unique(values[row[made] & ~row[read]])
        found.append(int(sizes[crossing].sum()))
    return found


def _bits_of(mask: int, count: int) -> _Flags:
    packed = np.frombuffer(mask.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").astype(np.bool_)


# Dynamic programming: what a segment costs depends on its two ends alone, so a table of pairs holds
# it. A label at a set: time of the segments so far, and bytes that stay.

_Numbers = npt.NDArray[np.float64]  # microseconds, or bytes, exact up to 2⁵³
_Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SegmentTable:
    """What the segment from one lower set to a larger one costs; entries [larger, smaller]."""

    masks: list[int]  # from the empty one to the one of all, by size
    follows: _Flags  # whether the smaller is within the larger
    overhead_us: _Numbers  # of running the segment again, 0 for the last
    kept_bytes: _Numbers  # that the segment adds to what stays
    needed_bytes: _Numbers  # in its part of backward, beyond what stays of earlier ones

    @classmethod
    def of(cls, graph: ForwardGraph, masks: list[int]) -> SegmentTable:
        member = np.array([_bits_of(mask, len(graph.ops)) for mask in masks]).T.copy()
        again, kept = _contents(graph, member)
        outside = (~member).astype(np.float64)
        cost_us = np.array([graph.problem.cost_us[op] for op in graph.ops])
        overhead_us = (again * cost_us[:, None]).T @ outside
        overhead_us[-1] = 0.0  # backward begins with all of the last segment
        inside = member.astype(np.float64)
        sizes = inside.sum(axis=0)
        return cls(
            masks=masks,
            # Within: as many members in common as the smaller has.
            follows=(inside.T @ inside == sizes[None, :]) & (sizes[:, None] > sizes[None, :]),
            overhead_us=overhead_us,
            kept_bytes=kept.T @ outside,
            needed_bytes=_needed_bytes(graph, member) + graph.always_bytes(),
        )


def _contents(graph: ForwardGraph, member: _Flags) -> tuple[_Flags, _Numbers]:
    """By position and lower set: whether it runs again, and the bytes of it that stay."""
    again, kept = np.zeros_like(member), np.zeros(member.shape)
    # Whatever the segment's start: no chain of values that do not stay leaves it.
    for p in reversed(range(len(graph.ops))):
        for v in graph.loose_outputs(p):
            stays = np.zeros_like(member[p])
            wanted = np.full_like(member[p], v in graph.read_in_backward)
            for q in graph.readers[v]:
                stays |= ~member[q]  # a position outside reads it
                wanted |= again[q]
            again[p] |= member[p] & ~stays & wanted
            kept[p] += graph.problem.size_bytes[v] * (stays & member[p])
    return again, kept


def _needed_bytes(graph: ForwardGraph, member: _Flags) -> _Numbers:
    """Most bytes while backward reads a segment: its rest, and backward's own."""
    problem, last = graph.problem, graph.problem.last_need
    position = {v: p for p in range(len(graph.ops)) for v in graph.loose_outputs(p)}
    reads = [
        (position[v], t)
        for t in range(problem.n_forward, problem.n_ops + 1)
        for v in problem.needs[t]
        if v in position
    ]
    read = (v for v in position if last[v] >= problem.n_forward)
    values = sorted(read, key=lambda v: (last[v], v))
    places = np.array([position[v] for v in values], np.int64)
    sizes = np.array([problem.size_bytes[v] for v in values], np.float64)
    readers, stages = np.array(reads, np.int64).reshape(-1, 2).T
    later = np.searchsorted(np.array([last[v] for v in values], np.int64), stages)
    # Of backward's own values while each stage runs, its op's outputs included.
    live = bytes_across(problem, problem.last_need, range(problem.n_forward, problem.n_ops))
    own = np.add(live[:-1], problem.own_bytes, dtype=np.float64)[stages]
    found = np.zeros((member.shape[1], member.shape[1]))
    for i in range(member.shape[1]):
        segment = member & ~member[:, i : i + 1]
        unread = np.cumsum((segment[places] * sizes[:, None])[::-1], axis=0)[::-1]
        needed = np.where(segment[readers], unread[later] + own[:, None], 0.0)
        found[:, i] = needed.max(axis=0, initial=0.0)
    return found


class _Labels:
    """Labels of one run of the program, in one array each; label 0 is the empty set's."""

    def __init__(self, most: int) -> None:
        self.owner: _Indices = np.zeros(most + 1, np.int64)  # index of the label's lower set
        self.parent: _Indices = np.zeros(most + 1, np.int64)  # the label it was made from
        self.time_us: _Numbers = np.zeros(most + 1)
        self.kept_bytes: _Numbers = np.zeros(most + 1)
        self.count = 1  # in use

    def add(self, owner: int, parent: _Indices, time_us: _Numbers, kept_bytes: _Numbers) -> None:
        part = slice(self.count, self.count + len(parent))
        self.owner[part], self.parent[part] = owner, parent
        self.time_us[part], self.kept_bytes[part] = time_us, kept_bytes
        self.count += len(parent)


@dataclass(slots=True)
class SequenceProgram:
    table: SegmentTable
    most_labels: int  # at a lower set; of more, ones evenly spread from the fastest to the leanest
    was_thinned: bool = field(default=False, init=False)

    def fastest(self, limit_bytes: float) -> tuple[float, tuple[int, ...]] | None:
        """Time run again and the lower sets; None where no sequence is within the limit."""
        table, last = self.table, len(self.table.masks) - 1
        labels = _Labels(len(table.masks) * self.most_labels)
        for j in range(1, last + 1):
            self._extend(labels, j, limit_bytes)
        ends = np.flatnonzero(labels.owner[: labels.count] == last)
        if last == 0 or not ends.size:
            return (0.0, ()) if last == 0 else None
        label = int(ends[0])  # labels come fastest first
        found_us, sequence = float(labels.time_us[label]), list[int]()
        while label:
            sequence.append(table.masks[int(labels.owner[label])])
            label = int(labels.parent[label])
        return found_us, tuple(reversed(sequence))

    def _extend(self, labels: _Labels, j: int, limit_bytes: float) -> None:
        table, owner = self.table, labels.owner[: labels.count]
        within = labels.kept_bytes[: labels.count] + table.needed_bytes[j][owner] <= limit_bytes
        if not (usable := np.flatnonzero(table.follows[j][owner] & within)).size:
            return
        before = owner[usable]
        time_us = labels.time_us[usable] + table.overhead_us[j][before]
        kept_bytes = labels.kept_bytes[usable] + table.kept_bytes[j][before]
        chosen = self._undominated(time_us, kept_bytes)
        labels.add(j, usable[chosen], time_us[chosen], kept_bytes[chosen])

    def _undominated(self, time_us: _Numbers, kept_bytes: _Numbers) -> _Indices:
        """Labels that no other beats in both, the fastest first."""
        order = np.lexsort((kept_bytes, time_us))
        least = np.minimum.accumulate(kept_bytes[order])
        front = order[np.concatenate(([True], least[1:] < least[:-1]))]
        if len(front) <= self.most_labels:
            return front
        self.was_thinned = True
        return front[np.linspace(0, len(front) - 1, self.most_labels).astype(np.int64)]


LowerSetFamily = Literal["auto", "exact", "approximate"]
_APPROXIMATE_SETS = 150  # most lower sets of the approximate family
_LIMITS = 16  # limits of the sweep, evenly spread and the same whatever the budget
_HALVINGS = 8  # bisections for the least limit of the sweep
_REFINEMENTS = 4  # bisections between the last limit too high and the first that fits


@dataclass(frozen=True)
class LowerSet:
    """Solver by sequences of lower sets.

    Attributes
    ----------
    family : ``exact`` (all lower sets), ``approximate``, or ``auto``, which is exact where
        there are at most `most_lower_sets`; beyond, ``exact`` is approximate too and says so.
    labels : most labels of time and memory kept at a lower set.
    fill : carry what still fits when the sequence is found.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    family: LowerSetFamily = "auto"
    most_lower_sets: int = 500
    labels: int = 64
    fill: bool = True
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        if self.family not in get_args(LowerSetFamily):
            raise SolverError(
                f"unknown family '{self.family}'; there are {', '.join(get_args(LowerSetFamily))}"
            )
        check_least(2, most_lower_sets=self.most_lower_sets, labels=self.labels)

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        return Search.of(self, "lower_set", graph, budget_bytes).result_of(self.run)

    def run(self, search: Search) -> None:
        if search.offer_least(store_all_state(search.problem)):
            return
        if not (forward := ForwardGraph.of(search.problem)).ops:
            search.message = "backward reads nothing that could run again"
            return
        search.say("listing lower sets")
        masks, search.message = self._masks(forward)
        program = SequenceProgram(SegmentTable.of(forward, masks), self.labels)
        _Sweep(search, forward, program, self.fill).run()
        if program.was_thinned:
            search.message += f", at most {self.labels} labels at each"

    def _masks(self, forward: ForwardGraph) -> tuple[list[int], str]:
        masks = None
        if self.family != "approximate":
            masks = all_lower_sets(forward, self.most_lower_sets)
        if masks is not None:
            return masks, f"over all {len(masks)} lower sets"
        masks = pruned_lower_sets(forward, _APPROXIMATE_SETS)
        text = f"over {len(masks)} lower sets of the approximate family"
        if self.family == "exact":
            text += f", since there are more than {self.most_lower_sets} in all"
        return masks, text


@dataclass(slots=True)
class _Sweep:
    """Looks for the limit of the model at which the true peak just fits."""

    search: Search
    forward: ForwardGraph
    program: SequenceProgram
    does_fill: bool
    over: dict[tuple[int, ...], bool] = field(default_factory=dict[tuple[int, ...], bool])

    def run(self) -> None:
        limits = self._limits()
        low, high = 0, len(limits)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._is_over(limits[middle]) else (low, middle)
        if 0 < high < len(limits):
            over, under = limits[high - 1], limits[high]
            for _ in range(_REFINEMENTS):
                between = (over + under) / 2
                over, under = (between, under) if self._is_over(between) else (over, between)
        # Large graphs: limits next to the budget, one schedule filled.
        if not self.search.is_large or self.search.best is None:
            for limit_bytes in limits:
                self._is_over(limit_bytes)
        if self.search.is_large and self.search.best_state is not None:
            self._fill(self.search.best_state.copy())

    def _limits(self) -> list[float]:
        """From what one segment of all needs down to the least that a sequence needs."""
        high = float(self.program.table.needed_bytes[-1, 0])
        low, least = float(self.forward.always_bytes()), high
        for _ in range(_HALVINGS):
            if self.search.out_of_time():
                break
            middle = (low + least) / 2
            fits = self.program.fastest(middle) is not None
            low, least = (low, middle) if fits else (middle, least)
        return [high - (high - least) * i / _LIMITS for i in range(1, _LIMITS + 1)]

    def _is_over(self, limit_bytes: float) -> bool:
        """Returns whether the schedule found needs more than the budget."""
        search = self.search
        if search.out_of_time():
            return False
        search.say(f"lower sets within {int(limit_bytes)} bytes")
        if (found := self.program.fastest(limit_bytes)) is None:
            return False
        sequence = found[1]
        if sequence not in self.over:  # several limits share a sequence
            state = lower_set_state(self.forward, sequence)
            search.offer_least(state)
            does_fit = int(state.peak_bytes.max()) <= search.budget_bytes
            if does_fit and not search.is_large:
                self._fill(state)
            self.over[sequence] = not does_fit
        return self.over[sequence]

    def _fill(self, state: State) -> None:
        if self.does_fill:
            self.search.say("carrying what still fits")
            offer_filled(self.search, state)


def lower_set_state(forward: ForwardGraph, sequence: Sequence[int]) -> State:
    segment = [NO_SEGMENT] * forward.problem.n_ops  # an op's first set is written last
    last = len(sequence) - 1
    for i in range(last, -1, -1):
        for p, op in enumerate(forward.ops):
            if sequence[i] >> p & 1:
                segment[op] = i
    kept = bytearray(forward.fixed)  # read in another segment, or never made again
    for v, op in enumerate(forward.problem.producer):
        crosses = any(segment[forward.ops[q]] != segment[op] for q in forward.readers[v])
        if segment[op] in (NO_SEGMENT, last) or crosses:
            kept[v] = 1
    return segmented_state(forward.problem, segment, kept)
