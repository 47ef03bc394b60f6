"""The least time of a tiny graph with recomputations and copies to the host, by exhaustive search.

Dijkstra over what has run, what is on the device and on the host with when it arrives, and when the
two links are free. It knows nothing of cuts, and follows `simulate`'s rules: a copy waits for its
link, its source and what the device was given before it; a value leaves the device when copies out
of it have ended. A copy on the host leaves it at once, which only makes the optimum lower.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from remat.graph_capture.graph import Link, Links, Op, Resident, TrainingGraph, Value
from remat.solver.problem import Problem
from tests.links import with_links

MOST_STATES = 150_000
ROOMY_BYTES = 1 << 40
Arrivals = frozenset[tuple[int, float]]
"""Values in a tier, each with the time until it has arrived."""


@dataclass(frozen=True)
class Case:
    """A tiny graph with links, at a budget."""

    graph: TrainingGraph
    links: Links
    budget_bytes: int


@dataclass(frozen=True)
class _Point:
    """`ran` ops have first run. Times are from the device's clock on."""

    ran: int
    device: Arrivals
    host: Arrivals
    d2h_us: float = 0.0
    h2d_us: float = 0.0

    def later(self, us: float) -> _Point:
        """The same when the device's clock has moved on."""
        return _Point(
            self.ran, _moved(self.device, us), _moved(self.host, us),
            max(0.0, self.d2h_us - us), max(0.0, self.h2d_us - us),
        )  # fmt: skip


def _moved(arrivals: Arrivals, us: float) -> Arrivals:
    return frozenset((v, max(0.0, until - us)) for v, until in arrivals)


def random_case(rng: random.Random, most_ops: int, *, is_host_small: bool = False) -> Case:
    """Small numbers, a budget near what one op needs, links about as fast as ops."""
    graph = _random_graph(rng, rng.randint(4, most_ops))
    problem = Problem.of(graph)
    floor = max(problem.working_set_bytes[t] for t in range(problem.n_ops))
    out, back = (Link(rng.choice((0.5, 1.0, 2.0)), rng.choice((0.0, 0.0, 1.5))) for _ in range(2))
    host_bytes = rng.randint(1, 4) if is_host_small else ROOMY_BYTES
    links = Links(out, back, host_bytes, source="a test")
    return Case(with_links(graph, links), links, floor + rng.randint(0, 2))


def _random_graph(rng: random.Random, n_ops: int) -> TrainingGraph:
    ops, values, made = list[Op](), list[Value](), list[str]()
    for i in range(n_ops):
        near = made[-3:]
        inputs = tuple(rng.sample(near, min(rng.randint(1, 2), len(near))))
        phase = "forward" if i < (n_ops + 1) // 2 else "backward"
        ops.append(Op(f"o{i}", "t", phase, inputs, (f"v{i}",), float(rng.randint(1, 6)), 0))
        values.append(Value(f"v{i}", rng.randint(1, 4), f"o{i}"))
        made.append(f"v{i}")
    outputs = {made[-1], *(rng.sample(made, 1) if rng.random() < 0.3 else ())}
    ordered = tuple(name for name in made if name in outputs)
    return TrainingGraph("tiny", tuple(ops), tuple(values), (), ordered, Resident())


def least_time_us(case: Case) -> float | None:
    """The least time of any schedule; infinite where there is none, None after too many states."""
    problem = Problem.of(case.graph)
    start = _Point(0, frozenset(), frozenset())
    best: dict[_Point, float] = {start: 0.0}
    ticks = itertools.count()
    heap: list[tuple[float, int, _Point]] = [(0.0, next(ticks), start)]
    for _ in range(MOST_STATES):
        if not heap:
            return float("inf")
        now_us, _, point = heapq.heappop(heap)
        if best[point] < now_us:
            continue
        if point.ran == problem.n_ops and _is_done(problem, point):
            return now_us
        for took_us, following in _steps(problem, case, point):
            time_us = now_us + took_us
            if time_us < best.get(following, float("inf")):
                best[following] = time_us
                heapq.heappush(heap, (time_us, next(ticks), following))
    return None


def _is_done(problem: Problem, point: _Point) -> bool:
    arrived = {v for v, until in point.device if until == 0}
    return arrived.issuperset(problem.needs[problem.n_ops])


def _steps(problem: Problem, case: Case, point: _Point) -> Iterator[tuple[float, _Point]]:
    yield from _computations(problem, case, point)
    yield from _copies(problem, case, point)
    yield from _drops(point)
    if case.links.host_bytes < ROOMY_BYTES:
        yield from _host_drops(point)
    if point.ran == problem.n_ops:
        waits = [until for _, until in point.device if until > 0]
        if waits:
            yield min(waits), point.later(min(waits))


def _computations(problem: Problem, case: Case, point: _Point) -> Iterator[tuple[float, _Point]]:
    there = dict(point.device)
    used = sum(problem.size_bytes[v] for v in there)
    for op in range(min(point.ran + 1, problem.n_ops)):
        is_again = op < point.ran
        if is_again and all(v in there for v in problem.outputs[op]):
            continue
        if any(v not in there for v in problem.inputs[op]):
            continue
        if used + problem.output_bytes[op] > case.budget_bytes:
            continue
        took = max([0.0, *(there[v] for v in problem.inputs[op])]) + problem.cost_us[op]
        made = {v: took for v in problem.outputs[op] if v not in there}
        ran = point.ran if is_again else op + 1
        with_made = replace(point, ran=ran, device=frozenset({**there, **made}.items()))
        yield took, with_made.later(took)


def _copies(problem: Problem, case: Case, point: _Point) -> Iterator[tuple[float, _Point]]:
    device, host = dict(point.device), dict(point.host)
    size = problem.size_bytes
    room = case.links.host_bytes - sum(size[v] for v in host)
    for v, until in device.items():
        if v not in host and size[v] <= room:
            end = max(point.d2h_us, until) + case.links.d2h.us(size[v])
            yield 0.0, replace(point, host=frozenset({**host, v: end}.items()), d2h_us=end)
    room = case.budget_bytes - sum(size[v] for v in device)
    for v, until in host.items():
        if v not in device and size[v] <= room:
            end = max(point.h2d_us, until) + case.links.h2d.us(size[v])
            yield 0.0, replace(point, device=frozenset({**device, v: end}.items()), h2d_us=end)


def _drops(point: _Point) -> Iterator[tuple[float, _Point]]:
    host = dict(point.host)
    for v, until in point.device:
        wait = max(until, host.get(v, 0.0))
        yield wait, replace(point, device=point.device - {(v, until)}).later(wait)


def _host_drops(point: _Point) -> Iterator[tuple[float, _Point]]:
    """What is whole on the host may leave it; there is a point in it where room is short."""
    for v, until in point.host:
        if until == 0:
            yield 0.0, replace(point, host=point.host - {(v, until)})
