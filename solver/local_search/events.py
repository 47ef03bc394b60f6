"""A neighbourhood of a schedule as a 0-1 program over events and retention gaps.

An event is a run of an op in a stage. Ops of a chosen set may run again at candidate stages; other
runs stay. Between two touches of a value lies a gap; `kept[v, i]` says that v is live in gap i.

minimise    Σ cost · runs[e]
subject to  kept[v, i] <= kept[v, i-1] + runs[e_i]  (the last term where event e_i makes v)
            runs[e] <= kept[v, i]                   (event e reads v and ends gap i)
            Σ size · kept + own bytes of e · runs[e] <= room    for each event e

It proves nothing about other schedules, but is small enough for CP-SAT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from remat.solver.problem import Problem

Runs = Sequence[Sequence[int]]  # for each stage the ops that run again in it, in captured order
_Literal = int  # index of a 0-1 variable, or one of the two constants below
_Clause = tuple[_Literal, list[_Literal]]
_BytesRow = tuple[list[tuple[int, int]], int]
_NEVER, _ALWAYS = -2, -1


@dataclass(slots=True)
class EventProgram:
    """The program in plain numbers; `solve_events` hands it to CP-SAT."""

    problem: Problem
    room_bytes: int
    costs: list[float] = field(default_factory=list[float])  # of each variable, 0 for gaps
    hint: list[bool] = field(default_factory=list[bool])  # the schedule at hand
    implications: list[_Clause] = field(default_factory=list[_Clause])  # (a, terms): a <= their sum
    rows: list[_BytesRow] = field(default_factory=list[_BytesRow])  # (terms, room): sum <= room
    # Event (stage, op) of each variable that is a run.
    run_of: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    is_empty: bool = False

    def variable(self, cost_us: float, hint: bool) -> _Literal:
        self.costs.append(cost_us)
        self.hint.append(hint)
        return len(self.costs) - 1


def candidate_stages(
    problem: Problem, runs: Runs, chosen: Sequence[int], most: int, guide: Runs = ()
) -> dict[int, list[int]]:
    """Stages in which each chosen op may run again: present ones, and `most` others."""
    present = stages_by_op(runs, guide)
    stages_of: dict[int, list[int]] = {}
    last = _last_touches(problem, runs)
    # Readers come before what they read: where they may run is known.
    for op in sorted(set(chosen), reverse=True):
        if problem.no_recompute[op]:
            continue
        wanted: dict[int, None] = {}
        for reader in problem.readers[op]:
            wanted[reader] = None
            wanted.update(dict.fromkeys(present.get(reader, ())))
            wanted.update(dict.fromkeys(stages_of.get(reader, ())))
        found = sorted(t for t in wanted if t > op)
        ends = sorted({last[v] for v in problem.inputs[op]})  # there its inputs are touched anyway
        found = _thinned_events(found, most) + [t for t in ends if op < t < problem.n_ops]
        stages_of[op] = sorted({*found, *present.get(op, ())})
    return stages_of


def stages_by_op(*schedules: Runs) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for runs in schedules:
        for stage, again in enumerate(runs):
            for op in again:
                found.setdefault(op, []).append(stage)
    return found


def again_us(problem: Problem, runs: Runs) -> float:
    return sum(problem.cost_us[op] for again in runs for op in again)


def _thinned_events(stages: list[int], most: int) -> list[int]:
    """At most `most` of `stages`, the last always among them."""
    if len(stages) <= most:
        return stages
    step = len(stages) / most
    return [stages[len(stages) - 1 - int(i * step)] for i in range(most)]


def _last_touches(problem: Problem, runs: Runs) -> list[int]:
    """The last stage that reads each value, or makes it first."""
    last = list(problem.producer)
    for stage, again in enumerate(runs):
        for op in again:
            for v in problem.inputs[op]:
                last[v] = stage
        for v in problem.needs[stage]:
            last[v] = stage
    return last


class EventBuilder:
    def __init__(self, problem: Problem, runs: Runs, stages_of: dict[int, list[int]]) -> None:
        self.problem = problem
        self.events: list[tuple[int, int]] = []
        self.ran: list[bool] = []
        self.literal: list[_Literal] = []
        extra: list[set[int]] = [set() for _ in runs]
        for op, stages in stages_of.items():
            for stage in stages:
                extra[stage].add(op)
        for stage, again in enumerate(runs):
            now = set(again)
            for op in sorted(now | extra[stage]):
                self._event(stage, op, op in now, op not in stages_of)
            self._event(stage, stage, True, True)

    def _event(self, stage: int, op: int, ran: bool, is_fixed: bool) -> None:
        self.events.append((stage, op))
        self.ran.append(ran)
        self.literal.append(_ALWAYS if is_fixed else _NEVER)

    def build(self, room_bytes: int) -> EventProgram:
        """Resident bytes are left out of `room_bytes`."""
        program = EventProgram(self.problem, room_bytes)
        for e, (stage, op) in enumerate(self.events):
            if self.literal[e] == _NEVER:
                self.literal[e] = program.variable(self.problem.cost_us[op], self.ran[e])
                program.run_of[self.literal[e]] = (stage, op)
        self._gaps(program)
        return program

    def _touches(self) -> list[list[int]]:
        """For each value the events that make or read it, in order."""
        problem = self.problem
        touches: list[list[int]] = [[] for _ in range(problem.n_values)]
        for e, (stage, op) in enumerate(self.events):
            made = problem.outputs[op] if op < problem.n_ops else ()
            for v in (*self._reads(stage, op), *made):
                touches[v].append(e)
        return touches

    def _reads(self, stage: int, op: int) -> tuple[int, ...]:
        return self.problem.needs[stage] if op == stage else self.problem.inputs[op]

    def _gaps(self, program: EventProgram) -> None:
        n_events = len(self.events)
        change = [0] * (n_events + 1)
        starts: list[list[tuple[int, int, int]]] = [[] for _ in range(n_events + 1)]
        for v, touches in enumerate(self._touches()):
            for here, following, gap in self._gaps_of(program, v, touches):
                size_bytes = self.problem.size_bytes[v]
                if gap == _ALWAYS:
                    change[here + 1] += size_bytes
                    change[following + 1] -= size_bytes
                elif size_bytes:
                    starts[here + 1].append((gap, size_bytes, following))
        self._memory(program, change, starts)

    def _gaps_of(
        self, program: EventProgram, v: int, touches: list[int]
    ) -> list[tuple[int, int, _Literal]]:
        """Gaps of `v` that are, or may be, kept: (event before, event after, literal)."""
        problem, maker = self.problem, self.problem.producer[v]
        reads = [v in self._reads(*self.events[e]) for e in touches]
        is_settled = all(self.literal[e] == _ALWAYS for e in touches)  # untouched by the set
        hints = self._present_gaps(v, touches, reads)
        found: list[tuple[int, int, _Literal]] = []
        before = _NEVER
        for i in range(len(touches) - 1):
            here, following = touches[i], touches[i + 1]
            # In the caller's hands after forward.
            must = v in problem.held and self.events[following][0] >= problem.n_forward
            if is_settled or must:
                gap = _ALWAYS if hints[i] or must else _NEVER
            elif reads[i + 1] and self.literal[following] == _ALWAYS:  # a fixed run reads it
                gap = _ALWAYS
            else:
                gap = program.variable(0.0, hints[i])
            if not is_settled:
                self._flow(program, gap, before, here, maker, must)
                if reads[i + 1] and gap != _ALWAYS:
                    program.implications.append((self.literal[following], [gap]))
            if gap != _NEVER:
                found.append((here, following, gap))
            before = gap
        return found

    def _present_gaps(self, v: int, touches: list[int], reads: list[bool]) -> list[bool]:
        """Whether the schedule at hand keeps each gap: a read follows before a making."""
        hints, wanted = [False] * len(touches), False
        for i in range(len(touches) - 1, 0, -1):
            op = self.events[touches[i]][1]
            if self.ran[touches[i]]:
                makes = op == self.problem.producer[v]
                wanted = reads[i] or (wanted and not makes)
            hints[i - 1] = wanted
        return hints

    def _flow(
        self, program: EventProgram, gap: _Literal, before: _Literal, here: int, maker: int,
        must: bool,
    ) -> None:  # fmt: skip
        """A value is live after a touch only if it was before, or is made there."""
        makes = self.events[here][1] == maker
        if must and not makes:
            return
        sources = [before] if before != _NEVER else []
        sources += [self.literal[here]] if makes else []
        if _ALWAYS not in sources:
            program.implications.append((gap, sources))

    def _memory(
        self, program: EventProgram, change: list[int], starts: list[list[tuple[int, int, int]]]
    ) -> None:
        base_bytes = 0
        open_gaps: list[tuple[int, int, int]] = []
        for e, (_, op) in enumerate(self.events):
            base_bytes += change[e]
            open_gaps = [gap for gap in open_gaps if gap[2] >= e] + starts[e]
            terms = [(gap, size_bytes) for gap, size_bytes, _ in open_gaps]
            own_bytes = self.problem.own_bytes[op]
            room = program.room_bytes - base_bytes
            if self.literal[e] == _ALWAYS:
                room -= own_bytes
            else:
                terms.append((self.literal[e], own_bytes))
            if room < 0:
                program.is_empty = True
            if sum(size_bytes for _, size_bytes in terms) > room:  # it cannot bind
                program.rows.append((terms, room))


# Of a try in CP-SAT's deterministic time: its program is built and presolved, term by term.
_LEAST_EFFORT, _TERM_EFFORT = 0.05, 2e-6
COST_UNITS = 10_000_000  # in the time of the step: CP-SAT counts in integers


@dataclass(frozen=True, slots=True)
class Tried:
    """`runs` is None where there is nothing better."""

    runs: Runs | None
    finished: bool  # searched to its end
    effort: float = _LEAST_EFFORT  # CP-SAT's deterministic time, and a little more


@dataclass(frozen=True, slots=True)
class TryLimits:
    """How long a try may take; `deterministic` is in CP-SAT's own unit, about a second."""

    deterministic: float
    seconds: float
    seed: int = 0


