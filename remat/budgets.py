"""Budgets: how they are written, how many bytes they mean for a step, and solving for one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex

import remat.solver as solvers
from remat.graph_capture.devices.known_devices import (
    CPU,
    NUMBER,
    checked_bytes,
    is_in_table,
    modelled_device,
    parse_bytes,
)
from remat.graph_capture.devices.memory import free_bytes
from remat.graph_capture.eager_step import (
    baseline_graph,
    with_eager_sizes,
    with_eager_writes,
    with_saved_elsewhere,
)
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph, cached_on
from remat.schedules.derived import unchunked
from remat.schedules.kept_in_forward import as_eager_frees, ops_as_eager_runs
from remat.schedules.outcome import Result
from remat.solved import Solved
from remat.solver.budgets.sweep import least_peak
from remat.solver.problem import Problem
from remat.solver.result import evaluate_schedule
from remat.solver.state import schedule_of

# It counts what the step allocates: workspaces, the context and fragmentation come on top.
RESERVE = 0.10  # share of the free memory that ``auto`` leaves to others

_FORMS = "8GiB, 512MiB, 1.5GB, 60%, auto or min"

UNBOUNDED_BYTES = 2**62  # everything fits: for schedules to compare with


@dataclass(frozen=True)
class Budget:
    """A budget as it was asked for; a `share` is a fraction of the unmodified peak."""

    kind: Literal["bytes", "share", "auto", "min"]
    size_bytes: int = 0
    share: float = 0.0

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
        options["time_limit_s"] = time_limit_s
        return solvers.solve_within(graph, self.bytes_for(graph), solver, **options)


def parse_budget(budget: str | SupportsIndex) -> Budget:
    """An int is bytes, a text needs a unit, ``%``, ``auto`` or ``min``; else a `BudgetError`."""
    parsed = _parse_text(budget.strip()) if isinstance(budget, str) else _parse_int(budget)
    if parsed.kind == "bytes" and parsed.size_bytes <= 0:
        raise BudgetError(f"give a positive size: budget {budget!r} leaves nothing to spend")
    if parsed.kind == "share" and parsed.share <= 0:
        raise BudgetError(f"give a share above 0%: budget {budget!r} leaves nothing to spend")
    return parsed


def _parse_int(budget: SupportsIndex) -> Budget:
    return Budget("bytes", size_bytes=checked_bytes(budget, "budget", _FORMS))


def _parse_text(text: str) -> Budget:
    word = text.lower()
    if word == "auto" or word == "min":
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
    runs = ops_as_eager_runs(eager)
    schedule = schedule_of(Problem.of(eager), runs, solver="store_all", **unbounded)
    freed = as_eager_frees(eager, schedule)
    return evaluate_schedule(eager, freed, lower_bound_us=eager.time_us, **unbounded)
