"""What a real step of a rewritten module has live, moment by moment."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from remat.graph_capture.devices.known_devices import CPU, allocator_rounding
from remat.graph_capture.devices.memory_events import measure_live
from remat.graph_capture.devices.meter import CpuMeter
from remat.graph_capture.devices.placement import resolved_device
from remat.graph_capture.errors import DeviceError
from remat.graph_capture.graph import Optimizer
from remat.graph_capture.tracing.resident import resident_bytes
from remat.graph_capture.tracing.restore import restored_after
from remat.graph_capture.tracing.step_module import LossFunction
from remat.rewriter.checking.check import plan_run
from remat.rewriter.checking.outcomes import OwnBatch, StepState, own_parameters
from remat.rewriter.user_module.own_forward import as_before
from remat.schedules.report.page_facts import MeasuredStep

_STEPS = 3  # how many steps the median time is taken of


def measured_step(
    model: nn.Module, module: nn.Module, args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None, *, loss_fn: LossFunction | None = None,
    target: Any = None, optimizer: Optimizer = "none", accumulate: bool = False,
) -> MeasuredStep:  # fmt: skip
    device = resolved_device(None, model)
    if device != CPU:
        raise DeviceError(
            f"use torch.cuda.memory._record_memory_history there: the model is on {device}, and "
            "moments of a step are only measured on the CPU"
        )
    batch = OwnBatch((tuple(args), dict(kwargs or {}), target))
    run, meter = plan_run(module, batch, loss_fn), CpuMeter()
    resident = resident_bytes(
        model, batch.leaves,
        optimizer=optimizer, accumulate=accumulate, allocated=allocator_rounding(device),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(restored_after(model))
        stack.enter_context(as_before(module))
        stack.enter_context(own_parameters(model, module))  # no hook runs, and no gradient is added
        state = StepState(model, batch.leaves, device)
        stack.enter_context(state.put_back())
        state.prepared(run, accumulate)  # not measured: a first step asks for more, and is slow
        moments, live = state.prepared(lambda: measure_live(run), accumulate)
        times = [state.prepared(lambda: meter.step_us(run), accumulate) for _ in range(_STEPS)]
    live_bytes = np.array(live, dtype=np.int64) + resident.total_bytes
    return MeasuredStep(
        moments=np.array(moments, dtype=np.float64), live_bytes=live_bytes,
        peak_bytes=int(live_bytes.max()), time_us=statistics.median(times),
    )  # fmt: skip
