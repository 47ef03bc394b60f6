"""The trace: one joint graph of forward and backward, from a module and a batch.

A module is traced as eager runs it, else as if it were compiled or exported; what it does at its
second call has to be the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from torch import nn

from remat.graph_capture.derived.sharding import NO_SHARDING, Sharding
from remat.graph_capture.devices.device_table import CPU, allocated_on
from remat.graph_capture.devices.placement import resolved_device
from remat.graph_capture.errors import CaptureError, FloatInputError
from remat.graph_capture.float_inputs.arguments import Probe
from remat.graph_capture.float_inputs.inputs import FloatPlace, named_places
from remat.graph_capture.float_inputs.probing import holding, probed
from remat.graph_capture.float_inputs.traced_float import Log
from remat.graph_capture.gradients.hand_over import HandOver
from remat.graph_capture.graph import Optimizer
from remat.graph_capture.joint.nodes import written_inputs
from remat.graph_capture.over_ranks.refusals import refuse_range_of_dtensors
from remat.graph_capture.over_ranks.sent import arrived
from remat.graph_capture.python_state.module_hooks import ModuleHooks
from remat.graph_capture.python_state.places import MISSING, Entry
from remat.graph_capture.python_state.ran import CodeThatRan
from remat.graph_capture.python_state.watch import PythonState
from remat.graph_capture.refuse import refuse_all_frozen, refuse_module
from remat.graph_capture.shapes.ranges import Dynamic
from remat.graph_capture.shapes.signature import (
    ranged_signature,
    refuse_beside_ranges,
)
from remat.graph_capture.tracing.given import not_taken, require_form
from remat.graph_capture.tracing.mixed_precision import inputs_cast
from remat.graph_capture.tracing.one_trace import Trace, trace_once
from remat.graph_capture.tracing.recipe import (
    Recipe,
    Split,
    autocast_state,
    keep_recipe,
    require_split,
)
from remat.graph_capture.tracing.resident import resident_bytes
from remat.graph_capture.tracing.side_effects.next_call import Unread, is_same_graph
from remat.graph_capture.tracing.signature import Signature, check_batch
from remat.graph_capture.tracing.step_module import LossFunction, with_loss
from remat.graph_capture.tracing.trace_flags import FLAGS


class Shown(Protocol):
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
    hand_over: HandOver | bool | None = None,
    dynamic: Dynamic | None = None,
) -> Trace:
    """Trace one training step of `model` on a batch, without running or changing anything.

    Parameters
    ----------
    model : in training mode. args, kwargs : one batch, as forward takes it.
    loss_fn, target : where given, ``loss_fn(output, target)`` (or ``loss_fn(output)``) is
        part of the step, and the rewritten module returns its result.
    optimizer, accumulate : what stays allocated between steps, see `resident_bytes`.
    device : what the trace is to be priced for; left at None, where the model is. Either ``cpu``
        or ``cuda``, where model and batch must be; or a name of `devices.json`, for which the CPU's
        ops are traced and the model may be on ``meta``.
    sharding : over ranks. It counts for what is resident on one of them.
    float_inputs : numbers of Python's that each step is to read anew, by the names that a refusal
        gives them, such as ``"temperature"`` or ``"layers.0.drop.p"``. It takes two more traces.
    split : what may run in pieces: ``exact`` allows what gives eager's bits, ``tolerance`` also
        what sums in another order. None allows ``exact`` for large heads of a step on one rank.
    hand_over : how gradients are handed over as they are made. None lets them be added to others
        where they are accumulated on one rank: wrappers for several take them in their own way.
        True always does, False never.
    dynamic : sizes of the batch that vary; the trace is then for all sizes of their ranges.

    Raises
    ------
    CaptureError : the step cannot be one static graph; names module, line and way out.
    DeviceError : the device is unknown or not here, or a tensor is on another one.
    """
    require_split(split)
    require_form(args, kwargs, loss_fn, target)
    device = resolved_device(device, model)
    refuse_module(model, device, loss_fn)
    args, kwargs, target = arrived((tuple(args), dict(kwargs or {}), target))
    refuse_all_frozen(model, (args, kwargs, target))
    given = args, kwargs
    batch = (*inputs_cast(args, kwargs, sharding), target)
    numbers: list[FloatPlace] = []
    if float_inputs:
        names = (float_inputs,) if isinstance(float_inputs, str) else dict.fromkeys(float_inputs)
        numbers = named_places(PythonState(model, loss_fn), tuple(names))
    check_batch(batch, device)
    signature = Signature(batch)
    if dynamic:
        refuse_range_of_dtensors(model)
        refuse_beside_ranges(
            float_inputs=bool(float_inputs),
            split=split not in (None, "none"),
            sharding=sharding.kind != "none",
        )
        signature = ranged_signature(model, batch, dynamic)
        batch = signature.example_at(signature.hints)
    asked = accumulate and sharding.kind == "none" if hand_over is None else hand_over
    handing = asked if isinstance(asked, HandOver) else HandOver() if asked else None
    # The caller holds the batch that was cast, beside the one that the step reads.
    counted = (batch, given) if sharding.param_dtype else batch
    resident = resident_bytes(
        with_loss(model, loss_fn), counted, optimizer=optimizer, accumulate=accumulate,
        sharding=sharding, is_on_host=sharding.cpu_offload and device != CPU,
        allocated=allocated_on(device),
    )  # fmt: skip
    if handing and handing.state_bytes:
        resident = msgspec.structs.replace(resident, optimizer_bytes=handing.state_bytes)
    recipe = Recipe(
        name=type(model).__name__,
        signature=signature,
        loss_fn=loss_fn,
        resident=resident,
        autocast=autocast_state(),
        device=device,
        float_inputs=tuple((place.text, place.value) for place in numbers),
        split="none" if split is None and (dynamic or sharding.kind != "none") else split,
        hand_over=handing,
    )
    try:
        done = trace_recipe(model, recipe)
    except CaptureError as error:
        why = not_taken(model, args, kwargs, loss_fn, target)
        if isinstance(error.cause, TypeError) and why:
            raise CaptureError(why).caused_by(error) from None
        raise
    keep_recipe(model, done.graph.hash, done.recipe)
    return done


def trace_recipe(model: nn.Module, recipe: Recipe) -> Trace:
    """Trace `model` on fake tensors with the recipe's signature.

    First as eager. If that fails, as if compiled, then as if exported. Models may take other code
    then, so it warns.

    Raises
    ------
    CaptureError : as of `trace`; a number that the recipe names cannot be an input of the step.
    """
    if not recipe.float_inputs:
        return _trace_recipe(model, recipe)
    names, values = zip(*recipe.float_inputs, strict=True)
    state = PythonState(model, recipe.loss_fn)
    found_at = named_places(state, names)
    places = [dataclasses.replace(p, value=v) for p, v in zip(found_at, values, strict=True)]
    with holding(places, values):
        done = _trace_recipe(model, recipe)
        found = probed(
            places,
            state,
            _probe(done, Log()),
            lambda log: _probe(_traced_anew(model, done), log),
        )
    if isinstance(found, str):
        raise FloatInputError(
            f"{', '.join(names)} of {recipe.name} cannot be an input of the step: {found}. Plan "
            "for each value instead, as remat.plan_cache does"
        )
    done.floats = found
    done.python_state.leave_out(places)
    return done


def _probe(done: Trace, log: Log) -> Probe:
    """What is compared between traces with different numbers."""
    left = ([(one.text, one.leaves) for one in done.carried], [one.value for one in done.settled])
    return Probe(done.descriptors.graph_module, left, done.looked_at, log)


def _traced_once(model: nn.Module, recipe: Recipe, ran: CodeThatRan, *, whole: bool) -> Trace:
    """As `trace_once`, whose refusals have no frames of torch: those are of their cause."""
    try:
        return trace_once(model, recipe, ran, whole=whole)
    except CaptureError as error:
        refused = type(error)(*error.args)
        vars(refused).update(vars(error))
        cause = error.__cause__
        raise refused.caused_by(cause if isinstance(cause, Exception) else error) from None


def _traced_anew(model: nn.Module, done: Trace) -> Trace:
    """As it was traced before."""
    whole = not done.python_state.ran_alone
    return _traced_once(model, done.recipe, CodeThatRan(), whole=whole)


def _trace_recipe(model: nn.Module, recipe: Recipe) -> Trace:
    failed: list[CaptureError] = []
    ran = CodeThatRan()
    for flags in FLAGS if recipe.flags is None else [recipe.flags]:
        try:
            one = dataclasses.replace(recipe, flags=flags)
            done = _traced_once(model, one, ran, whole=False)
            if not ran.is_all and done.python_state.ran_alone:
                done = _traced_once(model, one, ran, whole=True)
        except CaptureError as error:
            # What is refused by us, and not by torch, no flag changes.
            if error.cause is None or isinstance(error.cause, CaptureError):
                raise
            failed.append(error)
            continue
        if any(flags) and recipe.flags is None:
            warnings.warn(
                f"{recipe.name} is traced as if it were compiled, since its own way cannot be "
                f"traced ({failed[0]}). Where it then runs other ops than in eager, the last bits "
                "differ, which remat.check finds: leave out arguments whose values it looks at, "
                "such as an attention_mask of ones",
                stacklevel=3,
            )
        done.python_state.asks_identity = ran.asks_identity()
        if _counts_as_one(done):
            signature = done.recipe.signature.with_tensors_as_one()
            return _trace_recipe(model, dataclasses.replace(done.recipe, signature=signature))
        _require_the_same_again(model, done, ran)
        if done.python_state.ran_alone:
            done.python_state.compare_what_ran()
        return done
    first, last = failed[0], failed[-1]
    if str(last) == str(first):
        raise first
    raise CaptureError(
        f"{first}. Traced as if it were compiled, it fails as well: {last}"
    ).caused_by(first)


def _counts_as_one(done: Trace) -> bool:
    """Whether tensors of the batch are one, and that makes another step than their being several.

    It does where code asks, where the step writes to one, and where one has a gradient.
    """
    signature = done.recipe.signature
    if signature.as_one:
        return False
    twice = [i for i, first in enumerate(signature.firsts) if i != first]
    places = {*twice, *(signature.firsts[i] for i in twice)}
    facts = [signature.tensors[i] for i in places]
    if not twice or done.python_state.asks_identity or any(one and one[4] for one in facts):
        return bool(twice)
    written = written_inputs(done.joint.module.graph, done.joint.num_forward_outputs)
    of_batch = written[len(written) - len(signature.firsts) :]
    return any(of_batch[i] is not None for i in places)


def _require_the_same_again(model: nn.Module, done: Trace, ran: CodeThatRan) -> None:
    """Refuse a forward that does something else at its second call, for what the first has set.

    A flag that only says that it was set may be set by each step. One that stands for a first
    call which initialises something may not, nor a result that the next call reads.
    """
    first_only = (*done.settled, *(memo for memo in done.memos if memo.added))
    if not first_only and not done.unsure:
        return
    spaces = [(vars(model.get_submodule(one.path)), one.name) for one in done.unsure]
    before = [Entry("", space, name, space.get(name, MISSING)) for space, name in spaces]
    kept = [(one.place, one.place.now()) for one in first_only]
    again: Trace | None = None
    try:
        for one in first_only:
            one.put()
        for space, name in spaces:
            space[name] = Unread()
        with contextlib.suppress(CaptureError):
            again = trace_once(model, done.recipe, ran, whole=not done.python_state.ran_alone)
    finally:
        for place, value in (*kept, *((entry, entry.value) for entry in before)):
            place.put(value)
    is_same = again is not None and is_same_graph(again.joint.module, done.joint.module)
    if again is None or not is_same or again.settled or any(memo.added for memo in again.memos):
        text = first_only[0].place.text if first_only else done.unsure[0].text
        raise CaptureError(
            f"forward of {done.recipe.name} sets {text} at its first call, and its next call does "
            "something else for it. If it is made once, call the model once on a batch, then plan. "
            "If each step reads what the last one left, pass it to forward and return it"
        )
    if any(isinstance(one.place, ModuleHooks) for one in done.settled):
        # Hooks that forward sets are code of forward, which the first trace did not look into.
        again.python_state.asks_identity = done.python_state.asks_identity
        done.python_state = again.python_state
        done.python_state.leave_out(one.place for one in done.settled)
        done.python_state.compare_items_of(one.place for one in done.memos)
