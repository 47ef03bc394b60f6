"""Training steps made to fit, by everything that people use: `python -m benchmarks.training`.

Each model of a suite is trained for a few steps as it is, with torch's own ways to save memory,
and with plans. Budgets of plans are the peaks that the other rows reached, so that tables compare
at equal peaks. Every row is measured in a process of its own, in turn with the unmodified step.
Rows that are in `--out` already are not measured again.
`python -m benchmarks.comparison.document` makes docs/benchmarks.md from the results.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat, zip_longest
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from benchmarks.cell import commit_here, cpu_name
from benchmarks.comparison import batches
from benchmarks.comparison.batches import CHECKPOINTS, GPU_GIB, METHODS
from benchmarks.comparison.cores import CORES
from benchmarks.comparison.fronts import TORCHS_KEPT, Row, front, targets
from benchmarks.comparison.methods import SHARES
from benchmarks.comparison.models import SUITES
from benchmarks.comparison.own_process import OwnProcesses
from benchmarks.comparison.row import GRADIENTS, JUDGED, row
from benchmarks.kept_memory import SETTINGS

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "training"
LIMIT_S = 900.0
WORKERS = 4
"""Rows under way at once on CPUs with more than one core. A GPU's memory is for one row."""
Key = tuple[str, float]
JUDGE: Key = (TORCHS_KEPT, 0)
"""The row with whose gradients those of other compiled rows are compared."""
EAGER_LIKE = ("aot", *(method for method, _ in CHECKPOINTS))
SMOKE_SHARES = (0.3,)
PERCENTS = (80, 60, 40)
"""Of the unmodified peak: budgets of ours beside the peaks of others."""


