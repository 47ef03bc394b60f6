"""One measurement, in a process of its own.

The step of the method and the unmodified one run in turn, so that drift hits both. Times are
medians of their ratios in a round, on one thread, by the processor's clock. The overhead of a
plan of ours is held against our own step that keeps everything, in the same process: between two
processes, ratios to the unmodified step differ by 2 %, and by more while others use the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.comparison import methods, ours
from benchmarks.comparison.calm import Round, timed_calmly
from benchmarks.comparison.fronts import TORCHS_KEPT
from benchmarks.comparison.methods import DoesNotApplyError, Variant
from benchmarks.comparison.models import SUITES, Trainee
from benchmarks.comparison.sac_ilp import ilp
from benchmarks.comparison.turns import Quiet, Turns
from remat.graph_capture.memory_events import measure_peak

JUDGED = ("inductor", "remat_compiled")
"""Methods whose gradients are held against those of the compiled step that keeps everything."""
AWAITED_S = 300.0
"""How long a row waits for gradients that another row is to write."""
GRADIENTS, DECOMPOSED, FASTEST = "gradients.pt", "decomposed.pt", "fastest_s"
SEED = 3
SMALL = 1e-3
"""A gradient smaller than this part of the largest may be nothing but rounding.

That of a bias before a norm is.
"""
RIGHT = 0.02
"""Relative error up to which gradients count as right.

Kernels that are fused differently round differently, and batch norm makes that larger. Gradients
of other random numbers are off by 1.
"""


class Bench:
    """A trainee on its device, and what is measured of variants of it."""

    def __init__(self, trainee: Trainee, device: str) -> None:
        self.device, self.is_cuda = device, device.startswith("cuda")
        args = tuple(arg.to(device) for arg in trainee.args)
        self.trainee = Trainee(trainee.model.to(device), args, trainee.blocks, trainee.chain)
        self.parameters = list(trainee.model.parameters())

    def autocast(self) -> AbstractContextManager[Any]:
        """bfloat16 on a GPU, nothing on a CPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.is_cuda else nullcontext()

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

    def peaks(self, variant: Variant) -> dict[str, int]:
        """Bytes at the peak of a step, parameters, buffers and the batch included."""
        for parameter in self.parameters:
            parameter.grad = None
        tensors = [*self.parameters, *self.trainee.model.buffers(), *self.trainee.args]
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


def variant_of(bench: Bench, method: str, amount: float) -> Variant:
    """The variant of the model by a method that is not ours."""
    trainee = bench.trainee
    makers: dict[str, Callable[[], Variant]] = {
        "eager": lambda: methods.eager(trainee),
        "checkpoint": lambda: methods.checkpointed(trainee, int(amount)),
        "selective": lambda: methods.selective(trainee),
        "sequential": lambda: methods.sequential(trainee),
        "sac_ilp": lambda: ilp(trainee, int(amount), bench.device),
        "aot": lambda: methods.compiled(trainee, "aot", amount),
        "inductor": lambda: methods.compiled(trainee, "inductor", amount),
        TORCHS_KEPT: lambda: methods.compiled_keeping_all(trainee),
    }
    return makers[method]()


def planned_of(bench: Bench, method: str, amount: float, quiet: Quiet) -> ours.Planned:
    """The variant by any method; only ours come with predictions."""
    if method == "remat":
        with bench.autocast():
            return ours.rewritten(bench.trainee, int(amount), bench.device, quiet)
    if method == "remat_compiled":
        return ours.compiled(bench.trainee, int(amount), quiet)
    return ours.Planned(variant_of(bench, method, amount), None, dict)


def error(found: list[Tensor], expected: list[Tensor], floor: float = 0.0) -> float:
    """Largest difference of two lists of gradients, over the norm of the expected one.

    A norm counts as no less than the `floor` part of the largest.
    """
    norms = [float(tensor.double().norm()) for tensor in expected]
    least = max(floor * max(norms), torch.finfo(torch.float32).tiny)
    return max(
        float((a.double() - b.double()).norm()) / max(norm, least)
        for a, b, norm in zip(found, expected, norms, strict=True)
    )


