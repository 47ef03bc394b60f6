"""A module, eager or rewritten, with its batch, and all that a step changes."""

from __future__ import annotations

import functools
import io
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from remat.graph_capture import measure_costs, trace
from remat.rewriter.rewriting import rewrite
from remat.rewriter.user_module.module import RematModule
from tests.models import make
from tests.steps import schedule_of

Observed = dict[str, Any]


class Trainee:
    """What behaviours are tried on; the same calls for an eager and a rewritten module."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs

    def with_module(self, module: nn.Module) -> Trainee:
        return Trainee(module, self.args, self.kwargs)

    def batch(self, i: int) -> tuple[Any, ...]:
        """The batch, other numbers for each i, of the same signature."""

        def other(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            made = leaf.detach() * (1 + 0.25 * i)
            return made.requires_grad_(leaf.requires_grad)

        return pytree.tree_map(other, self.args)

    def outputs(self, i: int = 0) -> list[Tensor]:
        """Differentiable leaves of what the module returns for batch i."""
        found = pytree.tree_leaves(self.module(*self.batch(i), **self.kwargs))
        return [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad]

    def loss(self, i: int = 0) -> Tensor:
        return torch.stack([leaf.float().square().mean() for leaf in self.outputs(i)]).sum()

    def step(self, i: int = 0) -> Tensor:
        loss = self.loss(i)
        loss.backward()
        return loss.detach()

    def observed(self, **more: Any) -> Observed:
        """Parameters, gradients, buffers, the random stream, and what else is given."""
        seen: Observed = {}
        for name, parameter in self.module.named_parameters():
            seen[f"parameter {name}"] = parameter.detach().clone()
            seen[f"gradient {name}"] = None if parameter.grad is None else parameter.grad.clone()
        seen |= {f"buffer {name}": b.detach().clone() for name, b in self.module.named_buffers()}
        return {**seen, "random stream": torch.get_rng_state(), **more}


def read_again(thing: Any) -> Any:
    """Saved and loaded by torch."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def differences(expected: Observed, found: Observed) -> list[str]:
    """Names under which not the same bits were observed."""
    assert list(expected) == list(found)
    return [name for name in expected if not _same(expected[name], found[name])]


def _same(expected: Any, found: Any) -> bool:
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        return torch.equal(expected, found)
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(_same, expected, found))
    return type(expected) is type(found) and expected == found


@functools.cache
def planned(name: str, *, accumulate: bool = False) -> tuple[Trainee, RematModule]:
    """An eager module and its rewritten one; both are copied before they are used.

    With `accumulate`, the rewritten one releases each gradient as it is made.
    """
    model, args, kwargs, _, _ = make(name)
    traced = trace(model, args, kwargs, accumulate=accumulate)
    module = rewrite(model, schedule_of(measure_costs(traced), "chen_sqrt"), trace=traced)
    return Trainee(model, args, kwargs), module
