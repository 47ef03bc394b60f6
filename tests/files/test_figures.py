"""Figures that cannot be are refused, whichever file they stand in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.files.kinds import ERRORS, kinds

KINDS = kinds()
PLACES: dict[str, tuple[str, tuple[str | int, ...]]] = {
    "budget of a schedule": ("schedule", ("budget_bytes",)),
    "budget of a plan": ("plan", ("schedule", "budget_bytes")),
    "predicted peak": ("plan", ("prediction", "peak_bytes")),
    "bound of a plan": ("plan", ("prediction", "lower_bound_us")),
    "measured peak": ("plan", ("check", "plan_peak_bytes")),
    "measured time": ("plan", ("check", "baseline_step_us")),
    "equal gradients": ("plan", ("check", "gradients")),
    "size of a value": ("graph", ("values", 0, "size_bytes")),
    "cost of an op": ("graph", ("ops", 0, "cost_us")),
    "budget of a front": ("front", ("points", 0, 0)),
    "peak of a front": ("front", ("points", 0, 1, "peak_bytes")),
    "bound in fronts": ("fronts", ("b", "points", 0, 1, "lower_bound_us")),
    "least of a front": ("front", ("floor_bytes",)),
    "price": ("profile", ("ops", "aten.exp.default(4)", "cost_us")),
    "work": ("profile", ("ops", "aten.mm.default(2x2)", "work", "flops")),
    "step": ("profile", ("steps", "ab", "step_us")),
    "cost of a node": ("instance", ("nodes", 1, "cost")),
    "bytes of a node": ("instance", ("nodes", 1, "bytes")),
}


@pytest.mark.parametrize("figure", [-1, 10**400, 10**4000], ids=["below 0", "no float", "long"])
@pytest.mark.parametrize(("name", "place"), PLACES.values(), ids=PLACES)
def test_a_figure_that_cannot_be(
    name: str, place: tuple[str | int, ...], figure: int, tmp_path: Path
) -> None:
    kind = KINDS[name]
    root: Any = json.loads(kind.valid)
    holder = root
    for part in place[:-1]:
        holder = holder[part]
    holder[place[-1]] = figure
    path = tmp_path / "file.json"
    path.write_text(json.dumps(root))
    with pytest.raises(ERRORS) as refused:
        kind.read(path)
    assert str(path) in str(refused.value)
