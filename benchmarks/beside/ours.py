"""This project's two ways to make a step fit, with what they predict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import remat
from benchmarks.beside.methods import DoesNotApplyError, Variant
from benchmarks.beside.models import Trainee
from remat.api import UNBOUNDED_BYTES

LIMIT_S = 10.0


@dataclass(frozen=True)
class Planned:
    """A variant, its step that keeps everything if there is one, and what was predicted."""

    variant: Variant
    keep_all: Variant | None
    facts: Callable[[], dict[str, Any]]


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note the seconds that the block takes."""
    began_s = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began_s


def rewritten(trainee: Trainee, budget_bytes: int, device: str) -> Planned:
    """`remat.rewrite` of the schedule for a budget."""
    seconds: dict[str, float] = {}
    with timed(seconds, "capture_and_price_s"):
        graph = remat.capture(trainee.model, trainee.args, device=device)
    with timed(seconds, "solve_s"):
        result = remat.solve(graph, budget_bytes, time_limit_s=LIMIT_S)
    if result.schedule is None:
        raise DoesNotApplyError(result.message or f"no schedule found in {LIMIT_S:.0f} s")
    with timed(seconds, "rewrite_s"):
        module = remat.rewrite(trainee.model, result.schedule)
    everything = remat.solve(graph, UNBOUNDED_BYTES, "store_all").schedule
    assert everything is not None
    facts = {
        "budget_bytes": budget_bytes, "predicted_bytes": result.peak_bytes,
        "planned_overhead": result.overhead, "gap": result.gap, "ops": len(graph.ops), **seconds,
    }  # fmt: skip
    return Planned(
        Variant(module), Variant(remat.rewrite(trainee.model, everything)), lambda: facts
    )


def compiled(trainee: Trainee, budget_bytes: int) -> Planned:
    """`torch.compile(model, backend="remat")`."""
    return _compiled(trainee, {"budget": budget_bytes})


def compiled_keeping_all(trainee: Trainee) -> Planned:
    """The compiled step of the plan that keeps everything, over which plans have their overhead."""
    return _compiled(trainee, {"budget": UNBOUNDED_BYTES, "keep": "*"})


def _compiled(trainee: Trainee, options: dict[str, Any]) -> Planned:
    call = torch.compile(trainee.model, backend="remat", options=options)

    def facts() -> dict[str, Any]:
        plan = remat.compiled_plans()[-1]
        return {
            "budget_bytes": plan.budget_bytes, "predicted_bytes": plan.peak_bytes,
            "planned_overhead": plan.overhead, "gap": plan.gap, "search_s": plan.seconds,
            "is_torchs": plan.schedule is None,
        }  # fmt: skip

    return Planned(Variant(call), None, facts)
