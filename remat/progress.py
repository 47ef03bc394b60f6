"""How the stages of planning are named, timed and shown: one line on a terminal, else the log."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.segment import Segment

from remat.formats import percent_text

if TYPE_CHECKING:
    from rich import progress as rich_progress

    from remat.graph_capture.costs.op_times import ProgressCallback
    from remat.solver.search import Progress


_LOG = logging.getLogger("remat")
_LEAST_S = 0.05  # stages that took less are not shown


class Stopwatch:
    """Names and times the stages of a job, and shows nothing."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.began

    def accounted(self) -> dict[str, float]:
        """Seconds of each stage, and those that were in none."""
        other_s = self.elapsed_s - sum(self.seconds.values())
        return {**self.seconds, "other": max(0.0, other_s)}

    @contextlib.contextmanager
    def stage(self, name: str, text: str) -> Generator[ProgressCallback]:
        """Time what runs inside under `name`; `text` is for the person who waits."""
        start = time.perf_counter()
        try:
            with self.show(text) as progress:
                yield progress
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def show(self, text: str) -> Generator[ProgressCallback]:
        """Show `text` while the stage runs."""
        del text
        yield _silent

    def say(self, text: str) -> None:
        """Say in one line what came of it."""


class LoggedStopwatch(Stopwatch):
    """Logs each stage as it begins, and what came of it."""

    @contextlib.contextmanager
    def show(self, text: str) -> Generator[ProgressCallback]:
        _LOG.info("%s ...", text)
        yield _silent

    def say(self, text: str) -> None:
        _LOG.info("%s", text)


class TerminalStopwatch(Stopwatch):
    """Shows each stage with a spinner, the clock and, where a total is known, a bar."""

    takes_prints = False
    """Whether prints go above the line; called from Python, the user's streams stay as they are."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console, self.doing = console, ""

    @contextlib.contextmanager
    def show(self, text: str) -> Generator[ProgressCallback]:
        """A line that goes away when the stage is done."""
        self.doing = text
        with self._line() as progress:
            task = progress.add_task(text, total=None)
            most = 0.0

            def update(done: int = 0, total: int | None = None, *, text: str = "") -> None:
                nonlocal most
                most = done if text else max(most, done)  # only what is named anew runs back
                progress.update(task, completed=most, total=total, description=text or None)

            yield update

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def _line(self) -> rich_progress.Progress:
        from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
        from rich.text import Text

        clock = self

        class Clock(ProgressColumn):
            def render(self, task: object) -> Text:
                del task
                return Text(f"{clock.elapsed_s:.0f} s", style="progress.elapsed")

        shows_dots = self.console.encoding.lower().startswith("utf")  # dots are no ASCII
        spinner = SpinnerColumn("dots" if shows_dots else "line")
        # A description holds names, which are no markup.
        columns = spinner, TextColumn("{task.description}", markup=False), BarColumn(20), Clock()
        return Progress(
            *columns, console=self.console, transient=True,
            redirect_stdout=self.takes_prints, redirect_stderr=self.takes_prints,
        )  # fmt: skip


def took_text(seconds: Mapping[str, float]) -> str:
    shown = [f"{name} {one_s:.1f} s" for name, one_s in seconds.items() if one_s >= _LEAST_S]
    return f"{sum(seconds.values()):.1f} s: {', '.join(shown)}"


def solver_shown(shown: ProgressCallback, budget: object) -> Callable[[Progress], None]:
    return lambda state: shown(text=solver_text(budget, state))


def solver_text(budget: object, state: Progress) -> str:
    best = "none" if state.best_overhead is None else percent_text(state.best_overhead)
    bound = percent_text(state.bound_overhead)
    gap = "open" if state.gap is None else percent_text(state.gap)
    return f"solving for {budget}: best {best}, bound {bound}, gap {gap}, {state.doing}"


def stopwatch_of_call(*, verbose: bool) -> Stopwatch:
    """That of a call in Python: on a terminal, else in the log; silent if not `verbose`."""
    if not verbose:
        return Stopwatch()
    import torch.distributed as dist  # not for the command line's help

    is_terminal = bool(getattr(sys.stderr, "isatty", bool)())  # pythonw has no standard error
    # Ranks of a launcher share one terminal.
    is_later = dist.is_available() and dist.is_initialized() and dist.get_rank() > 0
    if not is_terminal or is_later:
        return LoggedStopwatch()
    return TerminalStopwatch(steady_console(stderr=True))


def _silent(done: int = 0, total: int | None = None, *, text: str = "") -> None:
    del done, total, text


# When a command began: before its imports, which take a second.

_began: list[float] = []  # until a session has taken it


def note_start() -> None:
    """Note when this process was started, or now where the system does not say."""
    _began[:] = [time.perf_counter() - _since_start_s()]


def _since_start_s() -> float:
    """How long this process has been there, where the system says so; else 0."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as stat:
            ticks = int(stat.read().rpartition(")")[2].split()[19])  # `starttime` of proc(5)
        started_s = ticks / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, ValueError, IndexError, AttributeError):  # it is no Linux
        return 0.0