def measured(
    make: Callable[[], Bench], method: str, amount: float, folder: Path, turns: Turns
) -> dict[str, Any]:
    """The row; gradients of the compiled step that keeps everything lie in `folder`.

    Gradients are right if they are eager's, or those of the compiled step that keeps everything.
    A compiled step draws other random numbers than eager, so its gradients cannot be eager's.
    The compiled step alone is no judge either: torch 2.13's `default_partition` under Inductor
    gets the attention of a U-Net wrong, where its min-cut partition and our cuts get eager's
    gradients. Its row may be set up beside the rows that read its gradients, so they wait.
    """
    bench = make()
    eager = methods.eager(bench.trainee)
    references = [bench.gradients(eager)]
    began_s = time.perf_counter() - turns.waited_s
    planned = planned_of(bench, method, amount, Quiet(turns, folder / f"{method}.priced"))
    found = bench.gradients(planned.variant)
    facts = {"setup_s": time.perf_counter() - turns.waited_s - began_s, **planned.facts()}
    facts |= bench.peaks(planned.variant)
    if method == TORCHS_KEPT:
        _write(found, folder / GRADIENTS)
    if method == "aot" and error(found, references[0], SMALL) > RIGHT:
        references.append(_decomposed(bench, folder / DECOMPOSED))
    if planned.keep_all:
        with Turns(folder / f"{method}.kept_turns").first(folder / f"{method}.kept"):
            bench.step(planned.keep_all)
    facts |= times(bench, eager, planned, turns, folder / FASTEST)
    if method in JUDGED:
        references.append(_awaited(folder / GRADIENTS))
    if method != TORCHS_KEPT:
        off = min(error(found, expected, SMALL) for expected in references)
        facts |= {"gradient_error": off, "is_right": off <= RIGHT}
    return facts


def times(
    bench: Bench, eager: Variant, planned: ours.Planned, turns: Turns, fastest: Path
) -> dict[str, Any]:
    """Seconds of the unmodified step, and what the variant takes over it and over keeping all."""
    keep_all = [planned.keep_all] if planned.keep_all else []
    rounds, compared = bench.rounds(eager, planned.variant, *keep_all), (1, 2)
    timed = timed_calmly(rounds, turns, fastest, compared if keep_all else None)
    found = {
        "was_slow": timed.was_slow, "rounds": len(timed.rounds_s), "eager_s": timed.step_s(0),
        "over_eager": timed.ratio(1, 0) - 1,
    }  # fmt: skip
    return found | ({"measured_overhead": timed.ratio(*compared) - 1} if keep_all else {})


def _decomposed(bench: Bench, path: Path) -> list[Tensor]:
    """Gradients of the decomposed step that keeps everything; the first that asks writes them."""
    if not path.exists():
        _write(bench.gradients(methods.decomposed_keeping_all(bench.trainee)), path)
    return torch.load(path)


def _write(gradients: list[Tensor], path: Path) -> None:
    """Write the file in one piece, since other rows may look for it."""
    part = path.with_suffix(f".{os.getpid()}")
    torch.save(gradients, part)
    part.replace(path)


def _awaited(path: Path) -> list[Tensor]:
    """Gradients that another row writes. If they are not there, that row is under way."""
    began_s = time.monotonic()
    while not path.exists():
        if time.monotonic() - began_s > AWAITED_S:
            raise RuntimeError(f"{path.name} of the compiled step that keeps everything is missing")
        time.sleep(0.1)
    return torch.load(path)


def row(suite: str, model: str, method: str, amount: float, folder: Path) -> dict[str, Any]:
    """The row of a method, in this process."""
    torch.set_num_threads(1)

    def make() -> Bench:
        return Bench(SUITES[suite][model].make(), "cuda" if suite == "gpu" else "cpu")

    turns = Turns(folder.parent / "turns", None if suite == "gpu" else os.getppid())
    try:
        return measured(make, method, amount, folder, turns)
    except DoesNotApplyError as error_:
        return {"error": str(error_), "does_not_apply": True}
