"""The schedule: an ordered list of four kinds of step over op and value names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

import msgspec

from remat.formats import bytes_text, figures_html
from remat.graph_capture.errors import RematError, ScheduleError
from remat.graph_capture.files import Record
from remat.graph_capture.graph import ACCUMULATE, TIERS, UPDATE, Tier, TrainingGraph, are_figures
from remat.schedules.levers import AppliedLever


class Compute(msgspec.Struct, frozen=True, array_like=True, tag="compute"):
    """Run an op on the device or on the host; all its outputs are there afterwards."""

    op: str
    at: Tier = "device"


class Free(msgspec.Struct, frozen=True, array_like=True, tag="free"):
    """Drop the copy of a value in one tier.

    The device first waits for copies out of it.
    """

    value: str
    at: Tier = "device"


class Offload(msgspec.Struct, frozen=True, array_like=True, tag="offload"):
    """Begin to copy a value one tier down. The copy above stays until it is freed."""

    value: str
    to: Tier = "host"

    @property
    def source(self) -> Tier:
        return TIERS[TIERS.index(self.to) - 1]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Begin to copy a value one tier up. The copy below stays until it is freed."""

    value: str
    to: Tier = "device"

    @property
    def source(self) -> Tier:
        # `nvme` wraps around to the device: no link joins the two, so the simulator refuses it.
        return TIERS[(TIERS.index(self.to) + 1) % len(TIERS)]


Step = Compute | Free | Offload | Fetch
Option = str | int | float | bool | None


class ChunkedRegion(msgspec.Struct, frozen=True):
    """A region that a schedule runs in chunks, as a `Choice` of the graph says."""

    region: str
    chunks: int = msgspec.field(name="pieces")
    exact: bool = True


class Schedule(Record, frozen=True):
    """A training step, op by op, and what it was made for.

    Forward ends right after the first run of the forward op that first runs last. What is live
    there, and read later, is what the rewritten forward saves for backward.

    Attributes
    ----------
    steps : what to do, in order. The same op may be computed any number of times.
    graph_hash, inputs, signatures : of the graph it was made for.
    budget_bytes : the budget it was solved for, 0 without one.
    solver, options : what made it, and with which options.
    chunks : regions that run in chunks; ``pieces`` in a file. `graph_hash` is that of the graph
        with these, and `captured_hash` of the one that was captured; empty where nothing runs in
        chunks and no lever is named.
    levers : those that changed which ops run, in the order in which they did; also part of
        `graph_hash` alone.
    """

    noun: ClassVar[str] = "plan"
    again: ClassVar[str] = "make it again with remat run MODEL --budget BUDGET -o FILE"
    error: ClassVar[type[RematError]] = ScheduleError
    reads: ClassVar[tuple[int, ...]] = (1, 2)  # of 1, what went to the tier below left at once
    steps: tuple[Step, ...]
    graph_hash: str
    inputs: tuple[str, ...] = ()
    signatures: tuple[str, ...] = ()
    budget_bytes: int = 0
    solver: str = ""
    options: dict[str, Option] = {}  # noqa: RUF012 msgspec copies it
    chunks: tuple[ChunkedRegion, ...] = msgspec.field(default=(), name="pieces")
    captured_hash: str = ""
    levers: tuple[AppliedLever, ...] = ()

    def __post_init__(self) -> None:
        if self.schema_version == 1:
            # The struct is frozen; older plans are upgraded as read.
            msgspec.structs.force_setattr(self, "steps", tuple(_upgraded(self.steps)))
        super().__post_init__()
        if not are_figures(self.budget_bytes):
            raise ScheduleError("the budget of a schedule is negative, or too large to show")
        self._check_changes()

    def _check_changes(self) -> None:
        # Files are edited: no solver writes what is refused here.
        if len({one.region for one in self.chunks}) < len(self.chunks):
            raise ScheduleError("a schedule names the same region in chunks twice")
        if any(one.chunks < 2 for one in self.chunks):
            raise ScheduleError("a schedule runs a region in fewer than 2 chunks")
        if self.chunks and self.levers:
            raise ScheduleError(
                f"a schedule has either regions in chunks or {self.levers[0].lever}, not both"
            )
        named = bool(self.captured_hash)
        is_changed = bool(self.chunks or self.levers)
        if is_changed != named or (named and self.captured_hash == self.graph_hash):
            raise ScheduleError(
                "a schedule with regions in chunks or levers names two graphs, with and without "
                "them; any other names one"
            )

    @classmethod
    def for_graph(
        cls, graph: TrainingGraph, steps: Iterable[Step], *, budget_bytes: int = 0,
        solver: str = "", options: dict[str, Option] | None = None,
    ) -> Schedule:  # fmt: skip
        identity = graph.hash, graph.inputs, graph.signatures
        return cls(tuple(steps), *identity, budget_bytes, solver, options or {})

    def with_steps(self, graph: TrainingGraph, steps: Iterable[Step]) -> Schedule:
        return Schedule.for_graph(
            graph, steps, budget_bytes=self.budget_bytes, solver=self.solver, options=self.options
        )

    @property
    def releases_gradients(self) -> bool:
        return any(f" = {ACCUMULATE}(" in line for line in self.signatures)

    @property
    def updates(self) -> bool:
        """Whether it was made for a graph that updates parameters during backward."""
        return any(f" = {UPDATE}(" in line for line in self.signatures)

    @property
    def is_exact(self) -> bool:
        """Whether what it runs gives eager's bits."""
        is_exact = all(one.exact for one in self.chunks)
        return is_exact and not any(one.tolerance for one in self.levers)

    @property
    def moves(self) -> bool:
        """Whether it copies anything between tiers."""
        return any(isinstance(step, Offload | Fetch) for step in self.steps)

    def computations(self) -> Counter[str]:
        return Counter(step.op for step in self.steps if isinstance(step, Compute))

    def check_made_for(self, graph: TrainingGraph) -> None:
        """Raise `ScheduleError`, naming the first difference, unless made for `graph`."""
        if self.graph_hash == graph.hash:
            return
        raise ScheduleError(
            "capture and solve again for this model, batch and device: this plan was made for "
            f"another graph, {self._first_difference(graph)}"
        )

    def check_captured_as(self, graph: TrainingGraph) -> None:
        """As `check_made_for`, of the graph that was captured before regions ran in chunks."""
        if not self.captured_hash:
            self.check_made_for(graph)
        elif self.captured_hash != graph.hash:
            what = "a region in chunks" if self.chunks else self.levers[0].lever
            raise ScheduleError(
                "capture and solve again for this model, batch and device: this plan, with "
                f"{what}, is for another graph"
            )

    def _first_difference(self, graph: TrainingGraph) -> str:
        # Before lengths: the first difference says more.
        for i, (mine, theirs) in enumerate(zip(self.inputs, graph.inputs, strict=False)):
            if mine != theirs:
                return f"input {i} was {mine} and is {theirs}"
        if len(self.inputs) != len(graph.inputs):
            return f"it took {len(self.inputs)} inputs, the model takes {len(graph.inputs)}"
        for i, (mine, theirs) in enumerate(zip(self.signatures, graph.signatures, strict=False)):
            if mine != theirs:
                op = graph.ops[i]
                place = ", ".join(part for part in (op.module, op.source) if part)
                return f"op {i} was '{mine}' and is '{theirs}'" + (f" ({place})" if place else "")
        if len(self.signatures) != len(graph.signatures):
            return f"it had {len(self.signatures)} ops, the model has {len(graph.signatures)}"
        return "the outputs of the step differ"  # of what the hash covers only the outputs are left

    def _repr_html_(self) -> str:
        counts = self.computations()
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        figures = [
            ("made by", self.solver or "hand"),
            ("options", options),
            ("computations", str(sum(counts.values()))),
            ("of them again", str(sum(counts.values()) - len(counts))),
            ("budget", bytes_text(self.budget_bytes) if self.budget_bytes else "none"),
            ("graph", self.graph_hash[:12]),
        ]
        return figures_html("Schedule", figures)

    def __repr__(self) -> str:
        counts = self.computations()
        again = sum(counts.values()) - len(counts)
        return (
            f"Schedule({self.solver or 'by hand'}: {sum(counts.values())} computations, "
            f"{again} of them again, budget {self.budget_bytes} bytes, "
            f"graph {self.graph_hash[:12]})"
        )


