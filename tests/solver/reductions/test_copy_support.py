"""What is planned with copies and what is refused: pins, orders, chunks, updates, homes."""

from __future__ import annotations

import msgspec
import pytest

from remat.graph_capture.errors import ScheduleError, SolverError
from remat.graph_capture.graph import UPDATE, Choice, Link, Links, Op, Region, TrainingGraph, Value
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.problem import Problem
from remat.solver.reductions.updates import late_steps
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.links import links, with_links
from tests.solver.graphs.random_graphs import gpt_like

MIB = 1 << 20
FAST = Links(Link(1e6), Link(1e6), 1 << 40)


def with_modules(graph: TrainingGraph) -> TrainingGraph:
    """`graph` whose ops each stand in a module of their own."""
    ops = (msgspec.structs.replace(op, module=op.name) for op in graph.ops)
    return msgspec.structs.replace(graph, ops=tuple(ops))


def test_what_is_kept_runs_once_and_may_be_copied() -> None:
    graph = with_links(with_modules(gpt_like(3)), links(50.0))
    budget_bytes = peak_bytes_of(gpt_like(3)) * 70 // 100
    free, kept = (
        solve_within(graph, budget_bytes, keep=keep, time_limit_s=AMPLE_S, gap=0.05)
        for keep in ((), tuple(op.name for op in graph.ops if op.phase == "forward"))
    )
    assert free.schedule is not None
    assert kept.schedule is not None
    assert kept.schedule.moves
    runs = kept.schedule.computations()
    assert all(runs[op.name] == 1 for op in graph.ops if op.phase == "forward")
    assert kept.lower_bound_us >= free.lower_bound_us / (1 + 1e-6)
    assert kept.lower_bound_us <= kept.time_us == simulate(graph, kept.schedule).time_us


@pytest.mark.parametrize("solver", ["auto", "joint"])
def test_pins_that_recompute_are_refused_with_links(solver: str) -> None:
    graph = with_links(with_modules(gpt_like(1)))
    with pytest.raises(SolverError, match=r"leave out recompute= or host=: pins"):
        solve_within(graph, 1 << 40, solver, recompute="f3")
    budget_bytes = peak_bytes_of(gpt_like(1))
    assert solve_within(graph, budget_bytes, "chen_sqrt", recompute="f3").schedule is not None


def test_a_free_order_is_refused_with_links() -> None:
    with pytest.raises(
        SolverError, match=r"leave out host=: order free is not planned with copies"
    ):
        solve_within(with_links(gpt_like(1)), 1 << 40, order="free")


def test_values_with_a_home_are_refused() -> None:
    graph = with_links(gpt_like(1))
    values = tuple(
        value if value.producer else msgspec.structs.replace(value, home="host")
        for value in graph.values
    )
    with pytest.raises(
        SolverError, match="'joint' only sends activations, and tokens is to be moved"
    ):
        solve_within(msgspec.structs.replace(graph, values=values), 1 << 40)


def chunks_graph() -> TrainingGraph:
    """Two layers whose results backward reads, and a head that may run in two chunks."""
    ops = (
        Op("a", "mm", "forward", ("x",), ("a",), 400.0),
        Op("b", "mm", "forward", ("a",), ("b",), 400.0),
        Op("head", "mm", "forward", ("b",), ("z",), 20.0),
        Op("loss", "loss", "forward", ("z",), ("l",), 5.0),
        Op("tangents", "remat.tangents", "backward", (), ("t",), no_recompute="they arrive"),
        Op("dz", "loss_backward", "backward", ("z", "t"), ("dz",), 5.0),
        Op("db", "mm", "backward", ("dz", "b"), ("db",), 400.0),
        Op("da", "mm", "backward", ("db", "a"), ("da",), 400.0),
    )
    sizes = {"a": 16, "b": 16, "z": 32, "dz": 32, "db": 16, "da": 16}
    values = (
        Value("x", MIB, kind="input"), Value("l", 4, "loss", "output"),
        Value("t", 4, "tangents", "tangent"),
        *(Value(name, size * MIB, name if name != "z" else "head") for name, size in sizes.items()),
    )  # fmt: skip
    forward = Op("loss_n", "chunks", "forward", ("b",), ("l",), 25.0, 16 * MIB)
    backward = Op("db", "chunks_back", "backward", ("b", "t"), ("db",), 430.0, 16 * MIB)
    made = (Value("l", 4, "loss_n", "output"), Value("db", 16 * MIB, "db"))
    choice = Choice(2, True, (("tangents", forward), ("da", backward)), made)
    region = Region("head", ("head", "loss", "dz", "db"), (choice,))
    return TrainingGraph(
        "toy", ops, values, ("l",), ("l", "t", "da"), regions=(region,), cost_origin="measured"
    )


def test_regions_run_in_chunks_beside_copies() -> None:
    graph = chunks_graph()
    alone = solve_within(graph, 60 * MIB, time_limit_s=AMPLE_S)
    found = solve_within(with_links(graph, FAST), 60 * MIB, time_limit_s=AMPLE_S)
    assert alone.schedule is not None
    assert found.schedule is not None
    assert found.schedule.chunks
    assert found.schedule.moves
    assert found.time_us < alone.time_us
    assert simulate(with_links(graph, FAST), found.schedule).peak_bytes <= 60 * MIB


