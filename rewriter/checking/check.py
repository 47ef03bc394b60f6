"""Proof by running: the rewritten module against the original, bit for bit or to a tolerance."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from remat.graph_capture.devices.known_devices import CPU, allocator_rounding
from remat.graph_capture.devices.meter import (
    LoadAwareTimer,
    Meter,
    Run,
    StepMemory,
    have_agreed,
    least_agreed,
)
from remat.graph_capture.devices.placement import meter_of, resolved_device
from remat.graph_capture.errors import RewriteError
from remat.graph_capture.graph import Optimizer
from remat.graph_capture.python_state.state_guards import python_state_kept
from remat.graph_capture.torch_private.aot import functorch_config
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.left_out import Outputs, used_alone
from remat.graph_capture.tracing.outputs import leaves_in
from remat.graph_capture.tracing.resident import resident_bytes
from remat.graph_capture.tracing.restore import restored_after
from remat.graph_capture.tracing.step_module import (
    LossFunction,
    apply_loss,
    with_loss,
    without_own_hooks,
)
from remat.graph_capture.tracing.trials import numbers_of_users_kept
from remat.rewriter.checking.audit import MOST_EAGER
from remat.rewriter.checking.comparison import (
    DeterministicReductions,
    EagerVariation,
    Outcome,
    differing_beyond,
    differing_names,
    distance,
    first_divergent_line,
    has_nondeterministic_sums,
    moved_by_rounding,
    rounding_of,
    tolerance_of,
    unsteady_names,
)
from remat.rewriter.checking.off_device import OffDeviceMemory
from remat.rewriter.checking.outcomes import STREAM, OwnBatch, StepState, own_parameters
from remat.rewriter.guards.forward import constants_of
from remat.rewriter.user_module.module import RematModule, SharedState
from remat.rewriter.user_module.own_forward import as_before
from remat.schedules.outcome import Check

_T: Any = torch


@contextlib.contextmanager
def _outside_autocast(device: str) -> Generator[None]:
    """Leave all open regions of autocast for a while, though the caller is within them."""
    # An outermost region, so that what it has cast goes when it ends, as in a checkpoint's rerun.
    # `torch.autocast(enabled=False)` would be a region itself.
    depth = _T.autocast_increment_nesting() - 1
    _T.autocast_decrement_nesting()
    before = torch.is_autocast_enabled(device)
    for _ in range(depth):
        _T.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before)
        for _ in range(depth):
            _T.autocast_increment_nesting()


SOON_US, _ENOUGH_US = 5e5, 4e6  # once steps took this long, no more are timed (without other ranks)


def check(
    model: nn.Module,
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    optimizer: Optimizer = "none",
    accumulate: bool = False,
    steps: int = 5,
    tolerance: float | None = None,
    results_elsewhere: bool = False,
    saved_elsewhere: float | None = None,
) -> Check:
    """Run a training step of both on the same batch and random state, and compare.

    Both run once for equality and the peak, and `steps` times in turn for the time; fewer times
    once two times of each agree, of which the run for equality may be one, or that has taken 4 s,
    if no other ranks wait for this one. The peak has a run of its own on a CUDA device, whose
    libraries allocate at their first use, and where the run for equality is unlike other steps.
    On a CUDA device eager runs twice for equality, to see which results it repeats, and up to
    `MOST_EAGER` times if the plan's differ. On a CPU float32 sums by indices have one order
    meanwhile. Gradients, buffers, the batch and the random streams are put back as they were.

    Parameters
    ----------
    model, module : the original and the rewritten module.
    args, kwargs, loss_fn, target, optimizer, accumulate : as given to `capture`.
    tolerance : how far results may be from eager's, as a part of their norm. By default 0, which
        means equal bits; 0.01 for a module that runs Inductor's code. Where chunks sum in another
        order, 1e-5 in float32 and 0.02 if 16 bits are in use. The random stream has to be eager's
        to the bit in any case.
    steps : how many are timed. With 0, nor is eager's peak measured: these figures are NaN and 0.
    results_elsewhere : keep results and copies of the state off the device: in files on a CPU, else
        in the host's memory.
    saved_elsewhere : keep there what eager saves for backward too, of which so many bytes may be on
        the device at once. A copy changes no bit, but eager then is slow and small.

    Raises
    ------
    PlanError : there is no room elsewhere; or, with `saved_elsewhere`, the model takes no
        hooks on what autograd saves, or holds more of it itself.
    """
    for one in (model, module):
        if not isinstance(one, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RewriteError(
                "pass the model, and what remat.rematerialize or Plan.apply returned: a check "
                f"runs modules, and this is {type(one).__name__}"
            )
    given = (tuple(args), dict(kwargs or {}), target)
    if isinstance(module, SharedState):
        module = module._remat_running(given)  # of a range or a cache, the module for this batch
    batch = OwnBatch(given)
    outputs = type(module)._remat_outputs if isinstance(module, SharedState) else None
    eager, plan = eager_run(model, batch, loss_fn, outputs), plan_run(module, batch, loss_fn)
    meter = meter_of(resolved_device(None, model))
    kept = (batch.leaves, _constants(module))
    step = with_loss(model, loss_fn)
    elsewhere = None
    if results_elsewhere or saved_elsewhere is not None:
        held = (t for t in pytree.tree_leaves(kept) if isinstance(t, Tensor))
        elsewhere = OffDeviceMemory(meter.device, (*step.parameters(), *step.buffers(), *held))
    if elsewhere and saved_elsewhere is not None:
        eager = elsewhere.running(eager, saved_elsewhere)
    resident = resident_bytes(
        step, kept,
        optimizer=optimizer, accumulate=accumulate, allocated=allocator_rounding(meter.device),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(restored_after(model))
        stack.enter_context(as_before(module))
        is_planned = isinstance(module, RematModule)
        code = module._remat_guards.python_state.code_in_scope if is_planned else None
        # Taken to write to parameters where that is not known.
        overwrites = not is_planned or module._remat_compiled_step.gradients.overwrites
        python_state = stack.enter_context(python_state_kept(model, loss_fn, code))
        if is_planned:
            stack.enter_context(numbers_of_users_kept(module._remat_compiled_step.forward.graph))
        stack.enter_context(own_parameters(step, module))
        stack.enter_context(without_own_hooks(model))  # they are no part of the plan
        state = StepState(
            step, batch.leaves, meter.device, python_state,
            keep_parameters=overwrites, elsewhere=elsewhere,
        )  # fmt: skip
        stack.enter_context(state.put_back())
        alike = stack.enter_context(contextlib.ExitStack())
        in_one_order = meter.device == CPU and has_nondeterministic_sums(module)
        if in_one_order:
            alike.enter_context(DeterministicReductions())
        is_steady = meter.device == CPU
        # The runs that are compared: steps like any other, but for what else they are asked to do.
        is_usual = is_steady and not (in_one_order or accumulate or _has_other_ranks())
        measured = (eager, plan) if steps else (plan,)
        first_us, memory = list[float](), list[StepMemory]()

        def left_by(run: Run) -> Outcome:
            timed = _timed(run, first_us)
            is_metered = is_usual and run in measured
            return state.outcome(_metered(timed, meter, memory) if is_metered else timed)

        expected = left_by(eager)
        variation = EagerVariation(expected)
        if not is_steady:
            variation.add(state.outcome(eager))
        allowed = tolerance_of(module) if tolerance is None else tolerance
        outcome, error = left_by(plan), 0.0
        differences = differing_names(variation, outcome)
        if differences and not is_steady:
            differences = _compared_again(state, eager, variation, outcome)
        unsteady = tuple(name for name in expected if name in variation.noise)
        if allowed:
            differences, error = differing_beyond(expected, outcome, allowed)
        if allowed and differences:
            moved = moved_by_rounding(lambda: state.outcome(eager), expected)
            differences, error = differing_beyond(expected, outcome, allowed, moved)
        distances = tuple(distance(expected[name], outcome.get(name)) for name in differences)
        diverges_at = None
        if differences and is_steady and not _has_other_ranks():  # other ranks would not join
            unsteady = unsteady_names(expected, state.outcome(eager))
            diverges_at = _diverges_at(state, eager, module)
        del outcome  # it would be in memory beside the steps that are measured
        alike.close()
        resident_total_bytes = resident.total_bytes + meter.library_bytes()
        memory = memory or [
            state.prepared(lambda run=run: meter.step_memory(run), accumulate) for run in measured
        ]
        begun = [first_us] if is_usual and not elsewhere else []
        times = _step_times(state, meter, (eager, plan), accumulate, steps, begun)
    # A CPU's meter sums the profiler's events: modes that watch tensors would miss workspaces.
    peaks = [resident_total_bytes + one.peak_bytes for one in memory]
    reserved = [
        None if one.slack_bytes is None else peak_bytes + one.slack_bytes
        for peak_bytes, one in zip(peaks, memory, strict=True)
    ]
    gradients = [name for name in expected if name.startswith("gradient of ")]
    return Check(
        outputs_equal=not any(name.startswith("output") for name in differences),
        gradients_equal=not any(name.startswith("gradient of ") for name in differences),
        buffers_equal=not any(name.startswith("buffer ") for name in differences),
        rng_equal=not any(name.startswith(STREAM) for name in differences),
        gradients=sum(name not in (*differences, *unsteady) for name in gradients),
        gradients_total=len(gradients), baseline_peak_bytes=peaks[0] if steps else 0,
        plan_peak_bytes=peaks[-1], baseline_step_us=times[0], plan_step_us=times[1],
        differences=differences, unsteady=unsteady, in_one_order=in_one_order,
        plan_rounding_bytes=memory[-1].rounding_bytes,
        baseline_reserved_bytes=reserved[0] if steps else None, plan_reserved_bytes=reserved[-1],
        tolerance=allowed, largest_error=error, distances=distances, diverges_at=diverges_at,
        rounding=rounding_of(module),
    )  # fmt: skip


def _compared_again(
    state: StepState, eager: Run, variation: EagerVariation, outcome: Outcome
) -> tuple[str, ...]:
    differences = differing_names(variation, outcome)
    for _ in range(2, MOST_EAGER):  # two runs may add up alike by chance
        if not differences and not _has_other_ranks():  # steps may hold collectives
            break
        variation.add(state.outcome(eager))
        differences = differing_names(variation, outcome)
    return differences


def _diverges_at(state: StepState, eager: Run, module: nn.Module) -> str | None:
    # Inductor's kernels are no ops of eager's.
    if not isinstance(module, RematModule) or module._remat_compiled_step.by_inductor:
        return None
    state.reset()
    step = module._remat_compiled_step
    return first_divergent_line(eager, (step.forward, step.backward))


def _constants(module: nn.Module) -> list[Tensor]:
    if not isinstance(module, RematModule):
        return []
    step = module._remat_compiled_step
    return constants_of(step.forward, step.backward)


def eager_run(
    model: nn.Module, batch: OwnBatch, loss_fn: LossFunction | None, outputs: Outputs | None = None,
    before_backward: Callable[[], None] = lambda: None,
) -> Run:  # fmt: skip
    def run() -> Any:
        args, kwargs, target = batch()
        output = apply_loss(loss_fn, used_alone(model(*args, **kwargs), outputs), target)
        before_backward()
        _backward(output)
        return output

    return run


def plan_run(module: nn.Module, batch: OwnBatch, loss_fn: LossFunction | None) -> Run:
    if not isinstance(module, SharedState):
        return eager_run(module, batch, loss_fn)

    def run() -> Any:
        args, kwargs, target = batch()
        if loss_fn is not None and target is not None:
            kwargs = {**kwargs, "target": target}
        output = module(*args, **kwargs)
        _backward(output)
        return output

    return run


def _backward(output: Any) -> None:
    roots = [t for t in leaves_in(output) if isinstance(t, Tensor) and t.requires_grad]
    generator = torch.Generator(device=roots[0].device).manual_seed(0)
    tangents = [  # in the leaves' strides, as elementwise losses make them
        None if root.numel() == 1 else torch.empty_like(root).normal_(generator=generator)
        for root in roots
    ]
    with _outside_autocast(roots[0].device.type):  # as torch's documentation asks, and loops do
        torch.autograd.backward(roots, tangents)


def _timed(run: Run, times_us: list[float]) -> Run:
    def timed() -> Any:
        watch = LoadAwareTimer()
        result = run()
        times_us.append(watch.taken_us)
        return result

    return timed


def _metered(run: Run, meter: Meter, memory: list[StepMemory]) -> Run:
    """`run`, which adds to `memory` what it had live. What it returns lives on."""

    def metered() -> Any:
        results = list[Any]()
        # A step's first run looks for aliases of custom ops, in Python that holds arguments longer.
        with functorch_config.patch(check_custom_op_aliasing=False):
            memory.append(meter.step_memory(lambda: results.append(run())))
        return results.pop()

    return metered


def _step_times(
    state: StepState, meter: Meter, runs: tuple[Run, Run], accumulate: bool, steps: int,
    begun: list[list[float]],
) -> tuple[float, float]:  # fmt: skip
    """Least step times in us that a second confirms, or medians; `begun` only confirms others."""
    if not steps:
        return math.nan, math.nan
    # Steps may hold collectives. By its own clock, a rank would end before the others.
    soon_us, enough_us = (math.inf, math.inf) if _has_other_ranks() else (SOON_US, _ENOUGH_US)
    times = list(begun)
    while len(times) < steps + len(begun):
        taken_us = sum(map(sum, times))
        if len(times) > 1 + len(begun) and taken_us >= enough_us:
            break
        if taken_us >= soon_us and all(map(have_agreed, zip(*times, strict=True))):
            break
        # In turn, so that drift hits both.
        times.append([state.prepared(lambda r=r: meter.step_us(r), accumulate) for r in runs])
    eager_us, plan_us = zip(*times, strict=True)
    return least_agreed(eager_us), least_agreed(plan_us)


def _has_other_ranks() -> bool:
    is_initialized = dist.is_available() and dist.is_initialized()
    return is_initialized and dist.get_world_size() > 1
