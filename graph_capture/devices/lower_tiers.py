"""How much memory below the device a plan may use: `host="120GiB"`, `nvme="/mnt/nvme:200GiB"`.

What is asked of a device of this machine must be there: memory that is free, a folder that can be
written. A device of the table may be in any machine.
"""

from __future__ import annotations

from typing import NamedTuple, SupportsIndex

from remat.graph_capture.devices.device_table import CPU, is_cuda, is_in_table
from remat.graph_capture.devices.free_memory import free_bytes
from remat.graph_capture.devices.sizes import whole_bytes, written_bytes
from remat.graph_capture.errors import BudgetError, option
from remat.graph_capture.unnamed_files.host_folder import (
    free_on_drive_bytes,
    host_folder,
    require_writable,
)

AUTO, AUTO_SHARE = "auto", 0.9
"""Of what is free; the rest is for others."""
HOST_FORMS = "120GiB, 64GB or auto"
NVME_FORM = "/mnt/nvme:200GiB"


class LowerTiers(NamedTuple):
    """Room below a device, and the folder of files on NVMe; 0 bytes there without one."""

    host_bytes: int
    nvme_bytes: int = 0
    nvme_path: str = ""


def lower_tiers(
    host: str | SupportsIndex | None, nvme: str | None, device: str, *, is_here: bool | None = None
) -> LowerTiers | None:
    """What is asked for in bytes, looked at on this machine; None where nothing is asked for.

    Parameters
    ----------
    is_here : whether `device` is of this machine; None for any that the table does not have.

    Raises
    ------
    BudgetError : a size cannot be read, is 0 or less, or is more than there is.
    FileError : the folder is not there, or cannot be written.
    TierError : it takes files, and the system cannot keep values in them.
    """
    if host is None and nvme is None:
        return None
    if host is None:
        raise BudgetError(
            f"{option('nvme', nvme)} lies below the host, and what goes there passes through it: "
            f"give {option('host', '16GiB')} too"
        )
    is_here = not is_in_table(device) if is_here is None else is_here
    if is_here and device == CPU:
        require_writable(host_folder())
    below = _Machine(device, is_here)
    host_bytes = below.size_bytes(host, "host", HOST_FORMS, host_folder())
    if nvme is None:
        return LowerTiers(host_bytes)
    folder, size = _folder_and_size(nvme)
    if is_here:
        require_writable(folder, "nvme")
    return LowerTiers(host_bytes, below.size_bytes(size, "nvme", NVME_FORM, folder), folder)


def _folder_and_size(nvme: str) -> tuple[str, str]:
    """Both parts of ``/mnt/nvme:200GiB``."""
    if not isinstance(nvme, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BudgetError(f"nvme {nvme!r} names no folder: write it like {NVME_FORM}")
    folder, parted, size = nvme.rpartition(":")
    if not parted and nvme[:1] in "/.~":
        raise BudgetError(f"nvme {nvme!r} names no size: write it like {NVME_FORM}")
    if not folder:
        raise BudgetError(f"nvme {nvme!r} names no folder: write it like {NVME_FORM}")
    return folder, size


class _Machine(NamedTuple):
    """The machine that a device is in."""

    device: str
    is_here: bool

    def size_bytes(self, given: str | SupportsIndex, what: str, forms: str, folder: str) -> int:
        """A size in bytes, no more than the machine has if it is this one."""
        if isinstance(given, str) and given.strip().lower() == AUTO:
            return self._auto_bytes(what, forms, folder)
        if isinstance(given, str):
            size_bytes = written_bytes(given.strip(), what, forms)
        else:
            size_bytes = whole_bytes(given, what, forms)
        if size_bytes <= 0:
            raise BudgetError(
                f"{what} {given!r} leaves nothing to use: give a positive size, or leave it out"
            )
        free = self._free_bytes(what, folder) if self.is_here else size_bytes
        if size_bytes > free:
            auto = AUTO if what == "host" else f"{folder}:{AUTO}"
            raise BudgetError(
                f"{what} {given!r} is more than the {_shown(free)} that are free "
                f"{self._where(what, folder)}: give less, or {auto}"
            )
        return size_bytes

    def _auto_bytes(self, what: str, forms: str, folder: str) -> int:
        if not self.is_here:
            raise BudgetError(
                f"{what} 'auto' is what this machine has free, and {self.device} is not here: "
                f"give a size, such as {forms.partition(',')[0]}"
            )
        return int(self._free_bytes(what, folder) * AUTO_SHARE)

    def _free_bytes(self, what: str, folder: str) -> int:
        """Bytes that are free in a tier."""
        is_memory = what == "host" and is_cuda(self.device)
        return free_bytes(CPU) if is_memory else free_on_drive_bytes(folder)

    def _where(self, what: str, folder: str) -> str:
        is_memory = what == "host" and is_cuda(self.device)
        return "in the memory of this machine" if is_memory else f"in {folder}"


def _shown(size_bytes: int) -> str:
    from remat.formats import bytes_text

    return bytes_text(size_bytes)
