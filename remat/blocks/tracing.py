"""Traces a model and its distinct blocks, and finds each block in the model's graph.

A block is rewritten only where the model's own graph contains it, node by node. So a sum of
gradients that would change its order is found before anything runs. Two blocks share one compiled
step only if they are the same computation of their own parameters.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from remat.graph_capture.devices.placement import resolved_device
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.block_match import BlockMatch, match_block
from remat.graph_capture.tracing.block_calls import matching_blocks, watching_calls
from remat.graph_capture.tracing.one_trace import Trace
from remat.graph_capture.tracing.recipe import Recipe
from remat.graph_capture.tracing.trace import trace, trace_recipe
from remat.rewriter.guards.live_state import named_state


@dataclass
class DistinctBlock:
    """A block that was traced by itself, and all those that are equal to it.

    Attributes
    ----------
    at : where each of them is in the graph of the model, by path.
    """

    block: nn.Module
    trace: Trace
    at: dict[str, BlockMatch]


@dataclass
class TracedBlocks:
    """The trace of a model, and those of its blocks."""

    pattern: str
    blocks: dict[str, nn.Module]
    whole: Trace
    distinct: list[DistinctBlock]

    @property
    def hash(self) -> str:
        """Of the whole graph and the places of the blocks."""
        return f"{self.whole.graph.hash} {' '.join(self.blocks)}"

    @cached_property
    def of_path(self) -> dict[str, DistinctBlock]:
        """The distinct block that each path has."""
        return {path: one for one in self.distinct for path in one.at}


def trace_blocks(
    model: nn.Module, pattern: str, args: tuple[Any, ...], kwargs: Any, **asked: Any
) -> TracedBlocks:
    """Trace the whole step, and each distinct block by itself.

    Raises
    ------
    CaptureError : a block cannot be run by itself to the same bits.
    """
    device = resolved_device(asked.get("device"), model)
    blocks = matching_blocks(model, pattern, device)
    with watching_calls(model, blocks) as calls:
        whole = trace(model, args, kwargs, **asked)
    distinct: list[DistinctBlock] = []
    for path, recipe in calls.recipes().items():
        _add_block(distinct, model, path, recipe, whole)
    return TracedBlocks(pattern, blocks, whole, distinct)


def _add_block(
    distinct: list[DistinctBlock], model: nn.Module, path: str, recipe: Recipe, whole: Trace
) -> None:
    """Add a block to one that is equal to it, or trace it."""
    block = model.get_submodule(path)
    for one in distinct:
        if _looks_like(block, recipe, one):
            try:
                match = match_block(one.trace.joint, whole.joint, path)
            except CaptureError:
                continue
            if _has_own_state(model, block, match):
                one.at[path] = match
                return
    recipe = dataclasses.replace(recipe, flags=whole.recipe.flags, device=whole.recipe.device)
    traced = trace_recipe(block, recipe)
    match = match_block(traced.joint, whole.joint, path)
    distinct.append(DistinctBlock(block, traced, {path: match}))


def _looks_like(block: nn.Module, recipe: Recipe, one: DistinctBlock) -> bool:
    """Whether class, state and inputs are those of a block that was traced."""
    known = one.trace.recipe
    if type(block) is not type(one.block) or recipe.signature.lines() != known.signature.lines():
        return False
    return _state_facts(block) == _state_facts(one.block)


def _state_facts(block: nn.Module) -> list[Any]:
    modes = [(path, module.training) for path, module in block.named_modules()]
    state = [
        (name, t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
        for name, t in named_state(block)
    ]
    return [modes, state]


def _has_own_state(model: nn.Module, block: nn.Module, match: BlockMatch) -> bool:
    """Whether the graph of another block takes this block's parameters in their places."""
    own, of_model = dict(named_state(block)), dict(named_state(model))
    return all(own[name] is of_model[theirs] for name, theirs in match.state_of.items())
