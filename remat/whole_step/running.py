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
from remat.rewriter.graphs.codegen import compile_in_steps
from remat.rewriter.graphs.copies import CopyContext, CopyEmitter, copy_times, written_by
from remat.rewriter.graphs.eager import EagerEmitter
from remat.rewriter.graphs.emit import leave_out_views
from remat.rewriter.graphs.emitter import Demanded, as_module
from remat.rewriter.graphs.result_gradients import Released, Steps, release_gradients
from remat.rewriter.tiers.tier import TierCopies
from remat.schedules.schedule import Fetch, Offload, Schedule, Step
from remat.whole_step.program import Add, Resume, Segment, StepAction, StepOf
from remat.whole_step.residents import Held, Residents, moments, uninterrupted


@dataclass(frozen=True)
class _MicrobatchCode:
    run: Steps
    module: fx.GraphModule


def _microbatch_code(
    joint: Joint, segments: Sequence[Segment], place_of: Mapping[str, int], tier: TierCopies
) -> _MicrobatchCode:
    """Compile the segments of a microbatch, all in one generator, which stops after each.

    `place_of` has, by parameter, the place of its gradient among all results of the joint graph.
    """
    steps = tuple(step for segment in segments for step in segment.steps)
    # As in a rewritten module, but without autograd: the joint graph contains backward.
    emitter = _emitter(joint, steps, tier)
    inputs = joint.module.graph.find_nodes(op="placeholder")
    emitter.take_inputs(inputs)
    results: Any = joint.module.graph.output_node().args[0]
    released, begun = dict[int, Any](), 0
    for segment in segments:
        emitter.carry_out(segment.steps, first=begun)
        begun += len(segment.steps)
        # Forward returns its results once, at its end.
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
    segments = dict[int, list[Segment]]()
    for action in actions:
        if isinstance(action, Resume):
            segments.setdefault(action.microbatch, []).append(action.segment)
    known = dict[tuple[Segment, ...], _MicrobatchCode]()
    for i in sorted(segments):
        key = tuple(segments[i])
        if key not in known:  # equal microbatches share code
            known[key] = _microbatch_code(joint, key, place_of, tier)
    return [known[tuple(segments[i])] for i in sorted(segments)]


def _emitter(joint: Joint, steps: tuple[Step, ...], tier: TierCopies) -> EagerEmitter:
    schedule = Schedule(steps, joint.graph.hash)
    repeated = {name for name, count in schedule.computations().items() if count > 1}
    again, none = set[str](), frozenset[str]()
    if not schedule.moves:
        return EagerEmitter(joint, _refuse_dead, again, repeated, none, True)
    moving = CopyContext(tier, copy_times(schedule, lambda op: written_by(joint, op)))
    return CopyEmitter(joint, _refuse_dead, again, repeated, none, True, moving)


def _refuse_dead(what: Demanded) -> NoReturn:
    raise RewriteError(f"the plan of the whole step reads {what} where it is not live")


@dataclass(frozen=True)
class StepCode:
    """What is the same in each step.

    Attributes
    ----------
    place_of : by parameter, the place of its gradient among all results.
    written : by the place of each other result of forward, the input that it is the new value of.
    tangent : of the loss, one.
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

    `inputs` has all of the joint graph for each microbatch, `losses` those of forwards that ended.
    `updated` are the parameters that were stepped, `updating` is the one that is being stepped.
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
        # As AOTAutograd runs backward: the graph already contains autocast's casts.
        with torch.no_grad(), DisableAutocast():
            for action in self.code.actions:
                self._carry_out(action)
        return self.losses

    def stop(self) -> None:
        for one in self.running.values():
            one.close()  # pyright: ignore[reportAttributeAccessIssue]  # it is a generator
        self.running.clear()
        self.waiting.clear()
        for name, one in self.held.items():
            if name.startswith("G:"):
                one.settle()
        if self.updating:
            # An update that was cut short must not leave a gradient for the next step.
            self.residents.parameters[self.updating][1].grad = None

    def _carry_out(self, action: StepAction) -> None:
        if isinstance(action, Resume):
            self._resume(action)
        elif isinstance(action, Add):
            self._arrived(f"G:{action.parameter}")
            gradient = self.waiting.pop((action.parameter, action.microbatch))
            total = self.held[f"G:{action.parameter}"]
            # Lower copies lack this addition.
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
            # A new list, since the generator clears it.
            self.running[i] = self.code.codes[i].run(list(self.inputs[i]))
        places, given = next(self.running[i])
        found = dict(zip(places, given, strict=True))
        given.clear()  # the generator holds this list
        if segment.ends_forward:
            self.losses.append(found[self.code.loss_place])
            for place, written in self.code.written.items():
                # AOTAutograd returns the new values of buffers; eager writes them into the buffers.
                self.inputs[i][written].copy_(found[place])
        for name in segment.gradients:
            gradient = found.pop(self.code.place_of[name])
            # The first microbatch's gradient becomes the sum.
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
        # Ctrl-C waits: an update happens completely or not at all.
        with uninterrupted():
            self.updating = name
            # Lower copies lack this update.
            self.held[name].written()
            parameter.grad = self.held.pop(f"G:{name}").whole[0]
            step_alone(self.optimizer, parameter, self.groups[id(parameter)])
            parameter.grad = None
            if state is not None:
                # The first step creates the state.
                state.adopt(moments(self.optimizer, parameter))
            self.updated.append(name)
            self.updating = ""
