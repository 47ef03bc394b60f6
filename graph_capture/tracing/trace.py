"""The trace: one joint graph of forward and backward, from a module and a batch.

As eager runs it, else as if compiled or exported; the second call has to do the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from torch import nn

from remat.graph_capture.devices.known_devices import CPU, allocator_rounding
from remat.graph_capture.devices.placement import resolved_device
from remat.graph_capture.distributed.collectives import wait_all
from remat.graph_capture.distributed.dtensors import inputs_cast
from remat.graph_capture.distributed.rank_refusals import (
    refuse_buckets_of_dtensors,
    refuse_range_of_dtensors,
)
from remat.graph_capture.distributed.sharding import NO_SHARDING, Sharding
from remat.graph_capture.errors import CaptureError, FloatInputError
from remat.graph_capture.graph import Optimizer
from remat.graph_capture.joint.gradients import GradientRelease
from remat.graph_capture.joint.nodes import written_inputs
from remat.graph_capture.python_state.executed_code import ExecutedCode
from remat.graph_capture.python_state.module_hooks import ModuleHooks
from remat.graph_capture.python_state.state_guards import PythonState
from remat.graph_capture.python_state.state_slots import MISSING, DictItem
from remat.graph_capture.refusals import refuse_all_frozen, refuse_module
from remat.graph_capture.sizes.ranged_signature import ranged_signature
from remat.graph_capture.sizes.symbols import Dynamic
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.attribute_writes import UnreadSentinel, is_same_graph
from remat.graph_capture.tracing.left_out import as_outputs
from remat.graph_capture.tracing.one_trace import trace_once, traced_once
from remat.graph_capture.tracing.recipe import (
    FLAGS,
    Recipe,
    Split,
    autocast_state,
    call_error,
    check_arguments,
    keep_recipe,
    require_split,
)
from remat.graph_capture.tracing.resident import resident_bytes
from remat.graph_capture.tracing.signature import Signature, check_batch, numbers_in
from remat.graph_capture.tracing.step_module import LossFunction, with_loss
from remat.graph_capture.tracing.traced_step import Trace

if TYPE_CHECKING:
    from remat.graph_capture.tracing.float_inputs import FloatPlace, Probe
    from remat.graph_capture.tracing.traced_float import Log


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
            return _probe(traced_once(model, done.recipe, ExecutedCode(), whole=whole), log)

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


def _trace_recipe(model: nn.Module, recipe: Recipe) -> Trace:
    failed: list[CaptureError] = []
    ran = ExecutedCode()
    # If not as eager, as if compiled, then exported: models may take other code then, so it warns.
    for flags in FLAGS if recipe.flags is None else [recipe.flags]:
        try:
            one = dataclasses.replace(recipe, flags=flags)
            done = traced_once(model, one, ran, whole=False)
            if not ran.is_all and done.python_state.code_in_scope:  # it may have read anything
                done = traced_once(model, one, ran, whole=True)
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
            again = trace_once(model, done.recipe, ran, whole=not done.python_state.code_in_scope)
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
