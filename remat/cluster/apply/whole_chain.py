"""A user's model as the chain of a plan, looked at without storage before it is cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import nn

from remat.cluster.apply.plan_layers import layers_of_stages
from remat.cluster.opened_chain import tied_weights
from remat.graph_capture.cluster.chain import ChainModel
from remat.graph_capture.cluster.chain_shape import ChainShape
from remat.graph_capture.cluster.on_meta import leaf_on_meta, state_on_meta
from remat.graph_capture.cluster.watching import watch
from remat.graph_capture.errors import CaptureError, PlanError
from remat.rewriter.stages.model_part import beside_blocks
from remat.schedules.pipeline.cluster_plan import MAKE_AGAIN, ClusterFile


@dataclass(frozen=True)
class WholeChain:
    """A model whose forward is a chain.

    Attributes
    ----------
    blocks : by path, in order. before, behind : the other modules, by path.
    """

    model: nn.Module
    blocks: dict[str, nn.Module]
    before: dict[str, nn.Module]
    behind: dict[str, nn.Module]


def whole_chain(
    model: nn.Module, plan: ClusterFile, args: tuple[Any, ...],
    loss_fn: Callable[..., Any] | None, target: Any,
) -> WholeChain:  # fmt: skip
    """The chain of the plan's blocks.

    Raises
    ------
    PlanError : the model has not the plan's blocks. CaptureError : it is no chain; two stages
        would share weights; or parameters lie beside the blocks in no module of their own.
    """
    blocks = _blocks(model, plan)
    meta = copy.deepcopy(model, state_on_meta(model))
    of_meta = {path: meta.get_submodule(path) for path in blocks}
    on_meta = pytree.tree_map(leaf_on_meta, (args, target))
    chain = ChainModel(meta, of_meta, on_meta[0], {}, loss_fn, on_meta[1])
    called: list[str] = []
    others = beside_blocks(meta, list(blocks))
    shape = _watched(chain, others, called)
    tied = tied_weights(chain, shape)
    if tied and plan.parallelism.pipeline_parallel_degree > 1:
        raise CaptureError(
            f"{' and '.join(tied)} are in two stages, which cannot share weights: untie them, or "
            "plan without stages with --pp 1"
        )
    _refuse_loose(model, {*blocks, *others})
    behind = {path for path in others if path in called}
    own = beside_blocks(model, list(blocks))
    return WholeChain(
        model, blocks,
        {path: module for path, module in own.items() if path not in behind},
        {path: module for path, module in own.items() if path in behind},
    )  # fmt: skip


def _watched(chain: ChainModel, others: dict[str, nn.Module], called: list[str]) -> ChainShape:
    """What forward shows; `called` gets the modules that it runs behind the last block alone."""
    is_behind = [False]
    before: set[str] = set()

    def arrive(*_: Any) -> None:
        is_behind[0] = True

    def noting(path: str) -> Any:
        def note(*_: Any) -> None:
            if not is_behind[0]:
                before.add(path)
            elif path not in before:
                called.append(path)

        return note

    last = chain.blocks[chain.last_path]
    handles = [last.register_forward_hook(arrive)]
    for path, module in others.items():
        inside = (one for one in module.modules())
        handles += [one.register_forward_pre_hook(noting(path)) for one in inside]
    try:
        return watch(chain)
    finally:
        for handle in handles:
            handle.remove()


def _blocks(model: nn.Module, plan: ClusterFile) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    places = [path for layers in layers_of_stages(plan) for path in layers]
    missing = [path for path in places if path not in modules]
    if missing:
        raise PlanError(
            f"the plan's block {missing[0]} is none of this {type(model).__name__}, and the plan "
            f"is for {plan.model}: build the model that was planned. {MAKE_AGAIN}"
        )
    return {path: modules[path] for path in places}


def _refuse_loose(model: nn.Module, inside: set[str]) -> None:
    """Raise for a parameter or buffer of a module that also holds blocks."""
    state = [*model.named_parameters(), *model.named_buffers()]
    for name, _ in state:
        owner = name.rpartition(".")[0]
        if not any(owner == path or owner.startswith(f"{path}.") for path in inside):
            raise CaptureError(
                f"{name} lies beside the blocks in no module of its own, so it belongs to no "
                "stage: move it into a module that forward calls"
            )
