"""Writes of a watched step to tensors that no plan in parts puts back, such as a global one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from remat.graph_capture.distributed.dtensors import is_distributed
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.nodes import aten, written_arguments
from remat.graph_capture.torch_private.core import OpWatcher, pytree, storage_of_pointer
from remat.graph_capture.tracing.restore import NoForeignWrites


class OutsideWrites(OpWatcher):
    """Sees a forward. `own` : parameters, buffers and batch, which are put back as it is."""

    def __init__(self, own: Iterable[Any], names: NoForeignWrites) -> None:
        super().__init__()
        self._names = names
        self._known = {ref.cdata: ref for ref in _storages_of(own)}  # its own, and what it makes
        self._written = list[tuple[StorageWeakRef, torch.UntypedStorage, CaptureError]]()

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten.lift_fresh.default:  # of `torch.tensor`
            self._add(args)
        for tensor in _dense(list(written_arguments(func, args, kwargs))):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                refused = self._names.refused(tensor if tensor._base is None else tensor._base)
                self._written.append((StorageWeakRef(storage), storage.clone(), refused))
                self._add(tensor)
        given = {ref.cdata for ref in _storages_of((args, kwargs))}
        made = func(*args, **kwargs)
        self._known |= {ref.cdata: ref for ref in _storages_of(made) if ref.cdata not in given}
        return made

    def _add(self, tree: Any) -> None:
        self._known |= {ref.cdata: ref for ref in _storages_of(tree)}

    def require_none(self) -> None:
        """After the step: what it made without an op, as from NumPy, is gone by then."""
        for ref, _, refused in self._written:
            if not ref.expired():
                raise refused

    def put_back(self) -> None:
        for ref, before, _ in self._written:
            if (storage := storage_of_pointer(ref.cdata)) is not None:
                storage.copy_(before)


def _dense(tree: Any) -> list[Tensor]:
    tensors = (one for one in pytree.tree_leaves(tree) if isinstance(one, Tensor))
    return [t for t in tensors if t.layout is torch.strided and not is_distributed(t)]


def _storages_of(tree: Any) -> list[StorageWeakRef]:
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in _dense(tree)]
