"""The code of one microbatch: forward and backward in one generator, which stops at each segment.

It is the code of a rewritten module (`rewriter/graphs`), without autograd around it: the joint
graph has eager's own backward ops, and its only tangent is that of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import fx

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.build import Joint
from remat.rewriter.graphs.boxed import compile_in_steps
from remat.rewriter.graphs.copied_writes import copy_times
from remat.rewriter.graphs.copies import Moving, MovingEmitter, written_by
from remat.rewriter.graphs.eager import EagerEmitter
from remat.rewriter.graphs.emitter import Demanded, as_module
from remat.rewriter.graphs.fewer_views import leave_out_views
from remat.rewriter.graphs.handed_over import Steps, hand_over
from remat.rewriter.tiers.tier import Tier
from remat.rewriter.whole_step.program import Action, Resume, Segment
from remat.schedules.schedule import Schedule, Step


@dataclass(frozen=True)
class MicrobatchCode:
    """The generator's function, which takes all inputs in a list, and the graph behind it."""

    run: Steps
    module: fx.GraphModule


def microbatch_code(
    joint: Joint, segments: Sequence[Segment], place_of: Mapping[str, int], tier: Tier
) -> MicrobatchCode:
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
    handed, begun = dict[int, Any](), 0
    for segment in segments:
        emitter.carry_out(segment.steps, first=begun)
        begun += len(segment.steps)
        forward = range(joint.num_forward_outputs) if segment.ends_forward else ()
        places = (*forward, *(place_of[name] for name in segment.gradients))
        given = tuple(emitter.results(results[place] for place in places))
        emitter.graph.call_function(hand_over, (places, given))
        handed |= zip(places, given, strict=True)
    emitter.graph.output(tuple(handed.get(place) for place in range(len(results))))
    leave_out_views(emitter.graph)
    module = as_module(joint, emitter.graph)
    return MicrobatchCode(compile_in_steps(module), module)


def codes_of(
    joint: Joint, actions: Sequence[Action], place_of: Mapping[str, int], tier: Tier
) -> list[MicrobatchCode]:
    """The code of each microbatch of a step; equal ones are compiled once."""
    segments = dict[int, list[Segment]]()
    for action in actions:
        if isinstance(action, Resume):
            segments.setdefault(action.microbatch, []).append(action.segment)
    known = dict[tuple[Segment, ...], MicrobatchCode]()
    for i in sorted(segments):
        key = tuple(segments[i])
        if key not in known:
            known[key] = microbatch_code(joint, key, place_of, tier)
    return [known[tuple(segments[i])] for i in sorted(segments)]


def _emitter(joint: Joint, steps: tuple[Step, ...], tier: Tier) -> EagerEmitter:
    schedule = Schedule(steps, joint.graph.hash)
    repeated = {name for name, count in schedule.computations().items() if count > 1}
    again, none = set[str](), frozenset[str]()
    if not schedule.moves:
        return EagerEmitter(joint, _refuse_dead, again, repeated, none, True)
    moving = Moving(tier, copy_times(schedule, lambda op: written_by(joint, op)))
    return MovingEmitter(joint, _refuse_dead, again, repeated, none, True, moving)


def _refuse_dead(what: Demanded) -> NoReturn:
    raise RewriteError(f"the plan of the whole step reads {what} where it is not live")
