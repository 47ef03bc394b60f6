"""A memory policy of graph_trainer that tags its graph with a schedule of remat's.

graph_trainer repeats a tagged op once, right before backward first reads it, where a schedule may
repeat it at any time. So each plan is judged as the graph that graph_trainer's passes make of its
tags, and the budget of the solve falls until that graph fits.
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
from torchtitan.experiments.graph_trainer.registry import (
    MEMORY_POLICY_REGISTRY,
    register_memory_policy,
)
from torchtitan.experiments.graph_trainer.selective_activation_remat import (
    selective_activation_remat_pass,
)

import remat
from remat.graph_capture.costs.cache import work_of
from remat.graph_capture.costs.roofline import Roofline
from remat.graph_capture.devices.known_devices import modelled_device
from remat.graph_capture.graph import Link, Links, Op, Resident, TrainingGraph, Value
from remat.schedules.schedule import Compute, Offload, Schedule

TRIES, TIME_LIMIT_S = 8, 10.0  # of a solve
PCIE = Link(bytes_per_us=50_000)  # of version 5.0 with 16 lanes
ADAMW = 2  # states of a parameter, each of its size
KEPT = "loss", "lm_head", "norm"
"""Modules of which graph_trainer repeats no op: their backward comes before that of the layers."""
SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
HOST = CheckpointPolicy.MUST_CPU_OFFLOAD
ao = torch.ops.ao


def register(budget: str | int, *, device: str = "h100", host_gib: float = 0.0) -> None:
    """Make ``compile.memory_policy = "remat"`` tags for `budget`, as of `remat.solve`.

    Parameters
    ----------
    device : whose times are modelled. host_gib : memory of the host that activations may move to.
    """

    @register_memory_policy("remat")
    def policy(gm: fx.GraphModule, *, config: Any) -> fx.GraphModule:
        step = training_graph(gm, device, int(host_gib * 2**30))
        plan = remat.solve(step, budget, time_limit_s=TIME_LIMIT_S)
        low_bytes = step.resident.total_bytes
        budget_bytes = target_bytes = high_bytes = plan.budget_bytes
        for _ in range(TRIES):
            over_bytes = 0
            if plan.schedule is None:
                low_bytes = target_bytes
            else:
                _tag(gm, plan.schedule)
                over_bytes = judged(gm, device).peak_bytes - budget_bytes
                if over_bytes <= 0:
                    gm.meta["budget_bytes"] = budget_bytes
                    return gm
                high_bytes = target_bytes
            target_bytes = (low_bytes + high_bytes) // 2
            if over_bytes:
                target_bytes = max(high_bytes - over_bytes, target_bytes)
            plan = remat.solve(step, target_bytes, time_limit_s=TIME_LIMIT_S)
        MEMORY_POLICY_REGISTRY["full"](gm, config=config)  # what few solves may miss
        if judged(gm, device).peak_bytes <= budget_bytes:
            gm.meta["budget_bytes"] = budget_bytes
            return gm
        raise remat.BudgetError(f"raise the budget: no tags were found for {budget_bytes} bytes")


def judged(gm: fx.GraphModule, device: str = "h100") -> remat.Plan:
    """Peak and time, by the simulator, of what graph_trainer's passes make of its tags."""
    return remat.solve(judged_graph(gm, device), "100%", "store_all")


def judged_graph(gm: fx.GraphModule, device: str = "h100") -> TrainingGraph:
    """That graph. Ops that draw random numbers are saved, or the passes refuse it."""
    for node in _calls(gm):
        if _draws(node) and "recompute" in node.meta:
            node.meta["recompute"] = SAVE
    passed = selective_activation_remat_pass(apply_cpu_offload_pass(copy.deepcopy(gm)))
    return training_graph(passed, device)


