"""AOTAutograd's runtime around our two graphs: views, mutation, hooks, version checks."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.graph import Links, TrainingGraph
from remat.graph_capture.joint.build import Joint, build_joint
from remat.graph_capture.torch_private.aot import (
    aot_compile_joint_with_descriptors,
    functorch_config,
)
from remat.graph_capture.tracing.attribute_writes import InitialisedOnce, MutatedAttribute
from remat.graph_capture.tracing.outputs import DuplicateOutputs
from remat.graph_capture.tracing.trace import Trace
from remat.rewriter.arena.step_allocator import StepAllocator
from remat.rewriter.graphs.codegen import Boxed, compile_boxed
from remat.rewriter.graphs.emit import emit, recompute_inputs
from remat.rewriter.graphs.gradient_gates import GradientGates
from remat.rewriter.graphs.result_gradients import GradientFacts, gradient_facts, marks
from remat.rewriter.graphs.step_inputs import FloatSource
from remat.rewriter.split_backward.waiting import in_parts
from remat.rewriter.tiers.tier import TierCopies, tier_for
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import require_valid

_compiling = threading.RLock()


@dataclass(frozen=True)
class CompiledStep:
    """A callable step, the two GraphModules that it carries out, and facts about its gradients.

    `mutated` and `initialised` are what each step sets on modules and elsewhere,
    `duplicate_outputs` where its results repeat a tensor, `floats` the numbers that each step reads
    anew. `gradient_order` is the order in which eager's gradients come, by place;
    `recompute_inputs` are the places of what backward reads to make values again.
    """

    call: Callable[..., Any]
    forward: fx.GraphModule
    backward: fx.GraphModule
    gradients: GradientFacts
    graph: TrainingGraph
    links: Links | None = None
    mutated: tuple[MutatedAttribute, ...] = ()
    initialised: tuple[InitialisedOnce, ...] = ()
    duplicate_outputs: DuplicateOutputs | None = None
    floats: FloatSource | None = None
    by_inductor: bool = False
    gradient_gates: GradientGates | None = None
    memory: StepAllocator = field(default_factory=StepAllocator)
    tier: TierCopies | None = None
    gradient_order: tuple[int, ...] = ()
    recompute_inputs: tuple[int, ...] = ()

    def results(self, *inputs: Any) -> Any:
        """The module's results of one run, with `mutated` as a pair."""
        results = self.call(*inputs)
        return self.duplicate_outputs.tree(results) if self.duplicate_outputs else results


def copy_to_compile(trace: Trace) -> Trace:
    state = trace.descriptors._aot_state
    # AOTAutograd notes in its metadata what one schedule saves for backward; all else of a trace is
    # only read.
    own = dataclasses.replace(state, fw_metadata=copy.copy(state.fw_metadata))
    descriptors = dataclasses.replace(trace.descriptors, _aot_state=own)
    return dataclasses.replace(trace, descriptors=descriptors)


def links_of(trace: Trace, costed: TrainingGraph | None = None) -> Links | None:
    return trace.graph.links or (costed.links if costed else None)


