"""Plans a model block by block: what each may keep, and what the whole step then needs.

The simulator judges the whole step: while it is over the budget, the blocks get less room.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from torch import nn

from remat.blocks.chunked_head import HeadPlan
from remat.graph_capture.devices.placement import resolved_device
from remat.graph_capture.distributed.sharded_step import (
    BEFORE_BLOCK,
    BEHIND_BLOCK,
    COMMUNICATION,
    sharded,
)
from remat.graph_capture.distributed.sharding import Sharding, with_units
from remat.graph_capture.eager_step import with_eager_sizes
from remat.graph_capture.errors import CaptureError, SolverError
from remat.graph_capture.graph import Links, TrainingGraph
from remat.graph_capture.tracing.blocks import (
    BlockMatch,
    match_block,
    matching_blocks,
    watching_calls,
)
from remat.graph_capture.tracing.recipe import Recipe
from remat.graph_capture.tracing.trace import trace, trace_recipe
from remat.graph_capture.tracing.traced_step import Trace
from remat.rewriter.guards.live_state import named_state
from remat.schedules.derived import assembled
from remat.schedules.family import Family
from remat.schedules.outcome import Result
from remat.schedules.schedule import Compute, Fetch, Schedule, Step
from remat.schedules.simulate import simulate
from remat.schedules.value_report.globs import Globs, Pins
from remat.solver.blocks.block_budgets import BlockBudgets
from remat.solver.policies.template import StoreAll
from remat.solver.problem import Problem
from remat.solver.reductions.pins import kept_graph
from remat.solver.result import evaluate_schedule
from remat.solver.search import Clock
from remat.solver.state import last_forward_position, schedule_of

_Moves = Mapping[int, Sequence[Step]]  # by the position of the op that they stand before


def _block_schedule(graph: TrainingGraph, match: BlockMatch, run: Sequence[Step]) -> Schedule:
    """`run`, one of `BlockBudgets.runs`, as a schedule of the block's own `graph`."""
    problem = Problem.of(graph)
    op_in_block = {theirs: mine for mine, theirs in match.op_of.items()}
    value_in_block = {theirs: mine for mine, theirs in match.value_of.items()}
    ops: list[int] = []
    moves: dict[int, list[Step]] = {}
    for step in run:
        if not isinstance(step, Compute):
            own = msgspec.structs.replace(step, value=value_in_block[step.value])
            moves.setdefault(len(ops), []).append(own)
        elif step.op in op_in_block:
            ops.append(graph.op_index[op_in_block[step.op]])
    end = last_forward_position(problem, ops) + 1  # the block's tangents come when its forward ends
    ops.insert(end, graph.n_forward)
    schedule = schedule_of(problem, ops, solver="blocks")
    if not moves:
        return schedule
    names = [graph.ops[op].name for op in ops]
    steps = _with_moves(schedule.steps, names, _around_tangents(moves, end))
    return msgspec.structs.replace(schedule, steps=tuple(steps))


def _around_tangents(moves: _Moves, end: int) -> _Moves:
    shifted = {at + (at > end): steps for at, steps in moves.items()}
    at_turn = moves.get(end, ())
    # Copies have left the device when forward ends; fetches come once backward has begun.
    first = next((i for i, step in enumerate(at_turn) if isinstance(step, Fetch)), len(at_turn))
    return {**shifted, end: at_turn[:first], end + 1: at_turn[first:]}


def _with_moves(steps: Sequence[Step], names: Sequence[str], moves: _Moves) -> Iterator[Step]:
    at = 0
    for step in steps:
        if isinstance(step, Compute):
            while True:  # `schedule_of` omits runs of live outputs; their moves are due
                yield from moves.get(at, ())
                at += 1
                if names[at - 1] == step.op:
                    break
        yield step
    for left in range(at, len(names) + 1):
        yield from moves.get(left, ())


# A block is rewritten only where the model's graph contains it node by node: else gradients could
# be summed in another order. Two share a compiled step only if they compute the same.


@dataclass
class _DistinctBlock:
    """A block that was traced by itself; `at` has it and all that are equal to it, by path."""

    block: nn.Module
    trace: Trace
    at: dict[str, BlockMatch]


