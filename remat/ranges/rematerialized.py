"""`remat.rematerialize(dynamic=...)`: a module for a range of sizes in one call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch.utils._pytree as pytree
from torch import nn

from remat.checks import Batch, is_checked, require_equal, say_unchecked, unless_short
from remat.graph_capture.capturing import price_for
from remat.graph_capture.errors import SignatureError
from remat.graph_capture.prices.profile import as_profile
from remat.graph_capture.shapes.at_sizes import ranged_graph_of
from remat.graph_capture.shapes.ranges import Dynamic, require_in_range
from remat.graph_capture.shapes.signature import RangedSignature
from remat.graph_capture.tracing.trace import Trace, trace
from remat.ranges.solving import solve_over
from remat.rewriter.rewriting import refuse_rewritten
from remat.rewriter.user_module.ranged import RangedModule, make_ranged

if TYPE_CHECKING:
    from remat.graph_capture.prices.profile import Profile


def rematerialize_over(
    model: nn.Module,
    batch: Batch,
    dynamic: Dynamic,
    *,
    budget: str | SupportsIndex,
    solver: str = "auto",
    time_limit_s: float = 60.0,
    profile: Profile | str | Path | None = None,
    check: bool | None = None,
    **asked: Any,
) -> RangedModule:
    """A module that trains as `model` does at every size of a range, within `budget`.

    Parameters
    ----------
    batch : one of the range, with which the module is checked; or of other sizes, of which only
        types and dimensions count. Others : as of `remat.rematerialize`.
    """
    refuse_rewritten(model)
    known = as_profile(profile)
    traced = trace(
        model, batch.args, batch.kwargs, loss_fn=batch.loss_fn, target=batch.target,
        optimizer=batch.optimizer, accumulate=batch.accumulate, dynamic=dynamic,
    )  # fmt: skip
    graph = ranged_graph_of(traced, lambda one: price_for(one, profile=known))
    family = solve_over(graph, budget, solver, time_limit_s, **asked)
    sizes = _sizes_of(traced, batch)
    first = None if sizes is None else family.number_at(**sizes)
    module = make_ranged(model, family, traced, graph, first)
    if sizes is not None and is_checked(graph.at(**sizes), check):
        most_bytes = family.budget_bytes
        unless_short(lambda: require_equal(model, module, batch, most_bytes), say_unchecked)
    return module


def _sizes_of(traced: Trace, batch: Batch) -> dict[str, int] | None:
    """The sizes of a batch, if they are within the range that was traced."""
    signature = traced.recipe.signature
    assert isinstance(signature, RangedSignature)
    leaves = pytree.tree_leaves((batch.args, dict(batch.kwargs or {}), batch.target))
    try:
        return require_in_range(signature.symbols, signature.sizes_of(leaves))
    except SignatureError:
        return None
