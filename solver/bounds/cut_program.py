"""Cuts: what is live while chosen ops first run, as a mixed-integer program.

Interval k runs from right after op t_k to op t_(k+1), the last one to the end. `carried[k, v]`: v
is live while op t_k first runs; `again[k, op]`: op runs again in interval k. Any schedule in
captured order gives a point that costs no more, so the optimum is a proven bound; expanded, it is a
good start. With one cut it is a knapsack row over a closure problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from remat.solver.backends.mip import Limits, MipSolution, MixedProgram, solve_program
from remat.solver.problem import Problem
from remat.solver.state import mark_made, recomputed_in

COST_SCALE = 1e4  # the time of the step in the program: HiGHS's tolerances are absolute
ROW_SCALE = 1e3  # the right-hand side of a memory row in the program's unit, for the same reason
_MOST_SIZE = 1e12  # of a coefficient of such a row: far above the right-hand side; 1e15 is refused


@dataclass(slots=True)
class CutProgram:
    """The program of `cuts` at `budget_bytes`, rows added family by family."""

    problem: Problem
    cuts: tuple[int, ...]
    budget_bytes: int
    end: int | None = None  # what later stages read or run again is left out; None: none
    program: MixedProgram = field(default_factory=MixedProgram)
    carried: list[dict[int, int]] = field(default_factory=list[dict[int, int]])
    again: list[dict[int, int]] = field(default_factory=list[dict[int, int]])
    through: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    is_empty: bool = False
    below_us: float = inf  # points of so much time or more are left out, see `ask_for_less`

    def __post_init__(self) -> None:
        total_us = sum(self.problem.cost_us)
        self.cost_unit_us = total_us / COST_SCALE if total_us else 1.0
        for k, values in enumerate(self._relevant()):
            self._variables(k, values)
        for k in range(len(self.cuts)):
            self.cover(k, self.wanted_in(k), self.again[k])
            self.needs_inputs(k, self.again[k])
            self._memory(k)
        for k in range(1, len(self.cuts)):
            self.carry_what_is_there(k, k - 1, self.again[k - 1])

    cost_unit_us: float = field(default=1.0, init=False)

    def free_at(self, k: int) -> set[int]:
        """Values that are live while op t_k runs in any schedule."""
        t = self.cuts[k]
        return {*self.problem.needs[t], *self.problem.outputs[t]}

    def wanted_in(self, k: int) -> list[int]:
        """Values first made at or before t_k that interval k must have, once each."""
        last = self.cuts[k + 1] if k + 1 < len(self.cuts) else self.last_stage
        return self.wanted_between(self.cuts[k], last)

    @property
    def last_stage(self) -> int:
        return self.problem.n_ops if self.end is None else self.end

    def wanted_between(self, t: int, last: int) -> list[int]:
        """Values first made at or before t that stages t + 1 to `last` read, once each."""
        stages = range(t + 1, last + 1)
        wanted = dict.fromkeys(v for stage in stages for v in self.problem.needs[stage])
        return [v for v in wanted if self.problem.producer[v] <= t]

    def _relevant(self) -> list[list[int]]:
        found, following = list[list[int]](), list[int]()
        for k in reversed(range(len(self.cuts))):
            seen = dict.fromkeys(self.wanted_in(k))  # what later intervals may want passes here
            old = (v for v in following if self.problem.producer[v] <= self.cuts[k])
            seen.update(dict.fromkeys(old))
            following = sorted(self._upstream(list(seen), self.free_at(k)))
            found.append(following)
        return found[::-1]

    def _upstream(self, waiting: list[int], free: set[int]) -> set[int]:
        seen = set(waiting)
        while waiting:
            v = waiting.pop()
            op = self.problem.producer[v]
            if v in free or self.problem.no_recompute[op]:  # not made again: asks no inputs
                continue
            fresh = [u for u in self.problem.inputs[op] if u not in seen]
            seen.update(fresh)
            waiting += fresh
        return seen

    def _variables(self, k: int, values: list[int]) -> None:
        """carried[k, v] and again[k, op] in {0, 1}, the latter at the op's cost."""
        problem, free = self.problem, self.free_at(k)
        # With one cut, fractions leave fewer integers. With more, HiGHS closes more without them.
        is_whole = len(self.cuts) > 1
        is_backward = self.cuts[k] >= problem.n_forward
        carried, again = dict[int, int](), dict[int, int]()
        for v in values:
            if v in free:
                continue
            lower = 1.0 if is_backward and v in problem.held else 0.0  # in the caller's hands
            carried[v] = self.program.variable(lower=lower, integer=is_whole)
            self.made_again(again, v)
        self.carried.append(carried)
        self.again.append(again)

    def made_again(self, again: dict[int, int], v: int) -> int | None:
        """The bit in `again` that v is made again, None where it must not be."""
        op = self.problem.producer[v]
        if not self.problem.no_recompute[op] and op not in again:
            cost = self.problem.cost_us[op] / self.cost_unit_us
            again[op] = self.program.variable(cost, integer=True)
        return again.get(op)

    def _presence(self, k: int, v: int, runs: dict[int, int]) -> list[tuple[int, float]] | None:
        """carried[k, v] + runs[producer of v]; None where v is there anyway."""
        if (index := self.carried[k].get(v)) is None:
            return None
        op = runs.get(self.problem.producer[v])
        return [(index, 1.0)] if op is None else [(index, 1.0), (op, 1.0)]

    def cover(self, k: int, wanted: list[int], runs: dict[int, int]) -> None:
        """carried[k, v] + runs[producer of v] >= 1 for each v that is wanted."""
        for v in wanted:
            if (terms := self._presence(k, v, runs)) is not None:
                self.program.row(terms, lower=1.0)

    def needs_inputs(self, k: int, runs: dict[int, int]) -> None:
        """runs[op] <= carried[k, u] + runs[producer of u] for each input u."""
        for op, index in runs.items():
            for u in self.problem.inputs[op]:
                if (terms := self._presence(k, u, runs)) is not None:
                    self.program.row([*terms, (index, -1.0)], lower=0.0)

    def carry_what_is_there(self, k: int, before: int, runs: dict[int, int]) -> None:
        """carried[k, v] <= carried[before, v] + runs[producer of v], v older than `before`."""
        for v, index in self.carried[k].items():
            is_older = self.problem.producer[v] <= self.cuts[before]
            if is_older and (terms := self._presence(before, v, runs)) is not None:
                self.program.row([*terms, (index, -1.0)], lower=0.0)

    def _memory(self, k: int) -> None:
        """Sum of size of v · carried[k, v] <= budget - working set of op t_k."""
        problem, t = self.problem, self.cuts[k]
        room = self.budget_bytes - problem.resident_bytes - problem.working_set_bytes[t]
        if room < 0:
            self.is_empty = True
            return
        self.room_row([(i, problem.size_bytes[v]) for v, i in self.carried[k].items()], room)

    def room_row(self, sizes: Iterable[tuple[int, int]], room_bytes: float) -> None:
        """Sum of size · variable <= room."""
        unit = max(room_bytes, 1) / ROW_SCALE
        terms = [(i, min(size / unit, _MOST_SIZE)) for i, size in sizes if size]
        self.program.row(terms, upper=room_bytes / unit)

    def ask_for_less(self, below_us: float) -> None:
        """Σ cost · again <= what `below_us` leaves: that no point does proves `below_us`."""
        self.below_us = below_us
        room = (below_us - sum(self.problem.cost_us)) / self.cost_unit_us
        costs = enumerate(self.program.objective)
        self.program.row([(i, cost) for i, cost in costs if cost], upper=room)

    def relaxed(self, time_limit_s: float) -> CutSolution:
        """Solve the linear relaxation; its bound holds, its point is no cover as it stands."""
        return self.solve(Limits(time_limit_s, relaxed=True))

    def solve(self, limits: Limits) -> CutSolution:
        if self.is_empty:
            return CutSolution(self, None, inf, inf)
        if (answer := solve_program(self.program, limits)).proved_infeasible:
            return CutSolution(self, None, self.below_us, inf)
        base_us = sum(self.problem.cost_us)
        bound_us = base_us + max(answer.bound, 0.0) * self.cost_unit_us  # -inf: nothing proved
        bound_us = min(bound_us, self.below_us)
        if limits.relaxed:
            effort = True, answer.iterations
            return CutSolution(self, answer.values, bound_us, inf, *effort, is_relaxed=True)
        effort = answer.finished, answer.iterations
        if answer.values is None:
            return CutSolution(self, None, bound_us, inf, *effort)
        cost_us = base_us + self._rounded_cost_us(answer)
        # Without a gap the cost is the bound, free of HiGHS's rounding.
        is_tight = limits.relative_gap == limits.absolute_gap == 0.0 and answer.finished
        return CutSolution(self, answer.values, cost_us if is_tight else bound_us, cost_us, *effort)

    def _rounded_cost_us(self, answer: MipSolution) -> float:
        assert answer.values is not None
        return sum(
            self.problem.cost_us[op]
            for again in self.again
            for op, index in again.items()
            if answer.values[index] > 0.5
        )


