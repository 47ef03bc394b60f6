"""Sweeps over budgets as people write them, and the price of memory in words and figures."""

from __future__ import annotations

import io
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, SupportsIndex

from remat.budgets import parse_budget, unmodified, unmodified_step
from remat.formats import GIB, bytes_text, fine_time_text, gap_text, percent_text
from remat.graph_capture.errors import BudgetError, SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.plots import draw_live_bytes
from remat.solver.budgets.front import GibPrice
from remat.solver.budgets.sweep import (
    BUDGETS,
    spread_budgets,
)
from remat.solver.recompute_summary import kinds_of, kinds_text

if TYPE_CHECKING:
    import ipywidgets


Budgets = int | Iterable[str | SupportsIndex] | None  # each as in `remat.solve`; None for twelve


def in_bytes(
    graph: TrainingGraph, budgets: Budgets, time_limit_s: float, pins: dict[str, Any]
) -> tuple[list[int], list[Result]]:
    """The budgets in bytes, and results that were found on the way to them."""
    if budgets is None or isinstance(budgets, int):
        count = BUDGETS if budgets is None else budgets
        unmodified_bytes = unmodified(graph).peak_bytes
        return spread_budgets(graph, count, unmodified_bytes, time_limit_s=time_limit_s, **pins)
    if isinstance(budgets, str):  # else each letter would be read as a budget
        raise BudgetError(f"budgets is one string: give a list, such as [{budgets!r}]")
    limits: dict[str, Any] = {"time_limit_s": time_limit_s, **pins}
    return [parse_budget(b).bytes_for(graph, **limits) for b in budgets], []


def price_text(price: GibPrice) -> str:
    # A step that is no round number needs its reason.
    why = f"{bytes_text(price.step_bytes)} more (5 % of the peak; 1 GiB would be more than that)"
    saved, less = "saves nothing", "as much less costs nothing"
    if price.saved_us > 0:
        saved = f"saves {fine_time_text(price.saved_us)} a step ({percent_text(price.saved)})"
    if price.cost_us is None or price.cost is None:
        less = "with as much less no schedule is known"
    elif price.cost_us > 0:
        less = f"as much less costs {fine_time_text(price.cost_us)} ({percent_text(price.cost)})"
    return f"{'1 GiB more' if price.step_bytes == GIB else why} {saved}; {less}"


def price_json(price: GibPrice) -> dict[str, float | int | None]:
    names = ("budget_bytes", "step_bytes", "saved_us", "saved", "cost_us", "cost")
    return {name: getattr(price, name) for name in names}


# A slider over budgets for notebooks. Its `widget` only shows what `at`, `text` and `picture` say.

_STEP_PERCENT = 5  # what one move of the slider adds, in per cent of the unmodified peak


class BudgetSlider:
    """A plan at each budget that is asked for, in per cent of the unmodified peak.

    Only `widget` needs a notebook. `least_percent` is the least budget known, rounded up.
    """

    def __init__(
        self, graph: TrainingGraph, solver: str = "auto", time_limit_s: float = 5.0, **options: Any
    ) -> None:
        self.graph = graph
        self._asked: dict[str, Any] = {"solver": solver, "time_limit_s": time_limit_s, **options}
        self._unmodified = unmodified_step(graph)
        self._solved: dict[int, Result] = {}
        least_bytes = parse_budget("min").bytes_for(graph, **self._asked)
        # Rounded up, so that something fits there.
        self.least_percent = min(-(-100 * least_bytes // self._unmodified.result.peak_bytes), 100)

    def at(self, percent: int) -> Result:
        if percent not in self._solved:  # each budget once: a slider comes back to where it was
            self._solved[percent] = parse_budget(f"{percent}%").solve(self.graph, **self._asked)
        return self._solved[percent]

    def text(self, percent: int) -> str:
        result = self.at(percent)
        budget = f"budget      {bytes_text(result.budget_bytes)}, {percent} % of the peak"
        if result.schedule is None:
            return f"{budget}\nstatus      {result.status}: {result.message}"
        again = kinds_text(kinds_of(self.graph, result.schedule)) or "nothing"
        return (
            f"{budget}\n"
            f"peak        {bytes_text(result.peak_bytes)}\n"
            f"overhead    {percent_text(result.overhead)}, {gap_text(result.gap)}\n"
            f"recomputed  {again}\n"
            f"status      {result.status}, by {result.solver}"
        )

    def picture(self, percent: int) -> str:
        """What is live there and in the unmodified step, as SVG; empty where none is drawn."""
        result, before = self.at(percent), self._unmodified.result.schedule
        # matplotlib is an extra, and the slider says enough without.
        if result.schedule is None or before is None or not find_spec("matplotlib"):
            return ""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.5), layout="constrained")
        draw_live_bytes(
            figure.add_subplot(), self.graph, result.schedule,
            unmodified=(self._unmodified.graph, before),
        )  # fmt: skip
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg")
        return drawn.getvalue()

    def widget(self, percent: int = 60) -> ipywidgets.VBox:
        """The slider, at `percent` first, with text and picture; `SolverError`: no ipywidgets."""
        try:
            import ipywidgets as widgets
        except ImportError as error:
            raise SolverError(
                "the slider needs ipywidgets: pip install 'remat[notebook]', or call .at(percent)"
            ) from error
        slider = widgets.IntSlider(
            value=max(percent, self.least_percent), min=self.least_percent, max=100,
            # Not continuous: each value that it passes would be a solve.
            step=_STEP_PERCENT, description="budget, %", continuous_update=False,
        )  # fmt: skip
        said = widgets.HTML()

        def show(change: dict[str, Any]) -> None:
            percent = change["new"]
            said.value = f"<pre>{self.text(percent)}</pre>{self.picture(percent)}"

        slider.observe(show, names="value")
        show({"new": slider.value})
        return widgets.VBox([slider, said])
