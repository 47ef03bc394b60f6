"""This project's two ways to make a step fit, with what they predict.

What a plan predicts depends on how ops are timed. Three of eight plans of the LSTM had been 3 to
6 points dearer than planned, when ops, the step and its two forwards were each timed in one go.
With costs taken in passes and in turn, four plans of it at 19,410,628 bytes were off by 1.2,
1.2, 2.5 and .9 points, in 57 rounds each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._inductor.compile_fx import compile_fx

import remat
from benchmarks.comparison.by_hand.early_update import Updating, adamw, finished_by
from benchmarks.comparison.methods import DoesNotApplyError, Variant
from benchmarks.comparison.models import Trainee
from benchmarks.comparison.turns import Quiet
from remat.budgets import UNBOUNDED_BYTES
from remat.compile.graph_context import compiled_plans
from remat.graph_capture.errors import BudgetError
from remat.ranks.same_order import agreed_rewrite
from remat.rewriter.inductor import partition
from remat.rewriter.inductor.partition import FusedStep, Pair, Partitioner, planned

SOLVE_S = "REMAT_COMPARISON_SOLVE_S"
"""The variable of the environment with the seconds that each solve may take."""
GAP = "REMAT_COMPARISON_GAP"
"""The variable with the gap at which each solve may end."""
LEVERS: dict[str, dict[str, Any]] = {
    "remat": {"split": "none"},
    "remat_pieces": {"split": "exact"},
    "remat_host": {"split": "none", "host": "8GiB"},
}
"""What the captured step of a method may do besides recomputing."""


def limit_s() -> float:
    """Seconds that each solve may take."""
    return float(os.environ[SOLVE_S])


def gap() -> float:
    """Gap at which each solve may end."""
    return float(os.environ[GAP])


@dataclass(frozen=True)
class Planned:
    """A variant, its step that keeps everything if there is one, and what was predicted.

    `facts` are of the variant's first step. They must be asked for before anything else is
    compiled.
    """

    variant: Variant
    keep_all: Variant | None
    facts: Callable[[], dict[str, Any]]


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note the seconds that the block takes."""
    began_s = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began_s


def rewritten(
    trainee: Trainee, budget_bytes: int, device: str, quiet: Quiet, method: str = "remat"
) -> Planned:
    """The schedule applied for a budget, with the levers of a method."""
    seconds: dict[str, float] = {}
    with quiet.timing(), timed(seconds, "capture_and_price_s"):
        graph = remat.capture(trainee.model, trainee.args, device=device, **LEVERS[method])
    with quiet.solving(), timed(seconds, "solve_s"):
        budget = f"{budget_bytes}B allocated"
        result = remat.solve(graph, budget, time_limit_s=limit_s(), gap=gap())
    if result.schedule is None:
        raise DoesNotApplyError(result.message or f"no schedule found in {limit_s():.0f} s")
    with timed(seconds, "rewrite_s"):
        module = agreed_rewrite(trainee.model, result.schedule)
    everything = remat.solve(graph, UNBOUNDED_BYTES, "store_all").schedule
    assert everything is not None
    facts = {
        "budget_bytes": budget_bytes, "predicted_bytes": result.peak_bytes,
        "planned_overhead": result.overhead, "gap": result.gap, "ops": len(graph.ops), **seconds,
    }  # fmt: skip
    return Planned(
        Variant(module), Variant(agreed_rewrite(trainee.model, everything)), lambda: facts
    )


def updating(trainee: Trainee, budget_bytes: int, quiet: Quiet) -> Planned:
    """`optimizer_in_backward`: its backward updates parameters as gradients arrive."""
    optimizer = adamw(trainee.model)

    def within(budget: str | int) -> Any:
        return remat.rematerialize(
            trainee.model, trainee.args, optimizer_in_backward=optimizer, budget=budget,
            split="none", time_limit_s=limit_s(), gap=gap(), check=False,
        )  # fmt: skip

    with quiet.solving():
        try:
            module, kept = within(budget_bytes), within(UNBOUNDED_BYTES)
        except BudgetError as error:
            raise DoesNotApplyError(str(error)) from error
    plan = module._remat_prediction
    facts = {
        "budget_bytes": budget_bytes, "predicted_bytes": plan.peak_bytes,
        "planned_overhead": plan.overhead, "gap": plan.gap,
    }  # fmt: skip
    finish = finished_by(optimizer)
    both = [Updating(one, optimizers=(optimizer,), finish=finish) for one in (module, kept)]
    return Planned(both[0], both[1], lambda: facts)


def compiled(trainee: Trainee, budget_bytes: int, quiet: Quiet) -> Planned:
    """`torch.compile(model, backend="remat")`, in a process that it changes for good."""

    class TimedAlone(FusedStep):
        def __init__(self, *args: Any) -> None:
            with quiet.timing():
                super().__init__(*args)

    partition.FusedStep = TimedAlone
    call = torch.compile(trainee.model, backend="remat", options={"budget": budget_bytes})
    keep_all = torch.compile(trainee.model, backend=_keeping_all)
    return Planned(Variant(call), Variant(keep_all), _facts_of_last_plan)


def _keeping_all(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile as the backend does the plan that keeps everything, without its search for others.

    The code is the same in all rows of a model, so the first row generates it.
    """
    (outputs,) = gm.graph.output_node().args
    partitioner = Partitioner(_everything_kept, len(pytree.tree_leaves(outputs)))
    with planned(partitioner) as patches:
        patches |= {"fx_graph_cache": True}
        return compile_fx(gm, inputs, partitioner.compile_inner, config_patches=patches)


def _everything_kept(step: FusedStep) -> Pair:
    schedule = remat.solve(step.graph, UNBOUNDED_BYTES, "store_all").schedule
    assert schedule is not None
    return step.emit(schedule)


def _facts_of_last_plan() -> dict[str, Any]:
    plan = compiled_plans()[-1]
    return {
        "budget_bytes": plan.budget_bytes, "predicted_bytes": plan.peak_bytes,
        "planned_overhead": plan.overhead, "gap": plan.gap, "search_s": plan.seconds,
    }  # fmt: skip