@dataclass(frozen=True, slots=True)
class CutSolution:
    """A point of a `CutProgram` (None if there is none), its cost and the proven bound."""

    source: CutProgram
    values: list[float] | None
    bound_us: float
    cost_us: float
    finished: bool = True  # False where a limit of time or nodes ended the solve
    iterations: int = 0  # of the simplex algorithm
    is_relaxed: bool = False  # runs are fractions too

    def carried_past(self, k: int, problem: Problem) -> set[int]:
        """Values live while op t_k runs and after; `problem` says which must be made once."""
        assert self.values is not None
        # A relaxed point carries all that must be made once: rounding may drop what half-carried
        # values need. What nothing reads is left out of the state anyway.
        least_of_pinned = -1.0 if self.is_relaxed else 1e-6
        chosen: set[int] = set()
        for v, i in self.source.carried[k].items():
            must_stay = problem.no_recompute[problem.producer[v]]
            if self.values[i] > (least_of_pinned if must_stay else 0.5):
                chosen.add(v)
        return chosen | self.source.free_at(k)


def expand(solution: CutSolution, problem: Problem | None = None) -> list[list[int]]:
    """Ops to run again in each stage: at first need in an interval, kept to its end."""
    # In another problem ops run again for other inputs, as those that arrive by copies.
    problem, cuts = problem or solution.source.problem, solution.source.cuts
    position = {t: k for k, t in enumerate(cuts)}
    available = bytearray(problem.n_values)
    recomputed: list[list[int]] = []
    last = solution.source.last_stage
    for t in range(last + 1):
        if t - 1 in position:
            available = bytearray(problem.n_values)
            for v in solution.carried_past(position[t - 1], problem):
                available[v] = 1
        carried_on: Sequence[int] = ()
        if t in position:
            free = solution.source.free_at(position[t])
            carried_on = sorted(solution.carried_past(position[t], problem) - free)
        recomputed.append(recomputed_in(problem, available, carried_on, t))
        mark_made(problem, available, (*recomputed[-1], t) if t < problem.n_ops else recomputed[-1])
    return [*recomputed, *([] for _ in range(problem.n_ops - last))]


