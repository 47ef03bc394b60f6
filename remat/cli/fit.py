"""The verb `fit`: the largest batch or sequence within a budget at a bearable overhead."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
import typer

from remat.cli import options
from remat.cli.outcome import keep_layout, keep_result, said_layout, show_layout, show_offloaded
from remat.cli.session import INFEASIBLE, Session
from remat.cli.verb import verb
from remat.graph_capture.errors import BudgetError
from remat.job.fit import EACH_S, MOST, FitSearch, Range
from remat.job.fitted import fit_screen
from remat.job.request import Request
from remat.questions.memory import offloaded

Vary = Annotated[str, typer.Option(help="argument of the factory: batch, sequence, ...")]
MaxOverhead = Annotated[
    str, typer.Option(help="most extra time over the step that keeps everything, such as 10%")
]
FirstSizes = Annotated[
    str, typer.Option("--sizes", help="the two to capture first, such as 8,16; default 2,4 steps")
]
Step = Annotated[int, typer.Option(min=1, help="sizes are multiples of it")]
Most = Annotated[int, typer.Option(min=1, help="no larger size is tried")]
RunIt = Annotated[
    bool | None,
    typer.Option(
        "--check/--no-check",
        help="run a step of the answer; by default where the unmodified step fits here",
        show_default=False,
    ),
]


@verb(budget="auto", time_limit_s=EACH_S)
def fit_verb(
    session: Session,
    model: options.Model,
    request: Request,
    vary: Vary = "batch",
    max_overhead: MaxOverhead = "10%",
    sizes: FirstSizes = "",
    step: Step = 1,
    most: Most = MOST,
    check: RunIt = None,
    output: options.Output = None,
    layout: options.LayoutFile = None,
) -> None:
    """Find the largest size whose plan fits; it and the next are captured and solved."""
    search = FitSearch(
        model, vary, Range(step, most, step), asked_overhead(max_overhead), request,
        session.stopwatch, request.time_limit_s,
    )  # fmt: skip
    found = search.run(request.budget, asked_sizes(sizes, step), check)
    placed = moved = None
    if search.best is not None:
        _, of, result = search.best
        keep_result(session, output, of, result)
        placed = keep_layout(session, layout, of.graph, result)
        moved = offloaded(of.graph, result.schedule)
    if session.as_json:
        said = {"offload": msgspec.to_builtins(moved)}
        session.emit(found.as_json() | said | said_layout(placed))
    else:
        session.out.print(fit_screen(found))
        show_offloaded(session, moved)
        show_layout(session, placed)
    if found.answer is None:
        raise SystemExit(INFEASIBLE)


def asked_overhead(text: str) -> float:
    """``10%`` or ``0.1`` as a fraction.

    Raises
    ------
    BudgetError : neither.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", text)
    if match is None:
        raise BudgetError(f"overhead {text!r} cannot be read: write it like 10% or 0.1")
    return float(match[1]) / (100 if match[2] else 1)


def asked_sizes(text: str, step: int) -> tuple[int, int]:
    """The two sizes to capture first; 2 and 4 steps where none are named.

    Raises
    ------
    BudgetError : not two whole numbers.
    """
    if not text:
        return 2 * step, 4 * step
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise BudgetError(f"sizes {text!r} cannot be read: write two, like 8,16")
    return int(parts[0]), int(parts[1])
