"""`remat.rematerialize(dynamic=...)`: a module for a range of sizes in one call."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import msgspec
import torch.distributed as dist
from torch import nn

from remat.budgets import Budget, parse_budget
from remat.checks import Batch, is_checked, require_equal, say_unchecked, unless_short
from remat.graph_capture.capture_api import add_costs, workspaces_by
from remat.graph_capture.costs.profile import Profile, as_profile
from remat.graph_capture.costs.step_time import is_beyond
from remat.graph_capture.distributed.sharding import Sharding
from remat.graph_capture.errors import (
    CaptureError,
    RewriteError,
    SignatureError,
    SolverError,
    TooLargeError,
    option,
)
from remat.graph_capture.graph import Optimizer, TrainingGraph
from remat.graph_capture.sizes.at_sizes import ranged_graph_of
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.sizes.ranged_signature import RangedSignature
from remat.graph_capture.sizes.symbols import Dynamic, Sizes, as_symbol, require_in_range
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.recipe import check_arguments, require_split, require_switches
from remat.graph_capture.tracing.resident import require_optimizer
from remat.graph_capture.tracing.trace import Trace, trace
from remat.progress import stopwatch_of_call
from remat.ranges.curve import solve_over
from remat.ranks.same_order import ONE_RANK, require_group
from remat.reference import Reference, gradients_there
from remat.rewriter.checking.audit import of_steps
from remat.rewriter.user_module.ranged import RangedModule, make_ranged
from remat.solved import family_text
from remat.solver.reductions.pin_globs import Globs, as_globs
from remat.solver.table import check_number

if TYPE_CHECKING:
    from remat.graph_capture.costs.profile import Profile
    from remat.graph_capture.tracing.trace import ProgressCallback


def rematerialize_over(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dynamic: Dynamic,
    *,
    budget: str | SupportsIndex,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    optimizer: Optimizer = "none",
    accumulate: bool = False,
    profile: Profile | str | Path | None = None,
    solver: str = "auto",
    time_limit_s: float = 60.0,
    keep: Globs = (),
    recompute: Globs = (),
    check: bool | None = None,
    audit: bool = True,
    verbose: bool = True,
    as_far_as_fits: bool = False,
    **options: Any,
) -> RangedModule:
    """A module that trains as `model` does at every size of a range, within `budget`.

    Parameters
    ----------
    args, kwargs : a batch of the range, with which the module is checked; or of other sizes, of
        which only types and dimensions count.
    as_far_as_fits : where nothing fits at the largest sizes, plan up to the largest that fit, if
        the batch is among them.
    Others : as of `remat.rematerialize`.
    """
    stages, name = stopwatch_of_call(verbose=verbose), type(model).__name__
    known = as_profile(profile)
    batch = Batch(args, kwargs, loss_fn, target, optimizer, accumulate)
    with stages.stage("capture", f"tracing {name} over a range of sizes"):
        traced = trace(
            model, args, kwargs, loss_fn=loss_fn, target=target,
            optimizer=optimizer, accumulate=accumulate, dynamic=dynamic,
        )  # fmt: skip
    require_group(traced.joint.module, None, ONE_RANK.format(what="a plan over a range of sizes"))
    with stages.stage("profile", "timing ops at several sizes") as shown:
        graph = ranged_graph_of(
            traced, _costs_within(parse_budget(budget), known, shown),
            workspaces_by(traced, known),
        )  # fmt: skip
    asked = {"keep": as_globs(keep), "recompute": as_globs(recompute), **options}
    sizes = sizes_within(traced, batch)
    with stages.stage("solve", f"solving for {budget} at the sizes of the range"):
        try:
            family = solve_over(graph, budget, solver, time_limit_s, **asked)
        except TooLargeError as error:
            if not as_far_as_fits or sizes is None or not _hold(error.largest, sizes):
                raise
            traced, graph = _narrowed(traced, graph, error.largest)
            family = solve_over(graph, error.budget_bytes, solver, time_limit_s, **asked)
    first = None if sizes is None else family.number_at(**sizes)
    module = make_ranged(model, family, traced, graph, first, audit=of_steps(audit))
    checked = None
    if sizes is not None:
        at_sizes, most_bytes = graph.at(**sizes), family.budget_bytes
        beside = Reference(at_sizes, most_bytes, gradients_there(model) if accumulate else 0)
        if is_checked(at_sizes, check, beside):
            with stages.stage("check", f"comparing a step of {name} with eager"):
                checked = unless_short(
                    lambda: require_equal(model, module, batch, most_bytes, beside), say_unchecked
                )
    stages.say(family_text(family, checked, stages.elapsed_s))
    return module


def _costs_within(
    budget: Budget, known: Profile | None, shown: ProgressCallback
) -> Callable[[Trace], TrainingGraph]:
    """Costs at each size. Where the largest step cannot be timed within the budget, none is."""
    left_out: list[bool] = []

    def costed(one: Trace) -> TrainingGraph:
        if not left_out:
            left_out.append(is_beyond(one.joint, one.graph, budget.most_bytes(one.graph)))
        most_bytes = 0 if left_out[0] else None
        return add_costs(one, progress=shown, profile=known, most_bytes=most_bytes)

    return costed


def _hold(largest: Sizes, sizes: Sizes) -> bool:
    return bool(largest) and all(size <= largest[name] for name, size in sizes.items())


def _narrowed(traced: Trace, graph: RangedGraph, largest: Sizes) -> tuple[Trace, RangedGraph]:
    """The trace and the graph of a range, for its sizes up to `largest`."""
    symbols = tuple(msgspec.structs.replace(s, high=largest[s.name]) for s in graph.symbols)
    signature = traced.recipe.signature
    assert isinstance(signature, RangedSignature)
    recipe = dataclasses.replace(traced.recipe, signature=signature.within(symbols))
    narrowed = msgspec.structs.replace(graph, symbols=symbols)
    return dataclasses.replace(traced, recipe=recipe), narrowed


def sizes_within(traced: Trace, batch: Batch) -> dict[str, int] | None:
    """The sizes of a batch; None if they are out of the range that was traced."""
    signature = traced.recipe.signature
    assert isinstance(signature, RangedSignature)
    leaves = pytree.tree_leaves((batch.args, dict(batch.kwargs or {}), batch.target))
    try:
        return require_in_range(signature.symbols, signature.sizes_of(leaves))
    except SignatureError:
        return None


# Options that are wrong whatever the batch: told at the call that takes them, not at a step.


_EXAMPLE = '{"tokens": {1: ("seq", 16, 2048)}}'
_UPTO_EXAMPLE = '{"tokens": {1: 2048}}'
_SIZE_OF_ANY_BATCH = 2**40
"""Where a name alone is to vary up to the batch's own size, which is not known yet."""
_SWITCHES = ("accumulate", "audit", "compile", "verbose")
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "check": ((bool, type(None)), "True, False, or None where it depends on free memory"),
    "sharding": ((Sharding,), "a remat.Sharding, such as remat.Sharding('ddp', world_size=8)"),
    "profile": ((Profile, str, Path, type(None)), "a remat.Profile, or the path of its file"),
}


