"""The solver `joint`, and `auto` where a graph has links: judged, bounded, the same twice."""

from __future__ import annotations

import functools
import random

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import remat
from remat.graph_capture.graph import Link, Links, Op, TrainingGraph, Value
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule
from remat.schedules.simulate import Simulation, simulate
from remat.solver import Progress, Result, solve_within
from remat.solver.auto import Auto
from remat.solver.budgets.sweep import spread_budgets, sweep_budgets
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.links import links, with_links
from tests.rows import rows
from tests.solver.checks import check, check_front
from tests.solver.exhaustive import least_time_us as least_alone_us
from tests.solver.graphs.random_graphs import (
    chain,
    gpt_like,
    resnet_like,
    training_graphs,
    unet_like,
)
from tests.solver.offload.exhaustive_copies import least_time_us, random_case

MIB = 1 << 20
SLACK = 1 + 1e-9
GAP = 0.02
NETWORKS = {
    "gpt": functools.partial(gpt_like, 3),
    "resnet": functools.partial(resnet_like, 2),
    "unet": functools.partial(unet_like, 2),
}
LINK = Link(50e3, 1.0)


@functools.cache
def network(name: str) -> TrainingGraph:
    return NETWORKS[name]()


@functools.cache
def solved(name: str, percent: int, found: Links | None = None, solver: str = "joint") -> Result:
    graph = network(name)
    linked = graph if found is None else with_links(graph, found)
    budget_bytes = peak_bytes_of(graph) * percent // 100
    return solve_within(linked, budget_bytes, solver, time_limit_s=AMPLE_S, gap=GAP)


def judged(name: str, result: Result, found: Links) -> Simulation:
    assert result.schedule is not None
    return simulate(with_links(network(name), found), result.schedule)


@pytest.mark.parametrize(("name", "percent"), [("gpt", 50), ("unet", 70), ("resnet", 80)])
def test_copies_are_never_worse_than_recomputation_alone(name: str, percent: int) -> None:
    found = links(25.0)
    alone, joint = solved(name, percent, solver="auto"), solved(name, percent, found)
    check(with_links(network(name), found), joint, joint.budget_bytes)
    assert joint.time_us <= alone.time_us * SLACK


def test_copies_shorten_the_step_of_a_transformer() -> None:
    alone, joint = solved("gpt", 50, solver="auto"), solved("gpt", 50, links(50.0))
    assert joint.time_us < alone.lower_bound_us
    assert joint.gap <= GAP
    assert joint.schedule is not None
    assert joint.schedule.moves


def test_the_same_graph_gives_the_same_plan_twice() -> None:
    found = links(25.0)
    budget_bytes = peak_bytes_of(unet_like(2)) * 55 // 100
    first, again = (
        solve_within(
            with_links(unet_like(2), found), budget_bytes, "joint", time_limit_s=AMPLE_S, gap=GAP
        )
        for _ in range(2)
    )
    assert first.schedule == again.schedule
    assert first.lower_bound_us == again.lower_bound_us


@pytest.mark.parametrize("seed", rows(range(8), lambda seed: seed == 0))
def test_tiny_graphs_are_bounded_by_all_their_schedules(seed: int) -> None:
    """The optimum by exhaustive search lies between the bound and the time."""
    rng = random.Random(1000 + seed)
    found = 0
    for _ in range(12):
        case = random_case(rng, 5, is_host_small=bool(seed % 2))
        optimum_us = least_time_us(case)
        if optimum_us is None:
            continue
        result = solve_within(case.graph, case.budget_bytes, "joint", time_limit_s=AMPLE_S)
        check(case.graph, result, case.budget_bytes)
        assert result.lower_bound_us <= optimum_us * (1 + 1e-6)
        if result.schedule is not None:
            assert result.time_us >= optimum_us / SLACK
            found += 1
    assert found >= 4


