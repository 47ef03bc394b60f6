"""A training loop that follows a plan for a cluster: two stages, each sharded over two ranks.

Plan, then train on four processes of this machine:

    remat cluster examples/train_cluster.py:factory --gpus 4 --batch 64 --seq 64 --pp 2 --tp 1
        --shard 2 --microbatch 4 --virtual-stages 1 --budget 4500KiB -o plan.json
    torchrun --nproc-per-node 4 examples/train_cluster.py plan.json

Parameters are held in float32 and computed with in bfloat16, as the plan counts.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from llama import Llama, Sizes, next_token_loss
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import remat
from remat.graph_capture.devices.memory_events import measure_rank_peak
from remat.graph_capture.tracing.resident import storage_bytes

STEPS, SEQUENCES, MICROBATCH = 10, 32, 4
SIZES = Sizes(layers=8, width=64, heads=4, kv_heads=2, hidden=192, seq=64, vocab=256)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def factory(batch: int = 1, seq: int = SIZES.seq) -> dict[str, Any]:
    """The model and a batch, as `remat cluster` takes them."""
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    return {"model": Llama(SIZES), "args": (ids,), "loss_fn": next_token_loss, "target": ids}


def tokens_of(replica: int) -> Tensor:
    """Random tokens, different on each data parallel rank; the model learns them by heart."""
    generator = torch.Generator().manual_seed(replica)
    return torch.randint(SIZES.vocab, (SEQUENCES, SIZES.seq), generator=generator)


def train(part: remat.cluster.ClusterPart, tokens: Tensor) -> None:
    """`STEPS` steps; a rank of the last stage prints its loss."""
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses: list[Tensor] = []
        part.schedule.step(tokens, target=tokens, losses=losses)
        optimizer.step()
        if losses and dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}", flush=True)


def peak_bytes(part: remat.cluster.ClusterPart, tokens: Tensor) -> int:
    """Measured peak of a step on this rank, without optimizer states and the batch."""
    held = [
        tensor for module in part.modules for tensor in (*module.parameters(), *module.buffers())
    ]
    received = sum(stage.received_bytes for stage in part.schedule.stages)

    def step() -> None:
        part.schedule.step(tokens, target=tokens)

    return storage_bytes(held) + received + measure_rank_peak(step, part.zero_grad)


def main() -> None:
    """Apply the plan, train, and compare the peaks."""
    dist.init_process_group("gloo")
    plan = sys.argv[1]
    mesh = remat.cluster.cluster_mesh(plan)
    tokens = tokens_of(mesh.get_local_rank("dp_shard"))
    torch.manual_seed(0)  # all ranks build the same model
    part = remat.cluster.parallelize(
        Llama(SIZES), plan, mesh, (tokens[:MICROBATCH],), loss_fn=next_token_loss,
        target=tokens[:MICROBATCH], mp_policy=MIXED,
    )  # fmt: skip
    train(part, tokens)
    measured_bytes = peak_bytes(part, tokens)
    assert part.peak_bytes is not None
    overhead = sum(part.overhead.values()) / len(part.overhead)
    print(
        f"rank {dist.get_rank()}: predicted peak {part.peak_bytes / 2**20:.2f} MiB, measured "
        f"{measured_bytes / 2**20:.2f} MiB, overhead of blocks {overhead:.1%}",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
