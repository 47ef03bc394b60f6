"""Every way of data parallelism on four ranks: bits beside eager's, bytes beside the predicted.

Run as ``torchrun --nproc-per-node 4 tests/distributed/ways_worker.py FOLDER CASE...``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.blocks.rematerialized import planned_blocks
from remat.graph_capture.devices.memory_events import measure_rank_peak
from remat.graph_capture.tracing.resident import storage_bytes

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.block_models import Stack, rows
from tests.distributed.launch import join, leave, refused

Found = dict[str, Any]
Wrap = Callable[[nn.Module], nn.Module]
SILENT_AFTER = timedelta(seconds=60)
"""A collective that others do not come to ends with an error."""
LR = 1e-3
MEASURED_STEPS = 30


def over_layers(wrap: Callable[..., Any], **how: Any) -> Wrap:
    """Each layer by itself, then the model."""

    def wrapped(model: nn.Module) -> nn.Module:
        for layer in model.get_submodule("layers").children():
            wrap(layer, **how)
        return wrap(model, **how)

    return wrapped


@cache
def two_by_two() -> DeviceMesh:
    """One for all cases: its groups take long to make."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def by_replicate(**how: Any) -> Wrap:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return over_layers(replicate, **how)


def policy(reduce_dtype: torch.dtype | None = torch.float32) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)


fsdp2 = partial(remat.Sharding, "fsdp2", 4)
in_bf16 = partial(fsdp2, param_dtype="bfloat16", reduce_dtype="float32")
shard = partial(over_layers, fully_shard)
in_buckets = partial(DistributedDataParallel, gradient_as_bucket_view=True)
ddp = DistributedDataParallel


def ways() -> dict[str, tuple[remat.Sharding, Wrap]]:
    """What remat is told, and what is done to the model."""
    mesh, views = two_by_two(), remat.Sharding("ddp", 4, bucket_views=True)
    host = CPUOffloadPolicy(pin_memory=False)
    return {
        "full": (fsdp2(), shard()),
        "full_root_too": (fsdp2(reshard_after_forward=True), shard(reshard_after_forward=True)),
        "keep": (fsdp2(reshard_after_forward=False), shard(reshard_after_forward=False)),
        "part": (fsdp2(reshard_after_forward=2), shard(reshard_after_forward=2)),
        "hsdp": (fsdp2(replicas=2), shard(mesh=mesh)),
        "hsdp_keep": (
            fsdp2(replicas=2, reshard_after_forward=False),
            shard(mesh=mesh, reshard_after_forward=False),
        ),
        "offload": (fsdp2(cpu_offload=True), shard(offload_policy=host)),
        "mixed": (in_bf16(), shard(mp_policy=policy())),
        "mixed_keep": (
            in_bf16(reshard_after_forward=False),
            shard(mp_policy=policy(), reshard_after_forward=False),
        ),
        "mixed_part": (
            in_bf16(reshard_after_forward=2),
            shard(mp_policy=policy(), reshard_after_forward=2),
        ),
        "mixed_hsdp_reduced": (
            fsdp2(replicas=2, param_dtype="bfloat16"),
            shard(mesh=mesh, mp_policy=policy(None)),
        ),
        "replicate": (remat.Sharding("replicate", 4), by_replicate()),
        "ddp": (remat.Sharding("ddp", 4), ddp),
        "ddp_views": (views, in_buckets),
        "ddp_static": (views, partial(in_buckets, static_graph=True)),
        "ddp_first_buckets": (views, partial(in_buckets, find_unused_parameters=True)),
        "zero1": (remat.Sharding("zero1", 4), ddp),
        "zero1_over_two": (
            remat.Sharding("zero1", 4, bucket_views=True, states_over=2),
            in_buckets,
        ),
        "finer_states": (fsdp2(replicas=2, states_over=4), shard(mesh=mesh)),
    }


class SlicedAdamW(torch.optim.AdamW):
    """Updates of this rank's slice of each shard; replicas then gather one another's slices."""

    def __init__(self, model: nn.Module) -> None:
        self.shards = [p for p in model.parameters() if isinstance(p, DTensor)]
        self.group = self.shards[0].device_mesh.get_group(0)
        super().__init__([nn.Parameter(self._own(p)) for p in self.shards], lr=LR)

    def _own(self, tensor: Tensor) -> Tensor:
        flat = tensor.detach().to_local().flatten()  # type: ignore[attr-defined]  # a DTensor
        size = flat.numel() // self.group.size()
        return flat.narrow(0, self.group.rank() * size, size)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for shard_ in self.shards:
            shard_.grad = None

    def step(self, closure: Any = None) -> None:
        slices = self.param_groups[0]["params"]
        for own, shard_ in zip(slices, self.shards, strict=True):
            own.grad = self._own(shard_.grad)
        super().step(closure)
        for own, shard_ in zip(slices, self.shards, strict=True):
            whole = shard_.detach().to_local().flatten()
            dist.all_gather_into_tensor(whole, own.detach().clone(), group=self.group)
            own.grad = None


