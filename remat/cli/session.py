"""One invocation of the command line: where it prints, how it waits, how it fails."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

import msgspec
import typer
from rich.console import RenderableType

from remat.analysis.plan_figures import arena_text, layout_json, place
from remat.checkout import BESIDE, PACKAGE_FOLDER
from remat.graph_capture.devices.memory import is_out_of_memory
from remat.graph_capture.errors import RematError, named_as_flags
from remat.graph_capture.files import write_contents
from remat.graph_capture.graph import TrainingGraph
from remat.job.plan_source import Captured, PlanSource, open_plan
from remat.job.request import Request
from remat.progress import (
    STDOUT,
    Stopwatch,
    TerminalStopwatch,
    in_one_line,
    json_text,
    lead_nowhere,
    steady_console,
    use_simple_letters,
    when_it_began,
)
from remat.schedules.layout import Layout
from remat.schedules.outcome import Result
from remat.schedules.plan import PlanFile, RunOrder
from remat.solved import Solved, facts_of, infeasible_text
from remat.solver.result import INTERRUPTED
from remat.solver.search import is_interrupted, note_interrupt, one_job

if TYPE_CHECKING:
    from remat.graph_capture.costs.op_times import ProgressCallback


_IN_C = ("numpy", "torch")  # an exception during their import would abort the process
_SPELL_S = 0.02


@contextlib.contextmanager
def interrupts_noted(abandon: Callable[[], None] | None = None) -> Generator[None]:
    """While torch is imported `abandon` is called, if there is one; it may end the process."""
    own = signal.default_int_handler
    # Only the main thread may listen, and only where nobody else does.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not own:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        note_interrupt()
        if _is_importing():  # torch's import takes seconds, with nothing to keep: end now
            if abandon is not None:
                abandon()
            _interrupt_later()
        else:
            own(number, frame)

    lost = sys.unraisablehook

    def dropped(what: sys.UnraisableHookArgs) -> None:  # Python prints and drops what it raises
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
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in _IN_C)
    return any(getattr(spec, "_initializing", False) for spec in specs)


def _interrupt_later() -> None:
    threading.Thread(target=_wait_and_interrupt, daemon=True).start()


def _wait_and_interrupt() -> None:
    time.sleep(_SPELL_S)  # by then, a callback that dropped it has ended
    while _is_importing():
        time.sleep(_SPELL_S)
    if sys.platform == "win32":
        _thread.interrupt_main()
    else:  # the main thread may sleep, which only a true signal ends
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


_OURS = (PACKAGE_FOLDER, *(PACKAGE_FOLDER.parent / name for name in BESIDE))


@contextlib.contextmanager
def each_warning_once(tell: Callable[[str], None]) -> Generator[None]:
    """In the block, what was warned of once is not warned of again; `tell` hears remat's own."""
    # A model's forward runs several times in a verb, and torch resets what was shown.
    shown, show = set[tuple[str, str, int]](), warnings.showwarning

    def show_once(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        key = (said := str(message)), filename, lineno
        # torch tells of a backward that Ctrl-C ended, with the traceback of its forward.
        is_of_ctrl_c = is_interrupted() and said.startswith("Error detected in ")
        if key in shown or is_of_ctrl_c:
            return
        shown.add(key)
        if any(Path(filename).is_relative_to(folder) for folder in _OURS):
            tell(said)  # a line of remat's code says nothing to whoever runs a verb
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_once
    try:
        yield
    finally:
        warnings.showwarning = show


REFUSED, INFEASIBLE, CHECK_FAILED, STOPPED = 2, 3, 4, 130


class _ShownStopwatch(TerminalStopwatch):
    takes_prints = True  # else what a model prints would tear the line

    @contextlib.contextmanager
    def show(self, text: str) -> Generator[ProgressCallback]:
        self.doing = text
        with _quiet_output():
            if self.console.is_terminal:
                with super().show(text) as progress:
                    yield progress
            else:
                # In a log a line stays, so that it says how far a job came.
                self.console.print(f"{text} ...", style="dim", soft_wrap=True)
                with Stopwatch.show(self, text) as progress:
                    yield progress


@contextlib.contextmanager
def _quiet_output() -> Generator[None]:
    sys.stdout.flush()
    kept = os.dup(STDOUT)  # by descriptor, as native MILP solvers print past Python
    lead_nowhere(STDOUT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, STDOUT)
        os.close(kept)


def _is_stdout_lost() -> bool:
    """Whether standard output takes nothing more, as on a full disk; it then leads nowhere."""
    try:
        sys.stdout.write("\n")  # the buffer may be empty: nothing to flush
        sys.stdout.flush()
    except OSError:
        lead_nowhere(STDOUT)  # or Python tries again at its end, and complains
        return True
    return False


class Session:
    """Consoles, `--json` and `-v` of one command.

    Results go to standard output, all else to standard error. `as_json`: exactly one JSON object.
    """

    def __init__(self, *, as_json: bool, verbose: bool) -> None:
        self.as_json, self.verbose = as_json, verbose
        use_simple_letters()
        self.out, self.err = steady_console(), steady_console(stderr=True)
        self.stopwatch = _ShownStopwatch(self.err)
        self.stopwatch.began = when_it_began()
        self.stopwatch.seconds["start"] = self.stopwatch.elapsed_s

    def answer(
        self, said: dict[str, Any], *screen: RenderableType, layout: Layout | None = None
    ) -> None:
        """Print `said` as one JSON object, or the parts of a screen; either with a layout."""
        if self.as_json:
            self.emit(said | ({} if layout is None else {"layout": layout_json(layout)}))
            return
        placed = () if layout is None else (f"arena  {arena_text(layout)}",)
        for part in (*screen, *placed):
            self.out.print(part)

    def emit(self, said: dict[str, Any]) -> None:
        sys.stdout.write(json_text(msgspec.json.encode(said), sys.stdout.encoding) + "\n")

    def fail(self, code: int, kind: str, message: str) -> None:
        self.complain(message)
        if self.as_json:
            self.emit({"error": {"type": kind, "message": message}})
        raise typer.Exit(code)

    def conclude(self, code: int, complaints: list[str]) -> None:
        for complaint in complaints:
            self.complain(complaint)
        if complaints:
            raise SystemExit(code)

    def complain(self, message: str) -> None:
        self.err.print(in_one_line(message), style="red", soft_wrap=True)

    def warn(self, message: str) -> None:
        self.err.print(f"warning: {in_one_line(message)}", style="yellow", soft_wrap=True)

    def abandon(self) -> None:
        self.err.show_cursor()  # a spinner has hidden it
        self.complain(self._interrupted())
        os._exit(STOPPED)  # not by an exception, which would abort the import of torch in its C++

    def _interrupted(self) -> str:
        doing = self.stopwatch.doing
        return f"{INTERRUPTED} while {doing}" if doing else INTERRUPTED

    @contextlib.contextmanager
    def guarded(self) -> Generator[None]:
        abandon = None if self.as_json else self.abandon  # JSON must be one whole object
        noted = interrupts_noted(abandon), each_warning_once(self.warn)
        with named_as_flags(), one_job(), noted[0], noted[1]:
            with self._refusing():
                yield
                sys.stdout.flush()  # inside, so that a full disk is told as other errors are
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
            if is_interrupted():  # where Ctrl-C ended the search, that nothing fits is not known
                self.complain(INTERRUPTED)
                raise typer.Exit(STOPPED) from None
            raise
        except RematError as error:
            if self.verbose and error.cause is not None:  # it has torch's frames
                raise error from error.cause
            if self.verbose:
                raise
            self.fail(REFUSED, type(error).__name__, str(error))
        except (MemoryError, RuntimeError) as error:
            if self.verbose or not is_out_of_memory(error):
                raise
            # A MemoryError of Python has no text.
            said = (str(error).splitlines() or ["Python has no more"])[0]
            self.fail(REFUSED, "MemoryError", f"memory ran out: {said}")
        except OSError as error:
            if self.verbose or (error.filename is None and not _is_stdout_lost()):
                raise
            if error.filename is None and isinstance(error, BrokenPipeError):
                raise typer.Exit(REFUSED) from None  # `head` has read all that it wants
            place = error.filename or "standard output"
            self.fail(REFUSED, type(error).__name__, f"{place}: {error.strerror}")

    def save(self, path: Path | None, data: bytes, what: str, end: bytes = b"\n") -> None:
        if path is not None:
            write_contents(path, data + end)
            self.say_written(path, what)

    def say_written(self, path: Path, what: str) -> None:
        self.err.print(f"{what} written to {path}", soft_wrap=True)


# What several verbs do with an outcome: open it or end, keep it as a file, and place buffers.


def opened_feasible(session: Session, name: str, request: Request, plan: Path | None) -> PlanSource:
    """A graph and its plan, if one is named or asked for; ends where nothing fits."""
    opened = open_plan(name, request, session.stopwatch, plan)
    if opened.result is not None and opened.schedule is None:
        session.conclude(INFEASIBLE, [infeasible_text(opened.result)])
    return opened


def save_result_file(
    session: Session, path: Path | None, of: Captured, result: Result, order: RunOrder
) -> PlanFile | None:
    """A plan where a model is at hand, else the schedule alone; nothing where nothing fits."""
    if path is None or result.schedule is None:
        return None
    if of.loaded is None or of.recipe is None:
        session.save(path, result.schedule.to_json(), "plan")
        return None
    from remat.rewriter.plans.facts import make_plan  # imports torch; a shown plan needs none

    facts = facts_of(Solved(of.graph, result), order)
    plan = make_plan(of.loaded.model, of.recipe, result.schedule, **facts)
    save_plan_file(session, path, plan)
    return plan


def save_plan_file(session: Session, path: Path, plan: PlanFile) -> None:
    from remat.rewriter.plans.loading import save_plan

    save_plan(plan, path)  # not by `session.save`: the name may ask for an archive
    session.say_written(path, "plan")


def save_layout_file(
    session: Session, path: Path | None, graph: TrainingGraph, result: Result, *,
    is_asked: bool = False,
) -> Layout | None:  # fmt: skip
    """As a file too where `path` names one; None where no layout is asked for, or nothing fits."""
    # Placing is one more search, and Ctrl-C has ended those.
    if not (path or is_asked) or result.schedule is None or is_interrupted():
        return None
    with session.stopwatch.stage("place", "placing buffers"):
        layout = place(graph, result.schedule)
    session.save(path, layout.to_json(), "layout")
    return layout
