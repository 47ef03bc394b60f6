"""The place in torch.compile where a step is cut in two: our partitioner, and what it offers.

Inductor hands over its joint graph, and compiles the two that it gets back. So guards, graph breaks
and views stay dynamo's and AOTAutograd's.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from remat.graph_capture.costs.cache import OpCost
from remat.graph_capture.devices.known_devices import allocator_rounding
from remat.graph_capture.devices.placement import device_holding
from remat.graph_capture.graph import Resident, TrainingGraph
from remat.graph_capture.joint.nodes import (
    copy_of,
    draws_randomness,
    is_custom,
    is_tangent,
    mutates,
    storage_key,
)
from remat.graph_capture.refusals import refuse_sparse
from remat.graph_capture.torch_private.aot import (
    collect_bw_donated_buffer_idxs,
    functorch_config,
    min_cut_rematerialization_partition,
)
from remat.graph_capture.torch_private.core import detect_fake_mode, keeps_graph, pytree
from remat.graph_capture.torch_private.inductor import (
    BaseSchedulerNode,
    CppScheduling,
    CustomPartitionerFn,
    InductorChoices,
    Scheduler,
    V,
    compile_fx_inner,
    inductor_config,
)
from remat.graph_capture.tracing.resident import storage_bytes
from remat.rewriter.inductor.fused_graph import FusedJoint, build_fused, emit_fused
from remat.rewriter.inductor.fused_nodes import (
    SEEDS,
    keep_masks_as_bytes,
    module_and_line,
    refuse_drawing,
    viewed,
)
from remat.rewriter.inductor.kernel_costs import CallCosts, with_kernel_costs
from remat.rewriter.inductor.replay import ReplayedMemory, StepBytes, replay
from remat.schedules.schedule import Schedule

# Inductor's joint graph writes to inputs at its end, and backward may read an input again after
# that: torch's own cut then gives wrong gradients in silence. So each reader gets a copy that
# forward makes before planning. Where only forward reads, it is inlined and costs nothing.


def _overwritten_inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """Inputs that the graph or its caller writes to, and those of the same storages."""
    inputs = [n for n in gm.graph.find_nodes(op="placeholder") if not is_tangent(n)]
    written = {node.args[0] for node in gm.graph.nodes if mutates(node)}
    by_caller = {getattr(said, "mutated_input", None) for said in _descriptions(gm)} - {None}
    found = {n for n in inputs if n in written or n.meta.get("desc") in by_caller}
    storages = {_storage_of(n) for n in found}
    return [n for n in inputs if n in found or _storage_of(n) in storages]


def _read_from_copies(gm: fx.GraphModule, overwritten: Sequence[fx.Node]) -> list[fx.Node]:
    """Let the readers of overwritten inputs read copies, which are returned; changed in place."""
    copies: list[fx.Node] = []
    inputs = gm.graph.find_nodes(op="placeholder")
    for node in overwritten:
        readers = [u for u in node.users if not (mutates(u) and u.args[0] is node)]
        if not readers or not isinstance(node.meta.get("val"), Tensor):
            continue
        with gm.graph.inserting_after(copies[-1] if copies else inputs[-1]):
            copy = gm.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = {**readers[0].meta, "val": torch.empty_like(node.meta["val"])}
        copy.meta.pop("tensor_meta", None)  # it describes the reader's result
        for reader in readers:
            reader.replace_input_with(node, copy)
        copies.append(copy)
    gm.recompile()
    return copies


def _descriptions(gm: fx.GraphModule) -> Sequence[Any]:
    return gm.graph.output_node().meta.get("desc") or ()


def _storage_of(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return storage_key(value) if isinstance(value, Tensor) else None


def is_valid(
    forward: fx.GraphModule, backward: fx.GraphModule, n_outputs: int, overwritten: Iterable[str]
) -> bool:
    """Whether backward reads no overwritten input, and runs nothing again that must run once."""
    # torch's own cut looks neither at overwritten inputs nor at whether an op does the same twice.
    once = {node.name for node in forward.graph.nodes if _runs_once(node)}
    again = any(_runs_once(node) and node.name in once for node in backward.graph.nodes)
    saved = pytree.tree_leaves(forward.graph.output_node().args[0])[n_outputs:]
    read = {viewed(node).name for node in saved if isinstance(node, fx.Node)}
    return not again and read.isdisjoint(overwritten)


def _runs_once(node: fx.Node) -> bool:
    return node.target == SEEDS or draws_randomness(node) or is_custom(node)


_LOCAL: dict[str, Any] = {"fx_graph_remote_cache": False}  # a plan is for one machine's costs

# Inductor fuses kernels that read the same buffers, however far apart: a recomputed kernel then
# runs beside its first run, and the schedule is undone. On a CPU all kernels between two calls
# share a function, which holds all their buffers. So no fusion crosses a call, and each kernel is a
# function. A ResNet-18's plan for 36 MB takes that, and took 61 MB without.


class _BetweenCalls(InductorChoices):
    """Inductor's own choices, without fusions across a call."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: WeakKeyDictionary[Scheduler, list[int]] = WeakKeyDictionary()

    def can_fuse(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, scheduler: Scheduler, node1: BaseSchedulerNode, node2: BaseSchedulerNode,
        shared_data_score: int,
    ) -> bool:  # fmt: skip
        if scheduler not in self._calls:
            self._calls[scheduler] = [n.min_order for n in scheduler.nodes if n.is_extern()]
        calls = self._calls[scheduler]  # `min_order`, `max_order`: the order before any fusion
        first = min(node1.min_order, node2.min_order)
        last = max(node1.max_order, node2.max_order)
        if bisect_left(calls, first) != bisect_left(calls, last):
            return False
        return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)


