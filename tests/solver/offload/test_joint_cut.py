"""The program of cuts with copies: its bound against exhaustive search, and its rows."""

from __future__ import annotations

import itertools
import random

import pytest

from remat.graph_capture.graph import Link, Links, Op, TrainingGraph, Value
from remat.solver import solve_within
from remat.solver.backends.mip import Limits
from remat.solver.offload.joint_cut import JointCut
from remat.solver.problem import Problem
from tests.limits import AMPLE_S
from tests.links import with_links
from tests.rows import rows
from tests.solver.offload.exhaustive_copies import Case, least_time_us, random_case

SLACK = 1 + 1e-6
TINY = Limits(time_limit_s=60.0)


def bounds_us(case: Case, rng: random.Random) -> list[float]:
    """The bounds of programs of one to three cuts."""
    problem = Problem.of(case.graph)
    places = [
        cuts
        for count in (1, 2, 3)
        for cuts in itertools.combinations(range(problem.n_ops), count)
        if count == 1 or rng.random() < 0.3
    ]
    made = [JointCut(problem, cuts, case.budget_bytes, links=case.links) for cuts in places]
    return [one.solve(TINY).bound_us for one in made]


@pytest.mark.parametrize("is_host_small", [False, True])
@pytest.mark.parametrize("seed", rows(range(10), lambda seed: seed == 0))
def test_no_bound_is_above_the_optimum(seed: int, is_host_small: bool) -> None:
    rng = random.Random(seed)
    found = tight = 0
    for _ in range(10 if seed else 4):
        case = random_case(rng, 5, is_host_small=is_host_small)
        optimum_us = least_time_us(case)
        if optimum_us is None or optimum_us == float("inf"):
            continue
        bounds = bounds_us(case, rng)
        assert max(bounds) <= optimum_us * SLACK
        found += 1
        tight += max(bounds) >= optimum_us / SLACK
    assert found >= 3
    assert tight >= found // 2


def one_copy() -> TrainingGraph:
    """v, of 10 bytes, is made once, must make room for `big`, and is read by `use`."""
    ops = (
        Op("make", "t", "forward", (), ("v",), 5.0, no_recompute="it draws"),
        Op("between", "t", "forward", (), ("a",), 3.0),
        Op("big", "t", "forward", ("a",), ("b",), 2.0, 20),
        Op("after", "t", "backward", ("b",), ("c",), 4.0),
        Op("use", "t", "backward", ("c", "v"), ("d",), 1.0),
    )
    sizes = {"v": 10, "a": 1, "b": 1, "c": 1, "d": 1}
    producer = dict(zip("vabcd", (op.name for op in ops), strict=True))
    values = tuple(Value(name, size, producer[name]) for name, size in sizes.items())
    return TrainingGraph("OneCopy", ops, values, (), ("d",))


@pytest.mark.parametrize("latency_us", [0.0, 2.5])
@pytest.mark.parametrize("rate", [0.001, 0.5, 1.0, 2.0, 3.0, 100.0])
def test_a_copy_waits_for_what_its_windows_lack(rate: float, latency_us: float) -> None:
    """3 us to go down, 4 us to come back; what a copy takes beyond is waited for."""
    graph, link = one_copy(), Link(rate, latency_us)
    links = Links(link, link, 10)
    took_us = latency_us + 10 / rate
    expected_us = graph.time_us + max(0.0, took_us - 3) + max(0.0, took_us - 4)
    program = JointCut(Problem.of(graph), (2,), 22, links=links)
    assert program.solve(TINY).bound_us == pytest.approx(expected_us)
    found = solve_within(with_links(graph, links), 22, "joint", time_limit_s=AMPLE_S)
    assert found.time_us == pytest.approx(expected_us)
    assert found.gap <= 1e-6


def test_nothing_fits_where_neither_device_nor_host_has_room() -> None:
    link = Link(1.0)
    program = JointCut(Problem.of(one_copy()), (2,), 22, links=Links(link, link, 9))
    assert program.solve(TINY).bound_us == float("inf")
    below = Links(link, link, 9, link, link, 1 << 20)
    with_nvme = JointCut(Problem.of(one_copy()), (2,), 22, links=below)
    assert with_nvme.solve(TINY).bound_us < float("inf")


@pytest.mark.parametrize("write_rate", [0.5, 1.0, 2.0])
def test_what_is_on_nvme_is_written_and_read_in_the_same_windows(write_rate: float) -> None:
    link, disk = Link(100.0), Link(write_rate)
    below = Links(link, link, 9, disk, disk, 1 << 20)
    program = JointCut(Problem.of(one_copy()), (2,), 22, links=below)
    took_us = 10 / write_rate
    expected_us = one_copy().time_us + max(0.0, took_us - 3) + max(0.0, took_us - 4)
    assert program.solve(TINY).bound_us == pytest.approx(expected_us)


def test_a_start_copies_no_small_value_and_nothing_that_cannot_move() -> None:
    link = Link(100.0)
    room = Links(link, link, 1 << 20)
    problem = Problem.of(one_copy())
    assert JointCut(problem, (2,), 22, links=room, is_start=True).fetched[0]
    assert not JointCut(problem, (2,), 22, links=room, is_start=True, least_bytes=11).fetched[0]
