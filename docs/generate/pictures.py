"""The pictures of the concepts page and its report, drawn when the site is built.

They show the step of `examples/gpt.py`, as `make demo` plans it, but with costs of a device of the
table: measured costs would make another picture on every machine. Below each picture stands a
sentence whose figures are those of `simulate`. Pictures are not committed, so a repository's
browser shows the page without them.

Committed is the first screen of the page of `make demo`, at two widths, in light and in dark, as
`docs/pictures/report-*.png`: `make demo && python -m docs.generate.pictures`.
"""

from __future__ import annotations

import functools
import io
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from mkdocs.structure.files import File, Files

import remat
from benchmarks.comparison.page.front_plot import INKS, in_ink
from remat.analysis.compare import Sweep
from remat.budgets import unmodified_step
from remat.formats import bytes_text, percent_text
from remat.graph_capture.graph import TrainingGraph
from remat.job.factory import load_model
from remat.schedules.plots import draw_front, draw_live_bytes, draw_peak_values, draw_ribbon
from remat.schedules.schedule import Schedule
from remat.schedules.timeline import place_of

MODEL = "examples/gpt.py:factory"
DEVICE, TITLE = "l4", "an L4"
BUDGET = "60%"
BUDGETS = ["40%", "50%", BUDGET, "70%", "80%", "90%", "100%"]
PAGE, REPORT = "concepts.md", "example_report.html"
ROOT = Path(__file__).parents[2]
SCREENS = {
    "report-light": (1280, 800, "light"),
    "report-dark": (1280, 800, "dark"),
    "report-phone": (390, 844, "light"),
    "report-phone-dark": (390, 844, "dark"),
}
"""First screens of a report: width, height and colour scheme."""
RULES = ("every_n_layers", "dtr", "chen_sqrt")
"""Solvers beside `auto` in the front: a rule people write by hand, a policy, a textbook."""

_PICTURE = re.compile(r"^!\[([^\]]*)\]\(pictures/(\w+)\.svg\)$", re.MULTILINE)
_IN_BOTH = """<picture>
  <source media="(prefers-color-scheme: dark)" srcset="pictures/{name}-dark.svg">
  <img alt="{alt}" src="pictures/{name}-light.svg">
</picture>
"""


@functools.cache
def graph() -> TrainingGraph:
    """One training step of the example, with costs of the device."""
    loaded = load_model(MODEL)
    return remat.capture(loaded.model, loaded.args, device=DEVICE)


@functools.cache
def fronts() -> Sweep:
    """Outcomes at several budgets, by solver."""
    return remat.sweep(graph(), BUDGETS, solvers=("auto", *RULES), time_limit_s=15)


@functools.cache
def plan() -> remat.Plan:
    """The plan of `auto` at the budget."""
    return list(fronts())[BUDGETS.index(BUDGET)]


def live_bytes(ax: Axes) -> str:
    """What is live while the step runs."""
    result, step = plan(), unmodified_step(graph())
    before = step.result
    assert result.schedule is not None
    assert before.schedule is not None
    draw_live_bytes(ax, graph(), result.schedule, unmodified=(step.graph, before.schedule))
    return (
        f"One step of the example GPT, planned for {TITLE}: the unmodified step peaks at "
        f"{bytes_text(before.peak_bytes)}, the plan at {bytes_text(result.peak_bytes)} of a budget "
        f"of {bytes_text(result.budget_bytes)}, for {percent_text(result.overhead)} more time."
    )


def ribbon(ax: Axes) -> str:
    """What runs when, and what is kept when."""
    result = plan()
    assert result.schedule is not None
    draw_ribbon(ax, graph(), result.schedule)
    counts = result.schedule.computations()
    again = sum(count > 1 for count in counts.values())
    return f"The same plan: {again} of {len(counts)} ops run more than once."


def peak_values(ax: Axes) -> str:
    """What holds the memory where it is fullest."""
    result = plan()
    assert result.schedule is not None
    draw_peak_values(ax, graph(), result.schedule, top=12)
    simulation = result.simulate()
    op = graph().ops[graph().op_index[_op_at(result.schedule, simulation.peak_step)]]
    return (
        f"At the peak `{op.target}` of `{place_of(op.module)}` runs, in {op.phase}, and "
        f"{len(simulation.held_at_peak)} values are live."
    )


def front(ax: Axes) -> str:
    """Time against memory."""
    draw_front(ax, fronts().fronts, budget_bytes=plan().budget_bytes)
    told: list[str] = []
    for name, found in fronts().fronts.items():
        best = found.best_within(plan().budget_bytes)
        told.append(f"`{name}` {percent_text(best.overhead) if best else 'does not fit'}")
    return f"More time at {BUDGET.removesuffix('%')} % of the peak: {', '.join(told)}."


def _op_at(schedule: Schedule, index: int) -> str:
    step = schedule.steps[index]
    assert hasattr(step, "op")
    return step.op


PICTURES: dict[str, tuple[Callable[[Axes], str], tuple[float, float]]] = {
    "live_bytes": (live_bytes, (9, 4)),
    "ribbon": (ribbon, (9, 3.5)),
    "peak_values": (peak_values, (9, 4)),
    "front": (front, (9, 4)),
}
"""Each picture with its width and height in inches."""


@functools.cache
def drawn(name: str, scheme: str = "light") -> tuple[str, str]:
    """A picture as SVG for a light or a dark page, and its sentence."""
    draw, size = PICTURES[name]
    with rc_context(in_ink(INKS[scheme])):
        figure = Figure(figsize=size, layout="constrained")
        said = draw(figure.add_subplot())
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue(), said


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs when it knows the pages that are written by hand."""
    for name, scheme in itertools.product(PICTURES, INKS):
        picture, _ = drawn(name, scheme)
        files.append(File.generated(config, f"pictures/{name}-{scheme}.svg", content=picture))
    page = plan().report(fronts=fronts().fronts)
    files.append(File.generated(config, REPORT, content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page: each picture in both schemes, and its sentence below."""
    if page.file.src_uri != PAGE:
        return markdown
    return _PICTURE.sub(_with_sentence, markdown)


def _with_sentence(found: re.Match[str]) -> str:
    alt, name = found.groups()
    return f"{_IN_BOTH.format(name=name, alt=alt)}\n*{drawn(name)[1]}*"


def main() -> None:
    """Keep the first screens of the page of `make demo`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, (width, height, scheme) in SCREENS.items():
            tab = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme,
                device_scale_factor=2,
            )  # fmt: skip
            tab.goto((ROOT / "build" / "demo.html").as_uri())
            tab.screenshot(path=ROOT / "docs" / "pictures" / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
