"""A search under way: the best schedule and bound so far, the clock, and who listens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Holding, Result
from remat.schedules.schedule import Option, Schedule
from remat.schedules.simulate import Simulation, overhead_of, simulate
from remat.solver.problem import Problem
from remat.solver.result import (
    INTERRUPTED,
    evaluate_schedule,
    least_budget_message,
    status_without,
    without_fit,
)
from remat.solver.state import State, schedule_of
from remat.solver.table import options_of


def check_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise SolverError(f"{name} must be {least} or more, not {number}")


# A search that Ctrl-C ends returns its best; a job of several must know, or it begins the next.


@dataclass(slots=True)
class _Job:
    depth: int = 0  # one a process, as Python gives Ctrl-C to one thread alone
    is_interrupted: bool = False


_job, _lock = _Job(), threading.Lock()


@contextmanager
def one_job() -> Generator[None]:
    """In the block, what Ctrl-C has ended stays ended; blocks within it are part of it."""
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def _enter(step: int) -> None:
    with _lock:
        _job.depth += step
        _job.is_interrupted &= _job.depth > 0


def note_interrupt() -> None:
    _job.is_interrupted = _job.depth > 0  # outside of a job it would end the next


def is_interrupted() -> bool:
    return _job.is_interrupted


@dataclass(slots=True)
class Clock:
    time_limit_s: float = 60.0
    began_s: float = field(default_factory=time.monotonic)  # setting the clock moves no limit

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def left_s(self) -> float:
        """0 or less once it is over, or Ctrl-C ended the job."""
        left_s = self.time_limit_s - self.elapsed_s
        return min(left_s, 0.0) if is_interrupted() else left_s

    @contextmanager
    def limited_to(self, time_limit_s: float) -> Generator[None]:
        """Another time limit, counted from the same beginning."""
        whole_s, self.time_limit_s = self.time_limit_s, time_limit_s
        try:
            yield
        finally:
            self.time_limit_s = whole_s


class _EnoughProvedError(Exception):
    """Ends a search whose bound shows that nothing it can find is of use; `Search` catches it."""


class Progress(msgspec.Struct, frozen=True):
    """What a solver tells while it works."""

    seconds: float  # since the solve began
    best_overhead: float | None  # of the best schedule within the budget, None without one
    bound_overhead: float  # no schedule has less
    doing: str  # what comes next, in words

    @property
    def gap(self) -> float | None:
        """Time of the best schedule over the bound, minus one; None while there is none."""
        if self.best_overhead is None:
            return None
        return max((1 + self.best_overhead) / (1 + self.bound_overhead) - 1, 0.0)


Listener = Callable[[Progress], None]

MANY_OPS = 1000  # with more a graph is large: what takes seconds comes last, less often or not


class Search:
    """One solve of one graph at one budget."""

    def __init__(
        self, graph: TrainingGraph, budget_bytes: int, solver: str, time_limit_s: float = 60.0,
        progress: Listener | None = None, options: dict[str, Option] | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.budget_bytes, self.solver = graph, budget_bytes, solver
        # Called with each better schedule and bound, and what is done next.
        self.progress, self.options = progress, options or {}
        self.clock, self.problem = Clock(time_limit_s), Problem.of(graph)
        self.best: Schedule | None = None
        self.best_state: State | None = None  # None too where `best` was offered as a schedule
        self.best_key: tuple[float, int] = (float("inf"), 0)  # time, peak
        # Of least peak, found without the budget: a solve at that peak finds it again.
        self.lowest: Schedule | None = None
        self.lowest_bytes = 1 << 62
        self.bound_us = graph.time_us  # no schedule within the budget takes less
        self.proved_infeasible = False
        self.cut_short = False  # by the clock or Ctrl-C
        self.message, self.doing = "", "keeping everything"
        self.floor: Holding | None = None
        self.least_bound_bytes = 0
        self.enough_us = float("inf")  # the search ends once the bound says that none is faster
        self.work = 0  # moves that repairs weighed: effort that is the same on every machine

    @classmethod
    def of(cls, solver: Any, name: str, graph: TrainingGraph, budget_bytes: int) -> Search:
        """`solver` is a dataclass as `Solver` describes it, `name` its name in the table."""
        options = options_of(solver)
        return cls(graph, budget_bytes, name, solver.time_limit_s, solver.progress, options)

    @property
    def left_s(self) -> float:
        return self.clock.left_s

    @property
    def gap(self) -> float:
        """Time of the best schedule over the bound, minus one; infinite while none is known."""
        if self.best is None:
            return float("inf")
        return self.best_key[0] / self.bound_us - 1 if self.bound_us > 0 else 0.0

    @property
    def is_large(self) -> bool:
        return self.problem.n_ops > MANY_OPS

    def is_open(self, gap: float) -> bool:
        return self.gap > gap and not self.proved_infeasible and not self.out_of_time()

    def has_room(self) -> bool:
        """Whether each op's working set, and the end, fit; else nothing does, as `message` says."""
        problem, resident_bytes = self.problem, self.problem.resident_bytes
        worst = max(range(problem.n_ops), key=lambda t: problem.working_set_bytes[t])
        need_bytes = problem.working_set_bytes[worst]
        end_bytes = sum(problem.size_bytes[v] for v in problem.needs[problem.n_ops])
        room_bytes = self.budget_bytes - resident_bytes
        if need_bytes > room_bytes:
            op = self.graph.ops[worst]
            place = f" ({op.module})" if op.module else ""
            needed = f"{need_bytes + resident_bytes} bytes with resident ones"
            self.message = f"op {op.name}{place} alone needs {needed}"
        elif end_bytes > room_bytes:
            self.message = (
                "gradients and other values that must be live when the step ends take "
                f"{end_bytes} bytes, on top of {resident_bytes} resident ones"
            )
        self.proved_infeasible |= max(need_bytes, end_bytes) > room_bytes
        return max(need_bytes, end_bytes) <= room_bytes

    def out_of_time(self) -> bool:
        """Whether the time limit has been hit, which the result will then say."""
        if self.left_s <= 0:
            self.cut_short = True
        return self.left_s <= 0

    @contextmanager
    def until_interrupted(self) -> Generator[None]:
        """Ctrl-C ends the block alone, with the best found so far."""
        try:
            yield
        except _EnoughProvedError:
            self.note("No schedule is faster than a known one by more than the gap")
        except KeyboardInterrupt:
            note_interrupt()
            self.cut_short = True
            found = ": this is the best schedule found until then"
            self.message = f"{INTERRUPTED}{' before there was one' if self.best is None else found}"

    def say(self, doing: str) -> None:
        self.doing = doing
        self.tell()

    def note(self, text: str) -> None:
        self.message = f"{self.message}. {text}" if self.message else text

    def tell(self) -> None:
        if self.progress is None:
            return
        base_us = self.graph.base_us
        best = None if self.best is None else overhead_of(self.best_key[0], base_us)
        bound = overhead_of(self.bound_us, base_us)
        self.progress(Progress(self.clock.elapsed_s, best, bound, self.doing))

    def raise_bound(self, bound_us: float) -> None:
        """At `enough_us`, _EnoughProvedError ends the search."""
        if bound_us > self.bound_us:
            self.bound_us = bound_us
            self.tell()
        if self.bound_us >= self.enough_us:
            raise _EnoughProvedError

    def offer(self, state: State, *, or_least: bool = False) -> bool:
        """Returns whether `state` fits; one that does not may be the `lowest` if `or_least`."""
        peak_bytes = int(state.peak_bytes.max(initial=self.problem.resident_bytes))
        key = self.graph.time_us + state.cost_us, peak_bytes
        return self._take(key, state.schedule, state, or_least=or_least)

    def offer_least(self, state: State) -> bool:
        return self.offer(state, or_least=True)

    def offer_schedule(self, schedule: Schedule, *, or_least: bool = False) -> bool:
        return self.offer_evaluated(schedule, simulate(self.graph, schedule), or_least=or_least)

    def offer_evaluated(
        self, schedule: Schedule, found: Simulation, *, or_least: bool = False
    ) -> bool:
        key = found.time_us, found.peak_bytes
        return self._take(key, lambda: schedule, None, or_least=or_least)

    def _take(
        self, key: tuple[float, int], made: Callable[[], Schedule], state: State | None, *,
        or_least: bool,
    ) -> bool:  # fmt: skip
        if (peak_bytes := key[1]) > self.budget_bytes:
            if or_least and peak_bytes < self.lowest_bytes:
                self.lowest, self.lowest_bytes = self._own(made()), peak_bytes
            return False
        if key < self.best_key:
            self.best, self.best_key = self._own(made()), key
            self.best_state = state and state.copy()
            self.tell()
        return True

    def _own(self, schedule: Schedule) -> Schedule:
        return msgspec.structs.replace(
            schedule, budget_bytes=self.budget_bytes, solver=self.solver, options=self.options
        )

    def offer_sequence(self, sequence: Sequence[int], *, or_least: bool = False) -> bool:
        return self.offer_schedule(schedule_of(self.problem, sequence), or_least=or_least)

    def result_of(self, run: Callable[[Search], object]) -> Result:
        """What `run` has found here when it ends, or Ctrl-C ends it."""
        with self.until_interrupted():
            run(self)
        return self.result()

    def result(self) -> Result:
        if self.best is not None:
            best_us = self.best_key[0]
            assert self.bound_us <= best_us * (1 + 1e-6), "a proven bound exceeds a schedule's time"
            found = evaluate_schedule(
                # Rounding may leave the bound a little above.
                self.graph, self.best, lower_bound_us=min(self.bound_us, best_us),
                budget_bytes=self.budget_bytes, wall_s=self.clock.elapsed_s,
                cut_short=self.cut_short, message=self.message,
            )  # fmt: skip
            return msgspec.structs.replace(found, floor=self.floor)
        return msgspec.structs.replace(
            self._without_schedule(), floor=self.floor, least_bound_bytes=self.least_bound_bytes
        )

    def _without_schedule(self) -> Result:
        wall_s = self.clock.elapsed_s
        status = status_without(is_proved=self.proved_infeasible, is_late=self.cut_short)
        if self.lowest is None:
            return Result(
                status=status, solver=self.solver, budget_bytes=self.budget_bytes,
                lower_bound_us=self.bound_us, wall_s=wall_s, message=self.message,
            )  # fmt: skip
        found = simulate(self.graph, self.lowest)
        assert self.least_bound_bytes <= found.peak_bytes, "a proven bound exceeds a peak"
        text = least_budget_message(
            self.budget_bytes, found.peak_bytes, self.message, is_proved=self.proved_infeasible
        )
        lost = without_fit(self.graph, self.lowest, found, self.budget_bytes, wall_s, text)
        bound_us = 0.0 if self.proved_infeasible else self.bound_us
        return msgspec.structs.replace(lost, status=status, lower_bound_us=bound_us)
