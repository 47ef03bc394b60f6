"""The docs stay short enough to be read."""

from __future__ import annotations

from pathlib import Path

from tests.paths import ROOT

MOST_OF_ARCHITECTURE = 1_800
MOST_IN_ALL, MOST_IN_PROSE = 26_000, 14_000
"""Words of all pages and the README, with tables and without."""
PAGES = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]


def words(page: Path, *, with_tables: bool = True) -> int:
    """As `wc -w` counts."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return sum(len(line.split()) for line in lines if with_tables or not line.startswith("|"))


def test_the_architecture_is_read_in_ten_minutes() -> None:
    assert words(ROOT / "docs" / "architecture.md") <= MOST_OF_ARCHITECTURE


def test_nobody_need_read_a_book() -> None:
    assert sum(map(words, PAGES)) <= MOST_IN_ALL
    assert sum(words(page, with_tables=False) for page in PAGES) <= MOST_IN_PROSE
