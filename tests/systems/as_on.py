"""Runs `remat` as on another system: `python -m tests.systems.as_on windows run model.py -o out`.

Modules that the other system lacks cannot be imported, and nothing can be opened below /proc and
/sys. Functions and numbers of `os`, `signal` and `mmap` that it lacks are hidden from remat's own
code alone: Python's library and torch have ways of their own there, which are not here. Costs are
those of `tests/fixed_costs.py`.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib.abc
import io
import mmap
import os
import signal
import sys
import types
from collections.abc import Callable
from types import ModuleType
from typing import Any

WITHOUT_PROC = ("/proc", "/sys")
FREE_BYTES = 4 << 30
VM_STAT = f"""Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:{" " * 30}{FREE_BYTES // 16384 - 300}.
Pages active:{" " * 28}123456.
Pages inactive:{" " * 26}200.
Pages speculative:{" " * 23}100.
Pages wired down:{" " * 24}7777.
"""
MODULES = {
    "windows": {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog"},
    "darwin": set[str](),
}
ONLY_ON_LINUX = {
    "O_TMPFILE", "O_DIRECT", "memfd_create", "posix_fallocate", "posix_fadvise", "pipe2",
    "sched_getaffinity", "sched_setaffinity", "pidfd_open", "copy_file_range", "splice", "eventfd",
    "MAP_POPULATE", "SIGPWR", "SIGSTKFLT",
}  # fmt: skip
"""Names that macOS lacks, and so does Windows."""
NOT_ON_WINDOWS = {
    "O_CLOEXEC", "O_NONBLOCK", "O_NOFOLLOW", "O_DIRECTORY", "O_SYNC", "O_DSYNC", "fork", "forkpty",
    "killpg", "setsid", "getsid", "getpgid", "getpgrp", "setpgid", "getuid", "geteuid", "getgid",
    "getegid", "getgroups", "uname", "pread", "pwrite", "preadv", "pwritev", "readv", "writev",
    "sendfile", "statvfs", "fstatvfs", "fchmod", "fchown", "chown", "lchown", "fchdir", "sysconf",
    "sysconf_names", "confstr", "register_at_fork", "getloadavg", "nice", "mkfifo", "mknod",
    "posix_spawn", "posix_spawnp", "wait", "wait3", "wait4", "waitid", "ctermid", "ttyname",
    "openpty", "lockf", "sync", "getpriority", "setpriority", "get_blocking", "set_blocking",
    "MAP_SHARED", "MAP_PRIVATE", "MAP_ANON", "MAP_ANONYMOUS", "PROT_READ", "PROT_WRITE",
    "PROT_EXEC", "MADV_DONTNEED", "SIGKILL", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT",
    "SIGCHLD", "SIGSTOP", "SIGCONT", "SIGPIPE", "alarm", "setitimer", "getitimer", "pause",
    "pthread_kill", "pthread_sigmask", "sigwait", "siginterrupt",
}  # fmt: skip
HIDDEN = {"windows": ONLY_ON_LINUX | NOT_ON_WINDOWS, "darwin": ONLY_ON_LINUX}
PLATFORM = {"windows": "win32", "darwin": "darwin"}


class _Missing(importlib.abc.MetaPathFinder):
    """Refuses modules that the system does not have."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> None:
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hide_modules(names: set[str]) -> None:
    """Have them as on a system without: not even those that are loaded are found."""
    for name in names:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Missing(names))


def _is_ours(depth: int) -> bool:
    name: str = sys._getframe(depth).f_globals.get("__name__", "")
    return name.partition(".")[0] == "remat"


def show_ours(module: ModuleType, hidden: set[str], shown: dict[str, Any]) -> None:
    """Hide names of a module from remat's code, and show it others in their place."""

    class Seen(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            if (name in hidden or name in shown) and _is_ours(2):
                if name in shown:
                    return shown[name]
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return super().__getattribute__(name)

    module.__class__ = Seen


def hide_folders() -> None:
    """Nothing is there below /proc and /sys, for whatever Python asks."""

    def blind(real: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *given: Any, **more: Any) -> Any:
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(WITHOUT_PROC):
                raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
            return real(path, *given, **more)

        return called

    builtins.open = io.open = blind(open)
    for name in ("open", "stat", "lstat", "listdir", "scandir", "access", "readlink"):
        setattr(os, name, blind(getattr(os, name)))


class Kernel32:
    """A machine with that much free."""

    def GlobalMemoryStatusEx(self, found: Any) -> int:  # noqa: N802
        """Fill ``MEMORYSTATUSEX``: two words of 32 bits, then the total and what is free."""
        memory = (ctypes.c_uint64 * 8).from_address(ctypes.addressof(found._obj))
        assert memory[0] & 0xFFFFFFFF == ctypes.sizeof(memory)
        memory[1], memory[2] = 2 * FREE_BYTES, FREE_BYTES
        return 1


def become(system: str) -> None:
    """Look like that system from here on."""
    hide_modules(MODULES[system])
    hide_folders()
    for module in (os, signal, mmap):
        show_ours(module, HIDDEN[system], {})
    show_ours(sys, set(), {"platform": PLATFORM[system]})
    if system == "windows":
        ctypes.windll = types.SimpleNamespace(kernel32=Kernel32())  # type: ignore[attr-defined]


def main() -> None:
    """Become the system that the first word names, and do what the others ask of `remat`."""
    system, *words = sys.argv[1:]
    if system != "linux":
        become(system)
    from remat.cli.main import main as run_verb
    from remat.graph_capture.devices import memory as device_memory
    from tests.fixed_costs import REPLACED, patched

    device_memory.VM_STAT = ("printf", VM_STAT)
    sys.argv = ["remat", *words]
    with patched(REPLACED):
        run_verb()


if __name__ == "__main__":
    main()