@dataclass
class TracedBlocks:
    pattern: str
    blocks: dict[str, nn.Module]
    whole: Trace
    distinct: list[_DistinctBlock]

    @cached_property
    def of_path(self) -> dict[str, _DistinctBlock]:
        return {path: one for one in self.distinct for path in one.at}


def trace_blocks(
    model: nn.Module, pattern: str, args: tuple[Any, ...], kwargs: Any, **asked: Any
) -> TracedBlocks:
    """Raises `CaptureError` where a block cannot be run by itself to the same bits."""
    blocks = matching_blocks(model, pattern, resolved_device(asked.get("device"), model))
    with watching_calls(model, blocks) as calls:  # only the running model knows a block's inputs
        whole = trace(model, args, kwargs, **asked)
    distinct: list[_DistinctBlock] = []
    for path, recipe in calls.recipes(whole.env).items():
        own = [(name.removeprefix(f"{path}."), n) for name, n in whole.recipe.float_inputs]
        names = {name for name, _ in whole.recipe.float_inputs}
        recipe = dataclasses.replace(
            recipe, float_inputs=tuple((name, n) for name, n in own if name not in names)
        )
        _add_block(distinct, model, path, recipe, whole)
    return TracedBlocks(pattern, blocks, whole, distinct)


def _add_block(
    distinct: list[_DistinctBlock], model: nn.Module, path: str, recipe: Recipe, whole: Trace
) -> None:
    block = model.get_submodule(path)
    for one in distinct:
        if _looks_like(block, recipe, one):  # cheap facts first: matching walks both graphs
            try:
                # What looks alike may still compute something else, or other blocks' parameters.
                match = match_block(one.trace.joint, whole.joint, path)
            except CaptureError:
                continue
            own, of_model = dict(named_state(block)), dict(named_state(model))
            if all(own[name] is of_model[theirs] for name, theirs in match.state_of.items()):
                one.at[path] = match
                return
    # Traced as the whole was, else the nodes of both cannot be equal.
    recipe = dataclasses.replace(recipe, flags=whole.recipe.flags, device=whole.recipe.device)
    traced = trace_recipe(block, recipe)
    match = match_block(traced.joint, whole.joint, path)
    distinct.append(_DistinctBlock(block, traced, {path: match}))


def _looks_like(block: nn.Module, recipe: Recipe, one: _DistinctBlock) -> bool:
    known = one.trace.recipe
    if type(block) is not type(one.block) or recipe.signature.lines() != known.signature.lines():
        return False
    return _state_facts(block) == _state_facts(one.block)


def _state_facts(block: nn.Module) -> list[Any]:
    modes = [(path, module.training) for path, module in block.named_modules()]
    facts = [(t.shape, t.stride(), t.dtype, t.device) for _, t in named_state(block)]
    return [modes, facts, [(name, t.requires_grad) for name, t in named_state(block)]]


_TRIES = 12  # most sizes of the room for the blocks that are tried

_Planned = tuple[dict[str, Schedule], Schedule]  # by block, and of the whole step


class BlocksPlan(msgspec.Struct, frozen=True):
    """A plan for each block that `pattern` names, and the whole step that comes of them."""

    pattern: str
    schedules: dict[str, Schedule]  # by path, each for the block's own graph
    result: Result  # of the whole step as it runs, on one rank
    distinct: int  # blocks that were captured
    links: Links | None = None
    host_bytes: int = 0  # the most at once, of all blocks, as `nvme_bytes`
    nvme_bytes: int = 0
    family: Family | None = None  # over a range of sizes: schedules of the whole step
    head: HeadPlan | None = None  # outside the blocks, in chunks with its loss
    members: tuple[dict[str, Schedule], ...] = ()  # as `schedules`, for each of the family

    def __repr__(self) -> str:
        return (
            f"BlocksPlan({len(self.schedules)} blocks at '{self.pattern}', {self.distinct} "
            f"distinct, {self.result})"
        )


