"""The part of a model that one stage of a pipeline has, as a module with the model's names.

Blocks run one after another with the arguments that the model gives to all of them. A first stage
runs what comes before its blocks; a last one what follows them, and the loss, so that no result of
the model outlives its microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from remat.graph_capture.tracing.step_module import apply_loss
from remat.rewriter.stages.border import Arrival, Behind
from remat.rewriter.user_module.block_shells import shell_with

TARGET = "remat_target"
"""The keyword by which a last stage is given its microbatch of the target."""


@dataclass(frozen=True)
class StageRun:
    """What a stage runs.

    Attributes
    ----------
    before, behind : None where the stage lacks that end. blocks : in order.
    given : to the first block of the model; its other arguments are given to all.
    """

    before: Callable[..., Arrival] | None
    blocks: tuple[nn.Module, ...]
    behind: Behind | None
    given: Arrival
    loss_fn: Callable[..., Any] | None

    def __call__(self, args: tuple[Any, ...], target: Any) -> Any:
        """The border, or the loss of the last stage."""
        x: Tensor = args[0] if self.before is None else self.before(*args).border
        for block in self.blocks:
            x = block(x, *self.given.args_, **self.given.kwargs)
        return x if self.behind is None else apply_loss(self.loss_fn, self.behind(x), target)


class ModelPart(nn.Module):
    """What one stage has of a model: the modules and names that are its own, and no others."""

    _remat_run: StageRun

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The border that the stage sends, [microbatch, ...], or on the last stage the loss."""
        return self._remat_run(args, kwargs.pop(TARGET, None))


def model_part(model: nn.Module, kept: Mapping[str, nn.Module], run: StageRun) -> ModelPart:
    """The part of `model` that holds `kept`, by path.

    It is of a class of its own that derives from the model's, so `isinstance` holds.
    """
    part = _pruned(model, "", kept)
    part.__class__ = type(f"{type(model).__name__}Part", (ModelPart, type(model)), {})
    assert isinstance(part, ModelPart)
    # As a plain attribute: its modules are registered under their own names already.
    part.__dict__["_remat_run"] = run
    return part


def _pruned(module: nn.Module, path: str, kept: Mapping[str, nn.Module]) -> nn.Module:
    children: dict[str, nn.Module | None] = {}
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        if at in kept:
            children[name] = kept[at]
        elif any(one.startswith(f"{at}.") for one in kept):
            children[name] = _pruned(child, at, kept)
    return shell_with(module, children)


def beside_blocks(model: nn.Module, blocks: Sequence[str]) -> dict[str, nn.Module]:
    """The outermost modules in which no block lies, by path."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in (*found, *blocks))
        holds = not path or any(block.startswith(f"{path}.") for block in blocks)
        if not (is_inside or holds or path in blocks):
            found[path] = module
    return found
