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
op with all it depends on, and here the prefixes too, thinned to `APPROXIMATE_SETS`.
Optimal: under that model, for sequences of the family, while no labels are left out; not for
the true peak, whose transients the model leaves out. No bound beyond every op once.
Cost: O(sets² · (ops + labels · log)) for each of some 30 limits; 5,000 ops take seconds
before the fill. Shortcomings: a segment comes back as a whole; what stays, stays until its
last use; pinned ops and the caller's values count as always there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.solver.local_search.repair import fill
from remat.solver.result import Result
from remat.solver.search import Listener, Search
from remat.solver.segments.lower_set_family import ForwardGraph, all_lower_sets, pruned_lower_sets
from remat.solver.segments.lower_set_program import SegmentTable, SequenceProgram
from remat.solver.segments.segmented import NO_SEGMENT, segmented_state
from remat.solver.state import State
from remat.solver.store_all import store_all_state

Family = Literal["auto", "exact", "approximate"]
APPROXIMATE_SETS = 150
"""Most lower sets of the approximate family."""
LIMITS = 16
"""Limits of the sweep, evenly spread and the same whatever the budget."""
HALVINGS = 8
"""Bisections for the least limit of the sweep."""
REFINEMENTS = 4
"""Bisections between the last limit whose schedule is too high and the first that fits."""


@dataclass(frozen=True)
class LowerSet:
    """Solver by sequences of lower sets.

    Attributes
    ----------
    family : ``exact`` (all lower sets), ``approximate``, or ``auto``, which is exact where
        there are at most `most_lower_sets`; beyond, ``exact`` is approximate too and says so.
    labels : most labels of time and memory kept at a lower set.
    fill : carry what still fits when the sequence is found.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    family: Family = "auto"
    most_lower_sets: int = 500
    labels: int = 64
    fill: bool = True
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        if self.family not in get_args(Family):
            raise SolverError(
                f"unknown family '{self.family}'; there are {', '.join(get_args(Family))}"
            )
        if self.most_lower_sets < 2:
            raise SolverError(f"most_lower_sets must be 2 or more, not {self.most_lower_sets}")
        if self.labels < 2:
            raise SolverError(f"labels must be 2 or more, not {self.labels}")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The fastest schedule of a sequence of lower sets found within `budget_bytes`."""
        search = Search.of(self, "lower_set", graph, budget_bytes)
        with search.until_interrupted():
            self.run(search)
        return search.result()

    def run(self, search: Search) -> None:
        """Take the schedule that keeps all if it fits, else sweep the limit."""
        plain = store_all_state(search.problem)
        search.offer_least(plain)
        if search.best is not None:
            return
        forward = ForwardGraph.of(search.problem)
        if not forward.ops:
            search.message = "backward reads nothing that could run again"
            return
        search.say("listing lower sets")
        masks, search.message = self._masks(forward)
        program = SequenceProgram(SegmentTable.of(forward, masks), self.labels)
        Sweep(search, forward, program, self.fill).run()
        if program.was_thinned:
            search.message += f", at most {self.labels} labels at each"

    def _masks(self, forward: ForwardGraph) -> tuple[list[int], str]:
        """The family, and what to say of it."""
        masks = None
        if self.family != "approximate":
            masks = all_lower_sets(forward, self.most_lower_sets)
        if masks is not None:
            return masks, f"over all {len(masks)} lower sets"
        masks = pruned_lower_sets(forward, APPROXIMATE_SETS)
        text = f"over {len(masks)} lower sets of the approximate family"
        if self.family == "exact":
            text += f", since there are more than {self.most_lower_sets} in all"
        return masks, text


@dataclass(slots=True)
class Sweep:
    """Looks for the limit of the model at which the true peak just fits."""

    search: Search
    forward: ForwardGraph
    program: SequenceProgram
    does_fill: bool
    over: dict[tuple[int, ...], bool] = field(default_factory=dict[tuple[int, ...], bool])

    def run(self) -> None:
        """Bisect over the limits, refine, and try the others where that is quick."""
        limits = self._limits()
        low, high = 0, len(limits)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._is_over(limits[middle]) else (low, middle)
        if 0 < high < len(limits):
            self._refine(limits[high - 1], limits[high])
        # On large graphs only limits next to the budget are tried, and one schedule is filled.
        if not self.search.is_large or self.search.best is None:
            for limit_bytes in limits:
                self._is_over(limit_bytes)
        if self.search.is_large:
            self._fill_best()

    def _limits(self) -> list[float]:
        """From what one segment of all needs down to the least that a sequence needs."""
        high = float(self.program.table.needed_bytes[-1, 0])
        low, least = float(self.forward.always_bytes()), high
        for _ in range(HALVINGS):
            if self.search.out_of_time():
                break
            middle = (low + least) / 2
            if self.program.fastest(middle) is None:
                low = middle
            else:
                least = middle
        return [high - (high - least) * i / LIMITS for i in range(1, LIMITS + 1)]

    def _refine(self, over_bytes: float, under_bytes: float) -> None:
        for _ in range(REFINEMENTS):
            middle = (over_bytes + under_bytes) / 2
            if self._is_over(middle):
                over_bytes = middle
            else:
                under_bytes = middle

    def _is_over(self, limit_bytes: float) -> bool:
        """Try a limit; return whether the schedule found needs more than the budget."""
        search = self.search
        if search.out_of_time():
            return False
        search.say(f"lower sets within {int(limit_bytes)} bytes")
        found = self.program.fastest(limit_bytes)
        if found is None:
            return False
        sequence = found[1]
        if sequence not in self.over:
            state = lower_set_state(self.forward, sequence)
            self.over[sequence] = not self._offer(state)
        return self.over[sequence]

    def _offer(self, state: State) -> bool:
        """Whether `state` fits; fill it then, where that is quick."""
        self.search.offer_least(state)
        does_fit = int(state.peak_bytes.max()) <= self.search.budget_bytes
        if does_fit and not self.search.is_large:
            self._fill(state)
        return does_fit

    def _fill_best(self) -> None:
        if self.search.best_state is not None:
            self._fill(self.search.best_state.copy())

    def _fill(self, state: State) -> None:
        if self.does_fill:
            self.search.say("carrying what still fits")
            fill(state, self.search.budget_bytes, self.search)
            self.search.offer(state)


def lower_set_state(forward: ForwardGraph, sequence: Sequence[int]) -> State:
    """The state that keeps what crosses the lower sets and runs segments again when read."""
    segment = segments_of(forward, sequence)
    return segmented_state(forward.problem, segment, _crossing(forward, segment, len(sequence) - 1))


def segments_of(forward: ForwardGraph, sequence: Sequence[int]) -> list[int]:
    """For each op the index of the first lower set that holds it, or `NO_SEGMENT`."""
    found = [NO_SEGMENT] * forward.problem.n_ops
    for i in reversed(range(len(sequence))):
        for p, op in enumerate(forward.ops):
            if sequence[i] >> p & 1:
                found[op] = i
    return found


def _crossing(forward: ForwardGraph, segment: Sequence[int], last: int) -> bytearray:
    """1 for values that stay: of the last segment, read in another one, or never made again."""
    kept = bytearray(forward.fixed)
    for v, op in enumerate(forward.problem.producer):
        crosses = any(segment[forward.ops[q]] != segment[op] for q in forward.readers[v])
        if segment[op] in (NO_SEGMENT, last) or crosses:
            kept[v] = 1
    return kept
