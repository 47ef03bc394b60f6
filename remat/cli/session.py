"""One invocation of the command line: where it prints, how it waits, how it fails."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from remat.cli.interrupting import interrupts_noted
from remat.cli.warned import each_warning_once
from remat.graph_capture.devices.free_memory import is_out_of_memory
from remat.graph_capture.errors import RematError, named_as_flags
from remat.graph_capture.files.contents import check_writable, write_contents
from remat.screen.since_start import when_it_began
from remat.screen.stages import Stopwatch, TerminalStopwatch
from remat.screen.terminal import (
    STDOUT,
    in_one_line,
    json_text,
    lead_nowhere,
    steady_console,
    use_simple_letters,
)
from remat.solver.interrupts import is_interrupted, one_job
from remat.solver.result import INTERRUPTED

if TYPE_CHECKING:
    from remat.graph_capture.tracing.trace import Shown

REFUSED, INFEASIBLE, CHECK_FAILED, STOPPED = 2, 3, 4, 130


class ShownStopwatch(TerminalStopwatch):
    """Shows each stage on standard error, also where that is no terminal."""

    takes_prints = True

    @contextlib.contextmanager
    def show(self, text: str) -> Generator[Shown]:
        """A line that goes away when the stage is done; kept where no terminal shows it."""
        self.doing = text
        with _quiet_output():
            if self.console.is_terminal:
                with super().show(text) as progress:
                    yield progress
            else:
                self.console.print(f"{text} ...", style="dim", soft_wrap=True)
                with Stopwatch.show(self, text) as progress:
                    yield progress


@contextlib.contextmanager
def _quiet_output() -> Generator[None]:
    """Keep standard output for results.

    What the user's model prints goes to standard error; what native libraries print, as
    the MILP solvers do, goes nowhere.
    """
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    lead_nowhere(STDOUT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, STDOUT)
        os.close(kept)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["Python has no more"])[0]


def _is_stdout_lost() -> bool:
    """Whether standard output takes nothing more, as on a full disk; it then leads nowhere."""
    try:
        # What could not be written may be gone from its buffer, so there may be nothing to flush.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        # Else Python tries it again at its end, and complains of it in its own words.
        lead_nowhere(STDOUT)
        return True
    return False


class Session:
    """Consoles, `--json` and `--debug` of one command.

    Results go to standard output, progress and errors to standard error. With `as_json`
    standard output carries exactly one JSON object.
    """

    def __init__(self, *, as_json: bool, debug: bool) -> None:
        self.as_json, self.debug = as_json, debug
        use_simple_letters()
        self.out = steady_console()
        self.err = steady_console(stderr=True)
        self.stopwatch = ShownStopwatch(self.err)
        self.stopwatch.began = when_it_began()
        self.stopwatch.seconds["start"] = self.stopwatch.elapsed_s

    def emit(self, said: dict[str, Any]) -> None:
        """Print the one JSON object."""
        sys.stdout.write(json_text(msgspec.json.encode(said), sys.stdout.encoding) + "\n")

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
        self.err.print(in_one_line(message), style="red", soft_wrap=True)

    def warn(self, message: str) -> None:
        """One yellow line on standard error."""
        self.err.print(f"warning: {in_one_line(message)}", style="yellow", soft_wrap=True)

    def abandon(self) -> None:
        """End the process at once, on Ctrl-C before there is anything to keep."""
        self.err.show_cursor()
        self.complain(self._interrupted())
        os._exit(STOPPED)

    def _interrupted(self) -> str:
        doing = self.stopwatch.doing
        return f"{INTERRUPTED} while {doing}" if doing else INTERRUPTED

    @contextlib.contextmanager
    def guarded(self) -> Generator[None]:
        """Turn errors meant for the user into one line and exit code 2, and Ctrl-C into 130."""
        abandon = None if self.as_json else self.abandon
        noted = interrupts_noted(abandon), each_warning_once(self.warn)
        with named_as_flags(), one_job(), noted[0], noted[1]:
            with self._refusing():
                yield
                sys.stdout.flush()
            if is_interrupted():
                self.complain(f"{INTERRUPTED}: this is the best that was found until then")
                raise typer.Exit(STOPPED)

    @contextlib.contextmanager
    def _refusing(self) -> Generator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.fail(STOPPED, "KeyboardInterrupt", self._interrupted())
        except SystemExit:
            # Where Ctrl-C ended the search, that nothing fits is not known.
            if is_interrupted():
                self.complain(INTERRUPTED)
                raise typer.Exit(STOPPED) from None
            raise
        except RematError as error:
            if self.debug and error.cause is not None:
                raise error from error.cause
            if self.debug:
                raise
            self.fail(REFUSED, type(error).__name__, str(error))
        except (MemoryError, RuntimeError) as error:
            if self.debug or not is_out_of_memory(error):
                raise
            self.fail(REFUSED, "MemoryError", f"memory ran out: {_first_line(error)}")
        except OSError as error:
            if self.debug or (error.filename is None and not _is_stdout_lost()):
                raise
            if error.filename is None and isinstance(error, BrokenPipeError):
                # As of `head`, which has read all that it wants: nobody need be told.
                raise typer.Exit(REFUSED) from None
            place = error.filename or "standard output"
            self.fail(REFUSED, type(error).__name__, f"{place}: {error.strerror}")

    def require_folder(self, path: Path | None) -> None:
        """Refuse a file that cannot be written, before work is done for it.

        Raises
        ------
        FileError : its folder is not there or not writable, it is write-protected, or a folder.
        """
        if path is not None:
            check_writable(path)

    def save(self, path: Path | None, data: bytes, what: str) -> None:
        """Write a file and say so, unless there is no path."""
        if path is None:
            return
        write_contents(path, data + b"\n")
        self.err.print(f"{what} written to {path}", soft_wrap=True)
