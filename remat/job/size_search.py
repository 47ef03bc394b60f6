"""The largest batch, or sequence, that trains within a budget at a bearable overhead.

Sizes are guessed on graphs made from two captures; the answer and the next are captured and solved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

import msgspec
from msgspec.structs import replace

import remat.solver as solvers
from remat.budgets import Budget, parse_budget, unmodified
from remat.checks import failures, is_checked, unless_short
from remat.formats import bytes_text, percent_text
from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.errors import BudgetError, RewriteError, SolverError
from remat.graph_capture.graph import Op, Resident, TrainingGraph
from remat.job.factory import call, load_model
from remat.job.fitted import Fit, SizeTried
from remat.job.pipeline import check_schedule, trace_loaded
from remat.job.plan_source import Captured, captured_model
from remat.job.request import Request
from remat.progress import Stopwatch
from remat.schedules.outcome import Check, Result
from remat.schedules.simulate import overhead_of
from remat.solved import infeasible_text
from remat.solver.problem import Problem, least_needed_bytes
from remat.solver.search import is_interrupted, note_interrupt, one_job

# A step's graph at another size, as if bytes and costs were affine between two captures. Attention
# is not affine in a sequence's length: such a graph is a guess, to be checked.


def is_same_step(first: TrainingGraph, second: TrainingGraph) -> bool:
    same_values = [v.name for v in first.values] == [v.name for v in second.values]
    return same_values and [_facts_between(op) for op in first.ops] == [
        _facts_between(op) for op in second.ops
    ]


_Sized = tuple[int, TrainingGraph]


def graph_at(size: int, one: _Sized, two: _Sized) -> TrainingGraph:
    """From (size, graph) at two others; its shapes are the first's, so for predictions alone."""
    (size_1, first), (size_2, second) = one, two

    def at(x: float, y: float) -> float:
        # Measured costs may fall as the size grows, and then end below 0 far away.
        return max(x + (y - x) * (size - size_1) / (size_2 - size_1), 0.0)

    values = tuple(
        replace(v, size_bytes=round(at(v.size_bytes, w.size_bytes)))
        for v, w in zip(first.values, second.values, strict=True)
    )
    ops = tuple(
        replace(
            a, cost_us=at(a.cost_us, b.cost_us),
            workspace_bytes=round(at(a.workspace_bytes, b.workspace_bytes)),
        )
        for a, b in zip(first.ops, second.ops, strict=True)
    )  # fmt: skip
    resident = Resident(
        **{
            name: round(at(size_bytes, getattr(second.resident, name)))
            for name, size_bytes in msgspec.structs.asdict(first.resident).items()
        }
    )
    return replace(first, ops=ops, values=values, resident=resident)


def _facts_between(op: Op) -> tuple[object, ...]:
    return op.name, op.target, op.phase, op.inputs, op.outputs, op.no_recompute


_GUESSES = 4  # that follow a guess; later ones double or halve the size


@dataclass(frozen=True)
class SizeRange:
    """Sizes from `least` to `most`, in steps of `step`; in the units of the factory's argument."""

    least: int
    most: int
    step: int

    def below(self, size: int) -> int:
        return self.least + (min(size, self.most) - self.least) // self.step * self.step


def largest(
    sizes: SizeRange,
    holds: Callable[[int], bool],  # costly, so called once a size
    guess: Callable[[int, int | None], int],  # of a size that holds, and one that does not or None
    fits: int | None,
    fails: int | None,
) -> int | None:
    """The largest size that holds; None where none does. A size holds if a larger one does."""
    # As if the size before the range held, so that its least is tried too.
    low = sizes.least - sizes.step if fits is None else fits
    tries = 0
    while fails is None or fails - low > sizes.step:
        if low + sizes.step > sizes.most:
            break
        size = _next(sizes, low, fails, guess, tries)
        tries += 1
        if holds(size):
            low = size
        else:
            fails = size
    return low if low >= sizes.least else None


