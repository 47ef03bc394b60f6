"""How Ctrl-C reaches a verb: noted at once, and not raised while torch is imported."""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType

from remat.solver.interrupts import note_interrupt

IN_C = ("numpy", "torch")
"""Packages whose import an exception must not end: their C++ would abort the process."""
SPELL_S = 0.02


@contextlib.contextmanager
def interrupts_noted(abandon: Callable[[], None] | None = None) -> Generator[None]:
    """Note Ctrl-C at once, and raise it again where Python lost it.

    What is raised while Python lets go of an object is printed and dropped; it is not here.
    While torch is imported, which takes many seconds the first time, `abandon` is called, if there
    is one; it may end the process. Ctrl-C is raised once torch is there. Nothing is changed where
    somebody else listens to the signal.
    """
    own = signal.default_int_handler
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not own:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        note_interrupt()
        if _is_importing():
            if abandon is not None:
                abandon()
            _interrupt_later()
        else:
            own(number, frame)

    lost = sys.unraisablehook

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            _interrupt_later()
        else:
            lost(what)

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = lost
        signal.signal(signal.SIGINT, own)


def _is_importing() -> bool:
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in IN_C)
    return any(getattr(spec, "_initializing", False) for spec in specs)


def _interrupt_later() -> None:
    threading.Thread(target=_wait_and_interrupt, daemon=True).start()


def _wait_and_interrupt() -> None:
    time.sleep(SPELL_S)  # by then, a callback that dropped it has ended
    while _is_importing():
        time.sleep(SPELL_S)
    if sys.platform == "win32":
        _thread.interrupt_main()
    else:  # the main thread may sleep, which only a true signal ends
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
