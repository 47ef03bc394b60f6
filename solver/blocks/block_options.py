"""What one block can do, bytes kept against extra time; and the choice of one option a block.

Source: the option tables of Rockmate (Zhao et al. 2023, https://arxiv.org/abs/2307.01236), here by
the program of one cut, at the turn between the block's forward and backward: only what the block
keeps is live there. Repair adds an option of lower peak for each. Keep all and keep the least are
always among the options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from remat.graph_capture.graph import TANGENTS, Floats, Op, TrainingGraph
from remat.schedules.schedule import Step
from remat.solver.backends.mip import Limits
from remat.solver.blocks.repeated import Block, Reads
from remat.solver.bounds.cut_program import CutProgram, expand
from remat.solver.local_search.repair import Repair
from remat.solver.problem import Problem, largest_working_set_bytes
from remat.solver.search import Search
from remat.solver.state import State, mark_made, recomputed_in, store_all_state
from remat.solver.stopping import BLOCK_NODES

GAP = 2.0  # absolute gap of each program, in ten-thousandths of the block's time
_LOW_PEAK = 0.5  # how far a low-peak option goes from its peak to the least possible

LowerBytes = tuple[int, int]  # bytes on the host, and on NVMe
NO_LOWER_BYTES: LowerBytes = (0, 0)


@dataclass(frozen=True, slots=True)
class BlockOption:
    saved_bytes: int  # of its values that are live from its forward to its backward
    live_bytes: npt.NDArray[np.int64]  # in each stage of its graph: values and workspaces
    extra_us: float  # of recomputations and waits for copies
    recomputed: tuple[tuple[int, ...], ...]  # by stage of the block's graph
    steps: tuple[Step, ...] = ()  # only where values are copied below the device
    below_bytes: LowerBytes = NO_LOWER_BYTES  # there from the block's forward to its backward
    passing_bytes: int = 0  # the most on the host beyond those, of values on their way

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


def block_options(
    graph: TrainingGraph, limits: int, left_s: Callable[[], float], again: Set[int] = frozenset()
) -> Options:
    """None is no better than another, dearest last; where time ends, there are fewer. The first
    makes only the ops of `again` once more."""
    problem = Problem.of(graph)
    found: list[BlockOption] = []
    first = _keep_least(problem, again) if again else store_all_state(problem)
    # First, so that a block has options even without time.
    for state in (first, _keep_least(problem)):
        _add(found, state)
    most_bytes, least_bytes = (option.saved_bytes for option in (found[0], found[-1]))
    for i in range(1, limits if most_bytes > least_bytes else 0):
        if left_s() <= 0:
            break
        limit_bytes = most_bytes - (most_bytes - least_bytes) * i // limits
        program = CutProgram(problem, (problem.n_forward,), limit_bytes)
        solution = program.solve(Limits(left_s(), absolute_gap=GAP, node_limit=BLOCK_NODES))
        if solution.values is not None:
            _add(found, State.from_recomputed(problem, expand(solution)))
    for option in tuple(found):
        if (lower := _with_lower_peak(problem, option, left_s())) is not None:
            _add(found, lower)
    return tuple(sorted(found, key=lambda option: (option.extra_us, option.saved_bytes)))


def that_run_again(graph: TrainingGraph, again: Set[int]) -> set[int]:
    """Those of `again` that backward needs a second time where what they made is not kept."""
    stages = _keep_least(Problem.of(graph), again).stages
    return {op for stage in stages for op in stage.recomputed}


def _add(found: list[BlockOption], state: State) -> None:
    turn = state.problem.n_forward
    live_bytes = state.peak_bytes.copy()
    live_bytes[turn] -= state.problem.workspace_bytes[turn]  # that is not the block's
    recomputed = tuple(stage.recomputed for stage in state.stages)
    option = BlockOption(int(state.entry_bytes[turn + 1]), live_bytes, state.cost_us, recomputed)
    if not any(other.is_no_worse(option) for other in found):
        found[1:] = [other for other in found[1:] if not option.is_no_worse(other)]
        found.append(option)


def _keep_least(problem: Problem, again: Set[int] | None = None) -> State:
    """Keep only what others read and what cannot be made again; recompute the rest once, or of it
    the ops of `again`."""
    available = bytearray(problem.n_values)
    for v, op in enumerate(problem.producer):
        stays = again is not None and op not in again
        available[v] = stays or v in problem.held or problem.no_recompute[op]
    recomputed: list[Sequence[int]] = []
    for t in range(problem.n_ops + 1):
        runs = recomputed_in(problem, available, (), t) if t > problem.n_forward else []
        recomputed.append(runs)
        ran = (*runs, t) if problem.n_forward < t < problem.n_ops else runs
        mark_made(problem, available, ran)
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
    taken_bytes = limit_bytes - option.saved_bytes  # taken at the turn, so repair keeps no more
    ops[problem.n_forward] = msgspec.structs.replace(turn, workspace_bytes=taken_bytes)
    graph = msgspec.structs.replace(problem.graph, ops=tuple(ops))
    search = Search(graph, limit_bytes, "hierarchical", left_s)
    state = State.from_recomputed(search.problem, option.recomputed)
    return state if Repair(state, limit_bytes, 1.0, search).run() else None


# One option a block: a multiple-choice knapsack, by dynamic programming. When a block's backward
# runs, only gradients and outputs of later blocks are left: it needs what those before it keep, and
# itself, within the room. Each tier whose room binds is a coordinate more. Optimal on the grid.
# Cost: blocks x options x slots, times `_BELOW_SLOTS` for such a tier.

_BELOW_SLOTS = 64  # steps of the grid of a tier below the device
PlacedBlock = tuple[Block, Options]  # in its place, with the options that it shares with its equals


class BlockChoice(NamedTuple):
    saved_bytes: int
    need_bytes: int  # most live while the block runs, but for what blocks before it keep
    extra_us: float
    below_bytes: LowerBytes = NO_LOWER_BYTES  # on the host, on NVMe


def choices_in_place(
    problem: Problem, layers: Sequence[PlacedBlock], beside_bytes: Sequence[int] = ()
) -> list[list[BlockChoice]]:
    """Options in place; `beside_bytes` are live beside each op, in no block's own graph."""
    # For each stage what blocks that are done leave live: gradients, outputs.
    change, last = [0] * (problem.n_ops + 2), problem.last_need
    for block, _ in layers:
        for v in (v for op in block.ops for v in problem.outputs[op]):
            if last[v] >= block.back_stop:
                change[block.back_stop] += problem.size_bytes[v]
                change[last[v] + 1] -= problem.size_bytes[v]
    fixed = np.array(list(accumulate(change)), np.int64)
    fixed[: len(beside_bytes)] += np.array(beside_bytes, np.int64)
    return [_choices(block, table, fixed) for block, table in layers]