@settings(max_examples=25, deadline=None)
@given(training_graphs(max_ops=12), st.integers(50, 99), st.sampled_from([0.001, 0.1, 10.0]))
def test_results_are_as_the_judge_says(graph: TrainingGraph, percent: int, gb_s: float) -> None:
    linked = with_links(graph, links(gb_s, latency_us=0.5))
    budget_bytes = peak_bytes_of(graph) * percent // 100
    result = solve_within(linked, budget_bytes, time_limit_s=AMPLE_S)
    check(linked, result, budget_bytes)
    optimum_us = least_alone_us(graph, budget_bytes) if len(graph.ops) <= 8 else None
    if optimum_us is not None:
        assert result.schedule is not None
        assert result.time_us <= optimum_us * (1 + 1e-3)


def test_what_forward_returns_may_arrive_while_its_last_op_runs() -> None:
    costs = {"make": 100.0, "widen": 10.0, "last": 2.0, "back": 1.0}
    reads = {"make": (), "widen": ("wide",), "last": ("narrow",), "back": ("loss",)}
    makes = {
        "make": {"state": 2, "wide": 9}, "widen": {"narrow": 4}, "last": {"loss": 3},
        "back": {"gradient": 1},
    }  # fmt: skip
    graph = TrainingGraph(
        "returned",
        tuple(
            Op(name, "call", "backward" if name == "back" else "forward", reads[name], (*made,),
               costs[name])
            for name, made in makes.items()
        ),
        tuple(Value(v, size, name) for name, made in makes.items() for v, size in made.items()),
        ("loss", "state"), ("gradient",),
    )  # fmt: skip
    # Whoever widens has no room for the state, which is 2 us out, and 2 back during the last op.
    linked = with_links(graph, links(0.001, latency_us=0.0))
    steps = (
        Compute("make"), Offload("state", "host"), Free("state"), Compute("widen"), Free("wide"),
        Fetch("state", "device"), Compute("last"), Free("narrow"), Free("state", "host"),
        Compute("back"),
    )  # fmt: skip
    found = simulate(linked, Schedule.for_graph(linked, steps, budget_bytes=14))
    assert (found.time_us, found.peak_bytes) == (sum(costs.values()) + 2, 13)
    assert solve_within(linked, 14, "joint").lower_bound_us <= found.time_us


def test_tangents_stay_on_the_device_as_autograds_engine_holds_them() -> None:
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.Sigmoid(), nn.Linear(64, 1024)
    )
    graph = remat.capture(model, (torch.randn(128, 64),), host="1GiB", device="h100")
    (tangent,) = (value for value in graph.values if value.kind == "tangent")
    result = remat.solve(graph, "min", time_limit_s=AMPLE_S)
    assert result.schedule is not None
    copied = {step.value for step in result.schedule.steps if isinstance(step, Offload)}
    assert copied
    assert tangent.name not in copied


def test_a_host_without_room_is_no_host() -> None:
    plain, empty = solved("gpt", 50, solver="auto"), Links(LINK, LINK, 0)
    without = solved("gpt", 50, empty, "auto")
    assert msgspec.structs.replace(without, wall_s=0.0) == msgspec.structs.replace(
        plain, wall_s=0.0
    )
    named = solved("gpt", 50, empty, "joint")
    assert named.schedule is not None
    assert plain.schedule is not None
    assert named.schedule.steps == plain.schedule.steps
    assert named.schedule.solver == named.solver == "joint"


