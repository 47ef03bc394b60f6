"""A traced step, and its joint graph changed: to what eager runs, and as a plan says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from remat.graph_capture.distributed.dtensors import describe_parts
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.joint.autocast_cache import cast_weights_once
from remat.graph_capture.joint.build import Joint, build_joint
from remat.graph_capture.joint.nodes import copy_of
from remat.graph_capture.joint.output_aliasing import take_out_of
from remat.graph_capture.python_state.executed_code import functions_of_users
from remat.graph_capture.python_state.state_guards import LibraryCache, PythonState
from remat.graph_capture.sizes.trace_over_sizes import Environment
from remat.graph_capture.torch_private.aot import JointWithDescriptors
from remat.graph_capture.tracing.attribute_writes import InitialisedOnce, MutatedAttribute
from remat.graph_capture.tracing.outputs import DuplicateOutputs
from remat.graph_capture.tracing.recipe import JointEdit, Recipe

if TYPE_CHECKING:
    from remat.graph_capture.tracing.float_inputs import FloatInputs


@dataclass
class Trace:
    """A step as it was traced, with what a plan of it relies on."""

    joint: Joint
    recipe: Recipe
    descriptors: JointWithDescriptors  # AOTAutograd's own record, which can be compiled once
    python_state: PythonState  # what forward and the loss read of Python's state, as it was
    mutated: tuple[MutatedAttribute, ...] = ()  # on modules and elsewhere, as each step does
    initialised: tuple[InitialisedOnce, ...] = ()
    library_caches: tuple[LibraryCache, ...] = ()  # added to at forward's first call
    loop_carried: tuple[MutatedAttribute, ...] = ()  # what forward may read from earlier steps
    duplicate_outputs: DuplicateOutputs | None = None
    looked_at: bytes = b""  # values that code has looked at, and those that they come from
    floats: FloatInputs | None = None
    compiled: bool = False  # whether `descriptors` has been
    gradient_order: tuple[int, ...] = ()  # places of parameters, as eager's gradients come
    env: Environment | None = None  # of a range's sizes; `joint` is then at its hints

    @property
    def graph(self) -> TrainingGraph:
        return self.joint.graph


def edit_traced(gm: fx.GraphModule, recipe: Recipe) -> None:
    """Change a traced graph to what eager runs, and then as the recipe says."""
    describe_parts(gm)
    if any(functions_of_users()) or recipe.functions:
        from remat.graph_capture.tracing.nested_backward import merge_recomputed

        merge_recomputed(gm.graph)
    cast_weights_once(gm)
    take_out_of(gm.graph)
    for node in reversed(gm.graph.nodes):  # a profiler's regions compute nothing
        if getattr(node.target, "namespace", "") == "profiler":
            gm.graph.erase_node(node)
    for edit in recipe.edits:
        edit(gm.graph)


def joint_of(
    gm: fx.GraphModule, results: int, recipe: Recipe, duplicate_outputs: DuplicateOutputs | None
) -> Joint:
    several = duplicate_outputs.gradients() if duplicate_outputs else None
    return build_joint(
        gm, results, recipe.name, recipe.resident, several, recipe.gradient_release,
        **recipe.facts(),
    )  # fmt: skip


def with_edits(trace: Trace, edits: tuple[JointEdit, ...]) -> Trace:
    """The trace with its joint graph changed; it takes over the record of `trace`."""
    trace.compiled = True
    gm, recipe = trace.descriptors.graph_module, dataclasses.replace(trace.recipe, edits=edits)
    if trace.env:  # that graph has symbols, and others share this one
        gm = copy_of(trace.joint.module)
    for edit in edits:
        edit(gm.graph)
    gm.recompile()
    joint = joint_of(gm, trace.joint.num_forward_outputs, recipe, trace.duplicate_outputs)
    return dataclasses.replace(trace, joint=joint, recipe=recipe, compiled=False)


def num_forward_outputs(descriptors: JointWithDescriptors) -> int:
    return descriptors._aot_state.fw_metadata.num_forward
