"""Checkpoints wherever a segment of forward has grown beyond so many bytes.

Also called: Chen's greedy, memory-budget segmenting; "linearised" or "AP greedy" in Checkmate.
Paper: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory
Cost", 2016, https://arxiv.org/abs/1604.06174; its search over the bytes of a segment as P.
Jain et al. reproduce it, "Checkmate", 2020, https://arxiv.org/abs/1910.02653.
Solves: no stated problem. Forward is walked once; where the bytes made since the last
checkpoint exceed b, the next place that may hold one ends the segment. What crosses is kept,
a segment is recomputed when backward first reads it. Of all b tried, and of keeping
everything, the fastest schedule that fits is returned.
Optimal up to a constant on uniform chains. Cost: O(ops + reads) for each b.
Shortcomings: one b for all segments; recomputes what would have fitted; blind to op costs;
where skips cross, every place makes large checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.solver.problem import Problem
from remat.solver.result import Result
from remat.solver.search import Listener, Search
from remat.solver.segments.chen_sqrt import articulation_points, checkpointed_state, kept_values
from remat.solver.store_all import store_all_state

_POINTS = ("auto", "articulation", "all")


@dataclass(frozen=True)
class ChenGreedy:
    """Solver that segments by bytes.

    Attributes
    ----------
    points : where a checkpoint may be: at the articulation points of forward, after all its
        ops, or ``auto``: the former where there are any. sizes : how many b are tried.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    points: str = "auto"
    sizes: int = 20
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        if self.points not in _POINTS:
            raise SolverError(f"points must be one of {', '.join(_POINTS)}, not '{self.points}'")
        if self.sizes < 1:
            raise SolverError(f"sizes must be 1 or more, not {self.sizes}")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        search = Search.of(self, "chen_greedy", graph, budget_bytes)
        with search.until_interrupted():
            self._run(search)
        return search.result()

    def _run(self, search: Search) -> None:
        problem = search.problem
        search.offer_least(store_all_state(problem))
        if search.best is not None:
            return
        places = self._places(problem)
        if not places:
            search.message = "the forward graph has no articulation point; try points='all'"
        tried: set[tuple[int, ...]] = set()
        for size_bytes in _segment_sizes(problem, self.sizes):
            ends = _greedy_ends(problem, places, size_bytes)
            # No segment can end if there is no place.
            if not places or search.out_of_time():
                return
            # Many sizes give the same segments.
            if ends not in tried:
                tried.add(ends)
                search.say(f"segments of {size_bytes} bytes")
                search.offer_least(checkpointed_state(problem, ends))

    def _places(self, problem: Problem) -> list[int]:
        everywhere = list(range(problem.n_forward - 1))  # forward ends after the last op anyway
        if self.points == "all":
            return everywhere
        found = [place.end for place in articulation_points(problem, kept_values(problem))]
        return found or (everywhere if self.points == "auto" else [])


def _segment_sizes(problem: Problem, count: int) -> list[int]:
    """The b to try, from the mean bytes of an op up to those of all, in equal ratios."""
    most = max(sum(problem.output_bytes[: problem.n_forward]), 1)
    least = max(most // max(problem.n_forward, 1), 1)
    ratio = (most / least) ** (1 / count)
    sizes = [round(least * ratio**i) for i in range(count)]
    middle = math.log(most / least) / 2
    return sorted(dict.fromkeys(sizes), key=lambda size: abs(math.log(size / least) - middle))


def _greedy_ends(problem: Problem, places: Iterable[int], size_bytes: int) -> tuple[int, ...]:
    ends: list[int] = []
    allowed, since_bytes = set(places), 0
    for op in range(problem.n_forward):
        since_bytes += problem.output_bytes[op]
        if since_bytes > size_bytes and op in allowed:
            ends.append(op)
            since_bytes = 0
    return tuple(ends)
