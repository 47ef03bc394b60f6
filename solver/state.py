"""Schedules as retention bits, judged stage by stage in plain integers.

Stage t is the time from the first run of op t - 1 to that of op t; a last stage closes the step.
``kept[t, v]``: value v is carried into stage t. The bits fix the cheapest recomputations of a
stage: the closure of what op t reads and what is carried on. So moving one bit touches few stages,
on which repairs and fills live. Bits cannot say that an op runs twice within a stage, or first runs
in another order; a sequence of ops (`schedule_of`) can.

These are Checkmate's R and S (Jain et al. 2020, arXiv:1910.02653) with R eliminated.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from remat.schedules.schedule import Compute, Free, Option, Schedule, Step
from remat.solver.problem import Problem

_Row = Sequence[int]  # one entry a value: 1 where the value is carried into a stage


class UnreachableError(Exception):
    """A pinned op would have to run twice."""


class Stage(NamedTuple):
    recomputed: tuple[int, ...]  # before op t, in turn
    cost_us: float
    rise_bytes: int  # most live above what was carried in
    touched: tuple[int, ...]  # values read, or made and needed; ascending


def _replay_stage(
    problem: Problem, carried_in: _Row, carried_on: _Row, starts: Sequence[int], t: int
) -> Stage:
    """UnreachableError: an op that must not run twice would have to."""
    # The stage that closes the step has no op of its own.
    outputs = problem.outputs[t] if t < problem.n_ops else ()
    if not (order := recomputed_in(problem, carried_in, starts, t)):
        touched = sorted((*problem.needs[t], *outputs))
        return Stage((), 0.0, problem.own_bytes[t], tuple(touched))
    rise_bytes = max(_heights_bytes(problem, carried_in, carried_on, t, order))
    if len(order) > 1:  # just in time, depth first, unless another order needs less
        for other in _other_orders(problem, carried_in, starts, t, order, rise_bytes):
            other_bytes = max(_heights_bytes(problem, carried_in, carried_on, t, other))
            if other_bytes < rise_bytes:
                order, rise_bytes = other, other_bytes
    read = (v for op in order for v in problem.inputs[op])
    touched = sorted({*problem.needs[t], *starts, *outputs, *read})
    return Stage(tuple(order), sum(problem.cost_us[op] for op in order), rise_bytes, tuple(touched))


def _other_orders(
    problem: Problem, carried_in: _Row, starts: Sequence[int], t: int, order: Sequence[int],
    rise_bytes: int,
) -> Iterator[list[int]]:  # fmt: skip
    yield sorted(order)
    wanted = [v for v in (*problem.needs[t], *starts) if not carried_in[v]]
    # What needs the most comes first: then least is live beside it.
    widest = max(wanted, key=lambda v: problem.working_set_bytes[problem.producer[v]])
    if wanted[0] != widest and 2 * problem.working_set_bytes[problem.producer[widest]] > rise_bytes:
        yield recomputed_in(problem, carried_in, (widest, *wanted), t, own_needs=False)


def recomputed_in(
    problem: Problem, carried_in: _Row, starts: Sequence[int], t: int, *, own_needs: bool = True
) -> list[int]:
    """The closure, each op after what it reads; UnreachableError if a pinned op is in it."""
    order: list[int] = []
    seen: set[int] = set()
    for target in (*problem.needs[t], *starts) if own_needs else starts:
        if not carried_in[target] and problem.producer[target] not in seen:
            _visit(problem, carried_in, t, problem.producer[target], seen, order)
    return order


def _visit(
    problem: Problem, carried_in: _Row, t: int, root: int, seen: set[int], order: list[int]
) -> None:
    inputs, producer = problem.inputs, problem.producer  # looked up once: this is most of a repair
    stack = [(root, iter(inputs[root]))]  # no recursion: deep closures exceed Python's limit
    _require_rerun(problem, root, t)
    seen.add(root)
    while stack:
        op, reads = stack[-1]
        for v in reads:
            if not carried_in[v] and (below := producer[v]) not in seen:
                _require_rerun(problem, below, t)
                seen.add(below)
                stack.append((below, iter(inputs[below])))
                break
        else:
            order.append(op)
            stack.pop()


def _require_rerun(problem: Problem, op: int, t: int) -> None:
    if problem.no_recompute[op] or op >= t:  # op t and later ones have not run yet
        raise UnreachableError


def mark_made(problem: Problem, available: bytearray, ops: Iterable[int]) -> None:
    for op in ops:
        for v in problem.outputs[op]:
            available[v] = 1


def closure_cost_us(
    problem: Problem, carried_in: _Row, v: int, t: int, paid: Collection[int], most_us: float
) -> float | None:
    """Time of v's closure; None if a pinned op is in it, or once it is above `most_us`."""
    inputs, producer, pinned = problem.inputs, problem.producer, problem.no_recompute
    seen = set(paid)  # closed: what these read is among them
    waiting = [root] if (root := producer[v]) not in seen else []
    seen.add(root)
    cost_us = 0.0
    while waiting:
        op = waiting.pop()
        if pinned[op] or op >= t:
            return None
        cost_us += problem.cost_us[op]
        if cost_us > most_us:
            return None
        for u in inputs[op]:
            if not carried_in[u] and (below := producer[u]) not in seen:
                seen.add(below)
                waiting.append(below)
    return cost_us