def compile_step(
    trace: Trace,
    schedule: Schedule,
    *,
    by_inductor: bool = False,
    links: Links | None = None,
) -> CompiledStep:
    """Carry out `schedule` on a fresh trace, by our own code or Inductor's."""
    found = require_valid(trace.graph, schedule, links)
    if schedule.moves:
        refuse_copies(by_inductor=by_inductor, over_range=trace.env is not None)
    tier = tier_for(trace.graph, schedule, links or trace.graph.links, found)
    trace.compiled = True  # AOTAutograd uses up the trace's metadata
    emitted: list[fx.GraphModule] = []
    facts = gradient_facts(trace.joint)
    floats = FloatSource(trace.floats) if trace.floats else None
    make_compilers: Callable[..., Any] = _inductor if by_inductor else _boxed
    # Filled by `partition`, which AOTAutograd calls before the compilers.
    compilers: list[Any] = []
    gates: list[GradientGates] = []
    memory = StepAllocator()

    def partition(
        gm: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        recipe = trace.recipe
        memory.n_results = num_fwd_outputs
        if trace.env:  # of symbols; the trace has it at the sizes in its hints
            gm = trace.joint.module
        if floats:
            floats.inputs.mark(gm)
        several = trace.duplicate_outputs.gradients() if trace.duplicate_outputs else None
        joint = build_joint(
            gm, num_fwd_outputs, recipe.name, recipe.resident, several, recipe.gradient_release,
            **recipe.facts(),
        )  # fmt: skip
        # What AOTAutograd hands over must still be the graph that was planned.
        schedule.check_made_for(joint.graph)
        # Inductor's kernels are made for the strides of the trace.
        metadata = None if by_inductor else state.fw_metadata
        emitted.extend(
            emit(
                joint, schedule, floats, metadata,
                writes=not by_inductor, env=trace.env, tier=tier,
            )
        )  # fmt: skip
        if marks(emitted[1].graph):
            gates.append(GradientGates(emitted[1]))
        gradient_gates = gates[0] if gates else None
        compilers.extend(make_compilers(joint, *emitted, gradient_gates))
        return emitted[0], emitted[1]

    # Donated buffers are of use to Inductor. With them, AOTAutograd refuses retain_graph=True.
    state = trace.descriptors._aot_state
    state.fw_metadata.bw_donated_idxs = []
    # Otherwise Inductor would compile backward in the middle of the first training step.
    state.aot_config = dataclasses.replace(
        state.aot_config, force_non_lazy_backward_lowering=by_inductor
    )
    with functorch_config.patch(donated_buffer=False):
        call = aot_compile_joint_with_descriptors(
            trace.descriptors,
            partition_fn=partition,
            fw_compiler=lambda gm, example_inputs: memory.around(
                "forward", compilers[0](gm, example_inputs)
            ),
            bw_compiler=lambda gm, example_inputs: memory.around(
                "backward", compilers[1](gm, example_inputs)
            ),
        )
    written = trace.mutated, trace.initialised, trace.duplicate_outputs, floats
    gradient_gates = gates[0] if gates else None
    return CompiledStep(
        call, emitted[0], emitted[1], facts, trace.graph, links or trace.graph.links,
        *written, by_inductor, gradient_gates, memory, tier, trace.gradient_order,
        recompute_inputs(trace.joint, schedule),
    )  # fmt: skip


def refuse_copies(*, by_inductor: bool = False, over_range: bool = False) -> None:
    if by_inductor:
        raise RewriteError(
            "this plan copies values to the host, and code by Inductor copies none: leave out "
            "compile=True, or solve without offloading"
        )
    if over_range:
        raise RewriteError(
            "this plan copies values to the host, and a module over a range of sizes copies none: "
            "plan for one size, or solve without offloading"
        )


def _boxed(
    joint: Joint,
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    gradient_gates: GradientGates | None,
) -> tuple[Any, Any]:
    def compile_backward(gm: fx.GraphModule, example_inputs: Any) -> Boxed:
        # AOTAutograd compiles a deep copy of backward when it first runs. Its constants have to be
        # the user's tensors all the same, which may change in place.
        for node in gm.graph.find_nodes(op="get_attr"):
            setattr(gm, str(node.target), getattr(backward, str(node.target)))
        # First backwards of several threads would share the graph's fake mode.
        with _compiling:
            if gradient_gates:
                return in_parts(gradient_gates.compile_backward(gm))
            return in_parts(compile_boxed(gm, example_inputs))

    return compile_boxed, compile_backward


def _inductor(
    joint: Joint,
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    gradient_gates: GradientGates | None,
) -> tuple[Any, Any]:
    # Inductor is imported only for plans whose code it makes.
    from remat.rewriter.inductor.compiler import InductorStep

    step = InductorStep(joint, forward, backward)
    return step.compile_forward, step.compile_backward
