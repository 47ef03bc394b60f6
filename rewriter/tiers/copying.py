"""Copies by plain threads, one a link, each in the order in which copies are begun.

Four things go wrong easily here. A thread that is the last to let go of a tensor frees it late,
where no profiler looks, so a copy gets its tensors in a list that is emptied before anybody hears
of its end. An error that is raised as the thread has caught it holds frames, frames hold handles,
and these hold files, in a circle that Python's collector does not see through a tensor, so each
wait raises an error of its own. A thread that is no daemon keeps a process alive. And one that
Python ends while it is in torch's C++ aborts the process, so all are ended before Python's end.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from remat.graph_capture.errors import TierError

Work = Callable[..., None]


class Copy:
    """A copy that has begun."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Wait for its end.

        Raises
        ------
        TierError : it has failed; the cause is what it raised.
        """
        self._ended.wait()
        if self._error is not None:
            raise TierError(
                f"a value could not be copied between tiers of memory: {self._error}. Nothing of "
                "this step is kept; the module can train on"
            ) from self._error

    def settle(self) -> None:
        """Wait for its end, whatever came of it."""
        self._ended.wait()

    def carry_out(self, work: Work, given: list[Any], after: Copy | None) -> None:
        """Do the work, unless what it reads has failed; called by the thread of a link."""
        try:
            if after is not None:
                after.wait()
            work(*given)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it where the step runs
            cause = error.__cause__ or error
            self._error = cause.with_traceback(None)
            cause.__context__ = None
        finally:
            given.clear()
            self._ended.set()

    def drop(self, given: list[Any]) -> None:
        """Have it failed before it began: the process ends."""
        self._error = InterruptedError("the process ends")
        given.clear()
        self._ended.set()


class LinkThread:
    """The thread of one link. It starts with the first copy, and ends with the process."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Copy, Work, list[Any], Copy | None] | None]
        self._queue = queue.SimpleQueue()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name=f"remat-{name}", daemon=True)
        self._thread.start()

    def begin(self, work: Work, given: list[Any], after: Copy | None = None) -> Copy:
        """Begin ``work(*given)`` once all earlier copies of the link have ended, and `after`.

        `given` is emptied before the copy ends.
        """
        copy = Copy()
        self._queue.put((copy, work, given, after))
        return copy

    def end(self) -> None:
        """End after the copy that is under way; those that have not begun fail."""
        self._is_ending = True
        self._queue.put(None)

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def _run(self) -> None:
        while (begun := self._queue.get()) is not None:
            copy, work, given, after = begun
            if self._is_ending:
                copy.drop(given)
            else:
                copy.carry_out(work, given, after)
            del begun, copy, work, given, after  # an idle thread holds nothing


_threads: dict[str, LinkThread] = {}
_starting = threading.Lock()


def link_thread(name: str) -> LinkThread:
    """The thread of the link of that name; all plans of a process share it, as they do the link."""
    with _starting:
        if name not in _threads:
            _threads[name] = LinkThread(name)
        return _threads[name]


def _end_threads() -> None:
    """A copy that is begun later, by another function of `atexit`, gets a thread of its own."""
    threads = list(_threads.values())
    _threads.clear()
    for one in threads:
        one.end()
    for one in threads:
        one.join()


def _forget_threads() -> None:
    """A forked process has the threads of its parent in name only."""
    global _starting
    _starting = threading.Lock()
    _threads.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_threads)
atexit.register(_end_threads)