@contextlib.contextmanager
def calls_in_order(is_asked: bool) -> Generator[None]:
    if not is_asked:  # torch's own cut keeps Inductor's choices, which make it up to 4 % faster
        yield
        return
    with (
        # 0: each C++ kernel gets a function of its own.
        mock.patch.object(CppScheduling, "MAX_FUSED_KERNEL_ARGS_NUM", 0),
        V.set_choices_handler(_BetweenCalls()),
        # Reuse raises the peak; in channels-last layouts forward would save copies of parameters.
        inductor_config.patch(allow_buffer_reuse=False, layout_optimization=False, **_LOCAL),
    ):
        yield


class Pair(NamedTuple):
    """The two graphs that Inductor compiles, and whether it must keep the order of a plan."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    holds_order: bool = True


class FusedStep(StepBytes):
    """One joint graph of torch.compile, to be planned."""

    holds_outputs = True  # forward's results, while backward runs

    def __init__(
        self, gm: fx.GraphModule, joint_inputs: Any, n_outputs: int,
        static: Sequence[int], n_visible: int,
    ) -> None:  # fmt: skip
        for node in gm.graph.nodes:
            refuse_sparse(node, module_and_line)
        refuse_drawing(gm.graph)
        # torch's own cut is of the graph without bytes: else it would keep the bool behind one.
        self._gm, self._joint_inputs, self._static = copy_of(gm), joint_inputs, list(static)
        overwritten = _overwritten_inputs(gm)
        self._overwritten = {node.name for node in overwritten}
        _read_from_copies(gm, overwritten)
        self.n_masks = keep_masks_as_bytes(gm, n_outputs)  # torch's own cut keeps these as bool
        # Users see forward's results after those that are written back to inputs.
        first = sum(hasattr(said, "mutated_input") for said in _descriptions(gm))
        self._visible = range(first, first + n_visible)
        inputs = [n for n in gm.graph.find_nodes(op="placeholder") if not is_tangent(n)]
        device = device_holding(node.meta.get("val") for node in inputs)
        self._costs = CallCosts(gm, device)
        around = "torch.compile", Resident(), device, self._overwritten
        self.joint: FusedJoint = build_fused(gm, n_outputs, *around)
        self.joint.graph = with_kernel_costs(self.joint, self._costs)
        known, allocated = set[int](), allocator_rounding(device)
        results: Any = gm.graph.output_node().args[0]
        made = [results[n_outputs + i] for i in self._static if n_outputs + i < len(results)]
        gradients = (node.meta.get("val") for node in made if isinstance(node, fx.Node))
        super().__init__(
            storage_bytes((inputs[i].meta.get("val") for i in self._static), known, allocated),
            storage_bytes((node.meta.get("val") for node in inputs), known, allocated),
            storage_bytes(gradients, allocated=allocated),
        )

    @property
    def costs(self) -> dict[str, OpCost]:
        """The measured costs that its plans rest on, by their keys."""
        return self._costs.taken()

    @property
    def graph(self) -> TrainingGraph:
        return self.joint.graph

    def emit(self, schedule: Schedule) -> Pair:
        return Pair(*emit_fused(self.joint, schedule))

    def stock(self) -> Pair:
        """The two graphs that torch itself makes of the step, with masks as bool."""
        # With nothing computed again, a GPT-2 takes 25.5 % over eager by this cut, 5.5 % by a plan.
        with functorch_config.patch(activation_memory_budget=1.0), _sizes_as_numbers():
            return Pair(
                *min_cut_rematerialization_partition(
                    copy_of(self._gm), self._joint_inputs, compiler="inductor",
                    num_fwd_outputs=self.joint.n_outputs,
                    static_lifetime_input_indices=self._static,
                ),
                holds_order=False,
            )  # fmt: skip

    def is_valid(self, stock: Pair) -> bool:
        return is_valid(stock.forward, stock.backward, self.joint.n_outputs, self._overwritten)

    def replay(self, pair: Pair) -> ReplayedMemory:
        with calls_in_order(pair.holds_order):
            found = replay(
                pair.forward, pair.backward, self.joint.n_outputs, self._workspaces, self._visible,
                donated=self._donated(pair), holds_outputs=self.holds_outputs,
            )  # fmt: skip
        return self.beside(found)

    def _donated(self, pair: Pair) -> Sequence[int]:
        """Inputs of backward that its code may write to, as AOTAutograd will find them."""
        if not functorch_config.donated_buffer:
            return ()
        saved = slice(self.joint.n_outputs, None)  # sizes are numbers, so none is saved
        asked = {"num_forward": saved.start, "tensors_saved_for_backwards_slice": saved}
        meta: Any = SimpleNamespace(**asked, num_symints_saved_for_bw=0)
        return collect_bw_donated_buffer_idxs(pair.forward, pair.backward, meta)

    def _workspaces(self, calls: Sequence[fx.Node]) -> list[int]:
        return [cost.workspace_bytes for cost in self._costs.of(calls)]


def _sizes_as_numbers() -> contextlib.AbstractContextManager[Any]:
    if (mode := detect_fake_mode()) is None:  # without symbols: no input would tell their values
        return contextlib.nullcontext()
    return mock.patch.object(mode, "static_shapes", True)


class Partitioner(CustomPartitionerFn):
    """Hands the joint graph to `plan` and its two graphs to Inductor."""

    def __init__(
        self, plan: Callable[[FusedStep], Pair], n_visible: int, name: Callable[[], str] = str
    ) -> None:
        self.plan, self.n_visible, self.name = plan, n_visible, name  # empty: no caches of torch's
        self.holds_order = self.was_called = False  # the latter stays so if torch has the code

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.was_called = True
        step = FusedStep(
            gm, joint_inputs, kwargs["num_fwd_outputs"],
            kwargs.get("static_lifetime_input_indices") or (), self.n_visible,
        )  # fmt: skip
        pair = self.plan(step)
        self.holds_order = pair.holds_order
        return pair.forward, pair.backward

    def compile_inner(self, *args: Any, **kwargs: Any) -> Any:
        # With retain_graph=True this backward writes over nothing, and torch's key does not say so.
        is_retained = kwargs.get("is_backward") and keeps_graph()
        is_kept = bool(self.name()) and not is_retained  # compiled later, with no context in force
        with calls_in_order(self.holds_order), inductor_config.patch(fx_graph_cache=is_kept):
            return compile_fx_inner(*args, **kwargs)

    def uuid(self) -> str | None:
        # A plan depends on more than the graph: caches give code only to who asks by its name.
        return f"remat {self.name()}" if self.name() else None

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.uuid() or "",)  # Inductor's keys pickle the configuration, and this

    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        return self  # Inductor copies its configuration, and with it the partitioner


@contextlib.contextmanager
def planned(partitioner: Partitioner) -> Generator[dict[str, Any]]:
    """Compile under our configuration; yields the patches to give to Inductor."""
    is_named = bool(partitioner.name())
    with functorch_config.patch(enable_autograd_cache=is_named, enable_remote_autograd_cache=False):
        yield {**_LOCAL, "fx_graph_cache": is_named, "custom_partitioner_fn": partitioner}
