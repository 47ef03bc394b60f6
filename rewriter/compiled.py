"""AOTAutograd's runtime around our two graphs: views, mutation, hooks, version checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors

from remat.graph_capture.joint import build_joint
from remat.graph_capture.tracing import Trace
from remat.rewriter.boxed import compile_boxed
from remat.rewriter.emit import emit
from remat.rewriter.gradient_facts import GradientFacts, gradient_facts
from remat.schedules.schedule import Schedule


@dataclass(frozen=True)
class CompiledStep:
    """A callable step, the two GraphModules that it runs, and facts of its gradients."""

    call: Callable[..., Any]
    forward: fx.GraphModule
    backward: fx.GraphModule
    gradients: GradientFacts


def compile_step(trace: Trace, schedule: Schedule) -> CompiledStep:
    """Carry out `schedule` on a fresh trace; a trace can be compiled once.

    Raises
    ------
    ScheduleError : the schedule was made for another graph.
    """
    schedule.check_made_for(trace.graph)
    trace.compiled = True
    emitted: list[fx.GraphModule] = []
    facts = gradient_facts(trace.joint)

    def partition(
        gm: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        recipe = trace.recipe
        joint = build_joint(gm, num_fwd_outputs, recipe.name, recipe.resident, **recipe.facts())
        schedule.check_made_for(joint.graph)
        emitted.extend(emit(joint, schedule))
        return emitted[0], emitted[1]

    # Donated buffers serve Inductor; with them AOTAutograd refuses retain_graph=True.
    trace.descriptors._aot_state.fw_metadata.bw_donated_idxs = []
    with functorch_config.patch(donated_buffer=False):
        call = aot_compile_joint_with_descriptors(
            trace.descriptors,
            partition_fn=partition,
            fw_compiler=compile_boxed,  # pyright: ignore[reportArgumentType]
            bw_compiler=compile_boxed,  # pyright: ignore[reportArgumentType]
        )
    return CompiledStep(call, emitted[0], emitted[1], facts)
