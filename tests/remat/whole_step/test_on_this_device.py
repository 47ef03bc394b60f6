"""What cannot be run as a whole step here: one line, before anything runs, with a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import (
    BudgetError,
    CaptureError,
    DeviceError,
    RematError,
    SolverError,
)
from remat.whole_step.running import WholeStep


def chain() -> nn.Sequential:
    layers = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(8))
    return nn.Sequential(*layers)


def asked(model: nn.Module, **changed: Any) -> Any:
    given: dict[str, Any] = {
        "args": (torch.zeros(8, 32),),
        "optimizer_in_backward": torch.optim.AdamW(model.parameters()), "budget": "1GiB",
        "microbatches": 2,
        "loss_fn": nn.functional.mse_loss, "target": torch.zeros(8, 32), "host": "64MiB",
    }  # fmt: skip
    return remat.rematerialize(model, **{**given, **changed})


def test_a_cpu_gets_a_step_that_runs() -> None:
    step = asked(chain())
    assert isinstance(step, WholeStep)
    assert repr(step).startswith("WholeStep(Sequential: 2 microbatches, peak ")


class Counting(nn.Sequential):
    """Sets an attribute at each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class GivenGradient(nn.Module):
    """A parameter whose gradient is what backward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.rest = nn.Parameter(torch.zeros(())), chain()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x).mean() + self.shift


def partly(make: Callable[..., Any]) -> Callable[[nn.Module], Any]:
    """An optimizer of all parameters but the first."""
    return lambda model: make([*model.parameters()][1:])


def whole(make: Callable[..., Any], **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: make(model.parameters(), **options)


@pytest.mark.parametrize(
    ("model", "changed", "kind", "says"),
    [
        (chain(), {"loss_fn": None, "target": None}, CaptureError,
         "give loss_fn=.*needs one loss, a single number"),
        (chain(), {"optimizer_in_backward": partly(torch.optim.AdamW)}, CaptureError,
         "add 0.0.weight of Sequential to the optimizer"),
        (chain(), {"optimizer_in_backward": whole(torch.optim.AdamW, amsgrad=True)},
         CaptureError, "leave out amsgrad"),
        (chain(), {"optimizer_in_backward": whole(torch.optim.Adagrad)}, CaptureError,
         "a Adagrad cannot update parameters one by one"),
        (chain(), {"optimizer_in_backward": None}, CaptureError,
         "give optimizer_in_backward=.* too: a whole step updates parameters"),
        (chain(), {"compile": True}, CaptureError, "leave out compile=, or microbatches=: it bel"),
        (chain(), {"order": "free"}, CaptureError, "leave out order=, or microbatches="),
        (chain(), {"args": None}, CaptureError, "give one batch too: a whole step is planned for"),
        (chain(), {"microbatches": 0}, BudgetError, "give 1 or more microbatches"),
        (chain(), {"host": None}, BudgetError, "give host='120GiB' too"),
        (chain()[:4], {}, SolverError, "leave out microbatches=, or give the model more equal lay"),
        (chain(), {"sharding": remat.Sharding("fsdp2", 2, "0")}, DeviceError,
         "leave out blocks of the sharding, or microbatches=: a whole step finds its layers by"),
        (Counting(*chain()), {}, CaptureError, "forward of Counting sets"),
        (GivenGradient(), {"loss_fn": None, "target": None}, CaptureError,
         "and what backward is given are one tensor, which a whole step would change twice"),
        (chain(), {"budget": 32768}, BudgetError, "give budget=.*: no plan of this step fits"),
        (chain(), {"host": 1024, "budget": 200_000}, BudgetError,
         "give host=.* or more room on NVMe: no plan of this step fits"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused(
    model: nn.Module, changed: dict[str, Any], kind: type[RematError], says: str
) -> None:
    if make := changed.get("optimizer_in_backward"):
        changed = {**changed, "optimizer_in_backward": make(model)}
    with pytest.raises(kind, match=says) as refused:
        asked(model, **changed)
    assert "\n" not in str(refused.value)
    assert all(one.numel() and one.grad is None for one in model.parameters())
