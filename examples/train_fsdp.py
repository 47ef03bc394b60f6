"""A training loop over the example GPT whose blocks are rewritten, then sharded by FSDP2.

Run it as `torchrun --nproc-per-node 2 examples/train_fsdp.py`. The first rank plans for all. Only
the line with `remat.rematerialize` differs from a loop without remat: what it returns is
wrapped as the model would be. Sizes are those of `gpt.py`, smaller unless the environment says.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import remat
from remat.graph_capture.devices.memory_events import measure_rank_peak
from remat.graph_capture.tracing.resident import storage_bytes

STEPS = 20
BUDGET = os.environ.get("GPT_BUDGET", "60%")
SMALLER = {"LAYERS": "4", "WIDTH": "128", "HEADS": "4", "SEQ": "64", "VOCAB": "256"}


def batch_of(rank: int, vocab: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Random tokens and targets, different on each rank; the model learns them by heart."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(vocab, (shape[0], shape[1] + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """`STEPS` steps; prints the loss, averaged over the ranks."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item() / dist.get_world_size():.4f}", flush=True)


def peak_bytes(
    model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
) -> int:
    """Measured peak of a step on this rank: what stays, and the most that comes on top."""
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    resident_bytes = storage_bytes([*model.parameters(), *model.buffers(), *batch, *states])

    def step() -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        return loss

    return resident_bytes + measure_rank_peak(step, optimizer.zero_grad)


def main() -> None:
    """Plan, shard, train, and compare the peaks."""
    for name, size in SMALLER.items():
        os.environ.setdefault(f"GPT_{name}", size)
    from gpt import Sizes, factory

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    built = factory()
    batch = batch_of(rank, Sizes.from_environment().vocab, built["args"][0].shape)
    model = remat.rematerialize(
        built["model"], batch, blocks="blocks.*", budget=BUDGET, optimizer="adamw",
        sharding=remat.Sharding("fsdp2", world_size), group=dist.group.WORLD,
    )  # fmt: skip
    plan = remat.plans(model)[0]
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, batch, optimizer)
    measured_bytes = peak_bytes(model, batch, optimizer)
    print(
        f"rank {rank}: predicted peak {plan.peak_bytes / 2**20:.2f} MiB, "
        f"measured {measured_bytes / 2**20:.2f} MiB, overhead {plan.overhead:.1%}",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
