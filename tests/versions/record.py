"""What came of the tests on a release of torch, kept in `benchmarks/results/versions.json`."""

from __future__ import annotations

import time
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from tests.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "versions.json"


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How the tests of a suite ended."""

    date: str
    passed: int
    skipped: int
    failed: int


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """A release of torch, and what ran on it, by suite."""

    torch: str
    python: str
    suites: dict[str, Counts]


def counts(junit: Path) -> Counts:
    """Of a report of pytest; an error counts as failed."""
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))
    total, skipped, failures, errors = (
        sum(int(suite.get(name, "0")) for suite in suites)
        for name in ("tests", "skipped", "failures", "errors")
    )
    failed = failures + errors
    return Counts(
        date=time.strftime("%Y-%m-%d"),
        passed=total - skipped - failed,
        skipped=skipped,
        failed=failed,
    )


def recorded(path: Path = RESULTS) -> dict[str, Release]:
    """What was recorded, by release as `releases` names it."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Release]) if path.exists() else {}


def record(
    version: str, torch: str, python: str, suite: str, found: Counts, path: Path = RESULTS
) -> None:
    """Keep the counts of one suite. What other suites gave with the same Python stays."""
    rows = recorded(path)
    before = rows.get(version)
    suites = before.suites if before and (before.torch, before.python) == (torch, python) else {}
    rows[version] = Release(torch=torch, python=python, suites={**suites, suite: found})
    path.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")
