"""Writes docs/models.md's table: `python -m tests.zoo.table`, with the extra `zoo` installed.

Every model of the zoo is captured, timed anew, planned, rewritten and run; what stands
between the marks in the document is replaced.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path

from benchmarks.cells.cell import cpu_name
from benchmarks.solver_table import head, replaced, row
from remat.formats import bytes_text
from remat.graph_capture.errors import RematError
from tests.zoo.case import Entry
from tests.zoo.catalogue import ZOO
from tests.zoo.measure import Plan, measured

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
PACKAGES = ("torch", "transformers", "timm", "diffusers", "x-transformers", "peft")
TITLES = (
    "model", "ops", "capture", "timing", "keeping all: predicted, measured", "error",
    "planned: share of the peak", "predicted, measured", "error", "gradients equal",
    "eager itself: predicted, measured", "three steps of AdamW",
)  # fmt: skip


def entries(name: str, entry: Entry) -> list[str]:
    """The cells of a model's row."""
    if entry.is_missing:
        raise SystemExit(f"{entry.needs} is not installed: pip install 'remat[zoo]'")
    try:
        found = measured(entry)
    except RematError as error:
        refusal = _without_folders(str(error).splitlines()[0].split(". ")[0])
        return [name, "-", "refused", refusal, *["-"] * (len(TITLES) - 4)]
    plans = (found.everything, found.planned)
    equal = sum(plan.check.gradients for plan in plans)
    total = sum(plan.check.gradients_total for plan in plans)
    eager_bytes = found.everything.check.baseline_peak_bytes
    return [
        name, str(found.ops), f"{found.trace_s:.1f} s", f"{found.timing_s:.1f} s",
        *_peaks(found.everything), f"{100 * found.share:.0f} %", *_peaks(found.planned),
        f"{equal} of {total}" + ("" if all(plan.check.equal for plan in plans) else ", differs"),
        f"{bytes_text(found.unmodified_bytes)}, {bytes_text(eager_bytes)}",
        f"differ: {found.trained[0]}" if found.trained else "equal",
    ]  # fmt: skip


def _without_folders(text: str) -> str:
    """Files of packages by their paths in the package."""
    return re.sub(r"/\S*/site-packages/", "", text)


def _peaks(plan: Plan) -> tuple[str, str]:
    shown = bytes_text(plan.predicted_bytes), bytes_text(plan.check.plan_peak_bytes)
    return ", ".join(shown), f"{100 * plan.error:.2f} %"


def made_with() -> str:
    """On what, with what and when."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    today = time.strftime("%Y-%m-%d")
    return f"{cpu_name()}. python {platform.python_version()}, {versions}. {today}."


def main() -> int:
    """Measure the zoo and write the document anew."""
    parser = argparse.ArgumentParser(prog="tests.zoo.table", description=__doc__)
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--only", nargs="*", help="parts of names, to look at a few")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = [made_with(), "", *head(list(TITLES))]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REMAT_CACHE"] = folder
        for name, entry in ZOO.items():
            if not asked.only or any(part in name for part in asked.only):
                lines.append(row(entries(name, entry)))
                print(lines[-1], flush=True)
    if not asked.only:
        asked.docs.write_text(replaced(asked.docs.read_text(), "models", lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
