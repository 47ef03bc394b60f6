"""Bounds of expressions over ranges of sizes, against all values."""

from __future__ import annotations

import itertools

import pytest

from remat.graph_capture.errors import GraphError
from remat.graph_capture.sizes.symbols import bounds_of, evaluated

LOW, HIGH = {"a": 2, "b": 3}, {"a": 9, "b": 7}


@pytest.mark.parametrize(
    ("text", "is_exact"),
    [
        ("4*a*b", True),
        ("100 - a", True),
        ("-a", True),
        ("(a - 5)*(b - 5)", True),
        ("(a - 5)**2", True),
        ("(a - 5)**3", True),
        ("64//b", True),
        ("(a - 5)//b", True),
        ("a % 4", True),
        ("a % 100", True),
        ("max(a, b) + min(a, 4)", True),
        ("8*a - 4*a", False),
        ("7*a*b % 11", False),
        ("17", True),
    ],
)
def test_no_value_is_out_of_the_bounds(text: str, is_exact: bool) -> None:
    grid = itertools.product(range(2, 10), range(3, 8))
    values = [evaluated(text, {"a": a, "b": b}) for a, b in grid]
    least, most = bounds_of(text, LOW, HIGH)
    assert least <= min(values)
    assert most >= max(values)
    if is_exact:
        assert (least, most) == (min(values), max(values))


@pytest.mark.parametrize("text", ["a // (b - 5)", "a % (b - 5)", "c", "2**a", "a < 3", "(a"])
def test_what_has_no_bounds_is_refused(text: str) -> None:
    with pytest.raises(GraphError, match="capture again"):
        bounds_of(text, LOW, HIGH)
