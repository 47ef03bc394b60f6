"""One trace by AOTAutograd: what watches it, and how it is refused."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any

from torch import fx, nn

from remat.graph_capture.devices.placement import refuse_other_devices
from remat.graph_capture.distributed.dtensors import has_dtensors
from remat.graph_capture.distributed.rank_refusals import modes_among_ranks
from remat.graph_capture.errors import CaptureError, DeviceError
from remat.graph_capture.joint.eager_memory import EagerMemory
from remat.graph_capture.joint.gradients import can_release_gradients
from remat.graph_capture.joint.nodes import is_custom, is_tangent
from remat.graph_capture.joint.provenance import Provenance
from remat.graph_capture.python_state.executed_code import (
    ExecutedCode,
    codes_of_function,
    function_that_failed,
    functions_of_users,
)
from remat.graph_capture.python_state.state_guards import python_state_kept
from remat.graph_capture.refusals import refusal
from remat.graph_capture.sizes.ranged_signature import RangedSignature
from remat.graph_capture.sizes.symbols import require_guards
from remat.graph_capture.sizes.trace_over_sizes import Environment, at_sizes
from remat.graph_capture.torch_private.aot import (
    JointWithDescriptors,
    aot_export_joint_with_descriptors,
    dynamo_config,
    functorch_config,
    lazy_graph_modules,
)
from remat.graph_capture.torch_private.core import (
    FakeTensorMode,
    checks_kept,
    compiling_and_exporting,
)
from remat.graph_capture.tracing.attribute_writes import (
    ForwardWrites,
    NoSetData,
    find_loop_carried,
    places_of,
    storages_in,
)
from remat.graph_capture.tracing.fake_tensors import (
    as_if_on_cpu,
    fake_with_eager_strides,
    kernels_of_eager,
)
from remat.graph_capture.tracing.recipe import FLAGS, Recipe, silenced_logs
from remat.graph_capture.tracing.resident import tied_as_one
from remat.graph_capture.tracing.restore import NoForeignWrites, restored_after
from remat.graph_capture.tracing.step_module import (
    StepModule,
    checkpointed_modules,
    checkpoints_noted,
    refuse_checkpointed_writes,
    with_loss,
)
from remat.graph_capture.tracing.traced_step import (
    Trace,
    edit_traced,
    joint_of,
    num_forward_outputs,
)

# `torch.utils.checkpoint` is transparent to the trace: a plan covers what it covers.


def trace_once(
    model: nn.Module, recipe: Recipe, ran: ExecutedCode | None = None, *, whole: bool = True
) -> Trace:
    """Trace with the flags of the recipe. `whole`: all code counts, whether it runs or not."""
    sizes = recipe.signature if isinstance(recipe.signature, RangedSignature) else None
    env = Environment(sizes.symbols, sizes.hints) if sizes else None
    fake = fake_with_eager_strides(env.shape_env if env else None, on_cuda=recipe.is_modelled)
    refuse_other_devices(fake, recipe.device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(silenced_logs())
        stack.enter_context(lazy_graph_modules(True))  # to make code takes long
        stack.enter_context(restored_after(model))  # entered first, so that it restores last
        stack.enter_context(as_if_on_cpu(model, fake))
        stack.enter_context(tied_as_one(with_loss(model, recipe.loss_fn)))
        # Under a debugger or a coverage nobody knows which code runs, so all of it counts.
        followed = None if whole or ran is None or not ran.can_be_seen else ran
        live = frozenset(code for kind in recipe.functions for code in codes_of_function(kind))
        state = stack.enter_context(python_state_kept(model, recipe.loss_fn, followed, live))
        state.ran = ran
        writes = ForwardWrites(model, recipe.loss_fn, state)
        told = recipe.signature, recipe.outputs
        step = StepModule(model, recipe.loss_fn, writes, ran, env, *told)
        if ran is not None:
            stack.enter_context(ran.told_to(state.begins))
        provenance = Provenance(step)
        stack.enter_context(compiling_and_exporting(*(recipe.flags or FLAGS[0])))
        stack.enter_context(kernels_of_eager(recipe.device))
        stack.enter_context(checks_kept())  # else torch 2.11 drops ops that only raise errors
        stack.enter_context(NoSetData(recipe.name))
        stack.enter_context(NoForeignWrites(recipe.name, state))
        for mode in modes_among_ranks(recipe.name):
            stack.enter_context(mode)
        stack.enter_context(provenance.watching_modules())
        checkpointed = stack.enter_context(checkpointed_modules(provenance.path))
        stack.enter_context(checkpoints_noted(provenance))
        stack.enter_context(_settings_of_torch())
        stack.enter_context(EagerMemory())
        if any(functions_of_users()) or recipe.functions:
            from remat.graph_capture.tracing.nested_backward import nested_backward
            from remat.graph_capture.tracing.opaque_functions import opaque_functions

            stack.enter_context(opaque_functions(recipe.functions))
            stack.enter_context(nested_backward(step))
        stack.enter_context(provenance)  # last: called first, it sees the frame of the user's
        try:
            # Without decompositions, for eager's ATen ops and bit-equal gradients; takes keyword
            # arguments, tied weights, mutated inputs and nested outputs. `torch.export` first gave
            # wrong gradients for custom autograd functions, and `make_fx` fails on tied weights.
            descriptors = aot_export_joint_with_descriptors(
                stack, step, _example(recipe, fake, env), {}, decompositions={}
            )
            writes.require_that_backward_writes_nothing()
        except Exception as error:  # whatever a model raises is refused, with its place
            # What watches the ops knows the device, and not where it is in the user's code.
            if isinstance(error, CaptureError) and not isinstance(error, DeviceError):
                raise
            refused = refusal(error, model, provenance.module_of(error), step.known.read)
            refused.read = step.known.read
            raise CaptureError(env.in_words(str(refused))) if env else refused from error
    _refuse_no_backward(model, descriptors)
    # Attributes of the batch's tensors that no code reads may differ from step to step.
    signature = recipe.signature.with_attributes_of(state.of_tensors)
    recipe = dataclasses.replace(recipe, signature=signature, left_out=step.left_out)
    recipe = _with_release(recipe, model, descriptors)
    gm, recipe = _with_guards(descriptors.graph_module, recipe, env)
    results, end = num_forward_outputs(descriptors), gm.graph.output_node()
    refuse_checkpointed_writes(gm.graph, results, checkpointed)
    edit_traced(gm, recipe)
    if any(map(is_custom, gm.graph.nodes)):  # few steps have such ops
        from remat.graph_capture.tracing.trials import try_custom_ops

        try_custom_ops(gm)
    held = (getattr(gm, str(node.target)) for node in gm.graph.find_nodes(op="get_attr"))
    constants = storages_in(held)
    carried = find_loop_carried(writes.mutated, results, end, step.duplicate_outputs, constants)
    # Each step sets these, so no guard may compare them.
    state.leave_out([*places_of(model, writes.mutated), *(one.place for one in writes.initialised)])
    state.compare_items_of(one.place for one in writes.library_caches)
    joint = joint_of(gm, results, recipe, step.duplicate_outputs)
    sets = tuple(writes.mutated), tuple(writes.initialised), tuple(writes.library_caches)
    return Trace(
        joint, recipe, descriptors, state, *sets, tuple(carried), step.duplicate_outputs,
        step.known.looked_at, gradient_order=tuple(step.gradient_order.places), env=env,
    )  # fmt: skip


def traced_once(model: nn.Module, recipe: Recipe, ran: ExecutedCode, *, whole: bool) -> Trace:
    """As `trace_once`, whose refusals have no frames of torch."""
    try:
        return trace_once(model, recipe, ran, whole=whole)
    except CaptureError as error:
        if more := function_that_failed(error) - recipe.functions:
            recipe = dataclasses.replace(recipe, functions=recipe.functions | more)
            return traced_once(model, recipe, ran, whole=whole)
        refused = type(error)(*error.args)  # the frames are those of its cause, some hundred lines
        vars(refused).update(vars(error))
        cause = error.__cause__
        raise refused.caused_by(cause if isinstance(cause, Exception) else error) from None


@contextlib.contextmanager
def _settings_of_torch() -> Generator[None]:
    with (
        # torch's documentation asks users to run backward outside of autocast.
        functorch_config.patch(backward_pass_autocast="off"),
        # A loss made of elementwise ops sends gradients back in the strides of the results.
        functorch_config.patch(guess_tangent_strides_as_outputs=True),
        # torch 2.14 would trace inside a function that torch.compile has wrapped, while the user's
        # own step runs Inductor's kernels. So it fails, as before.
        dynamo_config.patch(force_compile_during_fx_trace=True),
    ):
        yield


def _with_guards(
    gm: fx.GraphModule, recipe: Recipe, env: Environment | None
) -> tuple[fx.GraphModule, Recipe]:
    if env is None:
        return gm, recipe
    guards = env.guards()
    require_guards(guards, env.symbols, recipe.name)
    assert isinstance(recipe.signature, RangedSignature)
    recipe = dataclasses.replace(recipe, signature=recipe.signature.with_guards(guards))
    return at_sizes(gm, env, env.hints), recipe


def _with_release(recipe: Recipe, model: nn.Module, descriptors: JointWithDescriptors) -> Recipe:
    if not recipe.gradient_release:
        return recipe
    is_of_parts = has_dtensors(model)
    if not is_of_parts and can_release_gradients(descriptors._aot_state.fw_metadata):
        return recipe
    if not recipe.gradient_release.updates:
        return dataclasses.replace(recipe, gradient_release=None)
    if is_of_parts:
        raise CaptureError(
            f"update after backward: {recipe.name} has parameters that are DTensors, which cannot "
            "be updated during backward"
        )
    raise CaptureError(
        f"give forward or the caller a copy, clone(), or update after backward: {recipe.name} "
        "writes to a parameter or an input that it differentiates, or returns a part of one"
    )


def _example(recipe: Recipe, fake: FakeTensorMode, env: Environment | None) -> Any:
    if env and isinstance(recipe.signature, RangedSignature):
        return recipe.signature.example(fake, env.size)
    return recipe.signature.example(fake)


def _refuse_no_backward(model: nn.Module, descriptors: JointWithDescriptors) -> None:
    nodes = descriptors.graph_module.graph.find_nodes(op="placeholder")
    if not any(is_tangent(node) for node in nodes):
        raise CaptureError(
            "check for detach() or no_grad in forward or the loss: no output of "
            f"{type(model).__name__} depends on a parameter that requires grad, so there is no "
            "backward to plan"
        )