def _last_uses(problem: Problem, t: int, order: Sequence[int]) -> dict[int, int]:
    last: dict[int, int] = {}
    for position, op in enumerate(order):
        for v in problem.inputs[op]:
            last[v] = position
    for v in problem.needs[t]:
        last[v] = len(order)
    return last


def _heights_bytes(
    problem: Problem, carried_in: _Row, carried_on: _Row, t: int, order: Sequence[int]
) -> list[int]:
    """Bytes above what was carried in while each op of `order` runs, and op t at last."""
    last = _last_uses(problem, t, order)
    size_bytes, own_bytes = problem.size_bytes, problem.own_bytes
    inputs, outputs = problem.inputs, problem.outputs
    now = 0
    heights: list[int] = []
    for position, op in enumerate(order):
        heights.append(now + own_bytes[op])
        for v in outputs[op]:
            # Live outputs stay as they are; unwanted ones go at once.
            if not carried_in[v] and (carried_on[v] or last.get(v, -1) > position):
                now += size_bytes[v]
        for v in inputs[op]:
            if last[v] == position and not carried_on[v]:
                now -= size_bytes[v]
    return [*heights, now + own_bytes[t]]


def fullest_op(
    problem: Problem, carried_in: _Row, carried_on: _Row, t: int, order: Sequence[int]
) -> int | None:
    """The op run again in stage t at which most is live; None if op t itself is."""
    heights = _heights_bytes(problem, carried_in, carried_on, t, order)
    highest = max(range(len(heights)), key=lambda position: (heights[position], position))
    return order[highest] if highest < len(order) else None


def steps_of_stages(problem: Problem, kept: Sequence[_Row], stages: Sequence[Stage]) -> list[Step]:
    steps: list[Step] = []
    for t, stage in enumerate(stages):
        carried_on, order = kept[t + 1], stage.recomputed
        last = _last_uses(problem, t, order)
        for position, op in enumerate((*order, t) if t < problem.n_ops else order):
            steps.append(Compute(problem.graph.ops[op].name))
            for v in problem.outputs[op]:
                is_wanted = carried_on[v] or last.get(v, -1) > position
                if not is_wanted:  # one output of several may be wanted alone
                    steps.append(Free(problem.names[v]))
            reads = problem.needs[t] if position == len(order) else problem.inputs[op]
            spent = [v for v in reads if last[v] == position and not carried_on[v]]
            steps += [Free(problem.names[v]) for v in spent]
    return steps


Bytes = npt.NDArray[np.int64]
_Bits = npt.NDArray[np.uint8]


