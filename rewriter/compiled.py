"""AOTAutograd's runtime around our two graphs, and what a step is compiled with."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import fx

from remat.graph_capture.chunking.regions import AND
from remat.graph_capture.devices.known_devices import is_cuda
from remat.graph_capture.distributed.dtensors import is_beside_local_part
from remat.graph_capture.errors import ScheduleError, TierError
from remat.graph_capture.graph import Links, TrainingGraph
from remat.graph_capture.joint.build import Joint, build_joint
from remat.graph_capture.joint.nodes import is_tangent, written_inputs
from remat.graph_capture.joint.provenance import path_in_model
from remat.graph_capture.torch_private.aot import (
    aot_compile_joint_with_descriptors,
    functorch_config,
)
from remat.graph_capture.tracing.attribute_writes import InitialisedOnce, MutatedAttribute
from remat.graph_capture.tracing.outputs import DuplicateOutputs
from remat.graph_capture.tracing.recipe import JointEdit
from remat.graph_capture.tracing.traced_step import Trace
from remat.rewriter.graphs.backward_parts import GradientGates, in_parts
from remat.rewriter.graphs.codegen import Boxed, boxed, compile_boxed, marks
from remat.rewriter.graphs.emit import FloatSource, emit, recompute_inputs
from remat.rewriter.tiers.file_tier import FileTier, TierCopies, host_places
from remat.schedules.derived import graph_of_schedule
from remat.schedules.levers import REDUCTIONS, attribute_at
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import Simulation, require_valid

_compiling = threading.RLock()

# Only the graphs use the arena. What runs between them is not in the way of the counted calls.

PassKind = Literal["forward", "backward"]


class _Source(Protocol):
    def run(self, phase: PassKind, graph: Boxed, args: list[Any]) -> Any: ...


class StepAllocator:
    """Where an arena is put around the graphs of one compiled step; shared by a module's copies."""

    def __init__(self) -> None:
        self.source: _Source | None = None  # without one, torch's allocator serves
        self.n_results = 0  # of forward, which returns what is saved after them

    def around(self, phase: PassKind, graph: Boxed) -> Boxed:
        @boxed
        def run(args: list[Any]) -> Any:
            source = self.source  # read at each call: an arena is opened and closed between steps
            return graph(args) if source is None else source.run(phase, graph, args)

        return run


class GradientFacts(NamedTuple):
    """Gradients of a step, by the places of its inputs: parameters and buffers first."""

    unused: frozenset[int]  # these get none, though they may require one
    needs: dict[int, frozenset[int]]  # by place, forward's results that a gradient comes from
    through: frozenset[int]  # all of these results
    summed: tuple[int, ...]  # whose gradient is a sum of several terms
    written: dict[int, str]  # inputs that the step writes to, with their paths

    @property
    def overwrites(self) -> bool:
        return bool(self.written)

    @property
    def writes_batch(self) -> bool:
        return "" in self.written.values()


def _gradient_facts(joint: Joint) -> GradientFacts:
    output = joint.module.graph.find_nodes(op="output")[0]
    results, described = output.args[0], output.meta["desc"]
    assert isinstance(results, (tuple, list))
    n_outputs = joint.num_forward_outputs  # a DTensor's gradient is two results: local and mesh
    pairs = zip(results[n_outputs:], described[n_outputs:], strict=True)
    gradients = [result for result, what in pairs if not is_beside_local_part(what)]
    forward = list(described[:n_outputs])
    reached = _reached_from(joint.module.graph, forward)
    given = {i: node for i, node in enumerate(gradients) if isinstance(node, fx.Node)}
    needs = {i: reached.get(node, frozenset[int]()) for i, node in given.items()}
    written = enumerate(written_inputs(joint.module.graph, n_outputs))
    return GradientFacts(
        unused=frozenset(range(len(gradients))).difference(given),
        needs=needs,
        through=frozenset[int]().union(*needs.values()),
        summed=tuple(i for i, node in given.items() if _is_sum(joint, node, reached)),
        written={i: _path_of_state(one) for i, one in written if one is not None},
    )


def _path_of_state(description: object) -> str:
    # Told by the name, as torch's classes of descriptions move between releases.
    is_state = type(description).__name__ in ("ParamAOTInput", "BufferAOTInput")
    return path_in_model(str(getattr(description, "target", ""))) if is_state else ""


