"""The live bytes of a real step, moment by moment."""

from __future__ import annotations

import numpy as np
import torch

import remat
from remat.graph_capture.devices.memory_events import measure_live, measure_peak
from remat.rewriter.checking.measured_step import measured_step
from tests.limits import AMPLE_S
from tests.models import batch, mlp


def test_moments_rise_and_bytes_are_those_allocated() -> None:
    def run() -> None:
        kept = torch.empty(1000, dtype=torch.uint8)
        torch.empty(500, dtype=torch.uint8)
        del kept

    moments, live = measure_live(run)
    assert moments[0] == 0
    assert moments == sorted(moments)
    assert max(live) == measure_peak(run)
    assert max(live) >= 1500
    assert live[-1] == 0


def test_the_curve_of_a_plan_peaks_where_check_measures_it() -> None:
    model, x, y = mlp(torch.nn.Dropout(0.1)), batch(), batch()
    fast = remat.rematerialize(
        model,
        (x,),
        loss_fn=torch.nn.functional.mse_loss,
        target=y,
        budget="70%",
        solver="cut",
        time_limit_s=AMPLE_S,
        check=False,
    )
    stream = torch.get_rng_state()
    given = {"loss_fn": torch.nn.functional.mse_loss, "target": y}
    found = measured_step(model, fast, (x,), **given)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(found.moments) == len(found.live_bytes)
    assert np.all(np.diff(found.moments) >= 0)
    checked = remat.check(model, fast, (x,), steps=1, **given)
    assert found.peak_bytes == checked.plan_peak_bytes
    everything = measured_step(model, model, (x,), **given)
    assert everything.peak_bytes == checked.baseline_peak_bytes
    assert found.time_us is not None
    assert found.time_us > 0