# Rows of memory inside a stage, before a cut, where recomputing itself needs the memory.


def add_stage_row(cuts: CutProgram, k: int, op: int) -> None:
    """Bound what is live while `op` runs again right before the op of cut k.
    through[v] >= carried in + live at t - made again - 1
    Σ size · through + (outputs and workspace of op) · again[op] <= room,
    where an input counts if it is through or if op runs: it may be gone when another op runs again.
    Nothing where op cannot run again there, or cut k - 1 is not the stage's start."""
    if k == 0 or cuts.cuts[k - 1] + 1 != cuts.cuts[k] or op not in cuts.again[k - 1]:
        return
    problem = cuts.problem
    runs = cuts.again[k - 1][op]
    terms = {runs: problem.own_bytes[op]}
    outputs, inputs = set(problem.outputs[op]), set(problem.inputs[op])
    for v in sorted({*cuts.carried[k - 1], *cuts.free_at(k - 1)}):
        size_bytes = problem.size_bytes[v]
        if v in outputs or not size_bytes:
            continue
        through = _through(cuts, k, v)
        if through is None and v in inputs:
            terms[runs] += size_bytes
        elif through is not None:
            counted = _either(cuts, through, runs) if v in inputs else through
            terms[counted] = size_bytes
    cuts.room_row(terms.items(), cuts.budget_bytes - problem.resident_bytes)


def _either(cuts: CutProgram, left: int, right: int) -> int:
    either = cuts.program.variable()
    for index in (left, right):
        cuts.program.row([(either, 1.0), (index, -1.0)], lower=0.0)
    return either


def _through(cuts: CutProgram, k: int, v: int) -> int | None:
    """A variable that is 1 where v is live through the stage; None where that is unknown."""
    if (known := cuts.through.get((k, v))) is not None:
        return known
    live_at = cuts.carried[k].get(v)
    if v not in cuts.problem.needs[cuts.cuts[k]] and live_at is None:
        return None
    carried = cuts.carried[k - 1].get(v)
    through = cuts.program.variable()
    bits = [bit for bit in (carried, live_at) if bit is not None]
    row = [(through, 1.0), *((bit, -1.0) for bit in bits)]
    if (again := cuts.made_again(cuts.again[k - 1], v)) is not None:
        row.append((again, 1.0))
    cuts.program.row(row, lower=float(1 - len(bits)))
    cuts.through[k, v] = through
    return through
