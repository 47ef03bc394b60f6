"""Ranks that compile one graph: the plan of all, and a failure of each in turn at each phase.

Run as ``torchrun --nproc-per-node 2 tests/distributed/one_plan_worker.py FOLDER CASE...``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from remat.compile.graph_context import compiled_plans

sys.path.insert(0, str(Path(__file__).parents[2]))
from remat.compile.plan_search import PlanSearch
from remat.graph_capture.devices.memory_events import measure_rank_peak
from remat.graph_capture.tracing.resident import storage_bytes
from remat.rewriter.inductor import partition
from remat.rewriter.inductor.kernel_costs import with_kernel_costs
from remat.rewriter.inductor.partition import Partitioner
from tests.distributed.failing_worker import (
    Found,
    all_reduced,
    plain,
    planned,
    reduced,
    run_cases,
    said,
)


def wide() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model that DDP cuts into subgraphs."""
    torch.manual_seed(0)
    layers = [module for _ in range(4) for module in (nn.Linear(512, 512), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(1024, 512),)


def in_subgraphs(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)


def one_plan(wrap: Callable[[nn.Module], nn.Module], make: Any, budget: str) -> Found:
    """Plans and bits with costs of no rank kept, of the first alone, and of both.

    Costs of each rank are its own, so that plans made by themselves would differ.
    """
    cache = Path(os.environ["REMAT_CACHE"])
    found: Found = {"plans": [], "same": True, "within": True}
    expected = gradients_of(lambda model: wrap(torch.compile(model)), make)
    for cold in ((0, 1), (1,), ()):
        if dist.get_rank() in cold:
            for file in cache.glob("*"):
                file.unlink()
        before = len(compiled_plans())
        with mock.patch.object(partition, "with_kernel_costs", own_costs):
            trained = gradients_of(lambda model: wrap(by_remat(model, budget)), make)
        found["same"] &= all(torch.equal(a, b) for a, b in zip(expected, trained, strict=True))
        plans = compiled_plans()[before:]
        found["within"] &= all(plan.peak_bytes <= plan.budget_bytes for plan in plans)
        found["recomputed"] = sum(plan.recomputed for plan in plans)
        found["plans"].append([[plan.budget_bytes, str(plan.schedule)] for plan in plans])
        found["plans"][-1] += [repr(plan.schedule and plan.schedule.steps) for plan in plans]
    return found


def own_costs(*args: Any) -> Any:
    """What each rank measures, far from what others do."""
    graph = with_kernel_costs(*args)
    factors = random.Random(dist.get_rank())
    ops = [
        msgspec.structs.replace(op, cost_us=op.cost_us * factors.uniform(1, 9)) for op in graph.ops
    ]
    return msgspec.structs.replace(graph, ops=tuple(ops))


def by_remat(model: nn.Module, budget: str) -> Any:
    options = {"budget": budget, "solver": "cut", "replays": 3}
    return torch.compile(model, backend="remat", options=options)


def gradients_of(wrap: Callable[[nn.Module], Any], make: Any) -> list[Tensor]:
    """Of the second step."""
    torch._dynamo.reset()
    model, args = make()
    step = wrap(model)
    for _ in range(2):
        model.zero_grad()
        step(*args).square().mean().backward()
    return gradients(model)


class Block(nn.Module):
    """Of a class of its own: dynamo compiles no forward of torch's modules behind hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Alike blocks, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def sharded(options: dict[str, Any] | None) -> nn.Module:
    """Its blocks compiled, if there are options, and sharded one by one."""
    torch.manual_seed(0)
    model = Blocks()
    for block in model.blocks:
        if options is not None:
            block.compile(backend="remat", options=options)
        fully_shard(block)
    return fully_shard(model)


class MeanSquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def ddp_buckets() -> Found:
    """The least budget of a model and its loss under DDP, with buckets of three sizes."""
    eager, (x,) = wide()
    eager(x).square().mean().backward()
    found: Found = {}
    for bucket_mb in (2, 4, 25):
        torch._dynamo.reset()
        before = len(compiled_plans())
        model = nn.Sequential(wide()[0], MeanSquare())
        step = DistributedDataParallel(
            by_remat(model, "min"), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        )
        for _ in range(2):
            model.zero_grad()
            step(x).backward()
        pairs = zip(gradients(model), gradients(eager), strict=True)
        error = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        model.zero_grad()
        resident_bytes = storage_bytes([*model.parameters(), x])
        peak_bytes = measure_rank_peak(lambda one=step: one(x).backward(), model.zero_grad, 20)
        plans = compiled_plans()[before:]
        found[str(bucket_mb)] = {
            "error": error,
            "peak_bytes": resident_bytes + peak_bytes,
            "budget_bytes": plans[-1].budget_bytes,
            "plans": [str(plan.schedule) for plan in plans],
        }
    return found


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def fsdp2_blocks() -> Found:
    """The budget of a model whose blocks are compiled and sharded, at two budgets."""
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(1024, 256)
    eager = sharded(None)
    eager(x).backward()
    found: Found = {}
    for budget in ("100%", "min"):
        torch._dynamo.reset()
        before = len(compiled_plans())
        model = sharded({"budget": budget, "solver": "cut", "replays": 3})
        for _ in range(2):
            model.zero_grad()
            model(x).backward()
        pairs = zip(map(local_gradient, model.parameters()), eager.parameters(), strict=True)
        error = max(float((a - local_gradient(p)).norm() / a.norm()) for a, p in pairs)
        model.zero_grad()
        resident_bytes = storage_bytes([*map(local, model.parameters()), x])
        peak_bytes = measure_rank_peak(lambda step=model: step(x).backward(), model.zero_grad, 20)
        plans = compiled_plans()[before:]
        found[budget] = {
            "error": error,
            "peak_bytes": resident_bytes + peak_bytes,
            "budget_bytes": plans[-1].budget_bytes,
            "plans": [repr(plan.schedule and plan.schedule.steps) for plan in plans],
        }
    return found


def local(tensor: Any) -> Tensor:
    return tensor._local_tensor.detach()


def local_gradient(parameter: nn.Parameter) -> Tensor:
    return local(parameter.grad)


def failing_at(where: Any, name: str, rank: int, when: Callable[..., bool] | None = None) -> Any:
    """A context in which `rank` fails where it calls a function; all do where it is below 0."""
    real = getattr(where, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if when is not None and not when(**kwargs):
            return real(*args, **kwargs)
        raise OSError(f"no space left for {name}")

    if rank >= 0 and dist.get_rank() != rank:
        return contextlib.nullcontext()
    return mock.patch.object(where, name, fails)


def compiled_step(wrap: Callable[[nn.Module], nn.Module], make: Any) -> None:
    model, args = make()
    wrap(by_remat(model, "85%"))(*args).square().mean().backward()


def compile_phases(wrap: Callable[[nn.Module], nn.Module], make: Any) -> Found:
    """Any error of a rank that compiles, before the other waits for it in a collective."""
    phases: dict[str, tuple[Any, str, Any]] = {
        "trace": (partition, "build_fused", None),
        "costs": (partition, "with_kernel_costs", None),
        "emit": (partition.FusedStep, "replay", None),
        "forward": (Partitioner, "compile_inner", lambda **how: not how.get("is_backward")),
        "backward": (Partitioner, "compile_inner", lambda **how: how.get("is_backward", False)),
    }
    cases = [(phase, rank) for phase in phases for rank in (0, 1)]
    found: Found = {}
    for phase, rank in [*cases, ("solve", -1)]:
        torch._dynamo.reset()
        how = phases.get(phase, (PlanSearch, "within", None))
        with failing_at(how[0], how[1], rank, how[2]):
            found[f"{phase} {rank}"] = said(lambda: compiled_step(wrap, make))
    return found


def plan_phases() -> Found:
    """Any error of a rank in `rematerialize`; only the first times ops and solves."""
    phases: dict[str, tuple[str, tuple[int, ...]]] = {
        "remat.step_planner.trace": ("capture", (0, 1)),
        "remat.graph_capture.costs.op_costs.measure_costs": ("costs", (0,)),
        "remat.step_planner.solver_shown": ("solve", (0,)),
        "remat.step_planner.rewrite": ("rewrite", (0, 1)),
        "remat.step_planner.require_equal": ("check", (0, 1)),
    }
    model, args = plain()
    found: Found = {}
    for path, (phase, failing) in phases.items():
        for rank in failing:
            module, _, name = path.rpartition(".")
            with failing_at(importlib.import_module(module), name, rank):
                found[f"{phase} {rank}"] = said(lambda: planned(model, args, check=True))
    return found


CASES: dict[str, Callable[[], Found]] = {
    "collectives": lambda: one_plan(lambda model: model, lambda: reduced(all_reduced), "80%"),
    "ddp": lambda: one_plan(in_subgraphs, wide, "85%"),
    "ddp_buckets": ddp_buckets,
    "fsdp2_blocks": fsdp2_blocks,
    "compile_phases": lambda: compile_phases(DistributedDataParallel, plain),
    "compile_phases_collectives": lambda: compile_phases(
        lambda model: model, lambda: reduced(all_reduced)
    ),
    "plan_phases": plan_phases,
}


if __name__ == "__main__":
    run_cases(CASES, Path(sys.argv[1]), sys.argv[2:])
