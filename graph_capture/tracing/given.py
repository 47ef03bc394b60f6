"""What a caller gives of a step besides the model: told at once where it has not the right form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from remat.graph_capture.errors import CaptureError, RewriteError, option
from remat.graph_capture.tracing.step_module import LossFunction


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


def require_switches(**given: Any) -> None:
    """Refuse options that are neither True nor False.

    Raises
    ------
    RewriteError : names the option, and what to give.
    """
    for name, value in given.items():
        if not isinstance(value, bool):
            raise RewriteError(f"{option(name, value)} is unknown: give True or False")


def not_taken(
    model: nn.Module, args: Any, kwargs: Any, loss_fn: LossFunction | None, target: Any
) -> str:
    """Why forward, or the loss, cannot be called with what is given; empty where it can be."""
    kind = type(model).__name__
    if why := _unbound(model.forward, args, kwargs):
        given = f"forward of {kind} cannot take what is given ({len(args)} in args): {why}"
        if "too many positional" not in why:
            return f"{given}. Give in args, or by name in kwargs, what it takes"
        if loss_fn is None:
            return f"{given}. Leave the others out; what a loss takes goes with loss_fn, as target"
        if target is None:
            return (
                f"give what the loss compares with as target, not in args: args=(x,), target=y, "
                f"and model(x, target=y) at each step. {given[0].upper()}{given[1:]}"
            )
        return f"{given}. Leave the others out"
    if loss_fn is None:
        return ""
    called = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    results = (None,) if target is None else (None, None)
    why = _unbound(called, results, {})
    if not why:
        return ""
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    takes = "the output alone, as no target is given" if target is None else "output and target"
    way = "Give target" if target is None else "Give a function of both, or leave out target"
    return f"loss_fn {name} is called with {takes}: {why}. {way}"


def _unbound(called: Callable[..., Any], args: Any, kwargs: Any) -> str:
    try:
        inspect.signature(called).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # it has no signature that Python knows
        return ""
    return ""
