"""Plans: a schedule with all that another process needs to rewrite the model to it, as JSON.

No tensor, no weight and no code: reading one runs no code of others. `docs/files.md` states the
format; `tests/rewriter/plans/test_plans.py` writes `docs/plan.schema.json`, docstrings included.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import msgspec
from msgspec.structs import astuple

from remat.graph_capture.errors import (
    GraphError,
    PlanError,
    RematError,
    ScheduleError,
    ShapeError,
    SignatureError,
    TextError,
)
from remat.graph_capture.files import Record, decode_json
from remat.graph_capture.graph import Resident, TrainingGraph, are_figures
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.sizes.symbols import Place, Symbol, corner
from remat.schedules.family import Family, resized_schedule
from remat.schedules.outcome import Check, Status
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import Simulation, gap_of, simulate

KIND = "remat plan"
RunOrder = Literal["fixed", "free"]  # of first computations: as captured, or any

MAKE_PLAN_AGAIN = Schedule.again


class TensorLeaf(msgspec.Struct, frozen=True, tag="tensor"):
    """A tensor of the batch: all that a plan relies on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool


class PythonLeaf(msgspec.Struct, frozen=True, tag="python"):
    """An argument that is no tensor, such as a scale: the name of its type, and its ``repr``."""

    kind: str
    text: str


class BatchSignature(msgspec.Struct, frozen=True):
    """The batch: arguments, keyword arguments and target, as one tree of leaves.

    Attributes
    ----------
    tree : as `torch.utils._pytree.treespec_dumps` writes it. leaves : in the tree's order.
    numbers : of leaves at whose values code looks, by place, what all elements are; None for leaves
        whose elements differ.
    """

    tree: str
    leaves: tuple[TensorLeaf | PythonLeaf, ...]
    numbers: tuple[tuple[int, bool | int | None], ...] = ()


class StateFact(msgspec.Struct, frozen=True):
    """A parameter or buffer; `tied_to` names the parameter that it is another name of."""

    name: str
    kind: Literal["parameter", "buffer"]
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    trained: bool
    tied_to: str = ""


class Autocast(msgspec.Struct, frozen=True):
    """Autocast of one type of device."""

    device: str
    enabled: bool
    dtype: str


class Prediction(msgspec.Struct, frozen=True):
    """What `simulate` said of the schedule, and what was proved.

    Attributes
    ----------
    peak_bytes, time_us, overhead : of the schedule. lower_bound_us, gap, status : as in a
        `Result`; no status in older files.
    cost_origin : ``measured``, ``modelled`` or ``mixed``, as of the graph; ``prices`` in a file.
    order : in which the bound holds, for any number of recomputations: ``fixed`` if first
        computations are in captured order, ``free`` for any. None where that is not known.
    """

    peak_bytes: int
    time_us: float
    overhead: float
    lower_bound_us: float
    gap: float | None
    cost_origin: str = msgspec.field(name="prices")
    status: Status | None = None
    order: RunOrder | None = None

    def __post_init__(self) -> None:
        if not are_figures(self.peak_bytes, self.time_us, self.lower_bound_us):
            raise PlanError("its prediction has an impossible figure")


class Versions(msgspec.Struct, frozen=True):
    """Versions of torch and remat that made the plan."""

    torch: str
    remat: str


class RangeFacts(msgspec.Struct, frozen=True):
    """What makes a plan one for a range of sizes.

    Attributes
    ----------
    places : dimensions of the batch that vary, by leaf. family : the schedules.
    graph : over the range, with the costs that they were solved by.
    """

    places: tuple[Place, ...]
    family: Family
    graph: RangedGraph


