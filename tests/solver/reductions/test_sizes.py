"""Families of schedules: within the budget at each size, and near to plans for one size."""

from __future__ import annotations

import msgspec
import pytest

import remat
from remat.graph_capture.errors import BudgetError, SignatureError, TooLargeError
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.sizes.symbols import Symbol, points
from remat.ranges.curve import overheads_over, solve_over
from remat.schedules.family import Family, resized_schedule
from remat.schedules.simulate import Simulation, simulate
from tests.ranged_graphs import chain

SOLVER = "cut"
TWO = (Symbol("n", 2, 40), Symbol("m", 2, 12, 2))
GRAPHS = {
    "one size": chain(),
    "two sizes": chain("8*n*m", TWO),
    "multiples": chain("64*n", (Symbol("n", 8, 80, 8),)),
    "may fall": chain("64*n + 32*(n % 5)"),
    "falls": chain("64*(60 - n)"),
}


def judged(graph: RangedGraph, family: Family, sizes: dict[str, int]) -> Simulation:
    at = graph.at(**sizes)
    return simulate(at, resized_schedule(family.at(**sizes).schedule, at))


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("share", ["60%", "80%"])
def test_the_peak_is_within_the_budget_at_every_size(name: str, share: str) -> None:
    graph = GRAPHS[name]
    family = solve_over(graph, share, SOLVER)
    assert family.certificate == ("bounds of parts" if "fall" in name else "largest sizes")
    pick = family.compiled_pick()
    peaks: list[int] = []
    for sizes in points(graph.symbols):
        assert pick(**sizes) == family.number_at(**sizes)
        peaks.append(judged(graph, family, sizes).peak_bytes)
    assert max(peaks) <= family.peak_bytes <= family.budget_bytes
    # Not more cautious than it must be: the largest sizes need what they are bound by.
    if family.certificate == "largest sizes":
        assert max(peaks) == family.peak_bytes


def test_small_sizes_recompute_nothing_and_larger_ones_as_a_plan_for_them_would() -> None:
    graph = chain()
    family = solve_over(graph, "50%", SOLVER)
    assert len(family.members) > 2
    overheads = [member.overhead for member in family.members]
    assert overheads == sorted(overheads)
    assert overheads[0] == 0
    assert judged(graph, family, {"n": 10}).overhead == 0
    for n in (17, 19, 22, 25, 31, 38):
        alone = remat.solve(graph.at(n=n), family.budget_bytes, SOLVER)
        # One op of 24 that runs again is 4 %.
        assert judged(graph, family, {"n": n}).overhead <= alone.overhead + 0.09


def test_where_all_fits_one_schedule_keeps_everything() -> None:
    family = solve_over(chain(), "100%")
    assert len(family.members) == 1
    assert family.top.overhead == 0
    assert "up to all: overhead 0.0 %" in str(family)


@pytest.mark.slow
def test_what_cannot_fit_is_refused_with_the_largest_that_does() -> None:
    graph = chain()
    some = remat.solve(graph.at(n=20), "min", SOLVER)
    with pytest.raises(TooLargeError, match="plan a range up to n 20") as refused:
        remat.solve(graph, some.peak_bytes, SOLVER)
    assert refused.value.largest == {"n": 20}
    assert isinstance(refused.value, BudgetError)
    part = msgspec.structs.replace(graph, symbols=(Symbol("n", 2, 20),))
    assert remat.solve(part, some.peak_bytes, SOLVER).peak_bytes <= some.peak_bytes
    with pytest.raises(TooLargeError, match="n 2, the smallest, does not fit") as refused:
        remat.solve(graph, 300, SOLVER)
    assert refused.value.largest == {}


def test_the_same_graph_and_budget_give_the_same_family() -> None:
    graph = chain("8*n*m", TWO)
    assert solve_over(graph, "60%", SOLVER) == solve_over(graph, "60%", SOLVER)


def test_sizes_out_of_the_range_have_no_member() -> None:
    family = solve_over(chain(), "60%", SOLVER)
    with pytest.raises(SignatureError, match="n = 41 is outside the captured range"):
        family.at(n=41)


def test_a_curve_beside_plans_for_each_size() -> None:
    graph = chain()
    family = solve_over(graph, "60%", SOLVER)
    curve = overheads_over(graph, family, 5, alone=True, solver=SOLVER)
    assert [point.sizes["n"] for point in curve.points] == [2, 11, 21, 30, 40]
    for point in curve.points:
        assert point.peak_bytes <= family.budget_bytes
        assert point.alone_overhead is not None
        assert point.overhead - point.alone_overhead <= 0.09
    assert "n 40 | " in str(curve)
    bare = overheads_over(graph, family, [{"n": 7}])
    assert bare.points[0].alone_overhead is None
    other = msgspec.structs.replace(graph, traced_hash="other")
    with pytest.raises(remat.RematError, match="made for another step"):
        overheads_over(other, family)
