"""How the stages of planning are named, timed and shown to the person who waits.

A terminal has one line, with what is done and a clock that counts from the beginning; where there
is none, the log has a line a stage. Called from Python, a plan ends in one line that says what it
is, unless ``verbose=False``.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING

from remat.formats import percent_text

if TYPE_CHECKING:
    from rich import progress as rich_progress
    from rich.console import Console

    from remat.graph_capture.tracing.trace import Shown
    from remat.solver.search import Progress

_LOG = logging.getLogger("remat")
LEAST_S = 0.05
"""Stages that took less are not shown."""


class Stopwatch:
    """Names and times the stages of a job, and shows nothing."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        """Since the job began."""
        return time.perf_counter() - self.began

    def accounted(self) -> dict[str, float]:
        """Seconds of each stage, and those that were in none."""
        other_s = self.elapsed_s - sum(self.seconds.values())
        return {**self.seconds, "other": max(0.0, other_s)}

    @contextlib.contextmanager
    def stage(self, name: str, text: str) -> Generator[Shown]:
        """Time what runs inside under `name`; `text` is for the person who waits."""
        start = time.perf_counter()
        try:
            with self.show(text) as progress:
                yield progress
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def show(self, text: str) -> Generator[Shown]:
        """Show `text` while the stage runs."""
        del text
        yield _silent

    def say(self, text: str) -> None:
        """Say in one line what came of it."""


class LoggedStopwatch(Stopwatch):
    """Logs each stage as it begins, and what came of it."""

    @contextlib.contextmanager
    def show(self, text: str) -> Generator[Shown]:
        """One line of the log."""
        _LOG.info("%s ...", text)
        yield _silent

    def say(self, text: str) -> None:
        """One line of the log."""
        _LOG.info("%s", text)


class TerminalStopwatch(Stopwatch):
    """Shows each stage with a spinner, the clock and, where a total is known, a bar."""

    takes_prints = False
    """Whether what is printed meanwhile goes above the line. Where planning is called from Python,
    the standard streams stay what the user's code has read."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console, self.doing = console, ""

    @contextlib.contextmanager
    def show(self, text: str) -> Generator[Shown]:
        """A line that goes away when the stage is done."""
        self.doing = text
        with self._line() as progress:
            task = progress.add_task(text, total=None)
            most = 0.0

            def update(done: int = 0, total: int | None = None, *, text: str = "") -> None:
                nonlocal most
                # What is named anew begins anew; else a bar does not run back.
                most = done if text else max(most, done)
                progress.update(task, completed=most, total=total, description=text or None)

            yield update

    def say(self, text: str) -> None:
        """One line that stays."""
        self.console.print(text, soft_wrap=True)

    def _line(self) -> rich_progress.Progress:
        from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
        from rich.text import Text

        from remat.screen.terminal import is_simple

        clock = self

        class Clock(ProgressColumn):
            def render(self, task: object) -> Text:
                del task
                return Text(f"{clock.elapsed_s:.0f} s", style="progress.elapsed")

        spinner = SpinnerColumn("line" if is_simple(self.console) else "dots")
        # A description holds names, which are no markup.
        columns = spinner, TextColumn("{task.description}", markup=False), BarColumn(20), Clock()
        return Progress(
            *columns, console=self.console, transient=True,
            redirect_stdout=self.takes_prints, redirect_stderr=self.takes_prints,
        )  # fmt: skip


def took_text(seconds: Mapping[str, float]) -> str:
    """What each stage took, and all together."""
    shown = [f"{name} {one_s:.1f} s" for name, one_s in seconds.items() if one_s >= LEAST_S]
    return f"{sum(seconds.values()):.1f} s: {', '.join(shown)}"


def solver_shown(shown: Shown, budget: object) -> Callable[[Progress], None]:
    """A listener of a search that has `shown` say how far it is."""
    return lambda state: shown(text=solver_text(budget, state))


def solver_text(budget: object, state: Progress) -> str:
    """What is shown while it solves: best schedule, bound and gap, and what comes next."""
    best = "none" if state.best_overhead is None else percent_text(state.best_overhead)
    bound = percent_text(state.bound_overhead)
    gap = "open" if state.gap is None else percent_text(state.gap)
    return f"solving for {budget}: best {best}, bound {bound}, gap {gap}, {state.doing}"


def stopwatch_of_call(*, verbose: bool) -> Stopwatch:
    """That of a call in Python: on a terminal, else in the log; silent if not `verbose`."""
    if not verbose:
        return Stopwatch()
    if not _is_terminal() or not _is_first_rank():
        return LoggedStopwatch()
    from remat.screen.terminal import steady_console

    return TerminalStopwatch(steady_console(stderr=True))


def _is_terminal() -> bool:
    # Python has no standard error under pythonw, and some programs put their own there.
    return bool(getattr(sys.stderr, "isatty", bool)())


def _is_first_rank() -> bool:
    """Ranks of a launcher share one terminal."""
    import torch.distributed as dist  # not for the command line's help

    is_one = not dist.is_available() or not dist.is_initialized()
    return is_one or dist.get_rank() == 0


def _silent(done: int = 0, total: int | None = None, *, text: str = "") -> None:
    del done, total, text
