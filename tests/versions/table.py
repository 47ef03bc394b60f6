"""Writes docs/limits.md's table of what ran on which torch: `python -m tests.versions.table`.

It is made of `benchmarks/results/versions.json`, which `python -m tests.versions --record` writes.
"""

from __future__ import annotations

import sys

from benchmarks.solver_table import head, replaced, row
from tests.paths import ROOT
from tests.versions.record import Release, recorded
from tests.versions.releases import releases

DOCS = ROOT / "docs" / "limits.md"
TITLES = ("torch", "", "Python", "tests", "date", "passed", "skipped", "failed")


def with_table(document: str) -> str:
    """The document with the table between its marks."""
    return replaced(document, "versions", [*head(list(TITLES)), *_lines()])


def _lines() -> list[str]:
    """A line for each suite on each release; one that says so for a release that nothing ran on."""
    rows, lines = recorded(), list[str]()
    for version, which in releases().items():
        if version in rows:
            found = rows[version]
            lines += [_line(found, which, suite) for suite in sorted(found.suites)]
        else:
            lines.append(row([version, which, "", "not run", "", "", "", ""]))
    return lines


def _line(release: Release, which: str, suite: str) -> str:
    found = release.suites[suite]
    figures = (found.passed, found.skipped, found.failed)
    return row([release.torch, which, release.python, suite, found.date, *map(str, figures)])


def main() -> int:
    """Write the table anew."""
    DOCS.write_text(with_table(DOCS.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
