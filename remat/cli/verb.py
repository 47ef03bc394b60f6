"""What verbs share: a session, the planning options if they plan, and arguments that recur.

A verb is a function of a `Session` and its own options. Where it takes a `Request`, each field of
that becomes an option. A field among its own parameters has its own type and default. Help shows
the usual options first, then `MORE`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from remat.cli.session import Session
from remat.graph_capture.files import check_writable
from remat.job.plan_source import PLAN_FILES
from remat.job.request import DYNAMIC_METAVAR, Request, parse_sharding

MORE = "More options"  # the heading of options that few need
_USUAL = ("budget", "device", "host", "optimizer", "keep", "time_limit_s", "gap")  # the first list
FIELDS = {field.name: field for field in dataclasses.fields(Request)}
_KINDS = get_type_hints(Request, localns={"Profile": Path}) | {"sharding": str}
"""Types of the options. A profile is named by its file: the class itself would import torch."""
_REPEATED = [name for name, field in FIELDS.items() if field.default == ()]
STEP_OPTIONS = ("optimizer", "accumulate", "device")  # fields that a step is traced with

_Verb = Callable[..., None]


def verb(fields: Collection[str] = tuple(FIELDS), **defaults: Any) -> Callable[[_Verb], _Verb]:
    """Make a command of a function of a session; `defaults` are for fields of the request."""

    def command_of(function: _Verb) -> _Verb:
        # Evaluated, as typer reads the Annotated behind the text that `annotations` leaves.
        own = dict(inspect.signature(function, eval_str=True).parameters)
        del own["session"]
        planning = {}
        if own.pop("request", None):
            ordered = sorted(fields, key=lambda name: (*_USUAL, name).index(name))
            planning = {name: _planning_option(name, own, defaults) for name in ordered}
        command = _command(function, [name for name in planning if name not in own])
        shown = {**planning, **{name: own[name] for name in own if name not in planning}}
        for name, kind in (("as_json", _AsJson), ("verbose", _Verbose)):
            shown[name] = Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
            # By keyword: parameters without a default may then stand behind those with one.
            [one.replace(kind=Parameter.KEYWORD_ONLY) for one in shown.values()]
        )
        # typer reads both; functools.wraps has copied those of the function.
        command.__annotations__ = {name: one.annotation for name, one in shown.items()}
        return command

    return command_of


def _command(function: _Verb, requested: Collection[str]) -> _Verb:
    @functools.wraps(function)
    def command(*, as_json: bool, verbose: bool, **given: Any) -> None:
        session = Session(as_json=as_json, verbose=verbose)
        with session.guarded():
            # Refused before work is done for a file that cannot be written.
            for path in filter(None, map(given.get, ("output", "layout"))):
                check_writable(path)
            if requested:
                asked: dict[str, Any] = {name: given.pop(name) for name in requested}
                # What repeats comes as a list; a request is frozen, down to its pins.
                asked |= {name: tuple(asked[name]) for name in _REPEATED if name in asked}
                if "sharding" in asked:
                    asked["sharding"] = parse_sharding(asked["sharding"])
                is_kept = given.get("source", "").endswith(PLAN_FILES)
                given["request"] = Request(**asked).checked(is_kept=is_kept)
            function(session, **given)

    return command


def _planning_option(name: str, own: dict[str, Parameter], defaults: dict[str, Any]) -> Parameter:
    field, shown = FIELDS[name], dict(FIELDS[name].metadata)
    flag = shown.pop("flag", f"--{name.replace('_', '-')}")
    panel = None if name in _USUAL or name in own else MORE
    option = typer.Option(flag, rich_help_panel=panel, **shown)
    if name in own:  # the verb's own type and default, with the flag and help of the field
        return own[name].replace(annotation=Annotated[own[name].annotation, option])
    kind, default = _KINDS[name], defaults.get(name, field.default)
    if name in _REPEATED:
        kind, default = list[str], []  # typer knows lists, not tuples of any length
    if name == "sharding":
        default = ""
    given = Annotated[kind, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=given)


def more(flag: str, text: str, **shown: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=MORE, **shown)


_NAMED = "path/to/file.py or package.module, with :function if it is not called factory"
Model = Annotated[str, typer.Argument(metavar="MODEL", help=_NAMED, show_default=False)]
Source = Annotated[
    str, typer.Argument(metavar="MODEL|GRAPH|PLAN", help=f"{_NAMED}; or a kept graph or plan")
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="a plan file, from run -o")]
PlanOption = Annotated[Path | None, typer.Option("--plan", help="a plan file, from run -o")]
RunIt = Annotated[bool | None, more(
    "--check/--no-check",
    "run and check a step, or only plan; default: run if the unmodified step fits here",
    show_default=False,
)]  # fmt: skip
Top = Annotated[int, typer.Option(min=1, help="how many rows to show")]
DynamicOption = Annotated[list[str], more(
    "--dynamic",
    "plan for a range of sizes, such as dimension 1 of tokens: tokens:1=seq:16:512; repeatable",
    metavar=DYNAMIC_METAVAR,
)]  # fmt: skip
Output = Annotated[Path | None, typer.Option("--output", "-o", help="save the result to this file")]
LayoutFile = Annotated[Path | None, more(
    "--layout", "place the plan's buffers in one arena, and save their offsets here",
)]  # fmt: skip
PlaceOption = Annotated[bool, more("--place", "also place buffers in one arena, and show its size")]
_AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
_Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="show the traceback of an error")]
