"""`remat.rematerialize` where a model is no one graph: its modules are planned, each as a whole."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
from msgspec.structs import replace

from remat.checks import require_equal
from remat.formats import budget_text, bytes_text, percent_text
from remat.graph_capture.devices.known_devices import allocator_rounding
from remat.graph_capture.devices.placement import meter_of, resolved_device
from remat.graph_capture.distributed.dtensors import has_dtensors
from remat.graph_capture.errors import BudgetError, CaptureError, option
from remat.graph_capture.python_state.state_guards import PythonState, python_state_kept
from remat.graph_capture.refusals import BY_REMATERIALIZE, is_all_frozen
from remat.graph_capture.tracing.fake_tensors import has_storage
from remat.graph_capture.tracing.left_out import as_outputs
from remat.graph_capture.tracing.resident import resident_bytes
from remat.graph_capture.tracing.restore import NoForeignWrites, restored_after
from remat.graph_capture.tracing.signature import Signature
from remat.graph_capture.tracing.step_module import with_loss, without_own_hooks
from remat.parts.choice import Choices, parts_of
from remat.parts.module import PartsModule, make_in_parts, modes_of
from remat.parts.outside_writes import OutsideWrites
from remat.parts.watched import watched_steps
from remat.progress import Stopwatch, stopwatch_of_call
from remat.rewriter.checking.check import eager_run
from remat.rewriter.checking.outcomes import OwnBatch, StepState, own_parameters
from remat.rewriter.user_module.module import SharedState
from remat.schedules.outcome import Check, Result
from remat.solved import Solved, facts_of, infeasible_text, planned_text
from remat.step_spec import StepSpec

_IN_PARTS_TOO = {"float_inputs", "outputs", "accumulate"}  # options
_TRIES = 4  # choices that are measured, each for what the one before took beyond the budget


def planned_in_parts(spec: StepSpec, refused: CaptureError) -> PartsModule:
    """The module for a batch whose step was `refused` as one graph; raises that where modules
    cannot be planned, or none can and the step does not fit as it is."""
    refused.args = (str(refused).replace(BY_REMATERIALIZE, ""),)
    if not _may_be(spec, refused):
        raise refused
    asked = (name for name, is_asked in spec.asked.items() if is_asked)
    if options := [option(name) for name in asked if name not in _IN_PARTS_TOO]:
        refused.add_note(f"Leave out {', '.join(options)} to plan it in parts.")
        raise refused
    with python_state_kept(spec.model, spec.loss_fn) as state:  # watched steps write to it
        return _watched_and_planned(spec, refused, state)


def _watched_and_planned(spec: StepSpec, refused: CaptureError, state: PythonState) -> PartsModule:
    stages, name = stopwatch_of_call(verbose=spec.verbose), type(spec.model).__name__
    with stages.stage("capture", f"watching a step of {name}, which is no one graph"):
        try:
            choices = _choices_of(spec, state)
        except CaptureError:
            raise
        except Exception as error:  # eager itself does not run it, or not to the end
            raise refused from error
    try:
        found, module, checked = _kept_to_budget(spec, choices, state, stages)
    except BudgetError as error:
        why = f"Each of {name}'s modules runs once, or again as a whole"
        if not choices.parts:
            why = f"No module of {name} can run again in backward"
        raise BudgetError(f"{error}.\n{why}, as it is no one graph: {refused}") from error
    solved = Solved(choices.graph, found)
    stages.say(planned_text(_title(choices, module), solved, checked, stages.elapsed_s))
    stages.say(f"remat: {name} is no one graph. {refused}".replace("\n", " "))
    type(module)._remat_check = checked
    return module


def _kept_to_budget(
    spec: StepSpec, choices: Choices, state: PythonState, stages: Stopwatch
) -> tuple[Result, PartsModule, Check | None]:
    """The cheapest choice whose step keeps to the budget when it is run."""
    is_least, tried = spec.parsed_budget.kind == "min", list[int]()
    budget_bytes = room_bytes = 0 if is_least else spec.parsed_budget.bytes_for(choices.graph)
    while True:
        with stages.stage("solve", f"solving for {spec.budget}"):
            found, again = choices.least() if is_least else choices.within(room_bytes)
            if found.schedule is None and tried:  # it may keep to the budget all the same
                found, again = choices.least()
        if found.schedule is None:
            raise BudgetError(infeasible_text(found))
        state.restore()  # the module holds what it finds of it, and is to hold no tensor of a step
        module, checked = _module(spec, choices, found, again), None
        if spec.check is not False:
            with stages.stage("check", f"comparing a step of {choices.title} with eager"):
                checked = require_equal(spec.model, module, spec.batch, None)
        taken_bytes = max(found.peak_bytes, checked.plan_peak_bytes if checked else 0)
        if is_least or taken_bytes <= budget_bytes:
            return replace(found, budget_bytes=budget_bytes or taken_bytes), module, checked
        tried.append(taken_bytes)
        room_bytes -= taken_bytes - budget_bytes  # a run may take more than was watched
        if len(tried) == _TRIES or taken_bytes in tried[:-1]:
            least_bytes = min(tried)
            raise BudgetError(
                f"try {option('budget', budget_text(least_bytes))}, a smaller batch, or "
                f"{option('budget', 'min')}: the least peak measured is {bytes_text(least_bytes)}, "
                f"above the budget of {bytes_text(budget_bytes)}"
            )


def _may_be(spec: StepSpec, refused: CaptureError) -> bool:
    model, has_ranks = spec.model, dist.is_available() and dist.is_initialized()
    is_training = getattr(model, "training", False)  # what is no module has none
    is_of_graph = type(refused) is CaptureError and is_training and has_storage(model)
    if has_ranks or not is_of_graph:
        return False
    is_planned = any(isinstance(one, SharedState) for one in model.modules())
    return not (is_planned or has_dtensors(model) or is_all_frozen(model, _tree(spec)))


def _tree(spec: StepSpec) -> Any:
    return spec.args, dict(spec.kwargs or {}), spec.target


def _choices_of(spec: StepSpec, python: PythonState) -> Choices:
    model, loss_fn, outputs = spec.model, spec.loss_fn, as_outputs(spec.outputs)
    meter, batch = meter_of(resolved_device(None, model)), OwnBatch(_tree(spec))
    whole = with_loss(model, loss_fn)
    resident = resident_bytes(
        whole, batch.leaves, optimizer=spec.optimizer, accumulate=spec.accumulate,
        allocated=allocator_rounding(meter.device),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(restored_after(model))
        stack.enter_context(own_parameters(whole))
        stack.enter_context(without_own_hooks(model))
        state = StepState(whole, batch.leaves, meter.device, keep_parameters=True)
        stack.enter_context(state.put_back())
        names = NoForeignWrites(type(model).__name__, python)
        writes = OutsideWrites((batch.leaves, *whole.parameters(), *whole.buffers()), names)
        stack.callback(writes.put_back)
        watched = watched_steps(
            model, meter,
            lambda between: eager_run(model, batch, loss_fn, outputs, between)(),
            lambda run: state.prepared(run, spec.accumulate),
            writes,
        )  # fmt: skip
    resident = replace(resident, libraries_bytes=meter.library_bytes())
    parts = parts_of(watched, meter.device)
    return Choices(watched, parts, type(model).__name__, meter.device, resident)


def _module(spec: StepSpec, choices: Choices, found: Result, paths: set[str]) -> PartsModule:
    parts = [part for part in choices.parts.values() if part.path in paths]
    assert found.schedule is not None
    return make_in_parts(
        spec.model, loss_fn=spec.loss_fn, signature=Signature(_tree(spec)),
        again={part.path: (part.call.written, part.call.us) for part in parts},
        modes=modes_of(spec.model), share=choices.share, outputs=as_outputs(spec.outputs),
        schedule=found.schedule,
        **facts_of(Solved(choices.graph, found)),
    )  # fmt: skip


def _title(choices: Choices, module: PartsModule) -> str:
    if not choices.parts:
        return f"{choices.title} runs as it is, as no module of it can be planned"
    n_parts = len({part.path for part in choices.parts.values()})
    share = percent_text(choices.share)
    return (
        f"{choices.title} in parts: {len(module.modules_again)} of {n_parts} modules that hold "
        f"{share} of what forward saves run again; the rest runs as it is"
    )
