"""Runs the tests on releases of torch: `python -m tests.versions --torch 2.11.0 -- tests/remat -x`.

Without `--torch`, on the oldest, the pinned and the newest release; with `--turn N`, on one of
them. Without arguments of pytest, `runs_on` says what: a core set, recipes of trainers, a part of
the zoo. `--record` runs a whole suite, keeps what came of it in `benchmarks/results/versions.json`
and writes the table of docs/limits.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from remat.graph_capture.torch_private.core import NEWEST
from tests.paths import ROOT
from tests.versions.environment import python_with
from tests.versions.record import counts, record
from tests.versions.releases import pinned, releases
from tests.versions.table import main as write_table
from tests.zoo.catalogue import OF_EACH_FAMILY

CORE = (
    "tests/remat/compile", "tests/rewriter", "tests/graph_capture", "tests/remat/cluster",
    "tests/remat/whole_step", "tests/remat/test_blocks.py",
)  # fmt: skip
"""Capture, rewriter, compile, clusters, whole steps and blocks; the longest first, so that they do
not end alone."""
SLOW_TOO = ("-m", "not clock and not gpu", "--dist", "load")
"""By test and not by file, of which there are too few for the cores."""
RECIPES = "tests/remat/test_trainers.py"
TITAN = "tests/versions/test_torchtitan.py"
ZOO = "tests/zoo/test_zoo.py::test_equal_to_eager_with_the_predicted_peak"
SUITES = {"quick": (), "slow": ("-m", "slow and not clock and not gpu")}
"""By what `.ci/run` hands to pytest."""
CORE_PARTS = 3
"""Of its files a turn takes one part, as the whole set takes a quarter of an hour."""
ENDED = (0, 1)
"""Statuses of pytest after which its counts hold: all passed, some failed."""
ABOUT = "import platform, torch; print(torch.__version__, platform.python_version())"


def main(arguments: list[str] | None = None) -> int:
    """Run the tests; 0 if all passed on every release."""
    parser = argparse.ArgumentParser(prog="tests.versions", description=__doc__)
    parser.add_argument("--torch", nargs="+", metavar="VERSION", help="releases to run on")
    parser.add_argument("--turn", type=int, help="run on one release, a part of the core set")
    parser.add_argument("--record", choices=SUITES, help="run this suite, and keep its counts")
    parser.add_argument("of_pytest", nargs="*", help="after --: arguments of pytest")
    asked = parser.parse_args(arguments)
    turn, part = (None, "0/1") if asked.turn is None else of_turn(asked.turn)
    statuses = []
    for version in turn or asked.torch or releases():
        python = python_with(version)
        print(f"torch {version}: {python}", flush=True)
        if asked.record:
            statuses.append(run_and_record(version, python, asked.record, asked.of_pytest))
        else:
            ways = [asked.of_pytest] if asked.of_pytest else runs_on(version, part)
            statuses.extend(run(python, *way) for way in ways)
    return max(statuses)


def of_turn(number: int) -> tuple[list[str], str]:
    """The release whose turn it is, and the part of the core set: each comes with each in time."""
    each = list(releases())
    return [each[number % len(each)]], f"{number // len(each) % CORE_PARTS}/{CORE_PARTS}"


def runs_on(version: str, part: str = "0/1") -> list[Sequence[str]]:
    """What runs on a release: arguments of pytest, for each run of it.

    On the pinned release, `make test` runs all but the recipes, whose libraries are installed for
    these runs alone. On the newest, which ``pip install .`` brings, models of libraries run too.
    The whole zoo would take longer than the core set, so there is a part: `OF_EACH_FAMILY`.

    Parameters
    ----------
    part : of the files of the core set, as ``K/N``.
    """
    core = (*CORE, "--part", part)
    zoo = [f"{ZOO}[{name}]" for name in OF_EACH_FAMILY]
    runs: dict[str, list[Sequence[str]]] = {
        pinned(): [(*SLOW_TOO, RECIPES)],
        NEWEST: [core, (*SLOW_TOO, RECIPES, *zoo, TITAN)],
    }
    return runs.get(version, [core])


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
