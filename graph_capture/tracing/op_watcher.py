"""Modes of torch that see each op, or each call of torch's functions, and run it in their way."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch.overrides import TorchFunctionMode

from remat.graph_capture.torch_private.core import TorchDispatchMode


class _Watcher:
    """Has `on_op` in the place of each call. Calls that it makes itself are not seen."""

    @abstractmethod
    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func(*args, **kwargs)` returns: with something done before, after or instead."""


class OpWatcher(_Watcher, TorchDispatchMode):
    """Sees ops below autograd, those of backward too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.on_op(func, args, kwargs or {})


class CallWatcher(_Watcher, TorchFunctionMode):
    """Sees torch's functions and methods of tensors as the user's code calls them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.on_op(func, args, kwargs or {})


class TraceObserver(OpWatcher):
    """Sees each op that forward runs while it is traced, and is no part of the trace."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        # Under other modes torch runs compiled code uncompiled, so that would not be refused.
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True
