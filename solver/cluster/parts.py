"""What a part of the model takes on one rank: a block, or what comes before or after all blocks.

A part is captured at one tensor parallel degree, context parallel degree and microbatch. All that
the planner of a cluster asks of it are two times and its options: bytes that wait for backward
against extra time. They come from the option tables of blocks (`blocks/options.py`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.solver.blocks.options import TURN, BlockOption, block_options
from remat.solver.cluster.weights_later import WeightsLater, weights_later
from remat.solver.problem import Problem
from remat.solver.state import State

LIMITS = 12
"""At how many limits on its kept bytes a part is solved."""


class PartWork(NamedTuple):
    """Time of one microbatch with nothing computed again, and what gradients of weights take of it.

    The latter counts where they may be made apart.
    """

    time_us: float
    weight_us: float = 0.0


class PartOption(msgspec.Struct, frozen=True):
    """One way to run a part.

    Attributes
    ----------
    saved_bytes : live from its forward to its backward, once for each microbatch in flight.
    need_bytes : the most that is live beside them while the part runs.
    extra_us : time of what is computed again. recomputed : ops of its graph, by stage.
    """

    saved_bytes: int
    need_bytes: int
    extra_us: float
    recomputed: tuple[tuple[int, ...], ...] = ()

    def is_bettered_by(self, other: PartOption) -> bool:
        """Whether `other` is in no figure worse and in one better."""
        own = self.saved_bytes, self.need_bytes, self.extra_us
        its = other.saved_bytes, other.need_bytes, other.extra_us
        return own != its and all(a >= b for a, b in zip(own, its, strict=True))


class Part(msgspec.Struct, frozen=True):
    """Times of one microbatch, in µs, and options that no other betters, quickest first.

    Attributes
    ----------
    graph_hash : of the graph that the options are of.
    later : of backward, what may run apart from the gradient of the part's input.
    """

    forward_us: float
    backward_us: float
    options: tuple[PartOption, ...]
    graph_hash: str = ""
    later: WeightsLater = WeightsLater()

    @property
    def work_us(self) -> float:
        """Time of one microbatch with nothing computed again."""
        return self.forward_us + self.backward_us

    @property
    def work(self) -> PartWork:
        """The same, with what may be made apart."""
        return PartWork(self.work_us, self.later.weight_us)


NOTHING = Part(0.0, 0.0, (PartOption(0, 0, 0.0),))
"""A part that a model does not have."""


def part_of(graph: TrainingGraph, border_gradient: str = "") -> Part:
    """Solve a priced graph of one part at several limits on what it keeps.

    PartWork is limited by nodes of each program, so the same graph gives the same part.

    Parameters
    ----------
    border_gradient : the value that is the gradient of what it reads; empty for a part whose
        backward runs as a whole.
    """
    forward_us = sum(op.cost_us for op in graph.ops[: graph.n_forward])
    found = block_options(graph, LIMITS, lambda: math.inf)
    made = {name for op in graph.ops if op.target == TURN for name in op.outputs}
    tangents_bytes = sum(value.size_bytes for value in graph.values if value.name in made)
    options = [_option(one, tangents_bytes) for one in found]
    kept = [o for o in options if not any(o.is_bettered_by(other) for other in options)]
    kept.sort(key=lambda option: (option.extra_us, option.saved_bytes))
    later = _later(graph, border_gradient)
    return Part(forward_us, graph.time_us - forward_us, tuple(kept), graph.hash, later)


def part_work(graph: TrainingGraph, border_gradient: str = "") -> PartWork:
    """That of the part, without its options."""
    return PartWork(graph.time_us, _later(graph, border_gradient).weight_us)


def _later(graph: TrainingGraph, border_gradient: str) -> WeightsLater:
    return weights_later(graph, border_gradient) if border_gradient else WeightsLater()


def _option(found: BlockOption, tangents_bytes: int) -> PartOption:
    # What the turn makes is there while backward runs, not while a microbatch waits for it.
    saved_bytes = found.saved_bytes - tangents_bytes
    need_bytes = int(found.live_bytes.max()) - saved_bytes
    return PartOption(saved_bytes, need_bytes, found.extra_us, found.recomputed)


def schedule_of_option(graph: TrainingGraph, option: PartOption) -> Schedule:
    """The steps of an option, for the graph that it is of."""
    return State.from_recomputed(Problem.of(graph), option.recomputed).schedule()
