"""Tensors that backward reads to make values again: still what forward read, or refused by name.

A write through ``.data`` or NumPy leaves no sign on a tensor. So its bits are added up, as whole
numbers, when forward ends and when backward begins. All of them at the first steps, and as long as
that takes a small part of a step; else some of them, others at each step.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remat.graph_capture.errors import RewriteError

WHOLE_STEPS = 3
"""After so many steps, only what costs little is compared."""
SHARE = 0.01
"""Of a step's time, that comparisons may take."""
LEAST_US = 100.0
"""They may always take this long."""
BYTES_A_US, TENSOR_US, LINE_BYTES = 8000.0, 3.0, 64
"""What a CPU adds up, what a tensor takes beyond that, and what it reads at least of each place."""

_KINDS = (np.uint64, np.uint32, np.uint16, np.uint8)
Words = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Noted:
    """What was known of one tensor when forward ended."""

    name: str
    tensor: weakref.ref[Tensor]
    version: int
    address: int
    bits: tuple[int, int, int] | None


class ReadAgain:
    """The tensors of one plan that its backward reads to make values again.

    Parameters
    ----------
    places : of these tensors among the inputs. step_us : how long a step takes, as predicted.
    """

    def __init__(self, places: Sequence[int], step_us: float) -> None:
        self.places = tuple(places)
        self._allowed_us = max(LEAST_US, SHARE * step_us) / 2  # forward and backward
        self._words: dict[tuple[int, int], Words] = {}
        self._step = 0

    def noted(self, names: Sequence[str], inputs: Sequence[Any]) -> list[_Noted]:
        """What is to be so still when backward begins."""
        pairs = [(names[i], inputs[i]) for i in self.places if _has_memory(inputs[i])]
        self._step += 1
        stride = self._stride([tensor.nbytes for _, tensor in pairs])
        return [self._note(name, tensor, stride) for name, tensor in pairs]

    def _note(self, name: str, tensor: Tensor, stride: int) -> _Noted:
        bits: tuple[int, int, int] | None = None
        if tensor.is_cpu or self._step <= WHOLE_STEPS:
            start = self._step % stride
            bits = start, stride, self._sum(tensor, start, stride)
        return _Noted(name, weakref.ref(tensor), tensor._version, tensor.data_ptr(), bits)

    def _stride(self, sizes: Sequence[int]) -> int:
        """Every which word is added up, so that it takes no longer than is allowed."""
        us = sum(sizes) / BYTES_A_US + TENSOR_US * len(sizes)
        if self._step <= WHOLE_STEPS or us <= self._allowed_us:
            return 1
        left_us = max(self._allowed_us - TENSOR_US * len(sizes), self._allowed_us / 10)
        lines = left_us * BYTES_A_US / LINE_BYTES
        return max(1, int(sum(sizes) / 8 / lines))

    def _sum(self, tensor: Tensor, start: int, stride: int) -> int:
        if not tensor.is_cpu:
            whole = tensor.detach().flatten().view(torch.uint8)
            return int(whole.sum(dtype=torch.int64))
        key = tensor.data_ptr(), tensor.nbytes
        if key not in self._words:
            if len(self._words) > 2 * len(self.places):
                self._words.clear()
            self._words[key] = _words_at(*key)
        return int(self._words[key][start::stride].sum())

    def require(self, noted: Sequence[_Noted], kind: str) -> None:
        """Raise `RewriteError` for a tensor that is no longer what forward read."""
        for one in noted:
            tensor = one.tensor()
            if tensor is not None and not self._is_same(tensor, one):
                raise RewriteError(
                    f"{one.name} was changed between forward and backward of the rewritten {kind}, "
                    "which reads it again in backward to compute values anew. Change it after "
                    "backward, or give the step a copy (clone())"
                )

    def _is_same(self, tensor: Tensor, one: _Noted) -> bool:
        if tensor._version != one.version:
            return False
        if one.bits is None:
            return tensor.data_ptr() == one.address
        start, stride, total = one.bits
        return _has_memory(tensor) and self._sum(tensor, start, stride) == total


def _has_memory(value: Any) -> bool:
    """Whether it is a plain tensor whose bits lie one after the other."""
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_meta
        and not value.is_inference()
        and value.untyped_storage().nbytes() > 0
        and _is_dense(value)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill their memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


def _words_at(address: int, n_bytes: int) -> Words:
    """The memory as whole numbers. It is read only while a tensor is known to lie there."""
    kind = next(kind for kind in _KINDS if not n_bytes % np.dtype(kind).itemsize)
    return np.frombuffer((ctypes.c_char * n_bytes).from_address(address), dtype=kind)
