"""Measures the zoo: `python -m tests.zoo.table`, with the extra `zoo` installed.

Every model is captured, timed anew, planned, rewritten and run. Its row goes to
`benchmarks/results/models.csv`, and a row for each library between the marks of docs/models.md.
`--page` writes those of the kept file and measures nothing.
"""

from __future__ import annotations

import argparse
import csv
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
from remat.graph_capture.errors import CaptureError
from tests.zoo.case import Entry
from tests.zoo.catalogue import ZOO
from tests.zoo.measure import Plan, measured, measured_in_parts

ROOT = Path(__file__).parents[2]
DOCS, RESULTS = ROOT / "docs" / "models.md", ROOT / "benchmarks" / "results" / "models.csv"
PACKAGES = ("torch", "transformers", "timm", "diffusers", "x-transformers", "peft")
TITLES = (
    "model", "ops", "capture", "timing", "keeping all: predicted, measured", "error",
    "planned: share of the peak", "planned: predicted, measured", "planned: error",
    "gradients equal", "eager itself: predicted, measured", "three steps of training",
    "planned of what forward saves",
)  # fmt: skip
LIBRARIES = ("Hugging Face", "diffusers", "x-transformers", "PEFT", "timm")
PLAIN = "torch alone"
IN_PARTS = ("in parts", "runs as it is")  # what stands in the place of a time of capture
UNITS = {"KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}
Rows = list[dict[str, str]]


def library_lines(made: str, rows: Rows) -> list[str]:
    """One row for each library, and one for each model that is no one graph."""
    lines = [made, ""]
    lines += head(["library", "models", "gradients equal", "peak off", "unmodified peak off"])
    planned = [one for one in rows if one["capture"] not in IN_PARTS]
    for library in (*LIBRARIES, PLAIN):
        own = [one for one in planned if _library(one["model"]) == library]
        if own:
            names = "; ".join(one["model"].removeprefix(library).strip() for one in own)
            lines.append(row([library, names, *_figures(own)]))
    titles = ["in parts", "planned", "least peak, of eager's", "gradients equal", "why not whole"]
    shown = ("model", TITLES[-1], TITLES[6], "gradients equal", "timing")
    parts = (one for one in rows if one["capture"] in IN_PARTS)
    return [*lines, "", *head(titles), *(row([one[name] for name in shown]) for one in parts)]


def _library(model: str) -> str:
    return next((name for name in LIBRARIES if model.startswith(name)), PLAIN)


def _figures(rows: Rows) -> list[str]:
    """Gradients that are equal, and how far off predicted peaks are at most."""
    counts = [one["gradients equal"].split(",")[0].split(" of ") for one in rows]
    equal, total = (sum(map(int, of)) for of in zip(*counts, strict=True))
    errors = [one[name].removesuffix(" %") for one in rows for name in ("error", "planned: error")]
    eager = [_ratio(one["eager itself: predicted, measured"]) for one in rows]
    unmodified = f"{round(100 * min(eager)):+} to {round(100 * max(eager)):+} %"
    return [f"{equal} of {total}", f"{max(abs(float(e)) for e in errors):.2f} %", unmodified]


def _ratio(pair: str) -> float:
    """Predicted over measured, less one, of a text such as ``2.96 MiB, 3.05 MiB``."""
    sizes = (size.split() for size in pair.split(", "))
    predicted, measured = (float(number) * UNITS[unit] for number, unit in sizes)
    return predicted / measured - 1


def kept() -> tuple[str, Rows]:
    """On what the kept rows were measured, and the rows."""
    made, *lines = RESULTS.read_text(encoding="utf-8").splitlines()
    return made.removeprefix("# "), list(csv.DictReader(lines))


def keep(made: str, rows: list[list[str]]) -> None:
    """Keep them."""
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {made}\n")
        csv.writer(file, lineterminator="\n").writerows([TITLES, *rows])


def written_into(text: str) -> str:
    """The document with the kept rows."""
    return replaced(text, "models", library_lines(*kept()))


def entries(name: str, entry: Entry) -> list[str]:
    """The cells of a model's row."""
    if entry.is_missing:
        raise SystemExit(f"{entry.needs} is not installed: pip install 'remat[zoo]'")
    try:
        found = measured(entry)
    except CaptureError as error:
        return _entries_in_parts(name, entry, str(error))
    plans = (found.everything, found.planned)
    equal = sum(plan.check.gradients for plan in plans)
    total = sum(plan.check.gradients_total for plan in plans)
    eager_bytes = found.everything.check.baseline_peak_bytes
    return [
        name, str(found.ops), f"{found.trace_s:.1f} s", f"{found.timing_s:.1f} s",
        *_peaks(found.everything), f"{100 * found.share:.0f} %", *_peaks(found.planned),
        f"{equal} of {total}" + ("" if all(plan.check.equal for plan in plans) else ", differs"),
        f"{bytes_text(found.unmodified_bytes)}, {bytes_text(eager_bytes)}",
        f"differ: {found.trained[0]}" if found.trained else "equal", "100 %",
    ]  # fmt: skip


def _entries_in_parts(name: str, entry: Entry, refusal: str) -> list[str]:
    found = measured_in_parts(entry)
    check, peaks = found.planned.check, _peaks(found.planned)
    eager = bytes_text(check.baseline_peak_bytes)
    share = f"{check.plan_peak_bytes / check.baseline_peak_bytes:.0%}".replace("%", " %")
    return [
        name, "-", IN_PARTS[0] if found.share else IN_PARTS[1], _reason(refusal), "-", "-",
        share, *peaks, f"{check.gradients} of {check.gradients_total}", f"-, {eager}",
        f"differ: {found.trained[0]}" if found.trained else "equal",
        f"{100 * found.share:.0f} %",
    ]  # fmt: skip


def _reason(refusal: str) -> str:
    """What a refusal says of the code, among the ways out."""
    sentences = re.split(r"[.] (?=[A-Zt])|[.]?\n", refusal)
    known = re.compile(r"[.]py:\d|[Ff]orward of ")
    said = next((one for one in sentences if known.search(one)), sentences[0])
    return _without_folders(said.split(": ", 1)[-1] if said[0].islower() else said)


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
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--only", nargs="*", help="parts of names, to look at a few")
    asked = parser.parse_args()
    if not asked.page:
        rows = _measured_rows(asked.only)
        if asked.only:
            return 0
        keep(made_with(), rows)
    DOCS.write_text(written_into(DOCS.read_text()))
    return 0


def _measured_rows(parts: list[str] | None) -> list[list[str]]:
    warnings.simplefilter("ignore")
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REMAT_CACHE"] = folder
        for name, entry in ZOO.items():
            if not parts or any(part in name for part in parts):
                rows.append(entries(name, entry))
                print(row(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
