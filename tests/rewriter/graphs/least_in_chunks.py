"""The least peak of a step that may run in chunks, beside that of the whole one."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import remat
from remat.ranks.same_order import agreed_rewrite
from remat.schedules.simulate import simulate


def require_lower_peak(model: nn.Module, args: tuple[Any, ...], part: float) -> None:
    """In chunks less than `part` of the least peak does, to eager's bits and as predicted."""
    whole = remat.solve(remat.capture(model, args, split="none"), "min")
    graph = remat.capture(model, args, split="exact")
    result = remat.solve(graph, "min")
    assert result.schedule is not None
    assert result.schedule.chunks
    assert result.peak_bytes < part * whole.peak_bytes
    assert result.peak_bytes == simulate(graph, result.schedule).peak_bytes
    module = agreed_rewrite(model, result.schedule)
    found = remat.check(model, module, args, steps=1)
    assert found.differences == ()
    assert found.plan_peak_bytes == pytest.approx(result.peak_bytes, rel=0.01)
