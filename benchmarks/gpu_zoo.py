"""Predicted beside measured on a CUDA device: `python -m benchmarks.gpu_zoo --out FILE.json`.

Each example, and each model of `tests/zoo` that is installed, is captured, timed, planned,
rewritten and run on the device. The file keeps the device with its versions and, for each model,
predicted and measured peaks and step times of the plan for `--budget` of the unmodified peak.
Ends with status 1 if a plan differs from eager, if a peak is off by more than 2 %, or if the sum
of costs is off by more than 10 % of the measured step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import GAP_OF_FIGURES
from remat.graph_capture.devices.placement import meter_of
from remat.graph_capture.errors import RematError
from remat.job import pipeline
from remat.job.factory import Loaded, load_model
from remat.job.request import Request
from remat.job.screen import report_json
from remat.progress import Stopwatch
from tests.zoo.catalogue import ZOO

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("gpt", "resnet", "unet")
PEAK_ERROR, TIME_ERROR = 0.02, 0.10
LIMIT_S = 10.0

Build = Callable[[], Loaded]


def models() -> Iterator[tuple[str, Build]]:
    """The examples, then the models of the zoo that need no autocast and are installed."""
    for name in NAMES:
        yield f"example {name}", lambda name=name: load_model(f"{EXAMPLES / name}.py:factory")
    for name, entry in ZOO.items():
        if not entry.is_missing and not entry.refused:
            yield name, lambda entry=entry: _of_the_zoo(entry.make())


def _of_the_zoo(case: Any) -> Loaded:
    if case.autocast is not None:
        raise RematError("the zoo's autocast is a CPU's")
    return Loaded(case.model, case.args, case.kwargs, case.loss_fn, case.target)


def measured(build: Build, device: str, budget: str) -> dict[str, Any]:
    """What `remat run --json` says of a model, at the least budget if `budget` is too small."""
    stopwatch, report = Stopwatch(), None
    for asked in (budget, "min"):
        request = Request(asked, time_limit_s=LIMIT_S, device=device, gap=GAP_OF_FIGURES)
        report = pipeline.run_job(build().on(device), request, stopwatch)
        if report.result.schedule is not None:
            break
    assert report is not None
    return report_json(report)


def errors(said: dict[str, Any]) -> dict[str, float]:
    """Predicted over measured, minus one, of peaks and of step times."""
    found: dict[str, float] = {}
    for row in ("baseline", "plan"):
        for what in ("peak_bytes", "step_us"):
            known = said[row][f"measured_{what}"]
            found[f"{row}_{what}"] = said[row][f"predicted_{what}"] / known - 1
    return found


def complaints(said: dict[str, Any], *, is_cuda: bool) -> list[str]:
    """The faults of a model's figures; times are those of a device that nobody else uses."""
    found, off = list(said["failures"]), said["errors"]
    if abs(off["plan_peak_bytes"]) > PEAK_ERROR:
        found.append(f"the peak is off by {100 * off['plan_peak_bytes']:.1f} %")
    if is_cuda and abs(off["plan_step_us"]) > TIME_ERROR:
        found.append(f"the step is off by {100 * off['plan_step_us']:.1f} %")
    return found


def main() -> int:
    """Measure, print a line a model, and keep what was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_zoo", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--only", nargs="*", help="parts of names, to look at a few")
    asked = parser.parse_args()
    is_cuda = asked.device.startswith("cuda")
    if is_cuda and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    warnings.simplefilter("ignore")
    meter = meter_of(asked.device)
    versions = {"torch": torch.__version__, **meter.versions}
    kept = {"device": meter.title, "versions": versions, "settings": meter.settings}
    rows: dict[str, Any] = {}
    for name, build in models():
        if asked.only and not any(part in name for part in asked.only):
            continue
        try:
            said = measured(build, asked.device, asked.budget)
            said["errors"] = errors(said)
            rows[name] = said | {"complaints": complaints(said, is_cuda=is_cuda)}
            print(name, said["errors"], *rows[name]["complaints"], flush=True)
        except RematError as error:
            rows[name] = {"refused": str(error), "complaints": []}
            print(name, "refused:", error, flush=True)
    if not rows:
        raise SystemExit(f"no model here has one of {asked.only} in its name")
    if asked.out:
        date = time.strftime("%Y-%m-%d")
        asked.out.write_text(json.dumps({**kept, "date": date, "models": rows}, indent=1) + "\n")
    return int(any(row["complaints"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
