"""The command line: all verbs, by their names.

Exit codes: 0 done, 2 usage or refused, 3 infeasible, 4 check failed, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import gc
import importlib
import signal
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

from remat.progress import open_closed_streams, use_simple_letters

VERBS = {
    "run": "remat.cli.run:run_verb",
    "capture": "remat.cli.run:capture_verb",
    "solve": "remat.cli.run:solve_verb",
    "sweep": "remat.cli.answers:sweep_verb",
    "plan-cluster": "remat.cluster.command:plan_cluster_verb",
    "inspect": "remat.cli.answers:inspect_verb",
    "explain": "remat.cli.answers:explain_verb",
    "compare": "remat.cli.answers:compare_verb",
    "fit": "remat.cli.fit:fit_verb",
    "report": "remat.cli.report:report_verb",
    "export": "remat.cli.report:export_verb",
    "rewrite": "remat.cli.run:rewrite_verb",
    "check": "remat.cli.run:check_verb",
    "profile": "remat.cli.machine:profile_verb",
    "doctor": "remat.cli.machine:doctor_verb",
}
"""The module and the function of each. Those that plan come first, then those that read a plan."""

if TYPE_CHECKING:
    app: typer.Typer


def __getattr__(name: str) -> Any:
    """`app`, with every verb: it imports them all."""
    if name == "app":
        return _app_of(VERBS)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _app_of(verbs: Iterable[str]) -> typer.Typer:
    """The command line with these of its verbs."""
    made = typer.Typer(
        help="The fastest PyTorch training step that fits a memory budget, exactly.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    # Or an app of one verb would have no word for it.
    made.callback()(lambda: None)
    for verb in verbs:
        module, _, function = VERBS[verb].partition(":")
        made.command(verb)(getattr(importlib.import_module(module), function))
    return made


def main() -> None:
    """Run the verb that the command line names."""
    open_closed_streams()
    # A session does so too; this is for the help, which has none.
    use_simple_letters()
    # One verb is imported without the others; what is no verb is answered by all.
    asked = [word for word in sys.argv[1:2] if word in VERBS]
    try:
        _app_of(asked or VERBS)()
    finally:
        # The verb has ended, so Ctrl-C has nothing to end. Python's own end should not change the
        # exit code that says how.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Nor is there anything to collect among a million objects of torch, which takes a second.
        gc.freeze()
