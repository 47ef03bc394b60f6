"""Keeps what a check holds off the device, so that eager's step runs within the plan's budget.

What eager saves, its results and copies of the state move: from a CPU to files without a name, from
a CUDA device to the host. No bit changes, and strides, offsets and aliases come back too.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.devices.meter import Run
from remat.graph_capture.distributed.dtensors import is_distributed, local_part
from remat.graph_capture.eager_step import LEAST_BYTES
from remat.graph_capture.errors import NotComparedError, TierError
from remat.graph_capture.spill_files import HOST_FOLDER, File, Folder, host_folder
from remat.graph_capture.torch_private.core import (
    DisableTorchFunction,
    disable_current_modes,
    is_functorch_wrapped,
)
from remat.rewriter.tiers.file_tier import StorageView, all_bytes

Read = Callable[[], Tensor]  # gives back what was kept


class OffDeviceMemory:
    """Memory off a device; `stays` are tensors that live through the step anyway."""

    def __init__(self, device: str, stays: Iterable[Tensor]) -> None:
        self.device, self._live = torch.device(device), _Live(math.inf)
        self._folder = _folder() if device == CPU else None
        plain = filter(_is_bytes_alone, map(local_part, stays))
        self._stays = {one.untyped_storage()._cdata for one in plain}
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], weakref.ref[_Moved]]] = {}

    def outcome(self) -> MutableMapping[str, Any]:
        return {} if self._folder is None else _Results(self)

    def keep(self, tensor: Tensor) -> Read:
        """Copy a tensor; what is returned gives the copy back, on the device."""
        tensor = tensor.detach()
        if not _is_bytes_alone(tensor) or tensor.untyped_storage().nbytes() < LEAST_BYTES:
            copy = tensor.clone()
            return lambda: copy
        if tensor.untyped_storage().nbytes() > tensor.nbytes:  # a part of something larger
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        shown, copied = StorageView.of(tensor), self._copy(tensor.untyped_storage())
        return lambda: _over_storage(shown, copied.read())

    def running(self, run: Run, room_bytes: float) -> Run:
        """`run` with what autograd saves moved: at most `room_bytes` are on the device at once."""

        def moved() -> Any:
            self._live = _Live(room_bytes)
            try:
                with saved_tensors_hooks(self._pack, self._unpack):
                    return run()
            except RuntimeError as error:
                if not takes_no_hooks(error):
                    raise
                raise NotComparedError(
                    f"what it saves for backward cannot be moved ({str(error).splitlines()[0]})"
                ) from error
            finally:
                self._known.clear()

        return moved

    def _copy(self, storage: UntypedStorage) -> _InFile | _OnHost:
        return _OnHost(storage) if self._folder is None else _InFile(self._folder, storage)

    def _pack(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):  # the mesh, of a tensor over it
            return tensor
        if is_distributed(tensor):
            parts: Any = tensor
            inner, facts = parts.__tensor_flatten__()
            packed = {name: self._pack(getattr(tensor, name)) for name in inner}
            return type(tensor), packed, facts, tensor.size(), tensor.stride()
        with _unseen():
            if not _is_bytes_alone(tensor) or tensor.device.type != self.device.type:
                return tensor
            storage = tensor.untyped_storage()
            if storage.nbytes() < LEAST_BYTES or storage._cdata in self._stays:
                return tensor
            return StorageView.of(tensor), self._moved(storage)

    def _unpack(self, packed: Any) -> Any:
        if not isinstance(packed, tuple):
            return packed
        parts: Any = packed
        if len(parts) > 2:
            kind, inner, facts, size, stride = parts
            whole = {name: self._unpack(one) for name, one in inner.items()}
            return kind.__tensor_unflatten__(whole, facts, size, stride)
        shown, moved = parts
        with _unseen():
            return _over_storage(shown, moved.storage())

    def _moved(self, storage: UntypedStorage) -> _Moved:
        # What several ops save is kept once.
        there, known = self._known.get(storage._cdata, (lambda: None, lambda: None))
        moved = known()
        if there() is not storage:  # a new one, whatever had its address before
            self._live.add(storage)
            moved = None
        if moved is None:
            moved = _Moved(storage, self._copy(storage), self._live)
            self._known[storage._cdata] = weakref.ref(storage), weakref.ref(moved)
        else:
            moved.write(storage)  # versions of `unsafe_chunk` and `.data` hide writes, as in eager
        return moved


class _InFile:
    def __init__(self, folder: Folder, storage: UntypedStorage) -> None:
        try:
            self._file = File(folder, storage.nbytes())
        except OSError as error:
            raise _no_files(str(error.strerror)) from error
        self.write(storage)

    def write(self, storage: UntypedStorage) -> None:
        try:
            self._file.write_from(storage.data_ptr())
        except OSError as error:
            raise _no_files(str(error.strerror)) from error

    def read(self) -> UntypedStorage:
        whole = torch.empty(self._file.size_bytes, dtype=torch.uint8)
        self._file.read_to(whole.data_ptr())
        return whole.untyped_storage()


class _OnHost:
    def __init__(self, storage: UntypedStorage) -> None:
        self._bytes, self._device = all_bytes(storage).to(CPU, copy=True), storage.device

    def write(self, storage: UntypedStorage) -> None:
        self._bytes.copy_(all_bytes(storage))

    def read(self) -> UntypedStorage:
        return self._bytes.to(self._device, copy=True).untyped_storage()


class _Moved:
    def __init__(self, storage: UntypedStorage, copied: _InFile | _OnHost, live: _Live) -> None:
        self._there, self._copied, self._live = weakref.ref(storage), copied, live
        self._size_bytes, self.write = storage.nbytes(), copied.write

    def storage(self) -> UntypedStorage:
        if (found := self._there()) is None:  # what still has or has fetched the storage shares it
            self._live.require(self._size_bytes)
            found = self._copied.read()
            self._live.add(found)
            self._there = weakref.ref(found)
        return found


class _Live:
    """Bytes on the device of what autograd has saved: all that variables or backward hold of it."""

    def __init__(self, most_bytes: float) -> None:
        self._most_bytes, self._bytes = most_bytes, 0

    def require(self, size_bytes: int) -> None:
        if self._bytes + size_bytes > self._most_bytes:
            raise NotComparedError("its code holds more at once than the budget allows")

    def add(self, storage: UntypedStorage) -> None:
        self.require(storage.nbytes())
        self._bytes += storage.nbytes()
        weakref.finalize(storage, self._less, storage.nbytes()).atexit = False

    def _less(self, size_bytes: int) -> None:
        self._bytes -= size_bytes


class _Results(MutableMapping[str, Any]):
    """Results of a step in files; one is read each time that it is asked for."""

    def __init__(self, elsewhere: OffDeviceMemory) -> None:
        self._elsewhere = elsewhere
        self._kept: dict[str, Callable[[], Any]] = {}

    def __setitem__(self, name: str, result: Any) -> None:
        keep = self._elsewhere.keep
        self._kept[name] = keep(result) if isinstance(result, Tensor) else lambda: result

    def __getitem__(self, name: str) -> Any:
        return self._kept[name]()

    def __delitem__(self, name: str) -> None:
        del self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def takes_no_hooks(error: RuntimeError) -> bool:
    return "saved tensor hooks" in str(error)  # torch's words where code takes none


def _folder() -> Folder:
    try:
        return Folder(host_folder(), "host")
    except TierError as error:
        raise _no_files(str(error.__cause__)) from error


def _no_files(why: str) -> NotComparedError:
    return NotComparedError(
        f"set {HOST_FOLDER} to a folder that can hold what it saves for backward: {host_folder()} "
        f"cannot ({why})"
    )


@contextlib.contextmanager
def _unseen() -> Generator[None]:
    # Neither autograd nor whoever watches ops may see our own.
    with torch.no_grad(), disable_current_modes(), DisableTorchFunction():
        yield


def _is_bytes_alone(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not is_functorch_wrapped(tensor)
    )


def _over_storage(shown: StorageView, storage: UntypedStorage) -> Tensor:
    return shown.over(all_bytes(storage))
