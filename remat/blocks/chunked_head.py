"""A linear head outside the blocks whose loss runs in chunks: its logits wait for their loss.

The model's own code runs around the blocks. So the head returns logits that are not there yet, and
`F.cross_entropy` of them runs both, as a plan of the two alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import EllipsisType
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from remat.graph_capture.chunking.head import PRODUCTS
from remat.graph_capture.chunking.regions import requested_heads
from remat.graph_capture.errors import CaptureError, RewriteError, option
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.torch_private.core import empty_like_of, pytree
from remat.graph_capture.tracing.recipe import Split
from remat.graph_capture.tracing.signature import tensor_facts
from remat.graph_capture.tracing.trace import trace
from remat.rewriter.rewriting import rewrite
from remat.schedules.schedule import ChunkedRegion
from remat.solver.policies.template import StoreAll
from remat.solver.reductions.chunked_regions import named

_PRODUCTS = tuple(map(str, PRODUCTS))
_LOSS = inspect.signature(functional.cross_entropy)
_Call = tuple[Callable[..., Any], tuple[Any, ...], tuple[tuple[str, Any], ...]]
# What a model does to logits before their loss, besides computing: other code waits for none.
_SHAPED = {
    Tensor.float, Tensor.to, Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.contiguous,
    Tensor.__getitem__, Tensor.squeeze, Tensor.unsqueeze, torch.flatten, torch.reshape,
}  # fmt: skip
_ASKED = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.stride}
_FACTS = {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad", "is_leaf"}
# What those calls may be given: values whose `repr` tells them apart.
_PLAIN = (
    int, str, slice, torch.Size, torch.dtype, torch.device, torch.memory_format, EllipsisType,
    type(None),
)  # fmt: skip


class HeadPlan(msgspec.Struct, frozen=True):
    """The modules of heads, by path, and in how many chunks each runs with its loss."""

    paths: tuple[str, ...]
    chunks: int
    exact: bool


def head_of(graph: TrainingGraph, chosen: ChunkedRegion, model: nn.Module) -> HeadPlan:
    """`CaptureError` for a head that is no plain `nn.Linear` of its own."""
    region = next(one for one in graph.regions if one.name == chosen.region)
    of_region = (graph.ops[graph.op_index[name]] for name in region.ops)
    products = (op for op in of_region if op.phase == "forward" and op.target in _PRODUCTS)
    paths = tuple(dict.fromkeys(op.module for op in products))
    for path in paths:
        head = model.get_submodule(path)
        if type(head).forward is not nn.Linear.forward:
            raise CaptureError(
                f"make the head an nn.Linear, or leave out {option('split', 'exact')}: "
                f"{path or 'the model'} is a {type(head).__name__}, and beside blocks only a "
                "linear layer runs in chunks"
            )
    return HeadPlan(paths, chosen.chunks, chosen.exact)


class _HeadAndLoss(nn.Module):
    """What the user's code does from the head's input to the loss."""

    def __init__(self, calls: tuple[_Call, ...], how: tuple[tuple[str, Any], ...]) -> None:
        super().__init__()
        self.calls, self.how = calls, how

    def forward(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
        class_weight: Tensor | None,
    ) -> Tensor:  # fmt: skip
        logits = functional.linear(hidden, weight, bias)
        for function, args, kwargs in self.calls:
            logits = function(logits, *args, **dict(kwargs))
        return functional.cross_entropy(logits, target, class_weight, **dict(self.how))


class _WaitingHead(nn.Linear):
    """Shares all with the user's head, through one dict."""

    _remat_head: ClassVar[HeadPlan]
    _remat_path: ClassVar[str]
    _remat_steps: ClassVar[dict[Any, nn.Module]]

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(input)
        whole = torch.empty(*input.shape[:-1], self.out_features, dtype=input.dtype, device="meta")
        return _WaitingLogits.of(whole, self, input, ())

    def loss(
        self, hidden: Tensor, calls: tuple[_Call, ...], target: Tensor,
        weight: Tensor | None = None, **how: Any,
    ) -> Tensor:  # fmt: skip
        if not self.weight.untyped_storage().nbytes():
            raise RewriteError(
                f"shard the head with the whole model, and not {self._remat_path} by itself: "
                "its parameters are gone when its loss is computed, with which it runs in chunks"
            )
        given = tuple(sorted(how.items()))
        bias: Any = self.bias  # which may be None
        args = hidden, self.weight, bias, target, weight
        facts = [None if one is None else tensor_facts(one) for one in args]
        key = repr(calls), given, tuple(facts)  # slices have no hash before Python 3.12
        if (step := self._remat_steps.get(key)) is None:
            with torch.enable_grad():
                step = _in_chunks(_HeadAndLoss(calls, given), args, self)
            self._remat_steps[key] = step
        return step(*args)


