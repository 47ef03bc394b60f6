"""Models whose modules are split over ranks, and what trains them beside eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from remat.graph_capture.distributed.dtensors import local_part

WIDTH, ROWS, LAYERS = 64, 256, 3
LR = 1e-3


class Block(nn.Module):
    """A residual block of two linear maps."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(p)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class Blocks(nn.Module):
    """Alike blocks, and a mean of squares."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(p) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def tensor_parallel() -> dict[str, Any]:
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def sequence_parallel() -> dict[str, Any]:
    """Rows are sharded between the linear maps of one block and those of the next."""
    return {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }


def prepared() -> dict[str, Any]:
    """Rows are gathered as a block begins, and each rank keeps its own as it ends."""
    return {
        **tensor_parallel(),
        "": (
            PrepareModuleInput(
                input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
            ),
            PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Shard(0), use_local_output=True
            ),
        ),
    }


def with_dropout() -> dict[str, Any]:
    """Dropout of a DTensor: ranks draw alike on a CPU."""
    plan = sequence_parallel()
    plan["down"] = RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
    plan["drop"] = SequenceParallel(sequence_dim=0, use_local_output=True)
    return plan


def parallelised(
    mesh: DeviceMesh, plan: Callable[[], dict[str, Any]], p: float = 0.0
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The same model on all ranks, and a batch: of this rank's own rows where they are sharded."""
    torch.manual_seed(0)
    model = Blocks(p)
    for layer in model.layers:
        styles = plan()
        around = styles.pop("", ())
        parallelize_module(layer, mesh, styles)
        for style in around:
            parallelize_module(layer, mesh, style)
    torch.manual_seed(1 if plan is tensor_parallel else 1 + dist.get_rank())
    return model, (torch.randn(ROWS, WIDTH),)


def trained(
    model: nn.Module, args: tuple[Tensor, ...], seed: int = 0, steps: int = 2
) -> list[Tensor]:
    """Losses, gradients and parameters of some optimizer steps, of this rank's parts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    found: list[Tensor] = []
    for step in range(steps):
        torch.manual_seed(seed + step)
        loss = model(*args)
        loss.backward()
        grads = [local_part(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        state = [local_part(p.detach()).clone() for p in model.parameters()]
        found += [loss.detach().clone(), *grads, *state]
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