def test_a_host_that_is_full_costs_time() -> None:
    roomy = solved("gpt", 50, Links(LINK, LINK, 1 << 40))
    used_bytes = judged("gpt", roomy, Links(LINK, LINK, 1 << 40)).host_peak_bytes
    small = Links(LINK, LINK, used_bytes // 4)
    tight = solved("gpt", 50, small)
    assert 0 < judged("gpt", tight, small).host_peak_bytes <= small.host_bytes
    assert tight.lower_bound_us > roomy.lower_bound_us
    assert tight.time_us > roomy.time_us
    assert tight.gap <= 0.03


def test_nvme_takes_what_the_host_cannot_hold() -> None:
    small = 48 * MIB
    disk = Link(40e3, 1.0)
    alone = Links(LINK, LINK, small)
    below = Links(LINK, LINK, small, disk, disk, 1 << 40)
    without, with_nvme = solved("gpt", 50, alone), solved("gpt", 50, below)
    found = judged("gpt", with_nvme, below)
    assert found.moved_bytes["write"] > 0
    assert found.host_peak_bytes <= small
    assert with_nvme.time_us < without.time_us
    assert with_nvme.lower_bound_us <= without.lower_bound_us * SLACK


def test_auto_says_that_it_is_auto() -> None:
    found = solved("gpt", 50, links(), "auto")
    assert found.schedule is not None
    assert (found.solver, found.schedule.solver) == ("auto", "auto")
    joint = solved("gpt", 50, links()).schedule
    assert joint is not None
    assert found.schedule.steps == joint.steps
    assert "order" in found.schedule.options


def test_what_holds_for_recomputation_alone_is_no_bound_with_links() -> None:
    plain = solved("gpt", 50, solver="cut")
    linked = solved("gpt", 50, links(), "cut")
    assert plain.lower_bound_us > solved("gpt", 50, links()).time_us
    assert linked.lower_bound_us == network("gpt").time_us
    assert linked.status == "feasible"
    assert linked.schedule == plain.schedule


def test_a_proof_that_nothing_fits_without_copies_says_so() -> None:
    lost = solve_within(with_links(chain(5)), 1, "cut", time_limit_s=AMPLE_S)
    assert lost.status == "none found"
    assert lost.message.startswith("Without copies: ")
    assert lost.least_bound_bytes == 0
    assert lost.floor is None


def test_what_one_op_needs_is_a_proof_with_copies_too() -> None:
    graph = with_links(chain(5))
    lost = solve_within(graph, 1, time_limit_s=AMPLE_S)
    assert lost.status == "infeasible"
    assert lost.message.startswith("no schedule fits 1 byte;")
    again = solve_within(graph, lost.least_feasible_bytes, time_limit_s=AMPLE_S)
    assert again.schedule is not None


def test_a_front_over_budgets_is_monotone() -> None:
    graph = with_links(chain(5), links(1.0, latency_us=1.0))
    front = sweep_budgets(graph, spread_budgets(chain(5), 4)[0], time_limit_s=AMPLE_S)
    check_front(graph, front)
    assert front.points[-1].result.overhead == 0


def test_a_search_without_time_has_an_answer() -> None:
    graph = with_links(network("gpt"))
    budget_bytes = peak_bytes_of(network("gpt")) * 70 // 100
    found = solve_within(graph, budget_bytes, time_limit_s=0.0)
    check(graph, found, budget_bytes)
    assert found.status == "time limit"
    assert found.lower_bound_us == graph.time_us


def test_ctrl_c_keeps_the_best_found() -> None:
    graph = with_links(network("unet"), links(5.0))
    starts: list[str] = []

    def listen(state: Progress) -> None:
        if state.best_overhead is not None and "a start" in state.doing:
            starts.append(state.doing)
            raise KeyboardInterrupt

    budget_bytes = peak_bytes_of(network("unet")) * 60 // 100
    found = solve_within(
        graph, budget_bytes, "joint", gap=0.0, progress=listen, time_limit_s=AMPLE_S
    )
    assert starts
    check(graph, found, budget_bytes)
    assert found.schedule is not None
    assert found.message.startswith("interrupted")


def test_ctrl_c_during_recomputation_alone_ends_the_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = with_links(network("unet"), links(0.1))
    asked: list[float] = []

    def ended(self: Auto, one: TrainingGraph, budget_bytes: int) -> Result:
        asked.append(self.time_limit_s)
        found = solve_within(one, budget_bytes, "cut", gap=0.5)
        return msgspec.structs.replace(found, message="interrupted: by a test")

    monkeypatch.setattr(Auto, "solve", ended)
    budget_bytes = peak_bytes_of(network("unet")) * 60 // 100
    found = solve_within(graph, budget_bytes, "joint", gap=1e-3, time_limit_s=AMPLE_S)
    assert len(asked) == 1
    assert found.message.startswith("interrupted")
    assert found.status == "time limit"
