"""What one block can do with memory below the device: options that copy what it keeps.

Each limit on the kept bytes is solved by the program of one cut with copies (`offload/joint_cut`),
at the turn between the block's forward and its backward. A block runs as one call each way. So what
goes below has left when its forward ends, and comes back after its backward has begun: no byte of
it is on the device at the turn. Each state is placed twice, with all the room that its copies want
in flight, and with no more than its own peak. The judge times both, with their waits.

A value may go on from the host to NVMe. It then goes over the slower of both links.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator

import msgspec
import numpy as np

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.links import Link, Links
from remat.schedules.schedule import Compute, Step
from remat.solver.backends.mip import Limits
from remat.solver.blocks.options import GAP, TURN, BlockOption, Options
from remat.solver.bounds.cut_program import expand
from remat.solver.offload.arrivals import Base, Bytes, base_of, hosting
from remat.solver.offload.joint_cut import JointCut
from remat.solver.offload.placing import Placed, in_flight_bytes, place_copies
from remat.solver.problem import Problem
from remat.solver.stage import UnreachableError
from remat.solver.state import State
from remat.solver.stopping import BLOCK_NODES

LEAST_SHARE = 256
"""No value below this part of what the block keeps is copied: it would hardly free anything."""


def with_copied(
    graph: TrainingGraph, plain: Options, links: Links, limits: int, left_s: Callable[[], float]
) -> Options:
    """`plain`, the options of a `block_graph`, and those with copies that are better somewhere.

    Parameters
    ----------
    graph : whose outputs are all that must stay on the device.
    limits : bounds on the kept bytes that are tried, from all to what must stay. left_s : as of
        `block_options`.
    """
    problem, most_bytes = Problem.of(graph), max(option.saved_bytes for option in plain)
    stays_bytes = sum(problem.size_bytes[v] for v in problem.held)
    found = list(plain)
    for through, to_nvme in _ways_down(links):
        for i in range(1, limits + 1):
            if left_s() <= 0:
                break
            limit_bytes = most_bytes - max(most_bytes - stays_bytes, 0) * i // limits
            made = _state(problem, limit_bytes, most_bytes // LEAST_SHARE, through, left_s())
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
    slower = min(one.bytes_per_us, other.bytes_per_us)
    return Link(slower, one.latency_us + other.latency_us)


def _state(
    problem: Problem, limit_bytes: int, least_bytes: int, links: Links, left_s: float
) -> tuple[State, frozenset[int]] | None:
    """Least time with at most `limit_bytes` kept on the device, and the ops whose outputs arrive.

    None where nothing is copied, or nothing keeps so little.
    """
    program = JointCut(
        problem, (problem.n_forward,), limit_bytes, links=links, is_start=True,
        least_bytes=max(least_bytes, 1),
    )  # fmt: skip
    solution = program.solve(Limits(left_s, absolute_gap=GAP, node_limit=BLOCK_NODES.most))
    if solution.values is None:
        return None
    copied = program.copied(solution.values, program.fetched)
    ops = frozenset(problem.producer[v] for v in copied)
    if not ops:
        return None
    arriving = hosting(problem, ops, links)
    try:
        return State.from_recomputed(arriving, expand(solution, arriving)), ops
    except UnreachableError:
        return None


def _placed(
    state: State, ops: Collection[int], links: Links, to_nvme: bool
) -> Iterator[BlockOption]:
    """The options that `state` comes to."""
    graph, base = state.problem.graph, base_of(state, ops)
    flight_bytes = int(in_flight_bytes(graph, base, links).max(initial=0))
    spilled = [value for value in base.made if to_nvme]
    seen: set[tuple[Step, ...]] = set()
    for room_bytes in (base.peak_bytes + flight_bytes, base.peak_bytes):
        full = _full_at_turn(graph, base, room_bytes)
        placed = place_copies(graph, full, room_bytes, links, spilled=spilled)
        if placed is None or placed.schedule.steps in seen or not placed.schedule.moves:
            continue
        seen.add(placed.schedule.steps)
        yield _placed_option(state, placed)


def _full_at_turn(graph: TrainingGraph, base: Base, room_bytes: int) -> Base:
    """`base` with no room at the turn, so that no value in flight is on the device then."""
    live_bytes = base.live_bytes.copy()
    live_bytes[[k for k, item in enumerate(base.items) if _is_turn(graph, item)]] = room_bytes
    return dataclasses.replace(base, live_bytes=live_bytes)


def _is_turn(graph: TrainingGraph, item: tuple[str, str]) -> bool:
    return item[0] == "compute" and graph.ops[graph.op_index[item[1]]].target == TURN


def _placed_option(state: State, placed: Placed) -> BlockOption:
    """What the judge says of a placed schedule, as an option."""
    turn, graph = state.problem.n_forward, state.problem.graph
    name = graph.ops[turn].name
    steps, found = placed.schedule.steps, placed.found
    at = steps.index(Compute(name))
    below = {tier: each[at] for tier, each in found.below_bytes.items()}
    waiting = below.get("host", 0), below.get("nvme", 0)
    return BlockOption(
        saved_bytes=int(state.entry_bytes[turn + 1]),
        live_bytes=_by_stage(state, placed),
        extra_us=found.time_us - graph.time_us,
        recomputed=tuple(stage.recomputed for stage in state.stages),
        steps=steps,
        below_bytes=waiting,
        passing_bytes=found.host_peak_bytes - waiting[0],
    )


def _by_stage(state: State, placed: Placed) -> Bytes:
    """The most bytes live on the device in each stage."""
    index = state.problem.graph.op_index
    most = np.zeros(state.problem.n_ops + 1, np.int64)
    most[-1] = state.peak_bytes[-1]
    stage = 0
    for step, live_bytes in zip(placed.schedule.steps, placed.found.live_bytes, strict=True):
        most[stage] = max(most[stage], live_bytes)
        stage += isinstance(step, Compute) and index[step.op] == stage
    return most
