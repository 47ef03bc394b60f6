"""Shares of each layer kept, hosted and made again, by a linear program; then values by rank.

Also called: two-level program, torchtitan's auto_perf_maxing.
Source: pull request https://github.com/pytorch/torchtitan/pull/3942, 2026.
Solves: an outer program has for each layer the shares kept and hosted; the rest is made again.
It loses least recomputation so that (1) what layers from any one on host leaves before forward
ends, (2) it is back when their backward begins, and (3) while any layer's backward runs, that
layer as a whole, the next one's hosted share and the kept shares of all before it fit a cap. Then,
layer by layer, the values dearest to make again for their bytes are kept, the next ones hosted.
The cap is tried in equal steps, and the fastest schedule whose true peak fits is taken.
Unlike the source: the inner choice is by rank and not by a second program; costs are the graph's.
Optimal: where the step fits as it is. Cost: O(steps) linear programs of two variables a layer.
Shortcomings: needs layers, as `every_n_layers` does; a share is no set of values, so what is chosen
misses its cap by a value a layer; blind to chains of recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from remat.baselines.offload_policies import CopyChoice, Saved, SteppedPolicy
from remat.solver.backends.mip import Limits, MixedProgram, solve_program

_UNIT = 1e6  # bytes in a unit of the rows: HiGHS's tolerances are absolute


@dataclass(frozen=True)
class LayerFractions(SteppedPolicy):
    """Solver with shares of layers.

    Attributes
    ----------
    steps : caps tried, of all that is saved down to nothing.
    least_bytes : smaller values stay.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    name: ClassVar[str] = "layer_fractions"

    def choices(self, saved: Saved) -> Iterator[CopyChoice]:
        layers = Layers(saved)
        if not layers.values or not saved.large:
            return
        for i in range(self.steps):
            cap_bytes = saved.total_bytes * (self.steps - 1 - i) / (self.steps - 1)
            shares = layers.shares(cap_bytes, self.time_limit_s)
            if shares is not None:
                yield layers.choice(shares)


@dataclass(frozen=True)
class Layers:
    saved: Saved

    @cached_property
    def values(self) -> list[list[int]]:
        return list(self.saved.in_layers(self.saved.values).values())

    @cached_property
    def size_bytes(self) -> list[int]:
        return [sum(self.saved.problem.size_bytes[v] for v in layer) for layer in self.values]

    def shares(self, cap_bytes: float, time_limit_s: float) -> list[tuple[float, float]] | None:
        program, last = MixedProgram(), len(self.values) - 1
        lost = [self._again_us(layer) for layer in self.values]
        unit_us = max(lost, default=0.0) or 1.0
        # Values kept or hosted save their share of the layer's recomputation.
        kept = [program.variable(-us / unit_us) for us in lost]
        hosted = [
            # Backward starts with the last layer, so its copies have no time.
            program.variable(-us / unit_us, upper=0.0 if i == last else 1.0)
            for i, us in enumerate(lost)
        ]
        for pair in zip(kept, hosted, strict=True):  # the rest is made again
            program.row([(share, 1.0) for share in pair], upper=1.0)
        self._windows(program, hosted)
        self._peaks(program, kept, hosted, cap_bytes)
        values = solve_program(program, Limits(time_limit_s, relaxed=True)).values
        if values is None:
            return None
        return [(values[k], values[h]) for k, h in zip(kept, hosted, strict=True)]

    def choice(self, shares: list[tuple[float, float]]) -> CopyChoice:
        """Values of each layer by rank: kept, then hosted, as far as the shares go."""
        saved = self.saved
        size_bytes, large = saved.problem.size_bytes, frozenset(saved.large)
        # Keep everything outside of the layers.
        kept = set(saved.values) - {v for layer in self.values for v in layer}
        hosted: set[int] = set()
        for layer, total_bytes, share in zip(self.values, self.size_bytes, shares, strict=True):
            keep_bytes, host_bytes = (part * total_bytes for part in share)
            for v in sorted(layer, key=lambda v: -saved.again_us[v] / max(size_bytes[v], 1)):
                # Values that cannot move, or must not be made again, stay.
                must = v not in large or math.isinf(saved.again_us[v])
                if must or size_bytes[v] <= keep_bytes:
                    kept.add(v)
                    keep_bytes -= size_bytes[v]
                elif size_bytes[v] <= host_bytes:
                    hosted.add(v)
                    host_bytes -= size_bytes[v]
        return saved.released(hosted, kept)

    def _again_us(self, layer: list[int]) -> float:
        again = (self.saved.again_us[v] for v in layer)
        return sum(us for us in again if not math.isinf(us))

    def _windows(self, program: MixedProgram, hosted: list[int]) -> None:
        """Σ of layers ≥ i: size · hosted ≤ rate · the time from layer i to the end of forward."""
        saved = self.saved
        for i, layer in enumerate(self.values):
            terms = [(hosted[j], self.size_bytes[j] / _UNIT) for j in range(i, len(hosted))]
            made_us = saved.begin_us[min(saved.problem.producer[v] for v in layer)]
            read_us = saved.begin_us[min(saved.first_read[v] for v in layer)]
            out_us, back_us = saved.forward_us - made_us, read_us - saved.forward_us
            program.row(terms, upper=float(out_us) * saved.links.d2h.bytes_per_us / _UNIT)
            # The same on the way back, with the time from there to the backward of the layer.
            program.row(terms, upper=float(back_us) * saved.links.h2d.bytes_per_us / _UNIT)

    def _peaks(
        self, program: MixedProgram, kept: list[int], hosted: list[int], cap_bytes: float
    ) -> None:
        """Σ of layers < i: size · kept, plus size · hosted of layer i - 1, ≤ cap - size of i."""
        for i, size_bytes in enumerate(self.size_bytes):
            terms = [(kept[j], self.size_bytes[j] / _UNIT) for j in range(i)]
            if i:
                terms.append((hosted[i - 1], self.size_bytes[i - 1] / _UNIT))
                program.row(terms, upper=max(cap_bytes - size_bytes, 0.0) / _UNIT)
