"""Compiled steps: torch's compiler, torch with a memory budget, and ours at shares of its peak.

Models run without dropout, whose draws eager and Inductor make otherwise. Shares are of the peak
that was measured of `torch.compile`, here or in an earlier visit.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.comparison import methods
from benchmarks.comparison.methods import Variant
from benchmarks.gpu.measuring import Bench, equal_to, generate_no_kernels, settled
from benchmarks.gpu.models import table_entry
from benchmarks.gpu.rows import Row
from benchmarks.gpu.scheduler import Desk, Measure, Unit
from benchmarks.gpu.table import REHEARSED_ROUNDS, ROUNDS
from remat.compile.graph_context import compiled_plans
from remat.graph_capture.devices.cuda import clocks
from remat.rewriter.inductor import partition
from remat.rewriter.inductor.partition import FusedStep

STOCK = "torch.compile"
TORCHS = {STOCK: 1.0, "activation_memory_budget .5": 0.5}
SHARES = {"remat 80% of its peak": 0.8, "remat 60% of its peak": 0.6}
REHEARSED_SHARE = 2.0
"""Without kernels of Inductor's own, less does not fit."""
COMPILED_VARIANTS = (*TORCHS, *SHARES)


class _Compiled:
    """A model, and rows of its compiled steps."""

    def __init__(self, desk: Desk, name: str) -> None:
        self.desk, self.name, rehearse = desk, name, desk.settings.rehearse
        self.shares = dict.fromkeys(SHARES, REHEARSED_SHARE) if rehearse else SHARES
        if rehearse:
            generate_no_kernels()
        rounds = REHEARSED_ROUNDS if rehearse else ROUNDS
        entry = table_entry(name, rehearse=rehearse)
        self.bench = Bench(entry, desk.settings.device, draws=False, rounds=rounds)

        class TimedAlone(FusedStep):
            """Times kernels, for which the GPU is held; all other compilation goes beside."""

            def __init__(self, *args: Any) -> None:
                with desk.gpu():
                    super().__init__(*args)

        partition.FusedStep = TimedAlone

    def __call__(self, unit: Unit) -> Row:
        """Compile beside others, then measure alone."""
        name, bench = unit.key.rpartition("/")[2], self.bench
        torch._dynamo.reset()
        variant, row = self._variant(name)
        began_s, waited_s = time.perf_counter(), self.desk.waited_s
        bench.step(variant)
        waited_s = self.desk.waited_s - waited_s
        row["first_step_s"] = time.perf_counter() - began_s - waited_s
        eager = methods.eager(bench.trainee)
        with self.desk.gpu():
            row |= equal_to(bench.gradients(eager), bench.gradients(variant))
            row |= bench.memory(variant) | bench.times_us({"eager": eager, "step": variant})
            settled()
            row["clocks"] = clocks(bench.device)
        if name in SHARES:
            plan = compiled_plans()[-1]
            row |= {"predicted_peak_bytes": plan.peak_bytes, "planned_overhead": plan.overhead}
        return row

    def _variant(self, name: str) -> tuple[Variant, Row]:
        if name in TORCHS:
            return methods.compiled(self.bench.trainee, "inductor", TORCHS[name]), {}
        stock = self.desk.settings.rows.read().get(f"compiled/{self.name}/{STOCK}", {})
        if "peak_bytes" not in stock:
            raise RuntimeError(f"{STOCK} has no measured peak, of which this would be a share")
        budget_bytes = int(self.shares[name] * stock["peak_bytes"])
        options = {"budget": budget_bytes, "warm": False}
        made = torch.compile(self.bench.trainee.model, backend="remat", options=options)
        return Variant(made), {"budget_bytes": budget_bytes}


def begin_compiled(name: str, desk: Desk) -> Measure:
    """A model that is compiled."""
    return _Compiled(desk, name)
