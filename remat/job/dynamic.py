"""Ranges of sizes on the command line: ``--dynamic tokens:1=seq:16:512``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.sizes.symbols import Dynamic, as_symbol, require_one_range

METAVAR = "ARG:DIM=NAME:LEAST:MOST"
_FORM = re.compile(r"(?P<argument>[^:=]+):(?P<dim>\d+)=(?P<name>[^\W\d]\w*)(?P<sizes>(:[^:]*)*)")


def parse_dynamic(texts: Iterable[str]) -> Dynamic:
    """What `remat.rematerialize` takes as ``dynamic``, of the options of a command.

    Each is ``ARGUMENT:DIMENSION=NAME:LEAST:LARGEST``, or with ``:MULTIPLE`` behind. The argument is
    a name of forward's, a position, or ``target``. A name alone stands for 2 up to the batch at
    hand.

    Raises
    ------
    CaptureError : one of them is no such text, holds 0 or 1, or ends before it begins; or a place
        or a name has two ranges.
    """
    found: dict[str | int, dict[int, Any]] = {}
    ranges = list[Any]()
    for text in texts:
        argument, dim, entry = _read_range(text)
        dims = found.setdefault(argument, {})
        if dim in dims:
            raise CaptureError(f"--dynamic names dimension {dim} of {argument} twice")
        dims[dim] = entry
        if len(entry) > 1:
            ranges.append(as_symbol(entry, f"dimension {dim} of {argument}", 0))
    require_one_range(ranges)
    return found


def _read_range(text: str) -> tuple[str | int, int, tuple[Any, ...]]:
    form = _FORM.fullmatch(text.strip())
    sizes = form["sizes"].split(":")[1:] if form else []
    if form is None or len(sizes) not in (0, 2, 3):
        raise CaptureError(
            f"--dynamic {text!r} cannot be read: give {METAVAR}, such as tokens:1=seq:16:512, or "
            "seq:64:512:64 for multiples of 64"
        )
    numbers = [int(size) if re.fullmatch(r"\d+", size) else None for size in sizes]
    if None in numbers:
        raise CaptureError(f"--dynamic {text!r} cannot be read: its sizes must be whole numbers")
    argument = form["argument"]
    place = int(argument) if argument.isdecimal() else argument
    return place, int(form["dim"]), (form["name"], *numbers)
