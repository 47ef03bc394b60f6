"""The table of first steps: least, median, and the ratio of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.compiled import starts as compiled
from benchmarks.compiled.starts import main, table


def starts(*seconds: float, replays: int = 0) -> list[dict[str, Any]]:
    return [{"seconds": s, "processor_s": 2 * s, "replays": replays} for s in seconds]


FOUND = {
    "cold inductor": starts(10.0, 20.0, 60.0),
    "cold remat": starts(15.0, 40.0, 41.0, replays=3),
    "warm inductor": starts(4.0, 5.0, 6.0),
    "warm remat": starts(5.0, 5.0, 9.0),
}


def test_the_table_has_least_median_and_ratios() -> None:
    _, cold, cold_processor, warm, _ = table(FOUND)
    assert cold.split() == [
        "cold,", "seconds", "10.00", "|", "20.00", "15.00", "|", "40.00", "1.50", "|", "2.00",
    ]  # fmt: skip
    assert cold_processor.split()[2:5] == ["20.00", "|", "40.00"]
    assert warm.split()[-3:] == ["1.25", "|", "1.00"]


@pytest.mark.parametrize("replays", [0, 3])
def test_a_warm_start_that_planned_fails(
    replays: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {**FOUND, "warm remat": starts(5.0, replays=replays)}
    monkeypatch.setattr(compiled, "rounds", lambda _: found)
    out = tmp_path / "starts.json"
    assert main(["--out", str(out)]) == (1 if replays else 0)
    assert '"device"' in out.read_text()
