"""What an optimizer takes while it steps, after backward, beside its state."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from remat.graph_capture import capture
from remat.graph_capture.devices.memory_events import measure_peak
from remat.solved import infeasible_text
from remat.solver import solve_within
from remat.solver.budgets.sweep import least_peak
from remat.solver.result import update_peak_bytes


def step(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    return {"model": model, "args": (torch.ones(2, 256),), "loss_fn": torch.sum, **changes}


OPTIMIZERS: dict[Any, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=1e-3, foreach=True),
    "momentum": lambda p: SGD(p, lr=1e-3, momentum=0.9, foreach=True),
    "adamw": lambda p: AdamW(p, lr=1e-3, foreach=True),
    "adamw-fused": lambda p: AdamW(p, lr=1e-3, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_step_of_the_optimizer_takes_is_what_is_measured(name: Any) -> None:
    given = step(optimizer=name)
    optimizer = OPTIMIZERS[name](given["model"].parameters())
    for _ in range(2):  # the first makes the state
        for parameter in given["model"].parameters():
            parameter.grad = torch.randn_like(parameter)
        measured_bytes = measure_peak(optimizer.step)
    found = capture(**given).resident
    assert found.update_bytes == pytest.approx(measured_bytes, rel=0.01, abs=256)
    assert (name == "adamw") == (found.update_bytes == found.parameters_bytes)


def test_a_budget_on_cuda_has_room_for_the_step_of_the_optimizer() -> None:
    graph = capture(**step(optimizer="adamw"), device="h100")
    trained_bytes = graph.resident.parameters_bytes
    made = graph.resident.optimizer_bytes + trained_bytes + graph.resident.update_bytes
    whole_bytes = update_peak_bytes(graph)
    assert whole_bytes == pytest.approx(trained_bytes + made, rel=0.01)
    assert least_peak(graph).peak_bytes < whole_bytes  # so it is the optimizer that does not fit
    assert least_peak(graph).budget_bytes == whole_bytes
    assert solve_within(graph, whole_bytes).schedule is not None
    lost = solve_within(graph, whole_bytes - 1)
    assert (lost.schedule, lost.least_feasible_bytes) == (None, whole_bytes)
    for other in ({"optimizer": "adamw-fused", "device": "h100"}, {"optimizer": "adamw"}):
        fits = capture(**step(**other))
        assert update_peak_bytes(fits) == 0
        assert solve_within(fits, whole_bytes - 1).schedule is not None


def test_a_budget_that_the_optimizer_exceeds_is_refused_with_a_way_out() -> None:
    graph = capture(**step(optimizer="adamw"), device="h100")
    says = (
        r"^try AdamW\(\.\.\., fused=True\) with optimizer='adamw-fused', as AdamW's own step takes "
        r"1\.51 MiB more by default, budget="
    )
    assert re.match(says, infeasible_text(solve_within(graph, 7 << 20)))