class PlanFile(Record, frozen=True):
    """A schedule, and the step it was made for.

    Attributes
    ----------
    model : name of the model's class. state : its parameters and buffers, a tied one under each
        of its names.
    in_eval : submodules that were in eval mode. batch : the signature of the batch.
    loss_fn : name of the loss function, empty without one. The function itself is not kept.
    autocast : one entry for each type of device. resident : bytes that live through the step.
    told_compiling, told_exporting : whether torch told the model's code, while it was traced,
        that it was being compiled or exported.
    device : what the plan is for, such as ``cpu``. title : the name of that machine.
    prediction : None if the schedule was rewritten without the costs of its graph.
    graph : with the costs behind the prediction, so that the plan can be shown without the model
        and without torch. Rewriting does not look at it. None if it was not at hand.
    over : of a plan for a range of sizes. `schedule` and `graph` then are those of the largest
        sizes, and `batch` has one size of the range. None for a plan of one size.
    check : what a step of the plan showed beside an unmodified one, on `title` by the torch of
        `versions`: measured peaks and times, and which results were equal. None if none was run.
    unchecked : why none was run, if there is more to say than that it was not asked for.
    outputs : those of forward's results that the step returns, by key or position; None for all.
    """

    noun: ClassVar[str] = "plan"
    again: ClassVar[str] = MAKE_PLAN_AGAIN
    error: ClassVar[type[RematError]] = PlanError
    model: str
    state: tuple[StateFact, ...]
    in_eval: tuple[str, ...]
    batch: BatchSignature
    loss_fn: str
    autocast: tuple[Autocast, ...]
    told_compiling: bool
    told_exporting: bool
    resident: Resident
    device: str
    title: str
    versions: Versions
    schedule: Schedule
    prediction: Prediction | None = None
    graph: TrainingGraph | None = None
    over: RangeFacts | None = None
    check: Check | None = None
    unchecked: str = ""
    outputs: tuple[str | int, ...] | None = None
    kind: str = KIND

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.check is None:
            return
        figures = [one for one in astuple(self.check) if isinstance(one, int | float)]
        if not are_figures(*figures) or self.check.gradients > self.check.gradients_total:
            raise PlanError("its check has a figure that cannot be")

    @property
    def budget_bytes(self) -> int:
        """The budget that the schedule was solved for, 0 where there was none."""
        return self.schedule.budget_bytes

    @classmethod
    def from_json(cls, data: bytes | str, name: str = "the file") -> Self:
        """Read a plan written by `to_json`; PlanError if it is none, or of another version."""
        _check_header(data, name)
        return super().from_json(data, name)

    def __repr__(self) -> str:
        return (
            f"PlanFile({self.model} on {self.device}: budget {self.budget_bytes} bytes, "
            f"{len(self.state)} parameters and buffers, torch {self.versions.torch}, "
            f"graph {self.schedule.graph_hash[:12]})"
        )


def is_plan(data: bytes) -> bool:
    try:
        return _header(data).get("kind") == KIND
    except TextError:
        return False


def holds_steps(data: bytes) -> bool:
    try:
        return "steps" in _header(data)
    except TextError:
        return False


def _header(data: bytes | str) -> dict[str, object]:
    """The fields that say what a file is; of ``steps`` only whether it is there."""
    # The rest stays undecoded, so that a large file is not decoded twice.
    fields = decode_json(data, dict[str, msgspec.Raw])
    said = {name: decode_json(bytes(fields[name]), object) for name in ("kind",) if name in fields}
    return said | ({"steps": None} if "steps" in fields else {})


def _check_header(data: bytes | str, name: str) -> None:
    try:
        header = _header(data)
    except ShapeError:
        header = dict[str, object]()  # JSON, but no object: refused below, as it has no kind
    except TextError as error:
        raise PlanError(
            f"{MAKE_PLAN_AGAIN}: {name} is not a plan, or is cut short: it is not JSON ({error})"
        ) from error
    if "steps" in header and "kind" not in header:
        raise PlanError(
            f"judge {name} on its step, remat.Plan.of(step, schedule).apply(model): it is only a "
            "schedule, which does not know its batch.\n"
            "Or keep a whole plan with remat run MODEL --budget BUDGET -o FILE"
        )
    if header.get("kind") != KIND:
        raise PlanError(f"{MAKE_PLAN_AGAIN}: {name} is no plan, as its kind is not {KIND!r}")