def require_options(options: Mapping[str, Any]) -> None:
    """Refuse what `remat.rematerialize` cannot take with any batch; names left out are not asked.

    Raises
    ------
    CaptureError, RewriteError, SolverError : names the option, and what to give.
    """
    for name, (kinds, wanted) in _TYPES.items():
        if name in options and not isinstance(options[name], kinds):
            raise RewriteError(f"{option(name, options[name])} is unknown: give {wanted}")
    require_switches(**{name: options[name] for name in _SWITCHES if name in options})
    check_arguments((), None, options.get("loss_fn"))
    require_split(options.get("split"))
    require_optimizer(options.get("optimizer", "none"))
    check_number("time_limit_s", options.get("time_limit_s", 0))
    for name in ("keep", "recompute"):
        _require_globs(name, options.get(name, ()))
    group = options.get("group")
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise RewriteError(
            f"{option('group', group)} is no group of ranks: give torch.distributed.group.WORLD, "
            "or what torch.distributed.new_group returns"
        )
    _require_compatible(options)


def _require_globs(name: str, given: Any) -> None:
    is_known = isinstance(given, Collection) and all(isinstance(one, str) for one in given)
    if not is_known and not isinstance(given, Iterator):
        raise SolverError(
            f"{option(name, given)} names no modules: give a glob, such as 'layers.*', or several"
        )


