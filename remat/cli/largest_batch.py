"""The verb `largest-batch`: the largest batch, or sequence, within a budget and an overhead."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from remat.analysis.plan_figures import offloaded
from remat.cli.session import INFEASIBLE, Session, save_layout_file, save_result_file
from remat.cli.verb import verb
from remat.formats import rows_table
from remat.graph_capture.errors import BudgetError
from remat.job.plan_source import require_model
from remat.job.request import Request
from remat.job.size_search import LARGEST_SIZE, SOLVE_S, FitSearch, SizeRange


@verb(budget="auto", time_limit_s=SOLVE_S)
def largest_batch_verb(
    session: Session, model: str, request: Request, vary: str = "batch",
    max_overhead: str = "10%", sizes: str = "", step: int = 1, most: int = LARGEST_SIZE,
    check: bool | None = None, output: Path | None = None, layout: Path | None = None,
) -> None:  # fmt: skip
    """Find the largest batch (or sequence) whose plan fits the budget."""
    require_model(model)  # refused before a session of captures: a kept graph has one size
    search = FitSearch(
        model, vary, SizeRange(step, most, step), _asked_overhead(max_overhead), request,
        session.stopwatch, request.time_limit_s,
    )  # fmt: skip
    found = search.run(request.budget, _asked_sizes(sizes, step), check)
    placed = moved = None
    if search.best is not None:
        _, of, result = search.best
        save_result_file(session, output, of, result, request.order)
        placed = save_layout_file(session, layout, of.graph, result)
        moved = offloaded(of.graph, result.schedule)
    said = found.as_json() | {"offload": msgspec.to_builtins(moved)}
    rows = () if moved is None else (rows_table(moved.rows()),)
    session.answer(said, found.screen(), *rows, layout=placed)
    if found.answer is None:  # last, as what was tried is told where nothing fits, too
        raise SystemExit(INFEASIBLE)


def _asked_overhead(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", text)
    if match is None:
        raise BudgetError(f"overhead {text!r} cannot be read: write it like 10% or 0.1")
    return float(match[1]) / (100 if match[2] else 1)


def _asked_sizes(text: str, step: int) -> tuple[int, int]:
    """The two sizes to capture first; 2 and 4 steps where none are named."""
    if not text:
        return 2 * step, 4 * step
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise BudgetError(f"sizes {text!r} cannot be read: write two, like 8,16")
    return int(parts[0]), int(parts[1])
