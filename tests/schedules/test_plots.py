"""Each plot draws what it says; matplotlib is of the extra ``plot``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from remat.analysis.compare import sweep
from remat.analysis.plan_figures import place
from remat.graph_capture.errors import LayoutError
from remat.schedules import palette
from remat.schedules.layout import buffers_of
from remat.schedules.plots import (
    draw_front,
    draw_layout,
    draw_live_bytes,
    draw_peak_values,
    draw_ribbon,
)
from remat.schedules.simulate import simulate
from remat.schedules.timeline import timeline
from remat.solver import solve_within
from tests.limits import AMPLE_S
from tests.schedules.conftest import Planned
from tests.solver.graphs.random_graphs import gpt_like

matplotlib = pytest.importorskip("matplotlib")
MIB = 2**20


@pytest.fixture
def ax() -> Iterator[Any]:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    yield axes
    figure.canvas.draw()
    pyplot.close(figure)


def test_nothing_imports_matplotlib_before_it_draws() -> None:
    code = "import sys, remat.schedules.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("by", ["kind", "module"])
def test_bands_reach_the_simulated_peak(ax: Any, planned: Planned, by: Any) -> None:
    facts = planned.facts
    unmodified = facts.unmodified_graph, facts.unmodified_schedule
    line = timeline(planned.graph, planned.schedule)
    measured = np.arange(1.0, 4.0), np.array([MIB, 2 * MIB, MIB])
    draw_live_bytes(
        ax, planned.graph, planned.schedule, by=by, unmodified=unmodified, measured=measured
    )
    top = max(path.vertices[:, 1].max() for c in ax.collections for path in c.get_paths())
    assert top * MIB == pytest.approx(line.simulation.peak_bytes)
    budget = next(one for one in ax.lines if one.get_label() == "budget")
    assert budget.get_ydata()[0] * MIB == pytest.approx(planned.result.budget_bytes)
    drawn = next(one for one in ax.lines if one.get_label() == "measured")
    assert drawn.get_xdata()[-1] == pytest.approx(line.edges[-1])
    stairs = next(one for one in ax.patches if one.get_label() == "unmodified")
    peak = simulate(*unmodified).peak_bytes
    assert stairs.get_data().values.max() * MIB == pytest.approx(peak)


def test_the_ribbon_shades_and_marks(ax: Any, planned: Planned) -> None:
    draw_ribbon(ax, planned.graph, planned.schedule)
    assert {text.get_text() for text in ax.get_legend().get_texts()} == {
        "kept", "forward", "backward", "recompute"
    }  # fmt: skip
    assert "blocks.0" in [label.get_text() for label in ax.get_yticklabels()]


def test_a_layout_shows_each_buffer_in_its_place(ax: Any, planned: Planned) -> None:
    layout = place(planned.graph, planned.schedule)
    draw_layout(ax, planned.graph, planned.schedule, layout)
    buffers = buffers_of(planned.graph, planned.schedule)
    drawn = [path.vertices for one in ax.collections for path in one.get_paths()]
    assert len(drawn) == len(buffers)
    area = sum(np.ptp(corners[:, 0]) * np.ptp(corners[:, 1]) for corners in drawn)
    assert area * MIB == pytest.approx(float(buffers.live_bytes.sum()))
    assert {"activation", "gradient", "most live bytes"} <= {
        text.get_text() for text in ax.get_legend().get_texts()
    }
    other = place(planned.graph, planned.facts.unmodified_schedule)
    with pytest.raises(LayoutError, match="made for another one"):
        draw_layout(ax, planned.graph, planned.schedule, other)


def test_values_at_the_peak_are_the_largest(ax: Any, planned: Planned) -> None:
    draw_peak_values(ax, planned.graph, planned.schedule, top=5)
    held = simulate(planned.graph, planned.schedule).held_at_peak
    widths = sorted((bar.get_width() for bar in ax.containers[0]), reverse=True)
    sizes = [planned.graph.value_by_name[name].size_bytes for name in held[:5]]
    assert np.allclose(np.array(widths) * 2**10, sizes)
    assert f"{len(held) - 5} smaller left out" in ax.get_title()


@pytest.mark.slow
def test_a_front_shows_solvers_bound_budget_and_plan(ax: Any) -> None:
    graph = gpt_like(3)
    fronts = sweep(graph, 3, ["cut", "chen_sqrt"], time_limit_s=AMPLE_S).fronts
    budget_bytes = fronts["cut"].points[1].budget_bytes
    plan = solve_within(graph, budget_bytes, "cut", time_limit_s=AMPLE_S)
    draw_front(ax, fronts, budget_bytes=budget_bytes, plan=plan)
    lines = {one.get_label(): one for one in ax.lines}
    assert list(lines) == ["cut", "chen_sqrt", "bound", "budget", "this plan"]
    found = sorted(p.result.peak_bytes for p in fronts["cut"].points if p.result.schedule)
    assert np.allclose(lines["cut"].get_xdata() * MIB, found)
    assert lines["this plan"].get_ydata()[0] == pytest.approx(100 * plan.overhead)
    draw_front(ax, fronts["cut"])


def test_roles_can_be_told_apart() -> None:
    together = [
        palette.ROLES[name] for name in ("plan", "unmodified", "measured", "budget", "bound")
    ]
    assert len(set(together)) == len(together)
    assert len(set(palette.KINDS.values())) == len(palette.KINDS)
    assert len(set(palette.CYCLE)) == len(palette.CYCLE)
    many = palette.cycled([str(i) for i in range(9)])
    assert many["8"] == palette.GREY
