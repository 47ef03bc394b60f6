"""The table: a model as it is, by what people do today, and by plans; and one too large as it is.

Gradients of each are compared with eager's, peaks, times and reserved bytes with predictions. A
step is timed in turn with the unmodified one, so that both have the same clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks.comparison import methods
from benchmarks.comparison.by_hand import host_copies
from benchmarks.comparison.methods import Variant
from benchmarks.comparison.models import Entry
from benchmarks.gpu.carried import effort_of, plan_for
from benchmarks.gpu.measuring import Bench, equal_to, settled
from benchmarks.gpu.models import DEMO, demo_entry, table_entry
from benchmarks.gpu.rows import Row
from benchmarks.gpu.scheduler import Desk, Measure, Unit
from remat.analysis.plan_figures import predict_reserved
from remat.budgets import unmodified_step
from remat.graph_capture.capture_api import add_costs, tiers_for
from remat.graph_capture.devices.cuda import clocks
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.tracing.trace import trace
from remat.ranks.same_order import agreed_rewrite
from remat.schedules.outcome import Result
from remat.schedules.simulate import simulate

UNMODIFIED, CHECKPOINTED = "unmodified", "every block checkpointed"
SELECTIVE, ON_CPU = "selective checkpointing", "save_on_cpu"
PLANS = {
    "plan 80%": ("80%", False), "plan 60%": ("60%", False), "plan 40% or min": ("40%", False),
    "plan 60% with host": ("60%", True),
}  # fmt: skip
"""Budget of each, and whether values may be copied to the host."""
VARIANTS = (UNMODIFIED, CHECKPOINTED, SELECTIVE, ON_CPU, *PLANS)
DEMO_PLAN, EXPANDABLE = "plan 75GiB", "plan 75GiB, expandable segments"
DEMO_BUDGET, REHEARSED_BUDGET = "75GiB", "80%"
DEMO_VARIANTS = (UNMODIFIED, CHECKPOINTED, DEMO_PLAN)
DEVICE_BYTES = 80 << 30
"""All that the demonstration may take: it is that of a card of 80 GiB."""
HOST, HOST_OF_CPU = "64GiB", "1GiB"
"""What a CPU calls its host is files, which need not have much room."""
LIMIT_S = 15.0
ROUNDS, REHEARSED_ROUNDS = 8, 2


def plan_name(model: str, variant: str) -> str:
    """Of its carried file."""
    return f"{model} {variant}".replace("%", "").replace(" ", "-")


class Steps:
    """A model on the device, priced, and the rows of its variants."""

    def __init__(self, desk: Desk, name: str, entry: Entry) -> None:
        self.desk, self.name, self.rehearse = desk, name, desk.settings.rehearse
        rounds = REHEARSED_ROUNDS if self.rehearse else ROUNDS
        self.bench = Bench(entry, desk.settings.device, rounds=rounds)
        self.eager = methods.eager(self.bench.trainee)
        self.budgets = dict(PLANS)
        self._expected: list[Tensor] = []
        self._of = ""
        self.traced = self._autocast(self._trace)
        with desk.gpu():
            self.graph = self._autocast(lambda: add_costs(self.traced))

    def _autocast(self, call: Callable[[], Any]) -> Any:
        with self.bench.autocast():
            return call()

    def _trace(self) -> Any:
        one = self.bench.trainee
        return trace(one.model, one.args, device=self.bench.device, split=None)

    def _with_host(self) -> TrainingGraph:
        """The step, with the links to the host, which are measured once on a machine."""
        host = HOST if self.bench.is_cuda else HOST_OF_CPU
        with self.desk.gpu(), self.bench.autocast():
            tiers = tiers_for(self.bench.trainee.model, self.bench.device, host, None)
            links = add_costs(self.traced, tiers=tiers).links
        return msgspec.structs.replace(self.graph, links=links)

    def __call__(self, unit: Unit) -> Row:
        """The row of a variant, which is the last part of the unit's key."""
        name = unit.key.rpartition("/")[2]
        variant, row = self._variant(name)
        if variant is None:
            return row
        with self.desk.gpu():
            try:
                row |= self._measured(name, variant)
            except torch.OutOfMemoryError as error:
                row |= {"out_of_memory": f"{error}"[:500]}
            settled()
            return row | {"clocks": clocks(self.bench.device)}

    def _variant(self, name: str) -> tuple[Variant | None, Row]:
        trainee = self.bench.trainee
        if name == UNMODIFIED:
            eager = unmodified_step(self.graph)
            return self.eager, _predicted(eager.graph, eager.result)
        if name in self.budgets:
            return self._planned(name)
        makers: dict[str, Callable[[], Variant]] = {
            CHECKPOINTED: lambda: methods.checkpointed(trainee, 1),
            SELECTIVE: lambda: methods.selective(trainee),
            ON_CPU: lambda: host_copies.save_all(trainee, self.bench.device),
        }
        return makers[name](), {}

    def _planned(self, name: str) -> tuple[Variant | None, Row]:
        budget, has_host = self.budgets[name]
        graph = self._with_host() if has_host else self.graph
        effort = effort_of(LIMIT_S, rehearse=self.rehearse)
        carried, key = self.desk.settings.carried, plan_name(self.name, name)
        plan, said = plan_for(graph, budget, key, carried, effort)
        if plan.schedule is None and name.endswith("min"):
            budget = "min"
            plan, said = plan_for(graph, budget, f"{key}-min", carried, effort)
        row = said | {"budget": budget, "status": plan.status, "gap": plan.gap}
        if plan.schedule is None:
            return None, row | {"message": plan.message}
        with self.bench.autocast():
            # An audit runs the model's own forward beside some steps.
            model = self.bench.trainee.model
            made = agreed_rewrite(model, plan.schedule, costed=graph, audit=False)
        return Variant(made), row | _predicted(graph, plan)

    def _measured(self, name: str, variant: Variant) -> Row:
        bench = self.bench
        row = bench.memory(variant) | self._compared(name, variant)
        fits = name != UNMODIFIED and self._of == UNMODIFIED
        in_turn = {"eager": self.eager} if fits else {}
        return row | bench.times_us({**in_turn, "step": variant})

    def _compared(self, name: str, variant: Variant) -> Row:
        """Gradients beside those of eager; if eager had no room, of the first that had."""
        if not self._expected:
            self._expected = self._first(name, variant)
        found = self.bench.gradients(variant)
        return equal_to(self._expected, found) | {"gradients_of": self._of}

    def _first(self, name: str, variant: Variant) -> list[Tensor]:
        """Eager's, also where its row is of an earlier visit."""
        self._of = UNMODIFIED
        try:
            return self.bench.gradients(self.eager)
        except torch.OutOfMemoryError:
            settled()
            self._of = name
        return self.bench.gradients(variant)