def _reached_from(graph: fx.Graph, forward: list[object]) -> dict[fx.Node, frozenset[int]]:
    found: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        if is_tangent(node):
            found[node] = frozenset([forward.index(node.meta["desc"].output)])
        elif sources := [found[a] for a in node.all_input_nodes if a in found]:
            first = sources[0]
            same = all(source is first for source in sources)
            found[node] = first if same else first.union(*sources[1:])
    return found


def _is_sum(joint: Joint, node: fx.Node, reached: dict[fx.Node, frozenset[int]]) -> bool:
    # Views and the like, which are no ops of the plan, are looked through.
    while node.name not in joint.node_of_op and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    is_addition = node.target is torch.ops.aten.add.Tensor
    return is_addition and all(a in reached for a in node.all_input_nodes)


@dataclass(frozen=True)
class CompiledStep:
    """A callable step, the two GraphModules that it carries out, and facts about its gradients."""

    call: Callable[..., Any]
    forward: fx.GraphModule
    backward: fx.GraphModule
    gradients: GradientFacts
    graph: TrainingGraph
    links: Links | None = None
    mutated: tuple[MutatedAttribute, ...] = ()  # what each step sets on modules
    initialised: tuple[InitialisedOnce, ...] = ()
    duplicate_outputs: DuplicateOutputs | None = None  # where its results repeat a tensor
    floats: FloatSource | None = None  # numbers that each step reads anew
    by_inductor: bool = False
    gradient_gates: GradientGates | None = None
    memory: StepAllocator = field(default_factory=StepAllocator)
    tier: TierCopies | None = None
    gradient_order: tuple[int, ...] = ()  # eager's order, by place
    recompute_inputs: tuple[int, ...] = ()  # places that backward reads to make values again

    def results(self, *inputs: Any) -> Any:
        """The module's results of one run, with `mutated` as a pair."""
        results = self.call(*inputs)
        return self.duplicate_outputs.tree(results) if self.duplicate_outputs else results


def copy_to_compile(trace: Trace) -> Trace:
    state = trace.descriptors._aot_state
    # AOTAutograd's metadata notes what one schedule saves; the rest of a trace is only read.
    own = dataclasses.replace(state, fw_metadata=copy.copy(state.fw_metadata))
    descriptors = dataclasses.replace(trace.descriptors, _aot_state=own)
    return dataclasses.replace(trace, descriptors=descriptors)


def edits_of(schedule: Schedule) -> Iterator[JointEdit]:
    # One region may stand for several parts that run in as many chunks.
    parts = [(part, one) for one in schedule.chunks for part in one.region.split(AND)]
    chunks = tuple((part, one.chunks, one.exact) for part, one in parts)
    told = [(one.lever, one.told) for one in schedule.levers]
    # A schedule has chunks or such levers, not both (`REDUCTIONS`).
    for name, facts in [("chunks", chunks), *told] if chunks else told:
        if name not in REDUCTIONS or not REDUCTIONS[name].emitter:
            raise ScheduleError(
                f"make the plan again: it uses {name}, which this release cannot run"
            )
        emit: Callable[..., None] = attribute_at(REDUCTIONS[name].emitter)
        yield functools.partial(emit, told=facts)


def links_of(trace: Trace, costed: TrainingGraph | None = None) -> Links | None:
    return trace.graph.links or (costed.links if costed else None)


_Edit = Callable[[fx.GraphModule], fx.GraphModule]


