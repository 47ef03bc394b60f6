"""A chain whose first value goes to the host and comes back, with figures that a hand finds."""

from __future__ import annotations

from remat.graph_capture.graph import Link, Links, Op, Resident, TrainingGraph, Value
from remat.schedules.outcome import Result
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule
from remat.solver.result import evaluate_schedule

BUDGET_BYTES = 1160
SIZES = {"a": 100, "b": 40, "c": 100, "gc": 10, "gb": 10, "ga": 10}
COSTS = {"a": 5.0, "b": 20.0, "c": 7.0, "gc": 1.0, "gb": 1.0, "ga": 1.0}
READS = {
    "a": ("x",), "b": ("a",), "c": ("b",), "gc": ("c",), "gb": ("gc", "b"), "ga": ("gb", "a")
}  # fmt: skip


def copying_chain(gb_s: float = 0.01, host_bytes: int = 500) -> TrainingGraph:
    """x -> a -> b -> c -> loss, whose backward reads c, b, a in turn; 10 bytes a microsecond."""
    ops = tuple(
        Op(name, f"aten.{name}.default", "forward" if name in "abc" else "backward",
           READS[name], (name,), COSTS[name], module=f"layers.{'abc'.find(name[-1])}")
        for name in SIZES
    )  # fmt: skip
    values = (Value("x", 0), *(Value(name, size, name) for name, size in SIZES.items()))
    link = Link(gb_s * 1e3)
    links = Links(link, link, host_bytes, source="a test")
    resident = Resident(parameters_bytes=1000)
    return TrainingGraph("Chain", ops, values, (), ("ga",), resident, links=links)


def copying_schedule(graph: TrainingGraph) -> Schedule:
    """a is copied while b and c run, and comes back once c is free: 10 us, of which 2 are hidden.

    a ends at 5, its copy at 15, b at 25, c at 32, gc at 33. a comes back from 33 to 43 while gb
    runs to 34, so ga waits for 9 us and ends at 44.
    """
    steps = (
        Compute("a"), Offload("a"), Compute("b"), Free("a"), Compute("c"), Compute("gc"), Free("c"),
        Fetch("a"), Compute("gb"), Free("gc"), Free("b"), Compute("ga"), Free("a"), Free("gb"),
        Free("a", "host"),
    )  # fmt: skip
    return Schedule.for_graph(graph, steps, budget_bytes=BUDGET_BYTES, solver="joint")


def copying_result(graph: TrainingGraph) -> Result:
    """The schedule as a solver would return it."""
    schedule = copying_schedule(graph)
    return evaluate_schedule(
        graph, schedule, budget_bytes=BUDGET_BYTES, lower_bound_us=graph.time_us
    )
