"""Checkmate's linear relaxation, rounded in two phases.

Also called: Checkmate's approximation, deterministic and randomised LP rounding.
Paper: P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization", 2020, https://arxiv.org/abs/1910.02653 (section 5).
Solves: least time under a budget on the true peak, by the program of `staged_program`
without integrality, at a budget whose room above the resident bytes is tightened by
`slack`. Phase one rounds what is carried into each stage: at thresholds, 0.5 first, then at
random with the relaxed value as the probability. Phase two runs again what is then missing, and
no more. Schedules that do not fit are dropped, and the best of the others is returned. If none
fits, other slacks are tried. What must not run twice, and what the caller holds, is carried.
Optimal: never by proof, except where it meets the bound. The relaxation at the full budget is a
bound from 3 sweeps a stage on, see `checkmate`. With fewer, the bound is every op once.
Cost: an LP of O(passes · ops · (ops + reads)) variables, and about as many rows; refused
beyond `most_ops`. Shortcomings: the LP rarely ends beyond some 150 ops; rounding often fits
no tight budget, since relaxed values spread over many stages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.solver.backends.mip import BACKENDS, Backend, Limits, MipSolution, solve_program
from remat.solver.exact.checkmate import EXACT_PASSES, StagedProgram
from remat.solver.local_search.repair import Repair, offer_filled
from remat.solver.problem import Problem
from remat.solver.result import TOO_LARGE
from remat.solver.search import Listener, Search, check_least
from remat.solver.state import State, recomputed_in, store_all_state

_THRESHOLDS = (0.5, 0.4, 0.6, 0.25, 0.75, 0.1, 0.9)
"""Thresholds tried in turn; the first is the paper's."""
_SLACK_STEPS = (1.0, 2.0, 3.0, 0.5, 0.0)
"""Slacks tried in turn, in units of the one asked for, until a rounded schedule fits."""
_BOUND_SLACK = 1e-6
"""Relative tolerance of the LP's objective, taken off before it is claimed as a bound."""

_Relaxed = list[dict[int, float]]
"""For each stage the relaxed value of carrying a value into it, by value."""


