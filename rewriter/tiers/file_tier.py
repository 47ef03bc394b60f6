"""Below a CPU: files, for the host tier and for NVMe.

A CPU's own memory is the host's, so what leaves it for the "host" goes to a file too, in
`REMAT_OFFLOAD` or the system's folder for temporary files; for NVMe in the folder of the links.
A range of a file is taken by the thread that fills it, where Ctrl-C is never heard, and belongs to
the handle that stands for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from remat.graph_capture.links import Tier as TierName
from remat.graph_capture.unnamed_files.files import File, Folder
from remat.graph_capture.unnamed_files.host_folder import host_folder
from remat.rewriter.tiers.copying import Copy, link_thread
from remat.rewriter.tiers.handles import Shown, Store, handle_of, store_of
from remat.rewriter.tiers.places import HostPlaces

Pending = tuple[Tensor, Copy]


@dataclass(eq=False)
class FileOf:
    """The file of one handle, once the copy into it has taken its range."""

    copied: Copy = field(init=False)
    file: File | None = None


class FileTier:
    """The tiers of one plan for a CPU.

    Parameters
    ----------
    host_bytes, nvme_bytes : the most that a step keeps in each.
    nvme_path : the folder of NVMe; empty for that of the host tier.
    """

    def __init__(self, host_bytes: int, nvme_bytes: int, nvme_path: str) -> None:
        self.places = HostPlaces()
        self._host = Folder(host_folder(), "host")
        self._nvme = Folder(nvme_path, "nvme") if nvme_path and nvme_bytes else self._host
        self._needs = [(self._host, host_bytes), (self._nvme, nvme_bytes)]
        if self._nvme is self._host:
            self._needs = [(self._host, host_bytes + nvme_bytes)]

    @property
    def folders(self) -> dict[TierName, Folder]:
        """Where the files of each tier below the device are made."""
        return {"host": self._host, "nvme": self._nvme}

    def require_room(self) -> None:
        """As of `Tier`. What other steps take meanwhile is not known."""
        for folder, size_bytes in self._needs:
            folder.require_room(size_bytes)

    def offload(self, x: Tensor, place_bytes: int) -> Tensor:
        """As of `Tier`; files have no places."""
        shown, kept = Shown.of(x), FileOf()
        kept.copied = link_thread("d2h").begin(_fill_from_memory, [self._host, kept, x, shown])
        return handle_of(Store(shown, kept))

    def leave(self, handle: Tensor, x: Tensor) -> Tensor:
        """As of `Tier`."""
        store_of(handle).kept.copied.wait()
        return handle

    def fetch(self, handle: Tensor) -> Pending:
        """As of `Tier`."""
        store = store_of(handle)
        whole = torch.empty(store.shown.size_bytes, dtype=torch.uint8)
        x = store.shown.over(whole)
        kept: FileOf = store.kept
        return x, link_thread("h2d").begin(_fill_memory, [kept, whole], kept.copied)

    def arrive(self, pending: Pending) -> Tensor:
        """As of `Tier`."""
        x, copy = pending
        copy.wait()
        return x

    def write(self, handle: Tensor) -> Tensor:
        """As of `Tier`."""
        return self._to_folder(handle, self._nvme, "write")

    def read(self, handle: Tensor, place_bytes: int) -> Tensor:
        """As of `Tier`; files have no places."""
        return self._to_folder(handle, self._host, "read")

    def _to_folder(self, handle: Tensor, folder: Folder, link: str) -> Tensor:
        store = store_of(handle)
        source: FileOf = store.kept
        kept = FileOf()
        kept.copied = link_thread(link).begin(_fill_file, [folder, kept, source], source.copied)
        return handle_of(Store(store.shown, kept))


def _fill_from_memory(folder: Folder, kept: FileOf, x: Tensor, shown: Shown) -> None:
    file = File(folder, shown.size_bytes)
    file.write_from(x.untyped_storage().data_ptr())
    kept.file = file


def _fill_memory(kept: FileOf, whole: Tensor) -> None:
    assert kept.file is not None
    kept.file.read_to(whole.untyped_storage().data_ptr())


def _fill_file(folder: Folder, kept: FileOf, source: FileOf) -> None:
    assert source.file is not None
    file = File(folder, source.file.size_bytes)
    source.file.copy_to(file)
    kept.file = file
