"""The step run as a whole, for what it takes beyond its ops, on a CPU a tenth or two.

On a CUDA device, where host and device work at once, it may take less (`queue.py`).

Without that, overheads are shares of too little: a Llama was planned at 12.0 % and took 8.5. Three
runs on made data take turns: the step (`with_forward_timed`), the step that computes forward again
(`recomputing`), and forward that drops its results (`dropping`). Timing every op where it stands
would charge what is computed again for caches that it finds filled.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, fx

from remat.graph_capture.costs.cache import CostCache, Profile, WholeStepTimes
from remat.graph_capture.costs.op_times import KERNEL_ERRORS, why_not_run
from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.devices.memory import free_bytes, is_out_of_memory
from remat.graph_capture.devices.meter import LoadAwareTimer, Meter, have_agreed
from remat.graph_capture.distributed.collectives import run_locally, without_other_ranks
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TANGENTS, TrainingGraph
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import copy_of, is_getitem

# What it costs to keep results for backward, beside dropping them.
#
# A dropped result leaves its memory, near the core, to the next one; costs of single ops do not
# know this: plans of a mixture of experts said to take 13.4 % took 9.4 %. So forward is timed as it
# keeps and as it drops: the difference is taken off the costs of what is kept, and `calibrated`
# adds it to the step. In turns, an LSTM's came out between -0.5 and +1.4 % of a step, in five runs
# in a row between -8 and +7 %. Not taken: costs with caches warm, or for each byte read again.


Costs = Mapping[str, float]  # the time of one run of each op, in us, by its name
LEAST_KEPT_PART = 0.5  # part of its cost that every op keeps at least


class ForwardWatch:
    """Times forward within a step: `taken_us` is of the step that ran last."""

    def __init__(self) -> None:
        self.taken_us, self._timer = 0.0, LoadAwareTimer()

    def begin(self) -> None:
        self._timer = LoadAwareTimer()

    def end(self) -> None:
        self.taken_us = self._timer.taken_us


def with_forward_timed(joint: Joint, watch: ForwardWatch) -> fx.GraphModule:
    def tell(graph: fx.Graph) -> None:
        nodes = list(graph.nodes)
        first = next(node for node in nodes if node.op != "placeholder")
        for node, told in ((first, watch.begin), (nodes[_end_of_forward(joint, nodes)], watch.end)):
            with graph.inserting_before(node):
                graph.call_function(told)

    return copy_of(joint.module, tell)


def dropping(joint: Joint) -> fx.GraphModule:
    """Forward alone, which frees what backward would read."""

    def drop(graph: fx.Graph) -> None:
        nodes = list(graph.nodes)
        end = _end_of_forward(joint, nodes)
        output = nodes[-1]
        # A node with several results is no tensor to return: its parts are.
        own = [n for n in nodes[:end] if output in n.users and n.op == "call_function"]
        output.args = (tuple(node for node in own if not any(map(is_getitem, node.users))),)
        for node in reversed(nodes[end:-1]):
            if node.op != "placeholder":
                graph.erase_node(node)

    return copy_of(joint.module, drop)


def less_for_kept(graph: TrainingGraph, costs: Costs, saved_us: float) -> Costs:
    """`costs` with `saved_us` taken off those of values kept for backward, in proportion to bytes;
    but each op keeps `LEAST_KEPT_PART` of its cost."""
    of_op = bytes_for_backward(graph)
    us_per_byte = saved_us / max(1, sum(of_op.values()))
    return {
        name: max(LEAST_KEPT_PART * cost_us, cost_us - us_per_byte * of_op.get(name, 0))
        for name, cost_us in costs.items()
    }


def bytes_for_backward(graph: TrainingGraph) -> dict[str, int]:
    """Bytes that backward reads of the results of each forward op."""
    read = {name for op in graph.ops if op.phase == "backward" for name in op.inputs}
    sizes = {value.name: value.size_bytes for value in graph.values if value.name in read}
    return {
        op.name: sum(sizes.get(name, 0) for name in op.outputs)
        for op in graph.ops
        if op.phase == "forward"
    }


def _end_of_forward(joint: Joint, nodes: Sequence[fx.Node]) -> int:
    """The place of the first node of backward; of the output, if there is none."""
    phases = {op.name: op.phase for op in joint.graph.ops}
    backward = {n.name for name, n in joint.node_of_op.items() if phases[name] == "backward"}
    return next((i for i, node in enumerate(nodes) if node.name in backward), len(nodes) - 1)


# What computing again really takes: one step is run that makes forward again in segments, about as
# many as the root of the number of its ops, and keeps only what others read of a segment (Chen et
# al., Training Deep Nets with Sublinear Memory Cost, 2016, https://arxiv.org/abs/1604.06174).
#
# Where each result is made again right before it is read, all of what keeping takes is saved
# (`less_for_kept`). Where a stretch is made again and held, nothing is, and reading from far away
# costs more. Plans lie between, so forward's costs are multiplied by the root of what the segments
# took over what their costs say. Over 33 plans of six models, overheads were then off by 0.38
# points in the median and 1.6 at worst; with nothing taken off and no factor by 0.57 and 2.5. Not
# taken: segments that a solver cuts, which gave like factors.


LEAST_OF_RECOMPUTING, MOST_OF_RECOMPUTING = 0.5, 2.0  # beyond, it says more of the clock
_SEGMENTED = 0.5  # power of the factor: 1 suits long stretches, 0 what is made right before use
# On a CUDA device, caches gain nothing from what stays near, so the factor itself counts. The time
# of the host for views, which are no ops, is in it: small models took up to 4.5 times their costs.
_MOST_ON_CUDA = 10.0


@dataclass(frozen=True)
class _Recomputing:
    module: fx.GraphModule  # called as the joint module
    again: tuple[str, ...]  # names of the ops that run twice


def recomputing(joint: Joint) -> _Recomputing:
    """The joint step, in which what only a segment itself reads of it is made again in backward."""
    again: list[str] = []
    module = copy_of(joint.module, lambda graph: again.extend(_in_segments(joint, graph)))
    return _Recomputing(module, tuple(name for name in again if name in joint.node_of_op))


def _in_segments(joint: Joint, graph: fx.Graph) -> list[str]:
    """Let a copy of the joint graph compute forward again; the names of what it runs again."""
    nodes = list(graph.nodes)
    segments = _segments(joint, nodes)
    later = {node: place for place, node in enumerate(nodes[sum(map(len, segments)) : -1])}
    pinned = {op.name for op in joint.graph.ops if op.no_recompute}
    again: list[str] = []
    for segment in segments:
        inside = set(segment)
        # What another segment reads is kept, or making one again would make those before it again.
        calls = (n for n in segment if n.op == "call_function" and n.name not in pinned)
        dropped = [n for n in calls if all(user in inside or user in later for user in n.users)]
        again += _make_again(graph, dropped, later)
    return again


def as_recomputed(graph: TrainingGraph, costs: Costs, again_us: float, expected_us: float) -> Costs:
    """`costs` with forward between its ops' costs and what they took in segments. `again_us`, for
    the ops that ran again, was `expected_us` by their costs; 0 if none ran."""
    factor = 1.0
    if expected_us:
        is_cpu, ratio = graph.device == CPU, max(LEAST_OF_RECOMPUTING, again_us / expected_us)
        most = MOST_OF_RECOMPUTING if is_cpu else _MOST_ON_CUDA
        factor = min(most, ratio) ** (_SEGMENTED if is_cpu else 1.0)
    forward = {op.name for op in graph.ops if op.phase == "forward"}
    return {name: factor * us if name in forward else us for name, us in costs.items()}


def _segments(joint: Joint, nodes: Sequence[fx.Node]) -> list[Sequence[fx.Node]]:
    """All nodes up to the last op of forward, in stretches of equally many ops."""
    forward = {op.name for op in joint.graph.ops if op.phase == "forward"}
    forward &= joint.node_of_op.keys()
    after = [place + 1 for place, node in enumerate(nodes) if node.name in forward]
    length = max(1, math.isqrt(len(after)))
    ends = dict.fromkeys([0, *after[length - 1 :: length], *after[-1:]])
    return [nodes[begin:end] for begin, end in pairwise(ends)]


def _make_again(graph: fx.Graph, dropped: list[fx.Node], later: dict[fx.Node, int]) -> list[str]:
    """Let nodes of `later` read copies of `dropped`, each before its first reader; their names."""
    readers = {node: [user for user in node.users if user in later] for node in dropped}
    if not (needed := {node for node in dropped if readers[node]}):
        return []
    for node in reversed(dropped):  # what a needed node reads inside is needed too
        if any(user in needed for user in node.users):
            needed.add(node)
    first = min((user for users in readers.values() for user in users), key=later.__getitem__)
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(first):
        for node in dropped:
            if node in needed:
                copies[node] = graph.node_copy(node, lambda source: copies.get(source, source))
    for node, copy in copies.items():
        for user in readers[node]:
            user.replace_input_with(node, copy)
    return [node.name for node in copies]


# What a step takes beyond its ops is added to the arrival of the tangents, the one op that every
# schedule runs exactly once and that costs nothing. So nobody else need know of it.


def calibrated(graph: TrainingGraph, step: WholeStepTimes) -> TrainingGraph:
    """`graph`, with ops at their costs alone, taking the step's time unless its ops take longer."""
    alone = costs_of(graph)
    # Keeping comes first: the step in segments was held against costs that are cheaper by it.
    cheaper = less_for_kept(graph, alone, step.keeping_us)
    costs = dict(as_recomputed(graph, cheaper, step.again_us, step.expected_us))
    least_us = sum(alone.values())
    if graph.device != CPU and step.step_us:
        costs, least_us = _within(graph, costs, step.step_us), 0.0
    ops_us = sum(costs.values())
    # A step in a fast spell may take less than its ops. No op then costs less than nothing.
    beyond_us = max(step.step_us, least_us, ops_us) - ops_us
    for op in graph.ops:
        if op.target == TANGENTS:
            costs[op.name] += beyond_us
    return with_costs(graph, costs)


