"""The `remat` command: what comes before its verbs are imported, which takes half a second."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator


def command() -> None:
    """Entry point of the `remat` command."""
    with ended_by_ctrl_c():
        from remat.progress import note_start

        note_start()
        from remat.cli.main import main as run_verb
    run_verb()


@contextlib.contextmanager
def ended_by_ctrl_c() -> Generator[None]:
    """In the block, Ctrl-C ends the process without a traceback: there is nothing to keep yet.

    A shell sees exit code 130, as it does later.
    """
    own, is_main = signal.default_int_handler, threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not own:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)
