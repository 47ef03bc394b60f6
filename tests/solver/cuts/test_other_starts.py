"""Other starts lead to schedules that neighbourhoods of the best do not find."""

from __future__ import annotations

from remat.solver.bounds.cut_program import CutProgram
from remat.solver.bounds.lazy_cuts import LazyCuts, Windows
from remat.solver.cuts.cut import best_cut, targets_of
from remat.solver.cuts.other_starts import OtherStarts
from remat.solver.local_search.events import again_us
from remat.solver.search import Search
from remat.solver.state import State, store_all_state
from tests.limits import AMPLE_S
from tests.solver.layered_search import budget_bytes, layered


def begun() -> tuple[Search, Windows]:
    search = Search(layered(), budget_bytes(), "test", AMPLE_S)
    problem, plain = search.problem, store_all_state(search.problem)
    place = best_cut(search, plain, lambda t: CutProgram(problem, (t,), search.budget_bytes))
    assert place is not None
    lazy = LazyCuts(problem, search.budget_bytes, (place,))
    list(lazy.climb_relaxed(4, 5000, AMPLE_S))
    return search, Windows(problem, [lazy])


def test_each_target_gives_a_schedule_until_none_is_left() -> None:
    search, windows = begun()
    others = OtherStarts(search, windows)
    found: list[tuple[float, float]] = []
    while effort := others.offer_next(workers=1):
        assert effort > 0
        if any(others.runs):
            problem = search.problem
            state = State.from_recomputed(problem, others.runs)
            assert state.peak_bytes.max() <= search.budget_bytes
            found.append((again_us(problem, others.runs), search.best_key[0]))
    assert len({cost_us for cost_us, _ in found}) > 1, "all targets lead to one schedule"
    least_us = min(cost_us for cost_us, _ in found)
    assert found[-1][1] <= search.graph.time_us + least_us, "the best was not offered"
    assert others.offer_next(workers=1) == 0.0


def test_they_begin_from_the_programs_as_they_were() -> None:
    """A program is solved beside them, and gets another cut meanwhile."""
    search, windows = begun()
    target_bytes = targets_of(search, (0.97,))[0]
    before = windows.relaxed_start(target_bytes, AMPLE_S)
    copied = windows.copy()
    (part,) = windows.parts
    part.cuts, part.added = part.cuts[:1], part.cuts[:1]
    now, then = (one.relaxed_start(target_bytes, AMPLE_S) for one in (windows, copied))
    assert before is not None
    assert now is not None
    assert then is not None
    assert then.runs == before.runs != now.runs


def test_another_round_goes_on_with_the_next_target() -> None:
    search, windows = begun()
    first, second = (OtherStarts(search, windows, first=place) for place in (0, 1))
    for _ in range(2):
        first.offer_next(workers=1)
    second.offer_next(workers=1)
    assert second.runs == first.runs
    assert second.tried == first.tried == 2
