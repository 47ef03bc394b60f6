"""One rank that runs ops by itself, where no other would answer a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from remat.graph_capture.joint.nodes import TORCHS_NAMESPACES
from remat.graph_capture.over_ranks.collectives import is_collective_target

_C: Any = torch._C
ALIASES = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
"""Under which a kernel for several devices is registered."""
Result = TypeVar("Result")


class NeedsOtherRanksError(RuntimeError):
    """An op was run alone that communicates with other ranks."""


class _Alone(TorchDispatchMode):
    """Fails where a collective would wait for other ranks, also inside of an op of somebody's."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func` unless it is a collective."""
        if is_collective_target(str(func)):
            raise NeedsOtherRanksError(f"{func} waits for other ranks, and one is priced alone")
        key = _kernel_of(func, pytree.tree_leaves((args, kwargs)))
        if key is None:
            return func(*args, **(kwargs or {}))
        # The mode is off in here. On again, it sees what the kernel of somebody's op runs.
        with self:
            return func._op_dk(key, *args, **(kwargs or {}))


def _kernel_of(func: Any, read: list[Any]) -> DispatchKey | None:
    """Where the kernel of an op is that is not torch's; None of torch's, and of one without.

    An op of `torch.library.custom_op` has one for all devices under an alias. To call another key
    than that of the registration ends the process.
    """
    tensors = [leaf for leaf in read if isinstance(leaf, Tensor)]
    if not isinstance(func, OpOverload) or func.namespace in TORCHS_NAMESPACES or not tensors:
        return None
    own = "CUDA" if any(tensor.is_cuda for tensor in tensors) else "CPU"
    for key in (own, *ALIASES):
        if _C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            return getattr(DispatchKey, key)
    return None


def alone(run: Callable[[], Result]) -> Result:
    """What `run` returns, which is run on one rank: whatever is timed ran so once before.

    Raises
    ------
    NeedsOtherRanksError : it holds a collective. The rank would have waited for ever.
    """
    with _Alone():
        return run()
