"""Updates in backward: each parameter is stepped as soon as its gradient is there.

``backward()`` takes the optimizer's step for each parameter as soon as its gradient is there and no
op of the plan reads the parameter any more. Then it lets go of the gradient. So a step has room for
a few gradients and not for all. A loop stays as it is: ``optimizer.step()`` finds no gradients, and
schedules of the learning rate count it.

The idea is that of Lv et al. 2023, "Full parameter fine-tuning for large language models with
limited resources" (https://arxiv.org/abs/2306.09782). The rule for what is computed again is ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remat.levers.optimizer_in_backward import (
    optimizer_in_backward_of,
    refuse_clipping,
    refuse_scaling,
    require_no_other_reader,
)
from remat.solved import facts_of

if TYPE_CHECKING:
    from torch import fx

    from remat.step_spec import StepSpec


def updated_in_backward(spec: StepSpec) -> fx.GraphModule:
    from remat.ranks.same_order import ONE_RANK, require_group
    from remat.rewriter.graphs.updating import Updates
    from remat.rewriter.rewriting import rewrite
    from remat.step_planner import StepPlanner

    # All that cannot be right is refused before anything is traced.
    refuse_clipping(spec.options.get("max_grad_norm"))
    refuse_scaling()
    model, optimizer = spec.model, spec.optimizer_in_backward
    assert optimizer is not None
    release = optimizer_in_backward_of(model, optimizer, spec.loss_fn, spec.accumulate)
    planner = StepPlanner(spec, gradient_release=release, split=spec.split)
    require_no_other_reader(planner.traced, optimizer)
    require_group(planner.traced.joint.module, None, ONE_RANK.format(what="an update in backward"))
    found = planner.required(planner.found())
    assert found.result.schedule is not None
    updates = Updates(optimizer, type(model).__name__, accumulates=spec.accumulate)
    facts: Any = facts_of(found)
    module = rewrite(
        model, found.result.schedule, trace=planner.traced, updates=updates, audit=spec.audit,
        **facts,
    )  # fmt: skip
    # The check lets parameters be, so that the peak of a step that updates them is not compared.
    checked = planner.compared(module, found.graph, found.result.budget_bytes, is_bound=False)
    planner.say_planned(found, checked)
    return module
