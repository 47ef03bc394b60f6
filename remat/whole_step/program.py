"""The schedule of a whole step, cut into what a microbatch's code does and what is done between.

The code of a microbatch runs from one moment to the next at which anything else happens: another
microbatch goes on, a gradient is added, a parameter moves or is updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, fx

from remat.graph_capture.distributed.sharding import GATHER, REDUCE
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import is_tangent
from remat.graph_capture.tracing.traced_step import Trace
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.whole_step.step_graph import ADD, FORWARD_ENDS, STEP, OpByOp


@dataclass(frozen=True)
class Segment:
    """A part of one microbatch's code, in names of the captured graph.

    At its end results are handed out if it `ends_forward`, and the gradients of these parameters.
    """

    steps: tuple[Step, ...]
    ends_forward: bool = False
    gradients: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resume:
    """Run the next segment of a microbatch once these values, which have homes, have arrived."""

    microbatch: int
    segment: Segment
    reads: tuple[str, ...]


@dataclass(frozen=True)
class Add:
    parameter: str
    microbatch: int


@dataclass(frozen=True)
class StepOf:
    parameter: str


@dataclass(frozen=True)
class Gather:
    parameter: str


@dataclass(frozen=True)
class Reduce:
    parameter: str
    microbatch: int


StepAction = Resume | Add | StepOf | Gather | Reduce | Fetch | Offload | Free


@dataclass
class _Cut:
    parts: OpByOp
    graph: TrainingGraph
    open: int = -1
    steps: list[Step] = field(default_factory=list[Step])
    reads: dict[str, None] = field(default_factory=dict[str, None])

    def __post_init__(self) -> None:
        made = [v.name for v in self.parts.captured.values if v.producer]
        numbers = range(self.parts.count)
        self.own = {self.parts.value(name, i): (name, i) for name in made for i in numbers}
        self.moving = {v.name for v in self.graph.values if v.home is not None}

    def actions(self, steps: Iterable[Step]) -> Iterator[StepAction]:
        for step in steps:
            if isinstance(step, Compute):
                yield from self._compute(step)
            # Copies and drops of values with a home come between segments, and those of ranks.
            elif step.value.startswith(("G:", "A:", "R:")) or step.value in self.moving:
                yield from self._closed()
                yield step
            else:
                # All others belong to the code of their microbatch.
                name, i = self.own[step.value]
                yield from self._opened(i)
                self.steps.append(replace(step, value=name))
        yield from self._closed()

    def _compute(self, step: Compute) -> Iterator[StepAction]:
        op = self.graph.ops[self.graph.op_index[step.op]]
        name = step.op.partition(":")[2]
        if op.target in (STEP, GATHER):
            yield from self._closed()
            yield StepOf(name) if op.target == STEP else Gather(name)
            return
        rest, i = step.op.rsplit(".", 1)
        if op.target in (ADD, REDUCE):
            yield from self._closed()
            parameter = rest.partition(":")[2]
            yield Add(parameter, int(i)) if op.target == ADD else Reduce(parameter, int(i))
            return
        yield from self._opened(int(i))
        self.steps.append(Compute(rest))
        self.reads.update(dict.fromkeys(v for v in op.inputs if v in self.moving))
        gradients = tuple(self.parts.finished_by.get(rest, ()))
        # The generator stops wherever it returns something.
        if op.target == FORWARD_ENDS or gradients:
            yield from self._closed(op.target == FORWARD_ENDS, gradients)

    def _opened(self, i: int) -> Iterator[StepAction]:
        if self.open != i:
            yield from self._closed()
            self.open = i

    def _closed(self, ends: bool = False, gradients: tuple[str, ...] = ()) -> Iterator[StepAction]:
        if self.open >= 0:
            segment = Segment(tuple(self.steps), ends, gradients)
            yield Resume(self.open, segment, tuple(self.reads))
        self.open = -1
        self.steps.clear()
        self.reads.clear()


def actions_of(parts: OpByOp, graph: TrainingGraph, schedule: Schedule) -> list[StepAction]:
    return list(_Cut(parts, graph).actions(schedule.steps))


_WAY_OUT = "train with remat.rematerialize, or plan for a device of the table"


@dataclass(frozen=True)
class JointResults:
    """Places among the inputs and results of a joint graph.

    `gradient_of` : by trained parameter or input, the value of its gradient. `place_of_gradient` :
    by the same, its place among all results. `written` : by the place of a result of forward that
    is the new value of an input, the place of that input. `tangent` : of the loss: one.
    """

    place_of_input: Mapping[str, int]
    gradient_of: Mapping[str, str]
    place_of_gradient: Mapping[str, int]
    loss_place: int
    written: Mapping[int, int]
    tangent: Tensor


def refuse_unusual(traced: Trace) -> None:
    name = traced.recipe.name
    if traced.mutated or traced.initialised:
        first = (*traced.mutated, *traced.initialised)[0]
        raise CaptureError(
            f"leave that out in training, or {_WAY_OUT}: forward of {name} sets {first}, which a "
            "whole step does not"
        )
    if traced.floats or traced.duplicate_outputs:
        raise CaptureError(
            f"{_WAY_OUT}: forward of {name} reads numbers anew at each step, or returns one "
            "tensor twice or a dataclass, which a whole step does not"
        )


def joint_results(joint: Joint, name: str) -> JointResults:
    """The places of a joint graph whose forward returns one loss; `CaptureError` for others."""
    nodes = joint.module.graph.find_nodes(op="placeholder")
    inputs = [node for node in nodes if not is_tangent(node)]
    results: Any = joint.module.graph.output_node().args[0]
    written = _written(joint, inputs)
    losses = [place for place in range(joint.num_forward_outputs) if place not in written]
    tangents = [node for node in nodes if is_tangent(node)]
    if len(losses) != 1 or len(tangents) != 1 or results[losses[0]].meta["val"].numel() != 1:
        raise CaptureError(
            f"give loss_fn=: a whole step of {name} needs one loss, a single number, and forward "
            f"returns {len(losses)} results or a larger one"
        )
    place_of, gradient_of = dict[str, int](), dict[str, str]()
    # The results of forward come first, then one gradient for each input, or None.
    for place, node in enumerate(inputs, joint.num_forward_outputs):
        gradient = results[place] if place < len(results) else None
        if isinstance(gradient, fx.Node):
            gradient_of[node.name] = joint.value_of_node[gradient]
            place_of[node.name] = place
    _require_own_tensors(joint, gradient_of, name)
    like: Tensor = tangents[0].meta["val"]
    return JointResults(
        {node.name: place for place, node in enumerate(inputs)},
        gradient_of, place_of, losses[0], written,
        # `loss.backward()` starts from a gradient of one.
        torch.ones(tuple(like.shape), dtype=like.dtype),
    )  # fmt: skip


def _written(joint: Joint, inputs: list[fx.Node]) -> dict[int, int]:
    described = joint.module.graph.output_node().meta["desc"][: joint.num_forward_outputs]
    places = {node.meta["desc"].expr(): place for place, node in enumerate(inputs)}
    found = {place: getattr(what, "mutated_input", None) for place, what in enumerate(described)}
    return {place: places[given.expr()] for place, given in found.items() if given is not None}


def _require_own_tensors(joint: Joint, gradient_of: Mapping[str, str], name: str) -> None:
    values = joint.graph.value_by_name
    owner = dict[str, str]()
    for parameter, gradient in gradient_of.items():
        is_given = not values[gradient].producer or values[gradient].kind == "tangent"
        if is_given or gradient in owner:
            other = "what backward is given" if is_given else f"the gradient of {owner[gradient]}"
            raise CaptureError(
                f"{_WAY_OUT}: the gradient of {parameter} of {name} and {other} are one tensor, "
                "which a whole step would change twice"
            )
        owner[gradient] = parameter
