"""Carries out the actions of one whole step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.optimizers import parameter_groups, step_alone
from remat.graph_capture.torch_private.core import DisableAutocast
from remat.rewriter.graphs.codegen import Released, Steps, compile_in_steps, release_gradients
from remat.rewriter.graphs.copies import CopyContext, CopyEmitter, copy_times, written_by
from remat.rewriter.graphs.eager import EagerEmitter
from remat.rewriter.graphs.emit import leave_out_views
from remat.rewriter.graphs.emitter import Demanded, as_module
from remat.rewriter.tiers.file_tier import TierCopies
from remat.schedules.schedule import Fetch, Offload, Schedule, Step
from remat.whole_step.program import Add, Resume, Segment, StepAction, StepOf
from remat.whole_step.residents import Held, Residents, moments, uninterrupted

# The code of one microbatch: forward and backward in one generator, which stops at each segment.
#
# It is the code of a rewritten module (`rewriter/graphs`), without autograd around it: the joint
# graph has eager's own backward ops, and its only tangent is that of the loss.


@dataclass(frozen=True)
class _MicrobatchCode:
    """The generator's function, which takes all inputs in a list, and the graph behind it."""

    run: Steps
    module: fx.GraphModule


def _microbatch_code(
    joint: Joint, segments: Sequence[Segment], place_of: Mapping[str, int], tier: TierCopies
) -> _MicrobatchCode:
    """Compile the segments of a microbatch.

    Parameters
    ----------
    place_of : by parameter, the place of its gradient among all results of the joint graph.
    tier : where values of layers go that leave the device meanwhile.
    """
    steps = tuple(step for segment in segments for step in segment.steps)
    emitter = _emitter(joint, steps, tier)
    inputs = joint.module.graph.find_nodes(op="placeholder")
    emitter.take_inputs(inputs)
    results: Any = joint.module.graph.output_node().args[0]
    released, begun = dict[int, Any](), 0
    for segment in segments:
        emitter.carry_out(segment.steps, first=begun)
        begun += len(segment.steps)
        forward = range(joint.num_forward_outputs) if segment.ends_forward else ()
        places = (*forward, *(place_of[name] for name in segment.gradients))
        given = tuple(emitter.results(results[place] for place in places))
        emitter.graph.call_function(release_gradients, (places, given))
        released |= zip(places, given, strict=True)
    emitter.graph.output(tuple(released.get(place) for place in range(len(results))))
    leave_out_views(emitter.graph)
    module = as_module(joint, emitter.graph)
    return _MicrobatchCode(compile_in_steps(module), module)


def codes_of(
    joint: Joint, actions: Sequence[StepAction], place_of: Mapping[str, int], tier: TierCopies
) -> list[_MicrobatchCode]:
    """The code of each microbatch of a step; equal ones are compiled once."""
    segments = dict[int, list[Segment]]()
    for action in actions:
        if isinstance(action, Resume):
            segments.setdefault(action.microbatch, []).append(action.segment)
    known = dict[tuple[Segment, ...], _MicrobatchCode]()
    for i in sorted(segments):
        key = tuple(segments[i])
        if key not in known:
            known[key] = _microbatch_code(joint, key, place_of, tier)
    return [known[tuple(segments[i])] for i in sorted(segments)]


def _emitter(joint: Joint, steps: tuple[Step, ...], tier: TierCopies) -> EagerEmitter:
    schedule = Schedule(steps, joint.graph.hash)
    repeated = {name for name, count in schedule.computations().items() if count > 1}
    again, none = set[str](), frozenset[str]()
    if not schedule.moves:
        return EagerEmitter(joint, _refuse_dead, again, repeated, none, True)
    moving = CopyContext(tier, copy_times(schedule, lambda op: written_by(joint, op)))
    return CopyEmitter(moving, joint, _refuse_dead, again, repeated, none, True)


def _refuse_dead(what: Demanded) -> NoReturn:
    raise RewriteError(f"the plan of the whole step reads {what} where it is not live")


