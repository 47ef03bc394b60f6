"""Handles: tensors of 8 bytes that stand in a graph for values below the device.

A graph hands a handle on, and autograd saves it, like any other tensor. The memory of a handle is a
`Store`, and nothing else keeps that alive. So when the last graph, autograd node or copy has let go
of a handle, what is below goes too, whether a backward came or not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from remat.graph_capture.spill_files import Finalizer

HANDLE_BYTES = 8


@dataclass(frozen=True)
class StorageView:
    """How a tensor shows its storage, of which all bytes are copied."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    size_bytes: int

    @classmethod
    def of(cls, x: Tensor) -> Self:
        return cls(
            tuple(x.size()),
            tuple(x.stride()),
            int(x.storage_offset()),
            x.dtype,
            x.untyped_storage().nbytes(),
        )

    def over(self, whole: Tensor) -> Tensor:
        x = torch.empty(0, dtype=self.dtype, device=whole.device)
        return x.set_(whole.untyped_storage(), self.offset, self.size, self.stride)


class Store(bytearray):
    """The memory of one handle, with what its tier keeps of the value."""

    def __init__(self, shown: StorageView, kept: Any) -> None:
        super().__init__(HANDLE_BYTES)
        self.shown, self.kept = shown, kept


_stores: dict[int, Finalizer[int]] = {}
"""By the address of a handle's memory, which is its own for as long as it lives."""
_ended: deque[Finalizer[int]] = deque()


def handle_of(store: Store) -> Tensor:
    while _ended:
        gone = _ended.popleft()
        if _stores.get(gone.fact) is gone:  # else another has the address by now
            del _stores[gone.fact]
    # It shares the store's memory, and so keeps the store alive.
    handle = torch.frombuffer(store, dtype=torch.uint8)
    address = handle.untyped_storage().data_ptr()
    _stores[address] = Finalizer(store, _ended.append, address)
    return handle


def store_of(handle: Tensor) -> Store:
    store = _stores[handle.untyped_storage().data_ptr()]()
    assert isinstance(store, Store)
    return store