@dataclass
class Results:
    """The file of a suite's results, written after each row."""

    path: Path
    kept: dict[str, Any]
    lock: Lock = field(default_factory=Lock)
    written_s: float = field(default_factory=time.monotonic)

    @classmethod
    def at(cls, path: Path, suite: str) -> Results:
        """The results in the file, or none yet."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemExit(f"{path}: {error.strerror}; give --out another file") from None
        if path.exists():
            try:
                kept = json.loads(path.read_text())
                held = kept["suite"]
            except (OSError, ValueError, KeyError, TypeError):
                raise SystemExit(f"{path} holds no results; give --out another file") from None
            if held != suite:
                raise SystemExit(f"{path} holds the suite {held}, not {suite}")
            now = facts(suite)
            kept["resumed"] = {key: now[key] for key in ("date", "commit")}
            return cls(path, kept)
        return cls(path, {"suite": suite, **facts(suite), "seconds": 0.0, "rows": {}})

    def rows(self, model: str) -> list[Row]:
        """The rows of a model that were measured."""
        return [Row.read(key, kept) for key, kept in self.kept["rows"].get(model, {}).items()]

    def has(self, model: str, key: Key) -> bool:
        """Whether the row was measured, or does not apply to the model."""
        kept = self.kept["rows"].get(model, {}).get(name_of(key), {"error": "not yet"})
        return "error" not in kept or kept.get("does_not_apply", False)

    def keep(self, model: str, key: Key, found: dict[str, Any]) -> None:
        """Note a row, print it, and write the file."""
        with self.lock:
            self.kept["rows"].setdefault(model, {})[name_of(key)] = found
            self.write()
        print(f"{model:13}{name_of(key):28}{shown(found)}", flush=True)

    def batches(self, model: str, budget: int) -> dict[str, Any]:
        """The largest batches of a model at a budget, by the name of their row."""
        of_model = self.kept.setdefault("batches", {}).setdefault(model, {})
        return of_model.setdefault(str(budget), {})

    def keep_batch(self, model: str, budget: int, key: Key, found: dict[str, Any]) -> None:
        """Note one of them, print it, and write the file."""
        with self.lock:
            self.batches(model, budget)[name_of(key)] = found
            self.write("batches_seconds")
        print(f"{model:13}{name_of(key):28}batch {found.get('batch', found)}", flush=True)

    def write(self, spent_on: str = "seconds") -> None:
        """Write the whole file at once, so that none is left half written; add the time spent."""
        now_s = time.monotonic()
        self.kept[spent_on] = self.kept.get(spent_on, 0.0) + now_s - self.written_s
        self.written_s = now_s
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.kept, indent=1) + "\n")
        beside.replace(self.path)


def facts(suite: str) -> dict[str, Any]:
    """Device, versions, date and commit."""
    device = torch.cuda.get_device_name() if suite == "gpu" else f"{cpu_name()}, 1 thread a step"
    return {
        "device": device, "torch": str(torch.__version__), "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"), "commit": commit_here(),
    }  # fmt: skip


def name_of(key: Key) -> str:
    """The name of a row in the file."""
    return Row(*key, {}).name


def shown(found: dict[str, Any]) -> str:
    """A row in one line."""
    if "error" in found:
        return found["error"][:80]
    text = f"{found['peak_bytes'] / 1e6:9.1f} MB{100 * found['over_eager']:+8.1f} %"
    if "predicted_bytes" in found:
        off = 100 * (found["predicted_bytes"] / found["peak_bytes"] - 1)
        text += f"  peak off {off:+.2f} %, planned {100 * found['planned_overhead']:.1f} %"
    if "measured_overhead" in found:
        text += f", measured {100 * found['measured_overhead']:.1f} %"
    text += "  SLOW" if found.get("was_slow", False) else ""
    return text + ("" if found.get("is_right", True) else "  WRONG GRADIENTS")


class Suite:
    """A suite under way."""

    def __init__(self, name: str, results: Results) -> None:
        self.name, self.results = name, results
        kept = {"REMAT_CACHE": str(WORK / name / "prices"), "KINETO_LOG_LEVEL": "99"}
        self.processes = OwnProcesses({**kept, **SETTINGS}, LIMIT_S)
        is_one = name == "gpu" or len(CORES) < 2
        self.workers = ThreadPoolExecutor(1 if is_one else WORKERS)
        self.cores = ThreadPoolExecutor(1 if is_one else min(len(CORES), WORKERS))

    def take(self, model: str, keys: Iterable[Key]) -> None:
        """Measure the rows that are missing, several at once."""
        folder = WORK / self.name / model
        folder.mkdir(parents=True, exist_ok=True)
        missing = [key for key in keys if not self.results.has(model, key)]
        if any(key[0] in JUDGED for key in missing) and not (folder / GRADIENTS).exists():
            missing = [JUDGE, *(key for key in missing if key != JUDGE)]

        def one(key: Key) -> None:
            found = self.processes.answer(row, self.name, model, *key, folder)
            self.results.keep(model, key, found)

        list(self.workers.map(one, missing))

    def largest(self, model: str) -> None:
        """The largest batches of a model within its unmodified peak, or the memory of GPUs."""
        eager = next(row for row in self.results.rows(model) if row.method == "eager")
        budgets = [eager.peak_bytes] if self.name != "gpu" else [gib << 30 for gib in GPU_GIB]
        turns = WORK / self.name / "turns"

        def one(key: Key, budget: int) -> None:
            most = self.processes.answer(batches.found, self.name, model, *key, budget, turns)
            self.results.keep_batch(model, budget, key, most)

        for budget in budgets:
            known = self.results.batches(model, budget)
            missing = [key for key in METHODS if "batch" not in known.get(name_of(key), {})]
            list(self.cores.map(one, missing, repeat(budget)))

    def run(self, model: str) -> None:
        """Measure all rows of a model; ours come last, at the peaks that others reached."""
        if not self.results.rows(model):
            shutil.rmtree(WORK / self.name / model, ignore_errors=True)
        shares = SMOKE_SHARES if self.name == "smoke" else SHARES
        compiled = [JUDGE, *(("inductor", share) for share in shares)]
        eager_like = [*CHECKPOINTS, ("sac_ilp", 0), *(("aot", share) for share in shares)]
        self.take(model, in_turn(compiled, eager_like))
        rows = self.results.rows(model)
        eager_bytes = next(row.peak_bytes for row in rows if row.method == "eager")
        parts = [percent * eager_bytes // 100 for percent in PERCENTS]
        peaks = targets(front([row for row in rows if row.method == "inductor"]), [])
        planned = [("remat_compiled", peak) for peak in peaks]
        peaks = targets(front([row for row in rows if row.method in EAGER_LIKE]), parts)
        self.take(model, in_turn(planned, [("remat", peak) for peak in peaks]))


def in_turn(slow: Iterable[Key], fast: Iterable[Key]) -> list[Key]:
    """One of each in turn, so that quick rows are timed while slow ones are set up."""
    pairs = zip_longest(slow, fast)
    return [key for pair in pairs for key in pair if key is not None]


def main() -> int:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(prog="benchmarks.training", description=__doc__)
    parser.add_argument("--suite", choices=list(SUITES), default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; what it has is kept")
    parser.add_argument("--batches", action="store_true", help="the largest batches as well")
    parser.add_argument("--models", nargs="+", help="of the suite, to measure a few")
    asked = parser.parse_args()
    unknown = set(asked.models or ()) - set(SUITES[asked.suite])
    if unknown:
        raise SystemExit(
            f"no model {sorted(unknown)} in {asked.suite}: {list(SUITES[asked.suite])}"
        )
    if asked.suite == "gpu" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    results = Results.at(asked.out, asked.suite)
    suite = Suite(asked.suite, results)
    for model in asked.models or SUITES[asked.suite]:
        suite.run(model)
        if asked.batches:
            suite.largest(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
