"""Gradients that are released as they are made, to be added to those of earlier batches.

Autograd adds each gradient to ``.grad`` at once and lets go of it (`AccumulateGrad`). A step that
returned all together would hold them to its end, so one that accumulates has an op, `ACCUMULATE`,
that releases each. Without accumulation ``.grad`` is the gradient itself, and stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, fx, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from remat.graph_capture.devices.known_devices import Allocated
from remat.graph_capture.devices.meter import Meter
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import ACCUMULATE, UPDATE, Op, Origin, TrainingGraph
from remat.graph_capture.joint.eager_memory import MADE_AS
from remat.graph_capture.joint.nodes import MADE_IN_FORWARD, is_tangent, is_view, storage_key
from remat.graph_capture.joint.provenance import path_in_model
from remat.graph_capture.joint.values import ValueTable
from remat.graph_capture.torch_private.aot import OutputType, ViewAndMutationMeta

_PARTS = 256  # updates wait until their gradients are this part of all: each place costs a call

_ALIASES_OF_INPUTS = (OutputType.alias_of_input, OutputType.is_input)


def can_release_gradients(metadata: ViewAndMutationMeta) -> bool:
    # A step that releases gradients is given views: it can neither write to them nor return them.
    inputs = metadata.input_info
    aliases = (one for one in metadata.output_info if one.output_type in _ALIASES_OF_INPUTS)
    returned = [inputs[one.base_idx] for one in aliases if one.base_idx is not None]
    written = [one for one in inputs if one.mutates_data or one.mutates_metadata]
    return not any(one.requires_grad for one in (*written, *returned))


def of_parameters(gm: fx.GraphModule, num_forward_outputs: int) -> dict[int, fx.Node]:
    """By place, the index among the results of backward: the parameter whose gradient is there."""
    parameters = _described_parameters(gm.graph.find_nodes(op="placeholder"))
    described = gm.graph.output_node().meta["desc"][num_forward_outputs:]
    grad_of = (getattr(what, "grad_of", None) for what in described)
    return {place: parameters[what] for place, what in enumerate(grad_of) if what in parameters}


@dataclass
class GradientAccumulation:
    gradients: Sequence[Any]
    parameters: Mapping[int, fx.Node]  # by place, those whose gradients may be released
    # How updates are made in backward; if any are, only their gradients are released.
    release: GradientRelease
    # The places that each op releases.
    of_op: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    @functools.cached_property
    def updated(self) -> frozenset[str]:
        return frozenset(self.release.updates)

    def returned(self) -> list[Any]:
        released = {place for places in self.of_op.values() for place in places}
        return [g for place, g in enumerate(self.gradients) if place not in released]

    def added_to(self, ops: Sequence[Op], values: ValueTable) -> list[Op]:
        made = self._made_by_ops(values)
        # Gradients that are only added wait for none, so that no step needs more than eager.
        least_bytes = _sum_bytes(values, made.values()) / _PARTS if self.updated else 0
        last_read = {name: i for i, op in enumerate(ops) for name in op.inputs}
        final = self._final_at(ops, values, made, last_read)
        found, waiting = list[Op](), list[int]()
        for i, op in enumerate(ops):
            found.append(op)
            waiting += final.get(i, ())
            held = tuple(dict.fromkeys(made[place] for place in waiting))
            # The last op takes what still waits.
            is_large = i in final and _sum_bytes(values, held) >= least_bytes
            if waiting and (is_large or i == len(ops) - 1):
                shared = [name for name in held if last_read.get(name, 0) > i]
                found.append(self._op(op, values, held, waiting, shared))
                waiting = []
        return found

    def _made_by_ops(self, values: ValueTable) -> dict[int, str]:
        """By place: the value of each gradient that an op of the step makes."""
        found: dict[int, str] = {}
        for place, parameter in self.parameters.items():
            if self.updated and _parameter_name(parameter) not in self.updated:
                continue
            node = self.gradients[place]
            value = values.by_name.get(values.of(node)) if isinstance(node, fx.Node) else None
            if value is not None and value.producer and value.kind != "tangent":
                found[place] = value.name
        return found

    def _final_at(
        self, ops: Sequence[Op], values: ValueTable, made: dict[int, str], last_read: dict[str, int]
    ) -> dict[int, list[int]]:
        """For the index of each op: places that are final behind it."""
        index = {op.name: i for i, op in enumerate(ops)}
        final: dict[int, list[int]] = {}
        for place, name in made.items():
            written = values.written["backward"].get(name, name)
            at = index.get(values.by_name[written].producer, 0)  # what forward made is final there
            if self.updated:
                # An update writes to the parameter, which backward may still have to read.
                at = max(at, last_read.get(values.of(self.parameters[place]), 0))
            final.setdefault(at, []).append(place)
        return final

    def _op(
        self, behind: Op, values: ValueTable, held: Sequence[str], places: list[int],
        shared: Sequence[str],
    ) -> Op:  # fmt: skip
        target, no_recompute = ACCUMULATE, "it adds to what .grad holds"
        read = (*held, *values.writes_before(held, "backward"))
        workspace_bytes = 0
        if self.updated:
            target, no_recompute = UPDATE, "it updates parameters"
            read += tuple(dict.fromkeys(values.of(self.parameters[place]) for place in places))
            workspace_bytes = self._update_bytes(values, places, shared)
        name = f"{target.removeprefix('remat.')}_{held[-1]}"
        self.of_op[name] = tuple(places)
        return Op(
            name, target, "backward", read, (),
            workspace_bytes=workspace_bytes, no_recompute=no_recompute,
            module=behind.module, source=behind.source,
        )  # fmt: skip

    def _update_bytes(self, values: ValueTable, places: list[int], shared: Sequence[str]) -> int:
        """What the updates take beside the gradients, at most: all parameters take one step."""
        names = (_parameter_name(self.parameters[place]) for place in places)
        took_bytes = self.release.together(tuple(dict.fromkeys(names)))
        if not self.release.is_added:  # autograd copies what others read, unless it adds
            return _sum_bytes(values, shared) + took_bytes
        # Once gradients are added, autograd lets them go before the parameters are updated.
        given = {values.of(self.gradients[place]) for place in places}
        return max(0, took_bytes - _sum_bytes(values, given.difference(shared)))


def _described_parameters(inputs: Iterable[fx.Node]) -> dict[Any, fx.Node]:
    described = {node.meta.get("desc"): node for node in inputs}
    return {k: node for k, node in described.items() if type(k).__name__ == "ParamAOTInput"}


def _parameter_name(parameter: fx.Node) -> str:
    return path_in_model(str(parameter.meta["desc"].target))


def _sum_bytes(values: ValueTable, names: Iterable[str]) -> int:
    return sum(values.by_name[name].size_bytes for name in names)


# Autograd keeps a gradient only if nothing else holds it and it is laid out as its parameter
# (`AccumulateGrad`, the "gradient layout contract"), and copies any other at once. Here the copy is
# in the step: after it, copies of all gradients would come on top of the peak.

_library = torch.library.Library("remat", "FRAGMENT")
_library.define("laid_out(Tensor x, int[] strides) -> Tensor")


@torch.library.impl(_library, "laid_out", "CompositeExplicitAutograd")
def laid_out(x: Tensor, strides: Sequence[int]) -> Tensor:
    return x.new_empty_strided(x.shape, strides).copy_(x)


_LAID_OUT = torch.ops.remat.laid_out.default


def lay_out_gradients(gm: fx.GraphModule, n_forward: int, released: Collection[int] = ()) -> None:
    """Copy the gradients of parameters that autograd would copy, but for those at `released`."""
    end = gm.graph.output_node()
    given: Any = end.args[0]
    results, inputs = list(given), gm.graph.find_nodes(op="placeholder")
    parameter = _described_parameters(inputs)
    held = [node.meta.get("val") for node in inputs if not is_tangent(node)]
    # The caller holds the inputs, so autograd would copy a gradient that aliases one.
    taken = {storage_key(value) for value in held if _is_strided(value)}
    for i in range(n_forward, len(results)):
        node, what = results[i], end.meta["desc"][i]
        like = parameter.get(getattr(what, "grad_of", None))
        # Autograd adds released gradients to others at once, and copies itself if it must.
        is_own = i - n_forward not in released and isinstance(node, fx.Node)
        if not is_own or like is None or not _is_strided(node.meta["val"]):
            continue  # others are refused elsewhere
        value = node.meta["val"]
        key, wanted = storage_key(value), _strides_for(like.meta["val"])
        # As `obeys_layout_contract` of torch's grad_layout_contract.h.
        triples = zip(value.shape, value.stride(), wanted, strict=True)
        is_kept = all(size == 1 or own == other for size, own, other in triples)
        if key in taken or not is_kept:
            results[i] = _laid_out_copy(gm, node, like)
        taken.add(key)  # of two parameters with one gradient, the first keeps it
    if results != list(given):
        end.args = (tuple(results),)
        gm.recompile()


def _is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _strides_for(parameter: Tensor) -> Sequence[int]:
    """The parameter's, or contiguous ones if these overlap or have gaps."""
    if torch.ops.aten.is_non_overlapping_and_dense.default(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def _laid_out_copy(gm: fx.GraphModule, node: fx.Node, parameter: fx.Node) -> fx.Node:
    value, strides = node.meta["val"], _strides_for(parameter.meta["val"])
    last = _before_copy(node, parameter)
    with gm.graph.inserting_after(last):
        copy = gm.graph.call_function(_LAID_OUT, (node, list(strides)))
    copy.meta = {**node.meta, "val": value.new_empty_strided(value.shape, strides)}
    copy.meta.pop(MADE_IN_FORWARD, None)  # autograd copies it in backward, whoever made it
    if MADE_AS in last.meta:  # what eager lets go of before the next node is gone when it copies
        copy.meta[MADE_AS] = last.meta[MADE_AS] + 1
    return copy


def _before_copy(gradient: fx.Node, parameter: fx.Node) -> fx.Node:
    source = gradient
    while is_view(source):
        source = source.all_input_nodes[0]
    if not is_tangent(source) and len(source.users) < 2:
        return gradient  # the copy frees what it is a copy of, so the sooner the better
    # Eager copies after the backward of the op that reads the parameter, forward's last op first.
    numbers = (_sequence_of(user) for user in parameter.users)
    read_at = min((n for n in numbers if n is not None), default=0)
    last = gradient
    while last.next.op == "call_function" and (_sequence_of(last.next) or 0) >= read_at > 0:
        last = last.next
    return last


def _sequence_of(node: fx.Node) -> int | None:
    """Of the op of forward that the node stands for, or whose backward made it."""
    return node.meta.get("seq_nr")


# The optimizer's own step, over some of its parameters: bits are those of a step over all.

_KNOWN = (SGD, Adam, AdamW)  # a parameter's step depends on it alone


def require_known(optimizer: Optimizer) -> None:
    """Raises CaptureError where the step cannot be taken for each parameter by itself."""
    if type(optimizer) not in _KNOWN:
        names = ", ".join(kind.__name__ for kind in _KNOWN)
        raise CaptureError(
            f"use torch's {names}, or update after backward: a {type(optimizer).__name__} cannot "
            "update parameters one by one during backward"
        )
    given: Any = optimizer
    if given._optimizer_step_pre_hooks or given._optimizer_step_post_hooks:
        raise CaptureError(
            "remove the hooks on the optimizer's step, or update after backward: they would be "
            "called for each parameter"
        )
    if any(group.get("differentiable") or group.get("capturable") for group in given.param_groups):
        raise CaptureError(
            "leave out differentiable=True or capturable=True, or update after backward: such an "
            "optimizer cannot update during backward"
        )


def parameter_groups(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """By the `id` of each parameter: its group, as schedules have left it."""
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}


def step_of(
    optimizer: Optimizer, parameters: Iterable[Tensor], groups: Mapping[int, Mapping[str, Any]]
) -> None:
    """One step over `parameters`; `groups` as of `parameter_groups`."""
    taken: dict[int, tuple[Mapping[str, Any], list[Tensor]]] = {}
    for parameter in parameters:
        group = groups[id(parameter)]
        taken.setdefault(id(group), (group, []))[1].append(parameter)
    whole = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": own} for group, own in taken.values()]
    try:
        type(optimizer).step(optimizer)  # not the instance's, which a scheduler has put there
    finally:
        optimizer.param_groups = whole


_Step = functools.partial[None]
_TOUCHED = 3  # times a parameter's bytes that an update moves at least: it, again, its gradient
_Cost = tuple[int, int]  # bytes kept between steps, and taken beside the gradients in one


class UpdateCosts:
    """What steps over some parameters of an optimizer take; each like step is measured once."""

    def __init__(
        self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], meter: Meter,
        allocated: Allocated,
    ) -> None:  # fmt: skip
        groups = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._kind: Any = type(optimizer)
        self._meter, self._allocated = meter, allocated
        self._options = [_own_options(group) for group in optimizer.param_groups]
        # No tensors: a recipe that is copied keeps none of the model's.
        self.of = {
            name: (_like(parameter), groups[id(parameter)])
            for name, parameter in parameters.items()
            if parameter.requires_grad and id(parameter) in groups
        }
        self._known: dict[Any, _Cost] = {}
        self._known_us: dict[Any, float] = {}

    def state_bytes(self) -> int:
        return sum(self._of((name,))[0] for name in self.of)

    def together(self, names: tuple[str, ...]) -> int:
        return self._of(names)[1]

    def together_us(self, names: tuple[str, ...]) -> float:
        key = tuple(self.of[name] for name in names)
        if key not in self._known_us:
            made, step = self.made_step(names)
            moved_bytes = sum(_TOUCHED * one.nbytes for one in made)
            self._known_us[key] = self._meter.median_us(step, moved_bytes)
        return self._known_us[key]

    def made_step(self, names: tuple[str, ...]) -> tuple[list[nn.Parameter], _Step]:
        """Made parameters with made gradients, and a usual step of an optimizer over these."""
        made = [nn.Parameter(_zeros_like(self.of[name][0])) for name in names]
        for parameter in made:
            parameter.grad = torch.zeros_like(parameter)
        # In one group, what a step takes for one parameter is there while the next begins.
        of_group: dict[int, list[nn.Parameter]] = {}
        for one, name in zip(made, names, strict=True):
            of_group.setdefault(self.of[name][1], []).append(one)
        groups = [{**self._options[i], "params": own} for i, own in of_group.items()]
        optimizer: Optimizer = self._kind(groups)
        optimizer.step()  # the first makes the state; later ones take as this one
        return made, functools.partial(step_of, optimizer, made, parameter_groups(optimizer))

    def _of(self, names: tuple[str, ...]) -> _Cost:
        key = tuple(self.of[name] for name in names)
        if key not in self._known:
            made, step = self.made_step(names)
            memory = self._meter.step_memory(step)
            kept = [
                self._allocated(one.nbytes)
                for parameter in made
                for one in step.args[0].state[parameter].values()
                if isinstance(one, Tensor) and one.device == parameter.device
            ]
            self._known[key] = sum(kept), memory.peak_bytes
        return self._known[key]


