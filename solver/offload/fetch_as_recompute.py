"""Models a fetch as a recomputation without inputs, so that states, repair and fill serve for both.

In the problem of `with_fetches`, running a hosted op again costs what the copy takes on its link.
`untimed_schedule` reads such runs as values that arrive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import Links, TrainingGraph
from remat.schedules.schedule import Compute, Step
from remat.solver.problem import Problem
from remat.solver.state import Bytes, State, steps_of_stages


class _UntimedStep(NamedTuple):
    """One step: an op computes; a value is freed for good, leaves, or arrives."""

    kind: Literal["compute", "free", "leave", "arrive"]
    name: str


class OffDeviceSpan(NamedTuple):
    """A value is off the device between two items: that at which it leaves, that of its return."""

    value: str
    leaves: int
    returns: int


@dataclass(frozen=True)
class UntimedSchedule:
    """Copies take no time: values leave right after a use, and are back at once."""

    items: tuple[_UntimedStep, ...]
    live_bytes: Bytes  # on the device while each item runs, resident bytes included
    off_spans: tuple[OffDeviceSpan, ...]  # in the order in which values leave
    made: dict[str, int]  # the item that makes each value that is ever absent

    @property
    def peak_bytes(self) -> int:
        return int(self.live_bytes.max(initial=0))


def with_fetches(
    problem: Problem, ops: Collection[int], links: Links, *, cost_factor: float = 1.0
) -> Problem:
    """`problem` in which running one of `ops` again stands for the arrival of what it makes."""
    inputs, cost_us = list(problem.inputs), list(problem.cost_us)
    no_recompute = list(problem.no_recompute)
    for op in ops:
        inputs[op], no_recompute[op] = (), False  # a pin forbids no arrival
        # The way back: a repair fetches no value oftener than it pays.
        cost_us[op] = cost_factor * problem.output_bytes[op] / links.h2d.bytes_per_us
    return dataclasses.replace(
        problem, inputs=tuple(inputs), cost_us=tuple(cost_us), no_recompute=tuple(no_recompute)
    )


def movable(problem: Problem) -> list[bool]:
    """Which values a copy can take below the device."""
    kinds = (problem.graph.value_by_name[name].kind for name in problem.names)
    sizes = problem.size_bytes
    # An op whose results take no bytes adds to its first input, whose copy would be stale then.
    added_to = {
        problem.inputs[op][0]
        for op, outputs in enumerate(problem.outputs)
        if outputs and problem.inputs[op] and not any(sizes[v] for v in outputs)
    }
    # Random states are on the host. Autograd's engine holds tangents, whatever copies there are.
    return [
        kind not in ("rng_state", "tangent") and sizes[v] > 0 and v not in added_to
        for v, kind in enumerate(kinds)
    ]


def require_no_homes(graph: TrainingGraph, solver: str) -> None:
    """SolverError: a value has a home, or an op updates values in place."""
    moved = [value.name for value in graph.values if value.home is not None]
    moved += [name for op in graph.ops for name in op.updates]
    if moved:
        raise SolverError(
            f"capture without an optimizer that is to move: solver '{solver}' only sends "
            f"activations, and {moved[0]} is to be moved too"
        )


def untimed_schedule(state: State, hosted: Collection[int]) -> UntimedSchedule:
    """What `state`, of a problem of `with_fetches` with ops `hosted`, stands for."""
    graph = state.problem.graph
    steps = steps_of_stages(state.problem, state.rows, state.stages)
    items = _with_leaves(_arrivals(graph, steps, frozenset(hosted)))
    found, left = list[OffDeviceSpan](), dict[str, int]()
    for k, (kind, name) in enumerate(items):
        if kind == "leave":
            left[name] = k
        elif kind == "arrive":
            found.append(OffDeviceSpan(name, left.pop(name), k))
    off_spans = tuple(sorted(found, key=lambda off_span: off_span.leaves))
    away = {off_span.value for off_span in off_spans}
    made: dict[str, int] = {}
    for k, (kind, name) in enumerate(items):
        for value in graph.ops[graph.op_index[name]].outputs if kind == "compute" else ():
            if value in away:
                made.setdefault(value, k)
    return UntimedSchedule(tuple(items), _live_bytes(graph, items), off_spans, made)


def most_by_stage(graph: TrainingGraph, ran: Iterable[str], found_bytes: Iterable[int]) -> Bytes:
    """The most of `found_bytes` in each stage; `ran` has the op beside each, or an empty text."""
    most = np.zeros(len(graph.ops) + 1, np.int64)
    stage = 0
    for op, size_bytes in zip(ran, found_bytes, strict=True):
        most[stage] = max(most[stage], size_bytes)
        stage += graph.op_index.get(op) == stage  # the first run of its op ends a stage
    return most


def _arrivals(
    graph: TrainingGraph, steps: Sequence[Step], hosted: frozenset[int]
) -> list[_UntimedStep]:
    """The steps as items, in which hosted ops that run again are arrivals."""
    items, live = list[_UntimedStep](), set[str]()
    done, unwanted = set[str](), set[str]()
    for i, step in enumerate(steps):
        if not isinstance(step, Compute):
            if (name := step.value) in unwanted:
                unwanted.discard(name)
            else:
                items.append(_UntimedStep("free", name))
                live.discard(name)
            continue
        outputs = graph.ops[graph.op_index[step.op]].outputs
        if step.op in done and graph.op_index[step.op] in hosted:
            fresh = [value for value in outputs if value not in live]
            unwanted = _freed_at_once(steps, i).intersection(fresh)  # freed at once: left out
            items += [_UntimedStep("arrive", value) for value in fresh if value not in unwanted]
            live.update(value for value in fresh if value not in unwanted)
        else:
            items.append(_UntimedStep("compute", step.op))
            live.update(outputs)
        done.add(step.op)
    return items


def _freed_at_once(steps: Sequence[Step], i: int) -> set[str]:
    freed: set[str] = set()
    for step in steps[i + 1 :]:
        if isinstance(step, Compute):
            break
        freed.add(step.value)
    return freed


def _with_leaves(items: list[_UntimedStep]) -> list[_UntimedStep]:
    """`items` in which a value that is freed and arrives again leaves."""
    returns: set[str] = set()
    for k in reversed(range(len(items))):
        kind, name = items[k]
        if kind == "arrive":
            returns.add(name)
        elif kind == "free" and name in returns:
            items[k] = _UntimedStep("leave", name)
            returns.discard(name)
    return items


def _live_bytes(graph: TrainingGraph, items: Sequence[_UntimedStep]) -> Bytes:
    size = {value.name: value.size_bytes for value in graph.values}
    now_bytes, live, curve = graph.resident.total_bytes, set[str](), list[int]()
    for kind, name in items:
        running = now_bytes
        if kind == "compute":
            op = graph.ops[graph.op_index[name]]
            running += op.workspace_bytes + sum(size[value] for value in op.outputs)
            fresh = [value for value in op.outputs if value not in live]
            live.update(fresh)
            now_bytes += sum(size[value] for value in fresh)
        elif kind == "arrive":
            live.add(name)
            now_bytes += size[name]
            running = now_bytes
        else:
            live.discard(name)
            now_bytes -= size[name]
        curve.append(running)
    return np.array(curve, np.int64)