def _within(graph: TrainingGraph, costs: Costs, step_us: float) -> dict[str, float]:
    """`costs`, with those of backward scaled so that all take the step's time, if they take more:
    it runs once in every schedule, and what forward takes again was timed."""
    once = {op.name for op in graph.ops if op.phase == "backward"}
    once_us = sum(costs[name] for name in once)
    left_us = step_us - (sum(costs.values()) - once_us)
    factor = left_us / once_us if 0 < left_us < once_us else 1.0
    return {name: factor * us if name in once else us for name, us in costs.items()}


def costs_of(graph: TrainingGraph) -> dict[str, float]:
    return {op.name: op.cost_us for op in graph.ops}


def with_costs(graph: TrainingGraph, costs: Costs) -> TrainingGraph:
    return replace(graph, ops=tuple(replace(op, cost_us=costs[op.name]) for op in graph.ops))


_LEAST_ROUNDS, ROUNDS, _ENOUGH_US = 3, 24, 3e6  # rounds are fewer the longer they are
_SOON_US = 5e5  # rounds that have taken less go on in any case: they cost nothing
_MORE_SHARES = 1  # shares beyond the passes over the ops, for times that do not agree by then
_ROOM = 0.5  # part of the free memory that a run may take
_SPREAD = 0.02  # of made inputs: small, so that values neither swell nor vanish in deep models