class _Cut:
    """The two graphs of a step, made when AOTAutograd hands over the joint one, and their code."""

    code: tuple[_Edit, _Edit] = (lambda gm: gm, lambda gm: gm)  # what makes Inductor's of both

    def __init__(
        self, trace: Trace, schedule: Schedule, tier: TierCopies | None, by_inductor: bool
    ) -> None:
        self.trace, self.schedule, self.tier = trace, schedule, tier
        self.by_inductor = by_inductor
        self.floats = FloatSource(trace.floats) if trace.floats else None
        self.memory = StepAllocator()
        self.gates: GradientGates | None = None

    def partition(
        self, gm: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        trace, recipe = self.trace, self.trace.recipe
        self.memory.n_results = num_fwd_outputs
        gm = trace.joint.module  # `gm` itself, but over a range of sizes: this is at some of them
        if self.floats:
            self.floats.inputs.mark(gm)
        several = trace.duplicate_outputs.gradients() if trace.duplicate_outputs else None
        joint = build_joint(
            gm, num_fwd_outputs, recipe.name, recipe.resident, several, recipe.gradient_release,
            **recipe.facts(),
        )  # fmt: skip
        self.schedule.check_made_for(joint.graph)  # it must still be the graph that was planned
        # Inductor's kernels are made for the strides of the trace.
        metadata = None if self.by_inductor else trace.descriptors._aot_state.fw_metadata
        self.forward, self.backward = emit(
            joint, self.schedule, self.floats, metadata,
            writes=not self.by_inductor, env=trace.env, tier=self.tier,
        )  # fmt: skip
        if marks(self.backward.graph):
            self.gates = GradientGates(self.backward)
        if self.by_inductor:
            from remat.rewriter.inductor.compiler import InductorStep  # only if it makes the code

            step = InductorStep(joint, self.forward, self.backward)
            self.code = step.compiled_forward, step.compiled_backward
        return self.forward, self.backward

    def compile_forward(self, gm: fx.GraphModule, example_inputs: Any) -> Boxed:
        return self.memory.around("forward", compile_boxed(self.code[0](gm)))

    def compile_backward(self, gm: fx.GraphModule, example_inputs: Any) -> Boxed:
        return self.memory.around("backward", self._compiled_backward(gm))

    def _compiled_backward(self, gm: fx.GraphModule) -> Boxed:
        for node in gm.graph.find_nodes(op="get_attr"):  # constants must be the user's tensors
            setattr(gm, str(node.target), getattr(self.backward, str(node.target)))
        gm = self.code[1](gm)
        with _compiling:  # first backwards of several threads would share the graph's fake mode
            return in_parts(self.gates.compile_backward(gm) if self.gates else compile_boxed(gm))


def compile_step(
    trace: Trace, schedule: Schedule, *, by_inductor: bool = False, links: Links | None = None,
    tier: TierCopies | None = None,
) -> CompiledStep:  # fmt: skip
    """`tier`: where a plan for a range copies to; left out, it has the room of this one size."""
    found = require_valid(trace.graph, schedule, links)
    links = links or trace.graph.links
    tier = tier or tier_for(trace.graph, schedule, links, found)
    if tier is not None:
        tier.require_room()  # a lack of room shows when the module is made, not only in a step
    cut = _Cut(trace, schedule, tier, by_inductor)
    trace.compiled = True  # AOTAutograd uses up the trace's metadata
    facts, state = _gradient_facts(trace.joint), trace.descriptors._aot_state
    state.fw_metadata.bw_donated_idxs = []  # else AOTAutograd refuses retain_graph=True
    config = state.aot_config  # or Inductor would compile backward within the first step
    state.aot_config = dataclasses.replace(
        config, force_non_lazy_backward_lowering=by_inductor,
        enable_log=by_inductor,  # else each graph is printed, though nobody reads it
    )  # fmt: skip
    with functorch_config.patch(donated_buffer=False):
        call = aot_compile_joint_with_descriptors(
            trace.descriptors, partition_fn=cut.partition,
            fw_compiler=cut.compile_forward, bw_compiler=cut.compile_backward,
        )  # fmt: skip
    return CompiledStep(
        call, cut.forward, cut.backward, facts, trace.graph, links, trace.mutated,
        trace.initialised, trace.duplicate_outputs, cut.floats, by_inductor, cut.gates, cut.memory,
        cut.tier, trace.gradient_order, recompute_inputs(trace.joint, schedule),
    )  # fmt: skip


def tier_for(
    graph: TrainingGraph, schedule: Schedule, links: Links | None, found: Simulation
) -> TierCopies | None:
    """The memory that a plan copies values to; None if it copies none."""
    if not schedule.moves:
        return None
    if links is None:  # the simulator has refused it already
        raise TierError("pass links to a host: this plan copies values to one, and none is known")
    if is_cuda(graph.device):
        from remat.rewriter.tiers.stream_tier import StreamTier

        places = host_places(graph_of_schedule(graph, schedule), schedule)
        return StreamTier(graph.device, places, links, found.nvme_peak_bytes)
    return FileTier(found.host_peak_bytes, found.nvme_peak_bytes, links.nvme_path)
