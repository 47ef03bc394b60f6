"""The docs stay short enough to be read."""

from __future__ import annotations

from pathlib import Path

from tests.paths import ROOT

MOST_OF_ARCHITECTURE = 1_800
MOST_IN_ALL = 25_000
"""Words of all pages and the README, tables of results apart."""
PAGES_WITH_RESULTS = {
    "solvers.md", "benchmarks.md", "models.md", "reserved.md", "against_papers.md",
    "clusters.md",
}  # fmt: skip


def words(page: Path) -> int:
    """As `wc -w` counts, without the tables of a page of results."""
    lines = page.read_text(encoding="utf-8").splitlines()
    if page.name in PAGES_WITH_RESULTS:
        lines = [line for line in lines if not line.startswith("|")]
    return sum(len(line.split()) for line in lines)


def test_the_architecture_is_read_in_ten_minutes() -> None:
    assert words(ROOT / "docs" / "architecture.md") <= MOST_OF_ARCHITECTURE


def test_nobody_need_read_a_book() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert sum(map(words, pages)) <= MOST_IN_ALL