class State:
    """Retention bits of every value, with each stage's replay kept up to date."""

    def __init__(self, problem: Problem) -> None:
        n = problem.n_ops
        self.problem = problem
        # Stages by values: 1 where carried in; the last row stays 0.
        self.kept: _Bits = np.zeros((n + 2, problem.n_values), np.uint8)
        self.rows = [memoryview(row) for row in self.kept]  # reading single elements is slow
        # By stage what is recomputed in it to be carried on, ascending.
        self.starts: list[list[int]] = [[] for _ in range(n + 1)]
        self.touches: list[list[int]] = [[] for _ in range(problem.n_values)]  # by value, ascending
        self.stages: list[Stage] = [Stage((), 0.0, 0, ())] * (n + 1)
        self.entry_bytes: Bytes = np.zeros(n + 1, np.int64)  # carried in
        self.rise_bytes: Bytes = np.zeros(n + 1, np.int64)

    @classmethod
    def from_recomputed(cls, problem: Problem, recomputed: Sequence[Iterable[int]]) -> State:
        """The state of these runs, without those that nothing needs."""
        state = cls(problem)
        made: list[list[int]] = [[problem.producer[v]] for v in range(problem.n_values)]
        used: list[list[int]] = [[] for _ in range(problem.n_values)]
        for stage, again in enumerate(recomputed):
            for op in again:
                for v in problem.outputs[op]:
                    made[v].append(stage)
                for v in problem.inputs[op]:
                    used[v].append(stage)
            for v in problem.needs[stage]:
                used[v].append(stage)
        ends: list[tuple[int, int]] = []
        for v in range(problem.n_values):  # from each run to the last use before the next
            ends += [(stage, v) for stage in state._carry(v, made[v], used[v])]
        state.refresh()
        state._drop_unread(ends)
        return state

    def _carry(self, v: int, made: list[int], used: list[int]) -> Iterator[int]:
        """Yields the last stage of each carriage."""
        if v in self.problem.held:  # in the caller's hands: no run makes new ones
            made = [stage for stage in made if stage < self.problem.n_forward] or made[:1]
        made = [*sorted(set(made)), self.problem.n_ops + 1]
        used.sort()
        for here, following in pairwise(made):
            last = bisect_left(used, following) - 1
            if last >= 0 and used[last] > here:
                self._set(v, here + 1, used[last], 1)
                if here != self.problem.producer[v]:
                    insort(self.starts[here], v)
                yield used[last]

    def _drop_unread(self, ends: list[tuple[int, int]]) -> None:
        shortened: set[int] = set()
        # Nothing would free a value in a stage that does not touch it.
        for stage, v in sorted(ends, reverse=True):
            touches = self.touches[v]
            place = bisect_left(touches, stage)
            if place < len(touches) and touches[place] == stage:
                continue
            before = touches[place - 1]
            self.change(v, before, stage, 0)
            shortened |= {before, stage}
        self.settle(shortened)

    def copy(self) -> State:
        copied = State.__new__(State)
        copied.problem = self.problem
        copied.kept = self.kept.copy()
        copied.rows = [memoryview(row) for row in copied.kept]
        copied.starts = [list(values) for values in self.starts]
        copied.touches = [list(stages) for stages in self.touches]
        copied.stages = list(self.stages)
        copied.entry_bytes = self.entry_bytes.copy()
        copied.rise_bytes = self.rise_bytes.copy()
        return copied

    @property
    def cost_us(self) -> float:
        return sum(stage.cost_us for stage in self.stages)

    @property
    def runs(self) -> list[list[int]]:
        """What runs again in each stage, in captured order."""
        return [sorted(stage.recomputed) for stage in self.stages]

    @property
    def peak_bytes(self) -> Bytes:
        """Of each stage, resident bytes included."""
        return self.entry_bytes + self.rise_bytes + self.problem.resident_bytes

    def refresh(self) -> None:
        for touches in self.touches:
            touches.clear()
        for t in range(self.problem.n_ops + 1):
            self.stages[t] = stage = self.replay(t)
            self.rise_bytes[t] = stage.rise_bytes
            for v in stage.touched:
                self.touches[v].append(t)

    def _set(self, v: int, first: int, last: int, bit: int) -> None:
        size_bytes = self.problem.size_bytes[v]
        self.kept[first : last + 1, v] = bit
        self.entry_bytes[first : last + 1] += size_bytes if bit else -size_bytes

    def change(self, v: int, before: int, stage: int, bit: int) -> None:
        """Carry v (or not) over the gap from its touch at `before` to that at `stage`."""
        self._set(v, before + 1, stage, bit)
        is_carried_on = bool(self.rows[stage + 1][v])
        # Else the stage recomputes it, unless it first makes it.
        starts_before = before != self.problem.producer[v] and not self.rows[before][v]
        for at, here in ((before, starts_before and bit), (stage, is_carried_on and not bit)):
            present = v in self.starts[at]
            if here and not present:
                insort(self.starts[at], v)
            elif present and not here:
                self.starts[at].remove(v)

    def settle(self, stages: Iterable[int]) -> None:
        """Replay `stages` and drop what is carried to no use any more, to a fixed point."""
        waiting = sorted(set(stages))
        while waiting:
            t = waiting.pop()  # latest first: a dropped carriage changes an earlier stage
            for v in self._replace(t):
                if self.rows[t][v] and not self.rows[t + 1][v]:
                    touches = self.touches[v]
                    before = touches[bisect_left(touches, t) - 1]
                    self.change(v, before, t, 0)
                    if before not in waiting:
                        insort(waiting, before)

    def _replace(self, t: int) -> list[int]:
        """Replay stage t; return the values it touches no longer."""
        old, new = self.stages[t], self.replay(t)
        self.stages[t] = new
        self.rise_bytes[t] = new.rise_bytes
        if old.touched == new.touched:
            return []
        old_set, new_set = set(old.touched), set(new.touched)
        for v in new.touched:
            if v not in old_set:
                insort(self.touches[v], t)
        lost = [v for v in old.touched if v not in new_set]
        for v in lost:
            touches = self.touches[v]
            touches.pop(bisect_left(touches, t))
        return lost

    def replay(self, t: int) -> Stage:
        """Stage t as the bits now have it; `stages` is left as it was."""
        return _replay_stage(self.problem, self.rows[t], self.rows[t + 1], self.starts[t], t)

    def schedule(
        self, *, budget_bytes: int = 0, solver: str = "", options: dict[str, Option] | None = None
    ) -> Schedule:
        steps = steps_of_stages(self.problem, self.rows, self.stages)
        return Schedule.for_graph(
            self.problem.graph, steps, budget_bytes=budget_bytes, solver=solver, options=options
        )


