"""Large neighbourhood search around the best schedule, each neighbourhood solved by CP-SAT.

Source: P. Shaw, "Using Constraint Programming and Local Search Methods to Solve Vehicle Routing
Problems", 1998, https://doi.org/10.1007/3-540-49481-2_30, with the neighbourhoods of `events`. Sets
of ops run again wherever that may help; they grow while searched to the end, else shrink. No clock
counts, so a seed and workers fix the schedules. Nothing is proved.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Sequence

import numpy as np

from remat.schedules.schedule import Schedule
from remat.solver.backends.processes import Task
from remat.solver.local_search import events
from remat.solver.local_search.events import RunningSolvers, Runs, again_us, stages_by_op
from remat.solver.local_search.repair import fill
from remat.solver.problem import Problem
from remat.solver.search import Search
from remat.solver.state import State, ops_of, recomputed_by_stage
from remat.solver.stopping import NEIGHBOURHOOD

_FIRST_SIZE = 40  # ops in the first sets
# Where much is to be won, the first set is all of so many ops: a series-parallel net of 169 came
# to 13 % of overhead in 2 s, from sets of 40 in 7.
_WHOLE_OPS, _WIDE = 200, 0.05
_GROWTH, _SHRINKAGE = 1.15, 0.85
FEW_STAGES = 3  # in which an op may run again, beside present ones, until all is searched
_FULL = 0.98  # a stage is full from this part of the budget on


class LargeNeighbourhoods:
    """Improves `search`'s best schedule; `stop` says when it is good enough."""

    def __init__(
        self, search: Search, stop: Callable[[], bool], seed: int = 0, workers: int = 1
    ) -> None:
        self.search, self.stop, self.workers = search, stop, workers
        self.size: float = _FIRST_SIZE
        self.is_first = search.gap > _WIDE and search.problem.n_ops <= _WHOLE_OPS
        self.most_stages, self.source = FEW_STAGES, random.Random(seed)
        self.guide: Runs = ()
        self.restart()

    def restart(self) -> None:
        assert self.search.best is not None
        self.is_exhausted = False
        self._take(runs_by_stage(self.search.problem, self.search.best))

    @property
    def cost_us(self) -> float:
        return again_us(self.search.problem, self.runs)

    def run(self, effort: float) -> float:
        """`effort` in CP-SAT's deterministic time; returns what was spent."""
        spent = 0.0
        while spent < effort and not self.is_exhausted:
            if self.stop() or self.search.out_of_time():
                break
            spent += self._round()
        return spent

    def _round(self) -> float:
        """Try some sets at once, take what is better; returns the effort of a worker."""
        self.search.say(f"neighbourhoods of {int(self.size)} ops")
        sets = [self._pick() for _ in range(self.workers)]
        # Not in the threads: which of them is first would count.
        seeds = [self.source.randrange(1 << 30) for _ in sets]
        running = RunningSolvers()
        drawn = zip(sets, seeds, strict=True)
        calls = [functools.partial(self._try, chosen, seed, running) for chosen, seed in drawn]
        with contextlib.ExitStack() as stack:
            tasks = [stack.enter_context(Task(call, running.stop)) for call in calls]
            outcomes = [task.wait() for task in tasks]
        better = [found.runs for found in outcomes if found.runs is not None]
        for runs in better:
            if again_us(self.search.problem, runs) < self.cost_us:
                self._take(runs)
        all_finished = all(found.finished for found in outcomes)
        self.size *= _GROWTH if all_finished else _SHRINKAGE
        self.size = min(max(self.size, 8), self.search.problem.n_ops)
        is_whole = len(sets[0]) >= self.search.problem.n_ops and not self.is_first
        if self.is_first:
            self.size, self.is_first = _FIRST_SIZE, False
        if is_whole and all_finished and not better:
            # All ops at all stages.
            self.is_exhausted = self.most_stages >= self.search.problem.n_ops
            self.most_stages *= 2  # all ops, but at few stages
            self.size = _FIRST_SIZE
        return max(found.effort for found in outcomes)  # they ran side by side

    def _try(self, chosen: Sequence[int], seed: int, running: RunningSolvers) -> events.Tried:
        search, problem = self.search, self.search.problem
        most, room_bytes = self.most_stages, search.budget_bytes - problem.resident_bytes
        stages_of = events.candidate_stages(problem, self.runs, chosen, most, self.guide)
        effort = events.TryLimits(NEIGHBOURHOOD, search.left_s, seed)
        below_us = self.cost_us * (1 - 1e-9)  # by more than rounding, or rounds never end
        return events.try_events(
            problem, self.runs, stages_of, room_bytes, below_us, effort, running
        )

    def _take(self, runs: Runs) -> None:
        """Make `runs` the schedule at hand, with what still fits carried, and offer it."""
        problem = self.search.problem
        self.search.offer_sequence(sequence_of_runs(problem, runs))
        self.state = State.from_recomputed(problem, runs)
        fill(self.state, self.search.budget_bytes, self.search)
        if self.search.offer(self.state):
            runs = self.state.runs
        self.runs: Runs = runs

    def _pick(self) -> list[int]:
        size = int(self.size)
        if self.is_first or size >= self.search.problem.n_ops:
            return list(range(self.search.problem.n_ops))
        rules = [self._at_moment, self._around, self._near_moment, self._window]
        if self.guide:
            rules += [self._unlike_guide]
        return sorted(dict.fromkeys(self.source.choice(rules)(size)))[: 2 * size]

    def _full_stage(self) -> int:
        peak_bytes = self.state.peak_bytes[: self.search.problem.n_ops]
        full = np.flatnonzero(peak_bytes >= _FULL * self.search.budget_bytes).tolist()
        return self.source.choice(full or [int(np.argmax(peak_bytes))])

    def _at_moment(self, size: int) -> list[int]:
        """Producers of values live, or run again, at a full moment."""
        problem, t = self.search.problem, self._full_stage()
        live = [problem.producer[v] for v in np.flatnonzero(self.state.kept[t]).tolist()]
        found = list(dict.fromkeys([*self.runs[t], *live]))
        rest = found[len(self.runs[t]) :]
        self.source.shuffle(rest)
        found = [*self.runs[t], *rest][:size]
        return [*found, *self._inputs_of(found)][: size + size // 2]

    def _around(self, size: int) -> list[int]:
        """Ops nearest in the graph to one that runs again."""
        problem = self.search.problem
        again = [op for stage in self.runs for op in stage]
        root = self.source.choice(again or list(range(problem.n_ops)))
        found: dict[int, None] = {root: None}
        waiting = [root]
        while waiting and len(found) < size:
            following: list[int] = []
            for op in waiting:
                readers = [t for t in problem.readers[op] if t < problem.n_ops]
                near = [*self._inputs_of([op]), *readers]
                self.source.shuffle(near)
                following += [other for other in near if other not in found]
                found.update(dict.fromkeys(near))
            waiting = list(dict.fromkeys(following))
        return list(found)[:size]

    def _near_moment(self, size: int) -> list[int]:
        """What runs again in the stages nearest a full moment, with its inputs."""
        t = self._full_stage()
        stages = sorted(range(len(self.runs)), key=lambda stage: (abs(stage - t), stage))
        found: dict[int, None] = {}
        for stage in stages:
            found.update(dict.fromkeys(self.runs[stage]))
            found.update(dict.fromkeys(self._inputs_of(self.runs[stage])))
            if len(found) >= size:
                break
        return list(found)

    def _unlike_guide(self, size: int) -> list[int]:
        """Ops that the guide runs again at other stages, in a stretch of captured order."""
        ours, theirs = stages_by_op(self.runs), stages_by_op(self.guide)
        unlike = sorted(op for op in {*ours, *theirs} if ours.get(op) != theirs.get(op))
        if len(unlike) > size:
            first = self.source.randrange(len(unlike) - size + 1)
            unlike = unlike[first : first + size]
        return unlike or self._window(size)

    def _window(self, size: int) -> list[int]:
        n_ops = self.search.problem.n_ops
        first = self.source.randrange(max(n_ops - size, 1))
        return list(range(first, min(first + size, n_ops)))

    def _inputs_of(self, ops: Sequence[int]) -> list[int]:
        problem = self.search.problem
        return [problem.producer[v] for op in ops for v in problem.inputs[op]]


def runs_by_stage(problem: Problem, schedule: Schedule) -> Runs:
    """What runs again in each stage of `schedule`, in captured order."""
    return [sorted(set(again)) for again in recomputed_by_stage(problem, ops_of(problem, schedule))]


def sequence_of_runs(problem: Problem, runs: Runs) -> list[int]:
    sequence: list[int] = []
    for stage, again in enumerate(runs):
        sequence += again
        if stage < problem.n_ops:
            sequence.append(stage)
    return sequence