def _require_compatible(options: Mapping[str, Any]) -> None:
    """Raise `RewriteError` for ranks that a rewritten step, or a compiled one, cannot serve."""
    sharding, split = options.get("sharding"), options.get("split")
    if sharding is not None and sharding.blocks:
        raise RewriteError(
            f"modules inside a rewritten one cannot be sharded by themselves ({sharding.blocks}): "
            "use remat.rematerialize_blocks, and shard the blocks that it rewrote"
        )
    if not options.get("compile"):
        return
    if options.get("host") is not None:
        raise RewriteError(
            "compile=True takes no host: Inductor's code copies nothing to the host. Leave out one "
            "of the two"
        )
    if split not in (None, "none"):
        raise RewriteError(
            f"compile=True takes no split={split!r}: the chunks are of eager's kernels. Leave out "
            "one of the two"
        )
    if options.get("float_inputs"):
        raise RewriteError(
            "compile=True takes no float_inputs: Inductor writes numbers into its code. Leave out "
            "one of the two, or pass the number to forward as a tensor"
        )
    if sharding is not None and sharding.kind != "none":
        raise RewriteError(
            "compile=True takes no sharding: Inductor's code is looked at without what a wrapper "
            "holds. Leave out compile=True, or train on one rank"
        )


def require_dynamic(model: nn.Module, dynamic: Any, *, may_be_auto: bool) -> None:
    """Refuse a `dynamic` that fits no batch of the model.

    Raises
    ------
    CaptureError : names what is no argument, no dimension or no range.
    """
    if dynamic is None or (may_be_auto and dynamic == "auto"):
        return
    auto = "'auto', or " if may_be_auto else ""
    for argument, dim, entry in _dimensions("dynamic", dynamic, f"{auto}sizes", _EXAMPLE):
        _require_argument("dynamic", argument, model)
        as_symbol(entry, f"{argument} dimension {dim}", _SIZE_OF_ANY_BATCH)


def require_upto(model: nn.Module, upto: Any, dynamic: Any) -> None:
    """Refuse largest sizes of what is no argument of the model, and no name of `dynamic`.

    Raises
    ------
    CaptureError : names it.
    """
    if not isinstance(upto, Mapping):
        raise CaptureError(
            f"{option('upto', upto)} is no dict: give the largest sizes by argument and dimension, "
            f"such as {_UPTO_EXAMPLE}"
        )
    given = cast("Mapping[Any, Any]", upto)
    entries = dynamic if isinstance(dynamic, Mapping) else {}
    names = {_name_in(entry) for _, _, entry in _dimensions("dynamic", entries, "", "")}
    of_arguments = {key: value for key, value in given.items() if key not in names}
    for name in names & given.keys():
        _require_size(f"{name!r}", given[name])
    for argument, dims in of_arguments.items():
        if not isinstance(dims, Mapping):
            raise CaptureError(
                f"upto names {argument!r} with {dims!r}: give the largest size by argument and "
                f"dimension, such as {_UPTO_EXAMPLE}, or by a name that dynamic gives"
            )
        _require_argument("upto", argument, model)
    for argument, dim, size in _dimensions("upto", of_arguments, "the largest sizes", ""):
        _require_size(f"{argument!r} dimension {dim}", size)


def _dimensions(
    name: str, given: Any, wanted: str, example: str
) -> Iterator[tuple[str | int, int, Any]]:
    """Each argument and dimension that is named, and what is said of it."""
    form = f"give {wanted} by argument and dimension, such as {example or _UPTO_EXAMPLE}"
    if not isinstance(given, Mapping):
        raise CaptureError(f"{name}={given!r} is unknown: {form}")
    for argument, dims in cast("Mapping[Any, Any]", given).items():
        if not isinstance(dims, Mapping):
            raise CaptureError(f"{name} of {argument!r} is {dims!r}: {form}")
        for dim, entry in cast("Mapping[Any, Any]", dims).items():
            if type(dim) is not int or dim < 0:
                raise CaptureError(
                    f"{name} names dimension {dim!r} of {argument!r}: count them from 0"
                )
            yield argument, dim, entry


def _name_in(entry: Any) -> Any:
    return entry[0] if isinstance(entry, (tuple, list)) and entry else entry


def _require_size(where: str, size: Any) -> None:
    if type(size) is not int or size < 1:
        raise CaptureError(f"upto of {where} is {size!r}: give the largest size to come, as 2048")


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
            f"{name} names {argument!r}, which is no tensor of the batch: "
            f"name one of {', '.join([*taken, 'target'])}"
        )