def _next(
    sizes: SizeRange, low: int, fails: int | None, guess: Callable[[int, int | None], int],
    tries: int,
) -> int:  # fmt: skip
    top = sizes.most if fails is None else fails - sizes.step
    if tries >= _GUESSES and fails is None:  # after so many wrong guesses: double, then halve
        return min(max(sizes.below(2 * low), low + sizes.step), top)
    if tries >= _GUESSES and fails is not None:
        return max(sizes.below((low + fails) // 2), low + sizes.step)
    wanted = sizes.below(guess(low, fails))  # a step at least, so that each try tells something new
    return min(max(wanted, low + sizes.step), top)


# Guesses from two captures: near the limit an overhead hangs on measured times.

_Pair = tuple[_Sized, _Sized]  # two sizes, each with its graph


def _pair_near(
    graphs: Mapping[int, TrainingGraph], near: int, fails: int | None = None
) -> _Pair | None:
    """Two captures to guess between: `near` and `fails`, else the nearest and a farther one."""

    def pair(one: int, other: int) -> _Pair | None:
        if not is_same_step(graphs[one], graphs[other]):
            return None
        return (one, graphs[one]), (other, graphs[other])

    if near in graphs and fails is not None and (found := pair(near, fails)):
        return found
    by_distance = sorted(graphs, key=lambda size: abs(size - near))
    one = by_distance[0]
    # A line through two sizes that are close magnifies what differs between two measurements.
    away = (other for other in by_distance if other != one and abs(other - one) * 4 >= one)
    return next((found for other in away if (found := pair(one, other))), None)


def _unmodified_reaches(pair: _Pair, budget_bytes: int) -> int:
    """The largest size whose unmodified step fits, by the line through both peaks; 0 for none."""
    (size, first), (other, second) = pair
    here, there = unmodified(first).peak_bytes, unmodified(second).peak_bytes
    slope = (there - here) / (other - size)
    return int(size + (budget_bytes - here) / slope) if slope > 0 else 0


_Factory = str | Callable[..., Any]
SOLVE_S = 10.0  # seconds that the solve at a size may take
LARGEST_SIZE = 1 << 20  # largest size that is tried unless told otherwise
GUESS_S = 2.0  # seconds that a solve of a guess may take
_GROWTH = 4  # times the largest captured or unmodified size: more takes too long


def largest_batch(
    factory: _Factory,
    vary: str = "batch",
    *,
    budget: str | SupportsIndex,
    max_overhead: float = 0.10,
    sizes: tuple[int, int] | None = None,
    step: int = 1,
    most: int = LARGEST_SIZE,
    each_s: float = SOLVE_S,
    check: bool | None = None,
    request: Request | None = None,
    stopwatch: Stopwatch | None = None,
) -> Fit:
    """The largest size at which a plan fits the budget with no more than `max_overhead`.

    Parameters
    ----------
    factory : a function, or ``path/to/file.py:function``. It takes `vary` as a keyword, and returns
        a model and a batch of that size.
    vary : ``batch``, ``sequence``, or whatever the factory calls it.
    budget : bytes, ``"8GiB"`` or ``"auto"``. max_overhead : a fraction of the time of the step that
        keeps everything.
    sizes : the two that are captured first; 2 and 4 times `step` if left out.
    step : sizes are multiples of it. most : no larger size is tried.
    each_s : seconds that a solve may take.
    check : run a step of the answer and measure its peak. None does so if the unmodified step fits
        into free memory. Nothing runs for a device that is not here.
    request : how to capture and solve: optimizer, device, solver, pins.

    Raises
    ------
    CaptureError : the factory takes no such argument, or fails. BudgetError : the budget is another
        one at each size. SolverError : the sizes make no sense.
    """
    search = FitSearch(
        factory, vary, SizeRange(step, most, step), max_overhead,
        request or Request(str(budget), device=CPU), stopwatch or Stopwatch(), each_s,
    )  # fmt: skip
    return search.run(budget, sizes or (2 * step, 4 * step), check)


class FitSearch:
    def __init__(
        self, factory: _Factory, vary: str, sizes: SizeRange, max_overhead: float, request: Request,
        stopwatch: Stopwatch, each_s: float = SOLVE_S,
    ) -> None:  # fmt: skip
        if not (0 < sizes.step <= sizes.most):
            raise SolverError(f"step must be from 1 to the most, {sizes.most}, not {sizes.step}")
        if max_overhead < 0:
            raise SolverError(f"the overhead must be 0 or more, not {max_overhead}")
        self.factory, self.vary, self.sizes = factory, vary, sizes
        self.max_overhead, self.request, self.stopwatch = max_overhead, request, stopwatch
        self.each_s = each_s
        self.budget, self.budget_bytes = Budget("auto"), 0
        self.graphs: dict[int, TrainingGraph] = {}
        self.tried: dict[int, SizeTried] = {}
        self.best: tuple[int, Captured, Result] | None = None

    def run(
        self, budget: str | SupportsIndex, first: tuple[int, int], check: bool | None = None
    ) -> Fit:
        self.budget = parse_budget(budget)
        if self.budget.is_of_the_step:
            raise BudgetError(
                f"give the budget as bytes, 8GiB or auto: {budget!r} is different at each size"
            )
        # Both are sizes of the range: a factory may build multiples of the step alone.
        small, large = sorted(self.sizes.below(max(size, self.sizes.least)) for size in first)
        if small == large:
            raise SolverError(f"give two different first sizes: both are {small}")
        with one_job():
            try:
                size = self._largest(small, large) or 0
            except KeyboardInterrupt:
                note_interrupt()
                if self.best is None:  # with a plan at hand, Ctrl-C ends the search alone
                    raise
                size = self.best[0]
            return self._fit(size, check)

    def _largest(self, small: int, large: int) -> int | None:
        held = [size for size in (small, large) if self._holds(size)]  # both, as guesses take two
        fails = min((size for size in (small, large) if not self.tried[size].fits), default=None)
        # Costs are measured, so a larger size may hold where a smaller failed: trust the smaller.
        fits = max((size for size in held if fails is None or size < fails), default=None)
        return largest(self.sizes, self._holds, self._guess, fits, fails)

    def _captured(self, size: int) -> Captured:
        with self.stopwatch.stage("load", f"building {self.vary}={size}"):
            if isinstance(self.factory, str):
                loaded = load_model(self.factory, **{self.vary: size})
            else:
                name = getattr(self.factory, "__name__", type(self.factory).__name__)
                loaded = call(self.factory, name, {self.vary: size})
            self.request = self.request.with_device()  # asked now: the model has imported torch
            loaded = loaded.on(self.request.device)
        captured = captured_model(loaded, self.request, self.stopwatch)
        self.graphs[size] = captured.graph
        return captured

    def _holds(self, size: int) -> bool:
        captured = self._captured(size)
        # What `auto` means is settled by the first capture, and the same for all later ones.
        self.budget_bytes = self.budget_bytes or self.budget.bytes_for(captured.graph)
        with self.stopwatch.stage("solve", f"solving at {self.vary}={size}"):
            result = self._solve(captured.graph, self.each_s)
        one = self._tried(size, captured.graph, result)
        self.tried[size] = one
        # Noted before Ctrl-C is heeded: the solve it ended may have found a plan.
        if one.fits and (self.best is None or size > self.best[0]):
            self.best = size, captured, result
        if is_interrupted():
            raise KeyboardInterrupt
        return one.fits

    def _solve(self, graph: TrainingGraph, limit_s: float) -> Result:
        how, room = self.request, self.budget_bytes
        return solvers.solve_within(graph, room, how.solver, time_limit_s=limit_s, **how.solving)

    def _is_fit(self, result: Result) -> bool:
        return result.schedule is not None and result.overhead <= self.max_overhead

    def _tried(self, size: int, graph: TrainingGraph, result: Result) -> SizeTried:
        says = ""
        if result.schedule is None:
            says = infeasible_text(result)
        elif not self._is_fit(result):
            says = (
                f"the fastest plan found within {bytes_text(self.budget_bytes)} has "
                f"{percent_text(result.overhead)} overhead"
            )
        return SizeTried(
            size=size, fits=self._is_fit(result), status=result.status,
            peak_bytes=result.peak_bytes, time_us=result.time_us, overhead=result.overhead,
            lower_overhead=overhead_of(result.lower_bound_us, graph.time_us),
            unmodified_bytes=unmodified(graph).peak_bytes, least_bytes=result.least_feasible_bytes,
            says=says, seconds=result.wall_s,
        )  # fmt: skip

    def _guess(self, fits: int, fails: int | None) -> int:
        step, known = self.sizes.step, max(self.graphs)
        known = max(known, self._without_plan(known))  # bytes are as good as exact at any size
        top = min(self.sizes.most, known * _GROWTH) if fails is None else fails - step
        pair = _pair_near(self.graphs, fits, fails)
        if pair is None:  # captures of other ops, as by a branch on size, give no line
            return min(2 * max(fits, step), top) if fails is None else (fits + fails) // 2
        with self.stopwatch.stage("guess", f"guessing {self.vary} from two captures"):
            return self._largest_guessed(fits, top, pair)

    def _largest_guessed(self, low: int, top: int, pair: _Pair) -> int:
        """By halves, from the size that fits without a plan on."""
        tried, step = self.tried.get(low), self.sizes.step
        # Where `low` has a plan already, it was a guess: in growing steps then, as the end is near.
        stride = step if tried is not None and tried.overhead > 0 else 0
        low = max(low, min(self.sizes.below(_unmodified_reaches(pair, self.budget_bytes)), top))
        high = top + step
        while high - low > step:
            size = low + stride if stride else self.sizes.below((low + high) // 2)
            size = min(max(size, low + step), high - step)
            if self._is_thought_to_hold(graph_at(size, *pair)):
                low, stride = size, 2 * stride
            else:
                high, stride = size, 0
        return low

    def _is_thought_to_hold(self, graph: TrainingGraph) -> bool:
        if least_needed_bytes(Problem.of(graph)) > self.budget_bytes:  # cheap answers first
            return False
        if solvers.solve_within(graph, self.budget_bytes, "store_all").schedule is not None:
            return True
        if not self.max_overhead:  # then only the step that keeps all would do
            return False
        found = self._solve(graph, min(self.each_s, GUESS_S))
        if is_interrupted():
            raise KeyboardInterrupt
        return self._is_fit(found)

    def _without_plan(self, near: int) -> int:
        """The largest size whose unmodified step is thought to fit; 0 where none is."""
        pair = _pair_near(self.graphs, near)
        reached = 0 if pair is None else _unmodified_reaches(pair, self.budget_bytes)
        return max(self.sizes.below(reached), 0) if reached >= self.sizes.least else 0

    def _fit(self, size: int, check: bool | None) -> Fit:
        after = self.tried.get(size + self.sizes.step)
        # A next size that has a plan was too slow with it.
        limited = "most" if after is None else "overhead" if after.peak_bytes else "memory"
        limited = "interrupt" if is_interrupted() else limited
        graph = self.graphs[size or min(self.graphs)]
        return Fit(
            model=graph.name, device=graph.device, vary=self.vary, size=size,
            budget_bytes=self.budget_bytes, max_overhead=self.max_overhead, limited_by=limited,
            answer=self.tried.get(size), next=after,
            tried=tuple(self.tried[one] for one in sorted(self.tried)),
            without_plan=self._without_plan(size or min(self.graphs)),
            measured_peak_bytes=self._measured(check),
        )  # fmt: skip

    def _measured(self, check: bool | None) -> int | None:
        """Peak of a step of the answer, run and compared with eager; None where it is not run."""
        if self.best is None or not self.request.is_run_here:
            return None
        _, captured, result = self.best
        if captured.loaded is None or result.schedule is None:
            return None
        if is_interrupted() or not is_checked(captured.graph, check):
            return None
        request, loaded, schedule = self.request, captured.loaded, result.schedule

        def run() -> Check:
            traced = trace_loaded(loaded, request)
            return check_schedule(loaded, traced, schedule, request, captured.graph)

        with self.stopwatch.stage("check", "running a step of the answer"):
            found = unless_short(run)
        if found is None:
            return None
        failed = failures(found, self.budget_bytes)
        if failed:  # the answer is a promise, so a step that breaks it is an error and no figure
            raise RewriteError(f"{self.vary}={self.best[0]} fits as planned, but {failed[0]}")
        return found.plan_peak_bytes
