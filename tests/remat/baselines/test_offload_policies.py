"""What every policy of offloading promises, and what is its own."""

from __future__ import annotations

import functools

import msgspec
import pytest

from remat.baselines.layer_fractions import LayerFractions, Layers
from remat.baselines.offload_policies import (
    CopyChoice,
    Delta,
    Fraction,
    Saved,
    cost_per_byte,
    hidden_copies,
    is_cheap,
    largest_of,
)
from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import Links, TrainingGraph
from remat.schedules.schedule import Offload, Schedule
from remat.solver import Result, make_solver, solve_within
from remat.solver.problem import Problem
from remat.solver.table import NEEDS_LINKS
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.links import links, with_links
from tests.solver.checks import check
from tests.solver.graphs.random_graphs import chain, gpt_like, resnet_like, unet_like

GRAPHS = {
    "gpt": lambda: with_layers(gpt_like(3), 3),
    "chain": lambda: chain(12),
    "unet": lambda: unet_like(2),
    "resnet": lambda: resnet_like(3),
}
MOVED = {"swap_all": 4, "delta": 3, "layer_fractions": 1, "fraction": 1}
"""On how many of the graphs at least a policy moves anything: two of them need layers."""
SLOW_GB_S, FAST_GB_S = 1.0, 200.0


def with_layers(graph: TrainingGraph, count: int) -> TrainingGraph:
    """`graph` with its forward in so many blocks of equal numbers of ops."""
    each = graph.n_forward // count + 1
    ops = (
        msgspec.structs.replace(op, module=f"blocks.{i // each}") if i < graph.n_forward else op
        for i, op in enumerate(graph.ops)
    )
    return msgspec.structs.replace(graph, ops=tuple(ops))


@functools.cache
def graph_of(name: str, gb_s: float = 20.0) -> TrainingGraph:
    return with_links(GRAPHS[name](), links(gb_s))


