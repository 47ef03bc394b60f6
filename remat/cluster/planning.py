"""Plans a cluster: a factory in, the best mesh with its runners-up out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from remat import __version__
from remat.cluster.mesh import (
    Cluster,
    ClusterRequest,
    Job,
    Mesh,
    all_degrees,
    places_of_blocks,
    ring_ranks,
)
from remat.cluster.opened_chain import Chains, KeptParts, job_of
from remat.cluster.parts import Part, schedule_of_option
from remat.cluster.plan_file import (
    ClusterFigures,
    ClusterFile,
    Parallelism,
    PartSchedule,
    RunnerUp,
    StageFacts,
)
from remat.cluster.planner import ClusterSearch
from remat.cluster.replayed_plan import ReplayedPlan, replayed_plan
from remat.cluster.stages import StagePlan, hop_us
from remat.graph_capture.devices.known_devices import device_table, modelled_device, shares_of
from remat.graph_capture.distributed.collectives import fake_ranks
from remat.graph_capture.errors import DeviceError
from remat.progress import Stopwatch
from remat.schedules.plan import Versions

_WIDEST_SEEN = 128
"""The most ranks with a shard of the states of which a published step was compared with the model:
5,762 tokens/s on 8 H100, 5,605 on 128 (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md)."""
_REPLAYED = 32  # most plans, of those near the best, whose pipelines are replayed to rank them


@dataclass(frozen=True)
class ClusterOutcome:
    """The best plan and its runners-up, as replayed, quickest first; none where nothing fits.

    `blocks`, of each kind, and `file` are of the best plan. `evaluated`, `pruned` : meshes.
    `captured`, `read` : parts, from disk those that were `read`.
    """

    job: Job
    cluster: Cluster
    ranked: tuple[ReplayedPlan, ...]
    blocks: tuple[Part, ...]
    file: ClusterFile | None
    evaluated: int
    pruned: int
    captured: int
    read: int


def plan_cluster(
    source: str, request: ClusterRequest, runners_up: int = 5, stopwatch: Stopwatch | None = None
) -> ClusterOutcome:
    """Find the fastest mesh, and what each stage of it holds and computes again.

    `DeviceError`, `BudgetError` : a number of the request cannot be. `FactoryError` : of the
    factory. `CaptureError` : the model is no chain, or cannot be split as it is asked.
    """
    request.check()
    cluster = request.cluster()
    watch = stopwatch or Stopwatch()
    with fake_ranks() as groups:
        chains = Chains(source, request.blocks)
        with watch.stage("capture", "reading the model"):
            job = job_of(chains, request, groups)
        _require_some_mesh(job, cluster, request)
        parts = KeptParts(chains, job, cluster, groups)
        search = ClusterSearch(job, cluster, parts, request.asked)
        with watch.stage("solve", "searching meshes") as shown:
            near = search.run(lambda done: shown(done))
            ranked = sorted(
                (replayed_plan(search, plan) for plan in near[:_REPLAYED]),
                key=lambda one: (one.time_us, one.plan.time_us),
            )
        # The search ranks by the formula; what is shown as near is so as replayed.
        near_us = ranked[0].time_us * (1 + search.close) if ranked else 0.0
        kept = tuple(one for one in ranked[: runners_up + 1] if one.time_us <= near_us)
        file, blocks = None, tuple[Part, ...]()
        if kept:
            file = _file(request, search, parts, kept)
            blocks = search.parts_of(kept[0].plan.mesh.degrees)[1:-1]
    return ClusterOutcome(
        job, cluster, kept, blocks, file, search.evaluated, search.pruned, parts.captured,
        parts.read,
    )  # fmt: skip


def _require_some_mesh(job: Job, cluster: Cluster, request: ClusterRequest) -> None:
    # Whatever the memory: no numbers go together.
    if next(all_degrees(job, cluster, request.asked), None) is None:
        raise DeviceError(
            f"fix fewer choices, or choose another --batch: no mesh splits {request.gpus} GPUs "
            f"and a batch of {request.batch} x {request.seq} as asked.\n"
            "Degrees divide the GPUs, microbatches and data parallel ranks divide the batch, tp "
            "and cp divide the sequence (into twice as many parts where tokens go round a ring), "
            f"and stages are at most {job.layers} and have a microbatch each"
        )


def parallelism_of(mesh: Mesh, schedule: str) -> Parallelism:
    d = mesh.degrees
    # torchtitan's shard degree is without context parallel ranks, which its shard groups span too.
    shard = mesh.shard // d.cp if mesh.shard >= d.cp else 1
    held = {1: "never", mesh.shard: "always"} if mesh.shard > 1 else {1: "never"}
    return Parallelism(
        d.dp // shard, shard, d.tp, d.cp, d.pp, schedule, d.microbatch,
        held.get(mesh.keep, str(mesh.keep)),
    )  # fmt: skip


def _file(
    request: ClusterRequest, search: ClusterSearch, parts: KeptParts,
    ranked: tuple[ReplayedPlan, ...],
) -> ClusterFile:  # fmt: skip
    best, job = ranked[0], search.job
    d, writer = best.plan.mesh.degrees, _Schedules(parts, best)
    stages = tuple(writer.stage(i, stage) for i, stage in enumerate(best.stages))
    ring = ring_ranks(job.heads, d.tp, d.cp)
    # The replay has no collectives of states in it: how much they overlap is the formula's.
    figures = ClusterFigures(
        best.time_us, best.time_us + search.overlapped_us(best.plan), best.mfu, best.bubble
    )
    return ClusterFile(
        job.name, job.parameters, request.device, request.node_size, request.gpus,
        search.cluster.budget_bytes, job.batch, job.seq, d.microbatches, d.virtual_stages,
        parallelism_of(best.plan.mesh, best.schedule),
        "each" if best.plan.mesh.reduce_each else "once",
        stages, tuple(writer.graphs), tuple(writer.schedules), figures,
        tuple(RunnerUp(
            parallelism_of(one.plan.mesh, one.schedule), one.plan.mesh.degrees.virtual_stages,
            one.time_us, one.mfu,
        ) for one in ranked[1:]),
        modelled_notes(search.cluster, request, best.plan.mesh, ring),
        Versions(str(torch.__version__), __version__),
        hop_us=hop_us(job, search.cluster, d) if d.pp > 1 else 0.0, context_ring=ring,
        unrun=job.unrun or (job.unsent if d.pp > 1 or d.cp > 1 else ""),
    )  # fmt: skip


def modelled_notes(
    cluster: Cluster, request: ClusterRequest, mesh: Mesh, ring: int
) -> tuple[str, ...]:
    table, links = device_table(), cluster.links
    rate = shares_of(modelled_device(request.device))["matmul"].rate
    where = f"as measured in {request.links}" if request.links else "by model"
    return (
        f"all times are modelled, none is measured: products at {100 * rate:.0f} % of the maker's "
        f"peak, collectives {where}",
        f"links of {links}",
        f"computation alongside a collective takes {links.beside:.2f} times as long"
        + ("" if request.links else f" ({table.between_ranks.beside_reason})"),
        "ranks wait for tensor and context parallel collectives, and for gradients behind a "
        "pipeline; the cluster has no stragglers and no congestion",
        *_doubts(cluster, mesh),
        *_ring_note(mesh.degrees.cp, ring),
    )


def _ring_note(cp: int, ring: int) -> tuple[str, ...]:
    if ring == 1:
        return ()
    return (
        f"tokens go round {ring} groups, each of {cp // ring} ranks that share heads: attention "
        "sums in another order than on one rank, and equals it to rounding",
    )


def _doubts(cluster: Cluster, mesh: Mesh) -> tuple[str, ...]:
    if mesh.shard <= cluster.node_size:
        return ()
    seen = ", and more were not compared" if mesh.shard > _WIDEST_SEEN else ""
    return (
        f"states over {mesh.shard} ranks may look too good: from 8 to {_WIDEST_SEEN} ranks, "
        f"torchtitan's published Llama 8B became 2.8 % slower, and the modelled one does not{seen}",
    )


class _Schedules:
    def __init__(self, parts: KeptParts, replayed: ReplayedPlan) -> None:
        d = replayed.plan.mesh.degrees
        self.replayed = replayed
        # The file has the graph and the schedules of each kind of block, and of the head.
        keys = [(place, d.tp, d.cp, d.microbatch) for place in (*parts.job.block_positions, "last")]
        self.parts = [parts.part(*key) for key in keys]
        self.graphs = [parts.graph(*key) for key in keys]
        # Stages number the options of all kinds of blocks in turn.
        self.options = [
            (at, i) for at, one in enumerate(self.parts) for i in range(len(one.options))
        ]
        self.schedules: list[PartSchedule] = []
        self.numbers: dict[tuple[int, int], int] = {}
        self.paths = list(parts.chains.at(1, parts.job.seq)[0].blocks)
        self.places = places_of_blocks(replayed.plan.layers, d.virtual_stages)

    def stage(self, index: int, stage: StagePlan) -> StageFacts:
        paths = tuple(tuple(self.paths[i] for i in places) for places in self.places[index])
        # `parallelize` gives the first blocks of a stage most recomputation.
        dearest = sorted(stage.options, reverse=True)
        return StageFacts(
            paths, {self._number(*self.options[i]): stage.options[i] for i in dearest},
            None if stage.last is None else self._number(len(self.parts) - 1, stage.last),
            stage.in_flight, stage.overhead, self.replayed.peak_bytes[index],
            stage.held_bytes, self.replayed.costs[index],
        )  # fmt: skip

    def _number(self, at: int, option: int) -> int:
        key = at, option
        # Each distinct schedule is written once.
        if key not in self.numbers:
            self.numbers[key] = len(self.schedules)
            schedule = schedule_of_option(self.graphs[at], self.parts[at].options[option])
            self.schedules.append(PartSchedule(at, schedule))
        return self.numbers[key]
