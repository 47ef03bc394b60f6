"""One variant, planned at all that eager needs, and run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import remat
from remat.budgets import unmodified
from remat.graph_capture import trace
from remat.graph_capture.costs.op_costs import measure_costs
from remat.ranks.same_order import agreed_rewrite
from tests.fused_losses.variants import Size, Variant
from tests.limits import AMPLE_S


@dataclass(frozen=True)
class Found:
    """Peaks in bytes: of eager as predicted and measured, and of the plan at 100 %.

    `own_overhead` is what eager's own checkpoints take, `overhead` what the plan does.
    """

    unmodified_bytes: int
    eager_bytes: int
    predicted_bytes: int
    plan_bytes: int
    own_overhead: float
    overhead: float
    differences: tuple[str, ...]

    @property
    def misjudged(self) -> float:
        """The predicted unmodified peak over the measured one, minus one."""
        return self.unmodified_bytes / self.eager_bytes - 1

    @property
    def beyond(self) -> float:
        """The plan's measured peak over eager's, minus one."""
        return self.plan_bytes / self.eager_bytes - 1


def measured(variant: Variant, size: Size, solver: str = "auto") -> Found:
    """Plan at 100 % of the unmodified peak, and run both."""
    model, args = variant.make(size)
    with torch.autocast("cpu", torch.bfloat16, enabled=variant.autocast):
        traced = trace(model, args)
        graph = measure_costs(traced)
        found = remat.solve(graph, "100%", solver, time_limit_s=AMPLE_S)
        assert found.schedule is not None
        module = agreed_rewrite(model, found.schedule, trace=traced)
        check = remat.check(model, module, args, steps=1)
    eager = unmodified(graph)
    return Found(
        eager.peak_bytes, check.baseline_peak_bytes, found.peak_bytes, check.plan_peak_bytes,
        eager.overhead, found.overhead, check.differences,
    )  # fmt: skip
