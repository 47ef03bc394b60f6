"""Whether a region runs in chunks, and in how many, on a graph small enough to be enumerated."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.derived import fastest_us, graph_of_schedule, in_chunks
from remat.schedules.schedule import ChunkedRegion
from remat.schedules.simulate import simulate
from remat.solver import Result, solve_within
from remat.solver.budgets.sweep import sweep_budgets
from remat.solver.reductions.chunked_regions import solve_in_chunks
from remat.solver.result import evaluate_schedule
from tests.limits import AMPLE_S
from tests.solver.graphs.region_graph import MIB, region_graph


def test_the_whole_is_kept_where_it_fits() -> None:
    result = solve_within(region_graph(), 1000 * MIB)
    assert result.status == "optimal"
    assert result.schedule is not None
    assert not result.schedule.chunks
    assert result.overhead == 0


@pytest.mark.parametrize(("budget_mib", "chunks"), [(80, 2), (40, 4), (20, 8)])
def test_the_fewest_chunks_that_fit_are_proved_best(budget_mib: int, chunks: int) -> None:
    """More chunks take more time here, so the least number that fits is optimal.

    The relaxed bound has the time of two chunks, so it is tight for these alone.
    """
    graph = region_graph()
    result = solve_within(graph, budget_mib * MIB)
    assert result.schedule is not None
    assert result.schedule.chunks == (ChunkedRegion("head", chunks),)
    found = simulate(graph, result.schedule)
    assert found.peak_bytes == result.peak_bytes <= budget_mib * MIB
    assert found.time_us == 10 + 25 + 45 + 5 * chunks
    assert found.overhead == pytest.approx(found.time_us / 60 - 1)
    assert result.lower_bound_us <= found.time_us
    assert result.status == ("optimal" if chunks == 2 else "feasible")


def test_chunks_that_are_faster_are_taken_at_any_budget() -> None:
    """Blocks that fit into caches can beat the whole; the bound holds for them too."""
    graph = region_graph(cost_of_chunks_us=-4.0)
    result = solve_within(graph, 1000 * MIB)
    assert result.schedule is not None
    assert result.schedule.chunks
    assert result.time_us < graph.time_us
    assert result.lower_bound_us <= result.time_us


@pytest.mark.parametrize("solver", ["checkmate", "msps", "store_all"])
def test_what_holds_for_whole_regions_is_no_proof_beside_chunks(solver: str) -> None:
    graph = region_graph(cost_of_chunks_us=-4.0)
    found = solve_within(graph, 1000 * MIB, solver, time_limit_s=AMPLE_S)
    assert found.time_us > found.lower_bound_us == fastest_us(graph)
    assert found.status == "feasible"
    lost = solve_within(graph, 40 * MIB, solver, time_limit_s=AMPLE_S)
    assert solve_within(graph, 40 * MIB).schedule is not None
    assert lost.status == "none found"
    assert lost.message == "" or lost.message.startswith("Without chunks: ")
    assert lost.lower_bound_us <= fastest_us(graph)
    assert lost.least_bound_bytes == 0


def test_too_little_names_the_least_of_all_choices() -> None:
    graph = region_graph()
    lost = solve_within(graph, 5 * MIB)
    assert lost.status == "none found"
    assert lost.least_feasible_bytes < 20 * MIB
    found = solve_within(graph, lost.least_feasible_bytes)
    assert found.schedule is not None
    assert found.schedule.chunks == (ChunkedRegion("head", 8),)


def test_a_region_stays_whole_whose_chunks_lack_what_a_pin_names() -> None:
    """Its chunks have no op of the module, and those of another end in a value of the caller."""
    named = msgspec.structs.replace
    graph = region_graph(cost_of_chunks_us=-4.0)
    ops = tuple(named(op, module="up" if op.name == "head" else "down") for op in graph.ops)
    graph = named(graph, ops=ops)
    for pins in ({"keep": "up"}, {"recompute": "up"}):
        result = solve_within(graph, 1000 * MIB, **pins)
        assert result.schedule is not None
        assert not result.schedule.chunks
        assert pins.items() <= result.schedule.options.items()
    kept = solve_within(graph, 1000 * MIB, keep="down").schedule  # the layer is outside
    assert kept is not None
    assert kept.chunks


def test_a_schedule_knows_the_graph_that_it_is_of() -> None:
    graph = region_graph()
    schedule = solve_within(graph, 40 * MIB).schedule
    assert schedule is not None
    planned = graph_of_schedule(graph, schedule)
    assert planned.hash == schedule.graph_hash
    assert graph.hash == schedule.captured_hash
    assert graph_of_schedule(planned, schedule) is planned
    assert graph_of_schedule(graph, schedule) is planned
    with pytest.raises(ScheduleError, match="no region of that name"):
        in_chunks(msgspec.structs.replace(graph, regions=()), schedule.chunks)
    assert TrainingGraph.from_json(graph.to_json()) == graph


def test_each_later_solve_is_told_the_best_time_known_and_ends_there() -> None:
    """Two chunks take 65 us where the whole does not fit; nothing else is proved to be faster."""
    graph = region_graph()
    told: list[tuple[float, float]] = []

    def listen(one: TrainingGraph, limit_s: float, known_us: float) -> Result:
        found = solve_within(one, 150 * MIB, time_limit_s=limit_s, known_us=known_us)
        told.append((known_us, found.lower_bound_us))
        return found

    best = solve_in_chunks(graph, 150 * MIB, listen, AMPLE_S, 0.0)
    assert best.schedule is not None
    assert told[0][0] == inf
    assert all(known_us >= best.time_us for known_us, _ in told[1:])


def test_chunks_that_can_gain_no_more_than_the_gap_are_left_aside() -> None:
    graph = region_graph(cost_of_chunks_us=0.0)
    calls: list[TrainingGraph] = []

    def listen(one: TrainingGraph, limit_s: float, known_us: float) -> Result:
        calls.append(one)
        return solve_within(one, 200 * MIB, time_limit_s=limit_s, known_us=known_us)

    fastest = fastest_us(graph)
    found = solve_in_chunks(graph, 200 * MIB, listen, AMPLE_S, 0.5)
    assert len(calls) == 1
    assert found.lower_bound_us <= fastest


def test_rules_and_published_methods_stay_whole() -> None:
    """At the budget that two chunks need, and at one that the whole fits."""
    graph = region_graph()
    for solver in ("chen_sqrt", "full", "rotor", "dtr", "norms_and_activations"):
        assert solve_within(graph, 80 * MIB, solver).schedule is None
        schedule = solve_within(graph, 1000 * MIB, solver).schedule
        assert schedule is not None
        assert schedule.chunks == ()


def without_fitting(graph: TrainingGraph, limit_s: float, known_us: float) -> Result:
    """A solver that finds nothing and proves nothing, except in chunks."""
    found = solve_within(graph, 193 * MIB, "store_all", time_limit_s=limit_s, known_us=known_us)
    return msgspec.structs.replace(found, lower_bound_us=0.0, least_bound_bytes=0)


def test_a_result_without_a_schedule_keeps_the_time_of_each_op_once_as_its_bound() -> None:
    graph = region_graph(cost_of_chunks_us=20.0)
    found = solve_in_chunks(graph, 193 * MIB, without_fitting, 60.0, 0.0)
    assert found.schedule is not None
    assert found.lower_bound_us == graph.time_us
    assert found.gap == pytest.approx(found.time_us / graph.time_us - 1)


def test_any_order_and_our_solvers_take_chunks() -> None:
    graph = region_graph()
    for solver, options in (("auto", {"order": "free"}), ("cut", {}), ("hierarchical", {})):
        result = solve_within(graph, 40 * MIB, solver, **options)
        assert result.schedule is not None
        assert result.schedule.chunks == (ChunkedRegion("head", 4),)
        assert result.solver == solver


def test_chunks_that_are_faster_lower_the_bound_of_a_plan_without_them() -> None:
    graph = region_graph(cost_of_chunks_us=-4.0)
    kept = solve_within(graph, 1000 * MIB, "store_all").schedule
    assert kept is not None
    found = evaluate_schedule(graph, kept, budget_bytes=1000 * MIB, lower_bound_us=0.0)
    assert found.lower_bound_us == fastest_us(graph) == pytest.approx(60 - 12)
    assert found.status == "feasible"
    front = sweep_budgets(graph, [100 * MIB, 1000 * MIB], time_limit_s=AMPLE_S)
    assert all(point.result.lower_bound_us <= 48 * (1 + 1e-9) for point in front)
