"""A memory policy of graph_trainer that tags its graph with a schedule of remat's.

graph_trainer repeats a tagged op once, right before backward first reads it, where a schedule may
repeat it at any time. So `peak_bytes` judges the graph that graph_trainer's passes make of the
tags, and the budget of the solve falls until that fits.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.experiments.graph_trainer.cpu_offload import apply_cpu_offload_pass
from torchtitan.experiments.graph_trainer.registry import register_memory_policy
from torchtitan.experiments.graph_trainer.selective_activation_remat import (
    selective_activation_remat_pass,
)

import remat
from remat.graph_capture.costs.cache import work_of
from remat.graph_capture.costs.roofline import Roofline
from remat.graph_capture.devices.known_devices import modelled_device
from remat.graph_capture.graph import Link, Links, Op, Resident, TrainingGraph, Value
from remat.schedules.schedule import Compute, Offload, Schedule

PCIE_BYTES_PER_US = 50_000  # of version 5.0 with 16 lanes
ADAMW = 2  # states of a parameter, each of its size
KEPT = "loss", "lm_head", "norm"
"""Modules of which graph_trainer repeats no op."""
SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
HOST = CheckpointPolicy.MUST_CPU_OFFLOAD


def register(budget: str | int, *, device: str = "h100", host_gib: float = 0.0) -> None:
    """Make ``compile.memory_policy = "remat"`` a plan for `budget`, of `remat.solve`.

    Parameters
    ----------
    device : whose times are modelled. host_gib : memory of the host that activations may move to.
    """

    @register_memory_policy("remat")
    def policy(gm: fx.GraphModule, *, config: Any) -> fx.GraphModule:
        step = training_graph(gm, device, int(host_gib * 2**30))
        plan = remat.solve(step, budget, time_limit_s=10.0)
        budget_bytes = plan.budget_bytes
        while True:
            if plan.schedule is None:
                raise remat.BudgetError(
                    f"try {plan.least_feasible_bytes} bytes: no tags are known to fit "
                    f"{budget_bytes} bytes"
                )
            _tag(gm, plan.schedule)
            over_bytes = peak_bytes(gm) - budget_bytes
            if over_bytes <= 0:
                return gm
            plan = remat.solve(step, plan.budget_bytes - over_bytes, time_limit_s=10.0)


class Storages:
    """Which storages each node makes or shows, and how large they are."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.of: dict[fx.Node, tuple[int, ...]] = {}
        self.bytes: list[int] = []
        self.made: dict[fx.Node, list[int]] = defaultdict(list)
        for node in gm.graph.nodes:
            self.of[node] = tuple(self._key(node, tensor) for tensor in _tensors(node))
            if node.op == "placeholder":  # of the caller, and resident
                self.bytes[:] = [0] * len(self.bytes)

    def _key(self, node: fx.Node, tensor: torch.Tensor) -> int:
        for read in node.all_input_nodes:  # what is copied from the host is of the same fake tensor
            for key, other in zip(self.of[read], _tensors(read), strict=True):
                if _same_storage(tensor, other) and node.target is not torch.ops.ao.reload.default:
                    return key
        self.bytes.append(_on_device_bytes(node, tensor))
        self.made[node].append(len(self.bytes) - 1)
        return len(self.bytes) - 1


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [one for one in tree_leaves(node.meta.get("val")) if isinstance(one, torch.Tensor)]


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _on_device_bytes(node: fx.Node, tensor: torch.Tensor) -> int:
    return 0 if node.target is torch.ops.ao.offload.default else tensor.untyped_storage().nbytes()


def peak_bytes(gm: fx.GraphModule) -> int:
    """The most bytes that are live in a step of the graph, as it becomes by its tags."""
    gm = selective_activation_remat_pass(apply_cpu_offload_pass(copy.deepcopy(gm)))
    storages = Storages(gm)
    last = {key: i for i, node in enumerate(gm.graph.nodes) for key in _touched(storages, node)}
    freed: dict[int, list[int]] = defaultdict(list)
    for key, i in last.items():
        freed[i].append(storages.bytes[key])
    live = peak = resident(gm).total_bytes
    for i, node in enumerate(gm.graph.nodes):
        live += sum(storages.bytes[key] for key in storages.made[node])
        peak = max(peak, live)
        live -= sum(freed[i])
    return peak


