"""What verbs share: a session, the planning options if they plan, and what typer shows of options.

A verb is a function of a `Session` and its own options. Where it takes a `Request`, each field of
that becomes an option. A field among its own parameters has its own type and default. Help, flags
and limits of options stand in `options.json`, by verb or for all that share one. Help shows the
usual options first, then `MORE`, those that are rare.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from remat.cli.session import Session
from remat.graph_capture.devices.known_devices import device_table
from remat.graph_capture.files import check_writable
from remat.job.plan_source import PLAN_FILES
from remat.job.request import DYNAMIC_METAVAR, SHARDING_KEYS, Request, parse_sharding
from remat.solver import TABLE

MORE = "More options"  # the heading of options that few need
_USUAL = ("budget", "device", "host", "optimizer", "keep", "time_limit_s", "gap")  # the first list
FIELDS = {field.name: field for field in dataclasses.fields(Request)}
_KINDS = get_type_hints(Request, localns={"Profile": Path}) | {"sharding": str}
"""Types of the options. A profile is named by its file: the class itself would import torch."""
_REPEATED = [name for name, field in FIELDS.items() if field.default == ()]
STEP_OPTIONS = ("optimizer", "accumulate", "device")  # fields that a step is traced with
OPTIONS: dict[str, dict[str, dict[str, Any]]] = msgspec.json.decode(
    Path(__file__).with_name("options.json").read_bytes()
)
_NAMES = {  # what the texts of the table leave out
    "solvers": ", ".join(TABLE), "devices": ", ".join(device_table().devices),
    "keys": ", ".join(SHARDING_KEYS), "dynamic": DYNAMIC_METAVAR,
}  # fmt: skip

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
        verb_name = function.__name__.removesuffix("_verb")
        others = (one for name, one in own.items() if name not in planning)
        shown = {**planning, **{one.name: _own_option(verb_name, one) for one in others}}
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
    option = _in_help(name, OPTIONS["request"][name], is_rare=name not in (*_USUAL, *own))
    if name in own:  # the verb's own type and default, with the flag and help of the field
        return own[name].replace(annotation=Annotated[own[name].annotation, option])
    kind, default = _KINDS[name], defaults.get(name, FIELDS[name].default)
    if name in _REPEATED:
        kind, default = list[str], []  # typer knows lists, not tuples of any length
    if name == "sharding":
        default = ""
    given = Annotated[kind, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=given)


def _own_option(verb_name: str, own: Parameter) -> Parameter:
    if hasattr(own.annotation, "__metadata__"):  # it says by itself what typer shows
        return own
    shown = OPTIONS.get(verb_name, {}).get(own.name) or OPTIONS["shared"][own.name]
    return own.replace(annotation=Annotated[own.annotation, _in_help(own.name, shown)])


def _in_help(name: str, row: dict[str, Any], *, is_rare: bool = False) -> Any:
    """What typer shows of a parameter, by its row of the table."""
    told = dict(row)
    for key in ("help", "metavar"):
        told[key] = told.get(key, "").format(**_NAMES) or None
    flags = told.pop("flags", [f"--{name.replace('_', '-')}"])
    is_rare = told.pop("is_rare", is_rare)
    if told.pop("is_argument", False):
        return typer.Argument(**told)
    return typer.Option(*flags, rich_help_panel=MORE if is_rare else None, **told)


_AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
_Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="show the traceback of an error")]