def _predicted(graph: TrainingGraph, result: Result) -> Row:
    assert result.schedule is not None
    found: Row = {"predicted_peak_bytes": result.peak_bytes, "predicted_step_us": result.time_us}
    moved = simulate(graph, result.schedule).moved_bytes
    if graph.links is not None:
        found["copied_bytes"] = moved.get("d2h", 0)
    if graph.device.startswith("cuda"):
        reserved = predict_reserved(graph, result)
        found["predicted_reserved_bytes"] = reserved.default.reserved_bytes
    return found


def begin_table(name: str, desk: Desk) -> Measure:
    """A model of the table."""
    return Steps(desk, name, table_entry(name, rehearse=desk.settings.rehearse))


def begin_demo(desk: Desk) -> Measure:
    """The model that is too large; nothing may take more than a card of 80 GiB has."""
    rehearse, device = desk.settings.rehearse, desk.settings.device
    if device.startswith("cuda"):
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, DEVICE_BYTES / total_bytes), device)
    steps = Steps(desk, f"{DEMO}-demo", demo_entry(rehearse=rehearse))
    budget = REHEARSED_BUDGET if rehearse else DEMO_BUDGET
    steps.budgets = dict.fromkeys((DEMO_PLAN, EXPANDABLE), (budget, False))
    return steps
