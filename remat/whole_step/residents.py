"""Parameters and optimizer states of a step: each at its home between steps.

While some are below the device, the model and the optimizer have hooks that bring all of them back
before anything of the user's reads them: ``state_dict``, ``load_state_dict`` and the model's own
forward. The next step sends them down again.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from remat.graph_capture.errors import RewriteError, TierError
from remat.graph_capture.graph import Tier
from remat.graph_capture.spill_files import File, Folder
from remat.rewriter.tiers.file_tier import PendingCopy, link_thread

# A parameter, its optimizer's state or its gradient: in memory, or in files below it.
#
# A tensor keeps its storage object throughout; only the bytes of the storage come and go. So all
# views of it stay right, and the user's tensors are the same objects before and after. Between
# steps the user's tensor of what is below is empty, of shape (0,): read by mistake, it gives an
# error or nothing, never wrong numbers.
#
# Each copy notes what it has done in the thread that did it, where Ctrl-C is never heard. So at any
# moment it is known where the bytes are, and `restore` brings them back from there.


_Folders = Mapping[Tier, Folder]  # of the tiers ``host`` and ``nvme``


class Held:
    """Tensors that move together, each with a storage of its own; `name` says what they are.

    `is_in_memory` is whether the storages hold the bytes, `copied` has the tiers whose files do.
    """

    def __init__(self, name: str, tensors: Iterable[Tensor], folders: _Folders) -> None:
        self.name, self.folders = name, folders
        self.tensors: list[Tensor] = []
        self.whole: list[Tensor] = []
        self.sizes_bytes: list[int] = []
        self.is_in_memory = True
        self.copied: set[Tier] = set()
        self._files: dict[Tier, list[File]] = {}
        self._leaving: list[PendingCopy] = []
        self._arriving: list[PendingCopy] = []
        self.adopt(tensors)

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Hold these from now on, whose bytes are in memory; files hold none of them."""
        found = list(tensors)
        self.settle()
        self.copied.clear()
        # Unchanged tensors keep their storages and their files.
        if [id(one) for one in found] == [id(one) for one in self.tensors]:
            return
        self._files.clear()
        self.tensors = found
        for one in found:
            if not one.untyped_storage().resizable():  # such as memory that is mapped from a file
                one.data = one.data.clone()
        # Our own tensor on the same storage: the user's is empty while the bytes are below.
        self.whole = [one.data for one in found]
        self.sizes_bytes = [one.untyped_storage().nbytes() for one in found]

    def attach(self) -> None:
        for one, whole in zip(self.tensors, self.whole, strict=True):
            if one.data_ptr() != whole.data_ptr() or one.shape != whole.shape:
                one.data = whole

    def rest(self) -> None:
        if not self.is_in_memory:
            for one in self.tensors:
                one.data = torch.empty(0, dtype=one.dtype)

    def offload(self, to: Tier) -> None:
        # An optimizer has no state before its first step.
        if not self.tensors:
            return
        if to == "host":
            addresses = [one.untyped_storage().data_ptr() for one in self.whole]
            copy = link_thread("d2h").begin(_files_from_memory, [self, to, addresses])
        else:
            # It reads the host's file, which must be complete.
            after = self._leaving[-1] if self._leaving else None
            copy = link_thread("write").begin(_copy_files, [self, "host", to], after)
        self._leaving.append(copy)

    def fetch(self, to: Tier) -> None:
        """Begin to copy one tier up; into memory that is taken here."""
        if not self.tensors:
            return
        # The second copy reads what the first one writes.
        before = self._arriving[-1] if self._arriving else None
        if to == "host":
            copy = link_thread("read").begin(_copy_files, [self, "nvme", to], before)
        else:
            given = [self, "host", self._room()]
            copy = link_thread("h2d").begin(_memory_from_files, given, before)
        self._arriving.append(copy)

    def arrive(self) -> None:
        while self._arriving:
            self._arriving[-1].wait()
            self._arriving.clear()
            self.is_in_memory = True

    def leave(self) -> None:
        if not self.tensors:
            return
        # A pending copy would write to memory that is someone else's by then.
        self._wait_for_all()
        self._arriving.clear()
        if not self.copied:
            raise TierError(f"{self.name} would be dropped, and no file holds it")
        self.is_in_memory = False
        for whole in self.whole:
            # Keep the storage object, and with it all views; only its bytes go.
            whole.untyped_storage().resize_(0)

    def forget_below(self, tier: Tier) -> None:
        self._wait_for_all()
        self.copied.discard(tier)
        self._files.pop(tier, None)

    def _wait_for_all(self) -> None:
        for copy in (*self._leaving, *self._arriving):
            copy.wait()
        self._leaving.clear()

    def settle(self) -> None:
        """Wait for all copies, whatever comes of them."""
        for copy in (*self._leaving, *self._arriving):
            copy.settle()
        self._leaving.clear()
        self._arriving.clear()

    def restore(self) -> None:
        """Bring the bytes back into memory from wherever they are, whatever has failed before."""
        self.settle()
        if not self.is_in_memory:
            # The host is faster than NVMe, and both copies are current.
            tier: Tier = "host" if "host" in self.copied else "nvme"
            copy = link_thread("h2d").begin(_memory_from_files, [self, tier, self._room()])
            copy.wait()
            self.is_in_memory = True
        self.attach()

    def close(self) -> None:
        self.settle()
        self.copied.clear()
        self._files.clear()

    def _room(self) -> list[int]:
        for whole, size_bytes in zip(self.whole, self.sizes_bytes, strict=True):
            # A fetch may have taken the memory already.
            if whole.untyped_storage().nbytes() != size_bytes:
                whole.untyped_storage().resize_(size_bytes)
        return [one.untyped_storage().data_ptr() for one in self.whole]

    def files_at(self, tier: Tier) -> list[File]:
        """The files of a tier, opened where there are none; called by the thread of a link."""
        if tier not in self._files:
            self._files[tier] = [File(self.folders[tier], size) for size in self.sizes_bytes]
        return self._files[tier]


