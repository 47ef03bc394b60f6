"""How figures look to a person. Files and `--json` carry plain bytes and microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

KIB = 2**10
MIB = 2**20
GIB = 2**30
NO_BOUND = "no bound"  # what stands for a bound and a gap where nothing is proved


def bytes_text(size_bytes: float) -> str:
    """``329.1 MiB``, ``8.25 GiB`` from one GiB on, ``1.36 MiB``, ``64.0 KiB`` and ``36 bytes``."""
    number, unit = _scaled(size_bytes, size_bytes)
    return exact_bytes_text(1) if (number, unit) == ("1", "bytes") else f"{number} {unit}"


def exact_bytes_text(size_bytes: float) -> str:
    """``1 byte``, ``2048 bytes``: a number that a person may have to give."""
    return f"{size_bytes} byte{'' if size_bytes == 1 else 's'}"


def bytes_pair(predicted: int, measured: int | None) -> str:
    largest = max(predicted, measured or 0)
    left, unit = _scaled(predicted, largest)
    right = "-" if measured is None else _scaled(measured, largest)[0]
    return f"{left} | {right} {unit}"


def budget_text(size_bytes: int) -> str:
    """The least budget of three digits, at most 1 % more: ``118MiB``, ``12.7MiB``, ``36B``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            parts = 100 if size_bytes < 10 * unit else 10 if size_bytes < 100 * unit else 1
            return f"{-(-size_bytes * parts // unit) / parts:g}{name}"
    return f"{size_bytes}B"


def _scaled(size_bytes: float, largest: float) -> tuple[str, str]:
    if abs(largest) >= GIB:
        return f"{size_bytes / GIB:.2f}", "GiB"
    if abs(largest) >= MIB:
        digits = 1 if abs(largest) >= 10 * MIB else 2
        return f"{size_bytes / MIB:.{digits}f}", "MiB"
    if 0 < abs(largest) < KIB / 20:  # It would read 0.0.
        return f"{size_bytes:.0f}", "bytes"
    return f"{size_bytes / KIB:.1f}", "KiB"


def time_text(time_us: float) -> str:
    """``612 ms``, with one decimal below 100 ms."""
    milliseconds = time_us / 1000
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"


def fine_time_text(time_us: float) -> str:
    """As `time_text`, and ``82.6 us`` below a millisecond."""
    return time_text(time_us) if abs(time_us) >= 1000 else f"{time_us:.1f} us"


def time_pair(predicted_us: float, measured_us: float | None) -> str:
    right = "- ms" if measured_us is None else time_text(measured_us)
    return f"{time_text(predicted_us).removesuffix(' ms')} | {right}"


def percent_text(fraction: float) -> str:
    """``12.3 %``; two decimals below one per cent, so that a small gap stays visible."""
    percent = 100 * fraction
    return f"{percent:.2f} %" if 0 < abs(percent) < 1 else f"{percent:.1f} %"


def proved_text(fraction: float | None) -> str:
    """A lower bound on the overhead, or a gap: as `percent_text`, and `NO_BOUND` for None."""
    return NO_BOUND if fraction is None else percent_text(fraction)


def gap_text(gap: float | None) -> str:
    """``gap 12.3 %``, and `NO_BOUND` for None."""
    return NO_BOUND if gap is None else f"gap {percent_text(gap)}"


def percent_pair(predicted: float, measured: float | None) -> str:
    right = "- %" if measured is None else f"{100 * measured:.1f} %"
    return f"{100 * predicted:.1f} | {right}"


# How graphs, schedules, results and fronts look in a notebook: small tables in HTML.

_NUMBER = ' style="text-align:right"'
_TEXT = ' style="text-align:left"'


def figures_html(title: str, figures: Sequence[tuple[str, str]]) -> str:
    rows = "".join(
        f'<tr><th scope="row"{_TEXT}>{escape(name)}</th><td{_TEXT}>{escape(text)}</td></tr>'
        for name, text in figures
        if text
    )
    return f"<table><caption><b>{escape(title)}</b></caption><tbody>{rows}</tbody></table>"


def table_html(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A title, headers, and rows whose first cell names them; the other cells are numbers."""
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return (
        f"<table><caption><b>{escape(title)}</b></caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _cells(row: Sequence[str]) -> str:
    name, *numbers = row
    cells = "".join(f"<td{_NUMBER}>{escape(number)}</td>" for number in numbers)
    return f'<th scope="row"{_TEXT}>{escape(name)}</th>{cells}'


# How answers look on a screen. What is imported here is not above: texts alone need none of it.

_COLUMNS = 100  # of a screen whose width nobody has said


class Answer(msgspec.Struct, frozen=True):
    """What a question gives: a `screen` for a person, and the same figures for a program."""

    def screen(self, width: int = _COLUMNS) -> RenderableType:
        """In so many columns."""
        raise NotImplementedError

    def as_json(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        text = StringIO()
        # Names of a file are neither markup nor emoji.
        console = Console(file=text, width=_COLUMNS, highlight=False, markup=False, emoji=False)
        console.print(self.screen())
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    __repr__ = __str__


def plain_table(*headers: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i == 0 else "right", overflow="fold")
    return table


def rows_table(rows: Iterable[tuple[str | Text, str | Text]]) -> Table:
    """Rows of a label and what is said, which may hold names and is no markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for label, said in rows:
        table.add_row(label, Text(said) if isinstance(said, str) else said)
    return table
