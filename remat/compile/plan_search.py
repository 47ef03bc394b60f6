"""The search for a compiled step that fits: solve, generate code, replay its peak, move on.

Fusion and order are known from generated code alone, so each candidate's code is replayed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

import remat.solver as solvers
from remat.budgets import UNBOUNDED_BYTES, auto_bytes
from remat.compile.graph_context import CompileOptions
from remat.formats import bytes_text
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.progress import stopwatch_of_call
from remat.ranks.one_plan import OnePlan
from remat.rewriter.inductor.lowering import ReplayError
from remat.rewriter.inductor.partition import FusedStep, Pair
from remat.rewriter.inductor.replay import ReplayedMemory
from remat.schedules.outcome import Result
from remat.schedules.schedule import Schedule, Step
from remat.schedules.simulate import simulate

_LOG = logging.getLogger("remat")
CLOSE_ENOUGH = 0.97  # a plan whose peak is at least this part of the limit is good enough
CHEAP = 0.005  # so is one of at most this overhead: each try costs seconds
_LOOSER = (1.02, 1.06)  # targets over a schedule's lowest peak: code may need less
_UNCERTAIN = 1.1  # factor on the peak of a schedule whose code could not be replayed


@dataclass(frozen=True)
class Candidate:
    """Two graphs, what their code allocates, and the schedule that they carry out."""

    pair: Pair
    replay: ReplayedMemory
    schedule: Schedule | None = None  # None as torch compiles it
    result: Result | None = None  # None then too, and where another rank has chosen
    schedule_peak_bytes: int = 0
    time_us: float = 0.0
    overhead: float = 0.0
    gap: float | None = 0.0  # None where nothing is proved

    @property
    def code_peak_bytes(self) -> int:
        return self.replay.peak_bytes

    @property
    def is_least(self) -> bool:
        """Whether it is the least schedule known, as none fits the target."""
        return self.result is not None and self.result.schedule is None


class PlanSearch:
    def __init__(self, step: FusedStep, options: CompileOptions) -> None:
        self.step, self.options = step, options
        self.tried: dict[tuple[Step, ...], Candidate] = {}
        self.stages = stopwatch_of_call(verbose=options.verbose)

    def stock(self) -> Candidate:
        """As torch compiles it; with everything kept, where torch's own cut is wrong."""
        pair = self.step.stock()
        if self.step.is_valid(pair):
            return Candidate(pair, self._replayed(pair, 0))
        kept = self.solved(UNBOUNDED_BYTES)
        assert kept is not None, "keeping everything always fits"
        return kept

    @property
    def may_take_stock(self) -> bool:
        """Torch's own cut knows nothing of what the user has pinned."""
        return not (self.options.keep or self.options.recompute)

    def within(self, limit_bytes: int, stock: Candidate) -> Candidate | None:
        fits = stock.code_peak_bytes <= limit_bytes and self.may_take_stock
        # torch's cut keeps masks as bool, slow to write on a CPU: a GPT-2 with dropout took 25.5 %
        # over eager, and 5.5 % by a plan that recomputes nothing and keeps bytes.
        if fits and not self.step.n_masks:
            return stock
        found = self._planned_within(limit_bytes)
        return stock if found is None and fits else found

    def _planned_within(self, limit_bytes: int) -> Candidate | None:
        best = fastest_within(
            limit_bytes,
            lambda target_bytes: self._near(target_bytes, limit_bytes),
            tries=self.options.replays,
            is_enough=lambda one: is_good_enough(one.overhead, one.code_peak_bytes, limit_bytes),
        )  # fmt: skip
        if best is not None:
            return best
        least = self.least()
        return least if least and least.code_peak_bytes <= limit_bytes else None

    def _near(self, target_bytes: int, limit_bytes: int) -> Candidate | None:
        # Where no schedule is found for a target, the least one may still have code that fits.
        found = self.solved(target_bytes) or self.solved(0)
        if found is None or not found.is_least or found.code_peak_bytes <= limit_bytes:
            return found
        # Code may write over a saved value where a schedule holds another: up to one is less.
        saved = (v.size_bytes for v in self.step.graph.values if v.kind == "activation")
        more = self.solved(limit_bytes + max(saved, default=0) // 2)
        return more if more and more.code_peak_bytes <= limit_bytes else found

    def least(self) -> Candidate | None:
        """The candidate of the lowest replayed peak, among those of the lowest schedules."""
        if (first := self.solved(0)) is None:
            return None
        for factor in _LOOSER:
            if len(self.tried) < self.options.replays:
                self.solved(int(factor * first.schedule_peak_bytes))
        return min(self.tried.values(), key=lambda c: (c.code_peak_bytes, c.time_us))

    def solved(self, target_bytes: int, graph: TrainingGraph | None = None) -> Candidate | None:
        """A schedule for a target, with its code; the least one known where none fits."""
        with self.stages.show(f"compiling: a schedule of {bytes_text(max(0, target_bytes))}"):
            return self._solved(target_bytes, graph or self.step.graph)

    def _solved(self, target_bytes: int, graph: TrainingGraph) -> Candidate | None:
        asked = self.options
        result = solvers.solve_within(
            graph, max(0, target_bytes), asked.solver, time_limit_s=asked.time_limit_s,
            keep=asked.keep, recompute=asked.recompute, gap=asked.gap,
        )  # fmt: skip
        schedule = result.schedule or result.least_schedule
        # Sizes are not in the hash, so `graph` with what is live beside it has the step's.
        if schedule is None or schedule.graph_hash != self.step.graph.hash:
            return None
        if schedule.steps not in self.tried:  # two targets often give one schedule
            self.tried[schedule.steps] = self._candidate(graph, schedule, result)
        found = self.tried[schedule.steps]
        _LOG.debug(
            "target %d: %s, %d in the graph, %d replayed, overhead %.4f",
            target_bytes, result.status, found.schedule_peak_bytes,
            found.code_peak_bytes, found.overhead,
        )  # fmt: skip
        return found

    def of(self, schedule: Schedule | None, gap: float | None) -> Candidate:
        if schedule is None:
            pair = self.step.stock()
            return Candidate(pair, self._replayed(pair, 0))
        schedule.check_made_for(self.step.graph)
        return dataclasses.replace(self._candidate(self.step.graph, schedule, None), gap=gap)

    def _candidate(
        self, graph: TrainingGraph, schedule: Schedule, result: Result | None
    ) -> Candidate:
        judged, pair = simulate(graph, schedule), self.step.emit(schedule)
        replay, gap = self._replayed(pair, judged.peak_bytes), result.gap if result else None
        facts = judged.peak_bytes, judged.time_us, judged.overhead, gap
        return Candidate(pair, replay, schedule, result, *facts)

    def _replayed(self, pair: Pair, schedule_peak_bytes: int) -> ReplayedMemory:
        try:
            return self.step.replay(pair)
        except ReplayError as error:
            if not schedule_peak_bytes:
                everything = solvers.solve_within(self.step.graph, UNBOUNDED_BYTES, "store_all")
                schedule_peak_bytes = everything.peak_bytes
            peak_bytes = int(_UNCERTAIN * schedule_peak_bytes)
            warnings.warn(
                f"leave room in the budget: {error}. Peaks of this compiled step are estimated "
                f"from its graph ({bytes_text(peak_bytes)} here), and can be a third too low",
                stacklevel=2,
            )
            return ReplayedMemory(peak_bytes, peak_bytes, peak_bytes)


def is_good_enough(overhead: float, peak_bytes: int, limit_bytes: int) -> bool:
    return overhead <= CHEAP or peak_bytes >= CLOSE_ENOUGH * limit_bytes


# Moves the solver's target until the code of a plan keeps to a limit. Code differs from its
# schedule by some per cent, either way: the target falls by an excess, and rises by what is left.

_NARROW = 1.01  # ratio of failing to fitting target: nothing is tried between
_STEP = 0.995  # how far below a target that did not fit the next one is, at least


_G = TypeVar("_G", bound="Candidate | PlanWithCode[Any]")
_P = TypeVar("_P")


@dataclass(frozen=True)
class PlanWithCode(Generic[_P]):
    """A plan of another kind, as `fastest_within` looks at it."""

    plan: _P
    schedule_peak_bytes: int
    code_peak_bytes: int
    time_us: float
    is_least: bool = False  # no schedule fits the target: this is the least one known


def fastest_within(
    limit_bytes: int, generated: Callable[[int], _G | None], *, tries: int,
    is_enough: Callable[[_G], bool],
) -> _G | None:  # fmt: skip
    """The fastest plan found whose code keeps to the limit, or None; each try costs seconds."""
    best: _G | None = None
    seen: list[_G] = []
    fitting, failing, target = 0, UNBOUNDED_BYTES, limit_bytes
    for _ in range(tries):
        if (found := generated(target)) is None:
            break
        if found.code_peak_bytes <= limit_bytes:
            if best is None or found.time_us < best.time_us:
                best = found
            fitting = max(fitting, target)
            if is_enough(found):
                break
        else:
            failing = min(failing, target)
        target = _next_target(found, limit_bytes, target, fitting, failing)
        # A lower target gives the least schedule again, so there is nothing more to find.
        is_bottom = found.is_least and any(found is one for one in seen)
        if failing <= _NARROW * fitting or is_bottom:
            break
        seen.append(found)
    return best


def _next_target(
    found: Candidate | PlanWithCode[Any], limit_bytes: int, target: int, fitting: int, failing: int
) -> int:
    """The target whose code would just meet the limit, between what fits and what does not."""
    room_bytes = limit_bytes - found.code_peak_bytes
    # The code's peak is taken to stay as far from the schedule's. With several calls what others
    # left moves too: no further than in proportion.
    ratio = limit_bytes / max(1, found.code_peak_bytes)
    if room_bytes >= 0:
        reached = max(found.schedule_peak_bytes, int(target / _NARROW))
        guess = min(reached + room_bytes, int(max(reached, target) * ratio))
    else:
        least = min(target, found.schedule_peak_bytes)
        guess = min(max(least + room_bytes, int(least * ratio)), int(_STEP * least))
    if fitting and failing < UNBOUNDED_BYTES and not fitting < guess < failing:
        return (fitting + failing) // 2  # the guess lies where the answer is known
    return guess


# What one rank has chosen for a graph, for the ranks that follow it.


class AgreedPlan(msgspec.Struct, frozen=True):
    """A schedule, or one for each subgraph; None is torch's own cut. A gap of None is unproved."""

    budget_bytes: int
    schedules: tuple[Schedule | None, ...]
    gaps: tuple[float | None, ...]

    @classmethod
    def of(cls, budget_bytes: int, found: Sequence[Candidate | None]) -> AgreedPlan:
        """None in `found` stands for a subgraph without gradients."""
        schedules = tuple(one.schedule if one else None for one in found)
        return cls(budget_bytes, schedules, tuple(one.gap if one else 0.0 for one in found))

    def of_subgraph(self, k: int) -> tuple[Schedule | None, float | None]:
        return self.schedules[k], self.gaps[k]


def plan_key(asked: CompileOptions, steps: Sequence[FusedStep | None]) -> str:
    # A rank with another shape, as of the last batch of an epoch, has a plan of its own.
    text = f"{asked} {[step and step.graph.hash for step in steps]}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def require_within(
    one: OnePlan, asked: CompileOptions, device: str, budget_bytes: int, peak_bytes: int,
    held_bytes: int,
) -> None:  # fmt: skip
    """Raise `BudgetError` for the plan of another rank that takes more than this rank may."""
    if asked.parsed.kind == "min":  # the least peak is no limit
        return
    if asked.parsed.kind == "auto":
        budget_bytes = auto_bytes(device) + held_bytes  # less may be free than where it was planned
    if peak_bytes <= budget_bytes:
        return
    raise BudgetError(
        "give all ranks the least budget of any, such as "
        f'options={{"budget": "{budget_bytes // 2**20}MiB"}}: the plan that rank {one.leader} made '
        f"for all takes {bytes_text(peak_bytes)} here, above the budget of "
        f"{bytes_text(budget_bytes)}"
    )