def store_all_state(problem: Problem) -> State:
    return State.from_recomputed(problem, [()] * (problem.n_ops + 1))


# Schedules as sequences of ops: each op any number of times, values freed after last use. It is the
# form of chains, policies, templates and constraint programs, and can say all but offload.


def schedule_of(
    problem: Problem, sequence: Sequence[int], *, budget_bytes: int = 0, solver: str = ""
) -> Schedule:
    steps = _steps_of(problem, sequence)
    return Schedule.for_graph(problem.graph, steps, budget_bytes=budget_bytes, solver=solver)


def ops_of(problem: Problem, schedule: Schedule) -> list[int]:
    return [problem.graph.op_index[step.op] for step in schedule.steps if isinstance(step, Compute)]


def _steps_of(problem: Problem, sequence: Sequence[int]) -> list[Step]:
    lost_after = _lost_after(problem, sequence)  # `simulate` names inputs that were never made
    live = bytearray(problem.n_values)
    steps: list[Step] = []
    for position, op in enumerate(sequence):
        # Live outputs of an op stay as they are.
        if not problem.outputs[op] or not all(live[v] for v in problem.outputs[op]):
            steps.append(Compute(problem.graph.ops[op].name))
        for v in problem.outputs[op]:
            live[v] = 1
        for v in lost_after[position]:
            if live[v]:
                live[v] = 0
                steps.append(Free(problem.names[v]))
    return steps


def _lost_after(problem: Problem, sequence: Sequence[int]) -> list[list[int]]:
    """For each position the values that nothing reads between it and their next making."""
    lost: list[list[int]] = [[] for _ in sequence]
    wanted = bytearray(problem.n_values)
    for v in problem.needs[problem.n_ops]:
        wanted[v] = 1
    ends = last_forward_position(problem, sequence)
    for position in reversed(range(len(sequence))):
        op = sequence[position]
        # Forward's caller reads its outputs after the last of its ops.
        extra = problem.forward_outputs if position == ends else ()
        reads = (*problem.inputs[op], *extra)
        lost[position] = [v for v in dict.fromkeys((*problem.outputs[op], *reads)) if not wanted[v]]
        for v in problem.outputs[op]:
            # In the caller's hands the first value stays, whatever runs again.
            if position <= ends or v not in problem.held:
                wanted[v] = 0
        for v in reads:
            wanted[v] = 1
    return lost


def last_forward_position(problem: Problem, sequence: Sequence[int]) -> int:
    """Position of the first run of the last forward op to run, -1 if there is none."""
    waiting = set(range(problem.n_forward))
    for position, op in enumerate(sequence):
        waiting.discard(op)
        if not waiting:
            return position if problem.n_forward else -1
    return -1


def state_of(problem: Problem, sequence: Sequence[int]) -> State:
    return State.from_recomputed(problem, recomputed_by_stage(problem, sequence))


def recomputed_by_stage(problem: Problem, sequence: Sequence[int]) -> list[list[int]]:
    """The repeated runs in each stage; first runs must be in the problem's order."""
    stages: list[list[int]] = [[] for _ in range(problem.n_ops + 1)]
    following = 0
    for op in sequence:
        if op == following:
            following += 1
        else:
            stages[following].append(op)
    return stages