@dataclass(frozen=True)
class LpRounding:
    """Solver by rounding of the relaxed program.

    Attributes
    ----------
    slack : part of the room above the resident bytes that the LP must leave free, below 1.
    rounds : random roundings of an LP point, after the thresholds. seed : of those.
    passes : sweeps a stage has; 1 as in the paper, a bound is claimed from 3 on.
    repair : bring roundings that do not fit under the budget, and fill (not in the paper).
    most_ops : graphs of more ops are refused: their program takes gigabytes.
    backend : ``mathopt`` (HiGHS) or ``pulp`` (CBC).
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    slack: float = 0.1
    rounds: int = 20
    seed: int = 0
    passes: int = 1
    repair: bool = False
    most_ops: int = 250
    backend: Backend = "mathopt"
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.slack < 1:
            raise SolverError(f"slack must be at least 0 and below 1, not {self.slack}")
        check_least(0, rounds=self.rounds)
        check_least(1, passes=self.passes, most_ops=self.most_ops)
        if self.backend not in BACKENDS:
            raise SolverError(
                f"unknown LP backend '{self.backend}'; there are {', '.join(BACKENDS)}"
            )

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        return Search.of(self, "lp_rounding", graph, budget_bytes).result_of(self.run)

    def run(self, search: Search) -> None:
        # Nothing is faster than running each op once.
        if search.offer_least(store_all_state(search.problem)):
            return
        n_ops = search.problem.n_ops
        if n_ops > self.most_ops:
            search.cut_short = True
            search.message = f"the graph has {n_ops} ops, {TOO_LARGE} = {self.most_ops}"
            return
        if search.budget_bytes <= search.problem.resident_bytes:
            search.message = "resident bytes take the whole budget"
            return
        # The LP of the full budget comes first if it is a bound: its proof may end the search.
        first = [0.0] if self.passes >= EXACT_PASSES else []
        asked = [min(self.slack * step, 0.9) for step in _SLACK_STEPS]
        for slack in dict.fromkeys((*first, *asked)):
            if search.out_of_time() or search.proved_infeasible:
                return
            point, best_key = self._relaxed(search, slack), search.best_key
            if point is not None:
                self._round(search, point)
            if search.best_key < best_key:
                search.message = f"rounded from the relaxed program at slack {slack:g}"
            # Slack 0 is solved only for its bound: go on with the slack that was asked for.
            if search.best is not None and slack:
                return
        if search.best is None and not search.cut_short:
            search.message = "no rounding of the relaxed program fits, at any slack tried"

    def _relaxed(self, search: Search, slack: float) -> _Relaxed | None:
        search.say(f"solving the relaxed program at slack {slack:g}")
        room_bytes = search.budget_bytes - search.problem.resident_bytes
        tightened = search.problem.resident_bytes + max(int(room_bytes * (1 - slack)), 1)
        made = StagedProgram(search.problem, tightened, self.passes)
        limits = Limits(time_limit_s=max(search.left_s, 0.1), relaxed=True)
        answer = solve_program(made.program, limits, backend=self.backend)
        self._claim(search, made, answer, slack)
        if not answer.finished:
            search.cut_short = True
            search.message = "the relaxed program did not finish within the time limit"
        values = answer.values
        if values is None or not answer.finished:
            return None
        return [
            {v: values[made.carried[row.index, v]] for v in made.values_before(row.stage)}
            for row in made.rows[:: made.passes]
        ]

    def _claim(
        self, search: Search, made: StagedProgram, answer: MipSolution, slack: float
    ) -> None:
        # Neither a tightened budget nor fewer sweeps bound all schedules.
        if slack or self.passes < EXACT_PASSES or not answer.finished:
            return
        if answer.proved_infeasible:
            search.proved_infeasible = True
            return
        # The objective counts only time beyond each op once.
        extra_us = max(answer.bound, 0.0) * made.cost_unit_us
        search.raise_bound(search.graph.time_us + extra_us * (1 - _BOUND_SLACK))

    def _round(self, search: Search, point: _Relaxed) -> None:
        for is_carried in _roundings(self.rounds, self.seed):
            if search.out_of_time():
                return
            state = rounded_state(search.problem, point, is_carried)
            does_fit = search.offer(state)
            if self.repair and (does_fit or Repair(state, search.budget_bytes, 1.0, search).run()):
                offer_filled(search, state)


def _roundings(rounds: int, seed: int) -> Iterator[Callable[[float], bool]]:
    for threshold in _THRESHOLDS:
        yield lambda part, threshold=threshold: part > threshold
    source = random.Random(seed)
    for _ in range(rounds):
        yield lambda part: source.random() < part


def rounded_state(problem: Problem, point: _Relaxed, is_carried: Callable[[float], bool]) -> State:
    """Round what is carried into each stage, and run again what is then missing, no more."""
    bits = [bytearray(problem.n_values) for _ in range(problem.n_ops + 2)]
    for stage, parts in enumerate(point):
        for v, part in parts.items():
            # Pinned values, and those that the caller holds, are carried whatever the LP says.
            bits[stage][v] = is_carried(part) or _must_stay(problem, stage, v)
    recomputed: list[list[int]] = [[] for _ in bits[:-1]]
    # From the last stage back: what stage t must carry depends on what t + 1 needs.
    for t in reversed(range(problem.n_ops + 1)):
        carried = [v for v, bit in enumerate(bits[t + 1]) if bit and problem.producer[v] < t]
        recomputed[t] = recomputed_in(problem, bits[t], carried, t)
        read = {*problem.needs[t], *(v for op in recomputed[t] for v in problem.inputs[op])}
        made = {v for op in recomputed[t] for v in problem.outputs[op]}
        for v, bit in enumerate(bits[t]):
            is_idle = v not in read and not bits[t + 1][v]
            if bit and (is_idle or (v in made and not _must_stay(problem, t, v))):
                bits[t][v] = 0
    return State.from_recomputed(problem, recomputed)


def _must_stay(problem: Problem, stage: int, v: int) -> bool:
    is_held = v in problem.held and stage >= problem.n_forward
    return problem.no_recompute[problem.producer[v]] or is_held