AGREEMENT = 1e-9  # largest relative difference of two times that come from the same sum


def evaluate_plan(plan: PlanFile, name: str = "the plan") -> tuple[TrainingGraph, Simulation]:
    """The graph that a plan keeps, and what `simulate` says now; `PlanError` unless they agree."""
    if plan.graph is None:
        raise PlanError(
            f"name its model too (MODEL --plan {name}), or make it again with remat run MODEL "
            f"--budget BUDGET -o FILE: {name} keeps no graph with costs, as it was rewritten by "
            "hand or made by an older release"
        )
    try:  # anyone can edit a file, so its peak and time are simulated again
        simulation = simulate(plan.graph, plan.schedule)
    except ScheduleError as error:
        raise PlanError(f"{MAKE_PLAN_AGAIN}: {name} was edited, or is stale: {error}") from error
    if plan.prediction is not None:
        _require_same(plan.prediction, simulation, name)
    require_within_budget(plan.schedule, simulation.peak_bytes, name)
    return plan.graph, simulation


def evaluate_family(over: RangeFacts, name: str = "the plan") -> None:
    """Raise `PlanError` unless each member of a kept family is valid, and fits, at its corners."""
    family, graph = over.family, over.graph
    top = corner(graph.symbols, "high")
    is_whole = family.symbols == graph.symbols and bool(family.members)
    if not is_whole or top not in family.top.corners:  # `number_at` relies on the last one
        raise PlanError(
            f"{MAKE_PLAN_AGAIN}: {name} was edited, as its schedules do not serve its range"
        )
    try:
        for member in family.members:
            for one in member.corners:
                # A member serves all sizes up to its corner: bounds over all are judged.
                part = (Symbol(s.name, s.low, one[s.name], s.multiple) for s in graph.symbols)
                bounding = graph.bounding(tuple(part))
                found = simulate(bounding, resized_schedule(member.schedule, bounding))
                if found.peak_bytes > min(member.peak_bytes, family.budget_bytes):
                    raise PlanError(
                        f"{MAKE_PLAN_AGAIN}: {name} was edited, or is stale: at {one} its schedule "
                        f"has a peak of {found.peak_bytes} bytes, above the {member.peak_bytes} "
                        f"that it says and the budget of {family.budget_bytes}"
                    )
    except (ScheduleError, GraphError, SignatureError, KeyError) as error:  # a corner lacks a size
        raise PlanError(f"{MAKE_PLAN_AGAIN}: {name} was edited, or is stale: {error}") from error


def require_within_budget(schedule: Schedule, peak_bytes: int, name: str) -> None:
    if 0 < schedule.budget_bytes < peak_bytes:  # a budget of 0 means none
        raise PlanError(
            f"{MAKE_PLAN_AGAIN}: {name} was edited, or made with the sizes of another machine, as "
            f"its peak is {peak_bytes} bytes on this graph, above its budget of "
            f"{schedule.budget_bytes}"
        )


def _require_same(said: Prediction, found: Simulation, name: str) -> None:
    bound_us = said.lower_bound_us
    pairs = (
        ("peak_bytes", said.peak_bytes, found.peak_bytes),
        ("time_us", said.time_us, found.time_us),
        ("overhead", said.overhead, found.overhead),
        # A bound cannot be simulated again: it must only not exceed the time.
        ("lower_bound_us", bound_us, min(bound_us, found.time_us)),
        # Older plans say 0 where there is no bound.
        ("gap", said.gap or 0.0, gap_of(found.time_us, bound_us) or 0.0),
    )
    for figure, planned, real in pairs:
        # Absolute below 1, since overhead and gap may be 0.
        if abs(planned - real) > AGREEMENT * max(abs(real), 1.0):
            raise PlanError(
                f"{MAKE_PLAN_AGAIN}: {name} was edited, or is stale: it says {figure} "
                f"{planned:.10g}, and simulating its schedule on its graph gives {real:.10g}"
            )
