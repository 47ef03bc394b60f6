"""The options that several verbs share, each typed and explained once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from remat.graph_capture.devices.device_table import device_table
from remat.solver import TABLE


class OptimizerName(StrEnum):
    """Optimizers whose state can be counted as resident."""

    none = "none"
    sgd = "sgd"
    momentum = "momentum"
    adamw = "adamw"


class OrderName(StrEnum):
    """Orders of first computations."""

    fixed = "fixed"
    free = "free"


class ShardName(StrEnum):
    """Kinds of data parallelism."""

    none = "none"
    ddp = "ddp"
    fsdp2 = "fsdp2"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="path/to/file.py:factory or package.module:factory",
        show_default=False,
    ),
]
Budget = Annotated[
    str,
    typer.Option(help="8GiB, 512MiB, 60% of the unmodified peak, auto (what is free) or min"),
]
Solver = Annotated[str, typer.Option(help="one of " + ", ".join(TABLE))]
Order = Annotated[
    OrderName,
    typer.Option(help="of first computations: fixed keeps the captured one, free tries others"),
]
TimeLimit = Annotated[float, typer.Option(min=0.0, help="seconds to search for a plan")]
Keep = Annotated[
    list[str], typer.Option("--keep", metavar="GLOB", help="modules never to recompute; repeatable")
]
Recompute = Annotated[
    list[str],
    typer.Option("--recompute", metavar="GLOB", help="modules always to recompute; repeatable"),
]
PriceOfGib = Annotated[
    bool, typer.Option("--price-of-gib", help="also say what a GiB more or less is worth")
]
Optimizer = Annotated[OptimizerName, typer.Option(help="count this optimizer's state")]
Device = Annotated[
    str,
    typer.Option(
        help="cpu or cuda, measured here; or modelled: " + ", ".join(device_table().devices)
    ),
]
Here = Annotated[str, typer.Option("--device", help="cpu or cuda: where the model is moved to")]
Shard = Annotated[
    ShardName, typer.Option(help="plan one rank of this data parallelism, without running it")
]
WorldSize = Annotated[int, typer.Option(min=1, help="ranks of --shard")]
ShardBlocks = Annotated[
    str,
    typer.Option(metavar="GLOB", help="modules that fsdp2 shards by themselves, such as blocks.*"),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile", metavar="FILE", help="prices kept by remat profile, to use as they are"
    ),
]
Accumulate = Annotated[
    bool, typer.Option("--accumulate", help="count accumulated gradients as resident")
]
Check = Annotated[
    bool, typer.Option("--check", help="run the unmodified step even where memory is short")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]
Plan = Annotated[Path, typer.Argument(metavar="PLAN", help="a plan kept by run or solve -o")]
PlanOption = Annotated[Path | None, typer.Option("--plan", help="a plan kept by run or solve -o")]
Top = Annotated[int, typer.Option(min=1, help="how many rows to show")]
Anything = Annotated[
    str, typer.Argument(metavar="MODEL|GRAPH|PLAN", help="a model, or a kept graph or plan")
]
BudgetOrNone = Annotated[
    str, typer.Option("--budget", help="solve a model or graph for it: 8GiB, 60%, auto, min")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="keep the result as a file")]