@dataclass(frozen=True)
class StepCode:
    """What is the same in each step.

    Attributes
    ----------
    actions : in order. codes : of each microbatch. place_of : by parameter, the place of its
        gradient among all results. loss_place : of the loss. written : by the place of each other
        result of forward, the input that it is the new value of. tangent : of the loss, one.
    """

    actions: Sequence[StepAction]
    codes: Sequence[_MicrobatchCode]
    place_of: Mapping[str, int]
    loss_place: int
    written: Mapping[int, int]
    tangent: Tensor


@dataclass
class StepRun:
    """One step under way.

    Parameters
    ----------
    inputs : of each microbatch, all inputs of the joint graph.

    Attributes
    ----------
    losses : of the microbatches that have gone forward. updated : parameters that were stepped.
    updating : the one whose step is being taken.
    """

    code: StepCode
    optimizer: Optimizer
    residents: Residents
    inputs: Sequence[list[Any]]
    losses: list[Tensor] = field(default_factory=list[Tensor])
    updated: list[str] = field(default_factory=list[str])
    updating: str = ""

    def __post_init__(self) -> None:
        self.held = dict(self.residents.held)
        self.groups = parameter_groups(self.optimizer)
        self.waiting: dict[tuple[str, int], Tensor] = {}
        self.running: dict[int, Iterator[Released]] = {}

    def run(self) -> list[Tensor]:
        """Run all actions; the losses of the microbatches."""
        # As AOTAutograd runs backward: what autocast asks for stands in the graph.
        with torch.no_grad(), DisableAutocast():
            for action in self.code.actions:
                self._carry_out(action)
        return self.losses

    def stop(self) -> None:
        """Let go of all that a step that has failed still holds."""
        for one in self.running.values():
            one.close()  # pyright: ignore[reportAttributeAccessIssue]  # it is a generator
        self.running.clear()
        self.waiting.clear()
        for name, one in self.held.items():
            if name.startswith("G:"):
                one.settle()
        if self.updating:
            self.residents.parameters[self.updating][1].grad = None

    def _carry_out(self, action: StepAction) -> None:
        if isinstance(action, Resume):
            self._resume(action)
        elif isinstance(action, Add):
            self._arrived(f"G:{action.parameter}")
            gradient = self.waiting.pop((action.parameter, action.microbatch))
            total = self.held[f"G:{action.parameter}"]
            total.written()
            total.whole[0].add_(gradient)
        elif isinstance(action, StepOf):
            self._step(action.parameter)
        elif isinstance(action, Fetch):
            self.held[action.value].fetch(action.to)
        elif isinstance(action, Offload):
            self.held[action.value].offload(action.to)
        elif action.at != "device":
            self.held[action.value].forget_below(action.at)
        elif action.value in self.held:  # a gradient that is not summed goes with its addition
            self.held[action.value].leave()

    def _arrived(self, name: str) -> None:
        self.held[name].arrive()

    def _resume(self, action: Resume) -> None:
        for name in action.reads:
            self._arrived(name)
        i, segment = action.microbatch, action.segment
        if i not in self.running:
            self.running[i] = self.code.codes[i].run(list(self.inputs[i]))
        places, given = next(self.running[i])
        found = dict(zip(places, given, strict=True))
        given.clear()  # the generator holds this list
        if segment.ends_forward:
            self.losses.append(found[self.code.loss_place])
            for place, written in self.code.written.items():
                self.inputs[i][written].copy_(found[place])
        for name in segment.gradients:
            gradient = found.pop(self.code.place_of[name])
            if i:
                self.waiting[name, i] = gradient
            else:
                path = self.residents.parameters[name][0]
                what = f"the gradient of {path}"
                self.held[f"G:{name}"] = Held(what, [gradient], self.residents.folders)

    def _step(self, name: str) -> None:
        for one in (name, f"O:{name}", f"G:{name}"):
            if one in self.held:
                self._arrived(one)
        parameter, state = self.residents.parameters[name][1], self.held.get(f"O:{name}")
        with uninterrupted():
            self.updating = name
            self.held[name].written()
            parameter.grad = self.held.pop(f"G:{name}").whole[0]
            step_alone(self.optimizer, parameter, self.groups[id(parameter)])
            parameter.grad = None
            if state is not None:
                state.adopt(moments(self.optimizer, parameter))
            self.updated.append(name)
            self.updating = ""
