"""A training step of a rewritten module, run to write down its requests."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from remat.graph_capture.devices.device_table import CPU
from remat.graph_capture.devices.meter import Run
from remat.graph_capture.errors import ArenaError, DeviceError
from remat.graph_capture.python_state.watch import python_state_kept
from remat.graph_capture.tracing.step_module import LossFunction, apply_loss
from remat.graph_capture.tracing.untouched import untouched
from remat.rewriter.arena.recording import Requests, recorded
from remat.rewriter.checking.check import plan_run
from remat.rewriter.checking.step_state import OwnBatch, StepState, own_parameters
from remat.rewriter.user_module.module import RematModule
from remat.rewriter.user_module.unplanned import as_before


def require_arena_fits(module: nn.Module) -> RematModule:
    """The module, if an arena can serve it.

    Raises
    ------
    ArenaError : it is no such module, is not in training mode, hands over gradients, or has an
        arena.
    DeviceError : it is not on a CPU.
    """
    if not isinstance(module, RematModule):
        raise ArenaError(
            f"an arena is for one rewritten module, and this is {type(module).__name__}: pass what "
            "remat.rematerialize or remat.rewrite returned, before it is wrapped"
        )
    tensors = *module.parameters(), *module.buffers()
    others = {tensor.device.type for tensor in tensors} - {CPU}
    if others:
        raise DeviceError(
            f"the model is on {', '.join(sorted(others))}, and arenas are for the CPU so far: "
            "train without one"
        )
    if not module.training:
        raise ArenaError(
            "the module is in eval mode, which runs no step of its plan: call train() on it first"
        )
    if module._remat_compiled_step.handing is not None:
        raise ArenaError(
            "the module hands over gradients while backward runs, whose parts an arena does not "
            "follow: plan with accumulate=False and remat.rematerialize, or train without one"
        )
    if module._remat_compiled_step.memory.source is not None:
        raise ArenaError("the module has an arena: close that first")
    return module


def record_step(
    module: RematModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    loss_fn: LossFunction | None,
    target: Any,
) -> Requests:
    """The requests of one step, after one that is not recorded.

    The first step of a process asks for more, such as what kernels keep. Gradients, buffers, the
    batch and the random streams are put back as they were, and no hook of a parameter runs.

    Parameters
    ----------
    loss_fn : what the results go through outside of the module. It says in which layout backward
        gets its first gradients, and so what that asks for.
    """
    guards, model = module._remat_guards, module._remat_original_module
    captured_loss = guards.recipe.loss_fn
    batch = OwnBatch((args, dict(kwargs or {}), target))
    outside = loss_fn if captured_loss is None else None
    run = _with_loss(module, batch, outside) if outside else plan_run(module, batch, captured_loss)
    overwrites = module._remat_compiled_step.gradients.overwrites
    with contextlib.ExitStack() as stack:
        stack.enter_context(untouched(model))
        stack.enter_context(as_before(module))
        ran = guards.python_state.ran_alone
        python_state = stack.enter_context(python_state_kept(model, captured_loss, ran))
        stack.enter_context(own_parameters(model, module))
        state = StepState(model, batch.leaves, CPU, python_state, keep_parameters=overwrites)
        stack.enter_context(state.put_back())
        state.prepared(run, accumulate=False)
        state.reset()
        recorder = stack.enter_context(recorded(module._remat_compiled_step.memory))
        run()
        return recorder.requests()


def _with_loss(module: RematModule, batch: OwnBatch, loss_fn: LossFunction) -> Run:
    def run() -> Any:
        args, kwargs, target = batch()
        loss = apply_loss(loss_fn, module(*args, **kwargs), target)
        loss.backward()
        return loss

    return run
