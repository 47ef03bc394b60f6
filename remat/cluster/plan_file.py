"""The file of a plan for a cluster, in torchtitan's words where it has one.

It holds facts alone, as plans of one step do: the mesh, how states are held, the blocks of each
stage, how many of them run by which schedule, and the graphs that the schedules are of. Reading it
checks that its numbers belong together, and has `simulate` judge each schedule.
"""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from remat.cluster.pipeline_replay import StageCosts
from remat.graph_capture.errors import PlanError, RematError, ScheduleError, TextError
from remat.graph_capture.files import Record, decode_json
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.plan import Versions
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import require_valid

_CLUSTER_KIND = "remat cluster plan"
MAKE_AGAIN = "make it again with remat cluster MODEL --gpus N -o FILE"


class Parallelism(msgspec.Struct, frozen=True):
    """As in torchtitan's job configuration; `fsdp_reshard_after_forward` may be a number (hpZ)."""

    data_parallel_replicate_degree: int
    data_parallel_shard_degree: int
    tensor_parallel_degree: int
    context_parallel_degree: int
    pipeline_parallel_degree: int
    pipeline_parallel_schedule: str
    pipeline_parallel_microbatch_size: int
    fsdp_reshard_after_forward: str

    @property
    def degrees(self) -> tuple[int, int, int, int, int]:
        """Stages, replicas, shards, context and tensor parallel ranks: in a mesh's own order."""
        return (
            self.pipeline_parallel_degree, self.data_parallel_replicate_degree,
            self.data_parallel_shard_degree, self.context_parallel_degree,
            self.tensor_parallel_degree,
        )  # fmt: skip

    @property
    def gpus(self) -> int:
        return math.prod(self.degrees)

    @property
    def data_parallel_ranks(self) -> int:
        return self.data_parallel_replicate_degree * self.data_parallel_shard_degree


class StageFacts(msgspec.Struct, frozen=True):
    """One stage.

    `layers` : paths of its blocks, by virtual stage. `schedules` : how many of them run by which of
    the plan's schedules, by its number; those with most recomputation come first. `head` : the
    schedule of what follows all blocks, on the last stage. `costs` : of one microbatch, by virtual
    stage, as the judge of pipelines takes them; empty in files of before.
    """

    layers: tuple[tuple[str, ...], ...]
    schedules: dict[int, int]
    head: int | None
    microbatches_in_flight: float
    overhead: float
    peak_bytes: int
    held_bytes: dict[str, int]
    costs: tuple[StageCosts, ...] = ()

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(path for virtual_stage in self.layers for path in virtual_stage)


class PartSchedule(msgspec.Struct, frozen=True):
    """Of one distinct block, or of the head: and of which graph it is."""

    graph: int
    schedule: Schedule


class ClusterFigures(msgspec.Struct, frozen=True):
    """What was predicted; all times are modelled.

    `without_overlap_us` : of the step, if no collective went on beside computations. `mfu` : share
    of the peak of all GPUs. `bubble` : share of time in which ranks of a pipeline wait.
    """

    step_us: float
    without_overlap_us: float
    mfu: float
    bubble: float


class RunnerUp(msgspec.Struct, frozen=True):
    parallelism: Parallelism
    virtual_stages: int = msgspec.field(name="chunks")
    step_us: float
    mfu: float


class ClusterFile(Record, frozen=True):
    """A plan for a cluster.

    `parameters` : elements. `budget_bytes` : of a GPU. `gradients` : reduced after ``each``
    microbatch, or ``once``. `graphs` : of each distinct block and of the head, as one rank runs
    them, with costs. `modelled` : what is modelled, in words. `context_ring` : of the context
    parallel ranks, groups round which tokens go; the ranks of each share heads. `unrun` : why
    `remat.cluster.parallelize` does not run it; empty if it may.
    """

    noun: ClassVar[str] = "plan for a cluster"
    again: ClassVar[str] = MAKE_AGAIN
    error: ClassVar[type[RematError]] = PlanError
    model: str
    parameters: int
    device: str
    node_size: int
    gpus: int
    budget_bytes: int
    batch: int
    seq: int
    microbatches: int
    # The name that files have had from the first on.
    virtual_stages: int = msgspec.field(name="chunks")
    parallelism: Parallelism
    gradients: str
    stages: tuple[StageFacts, ...]
    graphs: tuple[TrainingGraph, ...]
    schedules: tuple[PartSchedule, ...]
    predicted: ClusterFigures
    runners_up: tuple[RunnerUp, ...]
    modelled: tuple[str, ...]
    versions: Versions
    kind: str = _CLUSTER_KIND
    hop_us: float = 0.0
    context_ring: int = 1
    unrun: str = ""

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        return tuple(len(stage.blocks) for stage in self.stages)


