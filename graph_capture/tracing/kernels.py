"""Which kernels a trace takes where torch offers several.

Under the Python dispatcher, which AOTAutograd turns on, torch decomposes some ops in Python where
eager runs compiled code: resampling, recurrent layers and a few losses. The results differ in the
last bits, and `rnn_tanh` and `rnn_relu` lose their dropout (seen in torch 2.13). `kernels_of_eager`
takes these decompositions away.

A CPU has no fused attention with dropout, where the device that is planned for has.
`FusedAttention` traces the call without its dropout, as a kernel that draws inside itself keeps no
mask.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch._C import DispatchKey
from torch.nn import functional
from torch.overrides import TorchFunctionMode

DROPOUT_POSITION = 4
"""Of ``dropout_p`` among the arguments of `scaled_dot_product_attention`."""
KEYS = DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd
FAMILIES = (
    "rnn_tanh", "rnn_relu", "gru", "lstm", "softshrink", "hardshrink", "multi_margin_loss",
    "multilabel_margin_loss_forward", "stft", "istft",
)  # fmt: skip
"""Ops by name, beside all that resample."""


@contextlib.contextmanager
def kernels_of_eager() -> Generator[None]:
    """Take the Python decompositions away, and put them back on leaving."""
    taken = [
        (op, key, op.py_kernels.pop(key))
        for op in _decomposed()
        for key in KEYS
        if key in op.py_kernels
    ]
    for op, _, _ in taken:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


@functools.cache
def _decomposed() -> tuple[Any, ...]:
    """The ops that this torch has in Python, and eager has compiled."""
    names = [name for name in dir(torch.ops.aten) if "upsample_" in name]
    known = [name for name in (*names, *FAMILIES) if hasattr(torch.ops.aten, name)]
    packets = [getattr(torch.ops.aten, name) for name in known]
    ops = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return tuple(op for op in ops if any(key in op.py_kernels for key in KEYS))


_DROPOUTS = frozenset({"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"})


class IdleDropout(TorchFunctionMode):
    """Dropout that drops nothing returns its input, as in eager; a trace would make a copy.

    A write in place to the result then reaches the input too.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, unless it is dropout at rest."""
        given = dict(kwargs or {})
        if getattr(func, "__name__", "") in _DROPOUTS:
            named = dict(zip(("input", "p", "training"), args, strict=False)) | given
            is_on = named.get("training", named.get("train", True))
            if not is_on or named.get("p", 0.5) == 0:
                return named["input"]
        return func(*args, **given)


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
            at = DROPOUT_POSITION
            args = (*args[:at], *(0.0 for _ in args[at : at + 1]), *args[at + 1 :])
            given.pop("dropout_p", None)
        return func(*args, **given)
