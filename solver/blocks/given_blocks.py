"""Share a budget out over given blocks, each of which is to be rewritten by itself.

This is `hierarchical` for blocks that are given and run as units: the options of each distinct
block are found once, then a knapsack takes one for each block. What lies between blocks runs as
eager runs it, so its one option is to keep all. Where there is memory below the device, some
options copy what a block keeps there. Its room is that of all blocks together: each has its values
there from its forward to its backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.links import Links
from remat.schedules.schedule import Compute, Fetch, Free, Step
from remat.solver.blocks.copied_options import with_copied
from remat.solver.blocks.knapsack import BlockChoice, choices_in_place, compose
from remat.solver.blocks.options import (
    NOTHING,
    TURN,
    Below,
    BlockOption,
    Options,
    block_graph,
    block_options,
)
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
    graphs : of each block. solved : of the equal one, perhaps itself, that its `tables` names.
    distinct : how many distinct blocks were given. below_bytes : rooms on the host and on NVMe for
        what waits there.
    """

    problem: Problem
    blocks: list[Block]
    graphs: list[TrainingGraph]
    solved: list[TrainingGraph]
    tables: list[Options]
    is_given: list[bool]
    choices: list[list[BlockChoice]]
    distinct: int
    below_bytes: Below

    @classmethod
    def of(
        cls,
        graph: TrainingGraph,
        spans: Sequence[Span],
        beside_bytes: Sequence[int],
        time_limit_s: float,
        staying: Collection[str] = (),
    ) -> GivenBlocks:
        """Find the options of each block; where `graph` has links, also those with copies.

        Parameters
        ----------
        spans : in forward order; backward runs through them in reverse.
        beside_bytes : for each op, bytes live beside it that the knapsack would not see.
            Buffers of FSDP2 are such: a block's own graph does not show them.
        staying : values that no copy may take from the device, as a block hands them out.
        """
        clock = Clock(time_limit_s)
        problem = Problem.of(graph)
        reads = Reads.of(problem)
        blocks, is_given = _with_pieces(problem, spans)
        graphs = [block_graph(problem, reads, block) for block in blocks]
        known: dict[Shape, tuple[Options, TrainingGraph]] = {}
        found: list[tuple[Options, TrainingGraph]] = []
        for block, small, given in zip(blocks, graphs, is_given, strict=True):
            made = [name for op in small.ops for name in op.outputs]
            stays = tuple(name in staying for name in made)
            shape = (given, stays, shape_of(problem, reads, block))
            if shape not in known:
                held = [name for name in made if name in staying]
                known[shape] = _options(small, given, held, graph.links, clock), small
            found.append(known[shape])
        tables = [table for table, _ in found]
        solved = [small for _, small in found]
        layers = list(zip(blocks, tables, strict=True))
        choices = choices_in_place(problem, layers, beside_bytes)
        distinct = sum(bool(shape[0]) for shape in known)
        below_bytes = _rooms_below(graph.links, tables)
        return cls(
            problem, blocks, graphs, solved, tables, is_given, choices, distinct, below_bytes
        )

    def runs(self, room_bytes: int) -> list[list[Step]] | None:
        """For each given block its computations and copies, in order; None if nothing fits.

        Of frees, only those are there that a copy makes possible. The turn is in it where there
        are copies.

        The knapsack's memory is a model. The caller puts the blocks together to a schedule of
        the whole step, simulates it, and asks again with more or less room.

        Parameters
        ----------
        room_bytes : beyond what is resident.
        """
        chosen = self._composed(room_bytes)
        if chosen is None:
            return None
        return [
            _run(self.graphs[i], self.solved[i], self.tables[i][pick])
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
            if self._composed(middle) is None:
                low = middle
            else:
                high = middle
        return high

    def _composed(self, room_bytes: int) -> list[int] | None:
        return compose(self.choices, room_bytes, SLOTS, self.below_bytes)


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


def _options(
    graph: TrainingGraph, given: bool, held: Sequence[str], links: Links | None, clock: Clock
) -> Options:
    plain = block_options(graph, LIMITS if given else 0, lambda: clock.left_s)
    if not given:
        return _keeping_all(plain)
    if links is None or not links.host_bytes:
        return plain
    forward = {name for op in graph.ops[: graph.n_forward] for name in op.outputs}
    handing_out = msgspec.structs.replace(
        graph,
        forward_outputs=tuple(
            dict.fromkeys((*graph.forward_outputs, *(name for name in held if name in forward)))
        ),
        outputs=tuple(dict.fromkeys((*graph.outputs, *held))),
    )
    return with_copied(handing_out, plain, links, LIMITS, lambda: clock.left_s)


def _rooms_below(links: Links | None, tables: Sequence[Options]) -> Below:
    """What may wait on the host and on NVMe, where some of the host is left for what passes."""
    if links is None:
        return NOTHING
    passing_bytes = max((one.passing_bytes for table in tables for one in table), default=0)
    return links.host_bytes - passing_bytes, links.nvme_bytes


def _run(graph: TrainingGraph, solved: TrainingGraph, option: BlockOption) -> list[Step]:
    if option.steps:
        return [*_renamed(_with_copies_alone(option.steps), solved, graph)]
    turns = {op.name for op in graph.ops if op.target == TURN and op.name == "turn"}
    schedule = State.from_recomputed(Problem.of(graph), option.recomputed).schedule()
    return [step for step in schedule.steps if isinstance(step, Compute) and step.op not in turns]


def _renamed(steps: Iterable[Step], solved: TrainingGraph, graph: TrainingGraph) -> Iterator[Step]:
    """Steps of one graph as those of an equal one."""
    ops = {one.name: other for one, other in zip(solved.ops, graph.ops, strict=True)}
    values = {
        value: other
        for op in solved.ops
        for value, other in zip(op.outputs, ops[op.name].outputs, strict=True)
    }
    for step in steps:
        if isinstance(step, Compute):
            yield Compute(ops[step.op].name)
        else:
            yield msgspec.structs.replace(step, value=values[step.value])


def _with_copies_alone(steps: Sequence[Step]) -> Iterator[Step]:
    """Computations, copies, and the frees of what is copied but for its last on the device."""
    comes_back: set[str] = set()
    kept: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, Fetch) and step.to == "device":
            comes_back.add(step.value)
        elif isinstance(step, Free) and step.at == "device":
            if step.value not in comes_back:
                continue
            comes_back.discard(step.value)
        kept.append(step)
    return reversed(kept)
