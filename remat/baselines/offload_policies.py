"""Fixed policies of offloading: choices tried in turn, their copies placed, all of them judged.

A policy names what is kept, hosted and made again, with a knob. Each gets recomputation just in
time and the copies of `copy_placing`, which is more than most have where they come from.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from remat.graph_capture.errors import SolverError, option
from remat.graph_capture.graph import Links, TrainingGraph
from remat.schedules.outcome import Result
from remat.solver.local_search.repair import GapMove, apply, carriable
from remat.solver.offload.copy_placing import place_copies
from remat.solver.offload.fetch_as_recompute import (
    UntimedSchedule,
    movable,
    require_no_homes,
    untimed_schedule,
    with_fetches,
)
from remat.solver.policies.template import NO_BLOCK, module_blocks, read_in_backward, unavoidable
from remat.solver.problem import Problem
from remat.solver.search import Listener, Search, check_least
from remat.solver.state import State, UnreachableError, mark_made, recomputed_in


class CopyChoice(NamedTuple):
    """Values that leave the device, and values that are made again; all others are kept."""

    hosted: frozenset[int]
    again: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Saved:
    problem: Problem
    links: Links
    least_bytes: int

    @cached_property
    def values(self) -> list[int]:
        # The caller holds these anyway.
        returned = frozenset(self.problem.forward_outputs)
        return [v for v in read_in_backward(self.problem) if v not in returned]

    @cached_property
    def total_bytes(self) -> int:
        return sum(self.problem.size_bytes[v] for v in self.values)

    @cached_property
    def large(self) -> list[int]:
        moves, size_bytes = movable(self.problem), self.problem.size_bytes
        # Copies of small values are all latency.
        return [v for v in self.values if moves[v] and size_bytes[v] >= self.least_bytes]

    @cached_property
    def begin_us(self) -> npt.NDArray[np.float64]:
        """When each op begins if each runs once; one more entry is the end of the step."""
        return np.concatenate(([0.0], np.cumsum(self.problem.cost_us)))

    @property
    def forward_us(self) -> float:
        return float(self.begin_us[self.problem.n_forward])

    @cached_property
    def last_read(self) -> dict[int, int]:
        last = self.problem.last_forward_read
        return {v: max(self.problem.producer[v], last[v]) for v in self.values}

    @cached_property
    def first_read(self) -> dict[int, int]:
        """The first backward op that reads each value; the number of ops for the end."""
        first: dict[int, int] = {}
        for stage in range(self.problem.n_forward, self.problem.n_ops + 1):
            for v in self.problem.needs[stage]:
                first.setdefault(v, stage)
        return {v: first[v] for v in self.values}

    @cached_property
    def layer(self) -> dict[int, int]:
        of_op = module_blocks(self.problem.graph).of_op
        return {v: of_op[self.problem.producer[v]] for v in self.values}

    def in_layers(self, values: Iterable[int]) -> dict[int, list[int]]:
        layers: dict[int, list[int]] = {}
        for v in values:
            if self.layer[v] != NO_BLOCK:
                layers.setdefault(self.layer[v], []).append(v)
        return dict(sorted(layers.items()))

    @cached_property
    def again_us(self) -> dict[int, float]:
        """Time to make each value again from the others; infinite where a pin forbids it."""
        return {v: self._again_us(v) for v in self.values}

    def _again_us(self, v: int) -> float:
        problem, saved = self.problem, frozenset(self.values)
        waiting = [problem.producer[v]]
        seen = set(waiting)
        took_us = 0.0
        while waiting:
            op = waiting.pop()
            if problem.no_recompute[op]:
                return float("inf")
            took_us += problem.cost_us[op]
            # Other saved values are available.
            for below in (problem.producer[u] for u in problem.inputs[op] if u not in saved):
                if below not in seen:
                    seen.add(below)
                    waiting.append(below)
        return took_us

    def released(self, hosted: Collection[int], kept: Collection[int]) -> CopyChoice:
        return CopyChoice(frozenset(hosted), frozenset(self.values).difference(hosted, kept))

    def base(self, choice: CopyChoice) -> UntimedSchedule | None:
        """What `choice` comes to; None where a pin forbids to make a value again."""
        problem = self.problem
        hosted = frozenset(problem.producer[v] for v in choice.hosted)
        # A fetch is modelled as a recomputation without inputs.
        mine = with_fetches(problem, hosted, self.links)
        kept = unavoidable(problem)
        for v in (*self.values, *problem.forward_outputs):
            kept[v] = 1
        for v in (*choice.hosted, *choice.again):
            # Pinned values stay unless they are fetched.
            kept[v] = problem.no_recompute[problem.producer[v]] and v not in choice.hosted
        try:
            state = State.from_recomputed(mine, _just_in_time(mine, kept))
        except UnreachableError:
            return None
        for stage in range(mine.n_forward, mine.n_ops + 1):
            for op in [op for op in state.stages[stage].recomputed if op in hosted]:
                # A run makes all outputs of its op, also when only another one is fetched.
                for v, before in carriable(state, op, stage):
                    if kept[v]:
                        apply(state, GapMove(v, before, stage, 1))
        return untimed_schedule(state, hosted)


def _just_in_time(problem: Problem, kept: bytearray) -> list[list[int]]:
    available = bytearray(b"\1" * problem.n_values)
    stages: list[list[int]] = []
    for t in range(problem.n_ops + 1):
        # At the start of backward only the kept values are left.
        if t == problem.n_forward:
            available = bytearray(kept)
        stages.append(recomputed_in(problem, available, (), t))
        mark_made(problem, available, (*stages[-1], t) if t < problem.n_ops else stages[-1])
    return stages


_LEAST_BYTES = 1 << 20  # smaller values stay, unless a policy is told otherwise
_NOTHING_LARGE = "backward reads nothing of forward that is large enough to offload"
_NO_ROOM = "the host has no room for what the policy offloads"


class _Policy(ABC):
    copies: ClassVar[bool] = True
    name: ClassVar[str]
    least_bytes: int

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        links = graph.links
        if links is None:
            raise SolverError(
                f"capture with {option('host', '64GiB')}, or use solver auto: solver '{self.name}' "
                "needs a link to the host"
            )
        require_no_homes(graph, self.name)
        search = Search.of(self, self.name, graph, budget_bytes)
        with search.until_interrupted():
            # If the step fits as it is, nothing leaves the device.
            if not search.offer_sequence(range(search.problem.n_ops), or_least=True):
                saved = Saved(search.problem, links, self.least_bytes)
                _try_choices(search, saved, self.choices(saved))
        return search.result()

    @abstractmethod
    def choices(self, saved: Saved) -> Iterator[CopyChoice]:
        """A choice for each setting."""


@dataclass(frozen=True)
class SteppedPolicy(_Policy):
    """A policy with a knob, of which some settings are tried, both ends included."""

    steps: int = 49
    least_bytes: int = _LEAST_BYTES
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        check_least(1, least_bytes=self.least_bytes)
        if self.steps < 2:
            raise SolverError(f"steps must be 2 (all and nothing) or more, not {self.steps}")


def _try_choices(search: Search, saved: Saved, choices: Iterable[CopyChoice]) -> None:
    search.message = _NOTHING_LARGE
    over: list[UntimedSchedule] = []
    seen: set[CopyChoice] = set()
    for choice in choices:
        search.message = ""
        # Neighbouring settings may give the same choice.
        base = None if choice in seen else saved.base(choice)
        seen.add(choice)
        if base is not None and not _take(search, saved.links, base, search.budget_bytes):
            over.append(base)
        search.say("the next setting of the policy")
        if search.out_of_time():
            return
    # If nothing fits, report the least budget that does.
    for base in sorted(over, key=lambda one: one.peak_bytes) if search.best is None else ():
        least_bytes = base.peak_bytes
        # Copies need no room beyond their base, so the base's peak is a budget that it fits.
        if least_bytes >= search.lowest_bytes or _take(search, saved.links, base, least_bytes):
            return
        search.message = _NO_ROOM


def _take(search: Search, links: Links, base: UntimedSchedule, budget_bytes: int) -> bool:
    """Offer `base` with its copies placed within `budget_bytes`; whether there is room."""
    placed = place_copies(search.graph, base, budget_bytes, links)
    if placed is not None:
        search.offer_evaluated(placed.schedule, placed.found, or_least=True)
    return placed is not None


@dataclass(frozen=True)
class SwapAll(_Policy):
    """Everything that backward reads goes to the host and comes back.

    Also called: vDNN_all, offload all.
    Paper: M. Rhu, N. Gimelshein, J. Clemons, A. Zulfiqar, S. W. Keckler, "vDNN: Virtualized Deep
    Neural Networks for Scalable, Memory-Efficient Neural Network Design", 2016,
    https://arxiv.org/abs/1602.08124.
    Solves: no stated problem; the budget only decides whether anything leaves at all, and how
    early it comes back. Nothing is recomputed but what is too small to send.
    Optimal: where the step fits as it is, or its copies hide behind it whole. Cost: O(copies ·
    ops).
    Shortcomings: sends what need not leave, so the device waits for the link wherever that is
    slow.

    Attributes
    ----------
    least_bytes : smaller values stay.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    name: ClassVar[str] = "swap_all"

    least_bytes: int = _LEAST_BYTES
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        check_least(1, least_bytes=self.least_bytes)

    def choices(self, saved: Saved) -> Iterator[CopyChoice]:
        if saved.large:
            yield CopyChoice(frozenset(saved.large))