class _OfKind(msgspec.Struct):
    kind: str = ""


def is_cluster_plan(data: bytes | str) -> bool:
    """Whether a text says that it is a plan for a cluster, sound or not."""
    try:
        return decode_json(data, _OfKind).kind == _CLUSTER_KIND
    except TextError:
        return False


def read_cluster_plan(data: bytes | str, name: str = "the file") -> ClusterFile:
    """`PlanError` for what is no such plan, or has numbers that do not belong together."""
    plan = ClusterFile.from_json(data, name)
    if plan.kind != _CLUSTER_KIND:
        raise PlanError(
            f"{MAKE_AGAIN}: {name} is not a {ClusterFile.noun}, as its kind is {plan.kind!r}"
        )
    if wrong := _wrong(plan):
        raise PlanError(f"{MAKE_AGAIN}: {name} was changed, as {wrong}")
    return plan


def _wrong(plan: ClusterFile) -> str:
    """What does not belong together; empty where all does."""
    mesh = plan.parallelism
    if mesh.gpus != plan.gpus:
        return f"its degrees make {mesh.gpus} ranks, not {plan.gpus}"
    size = mesh.data_parallel_ranks * mesh.pipeline_parallel_microbatch_size
    if size * plan.microbatches != plan.batch:
        return f"its microbatches do not make a batch of {plan.batch}"
    if plan.context_ring < 1 or mesh.context_parallel_degree % plan.context_ring:
        return f"{mesh.context_parallel_degree} ranks have no ring of {plan.context_ring} groups"
    if len(plan.stages) != mesh.pipeline_parallel_degree:
        return f"it has {len(plan.stages)} stages for {mesh.pipeline_parallel_degree} ranks"
    paths = [path for stage in plan.stages for path in stage.blocks]
    if len(set(paths)) != len(paths):
        return "a block is in two stages"
    for number, stage in enumerate(plan.stages):
        if (has := len(stage.layers)) != plan.virtual_stages:
            return f"stage {number} has {has} virtual stages, not {plan.virtual_stages}"
        if sum(stage.schedules.values()) != len(stage.blocks):
            return f"stage {number} does not have one schedule for each block"
        if stage.costs and len(stage.costs) != plan.virtual_stages:
            return f"stage {number} does not have one cost for each virtual stage"
        if stage.peak_bytes > plan.budget_bytes:
            return f"stage {number} is over the budget"
    return _wrong_schedule(plan)


def _wrong_schedule(plan: ClusterFile) -> str:
    named = {i for stage in plan.stages for i in stage.schedules}
    named |= {stage.head for stage in plan.stages if stage.head is not None}
    if not named <= set(range(len(plan.schedules))):
        return "a stage names a missing schedule"
    for number, one in enumerate(plan.schedules):
        if not 0 <= one.graph < len(plan.graphs):
            return f"schedule {number} belongs to no graph"
        try:
            require_valid(plan.graphs[one.graph], one.schedule)
        except ScheduleError as error:
            return f"schedule {number} does not fit its graph: {error}"
    return ""


def require_world(plan: ClusterFile, gpus: int, name: str = "the plan") -> None:
    """Raise `PlanError` where a plan is of another number of GPUs."""
    if plan.gpus != gpus:
        raise PlanError(f"plan again with --gpus {gpus}: {name} is for {plan.gpus} GPUs")
