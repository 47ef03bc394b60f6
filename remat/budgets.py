"""Budgets: how they are written, how many bytes they mean for a step, and solving for one."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass, replace
from typing import Any, Literal, SupportsIndex

import msgspec

import remat.solver as solvers
from remat.graph_capture.devices.known_devices import (
    CPU,
    NUMBER,
    checked_bytes,
    has_cuda_allocator,
    is_in_table,
    modelled_device,
    parse_bytes,
)
from remat.graph_capture.devices.memory import free_bytes
from remat.graph_capture.distributed.sharding import communicates
from remat.graph_capture.eager_step import (
    baseline_graph,
    with_eager_sizes,
    with_eager_writes,
    with_saved_elsewhere,
)
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph, cached_on
from remat.schedules.caching_allocator import AllocatorSettings
from remat.schedules.derived import graph_of_schedule, unchunked
from remat.schedules.kept_in_forward import as_eager_frees, ops_as_eager_runs
from remat.schedules.layout import buffers_of
from remat.schedules.outcome import Result
from remat.schedules.reserved import (
    EXPANDABLE,
    EXPANDABLE_CONF,
    allocator_peak,
    settings_of_conf,
)
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import gap_of, simulate
from remat.solved import Solved
from remat.solver.budgets.sweep import least_peak
from remat.solver.problem import Problem
from remat.solver.reductions.updates import late_sequence
from remat.solver.result import (
    at_least_budget,
    below_update,
    evaluate_schedule,
    update_peak_bytes,
    with_time_limit_message,
    without_fit,
)
from remat.solver.search import Clock, is_interrupted, one_job
from remat.solver.state import schedule_of
from remat.solver.stopping import DEFAULT_GAP, LOWERED_SOLVE, UNLOWERED_SOLVE, Seconds

# For the CUDA context, libraries and, where only allocated bytes are bounded, fragmentation.
RESERVE = 0.10  # share of the free memory that ``auto`` leaves to others

_FORMS = "8GiB, 512MiB, 1.5GB, 60%, auto or min"
_ALLOCATED = "allocated"
_CONFS = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"

UNBOUNDED_BYTES = 2**62  # everything fits: for schedules to compare with


@dataclass(frozen=True)
class Budget:
    """A budget as it was asked for; a `share` is a fraction of the unmodified peak.

    On a CUDA device, bytes and ``auto`` bound what the allocator reserves, where that is predicted
    and `is_allocated` does not ask otherwise. Shares and ``min`` are of allocated bytes.
    """

    kind: Literal["bytes", "share", "auto", "min"]
    size_bytes: int = 0
    share: float = 0.0
    is_allocated: bool = False

    @property
    def is_of_the_step(self) -> bool:
        """Whether it is another number of bytes for another step on the same device."""
        return self.kind in ("share", "min")

    def bytes_for(
        self, graph: TrainingGraph, *, solver: str = "auto", time_limit_s: float = 60.0,
        **options: Any,
    ) -> int:  # fmt: skip
        """What it means for `graph`.

        Per cents are of the unmodified peak. ``auto`` is what the model and batch take plus nine
        tenths of the memory free on their device, or of a modelled device's memory. ``min`` is the
        least peak that `solver` knows with these pins and options.
        """
        if self.kind == "share":
            return int(self.share * unmodified(graph).peak_bytes)
        if self.kind == "auto":
            return _auto_bytes_for(graph)
        if self.kind == "min":
            # From the graph alone: another process that asks for these bytes finds that they fit.
            lost = solvers.solve_within(graph, 0, solver, time_limit_s=time_limit_s, **options)
            return lost.least_feasible_bytes
        return self.size_bytes

    def most_bytes(self, graph: TrainingGraph) -> int:
        """What may be taken to time the ops of `graph`, where what it means is not yet known.

        Per cents then are of the peak without workspaces. ``min`` leaves no room for a whole step.
        """
        return 0 if self.kind == "min" else self.bytes_for(graph)

    def solve(
        self, graph: TrainingGraph, solver: str = "auto", *, time_limit_s: float = 60.0,
        **options: Any,
    ) -> Result:  # fmt: skip
        if self.kind == "min":
            # The solve that names the least peak has its schedule at hand; `least_peak` keeps it.
            return least_peak(graph, time_limit_s, solver=solver, **options)
        most_bytes, settings = self.bytes_for(graph), self.settings(graph)
        if settings is not None:
            search = _ReservedSearch(graph, most_bytes, settings, solver, options)
            return search.run(Clock(time_limit_s))
        options["time_limit_s"] = time_limit_s
        return solvers.solve_within(graph, most_bytes, solver, **options)

    def settings(self, graph: TrainingGraph) -> AllocatorSettings | None:
        """Of the allocator whose reserved bytes it bounds; None where it bounds allocated ones."""
        if self.is_allocated or self.is_of_the_step or not has_cuda_allocator(graph.device):
            return None
        # Communication has streams of its own, for which the allocator keeps other segments.
        if communicates(graph):
            return None
        return settings_of_conf(next(filter(None, map(os.environ.get, _CONFS)), ""))

    def reserved_bytes(self, graph: TrainingGraph, schedule: Schedule) -> int:
        """Predicted for `schedule`; 0 where the budget bounds allocated bytes."""
        settings = self.settings(graph)
        return 0 if settings is None else _reserved_bytes(graph, schedule, settings)


def parse_budget(budget: str | SupportsIndex) -> Budget:
    """An int is bytes, a text needs a unit, ``%``, ``auto`` or ``min``; else a `BudgetError`."""
    parsed = _parse_text(budget.strip()) if isinstance(budget, str) else _parse_int(budget)
    if parsed.kind == "bytes" and parsed.size_bytes <= 0:
        raise BudgetError(f"give a positive size: budget {budget!r} leaves nothing to spend")
    if parsed.kind == "share" and parsed.share <= 0:
        raise BudgetError(f"give a share above 0%: budget {budget!r} leaves nothing to spend")
    return parsed


def budget_again(found: Result) -> str:
    """The budget of `found` in bytes, of what it bounded there."""
    return f"{found.budget_bytes}B" + ("" if found.reserved_bytes else f" {_ALLOCATED}")


def _parse_int(budget: SupportsIndex) -> Budget:
    return Budget("bytes", size_bytes=checked_bytes(budget, "budget", _FORMS))


def _parse_text(text: str) -> Budget:
    bare = text[: -len(_ALLOCATED)].rstrip() if text.lower().endswith(_ALLOCATED) else text
    if bare and bare != text:
        return replace(_parse_amount(bare), is_allocated=True)
    return _parse_amount(text)


def _parse_amount(text: str) -> Budget:
    if (word := text.lower()) == "auto" or word == "min":
        return Budget(word)
    share = re.fullmatch(rf"{NUMBER}\s*%", word)
    if share is not None:
        return Budget("share", share=float(share[1]) / 100)
    return Budget("bytes", size_bytes=parse_bytes(text, "budget", _FORMS, unless="%"))


def _auto_bytes_for(graph: TrainingGraph) -> int:
    if is_in_table(graph.device):
        return int(modelled_device(graph.device).memory_bytes * (1 - RESERVE))
    resident = graph.resident  # what stays resident is allocated already, not free
    allocated_bytes = resident.parameters_bytes + resident.buffers_bytes + resident.batch_bytes
    return auto_bytes(graph.device) + allocated_bytes


def auto_bytes(device: str = CPU) -> int:
    return int(free_bytes(device) * (1 - RESERVE))


# A budget on reserved bytes: budgets of tensors are lowered until a plan reserves no more.

_MOST_SOLVES = 6
_NEAR = 0.98  # a budget of tensors so near to one that is too large is the largest


def _reserved_bytes(graph: TrainingGraph, schedule: Schedule, settings: AllocatorSettings) -> int:
    taken = allocator_peak(buffers_of(graph, schedule), settings)
    return max(taken.reserved_bytes, update_peak_bytes(graph))


@dataclass
class _ReservedSearch:
    graph: TrainingGraph
    most_bytes: int
    settings: AllocatorSettings
    solver: str
    options: dict[str, Any]
    best: Result | None = None  # the fastest of those that reserve no more

    def run(self, clock: Clock) -> Result:
        if self.most_bytes < (least_bytes := update_peak_bytes(self.graph)):
            found = replace(self, most_bytes=least_bytes).run(clock)
            lost = below_update(self.graph, found, self.most_bytes)
            return msgspec.structs.replace(lost, reserved_bytes=lost.least_feasible_bytes)
        with one_job():
            first = self._lowered(clock)
            if self.best is None or self.best.status == "time limit":
                # What a search near the least peak ends with may be slower than the least itself.
                lost = first if first.schedule is None else self._solved(0, clock)
                if (least := at_least_budget(self.graph, lost)) is not None:
                    self._take(least)
                if self.best is None:
                    lost = with_time_limit_message(lost, clock.time_limit_s)
                    return self._needing(lost, least)
        assert self.best.schedule is not None
        reserved_bytes = self._reserved(self.best.schedule)
        if self.best is first:
            return msgspec.structs.replace(first, reserved_bytes=reserved_bytes)
        found = evaluate_schedule(  # the schedule keeps the budget of tensors that it was made for
            self.graph, self.best.schedule, budget_bytes=self.most_bytes,
            # The first solve alone allowed every plan that reserves so little.
            lower_bound_us=min(first.lower_bound_us, self.best.time_us),
            wall_s=clock.elapsed_s, cut_short=self.best.status == "time limit",
            message=self.best.message,
        )  # fmt: skip
        return msgspec.structs.replace(found, reserved_bytes=reserved_bytes)

    def _lowered(self, clock: Clock) -> Result:
        """The outcome where tensors may take all; `best` is found below it."""
        low_bytes, asked_bytes, high_bytes = 0, self.most_bytes, self.most_bytes
        first = found = self._solved(asked_bytes, clock, UNLOWERED_SOLVE)
        for n_solves in range(1, _MOST_SOLVES + 1):
            over_bytes = self._take(found)
            if found.schedule is None and self.best is None:
                break
            if over_bytes > 0:
                high_bytes = min(asked_bytes, found.peak_bytes)
            else:
                low_bytes = asked_bytes
            is_near = low_bytes >= _NEAR * high_bytes
            if is_near or self._is_near_best(first) or is_interrupted() or n_solves == _MOST_SOLVES:
                break
            middle_bytes = (low_bytes + high_bytes) // 2
            asked_bytes = middle_bytes if low_bytes else high_bytes - over_bytes
            found = self._solved(asked_bytes, clock)
        return first

    def _solved(self, asked_bytes: int, clock: Clock, limit: Seconds = LOWERED_SOLVE) -> Result:
        options = dict(self.options)
        at_hand = options.get("at_hand")
        if at_hand is not None and at_hand.peak_bytes > asked_bytes:
            del options["at_hand"]  # it is of a larger budget
        if self.best is not None:
            options["known_us"] = self.best.time_us
        limit_s = limit.of(max(clock.left_s, 0.0))
        return solvers.solve_within(
            self._before_update, max(asked_bytes, 0), self.solver, time_limit_s=limit_s, **options
        )

    @functools.cached_property
    def _before_update(self) -> TrainingGraph:
        # The update fits, or `run` had ended; a solver would give all that comes before that room.
        if not self.graph.resident.update_bytes:
            return self.graph
        alone = msgspec.structs.replace(self.graph.resident, update_bytes=0)
        return msgspec.structs.replace(self.graph, resident=alone)

    def _take(self, found: Result) -> int:
        """Keep it if it is the best; how much more it reserves than it may."""
        if found.schedule is None:
            return 0
        over_bytes = self._reserved(found.schedule) - self.most_bytes
        if over_bytes <= 0 and (self.best is None or found.time_us < self.best.time_us):
            self.best = found
        return over_bytes

    def _reserved(self, schedule: Schedule) -> int:
        return _reserved_bytes(self.graph, schedule, self.settings)

    def _is_near_best(self, first: Result) -> bool:
        gap = self.best and gap_of(self.best.time_us, first.lower_bound_us)
        return gap is not None and gap <= DEFAULT_GAP

    def _needing(self, lost: Result, least: Result | None) -> Result:
        """That nothing fits, and what the plan of least peak reserves."""
        if least is None or (schedule := least.schedule) is None:
            return msgspec.structs.replace(lost, budget_bytes=self.most_bytes)
        needed_bytes, graph = self._reserved(schedule), graph_of_schedule(self.graph, schedule)
        figures = self.most_bytes, lost.wall_s, lost.message
        known = without_fit(graph, schedule, simulate(graph, schedule), *figures)
        helps = _reserved_bytes(self.graph, schedule, EXPANDABLE) <= self.most_bytes
        return msgspec.structs.replace(
            known, status=lost.status, floor=lost.floor, least_bound_bytes=lost.least_bound_bytes,
            least_feasible_bytes=needed_bytes, reserved_bytes=needed_bytes,
            otherwise=EXPANDABLE_CONF if helps else lost.otherwise,
        )  # fmt: skip


def unmodified(graph: TrainingGraph) -> Result:
    """The step as eager runs it: nothing is dropped before eager drops it.

    Every op runs once, but for checkpoints of the user's own. Sizes are eager's, which keeps larger
    dropout masks than a trace and writes in place.
    """
    return cached_on(graph, "unmodified", lambda: _as_eager_runs(baseline_graph(unchunked(graph))))


def unmodified_step(graph: TrainingGraph) -> Solved:
    """`unmodified` with its own graph; on `graph`, what eager writes in place would get room."""
    return Solved(baseline_graph(unchunked(graph)), unmodified(graph))


def saved_elsewhere(graph: TrainingGraph) -> tuple[int, int]:
    """The peak of the unmodified step while what it saves is kept off the device; bytes of that."""

    def found() -> tuple[int, int]:
        moved, moved_bytes = with_saved_elsewhere(with_eager_sizes(unchunked(graph)))
        return _as_eager_runs(with_eager_writes(moved)).peak_bytes, moved_bytes

    return cached_on(graph, "saved elsewhere", found)


def _as_eager_runs(eager: TrainingGraph) -> Result:
    unbounded: Any = {"budget_bytes": UNBOUNDED_BYTES}
    problem = Problem.of(eager)
    # A checkpoint may read, when it runs again, what is trained outside of it.
    runs = late_sequence(problem, ops_as_eager_runs(eager))
    schedule = schedule_of(problem, runs, solver="store_all", **unbounded)
    freed = as_eager_frees(eager, schedule)
    return evaluate_schedule(eager, freed, lower_bound_us=eager.time_us, **unbounded)
