"""Schedules are those that are kept as text: a change that alters one has to say so."""

from __future__ import annotations

import difflib

import pytest
import torch

from tests.replay.cases import CASES, FOLDER, path_of, text_of
from tests.rows import rows

TORCH = "2.13"
"""What the captured graph was captured with: others name and cut ops otherwise."""


@pytest.mark.parametrize(
    ("name", "solver"),
    rows(CASES, lambda case: case[0] != "captured_gpt" or case[1] not in ("auto", "cut")),
)
def test_the_schedule_is_the_kept_one(name: str, solver: str) -> None:
    if name.startswith("captured") and not torch.__version__.startswith(TORCH):
        pytest.skip(f"captured with torch {TORCH}")
    kept, found = path_of(name, solver).read_text(), text_of(name, solver)
    difference = difflib.unified_diff(kept.splitlines(), found.splitlines(), "kept", "now", n=1)
    assert found == kept, "\n".join(
        [
            f"another schedule for {name} by {solver}. If that is meant, write the texts anew with",
            "python -m tests.replay.cases, and say in the commit what altered them and why:",
            *difference,
        ]
    )


def test_every_text_belongs_to_a_case() -> None:
    assert {path.name for path in FOLDER.glob("*.txt")} == {path_of(*c).name for c in CASES}
