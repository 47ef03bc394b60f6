"""Arguments and options that several verbs share, beside those that plan (`verb.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remat.job.dynamic import METAVAR

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="path/to/file.py or package.module, and :function unless it is called factory",
        show_default=False,
    ),
]
GraphOrModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|GRAPH|PLAN", help="a model, or a kept graph or plan to solve anew"
    ),
]
Anything = Annotated[
    str, typer.Argument(metavar="MODEL|GRAPH|PLAN", help="a model, or a kept graph or plan")
]
PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", help="a plan kept by run or solve -o")
]
PlanOption = Annotated[Path | None, typer.Option("--plan", help="a plan kept by run or solve -o")]
Here = Annotated[str, typer.Option("--device", help="cpu or cuda: where the model is moved to")]
PriceOfGib = Annotated[
    bool, typer.Option("--price-of-gib", help="also say what a GiB more or less is worth")
]
Top = Annotated[int, typer.Option(min=1, help="how many rows to show")]
DynamicOption = Annotated[
    list[str],
    typer.Option(
        "--dynamic",
        metavar=METAVAR,
        help="plan for a range of sizes of a dimension, such as tokens:1=seq:16:512; repeatable",
    ),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="keep the result as a file")]
LayoutFile = Annotated[
    Path | None,
    typer.Option("--layout", help="place the plan's buffers in one arena; keep their offsets here"),
]
PlaceOption = Annotated[
    bool, typer.Option("--place", help="also place buffers in one arena, and show what it takes")
]
KeptLayout = Annotated[
    Path | None,
    typer.Option(
        "--layout", metavar="FILE", help="offsets kept by --layout of run, solve, fit or inspect"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]
