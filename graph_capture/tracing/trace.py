"""The trace: one joint graph of forward and backward, from a module and a batch.

As eager runs it, else as if compiled or exported; the second call has to do the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from torch import fx, nn

from remat.graph_capture.devices.known_devices import CPU, allocator_rounding
from remat.graph_capture.devices.placement import refuse_other_devices, resolved_device
from remat.graph_capture.distributed.collectives import wait_all
from remat.graph_capture.distributed.dtensors import describe_parts, has_dtensors, inputs_cast
from remat.graph_capture.distributed.rank_refusals import (
    modes_among_ranks,
    refuse_buckets_of_dtensors,
    refuse_range_of_dtensors,
)
from remat.graph_capture.distributed.sharding import NO_SHARDING, Sharding
from remat.graph_capture.errors import CaptureError, DeviceError, FloatInputError
from remat.graph_capture.graph import Optimizer, TrainingGraph
from remat.graph_capture.joint.autocast_cache import cast_weights_once
from remat.graph_capture.joint.build import Joint, build_joint
from remat.graph_capture.joint.eager_memory import EagerMemory
from remat.graph_capture.joint.gradients import GradientRelease, can_release_gradients
from remat.graph_capture.joint.nodes import copy_of, is_custom, is_tangent, written_inputs
from remat.graph_capture.joint.output_aliasing import take_out_of
from remat.graph_capture.joint.provenance import Provenance
from remat.graph_capture.python_state.executed_code import (
    ExecutedCode,
    codes_of_function,
    function_that_failed,
    functions_of_users,
)
from remat.graph_capture.python_state.module_hooks import ModuleHooks
from remat.graph_capture.python_state.state_guards import (
    LibraryCache,
    PythonState,
    python_state_kept,
)
from remat.graph_capture.python_state.state_slots import MISSING, DictItem
from remat.graph_capture.refusals import refusal, refuse_all_frozen, refuse_module
from remat.graph_capture.sizes.ranged_signature import RangedSignature, ranged_signature
from remat.graph_capture.sizes.symbols import Dynamic, require_guards
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
    pytree,
)
from remat.graph_capture.tracing.attribute_writes import (
    ForwardWrites,
    InitialisedOnce,
    MutatedAttribute,
    NoSetData,
    UnreadSentinel,
    find_loop_carried,
    is_same_graph,
    places_of,
    storages_in,
)
from remat.graph_capture.tracing.fake_tensors import (
    as_if_on_cpu,
    fake_with_eager_strides,
    kernels_of_eager,
)
from remat.graph_capture.tracing.left_out import as_outputs
from remat.graph_capture.tracing.outputs import DuplicateOutputs
from remat.graph_capture.tracing.recipe import (
    FLAGS,
    JointEdit,
    Recipe,
    Split,
    autocast_state,
    call_error,
    check_arguments,
    keep_recipe,
    require_split,
    silenced_logs,
)
from remat.graph_capture.tracing.resident import resident_bytes, tied_as_one
from remat.graph_capture.tracing.restore import NoForeignWrites, restored_after
from remat.graph_capture.tracing.signature import Signature, check_batch, numbers_in
from remat.graph_capture.tracing.step_module import (
    LossFunction,
    StepModule,
    checkpointed_modules,
    checkpoints_noted,
    refuse_checkpointed_writes,
    with_loss,
)

if TYPE_CHECKING:
    from remat.graph_capture.tracing.float_inputs import FloatInputs, FloatPlace, Probe
    from remat.graph_capture.tracing.traced_float import Log

# `torch.utils.checkpoint` is transparent to the trace: a plan covers what it covers.


@dataclass
class Trace:
    joint: Joint
    recipe: Recipe
    descriptors: JointWithDescriptors  # AOTAutograd's own record, which can be compiled once
    python_state: PythonState  # what forward and the loss read of Python's state, as it was
    mutated: tuple[MutatedAttribute, ...] = ()  # on modules and elsewhere, as each step does
    initialised: tuple[InitialisedOnce, ...] = ()
    library_caches: tuple[LibraryCache, ...] = ()  # added to at forward's first call
    loop_carried: tuple[MutatedAttribute, ...] = ()  # what forward may read from earlier steps
    duplicate_outputs: DuplicateOutputs | None = None
    looked_at: bytes = b""  # values that code has looked at, and those that they come from
    floats: FloatInputs | None = None
    compiled: bool = False  # whether `descriptors` has been
    gradient_order: tuple[int, ...] = ()  # places of parameters, as eager's gradients come
    env: Environment | None = None  # of a range's sizes; `joint` is then at its hints

    @property
    def graph(self) -> TrainingGraph:
        return self.joint.graph


def _trace_once(
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
        # torch's documentation asks users to run backward outside of autocast.
        stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
        # A loss made of elementwise ops sends gradients back in the strides of the results.
        stack.enter_context(functorch_config.patch(guess_tangent_strides_as_outputs=True))
        # torch 2.14 would trace inside a function that torch.compile has wrapped, while the user's
        # own step runs Inductor's kernels. So it fails, as before.
        stack.enter_context(dynamo_config.patch(force_compile_during_fx_trace=True))
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
            place = provenance.module_of(error)
            refused = refusal(error, model, place, step.known.read)
            refused.read = step.known.read
            raise CaptureError(env.in_words(str(refused))) if env else refused from error
    _refuse_no_backward(model, descriptors)
    # Attributes of the batch's tensors that no code reads may differ from step to step.
    signature = recipe.signature.with_attributes_of(state.of_tensors)
    recipe = dataclasses.replace(recipe, signature=signature, left_out=step.left_out)
    recipe = _with_release(recipe, model, descriptors)
    gm = descriptors.graph_module
    if env:
        guards = env.guards()
        require_guards(guards, env.symbols, recipe.name)
        assert isinstance(recipe.signature, RangedSignature)
        recipe = dataclasses.replace(recipe, signature=recipe.signature.with_guards(guards))
        gm = at_sizes(gm, env, env.hints)
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


def edit_traced(gm: fx.GraphModule, recipe: Recipe) -> None:
    """Change a traced graph to what eager runs, and then as the recipe says."""
    describe_parts(gm)
    if any(functions_of_users()) or recipe.functions:
        from remat.graph_capture.tracing.nested_backward import merge_recomputed

        merge_recomputed(gm.graph)
    cast_weights_once(gm)
    take_out_of(gm.graph)
    for node in reversed(gm.graph.nodes):  # a profiler's regions compute nothing
        if getattr(node.target, "namespace", "") == "profiler":
            gm.graph.erase_node(node)
    for edit in recipe.edits:
        edit(gm.graph)


@contextlib.contextmanager
def numbers_of_users_kept(graph: fx.Graph) -> Generator[None]:
    """Put back what custom ops count in Python, as their own modules hold it."""
    if not any(map(is_custom, graph.nodes)):
        yield
        return
    from remat.graph_capture.tracing.trials import modules_behind, what_moves

    with what_moves(modules_behind(graph.nodes)):
        yield


def joint_of(
    gm: fx.GraphModule, results: int, recipe: Recipe, duplicate_outputs: DuplicateOutputs | None
) -> Joint:
    several = duplicate_outputs.gradients() if duplicate_outputs else None
    return build_joint(
        gm, results, recipe.name, recipe.resident, several, recipe.gradient_release,
        **recipe.facts(),
    )  # fmt: skip


def with_edits(trace: Trace, edits: tuple[JointEdit, ...]) -> Trace:
    """The trace with its joint graph changed; it takes over the record of `trace`."""
    trace.compiled = True
    gm, recipe = trace.descriptors.graph_module, dataclasses.replace(trace.recipe, edits=edits)
    if trace.env:  # that graph has symbols, and others share this one
        gm = copy_of(trace.joint.module)
    for edit in edits:
        edit(gm.graph)
    gm.recompile()
    joint = joint_of(gm, trace.joint.num_forward_outputs, recipe, trace.duplicate_outputs)
    return dataclasses.replace(trace, joint=joint, recipe=recipe, compiled=False)


def num_forward_outputs(descriptors: JointWithDescriptors) -> int:
    return descriptors._aot_state.fw_metadata.num_forward


def _refuse_no_backward(model: nn.Module, descriptors: JointWithDescriptors) -> None:
    nodes = descriptors.graph_module.graph.find_nodes(op="placeholder")
    if not any(is_tangent(node) for node in nodes):
        raise CaptureError(
            "check for detach() or no_grad in forward or the loss: no output of "
            f"{type(model).__name__} depends on a parameter that requires grad, so there is no "
            "backward to plan"
        )


class ProgressCallback(Protocol):
    """Told how far work is: how much is done of what total, or in words what is done now."""

    def __call__(self, done: int = 0, total: int | None = None, *, text: str = "") -> None:
        """Show it."""
        ...


def trace(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    optimizer: Optimizer = "none",
    accumulate: bool = False,
    device: str | None = None,
    sharding: Sharding = NO_SHARDING,
    float_inputs: Sequence[str] = (),
    split: Split | None = "none",
    gradient_release: GradientRelease | bool | None = None,
    dynamic: Dynamic | None = None,
    outputs: Sequence[str | int] | None = None,
) -> Trace:
    """Trace one training step of `model` on a batch, without running or changing anything.

    `model` is in training mode; with `loss_fn`, ``loss_fn(output, target)`` (or
    ``loss_fn(output)``) is part of the step. `optimizer` and `accumulate` are of `resident_bytes`.
    `device`: ``cpu`` or ``cuda``, where model and batch must be; a name of `devices.json`, for
    which the CPU's ops are traced and the model may be on ``meta``; None: where the model is.
    `float_inputs`: numbers that each step reads anew, as refusals name them, such as
    ``"layers.0.drop.p"``; two more traces. `split`: see `Split`. `gradient_release`: True always,
    False never; None, where gradients are accumulated on one rank. `dynamic`: sizes that vary, over
    whose ranges the trace is. `outputs`: those of forward's results that are returned; None: all.

    CaptureError, with module, line and way out: no static graph. DeviceError: none such here."""
    require_split(split)
    check_arguments(args, kwargs, loss_fn, target)
    device = resolved_device(device, model)
    refuse_module(model, device, loss_fn)
    refuse_buckets_of_dtensors(model, sharding)
    args, kwargs, target = wait_all((tuple(args), dict(kwargs or {}), target))
    refuse_all_frozen(model, (args, kwargs, target))
    batch = (*inputs_cast(args, kwargs, sharding), target)
    numbers: list[FloatPlace] = []
    if float_inputs:
        from remat.graph_capture.tracing.float_inputs import named_places

        names = (float_inputs,) if isinstance(float_inputs, str) else dict.fromkeys(float_inputs)
        numbers = named_places(PythonState(model, loss_fn), tuple(names))
    check_batch(batch, device)
    signature = Signature(batch)
    signature.numbers = numbers_in(pytree.tree_leaves(batch))
    if dynamic:
        refuse_range_of_dtensors(model)
        signature = ranged_signature(model, batch, dynamic)
        batch = signature.example_at(signature.hints)
    asked = accumulate and sharding.kind == "none" if gradient_release is None else gradient_release
    release = asked if isinstance(asked, GradientRelease) else GradientRelease() if asked else None
    # The caller holds the batch that was cast, beside the one that the step reads.
    counted = (batch, (args, kwargs)) if sharding.param_dtype else batch
    resident = resident_bytes(
        with_loss(model, loss_fn), counted, optimizer=optimizer, accumulate=accumulate,
        sharding=sharding, is_on_host=sharding.cpu_offload and device != CPU,
        allocated=allocator_rounding(device),
    )  # fmt: skip
    if release and release.state_bytes:
        resident = msgspec.structs.replace(resident, optimizer_bytes=release.state_bytes)
    recipe = Recipe(
        name=type(model).__name__, signature=signature, loss_fn=loss_fn, resident=resident,
        autocast=autocast_state(), device=device,
        float_inputs=tuple((place.text, place.value) for place in numbers),
        split="none" if split is None and sharding.kind != "none" else split,
        gradient_release=release, outputs=as_outputs(outputs),
    )  # fmt: skip
    try:
        done = trace_recipe(model, recipe)
    except CaptureError as error:
        why = call_error(model, args, kwargs, loss_fn, target)
        if isinstance(error.cause, TypeError) and why:  # it fails far from the wrong argument
            raise CaptureError(why).caused_by(error) from None
        raise
    keep_recipe(model, done.graph.hash, done.recipe)
    return done


def trace_recipe(model: nn.Module, recipe: Recipe) -> Trace:
    """On fake tensors. `CaptureError` also if a number of the recipe cannot be an input."""
    if not recipe.float_inputs:
        return _trace_recipe(model, recipe)
    # Few steps have such inputs.
    from remat.graph_capture.tracing.float_inputs import holding, named_places, probed
    from remat.graph_capture.tracing.traced_float import Log

    names, values = zip(*recipe.float_inputs, strict=True)
    state = PythonState(model, recipe.loss_fn)
    found_at = named_places(state, names)
    places = [dataclasses.replace(p, value=v) for p, v in zip(found_at, values, strict=True)]
    with holding(places, values):
        done = _trace_recipe(model, recipe)
        # Traces with other numbers show whether the step is the same but for them.
        whole = not done.python_state.code_in_scope

        def traced_anew(log: Log) -> Probe:
            return _probe(_traced_once(model, done.recipe, ExecutedCode(), whole=whole), log)

        found = probed(places, state, _probe(done, Log()), traced_anew)
    if isinstance(found, str):
        raise FloatInputError(
            "plan for each value instead, as remat.rematerialize without a batch does: "
            f"{', '.join(names)} of {recipe.name} cannot be an input of the step ({found})"
        )
    done.floats = found
    done.python_state.leave_out(places)
    return done


def _probe(done: Trace, log: Log) -> Probe:
    from remat.graph_capture.tracing.float_inputs import Probe

    mutated = [(one.text, one.leaves) for one in done.mutated]
    left = mutated, [one.value for one in done.initialised]
    return Probe(done.descriptors.graph_module, left, done.looked_at, log)


def _traced_once(model: nn.Module, recipe: Recipe, ran: ExecutedCode, *, whole: bool) -> Trace:
    """As `_trace_once`, whose refusals have no frames of torch."""
    try:
        return _trace_once(model, recipe, ran, whole=whole)
    except CaptureError as error:
        if more := function_that_failed(error) - recipe.functions:
            recipe = dataclasses.replace(recipe, functions=recipe.functions | more)
            return _traced_once(model, recipe, ran, whole=whole)
        refused = type(error)(*error.args)  # the frames are those of its cause, some hundred lines
        vars(refused).update(vars(error))
        cause = error.__cause__
        raise refused.caused_by(cause if isinstance(cause, Exception) else error) from None


def _trace_recipe(model: nn.Module, recipe: Recipe) -> Trace:
    failed: list[CaptureError] = []
    ran = ExecutedCode()
    # If not as eager, as if compiled, then exported: models may take other code then, so it warns.
    for flags in FLAGS if recipe.flags is None else [recipe.flags]:
        try:
            one = dataclasses.replace(recipe, flags=flags)
            done = _traced_once(model, one, ran, whole=False)
            if not ran.is_all and done.python_state.code_in_scope:  # it may have read anything
                done = _traced_once(model, one, ran, whole=True)
        except CaptureError as error:
            # What is refused by us, and not by torch, no flag changes.
            if error.cause is None or isinstance(error.cause, CaptureError):
                raise
            failed.append(error)
            # Eager's own way, for batches whose values give the same answers.
            held = recipe.signature.held_to_numbers(error.read)
            if held.held_numbers != recipe.signature.held_numbers:
                recipe = dataclasses.replace(recipe, signature=held)
                if None not in held.held_numbers.values():
                    with contextlib.suppress(CaptureError):
                        return _trace_recipe(model, recipe)
            continue
        if any(flags) and recipe.flags is None:
            warnings.warn(
                f"{recipe.name} is traced as if under torch.compile, as it cannot be traced as "
                "eager runs it. Where it then runs other ops than eager, the last bits differ, "
                f"and remat.check finds that. To avoid it, {failed[0]}",
                stacklevel=3,
            )
        done.python_state.asks_identity = ran.asks_identity()
        if _counts_as_one(done):
            signature = done.recipe.signature.with_tensors_as_one()
            return _trace_recipe(model, dataclasses.replace(done.recipe, signature=signature))
        _require_the_same_again(model, done, ran)
        if done.python_state.code_in_scope:
            done.python_state.compare_executed()
        return done
    first, last = failed[0], failed[-1]
    if str(last) == str(first):
        raise first
    text = f"{first}.\nTraced as if it were compiled, it fails as well: {last}"
    raise CaptureError(text).caused_by(first)


def _counts_as_one(done: Trace) -> bool:
    """Whether tensors of the batch are one, where that makes another step than several."""
    signature = done.recipe.signature
    if signature.as_one:
        return False
    twice = [i for i, first in enumerate(signature.firsts) if i != first]
    places = {*twice, *(signature.firsts[i] for i in twice)}
    facts = [one for i in places if (one := signature.tensors[i])]
    # Code may ask whether two are one; and one tensor has one gradient, the sum of both.
    if not twice or done.python_state.asks_identity or any(one.requires_grad for one in facts):
        return bool(twice)
    written = written_inputs(done.joint.module.graph, done.joint.num_forward_outputs)
    of_batch = written[len(written) - len(signature.firsts) :]  # parameters and buffers are first
    return any(of_batch[i] is not None for i in places)  # a write to one is a write to the other


def _require_the_same_again(model: nn.Module, done: Trace, ran: ExecutedCode) -> None:
    first_only = (*done.initialised, *(memo for memo in done.library_caches if memo.added))
    if not first_only and not done.loop_carried:
        return
    spaces = [(vars(model.get_submodule(one.path)), one.name) for one in done.loop_carried]
    before = [DictItem("", space, name, space.get(name, MISSING)) for space, name in spaces]
    kept = [(one.place, one.place.now()) for one in first_only]
    again: Trace | None = None
    try:
        # Each step may set a flag that only says so; not one of a first call that initialises
        # something, nor a result that the next call reads.
        for one in first_only:
            one.put()
        for space, name in spaces:
            space[name] = UnreadSentinel()
        with contextlib.suppress(CaptureError):
            again = _trace_once(model, done.recipe, ran, whole=not done.python_state.code_in_scope)
    finally:
        for place, value in (*kept, *((entry, entry.value) for entry in before)):
            place.put(value)
    is_same = (
        again is not None
        and is_same_graph(again.joint.module, done.joint.module)
        and not any(memo.added for memo in again.library_caches)
    )
    if again is None or not is_same or again.initialised:
        text = first_only[0].place.text if first_only else done.loop_carried[0].text
        raise CaptureError(
            f"call the model once on a batch, then plan, if {text} is only set once: forward of "
            f"{done.recipe.name} sets it at its first call, and the next call does something else "
            "because of it.\n"
            "If each step reads what the last one left, pass it to forward and return it"
        )
    if any(isinstance(one.place, ModuleHooks) for one in done.initialised):
        # Hooks that forward sets are code of forward, which the first trace did not look into.
        again.python_state.asks_identity = done.python_state.asks_identity
        done.python_state = again.python_state
        done.python_state.leave_out(one.place for one in done.initialised)
        done.python_state.compare_items_of(one.place for one in done.library_caches)
