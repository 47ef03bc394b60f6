"""Plans of blocks over a range of sizes: few, and all blocks of a step follow the same one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec

from remat.blocks.block_planner import BlockPlanner, BlocksAsked, BlocksPlan, TracedBlocks
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.sizes.symbols import Symbol
from remat.schedules.derived import in_chunks, unchunked
from remat.schedules.family import Family, Member, simulate_resized
from remat.schedules.schedule import ChunkedRegion, Schedule
from remat.schedules.simulate import bound_of
from remat.solver.reductions.sizes import Reach

_MOST_PLANS = 4  # each has code of its own in every distinct block
_CUT_PART = 0.25  # of the time limit, for each plan but that of the largest sizes


class _ReachOfPlans(Reach):
    """With a head in chunks, whose ops run before its wrapper lets go of it, each part of the range
    has a graph of its own."""

    graph_of: Callable[[tuple[Symbol, ...]], TrainingGraph] | None = None

    def _peak_of(self, schedule: Schedule) -> Callable[[tuple[Symbol, ...]], int]:
        if self.graph_of is None:
            return super()._peak_of(schedule)
        return lambda part: self._simulated_bytes(schedule, part)

    def _simulated_bytes(self, schedule: Schedule, part: tuple[Symbol, ...]) -> int:
        if self.graph_of is None:
            return super()._simulated_bytes(schedule, part)
        return simulate_resized(self.graph_of(part), schedule).peak_bytes


class BlocksOver:
    """What blocks keep at the sizes of a range, judged as the whole step of one rank."""

    def __init__(self, traced: TracedBlocks, ranged: RangedGraph, asked: BlocksAsked) -> None:
        self.traced, self.ranged, self.asked = traced, ranged, asked
        self.chunks: tuple[ChunkedRegion, ...] = ()
        self.graph = ranged.changed(lambda one: BlockPlanner(traced, unchunked(one), asked).graph)

    def with_head(self, *chunks: ChunkedRegion) -> BlocksOver:
        """The same, with the head in so many chunks at all sizes."""
        made = copy.copy(self)
        made.chunks = chunks
        return made

    def plan(self, within: Callable[[BlockPlanner], BlocksPlan]) -> BlocksPlan:
        """The plan of the largest sizes, which serves all, with those of smaller ones that are
        faster. `within` makes the first one for the budget; where nothing fits, that alone."""
        top = within(self.largest())
        if top.result.schedule is None:
            return top
        reach = _ReachOfPlans(self.graph, top.result.budget_bytes)
        if self.chunks:
            reach.graph_of = lambda part: self._planner(self.ranged.bounding(part)).graph
        last = reach.levels[-1]
        plans = [*self._below(top, reach), (last, top)]
        members = [(self._member(reach, *pair), pair[1].schedules) for pair in plans]
        served = [(member, schedules) for member, schedules in members if member.corners]
        assert served, "the plan of the largest sizes serves no size"
        family = Family(
            model=self.graph.name, symbols=self.graph.symbols,
            budget_bytes=top.result.budget_bytes, members=tuple(member for member, _ in served),
            certificate="largest sizes" if self.graph.rising else "bounds of parts",
            cost_error=self.graph.costs.error_at_middle, traced_hash=self.graph.traced_hash,
        )  # fmt: skip
        of_blocks = tuple(schedules for _, schedules in served)
        return msgspec.structs.replace(top, family=family, members=of_blocks)

    def largest(self) -> BlockPlanner:
        return self._planner(self.ranged.bounding(self.ranged.symbols))

    def _below(self, top: BlocksPlan, reach: Reach) -> Iterator[tuple[dict[str, int], BlocksPlan]]:
        """From the smallest sizes on: a plan, then one for half of the levels that it leaves."""
        level, last = 0, len(reach.levels) - 1
        for _ in range(_MOST_PLANS - 1):
            sizes = reach.levels[level]
            planner = self._planner(self.ranged.bounding(reach.part(sizes)), _CUT_PART)
            plan = planner.plan(top.result.budget_bytes)
            if plan.result.schedule is None or plan.result.overhead >= top.result.overhead:
                return
            yield sizes, plan
            served = max(reach.along(plan.result.schedule), level)
            level = (served + 1 + last) // 2
            if level >= last:
                return

    def _planner(self, costed: TrainingGraph, part: float = 1.0) -> BlockPlanner:
        limit_s = part * self.asked.time_limit_s
        graph = in_chunks(costed, self.chunks) if self.chunks else unchunked(costed)
        return BlockPlanner(self.traced, graph, replace(self.asked, time_limit_s=limit_s))

    def _member(self, reach: Reach, sizes: dict[str, int], plan: BlocksPlan) -> Member:
        result = plan.result
        assert result.schedule is not None
        corners, peak_bytes = reach.evaluated_corners(result.schedule)
        base_us = result.time_us / (1 + result.overhead)
        proved = bound_of(result.lower_bound_us, base_us) or 0.0
        return Member(result.schedule, sizes, corners, peak_bytes, result.overhead, proved)
