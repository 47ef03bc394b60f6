"""What one block can do: bytes kept from forward to backward against extra time.

Source: the option tables of Rockmate (Zhao et al. 2023, https://arxiv.org/abs/2307.01236),
which solves each block at a grid of budgets. Here the program of one cut
(`bounds/cut_program`) does it, in place of Checkmate's. The block becomes a small training
graph: what it reads from outside is there for free, and what others read of it stays. Between
its forward and its backward stands a turn, an op at no cost. Only what the block keeps is live
there, so a cut at the turn gives the least recomputation for each limit on the bytes kept. A
second option for each limit has a lower peak, by repair. Keep all and keep the least are always
among the options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from remat.graph_capture.graph import TANGENTS, Op, TrainingGraph
from remat.schedules.schedule import Step
from remat.solver.backends.mip import Limits
from remat.solver.blocks.repeated import Block, Reads
from remat.solver.bounds.cut_program import CutProgram, expand
from remat.solver.local_search.repair import Repair
from remat.solver.problem import Problem, largest_working_set_bytes
from remat.solver.search import Search
from remat.solver.state import State, recomputed_in
from remat.solver.stopping import BLOCK_NODES
from remat.solver.store_all import store_all_state

GAP = 2.0
"""Absolute gap of each program, in ten-thousandths of the block's time."""
_LOW_PEAK = 0.5
"""How far a low-peak option goes: this share of the way from its peak to the least possible."""

LowerBytes = tuple[int, int]
"""Bytes on the host, and on NVMe."""
NO_LOWER_BYTES: LowerBytes = (0, 0)


@dataclass(frozen=True, slots=True)
class BlockOption:
    # Of its values that are live from its forward to its backward.
    saved_bytes: int
    # The most in each stage of the block's graph: its values, and the workspaces of its ops.
    live_bytes: npt.NDArray[np.int64]
    extra_us: float  # of recomputations and waits for copies
    recomputed: tuple[tuple[int, ...], ...]  # by stage of the block's graph
    # Only where values are copied below the device.
    steps: tuple[Step, ...] = ()
    # There from the block's forward to its backward.
    below_bytes: LowerBytes = NO_LOWER_BYTES
    # The most on the host beyond those, of values on their way.
    passing_bytes: int = 0

    def is_no_worse(self, other: BlockOption) -> bool:
        is_cheap = self.saved_bytes <= other.saved_bytes and self.extra_us <= other.extra_us
        mine = *self.below_bytes, self.passing_bytes
        theirs = *other.below_bytes, other.passing_bytes
        is_low = all(a <= b for a, b in zip(mine, theirs, strict=True))
        return is_cheap and is_low and bool((self.live_bytes <= other.live_bytes).all())


Options = tuple[BlockOption, ...]


def block_graph(problem: Problem, reads: Reads, block: Block) -> TrainingGraph:
    graph, names = problem.graph, problem.names
    ops = [graph.ops[op] for op in block.ops]
    # The turn costs nothing, and only what the block keeps is live there: a cut at it gives the
    # least recomputation for each limit on the bytes kept.
    ops.insert(block.stop - block.start, Op("turn", TANGENTS, "backward", (), ()))
    made = dict.fromkeys(name for op in ops for name in op.outputs)
    read = dict.fromkeys(name for op in ops for name in op.inputs if name not in made)
    value_of = graph.value_by_name
    # What is read from outside is there for free.
    outside = [msgspec.structs.replace(value_of[name], producer="") for name in read]
    return TrainingGraph(
        name=graph.name,
        ops=tuple(ops),
        values=(*outside, *(value_of[name] for name in made)),
        forward_outputs=tuple(names[v] for v in reads.held_by(problem, block)),
        outputs=tuple(names[v] for v in reads.left_by(problem, block)),
    )


def block_options(graph: TrainingGraph, limits: int, left_s: Callable[[], float]) -> Options:
    """None is no better than another, dearest last; where time ends, there are fewer."""
    problem = Problem.of(graph)
    found: list[BlockOption] = []
    # Before any program, so that a block has options even without time.
    for state in (store_all_state(problem), _keep_least(problem)):
        _add(found, state)
    most_bytes, least_bytes = (option.saved_bytes for option in (found[0], found[-1]))
    for i in range(1, limits if most_bytes > least_bytes else 0):
        if left_s() <= 0:
            break
        state = _keep(problem, most_bytes - (most_bytes - least_bytes) * i // limits, left_s())
        if state is not None:
            _add(found, state)
    for option in tuple(found):
        lower = _with_lower_peak(problem, option, left_s())
        if lower is not None:
            _add(found, lower)
    return tuple(sorted(found, key=lambda option: (option.extra_us, option.saved_bytes)))


def _add(found: list[BlockOption], state: State) -> None:
    option = _option_of(state)
    if not any(other.is_no_worse(option) for other in found):
        found[1:] = [other for other in found[1:] if not option.is_no_worse(other)]
        found.append(option)


def _option_of(state: State) -> BlockOption:
    turn = state.problem.n_forward
    live_bytes = state.peak_bytes.copy()
    # `_with_lower_peak` gives the turn a workspace that is not the block's.
    live_bytes[turn] -= state.problem.workspace_bytes[turn]
    return BlockOption(
        saved_bytes=int(state.entry_bytes[turn + 1]),
        live_bytes=live_bytes,
        extra_us=state.cost_us,
        recomputed=tuple(stage.recomputed for stage in state.stages),
    )


def _keep(problem: Problem, limit_bytes: int, left_s: float) -> State | None:
    program = CutProgram(problem, (problem.n_forward,), limit_bytes)
    limits = Limits(time_limit_s=left_s, absolute_gap=GAP, node_limit=BLOCK_NODES.most)
    solution = program.solve(limits)
    if solution.values is None:
        return None
    return State.from_recomputed(problem, expand(solution))


def _keep_least(problem: Problem) -> State:
    """Keep only what others read and what cannot be made again; recompute the rest once."""
    available = bytearray(problem.n_values)
    for v, op in enumerate(problem.producer):
        available[v] = v in problem.held or problem.no_recompute[op]
    recomputed: list[Sequence[int]] = []
    for t in range(problem.n_ops + 1):
        again = recomputed_in(problem, available, (), t) if t > problem.n_forward else []
        recomputed.append(again)
        for op in (*again, t) if problem.n_forward < t < problem.n_ops else again:
            for v in problem.outputs[op]:
                available[v] = 1
    return State.from_recomputed(problem, recomputed)


def _with_lower_peak(problem: Problem, option: BlockOption, left_s: float) -> State | None:
    """The option repaired to a lower peak, with no more kept; None if that fails."""
    floor = largest_working_set_bytes(problem)
    peak_bytes = int(option.live_bytes.max())
    limit_bytes = peak_bytes - int(_LOW_PEAK * (peak_bytes - max(floor, option.saved_bytes)))
    if limit_bytes >= peak_bytes or left_s <= 0:
        return None
    ops = list(problem.graph.ops)
    turn = ops[problem.n_forward]
    # All but what the option keeps is taken at the turn, so the repair keeps no more.
    ops[problem.n_forward] = msgspec.structs.replace(
        turn, workspace_bytes=limit_bytes - option.saved_bytes
    )
    graph = msgspec.structs.replace(problem.graph, ops=tuple(ops))
    search = Search(graph, limit_bytes, "hierarchical", left_s)
    state = State.from_recomputed(search.problem, option.recomputed)
    return state if Repair(state, limit_bytes, 1.0, search).run() else None
