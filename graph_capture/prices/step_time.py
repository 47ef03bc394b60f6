"""The step run as a whole, for what it takes beyond its ops.

An op that is computed again runs shortly before it is read, and costs about its price. In the step
the same op finds less in the caches, and there is work between ops. So a step on a CPU takes a
tenth or two more than the sum of its prices. Without that, overheads are shares of too little: at
45 % of its peak, a Llama was planned at 12.0 % and took 8.5.

Four runs on made data tell it: the step, the step that computes its forward again
(`recompute_time.py`), and forward that keeps results and that drops them (`keeping_time.py`). They
take turns, as a machine that others share is slow for seconds on end, and end when their least
times stand. `booking.py` says what becomes of these.

Timing every op where it stands in the step was not taken: it would charge what is computed again
for caches that it finds filled.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.devices.device_table import CPU
from remat.graph_capture.devices.free_memory import free_bytes, is_out_of_memory
from remat.graph_capture.devices.meter import Meter, have_agreed, least_agreed
from remat.graph_capture.devices.watch import Watch
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import copy_of
from remat.graph_capture.over_ranks.alone import alone
from remat.graph_capture.over_ranks.collectives import without_other_ranks
from remat.graph_capture.prices.booking import costs_of
from remat.graph_capture.prices.keeping_time import forwards, less_for_kept
from remat.graph_capture.prices.price_cache import PriceCache, WholeStep
from remat.graph_capture.prices.profile import Profile
from remat.graph_capture.prices.recompute_time import recomputing

LEAST_ROUNDS, ROUNDS, ENOUGH_US = 3, 24, 3e6
"""Rounds are fewer the longer they are."""
SOON_US = 5e5
"""Rounds that have taken less go on in any case: they cost nothing."""
MORE_SHARES = 1
"""Shares beyond the passes over the ops, for times that do not agree by then."""
ROOM = 0.5
"""Part of the free memory that a run may take."""
SPREAD = 0.02
"""Deviation of made inputs: small, so that values neither swell nor vanish in deep models."""

LEFT_OUT = (
    "the step was not timed as a whole, as that takes more than the budget: overheads may be shown "
    "too high"
)
"""What a graph notes on its prices, where they lack what the step takes beyond its ops."""
WHOLE = "cannot be timed as a whole on made data"


def whole_step(
    joint: Joint,
    graph: TrainingGraph,
    cache: PriceCache,
    rounds: StepRounds | None,
    profile: Profile | None,
) -> WholeStep | None:
    """The times of the whole step, of `profile`, of `rounds` or of `cache`; None if of none.

    What `rounds` find is kept in `cache`, and so on disk.

    Parameters
    ----------
    graph : with each op at the cost of a run on its own.
    """
    if graph.device != CPU:
        return None
    key = joint.timed_hash
    if profile is not None and key in profile.steps:
        return profile.steps[key]
    if rounds is None:
        return cache.steps.get(key) if _is_of(profile, cache.title) else None
    found = rounds.whole(graph)
    if found is None:
        return cache.steps.get(key)
    cache.keep_step(key, found)
    return cache.steps[key]


def _is_of(profile: Profile | None, title: str) -> bool:
    return profile is None or profile.title == title


@dataclass(frozen=True)
class WholeRuns:
    """The four runs of a step.

    Attributes
    ----------
    step : as it is. recomputing : with forward computed again.
    keeping, plain : forward alone, with and without what backward reads of it.
    again : names of the ops that `recomputing` runs twice. first_us : of the first run of each, in
    this order; empty where nobody took them.
    """

    step: Callable[[], Any]
    recomputing: Callable[[], Any]
    keeping: Callable[[], Any]
    plain: Callable[[], Any]
    again: tuple[str, ...] = ()
    first_us: tuple[float, ...] = ()


class StepRounds:
    """Rounds of the runs of a step: each run once, in turn.

    They are timed in shares, one after each pass over the ops, so that ops and step meet the same
    slow spells. Every other round goes in the opposite order, so that no run always follows the
    same other. The rounds end once the two least times of each run agree, taken in two shares; of
    a long step, once there are three.
    """

    def __init__(self, meter: Meter, made: Callable[[], WholeRuns | None]) -> None:
        self._meter, self._made = meter, made
        self._runs: WholeRuns | None = None
        self._shares = 0
        self._rounds: list[list[float]] = []
        self._away = 1.0

    @property
    def _is_settled(self) -> bool:
        taken_us = sum(map(sum, self._rounds))
        if self._shares < 2 or taken_us < SOON_US:
            return False
        is_long = taken_us >= ENOUGH_US and len(self._rounds) >= LEAST_ROUNDS
        return is_long or all(have_agreed(each) for each in zip(*self._rounds, strict=True))

    def some(self) -> None:
        """Take the next share; nothing once the times stand."""
        begun = len(self._rounds)
        if not self._shares:
            self._runs = self._made()
            if self._runs is not None and self._runs.first_us:
                self._rounds.append(list(self._runs.first_us))
        self._shares += 1
        while self._runs is not None and not self._is_settled and self._is_due(begun):
            try:
                watch = Watch()
                self._rounds.append(self._round(self._runs))
                self._away = min(self._away, watch.away)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self._runs = None
                warnings.warn("the step was not run to its end: memory ran out", stacklevel=2)

    def _is_due(self, begun: int) -> bool:
        """Whether a share that began with so many rounds has another."""
        own = self._rounds[begun:]
        least, most = LEAST_ROUNDS // self._meter.passes, ROUNDS // self._meter.passes
        taken_us, enough_us = sum(map(sum, own)), ENOUGH_US / self._meter.passes
        return len(own) < least or (len(own) < most and taken_us < enough_us)

    def whole(self, graph: TrainingGraph) -> WholeStep | None:
        """The least times, after the shares that are still to come; None if nothing ran.

        Parameters
        ----------
        graph : with each op at the cost of a run on its own.
        """
        with self._meter.quiet():
            while self._shares < self._meter.passes:
                self.some()
            for _ in range(MORE_SHARES):
                if sum(map(sum, self._rounds)) >= SOON_US:
                    self.some()
        if self._runs is None:
            return None
        step_us, longer_us, kept_us, plain_us = map(least_agreed, zip(*self._rounds, strict=True))
        keeping_us, again_us = max(0.0, kept_us - plain_us), max(0.0, longer_us - step_us)
        costs = less_for_kept(graph, costs_of(graph), keeping_us)
        priced_us = sum(costs[name] for name in self._runs.again)
        return WholeStep(step_us, keeping_us, again_us, priced_us, self._away)

    def _round(self, runs: WholeRuns) -> list[float]:
        each = runs.step, runs.recomputing, runs.keeping, runs.plain
        order = range(len(each))[:: -1 if len(self._rounds) % 2 else 1]
        taken_us = {number: self._meter.step_us(each[number]) for number in order}
        return [taken_us[number] for number in range(len(each))]


def is_beyond(joint: Joint, graph: TrainingGraph, most_bytes: int | None) -> bool:
    """Whether runs of the step on made data, beside the model and its batch, take more than that.

    The four runs are made together, and one of them keeps all that backward reads.
    """
    if most_bytes is None or graph.device != CPU:
        return False
    needed_bytes = graph.resident.total_bytes + peak_bytes(graph) + _made_bytes(joint)
    return needed_bytes > most_bytes


def step_rounds(
    joint: Joint,
    graph: TrainingGraph,
    meter: Meter,
    cache: PriceCache,
    profile: Profile | None,
    most_bytes: int | None = None,
) -> StepRounds | None:
    """The rounds of a step on a CPU.

    None where its times are known, where a `profile` of another machine is used, and where they
    take more than `most_bytes`.
    """
    key = joint.timed_hash
    is_known = cache.has_step(key, meter) or (profile is not None and key in profile.steps)
    if graph.device != CPU or is_known or not _is_of(profile, meter.title):
        return None
    if is_beyond(joint, graph, most_bytes):
        return None
    return StepRounds(meter, lambda: _runs_of(joint, graph, meter))


def _runs_of(joint: Joint, graph: TrainingGraph, meter: Meter) -> WholeRuns | None:
    """The runs of a step, each of which has been run once.

    None for a step that needs more than half of the free memory, or fails on made data; where the
    system does not say what is free, for any.
    """
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    if not _has_room(peak_bytes(graph) + _made_bytes(joint), meter.device):
        return None
    twice = recomputing(joint)
    whole = copy_of(joint.module), twice.module, *forwards(joint)
    made = [without_other_ranks(module) for module in whole]
    try:
        inputs = [_step_input(node) for node in placeholders]
        runs = [partial(module, *inputs) for module in made]
        first_us = [_first_us(run) for run in runs]
    except (RuntimeError, IndexError, ValueError, MemoryError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        why = "was not run: memory ran out" if is_out_of_memory(error) else WHOLE
        warnings.warn(
            f"the step {why} ({said}); what it takes beyond "
            "its ops is not counted, so that overheads may be shown too high",
            stacklevel=2,
        )
        return None
    return WholeRuns(*runs, again=twice.again, first_us=tuple(first_us))


def _first_us(run: Callable[[], Any]) -> float:
    """The time of the first run of all, which may also find that there is no memory for it."""
    watch = Watch()
    alone(run)
    return watch.taken_us


def _has_room(size_bytes: int, device: str) -> bool:
    try:
        return size_bytes <= ROOM * free_bytes(device)
    except BudgetError:  # nobody knows: prices of single ops are enough for a plan
        return False


def _made_bytes(joint: Joint) -> int:
    """Bytes of the inputs that a run on made data has of its own."""
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    return sum(n.meta["val"].untyped_storage().nbytes() for n in _tensors(placeholders))


def peak_bytes(graph: TrainingGraph) -> int:
    """The most bytes live when every op runs once, without resident ones.

    The judge of schedules says the same (a test holds that); this package does not import it.
    """
    sizes = {value.name: value.size_bytes for value in graph.values if value.producer}
    readers = Counter(name for op in graph.ops for name in {*op.inputs} if name in sizes)
    readers.update(name for name in graph.outputs if name in sizes)
    live = most = 0
    for op in graph.ops:
        live += sum(sizes[name] for name in op.outputs)
        most = max(most, live + op.workspace_bytes)
        read = {name for name in op.inputs if name in sizes}
        readers.subtract(read)
        live -= sum(sizes[name] for name in read.union(op.outputs) if not readers[name])
    return most


def _tensors(nodes: list[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if isinstance(node.meta.get("val"), Tensor)]


def _step_input(node: fx.Node) -> Any:
    """Small numbers around zero; for integers zeros, which are valid indices."""
    like: Any = node.meta.get("val")
    if not isinstance(like, Tensor):
        return like
    # Filled as a flat storage: an expanded tensor has elements that share a place.
    size = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True) if n)
    flat = torch.empty(max(size, 0), dtype=like.dtype, device=like.device)
    made = flat.normal_(0, SPREAD) if like.is_floating_point() else flat.zero_()
    return made.as_strided(like.shape, like.stride())
