"""A check runs no more steps than its figures need."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from remat.graph_capture.devices.meter import CpuMeter, Run
from remat.rewriter.checking import check


@pytest.mark.parametrize(("accumulate", "pairs"), [(False, 1), (True, 2)])
def test_the_run_for_equality_confirms_a_time(
    accumulate: bool, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Run] = []
    step_us = CpuMeter.step_us

    def noted(meter: CpuMeter, run: Run) -> float:
        timed.append(run)
        return step_us(meter, run)

    monkeypatch.setattr(CpuMeter, "step_us", noted)
    monkeypatch.setattr(check, "SOON_US", 1e-3)
    monkeypatch.setattr(check, "have_agreed", lambda times: len(times) > 1)
    model = nn.Linear(3, 2)
    found = check.check(model, model, (torch.ones(4, 3),), accumulate=accumulate)
    assert found.equal
    assert len(timed) == 2 * pairs


LAYER = nn.Linear(300, 200)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each run of a step, whether gradients were there before its backward."""
    noted, backward = list[bool](), check._backward

    def noting(output: torch.Tensor) -> None:
        noted.append(LAYER.weight.grad is not None)
        backward(output)

    monkeypatch.setattr(check, "_backward", noting)
    return noted


@pytest.mark.parametrize(
    ("accumulate", "runs"),
    [(False, [False] * 2), (True, [False, False, True])],
)
def test_the_peak_is_of_the_run_that_is_compared_unless_gradients_are_there(
    accumulate: bool, runs: list[bool], ran: list[bool]
) -> None:
    found = check.check(LAYER, LAYER, (torch.ones(4, 300),), accumulate=accumulate, steps=0)
    assert found.equal
    assert found.plan_peak_bytes > 0
    assert ran == runs


def test_results_that_are_held_to_be_compared_are_no_part_of_a_peak(ran: list[bool]) -> None:
    """The gradients of eager, which take more than all else, are held while the plan runs."""
    x = torch.ones(4, 300)
    found = check.check(LAYER, LAYER, (x,), steps=1)
    assert len(ran) == 4
    parameters = sum(one.nbytes for one in LAYER.parameters())
    output = 4 * 4 * 200
    assert found.baseline_peak_bytes == found.plan_peak_bytes
    # Backward makes a gradient for each parameter and for the output.
    assert found.plan_peak_bytes == 2 * parameters + x.nbytes + 2 * output