def update_graph() -> TrainingGraph:
    """Forward makes a and b of w; backward has the gradient of w long before it needs b."""
    ops = (
        Op("a", "aten.mm.default", "forward", ("x", "w"), ("va",), 100.0),
        Op("b", "aten.mm.default", "forward", ("va", "w"), ("vb",), 100.0),
        Op("loss", "aten.sum.default", "forward", ("vb",), ("loss",), 1.0),
        Op("tangents", "remat.tangents", "backward", (), ("t",), no_recompute="they arrive"),
        Op("gw", "aten.mm.default", "backward", ("t", "va"), ("gw",), 100.0),
        Op(
            "update",
            UPDATE,
            "backward",
            ("gw", "w"),
            (),
            workspace_bytes=10,
            no_recompute="it writes",
        ),
        Op("wide", "aten.mm.default", "backward", ("t",), ("wide",), 100.0),
        Op("big", "aten.sum.default", "backward", ("wide",), ("big",), 100.0),
        Op("ga", "aten.mm.default", "backward", ("t", "vb", "big"), ("ga",), 100.0),
    )
    made = {"va": 100, "vb": 100, "loss": 4, "gw": 40, "wide": 300, "big": 10, "ga": 40}
    producer = {"va": "a", "vb": "b"}
    values = (
        Value("x", 50, kind="input"), Value("w", 60, kind="parameter"),
        *(Value(name, size, producer.get(name, name)) for name, size in made.items()),
        Value("t", 4, "tangents"),
    )  # fmt: skip
    return TrainingGraph(
        "Step", ops, values, forward_outputs=("loss",), outputs=("loss", "t", "ga")
    )


def test_updates_during_backward_are_planned_with_copies() -> None:
    graph = with_links(update_graph(), Links(Link(10.0), Link(10.0), 1 << 40))
    alone = solve_within(update_graph(), 360, time_limit_s=AMPLE_S)
    found = solve_within(graph, 330, time_limit_s=AMPLE_S)
    assert alone.schedule is not None
    assert found.schedule is not None
    assert found.schedule.moves
    assert found.peak_bytes <= 330
    assert found.lower_bound_us <= found.time_us < alone.time_us


def late_read() -> list[Step]:
    """It computes b again behind the update of w, from a that went to the host."""
    return [
        Compute("a"), Offload("va"), Compute("b"), Free("va"), Compute("loss"), Free("vb"),
        Compute("tangents"), Fetch("va"), Compute("gw"), Compute("update"), Free("gw"),
        Compute("b"), Free("va"), Free("va", "host"), Compute("wide"), Compute("big"),
        Free("wide"), Compute("ga"), Free("vb"), Free("big"),
    ]  # fmt: skip


def test_an_update_waits_for_a_later_read_with_its_gradient() -> None:
    graph = with_links(update_graph())
    with pytest.raises(ScheduleError, match="op b reads w, which op update has updated"):
        simulate(graph, Schedule.for_graph(graph, late_read()))
    steps = late_steps(Problem.of(graph), late_read())
    assert sorted(map(str, steps)) == sorted(map(str, late_read()))
    at = steps.index(Compute("update"))
    assert steps[at - 1 : at + 2] == [Compute("b"), Compute("update"), Free("gw")]
    assert simulate(graph, Schedule.for_graph(graph, steps)).moved_bytes["d2h"] == 100


@pytest.mark.parametrize("last", ["gw", "b"])
def test_a_gradient_made_anew_beside_another_output_is_dropped_once(last: str) -> None:
    """Of an op that reads w and runs again, as the last reader of w or before it."""
    graph, gx = update_graph(), Value("gx", 20, "gw")
    changed = {"gw": {"inputs": ("t", "va", "w"), "outputs": ("gw", "gx")},
               "ga": {"inputs": ("t", "vb", "big", "gx")}}  # fmt: skip
    ops = (msgspec.structs.replace(op, **changed.get(op.name, {})) for op in graph.ops)
    graph = msgspec.structs.replace(graph, ops=tuple(ops), values=(*graph.values, gx))
    steps = late_read()
    steps.insert(steps.index(Free("gw")), Free("gx"))
    at = steps.index(Compute("b"), 5) + (last == "gw")
    steps[at:at] = [Compute("gw"), Free("gw")]
    steps.append(Free("gx"))
    placed = late_steps(Problem.of(graph), steps)
    assert placed.index(Compute("update")) == placed.index(Compute(last), 9) + 1
    assert placed.count(Free("gw")) == 1
    simulate(with_links(graph), Schedule.for_graph(graph, placed))


def test_a_gradient_that_comes_back_before_its_late_update_is_refused() -> None:
    graph = with_links(update_graph())
    steps = late_read()
    at = steps.index(Compute("b"), 5)
    steps[at:at] = [Compute("gw"), Free("gw")]
    with pytest.raises(SolverError, match="a gradient returns at gw while its update waits"):
        late_steps(Problem.of(graph), steps)
