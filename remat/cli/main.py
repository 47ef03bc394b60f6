"""The command line: all verbs, by their names.

Exit codes: 0 done, 2 usage or refused, 3 no schedule fits, 4 check failed, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import typer
from typer.core import TyperGroup

from remat import __version__
from remat.progress import in_one_line, open_closed_streams, steady_console, use_simple_letters

_UsageError: Any = typer.BadParameter.__base__  # of the click that typer itself uses

_WORDS: dict[str, dict[str, Any]] = msgspec.json.decode(
    Path(__file__).with_name("verbs.json").read_bytes()
)
VERBS = _WORDS["verbs"]
"""The place of each, and an example for its help. First those that plan, then those that read."""
FORMER: dict[str, str] = _WORDS["former"]  # what does now what a verb of an older release did

if TYPE_CHECKING:
    app: typer.Typer


def __getattr__(name: str) -> Any:
    """`app`, with every verb: for docs and tests, as it imports them all."""
    if name == "app":
        return _app_of(VERBS)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Verbs(TyperGroup):
    """Says in one line what is wrong with the words of a verb."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in FORMER:  # else typer would say that there is no such command
            _end_usage(f"{cmd_name} is now: remat {FORMER[cmd_name]}")
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            where = error.ctx.command_path if error.ctx else "remat"
            _end_usage(f"{error.format_message().rstrip('.')} (see {where} --help)")


def _end_usage(message: str) -> NoReturn:
    steady_console(stderr=True).print(in_one_line(message), style="red", soft_wrap=True)
    raise typer.Exit(2)


def _app_of(verbs: Iterable[str]) -> typer.Typer:
    made = typer.Typer(
        cls=_Verbs,
        help="Fit a PyTorch training step into a memory budget, as fast as possible, with the same "
        "results to the last bit.\n\nStart with: remat run model.py --budget 8GiB -o plan.json",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    made.callback()(_before_verbs)
    for verb in verbs:
        place, example = VERBS[verb]
        module, _, function = place.partition(":")
        made_by = getattr(importlib.import_module(module), function)
        text = inspect.getdoc(made_by) or ""
        made.command(verb, help=f"{text}\n\nExample: remat {verb} {example}")(made_by)
    return made


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"remat {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", help="Print the version.", callback=_print_version)
]


def _before_verbs(version: _Version = False) -> None:
    """What comes before a verb; it makes an app of one verb have a word for it."""


def main() -> None:
    open_closed_streams()
    use_simple_letters()  # a session does so too; this is for the help, which has none
    first = next(iter(sys.argv[1:2]), "")  # one verb is imported without others
    asked = [first] if first in VERBS else [] if first in (*FORMER, "--version") else VERBS
    try:
        _app_of(asked)()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's end must not change the exit code
        gc.freeze()  # collecting a million objects of torch takes a second
