"""The command line: verbs of the names of the functions behind them.

Exit codes: 0 done, 2 usage or refused, 3 infeasible, 4 check failed.
"""

from __future__ import annotations

import os

import typer

from remat.cli.compare import compare
from remat.cli.doctor import doctor
from remat.cli.explain import explain
from remat.cli.fit import fit
from remat.cli.inspect import inspect
from remat.cli.plan import capture, rewrite, solve
from remat.cli.profile import profile
from remat.cli.report import export, report
from remat.cli.run import check, run
from remat.cli.sweep import sweep

app = typer.Typer(
    help="The fastest PyTorch training step that fits a memory budget, exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
PLANNING = (run, capture, solve, sweep)
READING = (inspect, explain, compare, fit)
SHOWING = (report, export)
USING = (rewrite, check, profile, doctor)
for verb in (*PLANNING, *READING, *SHOWING, *USING):
    app.command()(verb)


def main() -> None:
    """Entry point of the `remat` command."""
    # torch's profiler, which measures the peaks, otherwise logs each start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    app()