def _files_from_memory(held: Held, to: Tier, addresses: list[int]) -> None:
    # A file that is being written is no copy: if that fails, it must not be read.
    held.copied.discard(to)
    for file, address in zip(held.files_at(to), addresses, strict=True):
        file.write_from(address)
    held.copied.add(to)


def _memory_from_files(held: Held, source: Tier, addresses: list[int]) -> None:
    for file, address in zip(held.files_at(source), addresses, strict=True):
        file.read_to(address)


def _copy_files(held: Held, source: Tier, to: Tier) -> None:
    # Likewise: only complete files count.
    held.copied.discard(to)
    for file, other in zip(held.files_at(source), held.files_at(to), strict=True):
        file.copy_to(other)
    held.copied.add(to)


@contextlib.contextmanager
def uninterrupted() -> Generator[None]:
    # Python handles Ctrl-C in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = list[Any]()
    before = signal.signal(signal.SIGINT, lambda *given: heard.append(given))
    try:
        yield
    finally:
        # None means that the handler was not set from Python.
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
        if heard:
            signal.raise_signal(signal.SIGINT)


_COUNT = "step"
"""The key of an optimizer's state under which it counts steps: a number, which stays in memory."""


def moments(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return {key: t for key, t in state.items() if key != _COUNT and isinstance(t, Tensor)}


@dataclass
class Residents:
    """All that has a home, by its name in the graph of the step.

    `homes` has the tiers between steps, of parameters and states (``O:`` and the parameter's name).
    """

    optimizer: Optimizer
    parameters: dict[str, tuple[str, nn.Parameter]]
    homes: Mapping[str, Tier]
    folders: _Folders
    held: dict[str, Held] = field(default_factory=dict[str, Held])

    def __post_init__(self) -> None:
        self.hold()

    def hold(self) -> None:
        for name, (path, parameter) in self.parameters.items():
            self.held[name] = Held(path, [parameter], self.folders)
            if f"O:{name}" in self.homes:
                kept = moments(self.optimizer, parameter).values()
                self.held[f"O:{name}"] = Held(f"the state of {path}", kept, self.folders)

    def begin(self) -> None:
        """Before the guards of a step, which compare tensors with those of the capture."""
        self.attach()

    def agree(self, error: Exception | None) -> None:
        """Nothing to do on one rank."""

    def require_whole(self) -> None:
        """Nothing to do on one rank: `bring_back` has made all whole."""

    def make_whole(self) -> None:
        self.bring_back()

    def owned(self, name: str) -> contextlib.AbstractContextManager[None]:
        """While a parameter is updated, the user's tensor is what this rank has of it."""
        return contextlib.nullcontext()

    def attach(self) -> None:
        """Give the user's tensors their storages back, and take over what the user has replaced."""
        with uninterrupted():
            for name, one in self.held.items():
                if name.startswith("O:"):
                    now = [*moments(self.optimizer, self.parameters[name[2:]][1]).values()]
                    # An optimizer's `load_state_dict` makes new tensors, whose bytes are in memory.
                    if [id(t) for t in now] != [id(t) for t in one.tensors]:
                        one.is_in_memory = True
                        one.adopt(now)
                # The user has put values where `rest` has left none: the files are obsolete.
                elif not one.is_in_memory and any(tensor.numel() for tensor in one.tensors):
                    tensors, one.tensors, one.is_in_memory = one.tensors, [], True
                    one.adopt(tensors)
                one.attach()

    def send_down(self) -> None:
        for name, tier in self.homes.items():
            one = self.held[name]
            # An optimizer without a step has no state.
            if tier == "device" or not one.is_in_memory or not one.tensors:
                continue
            # The files are stale: memory may have changed since.
            one.copied.clear()
            one.offload("host")
            if tier == "nvme":
                one.offload("nvme")
            one.leave()
            # The copy goes to NVMe by way of the host, and leaves nothing there.
            if tier == "nvme":
                one.forget_below("host")

    def rest(self) -> None:
        with uninterrupted():
            for one in self.held.values():
                one.rest()

    def bring_back(self) -> None:
        """Bring all into memory, and into the user's tensors; may be called again if it fails."""
        failed = list[tuple[str, TierError]]()
        with uninterrupted():
            for one in self.held.values():
                # One failure must not keep the others from coming back.
                try:
                    one.restore()
                except TierError as error:
                    # Empty, rather than filled with garbage.
                    one.rest()
                    failed.append((one.name, error))
        if failed:
            names = ", ".join(name for name, _ in failed)
            raise TierError(
                f"call bring_back() again, or load {names} from a checkpoint: they could not be "
                "brought back from below the device, and stay empty"
            ) from failed[0][1]

    def close(self) -> None:
        for one in self.held.values():
            one.close()


class MemoryWatch:
    def __init__(self, model: nn.Module, optimizer: Optimizer, residents: Residents) -> None:
        # Not the step itself: its values must come back even after it is gone.
        self.residents = residents
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._handles: list[RemovableHandle] = []

    def begin(self) -> None:
        model, optimizer = self._model(), self._optimizer()
        if self._handles or model is None or optimizer is None:
            return
        hear = _BringBack(self.residents)
        self._handles.append(model.register_forward_pre_hook(hear))
        for one in (model, optimizer):
            self._handles.append(one.register_state_dict_pre_hook(hear))
            self._handles.append(one.register_load_state_dict_pre_hook(hear))

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _BringBack:
    def __init__(self, residents: Residents | None = None) -> None:
        self.residents = residents

    def __call__(self, *_: Any, **__: Any) -> None:
        if self.residents is not None:
            self.residents.bring_back()
            self.residents.require_whole()

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of empty tensors would stay empty.
        held = () if self.residents is None else self.residents.held.values()
        if not all(one.is_in_memory for one in held):
            raise RewriteError(
                "call bring_back() of the step first, or save state_dict(): a model whose "
                "parameters are below the device cannot be copied or pickled"
            )
        # A copied model owns its tensors, so its hook does nothing.
        return type(self), ()
