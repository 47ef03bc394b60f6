"""Share a budget out over given blocks, each of which is to be rewritten by itself.

This is `hierarchical` for blocks that run as units: a knapsack takes one option of each. What lies
between blocks keeps all, as in eager. Room below the device is that of all blocks together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain

import msgspec

from remat.graph_capture.graph import TANGENTS, Link, Links, TrainingGraph
from remat.schedules.schedule import Compute, Fetch, Free, Step
from remat.solver.backends.mip import Limits
from remat.solver.blocks.block_options import (
    GAP,
    NO_LOWER_BYTES,
    BlockChoice,
    BlockOption,
    LowerBytes,
    Options,
    block_graph,
    block_options,
    choices_in_place,
    compose,
    that_run_again,
)
from remat.solver.blocks.repeated import Block, Reads, Shape, shape_of
from remat.solver.bounds.cut_program import expand
from remat.solver.offload.copy_placing import PlacedSchedule, in_flight_bytes, place_copies
from remat.solver.offload.fetch_as_recompute import most_by_stage, untimed_schedule, with_fetches
from remat.solver.offload.joint_cut import JointCut
from remat.solver.problem import Problem
from remat.solver.search import Clock
from remat.solver.state import State, UnreachableError
from remat.solver.stopping import BLOCK_NODES

# Options that copy: the program of one cut with copies, at the turn, for each limit on kept bytes.

_LEAST_SHARE = 256  # of what the block keeps; copying a smaller value would free hardly anything


def with_copied(
    graph: TrainingGraph, plain: Options, links: Links, limits: int, left_s: Callable[[], float]
) -> Options:
    """With options with copies that are better somewhere; `graph.outputs` are never copied."""
    problem, most_bytes = Problem.of(graph), max(option.saved_bytes for option in plain)
    stays_bytes = sum(problem.size_bytes[v] for v in problem.held)  # the caller's at the turn
    found = list(plain)
    for through, to_nvme in _ways_down(links):
        for i in range(1, limits + 1):
            if left_s() <= 0:
                break
            limit_bytes = most_bytes - max(most_bytes - stays_bytes, 0) * i // limits
            made = _state(problem, limit_bytes, most_bytes // _LEAST_SHARE, through, left_s())
            for option in () if made is None else _placed(*made, links, to_nvme):
                if not any(other.is_no_worse(option) for other in found):
                    found = [other for other in found if not option.is_no_worse(other)]
                    found.append(option)
    return tuple(sorted(found, key=lambda one: (one.extra_us, one.saved_bytes, one.below_bytes)))


def _ways_down(links: Links) -> Iterator[tuple[Links, bool]]:
    """Links as if there were one tier below, and whether that is NVMe."""
    alone = msgspec.structs.replace(links, write=None, read=None, nvme_bytes=0)
    yield alone, False
    if links.write is not None and links.read is not None and links.nvme_bytes:
        yield msgspec.structs.replace(
            alone, host_bytes=links.nvme_bytes,
            d2h=_both(links.d2h, links.write), h2d=_both(links.h2d, links.read),
        ), True  # fmt: skip


def _both(one: Link, other: Link) -> Link:
    # The slower link sets the rate, latencies add up.
    return Link(min(one.bytes_per_us, other.bytes_per_us), one.latency_us + other.latency_us)


def _state(
    problem: Problem, limit_bytes: int, least_bytes: int, links: Links, left_s: float
) -> tuple[State, frozenset[int]] | None:
    """None where nothing is copied, or nothing keeps so little."""
    program = JointCut(
        problem, (problem.n_forward,), limit_bytes, links=links, is_start=True,
        least_bytes=max(least_bytes, 1),
    )  # fmt: skip
    solution = program.solve(Limits(left_s, absolute_gap=GAP, node_limit=BLOCK_NODES))
    if solution.values is None:
        return None
    copied = program.copied(solution.values, program.fetched)
    if not (ops := frozenset(problem.producer[v] for v in copied)):
        return None
    arriving = with_fetches(problem, ops, links)
    try:
        return State.from_recomputed(arriving, expand(solution, arriving)), ops
    except UnreachableError:
        return None


def _placed(
    state: State, ops: Collection[int], links: Links, to_nvme: bool
) -> Iterator[BlockOption]:
    graph, base = state.problem.graph, untimed_schedule(state, ops)
    flight_bytes = int(in_flight_bytes(graph, base, links).max(initial=0))
    spilled = [value for value in base.made if to_nvme]
    seen: set[tuple[Step, ...]] = set()
    # A block runs as one call each way: nothing in flight has room on the device at the turn.
    turns = {op.name for op in graph.ops if op.target == TANGENTS}
    at_turn = [k for k, (kind, op) in enumerate(base.items) if kind == "compute" and op in turns]
    # With all room for what is in flight, and with the state's own peak.
    for room_bytes in (base.peak_bytes + flight_bytes, base.peak_bytes):
        live_bytes = base.live_bytes.copy()
        live_bytes[at_turn] = room_bytes
        full = dataclasses.replace(base, live_bytes=live_bytes)
        placed = place_copies(graph, full, room_bytes, links, spilled=spilled)
        if placed is None or placed.schedule.steps in seen or not placed.schedule.moves:
            continue
        seen.add(placed.schedule.steps)
        yield _placed_option(state, placed)


def _placed_option(state: State, placed: PlacedSchedule) -> BlockOption:
    turn, graph = state.problem.n_forward, state.problem.graph
    steps, found = placed.schedule.steps, placed.found
    at = steps.index(Compute(graph.ops[turn].name))
    below = {tier: each[at] for tier, each in found.below_bytes.items()}
    waiting = below.get("host", 0), below.get("nvme", 0)
    ran = (step.op if isinstance(step, Compute) else "" for step in steps)
    live_bytes = most_by_stage(graph, ran, found.live_bytes)
    live_bytes[-1] = max(live_bytes[-1], state.peak_bytes[-1])
    return BlockOption(
        int(state.entry_bytes[turn + 1]), live_bytes, found.time_us - graph.time_us,
        tuple(stage.recomputed for stage in state.stages), steps,
        below_bytes=waiting, passing_bytes=found.host_peak_bytes - waiting[0],
    )  # fmt: skip


_LIMITS, _SLOTS = 12, 4096  # limits on a block's kept bytes; steps of the knapsack's grid

BlockSpan = tuple[int, int, int, int]  # start and stop of a block's forward, and of its backward


@dataclass(frozen=True)
class BlockBudgets:
    """What given blocks can do, each distinct one solved once."""

    problem: Problem
    blocks: list[Block]  # the given ones and what lies between, in forward order
    graphs: list[TrainingGraph]
    solved: list[TrainingGraph]  # of the equal block, perhaps itself, that the table was made for
    tables: list[Options]
    is_given: list[bool]
    choices: list[list[BlockChoice]]
    distinct: int  # how many distinct blocks were given
    below_bytes: LowerBytes  # rooms on the host and on NVMe for what waits there

    @classmethod
    def of(
        cls, graph: TrainingGraph, spans: Sequence[BlockSpan], beside_bytes: Sequence[int],
        time_limit_s: float, staying: Collection[str] = (), again: Collection[str] = (),
    ) -> BlockBudgets:  # fmt: skip
        """Solve each distinct block once; copies leave `staying`, which blocks hand out. What ops
        of `again` make is not kept from a block's forward to its backward."""
        clock, problem = Clock(time_limit_s), Problem.of(graph)
        reads = Reads.of(problem)
        blocks, is_given = _with_pieces(problem, spans)
        graphs = [block_graph(problem, reads, block) for block in blocks]
        known: dict[Shape, tuple[Options, TrainingGraph]] = {}
        found: list[tuple[Options, TrainingGraph]] = []
        for block, small, given in zip(blocks, graphs, is_given, strict=True):
            made = [name for op in small.ops for name in op.outputs]
            stays = tuple(name in staying for name in made)
            pinned = frozenset(i for i, op in enumerate(small.ops) if op.name in again)
            shape = (given, stays, pinned, shape_of(problem, reads, block))
            if shape not in known:
                held = [name for name in made if name in staying]
                known[shape] = _options(small, given, held, graph.links, clock, pinned), small
            found.append(known[shape])
        tables = [table for table, _ in found]
        solved = [small for _, small in found]
        layers = list(zip(blocks, tables, strict=True))
        # As buffers of FSDP2, these are in no block's graph.
        choices = choices_in_place(problem, layers, beside_bytes)
        distinct = sum(bool(shape[0]) for shape in known)
        rooms = _rooms_below(graph.links, tables)
        return cls(problem, blocks, graphs, solved, tables, is_given, choices, distinct, rooms)

    def runs(self, room_bytes: int) -> list[list[Step]] | None:
        """The computations and copies of each given block; None if nothing fits."""
        # The knapsack's memory is a model: the caller simulates, and asks again with other room.
        if (chosen := self._composed(room_bytes)) is None:
            return None
        return [
            _run(self.graphs[i], self.solved[i], self.tables[i][pick])
            for i, pick in enumerate(chosen)
            if self.is_given[i]
        ]

    def least_room_bytes(self) -> int:
        """The least room in which something fits, to one part in `_SLOTS` of the most."""
        low, high = 0, sum(max(c.saved_bytes for c in table) for table in self.choices)
        high += max(choice.need_bytes for table in self.choices for choice in table)
        step = max(high // _SLOTS, 1)
        while high - low > step:
            middle = (low + high) // 2
            fits = self._composed(middle) is not None
            low, high = (low, middle) if fits else (middle, high)
        return high

    def _composed(self, room_bytes: int) -> list[int] | None:
        return compose(self.choices, room_bytes, _SLOTS, self.below_bytes)


def _with_pieces(problem: Problem, spans: Sequence[BlockSpan]) -> tuple[list[Block], list[bool]]:
    """The blocks, and what is before, between and behind them, which covers the graph."""
    blocks, is_given = list[Block](), list[bool]()
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


def _options(
    graph: TrainingGraph, given: bool, held: Sequence[str], links: Links | None, clock: Clock,
    again: Set[int] = frozenset(),
) -> Options:  # fmt: skip
    plain = block_options(graph, _LIMITS if given else 0, lambda: clock.left_s, again)
    if not given:
        return (min(plain, key=lambda option: option.extra_us),)  # keeps all
    found = _with_copies(graph, plain, held, links, clock)
    if not again:
        return found
    must_run = that_run_again(graph, again)
    return tuple(one for one in found if must_run <= set(chain(*one.recomputed)))


def _with_copies(
    graph: TrainingGraph, plain: Options, held: Sequence[str], links: Links | None, clock: Clock
) -> Options:
    if links is None or not links.host_bytes:
        return plain
    forward = {name for op in graph.ops[: graph.n_forward] for name in op.outputs}
    # What a block hands out is named as an output: copies take none.
    handed = dict.fromkeys((*graph.forward_outputs, *(name for name in held if name in forward)))
    outputs = tuple(dict.fromkeys((*graph.outputs, *held)))
    named = msgspec.structs.replace(graph, forward_outputs=tuple(handed), outputs=outputs)
    return with_copied(named, plain, links, _LIMITS, lambda: clock.left_s)


def _rooms_below(links: Links | None, tables: Sequence[Options]) -> LowerBytes:
    if links is None:
        return NO_LOWER_BYTES
    # Values on their way need some of the host.
    passing_bytes = max((one.passing_bytes for table in tables for one in table), default=0)
    return links.host_bytes - passing_bytes, links.nvme_bytes


def _run(graph: TrainingGraph, solved: TrainingGraph, option: BlockOption) -> list[Step]:
    if option.steps:
        return [*_renamed(_with_copies_alone(option.steps), solved, graph)]
    # No op of the step, unlike one that opens backward.
    turns = {op.name for op in graph.ops if op.target == TANGENTS and op.name == "turn"}
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
    comes_back: set[str] = set()  # only frees of values that come back are kept
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
