"""One invocation of the command line: where it prints, how it waits, how it fails."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from remat.graph_capture.errors import FileError, RematError
from remat.job.stopwatch import Shown, Stopwatch

REFUSED, INFEASIBLE, CHECK_FAILED = 2, 3, 4
STDOUT = 1


class ShownStopwatch(Stopwatch):
    """Shows each stage with a spinner and, where a total is known, a bar, on standard error."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    @contextlib.contextmanager
    def show(self, text: str) -> Generator[Shown]:
        """A line that goes away when the stage is done; kept where no terminal shows it."""
        with _quiet_output():
            if self.console.is_terminal:
                with self._live(text) as progress:
                    yield progress
            else:
                self.console.print(f"{text} ...", style="dim", markup=False, soft_wrap=True)
                with super().show(text) as progress:
                    yield progress

    @contextlib.contextmanager
    def _live(self, text: str) -> Generator[Shown]:
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20)
        with Progress(
            *columns, TimeElapsedColumn(), console=self.console, transient=True
        ) as progress:
            task = progress.add_task(text, total=None)

            def update(done: int = 0, total: int | None = None, *, text: str = "") -> None:
                progress.update(task, completed=done, total=total, description=text or None)

            yield update


@contextlib.contextmanager
def _quiet_output() -> Generator[None]:
    """Keep standard output for results.

    What the user's model prints goes to standard error; what native libraries print, as
    the MILP solvers do, goes nowhere.
    """
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), STDOUT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, STDOUT)
        os.close(kept)


class Session:
    """Consoles, `--json` and `--debug` of one command.

    Results go to standard output, progress and errors to standard error. With `as_json`
    standard output carries exactly one JSON object.
    """

    def __init__(self, *, as_json: bool, debug: bool) -> None:
        self.as_json, self.debug = as_json, debug
        self.out = Console(highlight=False)
        self.err = Console(stderr=True, highlight=False)
        self.stopwatch = ShownStopwatch(self.err)

    def emit(self, said: dict[str, Any]) -> None:
        """Print the one JSON object."""
        sys.stdout.write(msgspec.json.encode(said).decode() + "\n")

    def fail(self, code: int, kind: str, message: str) -> None:
        """Say in one line what went wrong, and end with `code`."""
        self.complain(message)
        if self.as_json:
            self.emit({"error": {"type": kind, "message": message}})
        raise typer.Exit(code)

    def conclude(self, code: int, complaints: list[str]) -> None:
        """Say each complaint and end with `code`; do nothing where there is none."""
        for complaint in complaints:
            self.complain(complaint)
        if complaints:
            raise SystemExit(code)

    def complain(self, message: str) -> None:
        """One red line on standard error."""
        self.err.print(message, style="red", markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def guarded(self) -> Generator[None]:
        """Turn errors meant for the user into one line and exit code 2."""
        try:
            yield
        except RematError as error:
            if self.debug:
                raise
            self.fail(REFUSED, type(error).__name__, str(error))
        except OSError as error:
            if self.debug or error.filename is None:
                raise
            self.fail(REFUSED, type(error).__name__, f"{error.filename}: {error.strerror}")

    def require_folder(self, path: Path | None) -> None:
        """Refuse a file that cannot be written, before work is done for it.

        Raises
        ------
        FileError : its folder is not there, or is not writable; or it is a folder itself.
        """
        if path is None:
            return
        folder = path.parent
        if not folder.is_dir():
            raise FileError(f"{folder}: No such folder, so {path.name} cannot be written there")
        if path.is_dir():
            raise FileError(f"{path} is a folder: name a file in it")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise FileError(f"{path} cannot be written: {folder} is not writable for you")

    def save(self, path: Path | None, data: bytes, what: str) -> None:
        """Write a file and say so, unless there is no path."""
        if path is None:
            return
        path.write_bytes(data + b"\n")
        self.err.print(f"{what} written to {path}", markup=False)