@dataclass(frozen=True)
class Delta(SteppedPolicy):
    """What is cheapest to bring back leaves first, each by the cheaper of the two ways.

    Also called: DELTA, dynamic tensor offload and recomputation.
    Paper: Y. Tang, C. Wang, Y. Zhang, Y. Liu, X. Zhang, L. Qiao, Z. Lai, D. Li, "DELTA:
    Dynamically Optimizing GPU Memory beyond Tensor Recomputation", 2022,
    https://arxiv.org/abs/2203.15980.
    Solves: a knapsack of bytes to release, by ratio. The cost of a value is the lesser of making
    it again and of what its copies take beyond the time in which nobody reads it. A released value
    is hosted if the link can take it out before forward ends, and bring it in before its use
    beside those hosted so far; else it is made again. The bytes to release are tried in equal
    steps, and the fastest schedule whose true peak fits is taken. Unlike the paper: its filter and
    director run online; here they choose for the whole step.
    Optimal: where the step fits as it is. Cost: O(steps · copies · (copies + ops)).
    Shortcomings: a cost does not know what else is released, neither the chains behind a value
    that is made again, nor the queue on the link.

    Attributes
    ----------
    steps : shares of the bytes tried, none and all included.
    least_bytes : smaller values stay.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    name: ClassVar[str] = "delta"

    def choices(self, saved: Saved) -> Iterator[CopyChoice]:
        size_bytes = saved.problem.size_bytes
        ranked = sorted(saved.large, key=lambda v: cost_per_byte(saved, v))
        # Releasing nothing is the unmodified step, which has been tried.
        for i in range(1, self.steps if ranked else 0):
            short_bytes = saved.total_bytes * i // (self.steps - 1)
            released: list[int] = []
            for v in ranked:
                if short_bytes <= 0:
                    break
                released.append(v)
                short_bytes -= size_bytes[v]
            hosted = hidden_copies(saved, released)
            yield CopyChoice(hosted, frozenset(released) - hosted)


def cost_per_byte(saved: Saved, v: int) -> tuple[float, float]:
    size_bytes, again_us = saved.problem.size_bytes[v], saved.again_us[v]
    # Copies are hidden while nothing reads the value.
    unread_us = saved.begin_us[saved.first_read[v]] - saved.begin_us[saved.last_read[v] + 1]
    copies_us = saved.links.d2h.us(size_bytes) + saved.links.h2d.us(size_bytes)
    exposed_us = max(0.0, copies_us - float(unread_us))
    # The second entry breaks ties.
    return min(again_us, exposed_us) / size_bytes, again_us / size_bytes


def hidden_copies(saved: Saved, released: Sequence[int]) -> frozenset[int]:
    """Those of `released` to host: copies that hide, and what no op may make again."""
    links, size_bytes = saved.links, saved.problem.size_bytes
    free_us, hosted = 0.0, list[int]()
    # Copies leave in the order in which values are made, and return in the order of their reads.
    for v in sorted(released, key=lambda v: saved.problem.producer[v]):
        made_us = float(saved.begin_us[saved.problem.producer[v] + 1])
        out_us = max(free_us, made_us) + links.d2h.us(size_bytes[v])
        first = saved.first_read[v]
        sooner = [u for u in hosted if saved.first_read[u] <= first]
        back_us = sum(links.h2d.us(size_bytes[u]) for u in (*sooner, v))
        hides = out_us <= saved.forward_us and back_us <= saved.begin_us[first] - saved.forward_us
        # Values that cannot be made again must be hosted.
        if hides or math.isinf(saved.again_us[v]):
            free_us = out_us
            hosted.append(v)
    return frozenset(hosted)


_CHEAP = ("norm", "gelu", "silu", "rsqrt", "mul", "pow", "mean")
"""In the names of ops that norms and activation functions are made of."""


@dataclass(frozen=True)
class Fraction(SteppedPolicy):
    """One fraction of each layer goes to the host; norms and activation functions are made again.

    Also called: pipeline-parallel-aware offloading with compute-memory balanced checkpointing.
    Paper: T. Yuan, Y. Liu, X. Ye, S. Zhang, J. Tan, B. Chen, C. Song, D. Zhang, "Accelerating the
    Training of Large Language Models using Efficient Activation Rematerialization and Optimal
    Hybrid Parallelism", 2024, https://www.usenix.org/conference/atc24/presentation/yuan.
    Solves: no stated problem. Of each layer but the last, the largest values are sent while they
    fill no more than the fraction; cheap elementwise results are always made again. The fraction
    is tried in equal steps, and the fastest schedule whose true peak fits is taken. Unlike the
    paper: whole values are sent, of one stage; there is no pipeline.
    Optimal: where the step fits as it is. Cost: O(steps · copies · ops).
    Shortcomings: the same fraction early and late, although late layers have little time to leave.

    Attributes
    ----------
    steps : fractions tried, 0 and 1 included.
    least_bytes : smaller values stay.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    name: ClassVar[str] = "fraction"

    steps: int = 25

    def choices(self, saved: Saved) -> Iterator[CopyChoice]:
        kept = [v for v in saved.values if not is_cheap(saved, v)]
        large = frozenset(saved.large)
        layers = list(saved.in_layers(v for v in kept if v in large).values())
        for i in range(self.steps if saved.large else 0):
            part = i / (self.steps - 1)
            # Nothing of the last layer is sent: backward starts with it.
            hosted = [v for layer in layers[:-1] for v in largest_of(saved, layer, part)]
            yield saved.released(hosted, kept)


def is_cheap(saved: Saved, v: int) -> bool:
    op = saved.problem.graph.ops[saved.problem.producer[v]]
    return not op.no_recompute and any(word in op.target for word in _CHEAP)


def largest_of(saved: Saved, layer: list[int], part: float) -> list[int]:
    """The largest values of `layer`, as long as they fill no more than that part of its bytes."""
    size_bytes = saved.problem.size_bytes
    room_bytes = int(part * sum(size_bytes[v] for v in layer))
    found: list[int] = []
    for v in sorted(layer, key=lambda v: -size_bytes[v]):
        if size_bytes[v] <= room_bytes:
            found.append(v)
            room_bytes -= size_bytes[v]
    return found
