"""The place in torch.compile where a step is cut in two: our partitioner, and what it offers.

Inductor hands over its joint graph, decomposed and after its own joint passes, and compiles the two
graphs that it gets back. So guards, graph breaks, views and mutated buffers stay dynamo's and
AOTAutograd's; with a second export, the guards would be ours. A `FusedStep` is the joint graph with
prices. It emits schedules of the graph, and replays the peaks of their code.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch._functorch.config as functorch_config
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from remat.graph_capture.graph import Resident, TrainingGraph
from remat.graph_capture.joint.nodes import copy_of, is_tangent
from remat.graph_capture.joint.refuse_ops import refuse_sparse
from remat.graph_capture.tracing.resident import storage_bytes
from remat.rewriter.inductor.choices import calls_in_order
from remat.rewriter.inductor.emit import emit_fused
from remat.rewriter.inductor.graph import FusedJoint, build_fused
from remat.rewriter.inductor.masks import keep_masks_as_bytes
from remat.rewriter.inductor.nodes import place_of
from remat.rewriter.inductor.overwritten import (
    n_written_by_caller,
    overwritten_inputs,
    read_from_copies,
)
from remat.rewriter.inductor.prices import CallPrices, price_fused
from remat.rewriter.inductor.replay import Replay, replay
from remat.rewriter.inductor.subgraphs import refuse_drawing
from remat.rewriter.inductor.torchs_cut import is_right
from remat.schedules.schedule import Schedule

CONFIG: dict[str, Any] = {
    "layout_optimization": False,
    "fx_graph_cache": False,
}
"""Inductor's configuration for a step of ours.

With channels-last layouts, forward would save copies of parameters, which are not in the graph. A
pair of graphs from Inductor's cache would never come to the partitioner.
"""


@dataclass(frozen=True)
class Pair:
    """The two graphs that Inductor compiles, and whether it must keep the order of a plan."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    holds_order: bool = True