class RunningSolvers:
    def __init__(self) -> None:
        self._solvers: list[Any] = []
        self._stopped = False

    def add(self, solver: Any) -> bool:
        """Returns whether it may begin."""
        self._solvers.append(solver)
        return not self._stopped

    def stop(self) -> None:
        self._stopped = True  # first, so that none begins behind the loop
        for solver in self._solvers:
            solver.stop_search()


def try_events(
    problem: Problem, runs: Runs, stages_of: dict[int, list[int]], room_bytes: int, below_us: float,
    effort: TryLimits, running: RunningSolvers,
) -> Tried:  # fmt: skip
    """Solve for ops that may run again at `stages_of`, all others as in `runs`."""
    program = EventBuilder(problem, runs, stages_of).build(room_bytes)
    fixed = [op for op in range(problem.n_ops) if op not in stages_of]
    return solve_events(program, runs, fixed, below_us, effort, running)


def solve_events(
    program: EventProgram, base: Runs, fixed: Sequence[int], below_us: float, effort: TryLimits,
    running: RunningSolvers,
) -> Tried:  # fmt: skip
    """Runs that cost less than `below_us`: `fixed` ops as in `base`, others as chosen."""
    if program.is_empty:
        return Tried(None, True)
    from ortools.sat.python import cp_model  # pyright: ignore[reportMissingTypeStubs]

    api = cast(Any, cp_model)
    model, variables = _model(api, program, base, fixed, below_us)
    solver = api.CpSolver()
    if model is None or not running.add(solver):
        return Tried(None, True)
    solver.parameters.num_workers = 1  # several would race, and a seed not fix the outcome
    solver.parameters.random_seed = effort.seed
    solver.parameters.linearization_level = 2
    solver.parameters.catch_sigint_signal = False  # Ctrl-C is Python's to hear
    solver.parameters.max_deterministic_time = effort.deterministic
    solver.parameters.max_time_in_seconds = max(effort.seconds, 0.01)
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.max_presolve_iterations = 1
    status = solver.solve(model)
    finished = status in (api.OPTIMAL, api.INFEASIBLE)
    n_terms = sum(len(terms) for terms, _ in program.rows)
    spent = _LEAST_EFFORT + _TERM_EFFORT * n_terms + solver.response_proto.deterministic_time
    if status not in (api.OPTIMAL, api.FEASIBLE):
        return Tried(None, finished, spent)
    chosen = {event for x, event in program.run_of.items() if solver.boolean_value(variables[x])}
    runs = _merged(base, fixed, chosen)
    is_cheaper = again_us(program.problem, runs) < below_us  # the program counts in rounded units
    return Tried(runs if is_cheaper else None, finished, spent)


