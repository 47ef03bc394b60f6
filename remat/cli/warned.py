"""Warnings amid a verb: each once, and those of remat in one line without a place in its code."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TextIO

from remat.checkout import BESIDE, FOLDER
from remat.solver.interrupts import is_interrupted

OURS = (FOLDER, *(FOLDER.parent / name for name in BESIDE))


@contextlib.contextmanager
def each_warning_once(tell: Callable[[str], None]) -> Generator[None]:
    """In the block, what was warned of once is not warned of again.

    A model's forward runs several times in a verb. Python would show each of its warnings once, but
    torch resets what was shown. `tell` is given what remat itself warns of.
    """
    shown, show = set[tuple[str, str, int]](), warnings.showwarning

    def show_once(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        if (key := (str(message), filename, lineno)) in shown or _is_of_ctrl_c(message):
            return
        shown.add(key)
        if _is_ours(filename):
            tell(str(message))
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_once
    try:
        yield
    finally:
        warnings.showwarning = show


def _is_of_ctrl_c(message: Warning | str) -> bool:
    """Whether it is torch's, of a backward that Ctrl-C ended, with the traceback of its forward."""
    return is_interrupted() and str(message).startswith("Error detected in ")


def _is_ours(filename: str) -> bool:
    return any(Path(filename).is_relative_to(folder) for folder in OURS)
