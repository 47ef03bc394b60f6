"""What every verb has: a session, `--json` and `--debug`, and the planning options if it plans.

A verb is a function of a `Session` and of its own options. Where it takes a `Request` too, each
field of that dataclass becomes an option, with the flag, help, type and default of the field. So
all verbs that plan take the same options. A verb that has a field among its own parameters is
given it apart from the request, with its own type and default: `sweep` takes a list of solvers.
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

from remat.cli import shared_options
from remat.cli.session import Session
from remat.job.plan_source import PLAN_FILES
from remat.job.request import Request

PANEL = "Planning, the same in every verb that plans"
ADVANCED_PANEL = "Planning, for special cases"
_USUAL = (
    "budget",
    "host",
    "nvme",
    "time_limit_s",
    "gap",
    "device",
    "optimizer",
    "keep",
    "recompute",
    "split",
)
"""Fields that most people want; the help shows the others below them."""
FIELDS = {field.name: field for field in dataclasses.fields(Request)}
_KINDS = get_type_hints(Request, localns={"Profile": Path})
"""Types of the fields. A profile is named by its file here; the class itself would import torch."""
_REPEATED = [name for name, field in FIELDS.items() if field.default == ()]
COUNTED = ("optimizer", "accumulate")
"""Fields that a step is traced with."""
CAPTURED = (
    *COUNTED, "device", "host", "nvme", "shard", "world_size", "shard_blocks", "replicas",
    "reshard_after_forward", "bucket_views", "param_dtype", "reduce_dtype", "cpu_offload",
    "states_over", "profile", "measure_again",
)  # fmt: skip
"""Fields that a step is captured and timed with."""

_Verb = Callable[..., None]


def verb(fields: Collection[str] = tuple(FIELDS), **defaults: Any) -> Callable[[_Verb], _Verb]:
    """A function of a session as a command, whose parameters typer can read.

    Parameters
    ----------
    fields : names of the fields of `Request` that are options of the verb.
    **defaults : of fields, where the verb has another one than the dataclass.
    """

    def command_of(function: _Verb) -> _Verb:
        own = dict(inspect.signature(function, eval_str=True).parameters)
        del own["session"]
        planning = {}
        if own.pop("request", None):
            planning = {name: _planning_option(name, own, defaults) for name in fields}
        command = _command(function, [name for name in planning if name not in own])
        shown = {**own, **planning, **_everywhere()}
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
            [one.replace(kind=Parameter.KEYWORD_ONLY) for one in shown.values()]
        )
        command.__annotations__ = {name: one.annotation for name, one in shown.items()}
        return command

    return command_of


def _command(function: _Verb, requested: Collection[str]) -> _Verb:
    """The function with its session opened and guarded, and with the request put together."""

    @functools.wraps(function)
    def command(*, as_json: bool, debug: bool, **given: Any) -> None:
        session = Session(as_json=as_json, debug=debug)
        with session.guarded():
            for file in ("output", "layout"):
                session.require_folder(given.get(file))
            if requested:
                asked: dict[str, Any] = {name: given.pop(name) for name in requested}
                # What repeats comes as a list; a request is frozen, down to its pins.
                asked |= {name: tuple(asked[name]) for name in _REPEATED if name in asked}
                is_kept = given.get("source", "").endswith(PLAN_FILES)
                given["request"] = Request(**asked).checked(is_kept=is_kept)
            function(session, **given)

    return command


def _planning_option(name: str, own: dict[str, Parameter], defaults: dict[str, Any]) -> Parameter:
    """The parameter of a command that stands for a field of `Request`."""
    field, shown = FIELDS[name], dict(FIELDS[name].metadata)
    flag = shown.pop("flag", f"--{name.replace('_', '-')}")
    panel = PANEL if name in _USUAL else ADVANCED_PANEL
    option = typer.Option(flag, rich_help_panel=panel, **shown)
    if name in own:
        return own[name].replace(annotation=Annotated[own[name].annotation, option])
    kind, default = _KINDS[name], defaults.get(name, field.default)
    if name in _REPEATED:
        kind, default = list[str], []
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _everywhere() -> dict[str, Parameter]:
    """`--json` and `--debug`."""
    kinds = {"as_json": shared_options.AsJson, "debug": shared_options.Debug}
    return {
        name: Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in kinds.items()
    }