def _choices(block: Block, table: Options, fixed: npt.NDArray[np.int64]) -> list[BlockChoice]:
    beside = fixed[stages_of_block(block)]
    beside[-1] = beside[-2]  # what the block itself leaves is in its `live_bytes` already
    needs = (int((option.live_bytes + beside).max()) for option in table)
    return [
        BlockChoice(option.saved_bytes, need_bytes, option.extra_us, option.below_bytes)
        for option, need_bytes in zip(table, needs, strict=True)
    ]


def stages_of_block(block: Block) -> list[int]:
    """The graph's stage for each stage of the block's graph, its turn and end included."""
    forward, backward = range(block.start, block.stop), range(block.back_start, block.back_stop)
    return [*forward, block.back_start, *backward, block.back_stop]


_Tables = Sequence[Sequence[BlockChoice]]


def compose(
    choices: _Tables, room_bytes: int, slots: int, below_bytes: LowerBytes = NO_LOWER_BYTES
) -> list[int] | None:
    """One choice a block, of least extra time; None if nothing fits."""
    if room_bytes < 0 or min(below_bytes) < 0:
        return None
    grid = _Grid.of(choices, room_bytes, slots, below_bytes)
    best_us = np.full(grid.shape, np.inf)
    best_us[0, 0, 0] = 0.0
    steps: list[npt.NDArray[np.int16]] = []
    for table in choices:
        following = np.full_like(best_us, np.inf)
        step = np.full(grid.shape, -1, np.int16)  # small numbers: the way back needs a grid a block
        for i, choice in enumerate(table):
            shift = grid.shift(choice)
            ends = [size - by for size, by in zip(grid.shape, shift, strict=True)]
            # What it needs fits beside what blocks before it keep.
            ends[0] = min(ends[0], (room_bytes - choice.need_bytes) // grid.units[0] + 1)
            if min(ends) <= 0:
                continue
            reached = best_us[: ends[0], : ends[1], : ends[2]] + choice.extra_us
            part = tuple(slice(by, by + end) for by, end in zip(shift, ends, strict=True))
            better = reached < following[part]
            following[part][better] = reached[better]
            step[part][better] = i
        steps.append(step)
        best_us = following
    return _traced(choices, steps, best_us, grid)


class _Grid(NamedTuple):
    """The steps of device, host and NVMe, in bytes, and how many places each has."""

    units: tuple[int, int, int]
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, choices: _Tables, room_bytes: int, slots: int, below_bytes: LowerBytes) -> _Grid:
        unit = max(-(-room_bytes // slots), 1)
        units, shape = [unit], [room_bytes // unit + 1]
        for tier, most_bytes in enumerate(below_bytes):
            wanted = sum(max(choice.below_bytes[tier] for choice in table) for table in choices)
            unit = max(-(-most_bytes // _BELOW_SLOTS), 1)  # one place is enough where all fits
            units.append(unit if wanted > most_bytes else 0)
            shape.append(most_bytes // unit + 1 if wanted > most_bytes else 1)
        return cls((units[0], units[1], units[2]), (shape[0], shape[1], shape[2]))

    def shift(self, choice: BlockChoice) -> tuple[int, int, int]:
        host_bytes, nvme_bytes = choice.below_bytes
        sizes = choice.saved_bytes, host_bytes, nvme_bytes
        pairs = zip(sizes, self.units, strict=True)  # up: what fits the grid fits in bytes
        first, second, third = (-(-size // unit) if unit else 0 for size, unit in pairs)
        return first, second, third


def _traced(
    choices: _Tables, steps: Sequence[npt.NDArray[np.int16]], best_us: Floats, grid: _Grid
) -> list[int] | None:
    place = tuple(int(at) for at in np.unravel_index(int(np.argmin(best_us)), grid.shape))
    if not np.isfinite(best_us[place]):
        return None
    chosen: list[int] = []
    for table, step in zip(reversed(choices), reversed(steps), strict=True):
        chosen.append(int(step[place]))
        shift = grid.shift(table[chosen[-1]])
        place = tuple(at - by for at, by in zip(place, shift, strict=True))
    return chosen[::-1]