def _model(
    api: Any, program: EventProgram, base: Runs, fixed: Sequence[int], below_us: float
) -> tuple[Any, list[Any]]:
    model = api.CpModel()
    variables = [model.new_bool_var("") for _ in program.costs]
    for variable, bit in zip(variables, program.hint, strict=True):
        model.add_hint(variable, bit)
    for left, right in program.implications:
        _imply(model, variables, left, right)
    for terms, room in program.rows:
        _row(api, model, variables, terms, room)
    unit_us = sum(program.problem.cost_us) / COST_UNITS or 1.0
    scaled = [(x, round(cost / unit_us)) for x, cost in enumerate(program.costs) if cost]
    objective = api.LinearExpr.weighted_sum(
        [variables[x] for x, _ in scaled], [units for _, units in scaled]
    )
    kept = set(fixed)
    spent_us = sum(program.problem.cost_us[op] for again in base for op in again if op in kept)
    room_us = below_us - spent_us
    if room_us <= 0:
        return None, variables
    if math.isfinite(room_us):
        model.add(objective <= math.ceil(room_us / unit_us) - 1)  # strictly less, in whole units
    model.minimize(objective)
    return model, variables


def _imply(model: Any, variables: list[Any], left: int, right: Sequence[int]) -> None:
    if left == _NEVER:
        return
    clause = [variables[x] for x in right if x != _NEVER]
    if left != _ALWAYS:
        clause.append(~variables[left])
    model.add_bool_or(clause)


def _row(
    api: Any, model: Any, variables: list[Any], terms: Sequence[tuple[int, int]], room: int
) -> None:
    sizes = [size_bytes for _, size_bytes in terms]
    unit = math.gcd(*sizes) or 1  # smaller coefficients for the same row
    total = api.LinearExpr.weighted_sum(
        [variables[x] for x, _ in terms], [size_bytes // unit for size_bytes in sizes]
    )
    model.add(total <= room // unit)


def _merged(base: Runs, fixed: Sequence[int], chosen: set[tuple[int, int]]) -> Runs:
    kept = set(fixed)
    merged = [[op for op in again if op in kept] for again in base]
    for stage, op in sorted(chosen):
        merged[stage].append(op)
    return [sorted(again) for again in merged]
