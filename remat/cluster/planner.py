"""The search over all meshes: each is evaluated, or a bound says that it cannot be the best.

The bound of a mesh is the work of its parts, with the ways between stages, in the rounds of its
pipeline: no recomputation and no other communication takes less than nothing. Before a part is
captured, its matrix products at the best rate stand for its work, and a mesh whose parameters alone
are too large is left out. All of these hold, so the pruned search finds what the full one finds
(`tests/remat/cluster`). To have all runners-up within a share of the best, meshes are pruned only
above that share.

Optimal for this model of memory and time, on the grid of `parts.py`, among even virtual stages
where a rank has several. Sources: the space of Megatron-LM (Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473) and PaRO (Wu et al. 2023, https://arxiv.org/abs/2310.06003),
searched as in Alpa (Zheng et al. 2022, https://arxiv.org/abs/2201.12023), with recomputation chosen
for each stage inside as in AdaPipe (Sun et al. 2024, https://doi.org/10.1145/3620666.3651359).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from remat.cluster import stages
from remat.cluster.mesh import (
    Cluster,
    Degrees,
    Job,
    Mesh,
    MeshSpec,
    Parts,
    all_degrees,
    all_states,
    even_layers,
    places_of_blocks,
    virtual_layouts,
)
from remat.cluster.parts import BlockRows, BlockTables, Part
from remat.graph_capture.graph import Floats

# Where to cut a chain of blocks into the stages of a 1F1B pipeline.
#
# The time of a step is taken to be Σ t + (m - 1) max t, over the times t of one microbatch on each
# stage, forward and backward: the first microbatch goes through all stages, and then the slowest
# one sets the pace. It is never below torch's order replayed, and up to 7 % above it where stages
# are uneven (`tests/remat/cluster/test_pipeline_replay.py`).
#
# Also called: the linear partitioning problem; with two terms as in Alpa (Zheng et al. 2022,
# https://arxiv.org/abs/2201.12023), whose inner program this is for one chain. Optimal. For each
# candidate M of max t, from the least feasible up, a program over (stage, blocks so far) gives the
# least sum with t ≤ M. It ends when M alone, with the least sum of all, is no better.


class _Borders(NamedTuple):
    time_us: float
    layers: tuple[int, ...]


def best_borders(
    times_us: Floats, layers: int, microbatches: int, of_run: npt.NDArray[np.int64] | None = None
) -> _Borders | None:
    """None if nothing fits; times by stage (row) and number of blocks (column), inf if too many.

    `of_run` : the column for so many blocks from each one on, where blocks are not equal.
    """
    if of_run is not None:
        # A column for runs that go beyond the last block.
        times_us = np.pad(times_us, ((0, 0), (0, 1)), constant_values=np.inf)[:, of_run]
    else:
        times_us = np.broadcast_to(times_us[:, None, :], (len(times_us), layers + 1, layers + 1))
    loosest = _least_sum(times_us, layers, np.inf)
    if loosest is None:
        return None
    limits = np.unique(times_us[np.isfinite(times_us)])
    # What is feasible within a limit is so within each larger one.
    at = bisect_left(limits[:-1], True, key=lambda us: _least_sum(times_us, layers, us) is not None)
    best: _Borders | None = None
    for limit_us in limits[at:]:
        # Limits ascend, and no sum is below the loosest: no later limit can be better.
        if best and (microbatches - 1) * limit_us + loosest.time_us >= best.time_us:
            break
        found = _least_sum(times_us, layers, limit_us)
        assert found is not None
        begins = accumulate(found.layers[:-1], initial=0)
        slowest_us = max(
            times_us[s, a, n] for s, (a, n) in enumerate(zip(begins, found.layers, strict=True))
        )
        time_us = float(found.time_us + (microbatches - 1) * slowest_us)
        if best is None or time_us < best.time_us:
            best = _Borders(time_us, found.layers)
    return best


def _least_sum(times_us: Floats, layers: int, limit_us: float) -> _Borders | None:
    """The least sum of times, by stage, first block and number, with no stage above the limit."""
    reached = np.full(layers + 1, np.inf)
    reached[0] = 0.0
    picks: list[npt.NDArray[np.int64]] = []
    for row in times_us:
        sums, pick = np.full(layers + 1, np.inf), np.zeros(layers + 1, np.int64)
        allowed = np.where(row <= limit_us, row, np.inf)
        for n in np.flatnonzero(np.isfinite(allowed).any(axis=0)):
            with_these = reached[: len(reached) - n] + allowed[: len(reached) - n, n]
            better = with_these < sums[n:]
            sums[n:][better], pick[n:][better] = with_these[better], n
        reached = sums
        picks.append(pick)
    if not np.isfinite(reached[layers]):
        return None
    at, chosen = layers, list[int]()
    for pick in reversed(picks):
        chosen.append(int(pick[at]))
        at -= chosen[-1]
    return _Borders(float(reached[layers]), tuple(reversed(chosen)))


_CLOSE = 0.05  # runners-up are within this share of the best


class ClusterPlan(msgspec.Struct, frozen=True):
    """A mesh, and the blocks of each of its stages.

    `time_us` : of a step, by the formula. `pipeline_us` : of that, what a replay of the pipeline's
    actions also gives; 0 without a pipeline.
    """

    mesh: Mesh
    time_us: float
    pipeline_us: float
    layers: tuple[int, ...]


@dataclass
class ClusterSearch:
    """Evaluates meshes of one job on one cluster.

    `close` : share above the best up to which no mesh is pruned. `found` : all that fit, in the
    order of evaluation.
    """

    job: Job
    cluster: Cluster
    parts: Parts
    asked: MeshSpec = field(default_factory=MeshSpec)
    close: float = _CLOSE
    evaluated: int = 0
    pruned: int = 0
    found: list[ClusterPlan] = field(default_factory=list[ClusterPlan])
    tables: dict[tuple[int, int, int], BlockTables] = field(
        default_factory=dict[tuple[int, int, int], BlockTables]
    )

    @cached_property
    def rows(self) -> BlockRows:
        """Of the blocks that stages may have."""
        layouts = virtual_layouts(self.job, self.cluster.gpus, self.asked)
        return BlockRows(self.job.kind_of_layer, layouts)

    def run(self, told: Callable[[int], None] = lambda _: None) -> list[ClusterPlan]:
        """All plans within `close` of the best, quickest first; empty where nothing fits."""
        limit_us = math.inf
        # First what is likely to be good, so that more is pruned; the result does not depend on it.
        in_turn = sorted(
            all_degrees(self.job, self.cluster, self.asked),
            key=lambda d: (self._least_products_us(d) * (1 + d.pp / 64 + d.tp / 64), d),
        )
        for count, degrees in enumerate(in_turn):
            told(count)
            if self._least_products_us(degrees) >= limit_us:
                self.pruned += 1
                continue
            limit_us = self._try(degrees, limit_us)
        self.found.sort(key=_quickest_first)
        return [one for one in self.found if one.time_us < limit_us]

    def _try(self, degrees: Degrees, limit_us: float) -> float:
        meshes = list(all_states(degrees, self.cluster, self.asked))
        # The others do not fit, however stages are cut.
        room = self.cluster.budget_bytes
        fitting = [mesh for mesh in meshes if stages.least_states_bytes(self.job, mesh) <= room]
        self.pruned += len(meshes) - len(fitting)
        # Their work is asked for last: its parts may have to be captured.
        work_us = self._work_us(degrees) if fitting else 0.0
        for mesh in fitting:
            if work_us >= limit_us:
                self.pruned += 1
                continue
            self.evaluated += 1
            plan = self.evaluate(mesh)
            if plan is not None:
                self.found.append(plan)
                limit_us = min(limit_us, plan.time_us * (1 + self.close))
        return limit_us

    def _least_products_us(self, degrees: Degrees) -> float:
        """Of all matrix products with weights, at the rate that no product is taken to exceed."""
        share, of_part = degrees.microbatch / (degrees.tp * degrees.cp), self.job.products_flops
        flops = sum(of_part[place] for place in self.job.all_positions)
        return flops * share / self.cluster.reached_flops_per_us * degrees.rounds()

    def _work_us(self, degrees: Degrees) -> float:
        work = {
            place: self.parts.work(place, degrees.tp, degrees.cp, degrees.microbatch)
            for place in dict.fromkeys(self.job.all_positions)
        }
        time_us = sum(work[place].time_us for place in self.job.all_positions)
        if degrees.pp > 1:
            time_us += sum(self._waits_us(degrees))
        # What is not of a block, and what is computed again, only lowers the share.
        blocks = [work[place] for place in self.job.block_positions]
        return time_us * degrees.rounds(
            max(block.weight_us / block.time_us if block.time_us else 0.0 for block in blocks)
        )

    def parts_of(self, degrees: Degrees) -> tuple[Part, ...]:
        """First, one of each kind of block, and last."""
        return tuple(
            self.parts.part(place, degrees.tp, degrees.cp, degrees.microbatch)
            for place in ("first", *self.job.block_positions, "last")
        )

    def stage_tables(self, mesh: Mesh) -> list[stages.StageTable]:
        d = mesh.degrees
        parts = self.parts_of(d)
        key = d.tp, d.cp, d.microbatch
        if key not in self.tables:
            self.tables[key] = self.rows.tables(parts[1:-1])
        given = parts, self.rows, self.tables[key]
        return [stages.StageTable(self.job, self.cluster, mesh, i, *given) for i in range(d.pp)]

    def evaluate(self, mesh: Mesh) -> ClusterPlan | None:
        """None where the mesh does not fit."""
        tables = self.stage_tables(mesh)
        if mesh.degrees.pp == 1:
            return self._without_pipeline(mesh, tables[0])
        waits = self._waits_us(mesh.degrees)
        if mesh.degrees.virtual_stages > 1:
            return self._with_virtual_stages(mesh, tables, waits)
        times = np.array([one.times_us + wait for one, wait in zip(tables, waits, strict=True)])
        # Each stage has a block.
        times[:, 0] = np.inf
        of_run = self.rows.of_run if self.job.kinds else None
        cut = best_borders(times, self.job.layers, mesh.degrees.microbatches, of_run)
        return cut and self._with_tail(mesh, cut.time_us, cut.layers)

    def _without_pipeline(self, mesh: Mesh, table: stages.StageTable) -> ClusterPlan | None:
        layers = self.job.layers
        extra_us = float(table.extra_us[self.rows.of((range(layers),))])
        if not math.isfinite(extra_us):
            return None
        ends_us = sum(end.work_us for end in table.ends)
        us = extra_us / layers
        time_us = stages.data_parallel_us(self.job, self.cluster, mesh, table.blocks, us, ends_us)
        time_us += stages.update_us(self.cluster, mesh, self._most_trained(mesh, (layers,)))
        return ClusterPlan(mesh, time_us, 0.0, (layers,))

    def _with_virtual_stages(
        self, mesh: Mesh, tables: list[stages.StageTable], waits: tuple[float, ...]
    ) -> ClusterPlan | None:
        d = mesh.degrees
        layers = even_layers(self.job.layers, d.pp, d.virtual_stages)
        assert layers is not None
        # m max t, and (S - 1) / v times to fill and drain the slowest stage.
        slowest_us, fill_us = max(
            (float(one.times_us[row]) + wait, one.fill_us(row, wait))
            for one, row, wait in zip(tables, self.rows_of(mesh, layers), waits, strict=True)
        )
        if not math.isfinite(slowest_us):
            return None
        pipeline_us = slowest_us * d.microbatches + fill_us * (d.pp - 1) / d.virtual_stages
        return self._with_tail(mesh, pipeline_us, layers)

    def rows_of(self, mesh: Mesh, layers: tuple[int, ...]) -> list[int]:
        """Of each stage, with so many blocks."""
        places = places_of_blocks(layers, mesh.degrees.virtual_stages)
        return [self.rows.of(ranges) for ranges in places]

    def _with_tail(self, mesh: Mesh, pipeline_us: float, layers: tuple[int, ...]) -> ClusterPlan:
        blocks = self.parts_of(mesh.degrees)[1:-1]
        most = self._most_trained(mesh, layers)
        # Of the stage with most blocks; where they differ, of each kind as many as any stage has.
        counts = self.rows.counts[self.rows_of(mesh, layers)].max(axis=0)
        tail_us = stages.behind_pipeline_us(self.job, self.cluster, mesh, blocks, counts, most)
        return ClusterPlan(mesh, pipeline_us + tail_us, pipeline_us, layers)

    def _most_trained(self, mesh: Mesh, layers: tuple[int, ...]) -> int:
        """Parameters of a rank, on the stage that has most."""
        tp, last, counts = mesh.degrees.tp, len(layers) - 1, self.rows.counts
        return max(
            int(stages.stage_parameters(
                self.job, tp, counts[row], first=s == 0, last=s == last
            ).trained)
            for s, row in enumerate(self.rows_of(mesh, layers))
        )  # fmt: skip

    def _waits_us(self, d: Degrees) -> tuple[float, ...]:
        """Of each stage, for what its neighbours send in both directions, of one microbatch."""
        once_us = stages.hop_us(self.job, self.cluster, d)
        if d.virtual_stages > 1:  # virtual stages go round, so each rank has both neighbours
            return (2 * once_us * d.virtual_stages,) * d.pp
        return tuple(once_us * ((s > 0) + (s < d.pp - 1)) for s in range(d.pp))

    def stages(self, plan: ClusterPlan) -> list[stages.StagePlan]:
        tables = self.stage_tables(plan.mesh)
        rows = self.rows_of(plan.mesh, plan.layers)
        return [one.stage(row) for one, row in zip(tables, rows, strict=True)]

    def overlapped_us(self, plan: ClusterPlan) -> float:
        """How much longer the same mesh took if no collective went on beside computations."""
        # As if all that runs beside a collective stood still.
        links = msgspec.structs.replace(self.cluster.links, beside=math.inf)
        cluster = msgspec.structs.replace(self.cluster, links=links)
        # Its parts are the same, and so are their options.
        other = ClusterSearch(self.job, cluster, self.parts, self.asked, tables=self.tables)
        found = other.evaluate(plan.mesh)
        assert found is not None
        return found.time_us - plan.time_us

    def mfu(self, time_us: float) -> float:
        flops = self.job.model_flops * self.job.batch
        return flops / (time_us * self.cluster.flops_per_us * self.cluster.gpus)


def _quickest_first(plan: ClusterPlan) -> tuple[float, int, int, int, int, bool]:
    """Of equals the mesh with least of what is hard to set up."""
    d = plan.mesh.degrees
    return plan.time_us, d.pp, d.cp, d.tp, d.virtual_stages, d.is_split
