"""Solve each distinct block of a repetitive graph once, and compose by a knapsack over blocks.

Also called: hierarchical rematerialisation, Rockmate, HiRemate.
Paper: X. Zhao, T. Le Hellard, L. Eyraud-Dubois, J. Gusak, O. Beaumont, "Rockmate: an
Efficient, Fast, Automatic and Generic Tool for Re-materialization in PyTorch", 2023,
https://arxiv.org/abs/2307.01236; HiRemate (J. Gusak et al., ICML 2025) nests it.
Solves: the least extra time over one option for each block, where all that the blocks
before one keep, what is live beside it, and the block itself while it runs fit together;
bytes kept are rounded up to a grid. The options of equal blocks (`repeated`) are found once
(`block_options`). Values between blocks stay, as in Rockmate's options. Rockmate's chain step may
recompute whole blocks; here, if nothing fits, blocks are taken in groups, and values inside a
group may go. The schedule is then filled with what fits.
Optimal: for its tables, up to the grid; not for the graph, so no bound is claimed.
Cost: the options of each distinct block, then one pass over the grid for each block and
option; near-linear.
Shortcomings: refuses graphs without repeated blocks; no recomputation across blocks; one
recomputation an op in most options; weak where few, large blocks are most of the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from remat.graph_capture.graph import TrainingGraph, cached_on
from remat.schedules.outcome import Result
from remat.solver.blocks.block_options import (
    BlockOption,
    Options,
    PlacedBlock,
    block_graph,
    block_options,
    choices_in_place,
    compose,
    stages_of_block,
)
from remat.solver.blocks.repeated import Block, Reads, Shape, find_blocks, shape_of
from remat.solver.local_search.repair import Repair, offer_filled
from remat.solver.problem import Problem, least_needed_bytes
from remat.solver.search import Listener, Search, check_least
from remat.solver.state import State, store_all_state

_GROUPS = (1, 2, 4)  # repetitions in one block, tried in turn until something fits
_PARTS = (1.0, 0.99, 0.97, 0.94, 0.9, 0.85)  # of the room: the knapsack's memory is a model


@dataclass(frozen=True)
class Hierarchical:
    """Solver for graphs of repeated blocks.

    Attributes
    ----------
    limits : how many limits on the bytes that it keeps each block is solved for.
    slots : steps of the grid of bytes on which blocks are composed.
    """

    limits: int = 12
    slots: int = 4096
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        check_least(1, limits=self.limits)
        check_least(16, slots=self.slots)

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        return Search.of(self, "hierarchical", graph, budget_bytes).result_of(self._run)

    def first(self, search: Search, *, is_thorough: bool) -> None:
        """Offer blocks of one repetition; if `is_thorough`, go on as `solve` does."""
        message = search.message  # the caller's message is about its own search, not about blocks
        if is_thorough:
            self._run(search)
        elif (layers := self._layers(search, 1)) is not None:
            self._compose(search, layers)
        search.message = message

    def least_states(self, search: Search) -> Iterator[State]:
        message = search.message
        for group in _GROUPS:
            layers = None if search.out_of_time() else self._layers(search, group)
            search.message = message
            if layers is None or search.out_of_time():
                return
            yield _least_state(search.problem, layers)

    def _run(self, search: Search) -> None:
        if search.offer_least(store_all_state(search.problem)):
            return
        starts: list[State] = []
        for group in _GROUPS:
            layers = self._layers(search, group)
            if layers is None or search.out_of_time():
                break
            if self._compose(search, layers):
                return
            starts.append(_least_state(search.problem, layers))
            search.offer_least(starts[-1])
        if least_needed_bytes(search.problem) > search.budget_bytes:
            search.proved_infeasible = True
            return
        # The one nearest to the budget first.
        for start in sorted(starts, key=lambda state: int(state.peak_bytes.max())):
            search.say("repairing the schedule that keeps least")
            if Repair(start, search.budget_bytes, 1.0, search).run():
                _fill(search, start)
                return

    def _layers(self, search: Search, group: int) -> list[PlacedBlock] | None:
        """The blocks of `group` repetitions with their options; None where none repeats."""
        search.say(f"looking for blocks of {group} repetitions")
        reads = Reads.of(search.problem)
        blocks = find_blocks(search.problem, reads, group)
        shapes = [shape_of(search.problem, reads, block) for block in blocks]
        counts = Counter(shapes)
        if len(counts) == len(shapes):
            search.message = search.message or "no repeated block: the solver 'cut' needs none"
            return None
        repeated = sum(count for count in counts.values() if count > 1)
        text = f"{len(shapes)} blocks, {repeated} of them repeated, {len(counts)} distinct"
        search.message = search.message or text
        blocks_by_shape: dict[Shape, Block] = {}
        for block, shape in zip(blocks, shapes, strict=True):
            blocks_by_shape.setdefault(shape, block)
        tables = self._tables(search, reads, blocks_by_shape)
        return [(block, tables[shape]) for block, shape in zip(blocks, shapes, strict=True)]

    def _tables(
        self, search: Search, reads: Reads, blocks: dict[Shape, Block]
    ) -> dict[Shape, Options]:
        known = cached_on(search.graph, f"options at {self.limits}", dict[Shape, Options])
        found: dict[Shape, Options] = {}
        for shape, block in blocks.items():
            if shape not in known:
                search.say(f"solving the block from {search.graph.ops[block.start].name} on")
                small = block_graph(search.problem, reads, block)
                found[shape] = block_options(small, self.limits, lambda: search.left_s)
                if search.left_s > 0:  # else the clock cut this table short
                    known[shape] = found[shape]
        return known | found

    def _compose(self, search: Search, layers: Sequence[PlacedBlock]) -> bool:
        """Choose, expand, judge, fill; returns whether something fits."""
        search.say("composing the blocks")
        choices = choices_in_place(search.problem, layers)
        room_bytes = search.budget_bytes - search.problem.resident_bytes
        for part in _PARTS:
            chosen = compose(choices, int(part * room_bytes), self.slots)
            if chosen is None or search.out_of_time():  # smaller parts fit nothing either
                return False
            picked = [table[i] for (_, table), i in zip(layers, chosen, strict=True)]
            state = _expanded(search.problem, layers, picked)
            if search.offer(state):
                _fill(search, state)
                return True
        return False


def _expanded(
    problem: Problem, layers: Sequence[PlacedBlock], picked: Sequence[BlockOption]
) -> State:
    recomputed: list[list[int]] = [[] for _ in range(problem.n_ops + 1)]
    # Backward runs the last block first, and so does a stage that two blocks share.
    for (block, _), option in reversed(list(zip(layers, picked, strict=True))):
        n_forward = block.stop - block.start
        for stage, again in zip(stages_of_block(block), option.recomputed, strict=True):
            for op in again:
                place = block.start + op
                if op > n_forward:  # ops behind the turn, which is no op of the step
                    place = block.back_start + op - n_forward - 1
                recomputed[stage].append(place)
    return State.from_recomputed(problem, recomputed)


def _least_state(problem: Problem, layers: Sequence[PlacedBlock]) -> State:
    least = [
        min(table, key=lambda one: (one.saved_bytes, int(one.live_bytes.max()), one.extra_us))
        for _, table in layers
    ]
    return _expanded(problem, layers, least)


def _fill(search: Search, state: State) -> None:
    search.say("filling the rest of the budget")
    offer_filled(search, state)
