"""One run of AOTAutograd over a module and a batch, and what it finds.

The way in is `aot_export_joint_with_descriptors`, without decompositions. It takes keyword
arguments, tied weights, mutated inputs and nested outputs, and keeps eager's ATen ops, so that
gradients stay bit-equal. No other way that we know does. `torch.export` as a first step gave wrong
gradients for custom autograd functions, and `make_fx` fails on tied weights.

`torch.utils.checkpoint` in a model is transparent to the trace: a plan covers what it covers, and
replaces it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import (
    JointWithDescriptors,
    aot_export_joint_with_descriptors,
)
from torch._subclasses import FakeTensorMode

from remat.graph_capture.devices.placement import refuse_other_devices
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.float_inputs.inputs import FloatInputs
from remat.graph_capture.gradients.deliveries import can_hand_over
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.joint.build import Joint, build_joint
from remat.graph_capture.joint.checking_ops import checks_kept
from remat.graph_capture.joint.eager_memory import EagerMemory
from remat.graph_capture.joint.nodes import is_tangent
from remat.graph_capture.joint.provenance import Provenance
from remat.graph_capture.joint.returned_views import take_out_of
from remat.graph_capture.joint.weight_casts import cast_weights_once
from remat.graph_capture.over_ranks.dtensors import describe_parts, has_dtensors
from remat.graph_capture.over_ranks.refusals import modes_among_ranks
from remat.graph_capture.python_state.memos import Memo
from remat.graph_capture.python_state.ran import CodeThatRan
from remat.graph_capture.python_state.watch import PythonState, python_state_kept
from remat.graph_capture.refuse import refusal
from remat.graph_capture.shapes.concrete import at_sizes
from remat.graph_capture.shapes.environment import Environment, environment_of
from remat.graph_capture.shapes.guards import require_guards
from remat.graph_capture.shapes.signature import (
    RangedSignature,
)
from remat.graph_capture.splitting.kinds import split_parts
from remat.graph_capture.tracing.kernels import (
    FusedAttention,
    IdleDropout,
    kernels_of_eager,
)
from remat.graph_capture.tracing.recipe import (
    Recipe,
)
from remat.graph_capture.tracing.results import Repeats
from remat.graph_capture.tracing.side_effects.carried import (
    Carried,
    Settled,
    places_of,
    storages_in,
)
from remat.graph_capture.tracing.side_effects.checkpointed import (
    checkpointed_modules,
    checkpoints_noted,
    refuse_checkpointed_writes,
)
from remat.graph_capture.tracing.side_effects.foreign_writes import NoForeignWrites
from remat.graph_capture.tracing.side_effects.forward_writes import ForwardWrites
from remat.graph_capture.tracing.side_effects.new_data import NoNewData
from remat.graph_capture.tracing.side_effects.next_call import doubtful
from remat.graph_capture.tracing.step_module import StepModule, with_loss
from remat.graph_capture.tracing.ties import tied_as_one
from remat.graph_capture.tracing.trace_flags import FLAGS, told, unlogged
from remat.graph_capture.tracing.true_strides import fake_with_true_strides
from remat.graph_capture.tracing.untouched import untouched
from remat.graph_capture.tracing.without_storage import as_if_on_cpu


@dataclass
class Trace:
    """One trace of a training step.

    Attributes
    ----------
    joint : the graph and its fx nodes. recipe : how to trace again.
    descriptors : AOTAutograd's own record. It can be compiled once.
    python_state : what forward and the loss read of Python's state, as it was.
    carried, settled : what forward sets on modules and elsewhere. Each step sets it too.
    memos : what forward adds to dictionaries of libraries, at its first call.
    unsure : of what is carried, what forward may read from an earlier step.
    repeats : where the results repeat a tensor.
    looked_at : values that code has looked at, and those that they come from.
    floats : the numbers that each step reads anew, if there are any.
    compiled : whether the record has been compiled.
    arrivals : places of parameters, in the order in which eager's gradients of them come.
    env : of a trace for a range of sizes: its symbols. `joint` is then at the sizes in its hints.
    """

    joint: Joint
    recipe: Recipe
    descriptors: JointWithDescriptors
    python_state: PythonState
    carried: tuple[Carried, ...] = ()
    settled: tuple[Settled, ...] = ()
    memos: tuple[Memo, ...] = ()
    unsure: tuple[Carried, ...] = ()
    repeats: Repeats | None = None
    looked_at: bytes = b""
    floats: FloatInputs | None = None
    compiled: bool = False
    arrivals: tuple[int, ...] = ()
    env: Environment | None = None

    @property
    def graph(self) -> TrainingGraph:
        """The unpriced training graph."""
        return self.joint.graph


def trace_once(
    model: nn.Module, recipe: Recipe, ran: CodeThatRan | None = None, *, whole: bool = True
) -> Trace:
    """Trace with the flags of the recipe, and note which code runs.

    Parameters
    ----------
    whole : watch what any code may read of Python's state; else what runs alone.
    """
    env = environment_of(recipe.signature)
    fake = fake_with_true_strides(env.shape_env if env else None)
    refuse_other_devices(fake, recipe.device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(unlogged())
        stack.enter_context(untouched(model))
        stack.enter_context(as_if_on_cpu(model, fake))
        stack.enter_context(tied_as_one(with_loss(model, recipe.loss_fn)))
        followed = None if whole or ran is None or not ran.can_be_seen else ran
        state = stack.enter_context(python_state_kept(model, recipe.loss_fn, followed))
        state.ran = ran
        writes = ForwardWrites(model, recipe.loss_fn, state)
        step = StepModule(model, recipe.loss_fn, writes, ran, env, recipe.signature)
        if ran is not None:
            stack.enter_context(ran.told_to(state.begins))
        provenance = Provenance(step)
        stack.enter_context(told(recipe.flags or FLAGS[0]))
        stack.enter_context(kernels_of_eager())
        stack.enter_context(checks_kept())
        stack.enter_context(IdleDropout())
        stack.enter_context(NoNewData(recipe.name))
        stack.enter_context(NoForeignWrites(recipe.name, state))
        for mode in modes_among_ranks(recipe.name):
            stack.enter_context(mode)
        stack.enter_context(provenance.watching_modules())
        checkpointed = stack.enter_context(checkpointed_modules(provenance.path))
        stack.enter_context(checkpoints_noted(provenance))
        # torch's documentation asks users to run backward outside of autocast.
        stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
        # A loss made of elementwise ops sends gradients back in the strides of the results.
        stack.enter_context(functorch_config.patch(guess_tangent_strides_as_outputs=True))
        # torch 2.14 would trace the function inside of one that torch.compile has wrapped, without
        # a word, while the user's own step runs Inductor's kernels. So it fails, as before.
        stack.enter_context(dynamo_config.patch(force_compile_during_fx_trace=True))
        if recipe.is_modelled:  # the CPU has no fused attention with dropout, the device has
            stack.enter_context(FusedAttention())
        stack.enter_context(EagerMemory())
        # Last, so that it is called first and sees the frame of the user's code.
        stack.enter_context(provenance)
        try:
            descriptors = aot_export_joint_with_descriptors(
                stack, step, _example(recipe, fake, env), {}, decompositions={}
            )
            writes.require_that_backward_writes_nothing()
        except CaptureError:
            raise
        except Exception as error:  # whatever a model raises is refused, with its place
            place = provenance.module_of(error)
            refused = refusal(error, model, place, step.known.read)
            raise CaptureError(env.in_words(str(refused))) if env else refused from error
    _refuse_no_backward(model, descriptors)
    signature = recipe.signature.with_attributes_of(state.of_tensors)
    recipe = _handing_over(dataclasses.replace(recipe, signature=signature), model, descriptors)
    gm = descriptors.graph_module
    if env:
        recipe = _with_guards(recipe, env)
        gm = at_sizes(gm, env, env.hints)
    results, end = num_forward_outputs(descriptors), gm.graph.output_node()
    refuse_checkpointed_writes(gm.graph, results, checkpointed)
    edit_traced(gm, recipe)
    constants = storages_in(_held_by(gm))
    unsure = tuple(doubtful(writes.carried, results, end, step.repeats, constants))
    state.leave_out([*places_of(model, writes.carried), *(one.place for one in writes.settled)])
    state.compare_items_of(one.place for one in writes.memos)
    joint = joint_of(gm, results, recipe, step.repeats)
    sets = tuple(writes.carried), tuple(writes.settled), tuple(writes.memos)
    looked_at = step.known.looked_at
    arrivals = tuple(step.arrivals.places)
    return Trace(
        joint, recipe, descriptors, state, *sets, unsure, step.repeats, looked_at,
        arrivals=arrivals, env=env,
    )  # fmt: skip


def _handing_over(recipe: Recipe, model: nn.Module, descriptors: JointWithDescriptors) -> Recipe:
    """The recipe, which hands gradients over as they are made only where that can be."""
    if not recipe.hand_over:
        return recipe
    is_of_parts = has_dtensors(model)
    if not is_of_parts and can_hand_over(descriptors._aot_state.fw_metadata):
        return recipe
    if recipe.hand_over.updates:
        if is_of_parts:
            raise CaptureError(
                f"{recipe.name} has parameters that are DTensors, which cannot be updated during "
                "backward: update after backward"
            )
        raise CaptureError(
            f"{recipe.name} writes to a parameter or an input that it differentiates, or "
            "returns a part of one, so that parameters cannot be updated during backward: give "
            "forward or the caller a copy (clone()), or update after backward"
        )
    return dataclasses.replace(recipe, hand_over=None)


def _with_guards(recipe: Recipe, env: Environment) -> Recipe:
    """The recipe with what a trace has asked of the sizes, if it holds at all of them."""
    guards = env.guards()
    require_guards(guards, env.symbols, recipe.name)
    assert isinstance(recipe.signature, RangedSignature)
    return dataclasses.replace(recipe, signature=recipe.signature.with_guards(guards))


def _example(recipe: Recipe, fake: FakeTensorMode, env: Environment | None) -> Any:
    """A batch to trace with, of symbolic sizes where the recipe is for a range."""
    if env and isinstance(recipe.signature, RangedSignature):
        return recipe.signature.example(fake, env.size)
    return recipe.signature.example(fake)


def edit_traced(gm: fx.GraphModule, recipe: Recipe) -> None:
    """Change a traced graph to what eager runs, and to the pieces of the recipe."""
    describe_parts(gm)
    cast_weights_once(gm)
    take_out_of(gm.graph)
    split_parts(gm.graph, recipe.pieces)


def joint_of(gm: fx.GraphModule, results: int, recipe: Recipe, repeats: Repeats | None) -> Joint:
    """The joint of an edited graph, of whose outputs the forward returns `results`."""
    several = repeats.gradients() if repeats else None
    return build_joint(
        gm, results, recipe.name, recipe.resident, several, recipe.hand_over, **recipe.facts()
    )


def with_pieces(trace: Trace, pieces: tuple[tuple[str, int, bool], ...]) -> Trace:
    """The trace with regions in pieces, as its recipe would have it with these.

    It takes over the record of `trace`, which cannot be compiled any more.

    Raises
    ------
    ScheduleError : the step has no such region.
    """
    trace.compiled = True
    gm, recipe = trace.descriptors.graph_module, dataclasses.replace(trace.recipe, pieces=pieces)
    split_parts(gm.graph, pieces)
    gm.recompile()
    joint = joint_of(gm, trace.joint.num_forward_outputs, recipe, trace.repeats)
    return dataclasses.replace(trace, joint=joint, recipe=recipe, compiled=False)


def _held_by(gm: fx.GraphModule) -> list[Any]:
    return [getattr(gm, str(node.target)) for node in gm.graph.find_nodes(op="get_attr")]


def num_forward_outputs(descriptors: JointWithDescriptors) -> int:
    """How many of the joint graph's outputs the forward returns."""
    return descriptors._aot_state.fw_metadata.num_forward


def _refuse_no_backward(model: nn.Module, descriptors: JointWithDescriptors) -> None:
    nodes = descriptors.graph_module.graph.find_nodes(op="placeholder")
    if not any(is_tangent(node) for node in nodes):
        raise CaptureError(
            f"no output of {type(model).__name__} depends on a parameter that requires grad, so "
            "there is no backward to plan. Check for detach() or no_grad in forward or the loss"
        )