@dataclass(frozen=True)
class BlocksAsked:
    """How blocks are to be planned: over which ranks, in what time, with which pins."""

    sharding: Sharding
    time_limit_s: float
    is_updated: bool = False  # parameters, in backward
    keep: Globs = ()
    recompute: Globs = ()


class BlockPlanner:
    """The step of a model with blocks as units, with costs, on one rank."""

    def __init__(self, traced: TracedBlocks, costed: TrainingGraph, asked: BlocksAsked) -> None:
        self.traced = traced
        self.clock = Clock(asked.time_limit_s)
        matches = {path: traced.of_path[path].at[path] for path in traced.blocks}
        ops_of = {path: list(match.op_of.values()) for path, match in matches.items()}
        self.path_of = {op: path for path, ops in ops_of.items() for op in ops}
        pins = Pins.of(costed, asked.keep, asked.recompute)
        costed, self.again = kept_graph(costed, pins.kept), _inside(pins.again, self.path_of)
        sharding = asked.sharding
        graph, eager = _with_own_buffers(costed, self.path_of), with_eager_sizes(costed)
        of_eager = eager.value_by_name
        # What lies outside the blocks is not rewritten.
        own = (v if v.producer in self.path_of else of_eager[v.name] for v in graph.values)
        graph = msgspec.structs.replace(graph, values=tuple(own))
        self.alone, self.units = with_units(graph, ops_of)
        self.graph = sharded(self.alone, self.units, sharding, is_updated=asked.is_updated)
        # Per cents of a budget are of eager's peak, so its sizes are kept apart.
        self.eager = sharded(*with_units(eager, ops_of), sharding, is_eager=True)
        for op in self.graph.ops:
            if op.target in COMMUNICATION and op.module:
                self.path_of[op.name] = op.module

    @cached_property
    def _shared(self) -> BlockBudgets:
        spans = [(u.start, u.stop, u.back_start, u.back_stop) for u in self.units]
        beside_bytes, left_s = self._communication_bytes(), max(self.clock.left_s, 0.0)
        # What calls of blocks return, no copy may take from the device.
        handed_out = {
            match.value_of[name]
            for one in self.traced.distinct
            for match in one.at.values()
            for name in (*one.trace.graph.forward_outputs, *one.trace.graph.outputs)
            if name in match.value_of
        }
        again = self.again - {
            producer for name in handed_out if (producer := self._producer_of(name))
        }
        return BlockBudgets.of(self.alone, spans, beside_bytes, left_s, handed_out, again)

    def _producer_of(self, value: str) -> str:
        return self.alone.value_by_name[value].producer

    def _communication_bytes(self) -> list[int]:
        """What communication keeps live on a sharded rank, by op of the step without it."""
        if self.graph is self.alone:
            return []
        # Solvers of whole graphs see these buffers as values; the knapsack over blocks does not.
        without, sharded_bytes = _live_bytes(self.alone), _live_bytes(self.graph)
        beside: list[int] = []
        waiting_bytes = 0
        for op in self.graph.ops:
            # Ops of communication are not in the knapsack's graph: the next op counts their peak.
            waiting_bytes = max(waiting_bytes, sharded_bytes[op.name])
            if op.name in without:
                beside.append(waiting_bytes - without[op.name])
                waiting_bytes = 0
        return beside

    def plan(self, budget_bytes: int) -> BlocksPlan:
        began = Clock()
        schedules, schedule = self._fastest(budget_bytes) or self._least()
        result = evaluate_schedule(  # nothing is proved of shares: the bound is every op once
            self.graph, msgspec.structs.replace(schedule, budget_bytes=budget_bytes),
            budget_bytes=budget_bytes, lower_bound_us=self.graph.time_us,
            wall_s=began.elapsed_s, cut_short=self.clock.left_s < 0,
        )  # fmt: skip
        below = (0, 0)
        if schedule.moves:
            found = simulate(self.graph, schedule)
            below = found.host_peak_bytes, found.nvme_peak_bytes
        pattern, distinct = self.traced.pattern, len(self.traced.distinct)
        return BlocksPlan(pattern, schedules, result, distinct, self.graph.links, *below)

    def _fastest(self, budget_bytes: int) -> _Planned | None:
        """The fastest plan tried whose whole step fits; None if none does."""
        room_bytes = budget_bytes - self.graph.resident.total_bytes
        # The knapsack counts by a model, the simulator exactly: bisect until it fits.
        low, high = self._shared.least_room_bytes(), 2 * room_bytes
        best: _Planned | None = None
        best_us = math.inf
        for _ in range(_TRIES):
            if high < low:
                break
            room_bytes = min(max(room_bytes, low), high)
            tried = self._composed(room_bytes)
            found = None if tried is None else simulate(self.graph, tried[1])
            if found is None or found.peak_bytes > budget_bytes:
                high = room_bytes - 1
            else:
                low = room_bytes + 1
                if found.time_us < best_us:
                    best, best_us = tried, found.time_us
            if best_us <= self.graph.time_us * (1 + 1e-9):  # nothing runs twice: no plan is faster
                break
            room_bytes = (low + high) // 2
        return best

    def least_bytes(self) -> int:
        return simulate(self.graph, self._least()[1]).peak_bytes

    def _least(self) -> _Planned:
        tried = self._composed(self._shared.least_room_bytes())
        assert tried is not None
        return tried

    def _composed(self, room_bytes: int) -> _Planned | None:
        if (runs := self._shared.runs(room_bytes)) is None:
            return None
        schedules: dict[str, Schedule] = {}
        steps_of: dict[str, tuple[list[Step], list[Step]]] = {}
        for unit, run in zip(self.units, runs, strict=True):
            path, one = unit.path, self.traced.of_path[unit.path]
            schedules[path] = _block_schedule(one.trace.graph, one.at[path], run)
            steps_of[path] = self._steps_in_model(path, one, schedules[path])
        return schedules, assembled(self.graph, steps_of, self.path_of)

    def _steps_in_model(
        self, path: str, one: _DistinctBlock, schedule: Schedule
    ) -> tuple[list[Step], list[Step]]:
        match = one.at[path]
        halves: tuple[list[Step], list[Step]] = self._added(path, BEFORE_BLOCK)
        half = halves[0]
        for step in schedule.steps:
            if not isinstance(step, Compute):
                half.append(msgspec.structs.replace(step, value=match.value_of[step.value]))
            elif step.op in match.op_of:
                half.append(Compute(match.op_of[step.op]))
            else:
                half = halves[1]  # the model's graph lacks the op of the tangents alone
        behind = self._added(path, BEHIND_BLOCK)
        return [*halves[0], *behind[0]], [*halves[1], *behind[1]]

    def _added(self, path: str, targets: Sequence[str]) -> tuple[list[Step], list[Step]]:
        added: tuple[list[Step], list[Step]] = [], []
        for op in self.graph.ops:
            if op.module == path and op.target in targets:
                added[op.phase == "backward"].append(Compute(op.name))
        return added


