"""What a plan cannot hold of a model on several ranks: refused while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from remat.graph_capture.beside_trace import BesideTrace
from remat.graph_capture.devices.device_table import CPU
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.provenance import line_of_user
from remat.graph_capture.over_ranks.dtensors import has_dtensors, is_distributed

_DISTRIBUTED = "torch.distributed.distributed_c10d"
_FUNCTIONAL = "torch.distributed._functional_collectives"
_IN_PLACE = ("c10d",)
"""Namespaces of the ops behind `torch.distributed`'s own functions."""


def modes_among_ranks(kind: str) -> tuple[AbstractContextManager[Any], ...]:
    """What watches a trace where there are other ranks; `kind` is the class of the model."""
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    return OwnCollectives(kind), NoHiddenDraws(kind)


class OwnCollectives(TorchFunctionMode):
    """While forward is traced, `dist.all_reduce` and its like run as functional collectives.

    They write to their arguments beside autograd, which a trace loses. Where autograd does not
    look, as in the forward and the backward of an autograd function, the functional form and a copy
    are the same (torch's own remaps for dynamo). Elsewhere they are refused.

    Parameters
    ----------
    kind : the class of the model.

    Raises
    ------
    CaptureError : names the function, its line, and the form to use.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, or its functional form."""
        given = kwargs or {}
        if getattr(func, "__module__", "") != _DISTRIBUTED:
            return func(*args, **given)
        remapped = _functional_form(func, args, given)
        is_differentiated = torch.is_grad_enabled() and _requires_grad((args, given))
        if remapped is None or is_differentiated:
            raise CaptureError(in_place_text(self.kind, func.__name__))
        return remapped()


class NoHiddenDraws(BesideTrace):
    """While forward is traced, refuse what no plan can repeat of DTensors and of collectives.

    On a CUDA device a DTensor draws by offsets that torch keeps outside of the graph. A collective
    that a library runs by an op of its own writes in place.

    Raises
    ------
    CaptureError : names the op, its line, and a way out.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Trace `func`, unless it is refused."""
        if getattr(func, "namespace", "") in _IN_PLACE:
            raise CaptureError(in_place_text(self.kind, func._opname))
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            refuse_draw(self.kind, str(func), pytree.tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def refuse_range_of_dtensors(model: nn.Module) -> None:
    """Raise `CaptureError` for a range of sizes: a part's sizes hang on those of the whole."""
    if has_dtensors(model):
        raise CaptureError(
            f"{type(model).__name__} has parameters that are DTensors, whose plans are for one "
            "size: leave dynamic out, plan at the largest size, and pad batches to it"
        )


def refuse_draw(kind: str, op: str, read: Iterable[Any]) -> None:
    """Raise `CaptureError` for an op that draws for a DTensor elsewhere than on a CPU."""
    if any(is_distributed(leaf) and leaf.device.type != CPU for leaf in read):
        raise CaptureError(
            f"forward of {kind} draws random numbers for a DTensor by {op}{line_of_user()}. On a "
            "CUDA device torch counts these outside of the graph, so they could not be drawn "
            "again: set the dropout to 0, or put it where the tensor is local "
            "(use_local_output=True, or .to_local())"
        )


def in_place_text(kind: str, name: str) -> str:
    """The refusal of a collective that writes to its argument."""
    return (
        f"forward of {kind} calls torch.distributed.{name}{line_of_user()}, which writes to its "
        "argument where autograd does not see it. Use the functional form, such as "
        f"x = {_FUNCTIONAL}.all_reduce(x, 'sum', group), which is differentiated too; or call it "
        "under torch.no_grad() on a tensor that needs no gradient"
    )


def _functional_form(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """A call of what dynamo takes in the function's place; None where there is no such."""
    import inspect

    from torch.distributed import _functional_collectives as functional

    remapped = functional.traceable_collective_remaps.get(func)
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    if remapped is None or given.get("async_op"):
        return None
    if "op" in given:
        if given["op"] not in functional.REDUCE_OP_TO_STR:
            return None
        given["op"] = functional.REDUCE_OP_TO_STR[given["op"]]
    return lambda: remapped(**given)


def _requires_grad(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(tree))
