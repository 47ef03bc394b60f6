"""What cannot be updated during backward, refused before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from remat.graph_capture.errors import CaptureError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from remat.graph_capture.tracing.one_trace import Trace


def refuse_clipping(max_grad_norm: float | None) -> None:
    """Raise `CaptureError` for a norm over all gradients."""
    if max_grad_norm is not None:
        raise CaptureError(
            "gradients cannot be clipped by their global norm where parameters are updated during "
            "backward: the norm is known when the last gradient is there, and by then the others "
            "have been used. Update after backward (remat.rematerialize), or leave out clipping"
        )


def refuse_scaling() -> None:
    """Raise `CaptureError` under autocast to float16, which is trained with a `GradScaler`."""
    import torch

    from remat.graph_capture.tracing.recipe import autocast_state

    if any(on and dtype is torch.float16 for _, on, dtype in autocast_state()):
        raise CaptureError(
            "float16 autocast needs a GradScaler, which unscales all gradients when backward has "
            "ended, and parameters that are updated during backward would take scaled ones: use "
            "bfloat16, or update after backward (remat.rematerialize)"
        )


def refuse_parts(model: nn.Module) -> None:
    """Raise `CaptureError` for parameters of which a rank holds a part: their gradients are two."""
    from remat.graph_capture.over_ranks.dtensors import has_dtensors

    if has_dtensors(model):
        raise CaptureError(
            f"{type(model).__name__} has parameters that are DTensors, which cannot be updated "
            "during backward: update after backward (remat.rematerialize)"
        )


def require_own_storages(state: Mapping[str, Tensor]) -> None:
    """Raise `CaptureError` if an update of one parameter would change another, or a buffer."""
    names = {name: t.untyped_storage().data_ptr() for name, t in state.items() if t.numel()}
    shared = {address for address, number in Counter(names.values()).items() if number > 1}
    both = [name for name, address in names.items() if address in shared]
    if both:
        raise CaptureError(
            f"{both[0]} and {both[1]} are views of one tensor, so that an update of one "
            "changes the other: give each its own, or update after backward"
        )


def require_no_other_reader(traced: Trace, optimizer: Optimizer) -> None:
    """Raise `CaptureError` if forward reads an updated parameter by a tensor that is none.

    The graph then does not know that a later read would find the new values.
    """
    from remat.rewriter.guards.forward import constants_of

    updated = {
        parameter.untyped_storage().data_ptr()
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for constant in constants_of(traced.joint.module):
        if constant.numel() and constant.untyped_storage().data_ptr() in updated:
            raise CaptureError(
                f"forward reads a parameter by another tensor of shape {list(constant.shape)}, "
                "such as an attribute that is its .data: read the parameter itself, or update "
                "after backward"
            )
