"""Training steps made to fit, by everything that people use: `python -m benchmarks.training`.

Each model of a suite is trained for a few steps as it is, with torch's own ways to save memory,
and with plans. Budgets of plans are the peaks that the other rows reached, so that tables compare
at equal peaks. Every row is measured in a process of its own, in turn with the unmodified step.
Rows that are in `--out` already are not measured again.
`python -m benchmarks.comparison.document` makes docs/benchmarks.md from the results.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat, zip_longest
from pathlib import Path

import torch

from benchmarks import GAP_OF_FIGURES
from benchmarks.comparison import batches
from benchmarks.comparison.batches import CHECKPOINTS, GPU_GIB, METHODS
from benchmarks.comparison.cores import CORES
from benchmarks.comparison.fronts import TORCHS_KEPT, front, targets
from benchmarks.comparison.kept_results import Key, Results, name_of
from benchmarks.comparison.methods import SHARES
from benchmarks.comparison.models import SUITES
from benchmarks.comparison.ours import GAP, SOLVE_S
from benchmarks.comparison.own_process import OwnProcesses
from benchmarks.comparison.row import GRADIENTS, JUDGED, row
from benchmarks.running.kept_memory import SETTINGS

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "training"
LIMIT_S = 900.0
WORKERS = 4
"""Rows under way at once on CPUs with more than one core. A GPU's memory is for one row."""
JUDGE: Key = (TORCHS_KEPT, 0)
"""The row with whose gradients those of other compiled rows are compared."""
EAGER_LIKE = ("aot", *(method for method, _ in CHECKPOINTS))
BY_HAND: tuple[Key, ...] = (
    ("save_on_cpu", 0), ("offload", 1), ("offload", 2), ("chunked", 4), ("chunked", 16),
    ("adamw", 0), ("adamw_in_backward", 0),
)  # fmt: skip
BESIDE = {
    "remat_host": ("save_on_cpu", "offload"),
    "remat_pieces": ("chunked",),
    "remat_step": ("adamw_in_backward",),
}
"""Levers of ours, and the methods at whose peaks they are measured."""
LOWER = {"remat_step": 60}
"""Per cent of the least of those peaks, where a lever is measured too: hooks may not lower it."""
LEFT_OVER = 3
"""The status of a run that left rows to the next."""
SMOKE_SHARES = (0.3,)
PERCENTS = (80, 60, 40)
"""Of the unmodified peak: budgets of ours beside the peaks of others."""


class Suite:
    """A suite under way."""

    def __init__(
        self, name: str, results: Results, within_s: float, solve_s: float, gap: float
    ) -> None:
        self.name, self.results = name, results
        self.ends_s = time.monotonic() + within_s
        self.has_left = False
        kept = {"REMAT_CACHE": str(WORK / name / "prices"), "KINETO_LOG_LEVEL": "99"}
        asked = {SOLVE_S: str(solve_s), GAP: str(gap)}
        self.processes = OwnProcesses({**kept, **SETTINGS, **asked}, LIMIT_S)
        is_one = name == "gpu" or len(CORES) < 2
        self.workers = ThreadPoolExecutor(1 if is_one else WORKERS)
        self.cores = ThreadPoolExecutor(1 if is_one else min(len(CORES), WORKERS))

    def is_late(self) -> bool:
        """Whether no further row may begin; then one is left to the next run."""
        self.has_left = self.has_left or time.monotonic() >= self.ends_s
        return self.has_left

    def take(self, model: str, keys: Iterable[Key]) -> None:
        """Measure the rows that are missing, several at once."""
        folder = WORK / self.name / model
        folder.mkdir(parents=True, exist_ok=True)
        missing = [key for key in keys if not self.results.has(model, key)]
        if any(key[0] in JUDGED for key in missing) and not (folder / GRADIENTS).exists():
            missing = [JUDGE, *(key for key in missing if key != JUDGE)]

        def one(key: Key) -> None:
            if self.is_late():
                return
            found = self.processes.answer(row, self.name, model, *key, folder)
            self.results.keep(model, key, found)

        list(self.workers.map(one, missing))

    def largest(self, model: str) -> None:
        """The largest batches of a model within its unmodified peak, or the memory of GPUs."""
        eager = next(row for row in self.results.rows(model) if row.method == "eager")
        budgets = [eager.peak_bytes] if self.name != "gpu" else [gib << 30 for gib in GPU_GIB]
        turns = WORK / self.name / "turns"

        def one(key: Key, budget: int) -> None:
            if self.is_late():
                return
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
        eager_like = [*CHECKPOINTS, ("sac_ilp", 0), *(("aot", share) for share in shares), *BY_HAND]
        self.take(model, in_turn(compiled, eager_like))
        if self.has_left:
            return
        rows = self.results.rows(model)
        eager_bytes = next(row.peak_bytes for row in rows if row.method == "eager")
        parts = [percent * eager_bytes // 100 for percent in PERCENTS]
        peaks = targets(front([row for row in rows if row.method == "inductor"]), [])
        planned = [("remat_compiled", peak) for peak in peaks]
        peaks = targets(front([row for row in rows if row.method in EAGER_LIKE]), parts)
        levers = [(ours, peak) for ours in BESIDE for peak in self.peaks_beside(model, ours)]
        self.take(model, in_turn(planned, [*(("remat", peak) for peak in peaks), *levers]))

    def peaks_beside(self, model: str, ours: str) -> list[int]:
        """Budgets for a lever of ours: the peaks of what people do for the same."""
        rows = [row for row in self.results.rows(model) if row.method in BESIDE[ours]]
        least = min((row.peak_bytes for row in rows if row.is_measured), default=0)
        lower = [LOWER[ours] * least // 100] if least and ours in LOWER else []
        return targets(front(rows), lower)


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
    parser.add_argument(
        "--minutes", type=float, default=math.inf,
        help="begin no row after so many; status 3 says that the next run goes on",
    )  # fmt: skip
    parser.add_argument(
        "--solve-seconds", type=float, default=10, help="of each solve of ours at most"
    )
    parser.add_argument(
        "--gap", type=float, default=GAP_OF_FIGURES, help="at which a solve of ours may end before"
    )
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
    suite = Suite(asked.suite, results, 60 * asked.minutes, asked.solve_seconds, asked.gap)
    for model in asked.models or SUITES[asked.suite]:
        suite.run(model)
        if asked.batches and not suite.has_left:
            suite.largest(model)
        if suite.has_left:
            print("rows are left: the same command goes on")
            return LEFT_OVER
    return 0


if __name__ == "__main__":
    sys.exit(main())