class _Storages:
    """Which storages each node makes or shows, and their bytes; what the caller holds has none."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.of: dict[fx.Node, tuple[int, ...]] = {}
        self.bytes: list[int] = []
        self.made: dict[fx.Node, list[int]] = defaultdict(list)
        for node in gm.graph.nodes:
            self.of[node] = tuple(self._key(node, tensor) for tensor in _tensors(node))
        self.written = {k for node in gm.graph.nodes if _writes(node) for k in self.of[node]}

    def _key(self, node: fx.Node, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        on_host = node.target is ao.offload.default
        if not (on_host or node.target is ao.reload.default):  # copies show the same fake tensor
            for read in node.all_input_nodes:
                for key, other in zip(self.of[read], _tensors(read), strict=True):
                    if storage._cdata == other.untyped_storage()._cdata:
                        return key
        self.bytes.append(0 if on_host or node.op == "placeholder" else storage.nbytes())
        self.made[node].append(len(self.bytes) - 1)
        return len(self.bytes) - 1


def training_graph(gm: fx.GraphModule, device: str, host_bytes: int = 0) -> TrainingGraph:
    """The step as remat's solvers read it: an op for each node that makes or writes a storage."""
    storages, roofline = _Storages(gm), Roofline.assumed(modelled_device(device))
    ops: list[Op] = []
    values: dict[int, Value] = {}
    for node in _calls(gm):
        made = storages.made[node]
        if not (made or _writes(node) or node.target is ao.wait_tensor.default):
            continue
        read = {key for one in node.all_input_nodes for key in storages.of[one]} - set(made)
        is_late = _is_late(node) or bool(ops and ops[-1].phase == "backward")
        is_fixed = is_late or _draws(node) or _path(node).partition(".")[0] in KEPT
        is_fixed |= not storages.written.isdisjoint({*read, *made})
        values |= {k: Value(f"v{k}", storages.bytes[k], node.name) for k in made}
        op = Op(
            node.name, str(node.target), "backward" if is_late else "forward",
            tuple(f"v{k}" for k in sorted(read) if k in values), tuple(f"v{k}" for k in made),
            roofline.cost_us(str(node.target), work_of(node)), module=_path(node),
            no_recompute="graph_trainer does not repeat it" if is_fixed else "",
        )  # fmt: skip
        ops.append(op)
    ends = {key for one in gm.graph.output_node().all_input_nodes for key in storages.of[one]}
    return TrainingGraph(
        "graph_trainer", tuple(ops), tuple(values.values()), resident=_resident(gm),
        outputs=tuple(f"v{key}" for key in sorted(ends) if key in values),
        cost_origin="modelled", links=Links(PCIE, PCIE, host_bytes) if host_bytes else None,
    )  # fmt: skip


def _resident(gm: fx.GraphModule) -> Resident:
    given = [t for node in gm.graph.find_nodes(op="placeholder") for t in _tensors(node)]
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in given}
    _, *gradients = gm.graph.output_node().args[0]
    states_bytes = sum(ADAMW * tensor.nbytes for node in gradients for tensor in _tensors(node))
    return Resident(parameters_bytes=sum(sizes.values()), optimizer_bytes=states_bytes)


def _tag(gm: fx.GraphModule, schedule: Schedule) -> None:
    runs = Counter(step.op for step in schedule.steps if isinstance(step, Compute))
    moved = {step.value for step in schedule.steps if isinstance(step, Offload)}
    storages = _Storages(gm)
    for node in _calls(gm):
        if _is_late(node) or _path(node).partition(".")[0] in KEPT:
            continue
        keys, is_result = storages.of[node], node.target is operator.getitem
        if node.name not in runs and not is_result:
            tag = AGAIN  # a view costs nothing, and the storage that it shows may be made anew
        elif len(keys) == 1 and f"v{keys[0]}" in moved and keys[0] not in storages.written:
            tag = HOST
        elif is_result:  # results share what becomes of their op
            tag = node.args[0].meta.get("recompute", AGAIN)
        else:
            tag = AGAIN if runs[node.name] > 1 else SAVE
        node.meta["recompute"] = tag


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [one for one in tree_leaves(node.meta.get("val")) if isinstance(one, torch.Tensor)]


def _calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    return (node for node in gm.graph.nodes if node.op == "call_function")


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_late(node: fx.Node) -> bool:
    return node.meta.get("autograd_backward", False)


def _path(node: fx.Node) -> str:
    return node.meta.get("custom", {}).get("module_fqn", "")
