"""Exchanges of what is kept: never worse, always within the budget, ended by work."""

from __future__ import annotations

import functools

import pytest

from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.local_search import repair
from remat.solver.local_search.repair import Repair, exchange, fill, offer_exchanges
from remat.solver.search import Search
from remat.solver.state import State, store_all_state
from remat.solver.stopping import WorkLimit
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.rows import rows
from tests.solver.graphs.random_graphs import chain, gpt_like, resnet_like, unet_like

GRAPHS = {"chain": chain(24), "gpt": gpt_like(6), "resnet": resnet_like(6), "unet": unet_like(3)}


@functools.cache
def least_bytes_of(name: str) -> int:
    return solve_within(GRAPHS[name], 1, "auto", time_limit_s=AMPLE_S).least_feasible_bytes


def repaired(name: str, part: float) -> tuple[Search, State]:
    """A search at a part of the peak above the least, and a schedule that repair alone finds."""
    graph, least = GRAPHS[name], least_bytes_of(name)
    plain = peak_bytes_of(graph)
    search = Search(graph, int(least + part * (plain - least)), "exchange", AMPLE_S, None)
    state = store_all_state(search.problem)
    assert Repair(state, search.budget_bytes, 0.3, search).run()
    fill(state, search.budget_bytes, search)
    return search, state


@pytest.mark.parametrize("part", rows([0.6, 0.3, 0.1], lambda part: part == 0.3))
@pytest.mark.parametrize("name", GRAPHS)
def test_an_exchange_is_never_worse_and_keeps_the_budget(name: str, part: float) -> None:
    search, state = repaired(name, part)
    search.offer(state)
    start = state.schedule()
    found = exchange(state, search)
    assert search.best_key[0] == pytest.approx(GRAPHS[name].time_us + found.cost_us)
    judged = simulate(GRAPHS[name], found.schedule())
    assert judged.peak_bytes <= search.budget_bytes
    assert judged.time_us == pytest.approx(GRAPHS[name].time_us + found.cost_us)
    assert found.cost_us <= state.cost_us
    assert state.schedule().steps == start.steps, "the start is left as it was"


def test_exchanges_help_where_repair_alone_does_not() -> None:
    gains = []
    for name in GRAPHS:
        search, state = repaired(name, 0.3)
        gains.append(state.cost_us - exchange(state, search).cost_us)
    assert max(gains) > 0


def test_work_ends_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    search, state = repaired("gpt", 0.3)
    monkeypatch.setattr(repair, "EXCHANGES", WorkLimit(0))
    assert exchange(state, search) is state


def test_without_a_schedule_there_is_nothing_to_exchange() -> None:
    search = Search(GRAPHS["gpt"], 1, "exchange", 60.0, None)
    offer_exchanges(search)
    assert search.best is None
