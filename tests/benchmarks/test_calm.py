"""What is measured again because the machine was slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.beside import calm


@pytest.mark.parametrize(
    ("known_s", "tries_s", "kept_s", "was_slow", "fastest_s"),
    [
        (1.0, [1.04], 1.04, False, 1.0),
        (1.0, [0.9], 0.9, False, 0.9),
        (1.0, [1.3, 1.02], 1.02, False, 1.0),
        (1.0, [1.3, 1.2, 1.25], 1.2, True, 1.0),
        (None, [1.3, 1.0], 1.0, False, 1.0),
        (None, [1.0, 1.01], 1.0, False, 1.0),
        (None, [1.0, 1.3, 1.2], 1.0, False, 1.0),
    ],
)
def test_the_calmest_try_counts(
    known_s: float | None,
    tries_s: list[float],
    kept_s: float,
    was_slow: bool,
    fastest_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calm, "PAUSE_S", 0.0)
    fastest = tmp_path / "fastest_s"
    if known_s is not None:
        fastest.write_text(str(known_s))
    left = iter(tries_s)
    found = calm.timed_calmly(lambda: [[9.0, (base_s := next(left)), 0.1], [2 * base_s]], fastest)
    assert list(left) == []
    assert found.times_s[1] == [2 * kept_s]
    assert found.was_slow is was_slow
    assert float(fastest.read_text()) == fastest_s


def test_short_steps_are_taken_as_they_are(tmp_path: Path) -> None:
    fastest = tmp_path / "fastest_s"
    left = iter([0.019, 0.001])
    found = calm.timed_calmly(lambda: [[next(left)]], fastest)
    assert found == calm.Timed([[0.019]], was_slow=False)
    assert list(left) == [0.001]
    assert not fastest.exists()
