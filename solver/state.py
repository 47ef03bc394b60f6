"""Schedules as retention bits, judged stage by stage in plain integers.

Stage t is the time from the first run of op t - 1 to that of op t; a last stage closes
the step. ``kept[t, v]`` says that value v is carried into stage t. Given these bits the
cheapest recomputations of stage t are the closure of what op t reads and what is carried
on, through inputs that are not carried: local to the stage. So the time of a schedule is
the sum of its stages, its peak their maximum, and moving one bit touches few stages.

Repairs and fills live on that. What bits cannot say is that an op runs twice within a stage,
or first runs in another order; a sequence of ops (`sequence`) can.

These are Checkmate's R and S (Jain et al. 2020, arXiv:1910.02653) with R eliminated.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from remat.schedules.schedule import Option, Schedule
from remat.solver.problem import Problem
from remat.solver.stage import Stage, emit, replay_stage

Bytes = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]


class State:
    """Retention bits of every value, with each stage's replay kept up to date.

    Attributes
    ----------
    kept : 1 where a value (column) is carried into a stage (row 0..n, one more of zeros).
    rows : the rows of `kept`, for fast reading one by one.
    starts : for each stage the values recomputed in it to be carried on, ascending.
    touches : for each value the stages that touch it, ascending.
    entry_bytes : bytes carried into each stage. peak_bytes : of each stage, resident
        bytes included. cost_us : of all recomputations.
    """

    def __init__(self, problem: Problem) -> None:
        n = problem.n_ops
        self.problem = problem
        self.kept: Bits = np.zeros((n + 2, problem.n_values), np.uint8)
        self.rows = [memoryview(row) for row in self.kept]
        self.starts: list[list[int]] = [[] for _ in range(n + 1)]
        self.touches: list[list[int]] = [[] for _ in range(problem.n_values)]
        self.stages: list[Stage] = [Stage((), 0.0, 0, ())] * (n + 1)
        self.entry_bytes: Bytes = np.zeros(n + 1, np.int64)
        self.rise_bytes: Bytes = np.zeros(n + 1, np.int64)

    @classmethod
    def from_recomputed(cls, problem: Problem, recomputed: Sequence[Iterable[int]]) -> State:
        """The state that runs ops again as listed by stage and frees after last use.

        A value is carried from each computation to the last use before the next one. Listed
        runs that nothing needs are left out, and what only they read is not carried to them.
        """
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
        for v in range(problem.n_values):
            ends += [(stage, v) for stage in state._carry(v, made[v], used[v])]
        state.refresh()
        state._drop_unread(ends)
        return state

    def _carry(self, v: int, made: list[int], used: list[int]) -> Iterator[int]:
        """Carry v from each of its runs; yields the last stage of each carriage."""
        if v in self.problem.held:
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
        """Carry nothing to a stage that does not touch it: nothing would free it there.

        `ends` are the last stage and the value of each carriage.
        """
        shortened: set[int] = set()
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
        """An independent copy."""
        twin = State.__new__(State)
        twin.problem = self.problem
        twin.kept = self.kept.copy()
        twin.rows = [memoryview(row) for row in twin.kept]
        twin.starts = [list(values) for values in self.starts]
        twin.touches = [list(stages) for stages in self.touches]
        twin.stages = list(self.stages)
        twin.entry_bytes = self.entry_bytes.copy()
        twin.rise_bytes = self.rise_bytes.copy()
        return twin

    @property
    def cost_us(self) -> float:
        """Time of all recomputations."""
        return sum(stage.cost_us for stage in self.stages)

    @property
    def peak_bytes(self) -> Bytes:
        """Peak of each stage, resident bytes included."""
        return self.entry_bytes + self.rise_bytes + self.problem.resident_bytes

    def refresh(self) -> None:
        """Replay every stage from the bits alone."""
        for touches in self.touches:
            touches.clear()
        for t in range(self.problem.n_ops + 1):
            self.stages[t] = stage = self.replay(t)
            self.rise_bytes[t] = stage.rise_bytes
            for v in stage.touched:
                self.touches[v].append(t)

    def _set(self, v: int, first: int, last: int, bit: int) -> None:
        """Set the bits of stages first..last and move the bytes."""
        size_bytes = self.problem.size_bytes[v]
        self.kept[first : last + 1, v] = bit
        self.entry_bytes[first : last + 1] += size_bytes if bit else -size_bytes

    def change(self, v: int, before: int, stage: int, bit: int) -> None:
        """Carry v, or not, over the gap from its touch at `before` to that at `stage`."""
        self._set(v, before + 1, stage, bit)
        is_carried_on = bool(self.rows[stage + 1][v])
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
            t = waiting.pop()
            lost = self._replace(t)
            for v in lost:
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
        return replay_stage(self.problem, self.rows[t], self.rows[t + 1], self.starts[t], t)

    def schedule(
        self,
        *,
        budget_bytes: int = 0,
        solver: str = "",
        options: dict[str, Option] | None = None,
    ) -> Schedule:
        """The schedule these bits stand for."""
        steps = emit(self.problem, self.rows, self.stages)
        return Schedule.for_graph(
            self.problem.graph, steps, budget_bytes=budget_bytes, solver=solver, options=options
        )