class _WaitingLogits(Tensor):
    """Logits that have a shape and no values."""

    _head: _WaitingHead
    _hidden: Tensor
    _calls: tuple[_Call, ...]
    _whole: Tensor  # of the same shape, on the device meta

    @staticmethod
    def of(
        whole: Tensor, head: _WaitingHead, hidden: Tensor, calls: tuple[_Call, ...]
    ) -> _WaitingLogits:
        made = empty_like_of(_WaitingLogits, whole, hidden.device)
        made._head, made._hidden, made._calls, made._whole = head, hidden, calls, whole
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"logits of shape {list(self.shape)}, which are computed in chunks"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        waits: Any = args[0] if args else None
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        if func in _ASKED or (func.__name__ == "__get__" and name in _FACTS):
            return super().__torch_function__(func, types, args, kwargs)
        if func is functional.cross_entropy:
            given = _LOSS.bind(*args, **kwargs).arguments
            if isinstance(logits := given.pop("input"), _WaitingLogits):
                return logits._head.loss(logits._hidden, logits._calls, **given)
        given = pytree.tree_leaves((args[1:], kwargs))
        if func in _SHAPED and args and all(isinstance(one, _PLAIN) for one in given):
            return waits._after(func, args[1:], kwargs)
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [
            one for one in (*args, *(kwargs or {}).values()) if isinstance(one, _WaitingLogits)
        ]
        path = found[0]._head._remat_path if found else "a head"
        raise RewriteError(
            f"leave out {option('split', 'exact')}, or take F.cross_entropy of the logits and read "
            f"nothing else of them: {func.__name__} reads the logits of {path}, which runs in "
            "chunks with its loss and makes none"
        )

    def _after(self, func: Any, args: Any, kwargs: dict[str, Any]) -> _WaitingLogits:
        call = func, tuple(args), tuple(kwargs.items())
        on_meta = [one for one in args if not isinstance(one, torch.device)]
        named = {name: one for name, one in kwargs.items() if name != "device"}
        is_moved = func is Tensor.to and not (on_meta or named)
        whole = self._whole if is_moved else func(self._whole, *on_meta, **named)
        return _WaitingLogits.of(whole, self._head, self._hidden, (*self._calls, call))


def with_loss_in_chunks(head: nn.Module, path: str, plan: HeadPlan) -> nn.Module:
    """The head, whose logits wait for their loss while it trains."""
    own = {"_remat_head": plan, "_remat_path": path, "_remat_steps": {}}
    made = object.__new__(type(type(head).__name__, (_WaitingHead, type(head)), own))
    made.__dict__ = head.__dict__
    return made


def _in_chunks(both: _HeadAndLoss, args: tuple[Any, ...], head: _WaitingHead) -> nn.Module:
    plan = head._remat_head
    split: Split = "exact" if plan.exact else "tolerance"
    traced = trace(both, args, split=split)
    heads = requested_heads(traced)
    if not heads:
        raise RewriteError(
            f"leave out {option('split', split)}: the loss of {head._remat_path} is computed "
            "otherwise than when it was planned, and cannot run in chunks"
        )
    heads[0].set_chunks(plan.chunks)
    chosen = (ChunkedRegion(heads[0].name, plan.chunks, plan.exact),)
    schedule = named(StoreAll().schedule(heads[0].joint.graph), chosen, traced.graph)
    return rewrite(both, schedule, trace=traced, audit=False)
