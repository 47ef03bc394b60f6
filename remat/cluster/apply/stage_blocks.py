"""The blocks of a stage, rewritten one by one to the recomputation that their place has room for.

A plan says how many bytes of each GPU its activations may take. Blocks are traced here as this rank
runs them, split over tensor parallel ranks and in the dtype of the step, and the same program that
made the plan chooses their recomputation within those bytes. A stage as one autograd node would
hold all its weight gradients until it returns; so each block is rewritten by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace
from torch import nn

from remat.checks import Batch, require_equal
from remat.cluster.capture.rank_graph import border_value, planned_graph
from remat.cluster.model_part import Arrival, drawn_like
from remat.cluster.parts import EqualBlocks, Limit, Part, PartOption, part_of
from remat.cluster.pipeline_replay import RUNNING, SAVED_ACTIVATIONS
from remat.cluster.plan_file import ClusterFile, StageFacts
from remat.formats import bytes_text
from remat.graph_capture.costs.op_costs import measured_workspaces
from remat.graph_capture.costs.roofline import model_costs
from remat.graph_capture.devices.known_devices import links_between_ranks
from remat.graph_capture.distributed.collectives import is_collective_target
from remat.graph_capture.errors import CaptureError, FloatInputError, PlanError
from remat.graph_capture.graph import TANGENTS, TrainingGraph
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.trace import trace
from remat.graph_capture.tracing.traced_step import Trace
from remat.rewriter.rewriting import module_for
from remat.rewriter.user_module.own_forward import shell_running
from remat.schedules.schedule import Compute, Schedule
from remat.schedules.simulate import simulate
from remat.solver.problem import Problem
from remat.solver.state import State

# A model may give its blocks numbers of Python's, such as a rate that a schedule moves. A plan
# would hold them to the values of its first batch. So a block is traced with them as attributes of
# its own, which each step reads anew (`float_inputs`).

_Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class _GivenNumbers:
    """Names of attributes by the place of a number among the leaves of a block's call."""

    names: Mapping[int, str]

    def taken_out(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """A hook before forward: the module has the numbers, and the call none."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for place, name in self.names.items():
            if place < len(leaves) and isinstance(leaves[place], float):
                module.__dict__[name], leaves[place] = leaves[place], None
        return pytree.tree_unflatten(leaves, spec)


def _traced_with_numbers(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[nn.Module, Trace, _GivenNumbers]:
    """What was traced, without the numbers that its steps read anew."""
    leaves = pytree.tree_leaves((args, kwargs))
    # Torch may run other ops for 0 than for all else.
    places = [i for i, leaf in enumerate(leaves) if type(leaf) is float and leaf]
    if places:
        numbers = _GivenNumbers({place: f"given_number_{place}" for place in places})
        one, names = _reading(block, numbers), tuple(numbers.names.values())
        # Where one cannot be read anew, a step with another is refused.
        with contextlib.suppress(FloatInputError):
            call = numbers.taken_out(one, args, kwargs)
            return one, trace(one, *call, float_inputs=names, split="none"), numbers
    return block, trace(block, args, kwargs, split="none"), _GivenNumbers({})


def _reading(block: nn.Module, numbers: _GivenNumbers) -> nn.Module:
    """A copy of a block, one deep, whose forward reads its numbers off the module."""
    kind, names = type(block), numbers.names

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for place, name in names.items():
            if place < len(leaves) and leaves[place] is None:
                leaves[place] = getattr(self, name)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return kind.forward(self, *args, **kwargs)

    return shell_running(block, forward)


@dataclass(frozen=True)
class _TracedBlock:
    """A block as this rank runs it; `graph` is as a planner of clusters takes it."""

    module: nn.Module
    trace: Trace
    graph: TrainingGraph
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    numbers: _GivenNumbers


@dataclass
class StageBlocks:
    """By path, the blocks of a rank and what was chosen; `schedules` are of the traced graphs."""

    traced: dict[str, _TracedBlock]
    options: dict[str, PartOption] = field(default_factory=dict[str, PartOption])
    schedules: dict[str, Schedule] = field(default_factory=dict[str, Schedule])
    is_rewritten: bool = False

    def rewritten(self) -> dict[str, nn.Module]:
        """Modules that follow the schedules; `RewriteError` where one has not eager's bits."""
        made: dict[str, nn.Module] = {}
        self.is_rewritten = True
        compared: set[tuple[str, Any]] = set()
        for path, one in self.traced.items():
            how = self.schedules[path]
            fast = made[path] = module_for(one.module, how, one.trace, None, None, audit="block")
            key = one.graph.hash, how.steps
            # One stands for all blocks of its graph and schedule, which run the same code.
            if key not in compared:
                compared.add(key)
                batch = Batch(one.args, one.kwargs, None, None, "none", False)
                require_equal(one.module, fast, batch, None)
            if one.numbers.names:
                fast.register_forward_pre_hook(one.numbers.taken_out, with_kwargs=True)
        return made


def traced_blocks(
    blocks: Mapping[str, nn.Module], plan: ClusterFile, given: Arrival, first_path: str,
    *, has_input_gradient: bool,
) -> StageBlocks:  # fmt: skip
    """Trace each block of a rank; `given` is the call of the model's first one."""
    links = replace(links_between_ranks(plan.device), node_size=plan.node_size)
    found: dict[str, _TracedBlock] = {}
    for path, block in blocks.items():
        # Only the first block may be without a gradient of what it reads, where nothing before it
        # trains.
        is_trained = has_input_gradient or path != first_path
        args = drawn_like(given.border, 0).requires_grad_(is_trained), *given.args_
        try:
            one, traced, numbers = _traced_with_numbers(block, args, given.kwargs)
        except CaptureError as error:
            raise CaptureError(f"block {path}: {error}").caused_by(error) from None
        # Times as planned, bytes as they are here.
        graph = with_own_sizes(model_costs(traced, plan.device, ranks=links), traced)
        graph = planned_graph(graph, border_value(traced))
        call = numbers.taken_out(one, args, given.kwargs)
        found[path] = _TracedBlock(one, traced, graph, *call, numbers)
    return StageBlocks(found)


def with_own_sizes(graph: TrainingGraph, traced: Trace) -> TrainingGraph:
    # A collective that one rank runs to measure it would wait for the others.
    names = [op.name for op in graph.ops if not is_collective_target(op.target)]
    known = measured_workspaces(traced, names)
    ops = (replace(op, workspace_bytes=known.get(op.name, op.workspace_bytes)) for op in graph.ops)
    return replace(graph, ops=tuple(ops), values=traced.graph.values)


def choose(blocks: StageBlocks, plan: ClusterFile, number: int, in_flight: float) -> None:
    """Choose each block's recomputation; `PlanError` where the plan leaves the stage too little."""
    part_by_hash: dict[str, Part] = {}
    for one in blocks.traced.values():
        if one.graph.hash not in part_by_hash:
            part_by_hash[one.graph.hash] = part_of(one.graph)
    # The first block may lack the gradient of its input; the last one stands for the rest.
    usual = part_by_hash[list(blocks.traced.values())[-1].graph.hash]
    picked = _picked(usual, plan, number, len(blocks.traced), in_flight)
    for path, limit in zip(blocks.traced, picked, strict=True):
        one = blocks.traced[path]
        part = part_by_hash[one.graph.hash]
        option = limit if part is usual else _within(part, limit, path, number)
        blocks.options[path] = option
        # The traced graph lacks the op that makes the border, which is the first, and a stage of
        # its own.
        without = [tuple(op - 1 for op in again) for again in option.recomputed[1:]]
        state = State.from_recomputed(Problem.of(one.trace.graph), without)
        blocks.schedules[path] = state.schedule()


def _picked(part: Part, plan: ClusterFile, number: int, n: int, flight: float) -> list[PartOption]:
    """For each of n blocks, those with most recomputation first."""
    room, beside = _left_to_blocks(plan, plan.stages[number])
    table = EqualBlocks(part.options, sum(plan.layers_per_stage))
    try:
        chosen = table.chosen(n, [Limit(np.array([room]), flight)], beside)
    except ValueError as error:
        least = min(flight * n * o.saved_bytes + o.need_bytes for o in part.options)
        raise PlanError(
            "plan again with a larger --budget, a smaller --microbatch, or more stages: the "
            f"blocks of stage {number} need {bytes_text(int(least))} for activations here, and "
            f"the plan leaves them {bytes_text(room)}"
        ) from error
    # Options come quickest first.
    return [part.options[i] for i in sorted(chosen, reverse=True) for _ in range(chosen[i])]


def _left_to_blocks(plan: ClusterFile, stage: StageFacts) -> tuple[int, int]:
    """Room for blocks, and what runs beside all that they save; 0 where a block needs more."""
    used = ((i, plan.schedules[i]) for i in stage.schedules)
    figures = {i: figures_of(plan.graphs[one.graph], one.schedule) for i, one in used}
    saved, needed = stage.held_bytes[SAVED_ACTIVATIONS], stage.held_bytes[RUNNING]
    by_blocks = sum(count * figures[i].saved_bytes for i, count in stage.schedules.items())
    # The plan's embedding and head save all that its blocks do not.
    by_ends = max(saved - int(stage.microbatches_in_flight * by_blocks), 0)
    # Only what the blocks' recomputation decides is theirs.
    fixed = sum(stage.held_bytes.values()) - saved - needed
    is_of_ends = needed > max((one.need_bytes for one in figures.values()), default=0)
    return plan.budget_bytes - fixed - by_ends, needed if is_of_ends else 0


def figures_of(graph: TrainingGraph, schedule: Schedule) -> PartOption:
    """Bytes that a schedule of a part saves and needs, as the simulator finds them."""
    found = simulate(graph, schedule)
    turn = next(op for op in graph.ops if op.target == TANGENTS)
    made_bytes = sum(graph.value_by_name[name].size_bytes for name in turn.outputs)
    at = schedule.steps.index(Compute(turn.name))
    # What the turn makes, the tangents, is there while backward runs, not while it is waited for.
    saved = int(found.live_bytes[at]) - made_bytes - graph.resident.total_bytes
    need = int(found.peak_bytes) - graph.resident.total_bytes - saved
    return PartOption(saved, need, found.time_us - graph.time_us)


def _within(part: Part, limit: PartOption, path: str, number: int) -> PartOption:
    """The quickest option of a block unlike the others that takes no more than theirs."""
    fitting = [o for o in part.options if o.saved_bytes <= limit.saved_bytes]
    if not fitting:
        raise PlanError(
            f"plan again with a larger --budget: block {path} of stage {number} saves more than "
            f"the {bytes_text(limit.saved_bytes)} that the plan leaves it"
        )
    return min(fitting, key=lambda option: (option.extra_us, option.need_bytes))
