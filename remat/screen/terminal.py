"""What terminals can show: any encoding, and no letter of a file that would steer them.

Names in plans and graphs come from files. So a console here neither reads them as markup nor lets
through letters that move a cursor or change colours. Letters that the terminal's encoding lacks
are shown by others that are as wide.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.segment import Segment

SIMPLE = {"\u2013": "-", "\u2026": ".", "\u2501": "-", "\u2578": "-", "\u257a": "-"}
"""Letters of ours and of rich, and what stands for them in ASCII."""
UNKNOWN = "?"
LACKING = "remat.lacking"
STDIN, STDOUT, STDERR = 0, 1, 2
COLUMNS, LEAST_COLUMNS = 80, 40
MOST_WORD = 400
"""Letters of a word in a message: a path may have them, a number of a broken file has more."""


def use_simple_letters() -> None:
    """Have both standard streams show other letters for those that their encoding lacks."""
    codecs.register_error(LACKING, _simple)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=LACKING)


def _simple(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(SIMPLE.get(letter, UNKNOWN) for letter in lacking), error.end


def is_simple(console: Console) -> bool:
    """Whether it shows ASCII alone."""
    return not console.encoding.lower().startswith("utf")


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
        lead_nowhere(STDERR)


def steady_console(*, stderr: bool = False) -> Console:
    """A console for names of anywhere: no markup, no emoji, nothing that steers the terminal.

    It is no narrower than tables can be read in. A terminal that says 0 columns knows of none.
    """
    console = _SteadyConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
    console.push_render_hook(_SteadyHook())
    if console.width < LEAST_COLUMNS:
        console.width = LEAST_COLUMNS if console.width else COLUMNS
    return console


def lead_nowhere(number: int) -> None:
    """Let what is written to a standard stream go nowhere."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), number)


def open_closed_streams() -> None:
    """Stand in for standard streams that were closed before the start, as by ``>&-``.

    Otherwise the next file that is opened would take their number, and get what is printed. What is
    written to standard output then fails, as it does on a full disk; messages go nowhere.
    """
    closed = [number for number in (STDIN, STDOUT, STDERR) if not _is_open(number)]
    for number in closed:
        handle = os.open(os.devnull, os.O_WRONLY if number == STDERR else os.O_RDONLY)
        if handle != number:
            os.dup2(handle, number)
            os.close(handle)
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]  # Python's own way
        sys.stdout = open(STDOUT, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stderr = open(STDERR, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


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
