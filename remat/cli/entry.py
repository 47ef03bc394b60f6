"""The `remat` command: what comes before its verbs are imported, which takes half a second."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator


def command() -> None:
    with ended_by_ctrl_c():
        from remat.progress import note_start

        note_start()
        from remat.cli.main import main as run_verb
    run_verb()  # outside of the block: a verb has a session, which answers Ctrl-C itself


@contextlib.contextmanager
def ended_by_ctrl_c() -> Generator[None]:
    own, is_main = signal.default_int_handler, threading.current_thread() is threading.main_thread()
    # Only the main thread may set it, and where somebody else listens, that stays.
    if not is_main or signal.getsignal(signal.SIGINT) is not own:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to keep yet; a shell sees exit code 130
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)
