"""Share a budget out over given blocks, each of which is to be rewritten by itself.

This is `hierarchical` for blocks that are given and run as units: the options of each distinct
block are found once, then a knapsack takes one for each block. What lies between blocks runs as
eager runs it, so its one option is to keep all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute
from remat.solver.blocks.knapsack import BlockChoice, choices_in_place, compose
from remat.solver.blocks.options import TURN, BlockOption, Options, block_graph, block_options
from remat.solver.blocks.repeated import Block, Reads, Shape, shape_of
from remat.solver.clock import Clock
from remat.solver.problem import Problem
from remat.solver.state import State

LIMITS, SLOTS = 12, 4096
"""At how many limits on its kept bytes a block is solved; steps of the knapsack's grid."""

Span = tuple[int, int, int, int]
"""Start and stop of a block's forward ops, then of its backward ops."""


@dataclass(frozen=True)
class GivenBlocks:
    """What given blocks can do, each distinct one solved once.

    Attributes
    ----------
    blocks : the given ones and what lies between, in forward order. is_given : which is which.
    distinct : how many distinct blocks were given.
    """

    problem: Problem
    blocks: list[Block]
    graphs: list[TrainingGraph]
    tables: list[Options]
    is_given: list[bool]
    choices: list[list[BlockChoice]]
    distinct: int

    @classmethod
    def of(
        cls,
        graph: TrainingGraph,
        spans: Sequence[Span],
        beside_bytes: Sequence[int],
        time_limit_s: float,
    ) -> GivenBlocks:
        """Find the options of each block.

        Parameters
        ----------
        spans : in forward order; backward runs through them in reverse.
        beside_bytes : for each op, bytes live beside it that the knapsack would not see.
            Buffers of FSDP2 are such: a block's own graph does not show them.
        """
        clock = Clock(time_limit_s)
        problem = Problem.of(graph)
        reads = Reads.of(problem)
        blocks, is_given = _with_pieces(problem, spans)
        graphs = [block_graph(problem, reads, block) for block in blocks]
        known: dict[Shape, Options] = {}
        tables: list[Options] = []
        for block, small, given in zip(blocks, graphs, is_given, strict=True):
            shape = (given, shape_of(problem, reads, block))
            if shape not in known:
                limits = LIMITS if given else 0
                found = block_options(small, limits, lambda: clock.left_s)
                known[shape] = found if given else _keeping_all(found)
            tables.append(known[shape])
        layers = list(zip(blocks, tables, strict=True))
        choices = choices_in_place(problem, layers, beside_bytes)
        distinct = sum(bool(shape[0]) for shape in known)
        return cls(problem, blocks, graphs, tables, is_given, choices, distinct)

    def sequences(self, room_bytes: int) -> list[list[str]] | None:
        """For each given block the ops that it runs, in order; None if nothing fits.

        The knapsack's memory is a model. The caller puts the blocks together to a schedule of
        the whole step, simulates it, and asks again with more or less room.

        Parameters
        ----------
        room_bytes : beyond what is resident.
        """
        chosen = compose(self.choices, room_bytes, SLOTS)
        if chosen is None:
            return None
        return [
            _sequence(self.graphs[i], self.tables[i][pick])
            for i, pick in enumerate(chosen)
            if self.is_given[i]
        ]

    def least_room_bytes(self) -> int:
        """The least room in which something fits, to one part in `SLOTS` of the most."""
        low, high = 0, sum(max(c.saved_bytes for c in table) for table in self.choices)
        high += max(choice.need_bytes for table in self.choices for choice in table)
        step = max(high // SLOTS, 1)
        while high - low > step:
            middle = (low + high) // 2
            if compose(self.choices, middle, SLOTS) is None:
                low = middle
            else:
                high = middle
        return high


def _with_pieces(problem: Problem, spans: Sequence[Span]) -> tuple[list[Block], list[bool]]:
    """The blocks, and what is before, between and behind them, which covers the graph."""
    blocks: list[Block] = []
    is_given: list[bool] = []
    start, back_stop = 0, problem.n_ops
    for span in (*(Block(*span) for span in spans), None):
        stop = problem.n_forward if span is None else span.start
        back_start = problem.n_forward if span is None else span.back_stop
        if start < stop or back_start < back_stop:
            blocks.append(Block(start, stop, back_start, back_stop))
            is_given.append(False)
        if span is not None:
            blocks.append(span)
            is_given.append(True)
            start, back_stop = span.stop, span.back_start
    return blocks, is_given


def _keeping_all(options: Options) -> Options:
    return (min(options, key=lambda option: option.extra_us),)


def _sequence(graph: TrainingGraph, option: BlockOption) -> list[str]:
    schedule = State.from_recomputed(Problem.of(graph), option.recomputed).schedule()
    turns = {op.name for op in graph.ops if op.target == TURN and op.name == "turn"}
    return [
        step.op for step in schedule.steps if isinstance(step, Compute) and step.op not in turns
    ]
