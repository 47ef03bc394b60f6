"""Tensor and sequence parallel models: what each rank found, in its own file.

Run as ``torchrun --nproc-per-node N tests/distributed/parallel_worker.py FOLDER CASE...``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from remat.ranks.same_order import agreed_rewrite

sys.path.insert(0, str(Path(__file__).parents[2]))
import remat
from remat.graph_capture.errors import RewriteError
from tests.distributed.failing_worker import Found, run_cases, said
from tests.distributed.parallel_models import (
    parallelised,
    prepared,
    same,
    sequence_parallel,
    tensor_parallel,
    trained,
    with_dropout,
)

BUDGETS = ("100%", "75%", "60%", "min")


def mesh_of_all() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def planned(model: nn.Module, args: tuple[Tensor, ...], **how: Any) -> nn.Module:
    asked = {"budget": "75%", "solver": "cut", "group": dist.group.WORLD, **how}
    return remat.rematerialize(model, args, **asked)


def collectives_run(fast: nn.Module) -> int:
    return sum(
        n for name, n in fast.schedule.computations().items() if name.startswith(("all_", "red"))
    )


def whole(plan: Callable[[], dict[str, Any]], p: float = 0.0) -> Found:
    """Two optimizer steps at each budget, checked before them too."""
    mesh = mesh_of_all()
    eager, args = parallelised(mesh, plan, p)
    expected = trained(eager, args)
    found: Found = {"n": len(expected), "hashes": []}
    for budget in BUDGETS:
        model, _ = parallelised(mesh, plan, p)
        fast = planned(model, args, budget=budget)
        found[budget] = same(expected, trained(fast, args))
        found[f"collectives {budget}"] = collectives_run(fast)
        found["hashes"].append(fast.schedule.to_json().decode())
    return found


def in_blocks(plan: Callable[[], dict[str, Any]], p: float = 0.0) -> Found:
    mesh = mesh_of_all()
    eager, args = parallelised(mesh, plan, p)
    expected = trained(eager, args)
    found: Found = {"n": len(expected)}
    for budget in ("100%", "75%", "min"):
        model, _ = parallelised(mesh, plan, p)
        fast = remat.rematerialize(
            model, args, blocks="layers.*", budget=budget, group=dist.group.WORLD
        )
        found[budget] = same(expected, trained(fast, args))
    return found


def with_fsdp2() -> Found:
    """Blocks that are sequence parallel over one dimension of the mesh, sharded over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sharding = remat.Sharding("fsdp2", 2)
    found: Found = {}
    for plan in (tensor_parallel, sequence_parallel):
        eager, args = parallelised(mesh["tp"], plan)
        expected = trained(sharded(eager, mesh["dp"]), args)
        for budget in ("100%", "min"):
            model, _ = parallelised(mesh["tp"], plan)
            fast = remat.rematerialize(
                model,
                args,
                blocks="layers.*",
                budget=budget,
                sharding=sharding,
                group=dist.group.WORLD,
            )
            found[f"{plan.__name__} {budget}"] = same(
                expected, trained(sharded(fast, mesh["dp"]), args)
            )
    return found


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def refused() -> Found:
    """What of DTensors no plan holds, by case."""
    mesh = mesh_of_all()
    model, args = parallelised(mesh, sequence_parallel)
    given = parallelised(mesh, sequence_parallel)[0]
    local = DTensor.from_local(args[0], mesh, [Shard(0)])
    widened = nn.Sequential(nn.Linear(64, 64))
    parallelize_module(widened, mesh, {"0": ColwiseParallel(use_local_output=False)})
    return {
        "no_group": said(lambda: planned(model, args, group=None)),
        "by_inductor": said(lambda: planned(model, args, compile=True)),
        "range": said(lambda: planned(model, args, group=None, dynamic={"x": {0: ("n", 2, 256)}})),
        "argument": said(lambda: planned(given, (local,))),
        "result": said(lambda: planned(widened, args)),
    }


def warm_and_cold() -> Found:
    """The first rank has costs, the second has none; then the other way round."""
    mesh, cache = mesh_of_all(), Path(os.environ["REMAT_CACHE"])
    model, args = parallelised(mesh, tensor_parallel)
    planned(model, args, check=False)
    found: Found = {"plans": []}
    for cold in (1, 0):
        if dist.get_rank() == cold:
            for file in cache.glob("*"):
                file.unlink()
        fast = planned(parallelised(mesh, tensor_parallel)[0], args)
        found["plans"].append(fast.schedule.to_json().decode())
    return found


def another_model() -> Found:
    """The second rank has a model of one layer less."""
    model, args = parallelised(mesh_of_all(), tensor_parallel)
    if dist.get_rank() == 1:
        model.layers = model.layers[:2]
    return said(lambda: planned(model, args))


def failing_check() -> Found:
    """The second rank finds its step wrong, after the first has run all its collectives."""
    from remat import step_planner

    model, args = parallelised(mesh_of_all(), tensor_parallel)
    compare = step_planner.require_equal

    def wrong(*given: Any) -> None:
        compare(*given)
        if dist.get_rank() == 1:
            raise RewriteError("it differs here")

    with mock.patch.object(step_planner, "require_equal", wrong):
        return said(lambda: planned(model, args, check=True))


def other_orders() -> Found:
    """Each rank captures, solves and rewrites by itself; one runs collectives again, one not."""
    model, args = parallelised(mesh_of_all(), sequence_parallel)
    graph = remat.capture(model, args)
    budget = "min" if dist.get_rank() else "100%"
    result = remat.solve(graph, budget, "cut")
    own = said(lambda: agreed_rewrite(model, result.schedule))
    alike = remat.solve(graph, "100%", "cut").schedule
    fast = agreed_rewrite(model, alike)
    other, _ = parallelised(mesh_of_all(), sequence_parallel)
    return {**own, "same": same(trained(other, args), trained(fast, args))}


CASES: dict[str, Callable[[], Found]] = {
    "tp": lambda: whole(tensor_parallel),
    "sp": lambda: whole(sequence_parallel),
    "dropout": lambda: whole(with_dropout, 0.3),
    "tp_blocks": lambda: in_blocks(tensor_parallel),
    "sp_blocks": lambda: in_blocks(sequence_parallel),
    "prepared": lambda: whole(prepared),
    "refused": refused,
    "warm_and_cold": warm_and_cold,
    "another_model": another_model,
    "failing_check": failing_check,
    "other_orders": other_orders,
    "with_fsdp2": with_fsdp2,
}

if __name__ == "__main__":
    run_cases(CASES, Path(sys.argv[1]), sys.argv[2:])
