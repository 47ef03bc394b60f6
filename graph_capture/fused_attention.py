"""Attention with dropout, traced in the fused form that a CUDA device runs.

A CPU has no fused attention with dropout: it draws a mask of every score and keeps it. A CUDA
device draws inside its kernel and keeps a seed. For a plan of such a device the call is traced
without dropout, which has the ops, the sizes and nearly the time of the fused form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import functional
from torch.overrides import TorchFunctionMode

DROPOUT_POSITION = 4


class FusedAttention(TorchFunctionMode):
    """Calls of `scaled_dot_product_attention` with their dropout left out."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, changed where it is attention."""
        given = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            args = (*args[:DROPOUT_POSITION], *(0.0 for _ in args[4:5]), *args[5:])
            given.pop("dropout_p", None)
        return func(*args, **given)
