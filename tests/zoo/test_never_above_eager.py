"""A budget of what eager was measured to take is enough for every model, and is kept to."""

from __future__ import annotations

import pytest

import remat
from remat.graph_capture import measure_costs, trace
from remat.rewriter.checking.measured_step import measured_step
from remat.rewriter.rewriting import rewrite
from tests.zoo.catalogue import ZOO

SEARCH_S = 20.0
"""Of a search, where keeping everything does not fit."""

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if not entry.refused])
def test_a_plan_for_eagers_peak_takes_no_more(name: str) -> None:
    entry = ZOO[name]
    if entry.is_missing:
        pytest.skip(f"{entry.needs} is not installed: pip install 'remat[zoo]'")
    case = entry.make()
    model, step = case.model, {"loss_fn": case.loss_fn, "target": case.target}
    with case.under_autocast():
        graph = measure_costs(trace(model, case.args, case.kwargs, **step))
        eager = measured_step(model, model, case.args, case.kwargs, **step).peak_bytes
        found = remat.solve(graph, eager, time_limit_s=SEARCH_S)
        assert found.schedule is not None, found.message
        planned = rewrite(model, found.schedule)
        measured = measured_step(model, planned, case.args, case.kwargs, **step)
    assert measured.peak_bytes <= eager