_Like = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def _like(parameter: Tensor) -> _Like:
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.device


def _zeros_like(like: _Like) -> Tensor:
    shape, strides, dtype, device = like
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()


def _own_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _nothing(_: tuple[str, ...]) -> int:
    return 0  # as a fused optimizer takes


def _no_time(_: tuple[str, ...]) -> float:
    return 0.0


@dataclass(frozen=True)
class GradientRelease:
    is_added: bool = True  # to a ``.grad`` that is there before the step
    updates: tuple[str, ...] = ()  # parameters updated in backward; others' gradients stay
    together: Callable[[tuple[str, ...]], int] = _nothing  # bytes of one step over some of these
    together_us: Callable[[tuple[str, ...]], float] = _no_time  # the time of that step
    state_bytes: int = 0  # of the optimizer, between steps


class _Released(Protocol):
    """A `Joint`, which is built with what is here."""

    module: fx.GraphModule
    num_forward_outputs: int
    accumulations: dict[str, tuple[int, ...]]


def with_update_costs(
    graph: TrainingGraph, joint: _Released, release: GradientRelease | None, origin: Origin
) -> TrainingGraph:
    """`graph` with the time of each update.

    Solvers do not choose among updates, but the step takes their time, beside copies too.
    """
    if release is None or not release.updates:
        return graph
    parameters = of_parameters(joint.module, joint.num_forward_outputs)

    def costed(op: Op) -> Op:
        if op.target != UPDATE:
            return op
        places = joint.accumulations[op.name]
        names = dict.fromkeys(_parameter_name(parameters[place]) for place in places)
        us = op.cost_us + release.together_us(tuple(names))
        return msgspec.structs.replace(op, cost_us=us, cost_origin=origin)

    return msgspec.structs.replace(graph, ops=tuple(map(costed, graph.ops)))
