"""A parameter, its optimizer's state or its gradient: in memory, or in files below it.

A tensor keeps its storage object throughout; only the bytes of the storage come and go. So all
views of it stay right, and the user's tensors are the same objects before and after. Between steps
the user's tensor of what is below is empty, of shape (0,): read by mistake, it gives an error or
nothing, never wrong numbers.

Each copy notes what it has done in the thread that did it, where Ctrl-C is never heard. So at any
moment it is known where the bytes are, and `restore` brings them back from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from remat.graph_capture.errors import TierError
from remat.graph_capture.links import Tier
from remat.graph_capture.unnamed_files.files import File, Folder
from remat.rewriter.tiers.copying import Copy, link_thread

Folders = Mapping[Tier, Folder]
"""Of the tiers ``host`` and ``nvme``."""


class Held:
    """Tensors that move together.

    Parameters
    ----------
    name : what they are, in words. tensors : the user's, each with a storage of its own.
    folders : where files of the lower tiers are made.

    Attributes
    ----------
    is_in_memory : whether the storages hold the bytes. copied : the tiers whose files hold them.
    """

    def __init__(self, name: str, tensors: Iterable[Tensor], folders: Folders) -> None:
        self.name, self.folders = name, folders
        self.tensors: list[Tensor] = []
        self.whole: list[Tensor] = []
        self.sizes_bytes: list[int] = []
        self.is_in_memory = True
        self.copied: set[Tier] = set()
        self._files: dict[Tier, list[File]] = {}
        self._leaving: list[Copy] = []
        self._arriving: list[Copy] = []
        self.adopt(tensors)

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Hold these from now on, whose bytes are in memory; files hold none of them."""
        found = list(tensors)
        self.settle()
        self.copied.clear()
        if [id(one) for one in found] == [id(one) for one in self.tensors]:
            return
        self._files.clear()
        self.tensors = found
        for one in found:
            if not one.untyped_storage().resizable():  # such as memory that is mapped from a file
                one.data = one.data.clone()
        self.whole = [one.data for one in found]
        self.sizes_bytes = [one.untyped_storage().nbytes() for one in found]

    def written(self) -> None:
        """What files hold is not what memory holds any more."""
        self.copied.clear()

    def attach(self) -> None:
        """Let the user's tensors have their storages, filled or not."""
        for one, whole in zip(self.tensors, self.whole, strict=True):
            if one.data_ptr() != whole.data_ptr() or one.shape != whole.shape:
                one.data = whole

    def rest(self) -> None:
        """Let the user's tensors be empty, if their bytes are below."""
        if not self.is_in_memory:
            for one in self.tensors:
                one.data = torch.empty(0, dtype=one.dtype)

    @property
    def was_replaced(self) -> bool:
        """Whether the user has put other numbers where `rest` has left none."""
        return not self.is_in_memory and any(one.numel() for one in self.tensors)

    def offload(self, to: Tier) -> None:
        """Begin to copy one tier down."""
        if not self.tensors:
            return
        if to == "host":
            addresses = [one.untyped_storage().data_ptr() for one in self.whole]
            given = [self, to, addresses]
            self._leaving.append(link_thread("d2h").begin(_files_from_memory, given))
        else:
            after = self._leaving[-1] if self._leaving else None
            copy = link_thread("write").begin(_copy_files, [self, "host", to], after)
            self._leaving.append(copy)

    def fetch(self, to: Tier) -> None:
        """Begin to copy one tier up; into memory that is taken here."""
        if not self.tensors:
            return
        before = self._arriving[-1] if self._arriving else None
        if to == "host":
            copy = link_thread("read").begin(_copy_files, [self, "nvme", to], before)
        else:
            copy = link_thread("h2d").begin(
                _memory_from_files, [self, "host", self._room()], before
            )
        self._arriving.append(copy)

    def arrive(self) -> None:
        """Wait for what is on its way into memory."""
        while self._arriving:
            self._arriving[-1].wait()
            self._arriving.clear()
            self.is_in_memory = True

    def leave(self) -> None:
        """Wait for copies out of memory and into it, then give it back.

        A copy that nobody has waited for would write to memory that is another's by then.
        """
        if not self.tensors:
            return
        self._wait_for_all()
        self._arriving.clear()
        if not self.copied:
            raise TierError(f"{self.name} would be dropped, and no file holds it")
        self.is_in_memory = False
        for whole in self.whole:
            whole.untyped_storage().resize_(0)

    def forget_below(self, tier: Tier) -> None:
        """Nothing needs what a tier holds any more; its file is kept, to be written again."""
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
            tier: Tier = "host" if "host" in self.copied else "nvme"
            copy = link_thread("h2d").begin(_memory_from_files, [self, tier, self._room()])
            copy.wait()
            self.is_in_memory = True
        self.attach()

    def close(self) -> None:
        """Let go of all files; the bytes are in memory."""
        self.settle()
        self.copied.clear()
        self._files.clear()

    def _room(self) -> list[int]:
        for whole, size_bytes in zip(self.whole, self.sizes_bytes, strict=True):
            if whole.untyped_storage().nbytes() != size_bytes:
                whole.untyped_storage().resize_(size_bytes)
        return [one.untyped_storage().data_ptr() for one in self.whole]

    def files_at(self, tier: Tier) -> list[File]:
        """The files of a tier, opened where there are none; called by the thread of a link."""
        if tier not in self._files:
            self._files[tier] = [File(self.folders[tier], size) for size in self.sizes_bytes]
        return self._files[tier]


def _files_from_memory(held: Held, to: Tier, addresses: list[int]) -> None:
    held.copied.discard(to)
    for file, address in zip(held.files_at(to), addresses, strict=True):
        file.write_from(address)
    held.copied.add(to)


def _memory_from_files(held: Held, source: Tier, addresses: list[int]) -> None:
    for file, address in zip(held.files_at(source), addresses, strict=True):
        file.read_to(address)


def _copy_files(held: Held, source: Tier, to: Tier) -> None:
    held.copied.discard(to)
    for file, other in zip(held.files_at(source), held.files_at(to), strict=True):
        file.copy_to(other)
    held.copied.add(to)
