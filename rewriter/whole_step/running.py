"""Carries out the actions of one whole step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from remat.graph_capture.gradients.optimizers import parameter_groups, step_alone
from remat.rewriter.graphs.handed_over import Handed
from remat.rewriter.whole_step.held import Held
from remat.rewriter.whole_step.microbatch_code import MicrobatchCode
from remat.rewriter.whole_step.program import Action, Add, Resume, StepOf
from remat.rewriter.whole_step.residents import Residents, moments
from remat.rewriter.whole_step.uninterrupted import uninterrupted
from remat.schedules.schedule import Fetch, Offload

_C: Any = torch._C


@dataclass(frozen=True)
class StepCode:
    """What is the same in each step.

    Attributes
    ----------
    actions : in order. codes : of each microbatch. place_of : by parameter, the place of its
        gradient among all results. loss_place : of the loss. written : by the place of each other
        result of forward, the input that it is the new value of. tangent : of the loss, one.
    """

    actions: Sequence[Action]
    codes: Sequence[MicrobatchCode]
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
        self.running: dict[int, Iterator[Handed]] = {}

    def run(self) -> list[Tensor]:
        """Run all actions; the losses of the microbatches."""
        # As AOTAutograd runs backward: what autocast asks for stands in the graph.
        with torch.no_grad(), _C._DisableAutocast():
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

    def _carry_out(self, action: Action) -> None:
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
