"""Collectives that write to their arguments, as `dist.all_reduce` does, in functional form.

They write beside autograd, which does not differentiate them. So does the form here, a functional
collective and a copy, as it runs where autograd is over. The work that they return is done already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup, Work
from torch.distributed._functional_collectives import REDUCE_OP_TO_STR

NAMESPACE = "c10d"
NAMES = {
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "_allgather_base_": "all_gather_into_tensor",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
}
"""Of the ops that have a functional form here: what users call them by."""


def run_functionally(func: Any, args: tuple[Any, ...]) -> Any:
    """The results of an op of `NAMES`, run by a functional collective; None for an unknown sum."""
    form = _FORMS[func._opname]
    return form(*args)


def _all_reduce(tensors: list[Tensor], group: Any, op: Any, *_: Any) -> Any:
    name = _reduction(op)
    if not name:
        return None
    for tensor in tensors:
        _write(tensor, _ops().all_reduce(tensor, name, _group_name(group)))
    return tensors, _done()


def _broadcast(tensors: list[Tensor], group: Any, root: int, *_: Any) -> Any:
    for tensor in tensors:
        _write(tensor, _ops().broadcast(tensor, root, _group_name(group)))
    return tensors, _done()


def _all_gather(output: Tensor, given: Tensor, group: Any, *_: Any) -> Any:
    _write(output, _ops().all_gather_into_tensor(given, _group_size(group), _group_name(group)))
    return output, _done()


def _reduce_scatter(output: Tensor, given: Tensor, group: Any, op: Any, *_: Any) -> Any:
    name = _reduction(op)
    if not name:
        return None
    _write(
        output, _ops().reduce_scatter_tensor(given, name, _group_size(group), _group_name(group))
    )
    return output, _done()


_FORMS: dict[str, Callable[..., Any]] = {
    "allreduce_": _all_reduce,
    "broadcast_": _broadcast,
    "_allgather_base_": _all_gather,
    "_reduce_scatter_base_": _reduce_scatter,
}


def _ops() -> Any:
    return torch.ops._c10d_functional


def _write(tensor: Tensor, found: Any) -> None:
    tensor.copy_(_ops().wait_tensor(found).view(tensor.shape))


def _group(boxed: Any) -> dist.ProcessGroup:
    return ProcessGroup.unbox(boxed) if not isinstance(boxed, ProcessGroup) else boxed


def _group_name(boxed: Any) -> str:
    return _group(boxed).group_name


def _group_size(boxed: Any) -> int:
    return _group(boxed).size()


def _reduction(boxed: Any) -> str:
    """How functional collectives call a way to reduce; empty for one that they lack."""
    number = int(boxed.op())
    known: dict[Any, str] = dict(REDUCE_OP_TO_STR)
    return next((name for op, name in known.items() if int(op) == number), "")


def _done() -> Any:
    return Work.boxed(FakeWork())
