from __future__ import annotations

import pytest

from remat.graph_capture.errors import GraphError
from remat.graph_capture.sizes.symbols import evaluated, never_falls

LEAST = {"seq": 2, "batch": 2}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4*seq*64", 4 * 10 * 64),
        ("16 * ((seq - 2) // 3 + 1)", 16 * 3),
        ("max(1, seq // 20)", 1),
        ("seq**2 - 1", 99),
        ("seq % 4", 2),
        ("(seq < 16) and (seq != 3)", True),
        ("not (seq == 10)", False),
    ],
)
def test_a_text_is_evaluated(text: str, value: int) -> None:
    assert evaluated(text, {"seq": 10}) == value


@pytest.mark.parametrize(
    "text", ["other", "seq.real", "print(seq)", "seq / 2", "9**9**9**9", "1 // 0", "(", "[seq]"]
)
def test_nothing_else_is(text: str) -> None:
    with pytest.raises(GraphError, match="capture again"):
        evaluated(text, {"seq": 10})


@pytest.mark.parametrize(
    ("text", "does"),
    [
        ("4*seq*batch", True),
        ("16*((seq - 2) // 3 + 1)", True),
        ("(seq - 2)**2", True),
        ("(seq - 3)**2", False),
        ("(seq - 3)*batch", False),
        ("max(1, seq // 2)", True),
        ("100 - seq", False),
        ("seq % 4", False),
        ("64 // seq", False),
        ("(-4)*seq + 8*seq", False),
        ("7", True),
    ],
)
def test_what_never_falls_is_told_from_its_form(text: str, does: bool) -> None:
    assert never_falls(text, LEAST) is does
    if does:
        values = [evaluated(text, {"seq": n, "batch": 5}) for n in range(2, 40)]
        assert values == sorted(values)
