"""A measurement in a process of its own, forked from one that has only imported.

The imports take seconds, and a suite has some 300 rows: each importing by itself would take a
quarter of an hour.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

Answer = dict[str, Any]


class OwnProcesses:
    """Starts processes, all with the same settings in their environment.

    A process can make only one of these: its fork server reads the environment when it starts.
    """

    def __init__(self, settings: Mapping[str, str], limit_s: float) -> None:
        os.environ.update(settings)
        self.limit_s = limit_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.comparison.preloaded"])

    def answer(self, function: Callable[..., Answer], *args: Any) -> Answer:
        """What the function returns; an `error` where it raised, died or took too long."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_send, args=(theirs, function, args))
        process.start()
        theirs.close()
        try:
            if not ours.poll(self.limit_s):
                return {"error": f"not done after {self.limit_s:.0f} s"}
            return ours.recv()
        except EOFError:
            process.join()
            return {"error": f"ended with status {process.exitcode}"}
        finally:
            process.kill()
            process.join()


def _send(connection: Connection, function: Callable[..., Answer], args: tuple[Any, ...]) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        try:
            connection.send(function(*args))
        except Exception as error:  # noqa: BLE001 - told to the driver
            connection.send({"error": _cause(error)})


def _cause(error: Exception) -> str:
    """The last line of the report that names an error, since compilers wrap errors of others."""
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return next((line for line in reversed(lines) if "Error" in line), lines[-1])
