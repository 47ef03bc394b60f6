"""Options that are wrong whatever the batch: told at the call that takes them, not at a step."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from remat.graph_capture.costs.cache import Profile
from remat.graph_capture.distributed.sharding import Sharding
from remat.graph_capture.errors import CaptureError, RewriteError, SolverError, option
from remat.graph_capture.sizes.symbols import as_symbol
from remat.graph_capture.tracing.left_out import as_outputs
from remat.graph_capture.tracing.recipe import check_arguments, require_split, require_switches
from remat.graph_capture.tracing.resident import require_optimizer
from remat.solver.table import check_number

_EXAMPLE = '{"tokens": {1: ("seq", 16, 2048)}}'
_UPTO_EXAMPLE = '{"tokens": {1: 2048}}'
_SIZE_OF_ANY_BATCH = 2**40  # for a name whose size varies up to an unknown batch
_SWITCHES = ("accumulate", "audit", "compile", "cuda_graphs", "verbose")
_PROFILE = (Profile, str, Path, type(None))
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "check": ((bool, type(None)), "True, False, or None where it depends on free memory"),
    "sharding": ((Sharding,), "a remat.Sharding, such as remat.Sharding('ddp', world_size=8)"),
    "profile": (_PROFILE, "what remat.profile returned, or its file's path"),
}


def require_options(options: Mapping[str, Any]) -> None:
    """Refuse what `remat.rematerialize` takes with no batch; the `RematError` says what to give."""
    for name, (kinds, wanted) in _TYPES.items():
        if name in options and not isinstance(options[name], kinds):
            raise RewriteError(f"give {wanted}: {option(name, options[name])} is unknown")
    require_switches(**{name: options[name] for name in _SWITCHES if name in options})
    check_arguments((), None, options.get("loss_fn"))
    require_split(options.get("split"))
    as_outputs(options.get("outputs"))
    require_optimizer(options.get("optimizer", "none"))
    check_number("time_limit_s", options.get("time_limit_s", 0))
    for name in ("keep", "recompute"):
        given = options.get(name, ())
        is_known = isinstance(given, Collection) and all(isinstance(one, str) for one in given)
        if not is_known and not isinstance(given, Iterator):
            raise SolverError(
                f"give a glob, such as 'layers.*', or several: {option(name, given)} names no "
                "modules"
            )
    group = options.get("group")
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise RewriteError(
            "give torch.distributed.group.WORLD, or what torch.distributed.new_group returns: "
            f"{option('group', group)} is not a group of ranks"
        )
    sharding = options.get("sharding")
    is_one_module = options.get("blocks") is None and options.get("microbatches") is None
    if is_one_module and sharding is not None and sharding.blocks:
        raise RewriteError(
            "plan the modules one by one, with remat.rematerialize(..., blocks=...), and shard "
            "the blocks that it rewrote: modules inside a rewritten one cannot be sharded "
            f"separately ({sharding.blocks})"
        )


def require_dynamic(model: nn.Module, dynamic: Any, *, may_be_auto: bool) -> None:
    """`CaptureError` for a `dynamic` with what is no argument, no dimension or no range."""
    if dynamic is None or (may_be_auto and dynamic == "auto"):
        return
    auto = "'auto', or " if may_be_auto else ""
    for argument, dim, entry in _dimensions("dynamic", dynamic, f"{auto}sizes", _EXAMPLE):
        _require_argument("dynamic", argument, model)
        as_symbol(entry, f"{argument} dimension {dim}", _SIZE_OF_ANY_BATCH)


def require_upto(model: nn.Module, upto: Any, dynamic: Any) -> None:
    """`CaptureError` for sizes of what is no argument of the model, and no name of `dynamic`."""
    if not isinstance(upto, Mapping):
        raise CaptureError(
            f"give the largest sizes by argument and dimension, such as {_UPTO_EXAMPLE}: "
            f"{option('upto', upto)} is not a dict"
        )
    given = cast("Mapping[Any, Any]", upto)
    entries = dynamic if isinstance(dynamic, Mapping) else {}
    said: list[Any] = [entry for _, _, entry in _dimensions("dynamic", entries, "", "")]
    firsts: list[Any] = [one[0] if isinstance(one, (tuple, list)) and one else one for one in said]
    names = set(firsts)
    of_arguments = {key: value for key, value in given.items() if key not in names}
    for name in names & given.keys():
        _require_size(f"{name!r}", given[name])
    for argument, dims in of_arguments.items():
        if not isinstance(dims, Mapping):
            raise CaptureError(
                f"give the largest size by argument and dimension, such as {_UPTO_EXAMPLE}, or by "
                f"a name that dynamic gives: upto names {argument!r} with {dims!r}"
            )
        _require_argument("upto", argument, model)
    for argument, dim, size in _dimensions("upto", of_arguments, "the largest sizes", ""):
        _require_size(f"{argument!r} dimension {dim}", size)


def _dimensions(
    name: str, given: Any, wanted: str, example: str
) -> Iterator[tuple[str | int, int, Any]]:
    form = f"give {wanted} by argument and dimension, such as {example or _UPTO_EXAMPLE}"
    if not isinstance(given, Mapping):
        raise CaptureError(f"{form}: {name}={given!r} is unknown")
    for argument, dims in cast("Mapping[Any, Any]", given).items():
        if not isinstance(dims, Mapping):
            raise CaptureError(f"{form}: {name} of {argument!r} is {dims!r}")
        for dim, entry in cast("Mapping[Any, Any]", dims).items():
            if type(dim) is not int or dim < 0:
                raise CaptureError(
                    f"count dimensions from 0: {name} names dimension {dim!r} of {argument!r}"
                )
            yield argument, dim, entry


def _require_size(where: str, size: Any) -> None:
    if type(size) is not int or size < 1:
        raise CaptureError(
            f"give the largest size to come, such as 2048: upto of {where} is {size!r}"
        )


def _require_argument(name: str, argument: str | int, model: nn.Module) -> None:
    """Refuse an argument that forward does not take, where its signature names all that it does."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters):
        return
    taken = [one.name for one in parameters]
    first = re.match(r"\w*", str(argument))
    known = {*taken, "args", "kwargs", "target"}
    if not isinstance(argument, int) and (first is None or first[0] not in known):
        raise CaptureError(
            f"name one of {', '.join([*taken, 'target'])}: {name} names {argument!r}, which is "
            "not a tensor of the batch"
        )