def _inside(again: Mapping[str, str], path_of: Mapping[str, str]) -> set[str]:
    """The ops to run again; a glob names modules inside blocks, or nothing of it would run."""
    inside = {glob for op, glob in again.items() if op in path_of}
    if outside := [glob for glob in again.values() if glob not in inside]:
        raise SolverError(
            f"name modules inside the blocks: recompute '{outside[0]}' names none, and what lies "
            "outside them runs as in the model"
        )
    return {op for op in again if op in path_of}


def _live_bytes(graph: TrainingGraph) -> dict[str, int]:
    """By op, if every op runs once."""
    schedule = StoreAll().schedule(graph)
    steps = zip(schedule.steps, simulate(graph, schedule).live_bytes, strict=True)
    return {step.op: size for step, size in steps if isinstance(step, Compute)}


def _with_own_buffers(graph: TrainingGraph, path_of: Mapping[str, str]) -> TrainingGraph:
    value_of = graph.value_by_name
    # A rewritten block writes its new buffers as its own forward ends, not as the model's does.
    of_blocks = {name for name in graph.forward_outputs if value_of[name].producer in path_of}
    dropped = of_blocks.difference(graph.outputs)
    kept = tuple(name for name in graph.forward_outputs if name not in dropped)
    return msgspec.structs.replace(graph, forward_outputs=kept)
