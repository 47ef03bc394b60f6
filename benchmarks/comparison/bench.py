"""A model on its device, and what is measured of a step of it: gradients, peak, seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from benchmarks.comparison import methods
from benchmarks.comparison.calm import Round
from benchmarks.comparison.methods import Variant
from benchmarks.comparison.models import Trainee
from remat.graph_capture.devices.memory_events import measure_peak

SEED = 3


class Bench:
    """A trainee on its device, and what is measured of variants of it.

    Attributes
    ----------
    fastest : the file that keeps the seconds of the fastest unmodified step so far.
    """

    fastest = "fastest_s"

    def __init__(self, trainee: Trainee, device: str) -> None:
        self.device, self.is_cuda = device, device.startswith("cuda")
        args = tuple(arg.to(device) for arg in trainee.args)
        self.trainee = Trainee(trainee.model.to(device), args, trainee.blocks, trainee.chain)
        self.parameters = list(trainee.model.parameters())

    def autocast(self) -> AbstractContextManager[Any]:
        """bfloat16 on a GPU, nothing on a CPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.is_cuda else nullcontext()

    def unmodified(self) -> Variant:
        """The step that all others are timed with."""
        return methods.eager(self.trainee)

    def step(self, variant: Variant) -> None:
        """One training step without an optimizer; earlier gradients are dropped."""
        for parameter in self.parameters:
            parameter.grad = None
        with variant.context():
            with self.autocast():
                loss = variant.call(*self.trainee.args)
            loss.backward()

    def gradients(self, variant: Variant) -> list[Tensor]:
        """Of a step from a fixed random state."""
        torch.manual_seed(SEED)
        self.step(variant)
        return [p.grad.clone() for p in self.parameters if p.grad is not None]

    def rounds(self, *variants: Variant) -> Callable[[], Round]:
        """Warm each up; a call then takes a step of each in turn.

        Times are the processor's seconds on a CPU, the clock's on a GPU.
        """
        for variant in variants:
            self.step(variant)
        # The first is the unmodified step, and the others follow in either order in turn. On a
        # shared machine that step is fast by chance, the next one .6 as much, the one after .4.
        # In one order the two that are compared would get unequal shares of its luck.
        orders = cycle([[0, *range(1, len(variants))], [0, *range(len(variants) - 1, 0, -1)]])

        def measure() -> Round:
            taken_s = {number: self._taken_s(variants[number]) for number in next(orders)}
            return [taken_s[number] for number in range(len(variants))]

        return measure

    def _taken_s(self, variant: Variant) -> float:
        began_s = self._now_s()
        self.step(variant)
        return self._now_s() - began_s

    def _now_s(self) -> float:
        if not self.is_cuda:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def held(self, variant: Variant) -> list[Tensor]:
        """What is there before the step and stays."""
        return [*self.parameters, *self.trainee.model.buffers(), *self.trainee.args]

    def peaks(self, variant: Variant) -> dict[str, int]:
        """Bytes at the peak of a step, parameters, buffers and the batch included."""
        for parameter in self.parameters:
            parameter.grad = None
        tensors = self.held(variant)
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        held_bytes = sum(storages.values())
        if not self.is_cuda:
            return {"peak_bytes": held_bytes + measure_peak(lambda: self.step(variant))}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        other_bytes = torch.cuda.memory_allocated() - held_bytes
        self.step(variant)
        return {
            "peak_bytes": torch.cuda.max_memory_allocated() - other_bytes,
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }
