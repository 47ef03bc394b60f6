"""Rows of a parametrised test: some stand for all in a quick run, the others are slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def rows(every: Iterable[Any], is_quick: Callable[[Any], bool]) -> list[Any]:
    """All rows, in order; those that are not quick run where slow tests do."""
    return [row if is_quick(row) else _slow(row) for row in every]


def each_nth(n: int, every: Iterable[Any]) -> list[Any]:
    """All rows, in order; each n-th is quick, from the first one on."""
    return [_slow(row) if i % n else row for i, row in enumerate(every)]


def _slow(row: Any) -> Any:
    values = row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, marks=pytest.mark.slow)