class FusedStep:
    """One joint graph of torch.compile, to be planned.

    Attributes
    ----------
    graph : its kernels and calls, priced, with nothing resident.
    static_bytes : of parameters and buffers. dynamic_bytes : of all other inputs.
    n_masks : how many masks a plan keeps as bytes and torch's own cut as bool.
    gradient_bytes : of the gradients of parameters.
    calls : how many forwards run before the first backward. All but one leave what they have
        saved, and their inputs, beside what is replayed.
    modules : how many modules these calls are of, each with gradients of its own.
    awaited_gradient_bytes : of the gradients that later graphs have left before backward runs.
    holds_outputs : whether forward's results are held while backward runs.
    """

    calls = 1
    modules = 1
    awaited_gradient_bytes = 0
    holds_outputs = True

    def __init__(
        self, gm: fx.GraphModule, joint_inputs: Any, n_outputs: int,
        static: Sequence[int], n_visible: int,
    ) -> None:  # fmt: skip
        for node in gm.graph.nodes:
            refuse_sparse(node, place_of)
        refuse_drawing(gm.graph)
        # Torch's own cut is made of the graph without bytes: cut from the changed graph, it would
        # keep the bool from which the byte is made. Nor would it keep copies of inputs.
        self._gm, self._joint_inputs, self._static = copy_of(gm), joint_inputs, list(static)
        overwritten = overwritten_inputs(gm)
        self._overwritten = {node.name for node in overwritten}
        read_from_copies(gm, overwritten)
        self.n_masks = keep_masks_as_bytes(gm, n_outputs)
        self._prices = CallPrices(gm)
        # Users see forward's results after those that are written back to inputs.
        first = n_written_by_caller(gm)
        self._visible = range(first, first + n_visible)
        inputs = [n for n in gm.graph.find_nodes(op="placeholder") if not is_tangent(n)]
        self.joint: FusedJoint = build_fused(
            gm, n_outputs, "torch.compile", Resident(), _device_of(inputs), self._overwritten
        )
        self.joint.graph = price_fused(self.joint, self._prices)
        known: set[int] = set()
        self.static_bytes = storage_bytes((inputs[i].meta.get("val") for i in self._static), known)
        self.dynamic_bytes = storage_bytes((node.meta.get("val") for node in inputs), known)
        results: Any = gm.graph.output_node().args[0]
        made = [results[n_outputs + i] for i in self._static if n_outputs + i < len(results)]
        self.gradient_bytes = storage_bytes(
            (node.meta.get("val") for node in made if isinstance(node, fx.Node)), set()
        )

    @property
    def graph(self) -> TrainingGraph:
        """The priced graph."""
        return self.joint.graph

    def emit(self, schedule: Schedule) -> Pair:
        """The two graphs that carry out `schedule`."""
        return Pair(*emit_fused(self.joint, schedule))

    def stock(self) -> Pair:
        """The two graphs that torch itself makes of the step.

        They keep masks as bool. With nothing computed again, a GPT-2 takes 25.5 % more than eager
        by this cut, and 5.5 % by a plan with bytes.
        """
        with functorch_config.patch(activation_memory_budget=1.0):
            return Pair(
                *min_cut_rematerialization_partition(
                    copy_of(self._gm), self._joint_inputs, compiler="inductor",
                    num_fwd_outputs=self.joint.n_outputs,
                    static_lifetime_input_indices=self._static,
                ),
                holds_order=False,
            )  # fmt: skip

    def is_right(self, stock: Pair) -> bool:
        """Whether torch's own cut computes the step's gradients."""
        pair = stock.forward, stock.backward
        return is_right(*pair, self.joint.n_outputs, self._overwritten)

    def replay(self, pair: Pair) -> Replay:
        """What Inductor's code for `pair` allocates.

        Raises
        ------
        ReplayError : it cannot be read.
        """
        with calls_in_order(pair.holds_order):
            found = replay(
                pair.forward, pair.backward, self.joint.n_outputs, self._workspaces, self._visible,
                holds_outputs=self.holds_outputs,
            )  # fmt: skip
        return self._beside(found, 1)

    def alone(self, found: Replay) -> Replay:
        """`found` without what other calls and later graphs have left."""
        return self._beside(found, -1)

    def _beside(self, found: Replay, times: int) -> Replay:
        forward_bytes, backward_bytes = self._left_by_others_bytes(found)
        return dataclasses.replace(
            found,
            forward_peak_bytes=found.forward_peak_bytes + times * forward_bytes,
            backward_peak_bytes=found.backward_peak_bytes + times * backward_bytes,
        )

    def _left_by_others_bytes(self, found: Replay) -> tuple[int, int]:
        """What is there beside forward and beside backward, at most, from others.

        The last call's backward runs first, beside what all others have saved. In each later one
        there is one less of these, but the gradients of the first are there, and if each call is of
        a module of its own, those of all before.
        """
        each_bytes = found.saved_bytes + self.dynamic_bytes
        saved_bytes = (self.calls - 1) * each_bytes
        left_bytes = saved_bytes
        if self.modules > 1:
            left_bytes = max(saved_bytes, (self.modules - 1) * self.gradient_bytes)
        elif self.calls > 1:
            left_bytes = max(saved_bytes, saved_bytes - each_bytes + self.gradient_bytes)
        return saved_bytes, left_bytes + self.awaited_gradient_bytes

    def _workspaces(self, calls: Sequence[fx.Node]) -> list[int]:
        return [price.workspace_bytes for price in self._prices.of(calls)]


def _device_of(inputs: Iterable[fx.Node]) -> str:
    tensors = (node.meta.get("val") for node in inputs)
    return next((t.device.type for t in tensors if isinstance(t, Tensor)), "cpu")


class Partitioner(CustomPartitionerFn):
    """Hands the joint graph to `plan` and its two graphs to Inductor."""

    def __init__(self, plan: Callable[[FusedStep], Pair], n_visible: int) -> None:
        self.plan, self.n_visible = plan, n_visible
        self.holds_order = False

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Called by Inductor. Errors of `plan` go through to the user."""
        step = FusedStep(
            gm, joint_inputs, kwargs["num_fwd_outputs"],
            kwargs.get("static_lifetime_input_indices") or (), self.n_visible,
        )  # fmt: skip
        pair = self.plan(step)
        self.holds_order = pair.holds_order
        return pair.forward, pair.backward

    def compile_inner(self, *args: Any, **kwargs: Any) -> Any:
        """Compile one of the two graphs.

        Backward is compiled when it first runs. No context around `compile_fx` is in force by then,
        so the compiler itself brings what a plan needs.
        """
        with calls_in_order(self.holds_order):
            return compile_fx_inner(*args, **kwargs)

    def uuid(self) -> None:
        """No key for a cache: what is planned depends on more than the graph."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        """The same one: Inductor copies its configuration, and with it the partitioner."""
        return self


@contextlib.contextmanager
def planned(partitioner: Partitioner) -> Generator[dict[str, Any]]:
    """Compile under our configuration; yields the patches to give to Inductor.

    Donated buffers are off, so that backward may run twice. On a Llama that costs 3 % of the peak
    of torch's own cut.
    """
    with functorch_config.patch(donated_buffer=False, enable_autograd_cache=False):
        yield {**CONFIG, "custom_partitioner_fn": partitioner}
