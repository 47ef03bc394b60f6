"""Calls of functions in processes of their own, which can be ended at any moment.

HiGHS, as OR-Tools 9.15 has it, heeds no interrupter: in a thread it would go on after Ctrl-C, and
abort the interpreter if that ended meanwhile. And repairs of solutions print into the user's data
(https://github.com/ERGO-Code/HiGHS/issues/2783). A process ends with the one that began it.
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
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, Generic, ParamSpec, TypeVar, cast

from remat.graph_capture.errors import SolverError

# Solvers in C++ run in daemon threads; the caller waits in short spells and hears Ctrl-C at once.

_T = TypeVar("_T")
_SPELL_S = 0.05
STOPPING_S = 5.0  # longest wait for what was told to stop


class Task(Generic[_T]):
    """One call of `work`, begun at once. Ctrl-C while it is waited for, or an error in its block,
    stops it and each task that it began."""

    def __init__(self, work: Callable[[], _T], stop: Callable[[], None] | None = None) -> None:
        self._work, self._stop = work, stop
        self._done: list[_T] = []
        self._failed: list[BaseException] = []
        self._ended, self._is_stopped = threading.Event(), False
        self._outer: Task[Any] | None = getattr(_here, "task", None)
        self._thread = threading.Thread(target=self._run, name="remat-solver", daemon=True)
        # Before the check: a stopped outer task finds it in `_running`, or the check sees that.
        _running[self] = None
        if self._outer is not None and self._outer._is_stopped:
            del _running[self]
            raise KeyboardInterrupt
        self._thread.start()

    def _run(self) -> None:
        _here.task = self
        try:
            self._done.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._failed.append(error)
        finally:
            del _running[self]
            self._ended.set()

    def __enter__(self) -> Task[_T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.stop()

    def wait(self) -> _T:
        """What `work` returned or raises; KeyboardInterrupt where the task was stopped."""
        try:
            while not self._ended.wait(_SPELL_S):
                pass
        except BaseException:
            self.stop()
            raise
        if self._is_stopped:
            raise KeyboardInterrupt
        if self._failed:
            raise self._failed[0]
        return self._done[0]

    def stop(self) -> None:
        until_s = time.monotonic() + STOPPING_S
        # In every spell, as a solver about to begin does not hear it. Others are not waited for.
        while not self._ended.is_set() and self._tell_to_stop():
            if self._ended.wait(min(_SPELL_S, STOPPING_S)) or time.monotonic() > until_s:
                return

    def end_by(self, moment_s: float) -> None:
        """`moment_s` is on the monotonic clock."""
        while self._thread.is_alive() and time.monotonic() < moment_s:
            self._tell_to_stop()
            self._thread.join(_SPELL_S)

    def _tell_to_stop(self) -> bool:
        """Whether there was anything to tell."""
        self._is_stopped = True
        # A copy: other threads begin and end tasks.
        told = [task._tell_to_stop() for task in list(_running) if task._outer is self]
        if self._stop is not None:
            self._stop()
        return self._stop is not None or any(told)


_here = threading.local()
_running: dict[Task[Any], None] = {}


@atexit.register
def _stop_all() -> None:
    moment_s = time.monotonic() + STOPPING_S  # a thread back from C++ would abort the end
    for task in list(_running):
        task.end_by(moment_s)


_P = ParamSpec("_P")
_STANDARD_OUTPUT = 1
_BEGIN = (  # Ctrl-C reaches every process of a terminal. This one ignores it: its caller decides.
    "import sys; sys.path[:] = sys.argv[1:]; import signal; "
    "signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "import remat.solver.backends.processes as apart; apart.serve()"
)
# Nor does Ctrl-C reach another group, whose process could not ignore it while it begins.
_OWN_GROUP: dict[str, Any] = {} if sys.platform == "win32" else {"process_group": 0}


class ChildEndedError(SolverError):
    """The other process could not be started, or it ended before it answered."""


class OverdueError(Exception):
    """What ran in another process did not end in its time, and was ended."""


def run_in_process(function: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
    """`function` must be importable. Raises ChildEndedError, or OverdueError by `ended_after`."""
    process = _idle_process() or _Process()
    call = functools.partial(function, *arguments, **options)
    try:
        answer = Task(lambda: process.answer(call), process.kill).wait()
    except BaseException:
        process.close()  # it may still be at work on the call
        raise
    _idle.append(process)
    return answer


def end_idle() -> None:
    while _idle:
        _idle.pop().close()


def _library_first(path: Sequence[str]) -> list[str]:
    # Folders of the user may hold a queue.py.
    library = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    library |= {place / "lib-dynload" for place in library}
    return sorted(path, key=lambda one: Path(one) not in library)


class _Process:
    """Another interpreter, which answers one call at a time."""

    def __init__(self) -> None:
        try:
            self._popen = subprocess.Popen(
                # -P: the working folder may hold a signal.py.
                [sys.executable, "-P", "-c", _BEGIN, *_library_first(sys.path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, **_OWN_GROUP,
            )  # fmt: skip
        except OSError as error:
            raise ChildEndedError(
                f"cannot start another {sys.executable or 'Python'} for HiGHS: {error.strerror}"
            ) from error

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def answer(self, call: functools.partial[_T]) -> _T:
        calls, answers = cast("IO[bytes]", self._popen.stdin), cast("IO[bytes]", self._popen.stdout)
        try:
            # Twice: the other process answers a call that it cannot unpickle with the error.
            pickle.dump(pickle.dumps(call), calls)
            calls.flush()
            has_failed, answer = pickle.load(answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ChildEndedError(
                f"the process of HiGHS ended with status {self._popen.wait()} in the middle of a "
                "program: it may have run out of memory, or crashed"
            ) from error
        if has_failed:
            raise answer
        return answer

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        self._popen.kill()
        # Leaving the block waits and closes the pipes, where bytes may find no reader.
        with contextlib.suppress(OSError), self._popen:
            pass


_idle: list[_Process] = []
atexit.register(end_idle)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # a forked child would share the pipes


def _idle_process() -> _Process | None:
    with contextlib.suppress(IndexError):
        while True:
            if (process := _idle.pop()).is_alive:
                return process
            process.close()
    return None


_answers: list[IO[bytes]] = []  # where a process that serves writes


@contextlib.contextmanager
def ended_after(seconds: float) -> Generator[None]:
    """In a process that serves, end it if the block takes longer; elsewhere without effect."""
    ending = threading.Lock()

    def end() -> None:
        if ending.acquire(blocking=False):
            _send((True, OverdueError()))
            os._exit(0)  # only the end of the process stops HiGHS

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
        ending.acquire()  # if the timer has it, nothing else may be sent


def _send(answer: tuple[bool, Any]) -> None:
    pickle.dump(answer, _answers[0])
    _answers[0].flush()


def serve() -> None:
    # HiGHS prints to standard output: answers go to a copy of it.
    _answers.append(os.fdopen(os.dup(_STANDARD_OUTPUT), "wb"))
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STANDARD_OUTPUT)
    calls: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(calls,), daemon=True).start()
    while True:
        _send(_answered(calls.get()))


def _read(calls: SimpleQueue[bytes]) -> None:
    with contextlib.suppress(EOFError):
        while True:
            calls.put(pickle.load(sys.stdin.buffer))
    os._exit(0)  # the caller has ended; HiGHS may not come back for long


def _answered(call: bytes) -> tuple[bool, Any]:
    """Whether the call failed, and what it raised or returned."""
    try:
        return False, pickle.loads(call)()
    except Exception as error:  # noqa: BLE001 - raised again where the call came from
        error.add_note("".join(traceback.format_exception(error)))  # pickling drops the traceback
        return True, error
