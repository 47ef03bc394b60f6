"""The graphs whose schedules are kept as text in this folder, and that text.

``python -m tests.replay.cases`` writes the texts anew.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import remat
from examples.gpt import GPT, Sizes
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Fetch, Offload, Step
from remat.schedules.simulate import simulate
from tests.limits import AMPLE_S
from tests.solver.graphs.random_graphs import chain, gpt_like, resnet_like, unet_like

FOLDER = Path(__file__).parent / "texts"
SHARES = {"chain": 0.6, "gpt": 0.6, "resnet": 0.8, "unet": 0.6, "captured_gpt": 0.85}
"""Budgets, of the peak of the step that keeps everything."""


@functools.cache
def captured_gpt() -> TrainingGraph:
    """Two layers with dropout, at the modelled costs of a GPU, so that no clock decides."""
    sizes = Sizes(layers=2, width=64, heads=2, seq=32, batch=2, vocab=64)
    tokens = torch.randint(64, (2, 32))
    return remat.capture(GPT(sizes), (tokens, tokens), device="h100")


GRAPHS: dict[str, Callable[[], TrainingGraph]] = {
    "chain": lambda: chain(8),
    "gpt": lambda: gpt_like(2),
    "resnet": lambda: resnet_like(3),
    "unet": lambda: unet_like(2),
    "captured_gpt": captured_gpt,
}
SOLVERS = ("auto", "cut", "dtr", "chen_sqrt")
CASES = tuple(itertools.product(GRAPHS, SOLVERS))


def path_of(name: str, solver: str) -> Path:
    """Where the text of a case is kept."""
    return FOLDER / f"{name}-{solver}.txt"


def text_of(name: str, solver: str) -> str:
    """The schedule of a case: what it costs, then a line for each op that runs."""
    graph = GRAPHS[name]()
    keeps_all_bytes = remat.solve(graph, 2**62, "store_all").peak_bytes
    budget_bytes = int(SHARES[name] * keeps_all_bytes)
    result = remat.solve(graph, f"{budget_bytes}B allocated", solver, AMPLE_S)
    head = [
        f"graph    {name}, {len(graph.ops)} ops, {keeps_all_bytes} bytes keeping everything",
        f"solver   {solver} within {budget_bytes} bytes: {result.status}",
    ]
    if result.schedule is None:
        return "\n".join([*head, f"least    {result.least_feasible_bytes} bytes"]) + "\n"
    simulation = simulate(graph, result.schedule)
    head += [
        f"peak     {simulation.peak_bytes} bytes",
        f"overhead {100 * simulation.overhead:.3f} %",
    ]
    return "\n".join([*head, "", *_lines(result.schedule.steps)]) + "\n"


def _lines(steps: tuple[Step, ...]) -> Iterator[str]:
    """Each op with the values that are dropped before the next."""
    ran: set[str] = set()
    line = ""
    for step in steps:
        if isinstance(step, Compute):
            yield from [line] * bool(line)
            line = f"{'again' if step.op in ran else 'run':6}{step.op}"
            ran.add(step.op)
        elif isinstance(step, Offload | Fetch):
            line += f"  {type(step).__name__.lower()} {step.value}"
        else:
            line += f"  -{step.value}" + (f" on the {step.at}" if step.at != "device" else "")
    yield line


def main() -> None:
    """Write all texts."""
    for name, solver in CASES:
        path_of(name, solver).write_text(text_of(name, solver))


if __name__ == "__main__":
    main()