def optimizer_of(model: nn.Module, sharding: remat.Sharding) -> torch.optim.Optimizer:
    if sharding.kind == "zero1":
        group = two_by_two()["shard"].get_group() if sharding.states_over else None
        return ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=group, lr=LR
        )
    return SlicedAdamW(model) if sharding.states_over else adamw(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def step(model: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    loss: Tensor = model(x)
    loss.backward()
    return loss


def local_gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters()]
    return [getattr(g, "_local_tensor", g) for g in found]


def made() -> tuple[nn.Module, nn.Module, Tensor]:
    """A model, the same on all ranks, a copy, and a batch of this rank's own."""
    torch.manual_seed(0)
    model = Stack()
    torch.manual_seed(1 + dist.get_rank())
    return model, copy.deepcopy(model), rows()


def by_blocks(model: nn.Module, x: Tensor, sharding: remat.Sharding) -> tuple[nn.Module, Found]:
    planned = remat.rematerialize(
        model, (x,), blocks="layers.*", budget="80%", optimizer="adamw", check=False,
        sharding=sharding, group=dist.group.WORLD,
    )  # fmt: skip
    plan = planned_blocks(planned)
    schedules = {path: one.to_json().decode() for path, one in plan.schedules.items()}
    result = {"overhead": plan.result.overhead, "predicted_bytes": plan.result.peak_bytes}
    return planned, {**result, "plan": str(schedules)}


def trained(way: str) -> Found:
    """Three steps of both with their optimizers, then the peak of the plan's."""
    sharding, wrap = ways()[way]
    model, eager, x = made()
    planned, found = by_blocks(model, x, sharding)
    both = [wrap(eager), wrap(planned)]
    optimizers = [adamw(both[0]), optimizer_of(both[1], sharding)]
    same, pairs = True, list[tuple[Tensor, Tensor]]()
    # DDP makes its buckets after the first step, or after the second.
    for seed in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [step(one, x, seed).item() for one in both]
        pairs = list(zip(*map(local_gradients, both), strict=True))
        same &= losses[0] == losses[1] and all(torch.equal(a, b) for a, b in pairs)
        for optimizer in optimizers:
            optimizer.step()
    peak = peak_bytes(both[1], optimizers[1], x, sharding)
    return {**found, "same": same, "n": len(pairs), "measured_bytes": peak}


def peak_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, sharding: remat.Sharding
) -> int:
    """What stays on this rank, and the most that a step takes on top."""
    own: Any = getattr(optimizer, "optim", optimizer)  # of ZeRO-1: what this rank updates
    states = [tensor for state in own.state.values() for tensor in state.values()]
    resident_bytes = storage_bytes([*model.parameters(), *model.buffers(), x, *states])
    if sharding.has_buckets:
        resident_bytes += sum(p.numel() * p.element_size() for p in model.parameters())
    peak = measure_rank_peak(lambda: step(model, x), optimizer.zero_grad, MEASURED_STEPS)
    return resident_bytes + peak


def whole(way: str) -> Found:
    """A model that is rewritten and wrapped as one."""
    sharding, _ = ways()[way]
    model, eager, x = made()
    how: dict[str, Any] = {"reshard_after_forward": sharding.reshard_after_forward}
    if sharding.param_dtype:
        how["mp_policy"] = policy()
    planned = remat.rematerialize(
        model, (x,), budget="75%", solver="cut", sharding=sharding, group=dist.group.WORLD
    )
    both = [fully_shard(eager, **how), fully_shard(planned, **how)]
    losses = [step(one, x).item() for one in both]
    pairs = list(zip(*map(local_gradients, both), strict=True))
    same = losses[0] == losses[1] and all(torch.equal(a, b) for a, b in pairs)
    return {"same": same, "n": len(pairs), "loss": losses[0]}


def stale() -> Found:
    """Parameters are left whole over an update."""
    model, _, x = made()
    planned = shard()(by_blocks(model, x, fsdp2())[0])
    planned.set_reshard_after_backward(False)  # type: ignore[operator]  # an FSDPModule
    optimizer = torch.optim.SGD(planned.parameters(), lr=LR)
    step(planned, x)
    summed = refused(lambda: step(planned, x))
    optimizer.step()
    return {**refused(lambda: step(planned, x)), "summed": summed["error"]}


def summed() -> Found:
    """Parameters are left whole between two batches, and not over updates."""
    model, eager, x = made()
    both = [shard()(eager), shard()(by_blocks(model, x, fsdp2())[0])]
    optimizers = [torch.optim.SGD(one.parameters(), lr=LR) for one in both]
    same, pairs = True, list[tuple[Tensor, Tensor]]()
    for seed in range(4):
        is_last = seed % 2 == 1
        for one in both:
            one.set_reshard_after_backward(is_last)  # type: ignore[operator]
        losses = [step(one, x, seed).item() for one in both]
        same &= losses[0] == losses[1]
        if not is_last:  # shards have the gradients, and are not the model's parameters now
            continue
        pairs = list(zip(*map(local_gradients, both), strict=True))
        same &= all(torch.equal(a, b) for a, b in pairs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"same": same, "n": len(pairs)}


def another_policy() -> Found:
    """A plan for bfloat16 is given a policy that casts to float16."""
    model, _, x = made()
    planned, _ = by_blocks(model, x, in_bf16())
    other = MixedPrecisionPolicy(param_dtype=torch.float16)
    wrapped = shard(mp_policy=other)(planned)
    return refused(lambda: wrapped(x))


def no_policy() -> Found:
    """A plan for bfloat16 is given none."""
    model, _, x = made()
    wrapped = shard()(by_blocks(model, x, in_bf16())[0])
    return refused(lambda: wrapped(x))


def held_in_bfloat16() -> Found:
    """Parameters that no policy casts to bfloat16, as they are."""
    model, _, x = made()
    return refused(lambda: by_blocks(model.to(torch.bfloat16), x, in_bf16()))


OTHERS: dict[str, Callable[[], Found]] = {
    "whole_keep": lambda: whole("keep"),
    "whole_full": lambda: whole("full_root_too"),
    "whole_mixed": lambda: whole("mixed"),
    "stale": stale,
    "summed": summed,
    "another_policy": another_policy,
    "no_policy": no_policy,
    "held_in_bfloat16": held_in_bfloat16,
}


def main(folder: Path, names: list[str]) -> None:
    join(SILENT_AFTER)
    leave(folder, {name: OTHERS.get(name, partial(trained, name))() for name in names})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