def _touched(storages: Storages, node: fx.Node) -> Iterator[int]:
    for one in (node, *node.all_input_nodes):
        yield from storages.of[one]


def resident(gm: fx.GraphModule) -> Resident:
    """Parameters and batch, and the state that AdamW has of each parameter with a gradient."""
    given = [t for node in gm.graph.find_nodes(op="placeholder") for t in _tensors(node)]
    _, *gradients = gm.graph.output_node().args[0]
    gradients_bytes = sum(tensor.nbytes for node in gradients for tensor in _tensors(node))
    return Resident(
        parameters_bytes=sum({t.untyped_storage()._cdata: t.nbytes for t in given}.values()),
        optimizer_bytes=ADAMW * gradients_bytes,
    )


def training_graph(gm: fx.GraphModule, device: str, host_bytes: int) -> TrainingGraph:
    """The step as remat's solvers read it: an op for each node that makes or writes a storage."""
    storages, roofline = Storages(gm), Roofline.assumed(modelled_device(device))
    written = {key for node in gm.graph.nodes if _writes(node) for key in storages.of[node]}
    ops: list[Op] = []
    values: dict[int, Value] = {}
    for node in _calls(gm):
        made = storages.made[node]
        if not (made or _writes(node)):
            continue
        read = {key for one in node.all_input_nodes for key in storages.of[one]} - set(made)
        phase = "backward" if _is_late(node) or (ops and ops[-1].phase == "backward") else "forward"
        is_fixed = phase == "backward" or _is_kept(node) or not written.isdisjoint({*read, *made})
        values |= {k: Value(f"v{k}", storages.bytes[k], node.name, shape=(k,)) for k in made}
        work = work_of(node)
        ops.append(
            Op(
                node.name, str(node.target), phase,
                tuple(f"v{k}" for k in sorted(read) if k in values), tuple(f"v{k}" for k in made),
                roofline.cost_us(str(node.target), work), module=_path(node),
                no_recompute="graph_trainer does not repeat it" if is_fixed else "",
            )
        )  # fmt: skip
    ends = {key for one in gm.graph.output_node().all_input_nodes for key in storages.of[one]}
    link = Link(PCIE_BYTES_PER_US)
    return TrainingGraph(
        "graph_trainer", tuple(ops), tuple(values.values()), resident=resident(gm),
        outputs=tuple(values[key].name for key in sorted(ends) if key in values),
        cost_origin="modelled", links=Links(link, link, host_bytes) if host_bytes else None,
    )  # fmt: skip


def _calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    return (node for node in gm.graph.nodes if node.op == "call_function")


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_late(node: fx.Node) -> bool:
    return node.meta.get("autograd_backward", False)


def _path(node: fx.Node) -> str:
    return node.meta.get("custom", {}).get("module_fqn", "")


def _is_kept(node: fx.Node) -> bool:
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return is_random or _path(node).partition(".")[0] in KEPT


def _tag(gm: fx.GraphModule, schedule: Schedule) -> None:
    runs = Counter(step.op for step in schedule.steps if isinstance(step, Compute))
    moved = {step.value for step in schedule.steps if isinstance(step, Offload)}
    storages = Storages(gm)
    for node in _calls(gm):
        if _is_late(node) or _path(node).partition(".")[0] in KEPT:
            continue
        if node.target is operator.getitem:  # results share what becomes of their op
            node.meta["recompute"] = node.args[0].meta["recompute"]
        elif node.name not in runs:  # a view costs nothing, and may be one of a storage made anew
            node.meta["recompute"] = AGAIN
        elif any(f"v{key}" in moved for key in storages.made[node]):
            node.meta["recompute"] = HOST
        else:
            node.meta["recompute"] = AGAIN if runs[node.name] > 1 else SAVE
