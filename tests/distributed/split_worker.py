"""Zero bubble schedules of torch's over eager and over rewritten stages: what each rank found.

Run as ``torchrun --nproc-per-node 2 tests/distributed/split_worker.py FOLDER CASE...``.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))
import remat
from remat.cluster.apply.split_backward import SplitBackward, split_backward
from remat.cluster.stepping import RingStage
from remat.rewriter.user_module.module import RematModule
from tests.distributed.launch import join, leave

# Torch 2.11 would connect a rank with itself, where two stages are on it; gloo fails at that.
TorchsStage = PipelineStage if torch.__version__ >= "2.12" else RingStage

WIDTH, ROWS, N_MICROBATCHES, N_STEPS = 16, 8, 4, 2
SCHEDULES: dict[str, tuple[Any, bool]] = {
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, False),
    "ZBVZeroBubble": (ScheduleZBVZeroBubble, True),
    "DualPipeV": (ScheduleDualPipeV, True),
}
"""The class, and whether the stages of a rank stand in a V."""
PRODUCTS = ("aten.mm.default", "aten.addmm.default")
OF_PLANS = (*PRODUCTS, "aten.linear.default")  # which runs as one of them


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class Stage(nn.Module):
    """Two blocks, and on the last stage a head outside of them."""

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WIDTH) if is_last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(op)] += 1
        return op(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.found[name] for name in PRODUCTS)


def stages(name: str) -> dict[int, Stage]:
    """The eager stages of this rank; all ranks make all, so that each has the same."""
    torch.manual_seed(0)
    rank, n = dist.get_rank(), dist.get_world_size()
    made = [Stage(is_last=k == 2 * n - 1) for k in range(2 * n)]
    mine = (rank, 2 * n - 1 - rank) if SCHEDULES[name][1] else (rank, rank + n)
    return {k: made[k] for k in mine}


def rewritten(stage: Stage, number: int, how: str) -> nn.Module:
    x = torch.randn(ROWS, WIDTH, requires_grad=number > 0)
    if how == "blocks":
        return remat.rematerialize(
            stage, (x,), blocks="layers.*", budget="100%", accumulate=True, check=False
        )
    return remat.rematerialize(stage, (x,), budget=how, accumulate=True, check=False, solver="cut")


def trained(
    name: str,
    modules: dict[int, nn.Module],
    splits: dict[int, SplitBackward],
    n_steps: int = N_STEPS,
) -> Any:
    """Products of the last step; gradients of all steps, and parameters after them."""
    n_stages = 2 * dist.get_world_size()
    made = [
        TorchsStage(
            module, k, n_stages, torch.device("cpu"),
            dw_builder=splits[k].dw_builder if splits else None,
        )
        for k, module in modules.items()
    ]  # fmt: skip
    loss_fn: Callable[[Tensor, Tensor], Tensor] = functional.mse_loss
    schedule = SCHEDULES[name][0](made, n_microbatches=N_MICROBATCHES, loss_fn=loss_fn)
    parameters = [p for module in modules.values() for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.manual_seed(5)
    x, target = (torch.randn(ROWS * N_MICROBATCHES, WIDTH) for _ in range(2))
    found: list[Tensor] = []
    for step in range(n_steps):
        optimizer.zero_grad()
        torch.manual_seed(step + 10 * dist.get_rank())
        with Products() as products:
            schedule.step(
                *((x,) if 0 in modules else ()),
                **({"target": target} if n_stages - 1 in modules else {}),
            )
        found += [local(p.grad).clone() for p in parameters if p.grad is not None]
        optimizer.step()
    return products.total, [*found, *(local(p).detach() for p in parameters)]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded(modules: dict[int, nn.Module]) -> dict[int, nn.Module]:
    """The same under FSDP2, over this rank alone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("pp", "dp"))["dp"]
    for module in modules.values():
        for layer in module.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    return modules


def compared_under_fsdp(name: str) -> dict[str, Any]:
    """Blocks that are rewritten and sharded over this rank, beside eager that is not.

    One step: after it torch's own stage leaves parameters whole, which a second forward refuses.
    Around eager, torch 2.13 loses gradients of weights there.
    """
    eager = stages(name)
    plans = sharded({k: rewritten(copy.deepcopy(one), k, "blocks") for k, one in eager.items()})
    _, tensors = trained(name, dict(eager), {}, 1)
    _, found = trained(name, plans, {k: split_backward(p) for k, p in plans.items()}, 1)
    same = len(found) == len(tensors) and all(map(torch.equal, found, tensors))
    return {"same": same, "n": len(tensors)}


def compared(name: str) -> dict[str, Any]:
    """Eager, and plans whose backward is split."""
    eager = stages(name)
    expected, tensors = trained(name, copy.deepcopy(eager), {})
    said: dict[str, Any] = {"eager": expected, "n": len(tensors)}
    for how in ("100%", "min", "blocks"):
        plans = {k: rewritten(copy.deepcopy(stage), k, how) for k, stage in eager.items()}
        splits = {k: split_backward(plan) for k, plan in plans.items()}
        planned = N_MICROBATCHES * sum(_planned(plan) for plan in plans.values())
        products, found = trained(name, plans, splits)
        same = len(found) == len(tensors) and all(map(torch.equal, found, tensors))
        said[how] = {"same": same, "products": products, "planned": planned}
    return said


def _planned(plan: nn.Module) -> int:
    """Products of forward and of both parts of backward, for one microbatch."""
    found = 0
    for block in plan.modules():
        if isinstance(block, RematModule) and block._remat_split:
            graphs = block._remat_split.code.graphs
            parts = (block.forward_module, graphs.inputs, graphs.weights)
            found += sum(str(n.target) in OF_PLANS for part in parts for n in part.graph.nodes)
    return found


if __name__ == "__main__":
    join()
    said: dict[str, dict[str, Any]] = {}
    for case in sys.argv[2:]:
        schedule, _, wrapper = case.partition("+")
        said[case] = (compared_under_fsdp if wrapper else compared)(schedule)
    leave(Path(sys.argv[1]), said)
