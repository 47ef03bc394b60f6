"""The command line: all verbs, by their names.

Exit codes: 0 done, 2 usage or refused, 3 infeasible, 4 check failed, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import gc
import signal

import typer

from remat.cli.compare import compare_verb
from remat.cli.doctor import doctor_verb
from remat.cli.explain import explain_verb
from remat.cli.fit import fit_verb
from remat.cli.inspect import inspect_verb
from remat.cli.plan import capture_verb, rewrite_verb, solve_verb
from remat.cli.profile import profile_verb
from remat.cli.report import export_verb, report_verb
from remat.cli.run import check_verb, run_verb
from remat.cli.sweep import sweep_verb
from remat.cluster.command import plan_cluster_verb
from remat.screen.terminal import open_closed_streams, use_simple_letters

app = typer.Typer(
    help="The fastest PyTorch training step that fits a memory budget, exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
PLANNING = {
    "run": run_verb, "capture": capture_verb, "solve": solve_verb, "sweep": sweep_verb,
    "plan-cluster": plan_cluster_verb,
}  # fmt: skip
READING = {
    "inspect": inspect_verb, "explain": explain_verb, "compare": compare_verb, "fit": fit_verb
}  # fmt: skip
SHOWING = {"report": report_verb, "export": export_verb}
USING = {
    "rewrite": rewrite_verb, "check": check_verb, "profile": profile_verb, "doctor": doctor_verb
}  # fmt: skip
for name, command in (PLANNING | READING | SHOWING | USING).items():
    app.command(name)(command)


def main() -> None:
    """Run the verb that the command line names."""
    open_closed_streams()
    # A session does so too; this is for the help, which has none.
    use_simple_letters()
    try:
        app()
    finally:
        # The verb has ended, so Ctrl-C has nothing to end. Python's own end should not change the
        # exit code that says how.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Nor is there anything to collect among a million objects of torch, which takes a second.
        gc.freeze()
