"""How much memory is free: for the machine, for the container, and for this process.

The least counts: a container ends a process beyond its limit; limits of the process (``ulimit -v``,
``ulimit -d``) and torch's own share of a CUDA device make an allocation fail.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, SupportsIndex

from remat.formats import KIB, bytes_text
from remat.graph_capture.devices.known_devices import (
    CPU,
    checked_bytes,
    is_cuda,
    is_in_table,
    parse_bytes,
)
from remat.graph_capture.errors import BudgetError, option
from remat.graph_capture.spill_files import free_on_drive_bytes, host_folder, require_writable

MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
CGROUP_OF_SELF = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
VM_STAT = ("/usr/bin/vm_stat",)  # says it on macOS
_SHORT = (  # what a `RuntimeError` says where memory ran out; a new thread needs room for its stack
    "can't allocate memory", "not enough memory", "out of memory", "bad_alloc",
    "can't start new thread", "Resource temporarily unavailable",
)  # fmt: skip


def free_bytes(device: str = CPU) -> int:
    """Bytes that new work may take, on a CPU without swapping. BudgetError if nobody says so."""
    if is_cuda(device):
        return _free_on_cuda(device)
    return max(0, min([_free_on_the_machine(), *_free_in_cgroups(), *_free_of_the_process()]))


def _free_on_the_machine() -> int:
    found = _field(MEMINFO, "MemAvailable")  # of Linux
    for asked in (_free_on_windows, _free_on_macos, _free_by_sysconf):
        found = asked() if found is None else found
        if found is not None:
            return found
    raise BudgetError("budget 'auto': this system does not say what memory is free; give a size")


class _WindowsMemory(ctypes.Structure):
    """``MEMORYSTATUSEX``: two words of 32 bits, then seven of 64."""

    _fields_ = (
        ("length", ctypes.c_uint32), ("load", ctypes.c_uint32), ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64), ("others", ctypes.c_uint64 * 5),
    )  # fmt: skip


def _free_on_windows() -> int | None:
    if sys.platform != "win32":
        return None
    found = _WindowsMemory(length=ctypes.sizeof(_WindowsMemory))  # Windows refuses one without it
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(found)):
        return None
    return int(found.available)


def _free_on_macos() -> int | None:
    if sys.platform != "darwin":
        return None
    try:
        told = subprocess.run(VM_STAT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    size = re.search(r"page size of (\d+) bytes", told)
    # Inactive and speculative pages are taken back before anything is swapped out.
    pages = re.findall(r"^Pages (?:free|inactive|speculative): +(\d+)\.", told, re.MULTILINE)
    return sum(map(int, pages)) * int(size[1]) if size and pages else None


def _free_by_sysconf() -> int | None:
    pages, names = "SC_AVPHYS_PAGES", getattr(os, "sysconf_names", ())
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if pages in names else None


def _free_of_the_process() -> Iterator[int]:
    try:
        import resource
    except ImportError:  # no such limits on this system
        return
    for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most_bytes = resource.getrlimit(limit)[0]
        used_bytes = _field(STATUS, used)
        if most_bytes != resource.RLIM_INFINITY and used_bytes is not None:
            yield most_bytes - used_bytes


def _free_in_cgroups() -> Iterator[int]:
    """What is left in the process's control groups and all above them, of either version."""
    try:
        lines = CGROUP_OF_SELF.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2 has one line without names of controllers
            yield from _left_in(CGROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _left_in(CGROUPS / "memory", path, *names)


def _left_in(root: Path, path: str, limit: str, usage: str, cached: str) -> Iterator[int]:
    group = root / path.lstrip("/")  # the root is the container's own group
    below = [one for one in (group, *group.parents) if one != root and root in one.parents]
    for folder in (root, *(root / part for part in below)):
        most_bytes, used_bytes = _number(folder / limit), _number(folder / usage)
        if most_bytes is not None and used_bytes is not None:
            # Pages of files that nobody uses are given back before the limit is held to be hit.
            unused_bytes = _found_in(folder / "memory.stat", rf"^{cached} (\d+)$") or 0
            yield most_bytes - used_bytes + unused_bytes


def _number(path: Path) -> int | None:
    """The number in a file; None where it is not there, or says ``max``."""
    return _found_in(path, r"\A\s*(\d+)\s*\Z")


def _found_in(path: Path, pattern: str) -> int | None:
    try:
        found = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def _field(path: Path, name: str) -> int | None:
    """A field in kB of a file in /proc, in bytes; None where it is not there."""
    found = _found_in(path, rf"^{name}:\s+(\d+) kB")
    return None if found is None else found * KIB


def _free_on_cuda(device: str) -> int:
    import torch

    if not torch.cuda.is_available():
        raise BudgetError(f"budget 'auto': {device} is not here to say what is free; give a size")
    reserved_bytes = torch.cuda.memory_reserved(device)
    unused_bytes = reserved_bytes - torch.cuda.memory_allocated(device)  # held unused, for new work
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    part = torch.cuda.get_per_process_memory_fraction(device)
    own_bytes = int(part * total_bytes) - reserved_bytes  # `set_per_process_memory_fraction` says
    return max(0, min(free_bytes, own_bytes)) + unused_bytes


def is_out_of_memory(error: BaseException) -> bool:
    # torch's class by its name, as this file is read without torch.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SHORT)


# How much memory below the device a plan may use: `host="120GiB"`, `nvme="/mnt/nvme:200GiB"`.

AUTO, AUTO_SHARE = "auto", 0.9  # of what is free; the rest is for others
_HOST_FORMS = "120GiB, 64GB or auto"
_NVME_FORM = "/mnt/nvme:200GiB"


class LowerTiers(NamedTuple):
    """Room below a device, and the folder of files on NVMe; 0 bytes there without one."""

    host_bytes: int
    nvme_bytes: int = 0
    nvme_path: str = ""


def lower_tiers(
    host: str | SupportsIndex | None, nvme: str | None, device: str, *, is_here: bool | None = None
) -> LowerTiers | None:
    """What is asked for in bytes, None for nothing. BudgetError for a size that cannot be read, or
    is more than there is; TierError where the system cannot keep values in files."""
    if host is None and nvme is None:
        return None
    if host is None:
        raise BudgetError(
            f"pass {option('host', '16GiB')} too: {option('nvme', nvme)} lies below the host, and "
            "copies to it pass through the host"
        )
    # A device of the table may be in any machine, whose memory cannot be looked at.
    is_here = not is_in_table(device) if is_here is None else is_here
    if is_here and device == CPU:
        require_writable(host_folder())
    below = _Machine(device, is_here)
    host_bytes = below.size_bytes(host, "host", _HOST_FORMS, host_folder())
    if nvme is None:
        return LowerTiers(host_bytes)
    folder, size = _folder_and_size(nvme)
    if is_here:
        require_writable(folder, "nvme")
    return LowerTiers(host_bytes, below.size_bytes(size, "nvme", _NVME_FORM, folder), folder)


def _folder_and_size(nvme: str) -> tuple[str, str]:
    """Both parts of ``/mnt/nvme:200GiB``."""
    if not isinstance(nvme, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BudgetError(f"nvme {nvme!r} names no folder: write it like {_NVME_FORM}")
    folder, parted, size = nvme.rpartition(":")  # a folder's name may have one too
    if not parted and nvme[:1] in "/.~":
        raise BudgetError(f"nvme {nvme!r} names no size: write it like {_NVME_FORM}")
    if not folder:
        raise BudgetError(f"nvme {nvme!r} names no folder: write it like {_NVME_FORM}")
    return folder, size


class _Machine(NamedTuple):
    device: str
    is_here: bool

    def size_bytes(self, given: str | SupportsIndex, what: str, forms: str, folder: str) -> int:
        if isinstance(given, str) and given.strip().lower() == AUTO:
            if not self.is_here:
                raise BudgetError(
                    f"give a size for {what}, such as {forms.partition(',')[0]}: 'auto' means "
                    f"what this machine has free, and {self.device} is not here"
                )
            return int(self._free_bytes(what, folder) * AUTO_SHARE)
        if isinstance(given, str):
            size_bytes = parse_bytes(given.strip(), what, forms)
        else:
            size_bytes = checked_bytes(given, what, forms)
        if size_bytes <= 0:
            raise BudgetError(
                f"give a positive size for {what}, or leave it out: {given!r} leaves nothing to use"
            )
        free = self._free_bytes(what, folder) if self.is_here else size_bytes
        if size_bytes > free:
            auto = AUTO if what == "host" else f"{folder}:{AUTO}"
            where = "the memory of this machine" if self._is_memory(what) else folder
            raise BudgetError(
                f"give less, or {auto}: {what} {given!r} is more than the {bytes_text(free)} that "
                f"are free in {where}"
            )
        return size_bytes

    def _is_memory(self, what: str) -> bool:
        return what == "host" and is_cuda(self.device)  # on a CPU the host's tier is files

    def _free_bytes(self, what: str, folder: str) -> int:
        return free_bytes(CPU) if self._is_memory(what) else free_on_drive_bytes(folder)
