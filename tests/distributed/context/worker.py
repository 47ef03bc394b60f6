"""Parts of a model on context parallel ranks, beside the same wrappers around eager blocks.

Run as ``torchrun --nproc-per-node N tests/distributed/context/worker.py FOLDER CASE...``, with the
plans in the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import remat
from remat.cluster.apply import parallelize
from remat.cluster.apply.stage_parts import rank_parts
from remat.graph_capture.devices.memory_events import measure_regions
from remat.graph_capture.distributed.dtensors import local_part

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.distributed.context.models import (
    SEQ,
    Decoder,
    Learned,
    OwnRotation,
    class_loss,
    few_heads,
    one_head,
)
from tests.distributed.launch import join, leave, refused
from tests.distributed.optimizer_steps import alike, held_bytes, trained
from tests.distributed.pipeline.models import VOCAB, token_loss

FOLDER = Path(sys.argv[1])
MICRO, MICROBATCHES, STEPS, MEASURED = 2, 4, 2, 30
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Found = dict[str, Any]


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batch(seed: int, sequences: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randint(VOCAB, (sequences, SEQ))


def part(
    plan: str, kind: Callable[[], nn.Module], *, eager: bool = False, loss_fn: Any = token_loss,
    ids: Tensor | None = None, target: Tensor | None = None, **how: Any,
) -> Any:  # fmt: skip
    """This rank's part; blocks as they are where `eager`."""
    file = FOLDER / plan
    one = batch(0, MICRO) if ids is None else ids
    asked = {"loss_fn": loss_fn, "target": one if target is None else target} | how

    def left(*args: Any, **kwargs: Any) -> Any:
        return rank_parts(*args, **kwargs, eager=eager)

    with mock.patch.object(parallelize, "rank_parts", left):
        return remat.cluster.parallelize(
            made(kind).to(torch.bfloat16 if "mp_policy" not in how else torch.float32),
            file, remat.cluster.cluster_mesh(file, "cpu"), (one,), **asked,
        )  # fmt: skip


def replica(plan: str) -> int:
    mesh = remat.cluster.cluster_mesh(FOLDER / plan, "cpu")
    return mesh.get_local_rank("dp_shard")


def batches(seed: int) -> list[Tensor]:
    return [batch(10 * seed + 1 + step, MICRO * MICROBATCHES) for step in range(STEPS)]


def beside_eager(plan: str, kind: Callable[[], nn.Module], **how: Any) -> Found:
    """A part beside the same wrappers around eager."""
    return beside(plan, kind, None, **how)


def beside_both(plan: str, kind: Callable[[], nn.Module]) -> Found:
    """A part beside the same wrappers around eager, and beside one rank with all tokens."""
    found: Found = {}

    def look(one: Any, ids: Tensor) -> None:
        found["alone"] = beside_one_rank(one, ids, kind)

    return beside(plan, kind, look, mp_policy=MIXED) | found


def beside(
    plan: str, kind: Callable[[], nn.Module], look: Callable[[Any, Tensor], None] | None,
    **how: Any,
) -> Found:  # fmt: skip
    seed = replica(plan)
    eager = trained(part(plan, kind, eager=True, **how), batches(seed))
    fast = part(plan, kind, **how)
    found = trained(fast, batches(seed), look)
    said: Found = {"same": alike(eager, found), "n": len(found), "overhead": fast.overhead}
    if fast.peak_bytes is not None:
        said |= {"predicted_bytes": fast.peak_bytes, "measured_bytes": peak_between(fast)}
    return said


def peak_between(one: Any) -> tuple[int, int]:
    """What parameters, receive buffers and a step hold: the least and the most it may have been.

    The profiler does not see what gloo's threads free. That is what a step seems to leave beside
    its gradients; it was freed before the peak or behind it. The step with the least of it counts.
    """
    ids, found = batch(1, MICRO * MICROBATCHES), list[tuple[int, int]]()
    for _ in range(MEASURED):
        one.zero_grad()
        regions = measure_regions([lambda: one.schedule.step(ids, target=ids)])
        grads = (local_part(p.grad) for p in one.parameters() if p.grad is not None)
        left = regions[0].final_bytes - sum(t.numel() * t.element_size() for t in grads)
        found.append((left, regions[0].peak_bytes))
    one.zero_grad()
    stays = held_bytes(one)
    unseen, peak = min(found)
    return stays + peak - unseen, stays + peak


def beside_one_rank(fast: Any, ids: Tensor, kind: Callable[[], nn.Module]) -> Found:
    """How far gradients are from those of the model on one rank, over their largest element."""
    alone = made(kind).to(torch.bfloat16)
    off: dict[str, float] = {}
    for one in ids.chunk(MICROBATCHES):
        (token_loss(alone(one), one) / MICROBATCHES).backward()
    expected = dict(alone.named_parameters())
    for name, p in fast.named_parameters():
        assert p.grad is not None
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        of_one = expected[name].grad
        assert of_one is not None
        off[name] = float((grad - of_one).abs().max() / of_one.abs().max())
    # Attention does not depend on a number that all keys have in common.
    found = {name: far for name, far in off.items() if not name.endswith("k.bias")}
    return {"off": max(found.values()), "n": len(found)}


def tensor_plan() -> Found:
    """Borders are split along the sequence; the head gathers it."""
    return {
        "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm": SequenceParallel(),
        "layers.*.[qkv]": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.out": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.mlp_norm": SequenceParallel(),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def refusals() -> Found:
    def said(kind: Callable[[], nn.Module] = Decoder, **how: Any) -> dict[str, str]:
        return refused(lambda: part("cp2.json", kind, mp_policy=MIXED, **how))

    one = batch(0, MICRO)
    return {
        "own_rotation": said(lambda: Decoder(OwnRotation)),
        "target": said(loss_fn=class_loss, target=one[:, 0]),
        "short": said(ids=one[:, : SEQ // 2]),
    }


CASES: dict[str, Callable[[], Found]] = {
    "cp2": lambda: beside_both("cp2.json", Decoder),
    "learned": lambda: beside_both("learned.json", Learned),
    "cp4": lambda: beside_both("cp4.json", Decoder),
    "ring2": lambda: beside_both("ring2.json", one_head),
    "ring2of2": lambda: beside_both("ring2of2.json", few_heads),
    "refused": refusals,
    "dp2": lambda: beside_eager("dp2cp2.json", Decoder, mp_policy=MIXED),
    "pp2": lambda: beside_eager("pp2cp2.json", Decoder),
    "tp2": lambda: beside_eager("cp2tp2.json", Decoder, tp_plan=tensor_plan()),
}

if __name__ == "__main__":
    join()
    leave(FOLDER, {name: CASES[name]() for name in sys.argv[2:] or CASES})