@functools.cache
def result_of(solver: str, name: str, percent: int, gb_s: float = 20.0) -> Result:
    graph = graph_of(name, gb_s)
    return solve_within(graph, peak_bytes_of(graph) * percent // 100, solver, time_limit_s=AMPLE_S)


def made_of(result: Result) -> Schedule:
    """The schedule that fits, or else the one of the least peak."""
    schedule = result.schedule or result.least_schedule
    assert schedule is not None
    return schedule


def saved_of(graph: TrainingGraph, found: Links, least_bytes: int = 1) -> Saved:
    return Saved(Problem.of(graph), found, least_bytes)


@pytest.mark.parametrize("solver", NEEDS_LINKS)
@pytest.mark.parametrize("percent", [100, 80, 60, 40])
def test_results_are_as_the_judge_says(solver: str, percent: int) -> None:
    for name in GRAPHS:
        graph, result = graph_of(name), result_of(solver, name, percent)
        check(graph, result, peak_bytes_of(graph) * percent // 100)
        assert result.schedule is None or result.schedule.solver == solver
        if percent == 100:
            assert (result.status, result.overhead) == ("optimal", 0)


@pytest.mark.parametrize("solver", NEEDS_LINKS)
def test_each_moves_something(solver: str) -> None:
    schedules = [made_of(result_of(solver, name, 60)) for name in GRAPHS]
    assert sum(schedule.moves for schedule in schedules) >= MOVED[solver]


@pytest.mark.parametrize("solver", NEEDS_LINKS)
def test_without_links_the_error_says_what_to_do(solver: str) -> None:
    text = f"capture with host='64GiB', .*solver '{solver}' needs a link to the host"
    with pytest.raises(SolverError, match=text) as caught:
        solve_within(chain(4), 1 << 60, solver)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("solver", NEEDS_LINKS)
def test_what_is_resident_elsewhere_is_not_moved(solver: str) -> None:
    graph = graph_of("chain")
    values = tuple(
        value if value.producer else msgspec.structs.replace(value, home="host")
        for value in graph.values
    )
    with pytest.raises(SolverError, match="only sends activations, and x is to be moved too"):
        solve_within(msgspec.structs.replace(graph, values=values), 1 << 60, solver)


@pytest.mark.parametrize("solver", NEEDS_LINKS)
def test_what_the_user_keeps_runs_once(solver: str) -> None:
    graph = graph_of("gpt")
    budget_bytes = peak_bytes_of(graph) * 9 // 10
    result = solve_within(graph, budget_bytes, solver, time_limit_s=AMPLE_S, keep="blocks.0")
    check(graph, result, budget_bytes)
    runs = made_of(result).computations()
    assert all(runs[op.name] == 1 for op in graph.ops if op.module == "blocks.0")


@pytest.mark.parametrize("solver", NEEDS_LINKS)
def test_the_same_plan_twice(solver: str) -> None:
    graph = with_links(GRAPHS["gpt"](), links(20.0))
    again = solve_within(graph, peak_bytes_of(graph) * 6 // 10, solver, time_limit_s=AMPLE_S)
    assert again.schedule == result_of(solver, "gpt", 60).schedule


@pytest.mark.parametrize("solver", NEEDS_LINKS)
def test_the_least_budget_that_is_named_can_be_met(solver: str) -> None:
    for name in GRAPHS:
        lost = result_of(solver, name, 1)
        assert lost.schedule is None
        least_bytes = lost.least_feasible_bytes
        graph = graph_of(name)
        assert solve_within(graph, least_bytes, solver, time_limit_s=AMPLE_S).schedule is not None
        below = solve_within(graph, least_bytes - 1, solver, time_limit_s=AMPLE_S)
        assert below.schedule is None
        assert below.least_feasible_bytes == least_bytes


@pytest.mark.parametrize("solver", NEEDS_LINKS)
def test_a_limit_of_no_time_ends_soon(solver: str) -> None:
    graph = graph_of("gpt")
    result = solve_within(graph, peak_bytes_of(graph) * 6 // 10, solver, time_limit_s=0)
    check(graph, result, peak_bytes_of(graph) * 6 // 10)


@pytest.mark.parametrize("solver", NEEDS_LINKS)
def test_a_host_without_room_takes_nothing(solver: str) -> None:
    graph = with_links(GRAPHS["gpt"](), links(20.0, host_bytes=0))
    result = solve_within(graph, peak_bytes_of(graph) * 6 // 10, solver, time_limit_s=AMPLE_S)
    for schedule in (result.schedule, result.least_schedule):
        assert schedule is None or not schedule.moves


@pytest.mark.parametrize("solver", NEEDS_LINKS)
def test_a_faster_link_is_no_worse_where_all_is_sent(solver: str) -> None:
    slow, fast = (result_of(solver, "gpt", 80, gb_s) for gb_s in (SLOW_GB_S, FAST_GB_S))
    assert slow.schedule is not None
    assert fast.schedule is not None
    assert fast.time_us <= slow.time_us


@pytest.mark.parametrize(
    ("solver", "options", "text"),
    [
        ("swap_all", {"least_bytes": 0}, "least_bytes must be 1 or more, not 0"),
        ("delta", {"steps": 1}, r"steps must be 2 \(all and nothing\) or more, not 1"),
        ("fraction", {"steps": 1}, r"steps must be 2 \(all and nothing\) or more, not 1"),
        ("layer_fractions", {"steps": 0}, r"steps must be 2 \(all and nothing\) or more, not 0"),
    ],
)
def test_bad_options_say_what_to_do(solver: str, options: dict[str, int], text: str) -> None:
    with pytest.raises(SolverError, match=text):
        make_solver(solver, **options)


def test_swap_all_sends_every_large_value() -> None:
    graph = graph_of("gpt")
    schedule = made_of(result_of("swap_all", "gpt", 60))
    assert set(schedule.computations().values()) == {1}
    sent = {step.value for step in schedule.steps if isinstance(step, Offload)}
    saved = saved_of(graph, links(), 1 << 20)
    large = {saved.problem.names[v] for v in saved.large}
    assert sent <= large
    assert len(sent) > len(large) // 2


def test_nothing_large_is_said() -> None:
    graph = with_links(chain(6))
    result = solve_within(graph, peak_bytes_of(graph) - 1, "swap_all", least_bytes=1 << 40)
    assert result.schedule is None
    assert "nothing of forward that is large enough" in result.message


def test_delta_counts_the_cheaper_way_and_hosts_what_hides() -> None:
    graph = graph_of("gpt", 1e6)
    saved = saved_of(graph, graph.links or links())
    late = [v for v in saved.values if saved.first_read[v] > saved.problem.n_forward + 2]
    assert all(cost_per_byte(saved, v)[0] == 0 for v in late)
    assert hidden_copies(saved, saved.values) >= frozenset(
        v for v in saved.values if saved.problem.no_recompute[saved.problem.producer[v]]
    )
    slow = saved_of(graph, links(1e-6))
    free = [v for v in slow.values if slow.again_us[v] < float("inf")]
    assert 0 < len(free) < len(slow.values)
    assert all(
        cost_per_byte(slow, v)[0] == slow.again_us[v] / slow.problem.size_bytes[v] for v in free
    )
    assert hidden_copies(slow, free) == frozenset()


def test_delta_releases_more_with_each_step() -> None:
    saved = saved_of(graph_of("gpt"), links())
    released = [len(one.hosted | one.again) for one in Delta(steps=9).choices(saved)]
    assert released == sorted(released)
    assert released[-1] == len(saved.large)


def test_fraction_sends_no_more_than_its_part_of_each_layer_but_the_last() -> None:
    saved = saved_of(graph_of("gpt"), links())
    size = saved.problem.size_bytes
    choices = list(Fraction(steps=5).choices(saved))
    assert choices[0].hosted == frozenset()
    layers = list(saved.in_layers(saved.values).values())
    for i, choice in enumerate(choices):
        assert not choice.hosted & set(layers[-1])
        for layer in layers:
            sent = sum(size[v] for v in choice.hosted & set(layer))
            assert sent <= i / 4 * sum(size[v] for v in layer)
    assert all(is_cheap(saved, v) is False for v in saved.values)
    assert largest_of(saved, layers[0], 1.0) == sorted(layers[0], key=lambda v: -size[v])


def test_layer_fractions_keep_to_their_shares() -> None:
    saved = saved_of(graph_of("gpt"), links(20.0))
    layers = Layers(saved)
    all_kept = layers.shares(1e18, AMPLE_S)
    assert all_kept is not None
    assert all(kept + hosted == pytest.approx(1) for kept, hosted in all_kept)
    none = layers.shares(0.0, AMPLE_S)
    assert none is not None
    assert all(kept == pytest.approx(0) for kept, _ in none[:-1])
    assert none[-1][1] == 0
    choice = layers.choice([(0.0, 0.0)] * len(layers.values))
    assert choice.hosted == frozenset()
    assert len(list(LayerFractions(steps=5).choices(saved))) == 5


def test_a_choice_that_hosts_an_output_of_an_op_and_remakes_another_brings_both() -> None:
    graph = graph_of("gpt")
    saved = saved_of(graph, links())
    assert saved.base(CopyChoice(frozenset(), frozenset(saved.values))) is not None
    base = saved.base(CopyChoice(frozenset(saved.large)))
    assert base is not None
    assert {a.value for a in base.off_spans} <= {saved.problem.names[v] for v in saved.large}
