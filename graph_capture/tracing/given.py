"""What a caller gives of a step besides the model: told at once where it has not the right form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from remat.graph_capture.errors import CaptureError


def require_form(args: Any, kwargs: Any, loss_fn: Any = None, target: Any = None) -> None:
    """Refuse arguments of forward, or a loss, that are none.

    Raises
    ------
    CaptureError : names what is given, and what to give.
    """
    if isinstance(args, Mapping):
        raise CaptureError("args is a dict: give what forward takes by name as kwargs={...}")
    if not isinstance(args, (tuple, list)):
        raise CaptureError(
            f"args is a {type(args).__name__}: give a tuple of what forward takes, such as (x,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CaptureError(
            f"kwargs is a {type(kwargs).__name__}: give a dict, from names to what forward takes"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise CaptureError(
            f"loss_fn is a {type(loss_fn).__name__}: give a function of the output and the target, "
            "such as torch.nn.functional.mse_loss"
        )
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise CaptureError(f"loss_fn is the class {loss_fn.__name__}: give {loss_fn.__name__}()")
    if loss_fn is None and target is not None:
        raise CaptureError(
            "target is given and no loss_fn: give the loss that takes it, or leave the target out "
            "and apply the loss to what the module returns"
        )
