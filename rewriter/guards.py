"""What a rewritten module checks before each training step: that all is as at capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.refuse import (
    distributed_message,
    hook_dictionaries,
    hook_message,
    is_distributed,
)
from remat.graph_capture.ties import tied_places
from remat.graph_capture.tracing import Recipe, autocast_state


class Guards:
    """The state a plan relies on, read at rewriting and compared at every step.

    Parameters
    ----------
    model : as captured. recipe : signature of the batch and autocast state at capture.
    forward, backward : the rewritten graphs, whose constants are watched.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe, forward: fx.GraphModule, backward: fx.GraphModule
    ) -> None:
        self.name = type(model).__name__
        self.recipe = recipe
        self.takes_target = recipe.signature.has_target
        self.hooks = [
            (path, module, attribute, getattr(module, attribute))
            for path, module, attribute in hook_dictionaries(model)
        ]
        self.modes = [(p, m, m.training) for p, m in model.named_modules() if p]
        self.state = [(name, _facts(tensor)) for name, tensor in named_state(model)]
        self.tied = tied_places(model)
        self.constants = _watched_constants(model, forward, backward)

    def require(self, batch: Any, state: list[Tensor]) -> None:
        """Raise `RewriteError`, naming the first thing that is not as at capture.

        Parameters
        ----------
        batch : (args, kwargs, target). state : parameters and buffers, as `named_state`.
        """
        leaves, spec = pytree.tree_flatten(batch)
        self.recipe.signature.require(leaves, spec, self.name)
        for path, module, attribute, hooks in self.hooks:
            if hooks:
                raise RewriteError(hook_message(path, module, attribute))
        for path, module, mode in self.modes:
            if module.training is not mode:
                raise self._changed(f"submodule {path}", _mode(mode), _mode(module.training))
        self._require_state(state)
        for path, module, attribute, tensor in self.constants:
            if getattr(module, attribute, None) is not tensor:
                raise self._changed(f"attribute {path}", "one tensor", "another one")
        now = autocast_state()
        if now != self.recipe.autocast:
            raise self._changed("autocast", _shown(self.recipe.autocast), _shown(now))

    def inputs(self, state: list[Tensor]) -> list[Tensor]:
        """Of parameters and buffers those that the step takes: a tied one once."""
        return [tensor for i, tensor in enumerate(state) if i not in self.tied]

    def _require_state(self, state: list[Tensor]) -> None:
        if len(state) != len(self.state):
            before, now = f"{len(self.state)} in number", f"{len(state)}"
            raise self._changed("the parameters and buffers", before, now)
        for (name, before), tensor in zip(self.state, state, strict=True):
            if is_distributed(tensor):
                raise RewriteError(distributed_message(f"{name} of {self.name}"))
            for was, is_now, shown in zip(before, _facts(tensor), _FACT_TEXT, strict=True):
                if was != is_now:
                    raise self._changed(name, shown(was), shown(is_now))
        for later, first in self.tied.items():
            if state[later] is not state[first]:
                tied = f"tied to {self.state[first][0]}"
                raise self._changed(self.state[later][0], tied, "another parameter")

    def _changed(self, what: str, before: str, now: str) -> RewriteError:
        return RewriteError(
            f"{what} of {self.name} was {before} when the step was captured and is {now} now. "
            "Put it back, or capture and solve again"
        )


def _mode(training: bool) -> str:
    return "in training mode" if training else "in eval mode"


def named_state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, then buffers, in the order of a trace; shared ones under every name."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.requires_grad, tensor.dtype, tensor.device, tensor.shape)


_FACT_TEXT: tuple[Callable[[Any], str], ...] = (
    lambda trained: "trained" if trained else "frozen",
    str,
    lambda device: f"on {device}",
    lambda shape: f"of shape {list(shape)}",
)


def _shown(state: tuple[Any, ...]) -> str:
    return ", ".join(f"{dtype} on {kind}" for kind, on, dtype in state if on) or "off"


def constants_of(*graphs: fx.GraphModule) -> list[Tensor]:
    """Tensors that the graphs have taken in: neither parameters, buffers nor arguments."""
    names = [(g, str(n.target)) for g in graphs for n in g.graph.find_nodes(op="get_attr")]
    return [constant for g, name in names if isinstance(constant := getattr(g, name), Tensor)]


def _watched_constants(
    model: nn.Module, *graphs: fx.GraphModule
) -> list[tuple[str, nn.Module, str, Tensor]]:
    """Plain tensor attributes of the model that the graphs have taken in."""
    addresses = {constant.data_ptr() for constant in constants_of(*graphs)}
    return [
        (f"{path}.{name}".lstrip("."), module, name, item)
        for path, module in model.named_modules()
        for name, item in vars(module).items()
        if isinstance(item, Tensor) and item.data_ptr() in addresses
    ]


def refuse_double_backward(output: Any, name: str) -> None:
    """Let a backward with ``create_graph=True`` through `output` raise before it runs."""

    def refuse(_: Any) -> None:
        if torch.is_grad_enabled():
            raise RewriteError(
                f"double backward through the rewritten {name} (create_graph=True): its backward "
                "is a fixed sequence of ops that cannot be differentiated again. Use the "
                "original model for steps that need second derivatives"
            )

    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(refuse)