def when_it_began() -> float:
    """On `time.perf_counter`; now where no command has begun, as in a test."""
    return _began.pop() if _began else time.perf_counter()


# What terminals can show. Names in plans come from files: consoles read no markup in them, let no
# letter steer a cursor or colours, and replace what the encoding lacks by letters as wide.

_SIMPLE = {"\u2013": "-", "\u2026": ".", "\u2501": "-", "\u2578": "-", "\u257a": "-"}
"""Letters of ours and of rich, and what stands for them in ASCII."""
_UNKNOWN = "?"
_LACKING = "remat.lacking"
_STDIN, STDOUT, _STDERR = 0, 1, 2
_COLUMNS, LEAST_COLUMNS = 80, 40
MOST_WORD = 400  # letters of a path at most; a broken file's number has more


def use_simple_letters() -> None:
    """Have both standard streams show other letters for those that their encoding lacks."""
    codecs.register_error(_LACKING, _simple)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_LACKING)


def _simple(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_SIMPLE.get(letter, _UNKNOWN) for letter in lacking), error.end


def in_one_line(message: str) -> str:
    """A message without letters that steer a terminal, and without endless words."""
    shown = "".join(map(_shown, " ".join(message.splitlines())))
    return re.sub(rf"\S{{{MOST_WORD},}}", lambda word: f"{word[0][: MOST_WORD // 2]}...", shown)


def _shown(letter: str) -> str:
    return letter if letter.isprintable() else ascii(letter)[1:-1]


class _Steady(ConsoleRenderable):
    """A renderable whose texts are without letters that steer a terminal."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.inner, options):
            text = segment.text
            if segment.control or text.isprintable():
                yield segment
            else:
                lines = ("".join(map(_shown, line)) for line in text.split("\n"))
                yield Segment("\n".join(lines), segment.style)


class _SteadyHook(RenderHook):
    def process_renderables(self, renderables: list[Any]) -> list[Any]:
        return [one if isinstance(one, Control) else _Steady(one) for one in renderables]


class _SteadyConsole(Console):
    def on_broken_pipe(self) -> None:
        """Let the session say that results are lost; go on where only nobody listens."""
        if not self.stderr:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self.quiet = True
        lead_nowhere(_STDERR)


def steady_console(*, stderr: bool = False) -> Console:
    """A console for any names: no markup, no emoji, nothing that steers; wide enough for tables."""
    console = _SteadyConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
    console.push_render_hook(_SteadyHook())
    if console.width < LEAST_COLUMNS:
        console.width = LEAST_COLUMNS if console.width else _COLUMNS
    return console


def lead_nowhere(number: int) -> None:
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), number)


def open_closed_streams() -> None:
    """Stand in for standard streams that were closed before the start, as by ``>&-``.

    The next file would take their number, and get what is printed. Writes to standard output then
    fail.
    """
    closed = [number for number in (_STDIN, STDOUT, _STDERR) if not _is_open(number)]
    for number in closed:
        handle = os.open(os.devnull, os.O_WRONLY if number == _STDERR else os.O_RDONLY)
        if handle != number:
            os.dup2(handle, number)
            os.close(handle)
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]  # Python's own way
        sys.stdout = open(STDOUT, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stderr = open(_STDERR, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def json_text(data: bytes, encoding: str | None) -> str:
    """JSON as it is, or with its letters escaped where an encoding lacks them."""
    text = data.decode()
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return "".join(_escaped(text))
    return text


def _escaped(text: str) -> Iterable[str]:
    """Letters beyond ASCII stand only within texts of JSON, so that an escape means the same."""
    for letter in text:
        if letter.isascii():
            yield letter
        else:
            units = letter.encode("utf-16-be")
            yield "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
