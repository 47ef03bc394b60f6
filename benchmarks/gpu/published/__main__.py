"""Published step times beside those predicted of `--device`: `python -m benchmarks.gpu.published`.

Needs timm and torchvision. `--fit` fits the shares of `shares.json` to half of the rows first. Some
models take a minute to trace, so `--traces` keeps what was found in a folder.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from benchmarks.gpu.published.fit import fit
from benchmarks.gpu.published.steps import read_cases, step_of
from benchmarks.gpu.published.table import keep, lines, rows_of


def main() -> int:
    """Print each row, and keep what was asked to be kept."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.published", description=__doc__)
    parser.add_argument("cases", nargs="*", help="parts of names; all cases if none is named")
    parser.add_argument("--fit", action="store_true", help="fit shares.json first, to all cases")
    parser.add_argument("--keep", action="store_true", help="into results and the docs")
    parser.add_argument("--traces", type=Path, help="folder that keeps traced steps")
    asked = parser.parse_args()
    if asked.cases and (asked.fit or asked.keep):
        parser.error("leave out the names of cases: a fit and what is kept are of all")
    warnings.simplefilter("ignore")
    known = {
        name: (case, step_of(case, asked.traces))
        for name, case in read_cases().cases.items()
        if not asked.cases or any(part in name for part in asked.cases)
    }
    if asked.fit:
        fit(known)  # before anything has read the file that this writes
    print(*lines(rows := rows_of(known)), sep="\n")
    if asked.keep:
        keep(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