# Of costs that lack what the step takes beyond its ops.
STEP_NOT_TIMED = "overheads may look too high: the whole step exceeds the budget and was not timed"


def whole_step(
    joint: Joint, graph: TrainingGraph, cache: CostCache, rounds: StepRounds | None,
    profile: Profile | None,
) -> WholeStepTimes | None:  # fmt: skip
    """Of `profile`, `rounds` (which `cache` then keeps) or `cache`; None if of none. `graph` has
    each op at its cost without that."""
    key = joint.timed_hash
    if profile is not None and key in profile.steps:
        return profile.steps[key]
    if rounds is None:
        return cache.steps.get(key) if _is_of(profile, cache.title) else None
    if (found := rounds.whole(graph)) is None:
        return cache.steps.get(key)
    cache.keep_step(key, found)
    return cache.steps[key]


def _is_of(profile: Profile | None, title: str) -> bool:
    return profile is None or profile.title == title


@dataclass(frozen=True)
class WholeRuns:
    step: Callable[[], Any]  # as it is
    recomputing: Callable[[], Any]  # with forward computed again
    plain: Callable[[], Any]  # forward alone, which drops its results
    forward_us: Callable[[], float]  # of the step that ran last
    again: tuple[str, ...] = ()  # names of the ops that `recomputing` runs twice
    first_us: tuple[float, ...] = ()  # of the first round; empty where nobody took it


class StepRounds:
    """Rounds of the runs of a step: each run once, in turn. Forward in the step is another time.

    They are timed in shares, one after each pass over the ops, so that both meet the same slow
    spells, and in alternate orders, so that no run always follows the same other. They end once the
    two least times of each run agree, taken in two shares; of a long step, once there are three."""

    def __init__(self, meter: Meter, made: Callable[[], WholeRuns | None]) -> None:
        self._meter, self._made = meter, made
        self._runs: WholeRuns | None = None
        self._rounds: list[list[float]] = []
        self._shares, self._away = 0, 1.0

    @property
    def _is_settled(self) -> bool:
        taken_us = sum(map(sum, self._rounds))
        if self._shares < 2 or taken_us < _SOON_US:
            return False
        is_long = taken_us >= _ENOUGH_US and len(self._rounds) >= _LEAST_ROUNDS
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
                watch = LoadAwareTimer()
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
        least, most = _LEAST_ROUNDS // self._meter.passes, ROUNDS // self._meter.passes
        taken_us, enough_us = sum(map(sum, own)), _ENOUGH_US / self._meter.passes
        return len(own) < least or (len(own) < most and taken_us < enough_us)

    def whole(self, graph: TrainingGraph) -> WholeStepTimes | None:
        """The least times, after the shares that are still to come; None if nothing ran."""
        with self._meter.quiet():
            while self._shares < self._meter.passes:
                self.some()
            for _ in range(_MORE_SHARES):
                if sum(map(sum, self._rounds)) >= _SOON_US:
                    self.some()
            if self._runs is None:
                return None
            again, self._runs = self._runs.again, None  # its inputs go before the cache is emptied
        each_us = map(self._meter.of_rounds, zip(*self._rounds, strict=True))
        step_us, longer_us, plain_us, kept_us = each_us
        keeping_us, again_us = max(0.0, kept_us - plain_us), max(0.0, longer_us - step_us)
        costs = less_for_kept(graph, costs_of(graph), keeping_us)
        expected_us = sum(costs[name] for name in again)
        return WholeStepTimes(step_us, keeping_us, again_us, expected_us, self._away)

    def _round(self, runs: WholeRuns) -> list[float]:
        each = runs.step, runs.recomputing, runs.plain
        order = range(len(each))[:: -1 if len(self._rounds) % 2 else 1]
        taken_us = {number: self._meter.step_us(each[number]) for number in order}
        return [*(taken_us[number] for number in range(len(each))), runs.forward_us()]


