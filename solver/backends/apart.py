"""Calls of functions in processes of their own, which can be ended at any moment.

HiGHS, as OR-Tools 9.15 has it, needs that, for two reasons. It heeds no interrupter: in a
thread it would go on after Ctrl-C, and abort the interpreter if that ended meanwhile. And some
repairs of solutions print a line to standard output, into the user's data, whatever the options
say (https://github.com/ERGO-Code/HiGHS/issues/2783). A process waits for its next call, and
ends with the one that began it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import subprocess
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, ParamSpec, TypeVar, cast

from remat.graph_capture.errors import SolverError
from remat.solver.backends.background import Task

P = ParamSpec("P")
T = TypeVar("T")
STANDARD_OUTPUT = 1
BEGIN = (
    "import sys; sys.path[:] = sys.argv[1:]; import signal; "
    "signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "import remat.solver.backends.apart as apart; apart.serve()"
)
"""Ctrl-C reaches every process of a terminal. This one ignores it: its caller decides."""
OWN_GROUP: dict[str, Any] = {} if sys.platform == "win32" else {"process_group": 0}
"""Nor does Ctrl-C reach a process of another group, which could not ignore it while it begins."""


class ChildEndedError(SolverError):
    """The other process could not be started, or it ended before it answered."""


class OverdueError(Exception):
    """What ran in another process did not end in its time, and was ended with the process."""


def run_apart(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """What `function`, which must be importable, returns or raises in another process.

    Raises
    ------
    ChildEndedError : the process cannot be started, or it crashed. OverdueError : `function` was
        in a block of `ended_after` for too long.
    """
    process = _idle_process() or _Process()
    call = functools.partial(function, *arguments, **options)
    try:
        answer = Task(lambda: process.answer(call), process.kill).wait()
    except BaseException:
        process.close()
        raise
    _idle.append(process)
    return answer


def end_idle() -> None:
    """End the processes that wait for a call."""
    while _idle:
        _idle.pop().close()


def _library_first(path: Sequence[str]) -> list[str]:
    """Where to import from, Python's own library first: folders of the user may hold a queue.py."""
    library = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    library |= {place / "lib-dynload" for place in library}
    return sorted(path, key=lambda one: Path(one) not in library)


class _Process:
    """Another interpreter, which answers one call at a time."""

    def __init__(self) -> None:
        try:
            self._popen = subprocess.Popen(
                # -P: the working folder may hold a signal.py.
                [sys.executable, "-P", "-c", BEGIN, *_library_first(sys.path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, **OWN_GROUP,
            )  # fmt: skip
        except OSError as error:
            raise ChildEndedError(
                f"cannot start another {sys.executable or 'Python'} for HiGHS: {error.strerror}"
            ) from error

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def answer(self, call: functools.partial[T]) -> T:
        """Send `call`, wait for what it returns or raises."""
        calls, answers = cast("IO[bytes]", self._popen.stdin), cast("IO[bytes]", self._popen.stdout)
        try:
            pickle.dump(pickle.dumps(call), calls)
            calls.flush()
            has_failed, answer = pickle.load(answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ChildEndedError(
                f"the process of HiGHS ended with status {self._popen.wait()} amid a program: "
                "it may have run out of memory, or crashed"
            ) from error
        if has_failed:
            raise answer
        return answer

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        self._popen.kill()
        with contextlib.suppress(OSError), self._popen:
            pass


_idle: list[_Process] = []
atexit.register(end_idle)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)


def _idle_process() -> _Process | None:
    with contextlib.suppress(IndexError):
        while True:
            process = _idle.pop()
            if process.is_alive:
                return process
            process.close()
    return None


_answers: list[IO[bytes]] = []
"""Where a process that serves writes; empty in all others."""


@contextlib.contextmanager
def ended_after(seconds: float) -> Generator[None]:
    """In a process that serves: end it if the block takes longer; its caller gets `OverdueError`.

    Elsewhere the block takes the time that it takes.
    """
    ending = threading.Lock()

    def end() -> None:
        if ending.acquire(blocking=False):
            _send((True, OverdueError()))
            os._exit(0)

    if not _answers:
        yield
        return
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # If the timer has it, the process is about to end: nothing else may be sent.
        ending.acquire()


def _send(answer: tuple[bool, Any]) -> None:
    pickle.dump(answer, _answers[0])
    _answers[0].flush()


def serve() -> None:
    """Answer calls until standard input ends. What they print goes nowhere."""
    _answers.append(os.fdopen(os.dup(STANDARD_OUTPUT), "wb"))
    os.dup2(os.open(os.devnull, os.O_WRONLY), STANDARD_OUTPUT)
    calls: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(calls,), daemon=True).start()
    while True:
        _send(_answered(calls.get()))


def _read(calls: SimpleQueue[bytes]) -> None:
    """Pass on the calls that come in. When no more can come, end the process at once."""
    with contextlib.suppress(EOFError):
        while True:
            calls.put(pickle.load(sys.stdin.buffer))
    os._exit(0)


def _answered(call: bytes) -> tuple[bool, Any]:
    """Whether the call failed, and what it raised or returned."""
    try:
        return False, pickle.loads(call)()
    except Exception as error:  # noqa: BLE001 - raised again where the call came from
        error.add_note("".join(traceback.format_exception(error)))
        return True, error
