"""A check times no more steps than its figures need."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from remat.graph_capture.devices.cpu import CpuMeter
from remat.graph_capture.devices.meter import Run
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
