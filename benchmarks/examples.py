"""The examples at falling budgets: `python -m benchmarks.examples --out results.json`.

Runs `remat run` on each example at 80, 60 and 45 % of its unmodified peak, and prints what
was predicted beside what was measured. Ends with status 1 if anything differs from eager, if
a measured peak exceeds its budget or rises as the budget falls, if a predicted peak is off by
more than 1 %, or if an overhead falls as the budget falls.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import GAP_OF_FIGURES

ROOT = Path(__file__).parents[1]
EXAMPLES = ("gpt", "resnet", "unet")
PERCENTS = (80, 60, 45)
CHECKED = ("outputs_equal", "gradients_equal", "buffers_equal", "rng_equal")


def measure(example: str, percent: int) -> dict[str, Any]:
    """The object that `remat run --json` prints."""
    remat = Path(sys.executable).with_name("remat")
    model = f"{ROOT / 'examples' / example}.py:factory"
    command = [str(remat), "run", model, "--budget", f"{percent}%", "--json"]
    command += ["--gap", f"{GAP_OF_FIGURES}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def complaints(example: str, found: list[dict[str, Any]]) -> list[str]:
    """The faults in the runs of one example, largest budget first."""
    said: list[str] = []
    for percent, run in zip(PERCENTS, found, strict=True):
        plan = run["plan"]
        ratio = plan["predicted_peak_bytes"] / plan["measured_peak_bytes"]
        if not all(run["check"][name] for name in CHECKED):
            said.append(f"{example} at {percent} %: differs from eager")
        if plan["measured_peak_bytes"] > run["budget_bytes"]:
            said.append(f"{example} at {percent} %: measured peak above the budget")
        if abs(ratio - 1) > 0.01:
            said.append(f"{example} at {percent} %: predicted peak {ratio:.3f} of measured")
    for larger, smaller in pairwise(run["plan"] for run in found):
        if smaller["measured_peak_bytes"] > larger["measured_peak_bytes"]:
            said.append(f"{example}: the measured peak rises as the budget falls")
        if smaller["overhead"] < larger["overhead"]:
            said.append(f"{example}: the overhead falls as the budget falls")
    return said


def row(example: str, percent: int, run: dict[str, Any]) -> str:
    """One line of the table; peaks in MB of 10⁶ bytes."""
    plan, seconds = run["plan"], run["seconds"]
    peaks = [run["budget_bytes"], plan["predicted_peak_bytes"], plan["measured_peak_bytes"]]
    return (
        f"{example:7}{percent:4} %  "
        + "".join(f"{peak / 1e6:9.2f}" for peak in peaks)
        + f"{100 * plan['overhead']:9.2f} %{100 * run['bound']['gap']:7.2f} %"
        + f"{seconds['capture']:7.1f}{seconds['solve']:7.1f}"
    )


def main() -> int:
    """Measure, print, and keep what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    out = parser.parse_args().out
    print("example budget     budget predicted measured  overhead     gap capture  solve")
    kept: dict[str, list[dict[str, Any]]] = {}
    failures: list[str] = []
    for example in EXAMPLES:
        kept[example] = []
        for percent in PERCENTS:
            kept[example].append(measure(example, percent))
            print(row(example, percent, kept[example][-1]), flush=True)
        failures += complaints(example, kept[example])
    if out:
        out.write_text(json.dumps(kept, indent=1) + "\n")
    print("\n".join(failures) or "all as promised")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