def is_beyond(joint: Joint, graph: TrainingGraph, most_bytes: int | None) -> bool:
    """Whether runs of the step, which keep all that backward reads, take more than that."""
    if most_bytes is None:
        return False
    return graph.resident.total_bytes + peak_bytes(graph) + _made_bytes(joint) > most_bytes


def step_rounds(
    joint: Joint, graph: TrainingGraph, meter: Meter, cache: CostCache, profile: Profile | None,
    most_bytes: int | None = None,
) -> StepRounds | None:  # fmt: skip
    """None where times are known, where a `profile` is of another machine, and where the step takes
    more than `most_bytes`."""
    key = joint.timed_hash
    is_known = cache.has_step(key, meter) or (profile is not None and key in profile.steps)
    if is_known or not _is_of(profile, meter.title):
        return None
    is_out = is_beyond(joint, graph, most_bytes)
    return None if is_out else StepRounds(meter, lambda: _runs_of(joint, graph, meter))


def _runs_of(joint: Joint, graph: TrainingGraph, meter: Meter) -> WholeRuns | None:
    """Each has run once. None for a step that fails on made data, or needs more than half of the
    free memory; for any where the system does not say what is free."""
    if not _has_room(peak_bytes(graph) + _made_bytes(joint), meter.device):
        return None
    twice, watch = recomputing(joint), ForwardWatch()
    is_cpu = graph.device == CPU
    whole = [copy_of(joint.module), twice.module]
    if is_cpu:  # elsewhere, results that are dropped leave nothing nearer to the next ones
        whole = [with_forward_timed(joint, watch), twice.module, dropping(joint)]
    made = [without_other_ranks(module) for module in whole]
    try:
        inputs = [_step_input(n) for n in joint.module.graph.find_nodes(op="placeholder")]
        runs = [partial(module, *inputs) for module in made]
        taken_us: list[float] = []
        for run in runs:
            timer = LoadAwareTimer()  # the first run of all may find that memory is short
            run_locally(run)
            taken_us.append(timer.taken_us)
        first_us = (*taken_us, watch.taken_us) if is_cpu else ()  # a device may not have ended
    except KERNEL_ERRORS as error:
        warnings.warn(
            "overheads may be shown too high: the step "
            f"{why_not_run(error, 'cannot be timed as a whole on made data')}, so what it takes "
            "beyond its ops is not counted",
            stacklevel=2,
        )
        return None
    plain = runs[2] if is_cpu else lambda: None
    return WholeRuns(runs[0], runs[1], plain, lambda: watch.taken_us, twice.again, first_us)


def _has_room(size_bytes: int, device: str) -> bool:
    try:
        return size_bytes <= _ROOM * free_bytes(device)
    except BudgetError:  # nobody knows: costs of single ops are enough for a plan
        return False


def _made_bytes(joint: Joint) -> int:
    """Bytes of the inputs that a run on made data has of its own."""
    given = (n.meta.get("val") for n in joint.module.graph.find_nodes(op="placeholder"))
    return sum(one.untyped_storage().nbytes() for one in given if isinstance(one, Tensor))


def peak_bytes(graph: TrainingGraph) -> int:
    """The most bytes live when every op runs once, without resident ones: as the judge of schedules
    says (a test holds that), which this package does not import."""
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


def _step_input(node: fx.Node) -> Any:
    """Small numbers around zero; for integers zeros, which are valid indices."""
    like: Any = node.meta.get("val")
    if not isinstance(like, Tensor):
        return like
    # Filled as a flat storage: an expanded tensor has elements that share a place.
    size = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True) if n)
    flat = torch.empty(max(size, 0), dtype=like.dtype, device=like.device)
    made = flat.normal_(0, _SPREAD) if like.is_floating_point() else flat.zero_()
    return made.as_strided(like.shape, like.stride())