def fetched_value(step: Step) -> str:
    """The value that a step other than `Compute` brings to the device; empty for none."""
    return step.value if isinstance(step, Fetch) and step.to == "device" else ""


def arriving_values(graph: TrainingGraph, step: Step) -> tuple[str, ...]:
    if isinstance(step, Compute):
        return graph.ops[graph.op_index[step.op]].outputs
    return (step.value,) if fetched_value(step) else ()


def freed_value(step: Step) -> str:
    """The value that a step drops from the device; empty for none."""
    return step.value if isinstance(step, Free) and step.at == "device" else ""


def _upgraded(steps: Iterable[Step]) -> Iterable[Step]:
    for step in steps:
        yield step
        if isinstance(step, Offload):  # in version 1 a copy moved the value: it left its source
            yield Free(step.value)
        elif isinstance(step, Fetch):
            yield Free(step.value, "host")


def workspaces_of_updates(graph: TrainingGraph, schedule: Schedule) -> dict[str, int]:
    """As `update_workspaces`, in the order of `schedule`."""
    runs = (step.op for step in schedule.steps if isinstance(step, Compute))
    return update_workspaces(graph, runs)


def update_workspaces(graph: TrainingGraph, sequence: Iterable[str]) -> dict[str, int]:
    """Workspace in bytes of each update that is not its op's own; `sequence` of ops as they run."""
    if not graph.resident.gradients_bytes:
        return {}  # without accumulation each op has its own
    found: dict[str, int] = {}
    given_back_bytes = 0
    for name in sequence:
        # The simulator refuses unknown ops.
        op = graph.ops[graph.op_index[name]] if name in graph.op_index else None
        if op is None or op.target != UPDATE:
            continue
        # A plan that accumulates counts all of ``.grad`` during the step, as in every batch but the
        # last. There an update frees its ``.grad``, which pays for workspaces of later updates.
        found[name] = max(0, op.workspace_bytes - given_back_bytes)
        values = (graph.value_by_name[read] for read in op.inputs)
        given_back_bytes += sum(v.size_bytes for v in values if v.kind == "parameter")
    return found
