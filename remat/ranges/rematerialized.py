"""`remat.rematerialize(dynamic=...)`: a module for a range of sizes in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import msgspec
import torch.utils._pytree as pytree
from torch import nn

from remat.checks import Batch, is_checked, require_equal, say_unchecked, unless_short
from remat.graph_capture.capturing import price_for, workspaces_by
from remat.graph_capture.errors import SignatureError, TooLargeError
from remat.graph_capture.graph import Optimizer
from remat.graph_capture.prices.profile import as_profile
from remat.graph_capture.shapes.at_sizes import ranged_graph_of
from remat.graph_capture.shapes.ranged_graph import RangedGraph
from remat.graph_capture.shapes.ranges import Dynamic, Sizes, require_in_range
from remat.graph_capture.shapes.signature import RangedSignature
from remat.graph_capture.tracing.one_trace import Trace
from remat.graph_capture.tracing.trace import trace
from remat.ranges.solving import solve_over
from remat.ranks.required_group import ONE_RANK, require_group
from remat.rewriter.user_module.ranged import RangedModule, make_ranged
from remat.solver.pins.globs import Globs, as_globs

if TYPE_CHECKING:
    from remat.graph_capture.prices.profile import Profile


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
    known = as_profile(profile)
    batch = Batch(args, kwargs, loss_fn, target, optimizer, accumulate)
    traced = trace(
        model, args, kwargs, loss_fn=loss_fn, target=target,
        optimizer=optimizer, accumulate=accumulate, dynamic=dynamic,
    )  # fmt: skip
    require_group(traced.joint.module, None, ONE_RANK.format(what="a plan over a range of sizes"))
    graph = ranged_graph_of(
        traced, lambda one: price_for(one, profile=known), workspaces_by(traced, known)
    )
    asked = {"keep": as_globs(keep), "recompute": as_globs(recompute), **options}
    sizes = sizes_within(traced, batch)
    try:
        family = solve_over(graph, budget, solver, time_limit_s, **asked)
    except TooLargeError as error:
        if not as_far_as_fits or sizes is None or not _hold(error.largest, sizes):
            raise
        traced, graph = _narrowed(traced, graph, error.largest)
        family = solve_over(graph, error.budget_bytes, solver, time_limit_s, **asked)
    first = None if sizes is None else family.number_at(**sizes)
    module = make_ranged(model, family, traced, graph, first)
    if sizes is not None and is_checked(graph.at(**sizes), check):
        most_bytes = family.budget_bytes
        unless_short(lambda: require_equal(model, module, batch, most_bytes), say_unchecked)
    return module


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
