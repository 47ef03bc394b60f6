"""A slider over budgets for notebooks: each move solves again and says what it costs.

`at` solves, and `text` and `picture` say what it found. The widget only shows these, so all but the
widget is tested without a notebook.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from remat.budgets import parse_budget, unmodified_step
from remat.formats import bytes_text, gap_text, percent_text
from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.one_call import solve as solve_budget
from remat.schedules.plots import draw_live_bytes
from remat.solver.kept import kinds_of, kinds_text
from remat.solver.result import Result

if TYPE_CHECKING:
    import ipywidgets

STEP_PERCENT = 5
"""What one move of the slider adds, in per cent of the unmodified peak."""


class BudgetSlider:
    """A plan at each budget that is asked for, in per cent of the unmodified peak.

    `at` works anywhere; `widget` needs the front end of a notebook. Each budget is solved once.

    Attributes
    ----------
    graph : priced. least_percent : the least budget known, rounded up; the slider begins there.
    """

    def __init__(
        self, graph: TrainingGraph, solver: str = "auto", time_limit_s: float = 5.0, **options: Any
    ) -> None:
        """Arguments are those of `remat.solve`; the time limit is that of each budget.

        Raises
        ------
        SolverError : an unknown solver or option.
        """
        self.graph = graph
        self._asked: dict[str, Any] = {"solver": solver, "time_limit_s": time_limit_s, **options}
        self._unmodified = unmodified_step(graph)
        self._solved: dict[int, Result] = {}
        least_bytes = parse_budget("min").bytes_for(graph, **self._asked)
        self.least_percent = min(-(-100 * least_bytes // self._unmodified.result.peak_bytes), 100)

    def at(self, percent: int) -> Result:
        """The outcome at that share of the unmodified peak."""
        if percent not in self._solved:
            self._solved[percent] = solve_budget(self.graph, f"{percent}%", **self._asked)
        return self._solved[percent]

    def text(self, percent: int) -> str:
        """What the slider says there: peak, overhead, bound, and what runs again."""
        result = self.at(percent)
        budget = f"budget      {bytes_text(result.budget_bytes)}, {percent} % of the peak"
        if result.schedule is None:
            return f"{budget}\nstatus      {result.status}: {result.message}"
        again = kinds_text(kinds_of(self.graph, result.schedule)) or "nothing"
        return "\n".join(
            [
                budget,
                f"peak        {bytes_text(result.peak_bytes)}",
                f"overhead    {percent_text(result.overhead)}, {gap_text(result.gap)}",
                f"recomputed  {again}",
                f"status      {result.status}, by {result.solver}",
            ]
        )

    def picture(self, percent: int) -> str:
        """What is live through the step there, and through the unmodified one, as SVG.

        Empty where nothing fits, and where matplotlib is not installed.
        """
        result, before = self.at(percent), self._unmodified.result.schedule
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
        """The slider, at `percent` first, with text and picture below it.

        Raises
        ------
        SolverError : ipywidgets is not installed.
        """
        widgets = _ipywidgets()
        slider = widgets.IntSlider(
            value=max(percent, self.least_percent), min=self.least_percent, max=100,
            step=STEP_PERCENT, description="budget, %", continuous_update=False,
        )  # fmt: skip
        said = widgets.HTML()

        def show(change: dict[str, Any]) -> None:
            percent = change["new"]
            said.value = f"<pre>{self.text(percent)}</pre>{self.picture(percent)}"

        slider.observe(show, names="value")
        show({"new": slider.value})
        return widgets.VBox([slider, said])


def _ipywidgets() -> Any:
    try:
        import ipywidgets
    except ImportError as error:
        raise SolverError(
            "the slider needs ipywidgets: pip install 'remat[notebook]', or call .at(percent)"
        ) from error
    return ipywidgets
