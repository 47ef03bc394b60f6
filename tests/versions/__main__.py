"""Runs the tests on releases of torch: `python -m tests.versions --torch 2.11.0 -- tests/remat -x`.

Without `--torch`, on the oldest and the newest that the package takes; without arguments of pytest,
a core set: capture, rewriter, compile and blocks. `--record` runs a whole suite, keeps what came of
it in `benchmarks/results/versions.json` and writes the table of docs/limits.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from remat.rewriter.torch_compat import NEWEST, OLDEST
from tests.paths import ROOT
from tests.versions.environment import python_with
from tests.versions.record import counts, record
from tests.versions.table import main as write_table

CORE = (
    "tests/remat/compile", "tests/rewriter", "tests/graph_capture", "tests/remat/test_blocks.py",
)  # fmt: skip
"""The longest first, so that they do not end alone."""
SUITES = {"quick": (), "slow": ("-m", "slow and not clock and not gpu")}
"""By what `.ci/run` hands to pytest."""
ENDED = (0, 1)
"""Statuses of pytest after which its counts hold: all passed, some failed."""
ABOUT = "import platform, torch; print(torch.__version__, platform.python_version())"


def main(arguments: list[str] | None = None) -> int:
    """Run the tests; 0 if all passed on every release."""
    parser = argparse.ArgumentParser(prog="tests.versions", description=__doc__)
    parser.add_argument("--torch", nargs="+", metavar="VERSION", help="releases to run on")
    parser.add_argument("--record", choices=SUITES, help="run this suite, and keep its counts")
    parser.add_argument("of_pytest", nargs="*", help="after --: arguments of pytest")
    asked = parser.parse_args(arguments)
    statuses = []
    for version in asked.torch or (OLDEST, NEWEST):
        python = python_with(version)
        print(f"torch {version}: {python}", flush=True)
        if asked.record:
            statuses.append(run_and_record(version, python, asked.record, asked.of_pytest))
        else:
            statuses.append(run(python, *(asked.of_pytest or CORE)))
    return max(statuses)


def run(python: Path, *of_pytest: str) -> int:
    """The status of pytest."""
    return subprocess.run([str(python), "-m", "pytest", *of_pytest], cwd=ROOT).returncode


def run_and_record(version: str, python: Path, suite: str, of_pytest: list[str]) -> int:
    """The same, of a whole suite."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        status = run(python, *SUITES[suite], *of_pytest, f"--junit-xml={junit}")
        if status in ENDED:
            about = subprocess.run([str(python), "-c", ABOUT], capture_output=True, text=True)
            record(version, *about.stdout.split(), suite, counts(junit))
            write_table()
    return status


if __name__ == "__main__":
    sys.exit(main())
