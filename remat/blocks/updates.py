"""Parameters of a model of blocks are updated in backward, each once its gradient is whole.

Under FSDP2 that is after a block's gradients are reduced, and what is updated is this rank's shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from remat.graph_capture.errors import CaptureError, RewriteError
from remat.graph_capture.graph import Optimizer as OptimizerName
from remat.graph_capture.joint.gradients import require_known
from remat.graph_capture.torch_private.core import pytree, queue_callback
from remat.rewriter.graphs.updating import Updates
from remat.rewriter.guards.live_state import shards_in

_Slot = tuple[int, str]  # the table that holds a parameter, which copies of a module share; a name


def name_of(optimizer: Optimizer) -> OptimizerName:
    """What it keeps for each parameter, as `optimizer=` says it."""
    require_known(optimizer)
    if type(optimizer).__name__.startswith("Adam"):
        return "adamw"
    return "momentum" if any(group.get("momentum") for group in optimizer.param_groups) else "sgd"


class UpdatesOfBlocks:
    """Hooks on a planned model: its backward steps `optimizer`, one parameter at a time."""

    def __init__(self, model: nn.Module, made: nn.Module, optimizer: Optimizer) -> None:
        kind = type(model).__name__
        self.made, self.optimizer = made, optimizer
        self.updates = Updates(optimizer, kind, accumulates=False)
        # Wrappers put other parameters in the places of those that the optimizer was made of.
        self._slots = {
            id(parameter): (id(module._parameters), name)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        given = [one for group in optimizer.param_groups for one in group["params"]]
        if not any(id(one) in self._slots for one in given):
            raise CaptureError(
                f"make the optimizer of model.parameters(): it has no parameter of this {kind}"
            )
        made.register_forward_pre_hook(self._before)
        made.register_forward_hook(self._after)

    def _before(self, module: nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._follow()
            self.updates.require_forward()

    def _follow(self) -> None:
        """Have the optimizer hold the parameters that are trained now."""
        now: dict[_Slot, nn.Parameter] = {
            (id(module._parameters), name): parameter
            for module in self.made.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        now |= {(id(m._parameters), name): one for m, name, one in shards_in(self.made)}
        for group in self.optimizer.param_groups:
            for i, before in enumerate(group["params"]):
                after = now.get(self._slots.get(id(before), (0, "")), before)
                if after is before:
                    continue
                if before in self.optimizer.state:
                    raise RewriteError(
                        "shard the model before the optimizer's first step: it has state for "
                        f"whole parameters of this {self.updates.kind}, which are now in shards"
                    )
                self._slots[id(after)] = self._slots[id(before)]
                group["params"][i] = after

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        leaves = [one for one in pytree.tree_leaves(output) if isinstance(one, Tensor)]
        if tensors := [one for one in leaves if one.requires_grad]:
            torch.autograd.graph.register_multi_grad_hook(tensors, self._begin, mode="any")

    def _begin(self, _: Any) -> None:
        self.updates.require_backward()
        given = [one for group in self.optimizer.param_groups for one in group["params"]]
        end = self.updates.begin([one] for one in given)
        # FSDP2 reduces the root's gradients in a callback of its own, which comes in between.
        queue_callback(lambda: queue_callback(end))
