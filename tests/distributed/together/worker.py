"""Levers together on two ranks: five AdamW steps over three batches, beside the same around eager.

Run as ``torchrun --nproc-per-node 2 tests/distributed/together/worker.py FOLDER CASE...``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.blocks.rematerialized import planned_blocks
from remat.caches.per_shape_plans import planned_modules
from remat.graph_capture.tracing.resident import storage_bytes
from remat.schedules.schedule import Offload

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.block_models import ROWS, WIDTH, Stack, Words
from tests.distributed.launch import join, leave, refused
from tests.distributed.worker import Found, lowest_peak, shard_blocks, sharding

N_STEPS = 5
SIZES = ((ROWS, 100, 180), (130, ROWS, 90))
"""Rows of each rank's batches."""
DYNAMIC = {"x": {0: ("rows", 64, ROWS)}}
Batches = tuple[tuple[Tensor, ...], ...]
Wrap = Callable[[nn.Module], nn.Module]


def stack(sizes: tuple[int, ...] = (ROWS,) * 3) -> tuple[nn.Module, Batches]:
    torch.manual_seed(0)
    model = Stack()
    torch.manual_seed(1 + dist.get_rank())
    return model, tuple((torch.randn(n, WIDTH),) for n in sizes)


def words() -> tuple[nn.Module, Batches]:
    torch.manual_seed(0)
    model = Words()
    torch.manual_seed(1 + dist.get_rank())
    batches = [(torch.randn(ROWS, WIDTH), torch.randint(4096, (ROWS,))) for _ in range(3)]
    return model, tuple(batches)


def varying() -> tuple[nn.Module, Batches]:
    return stack(SIZES[dist.get_rank()])


def local(tensor: Any) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def trained_alike(
    eager: nn.Module, plan: nn.Module, batches: Batches, own: Any = None,
    before: Callable[[int], None] = lambda _: None,
) -> bool:  # fmt: skip
    """Whether losses and then parameters are the same; `own` is stepped in backward."""
    optimizers = torch.optim.AdamW(eager.parameters()), own or torch.optim.AdamW(plan.parameters())
    for number in range(N_STEPS):
        before(number)
        losses: list[Tensor] = []
        for model, optimizer in zip((eager, plan), optimizers, strict=True):
            torch.manual_seed(number)
            losses.append(model(*batches[number % 3]))
            losses[-1].backward()
            if optimizer is not own:
                optimizer.step()
                optimizer.zero_grad()
        if not torch.equal(*losses) or any(p.grad is not None for p in plan.parameters()):
            return False
    pairs = zip(eager.parameters(), plan.parameters(), strict=True)
    return all(torch.equal(local(a), local(b)) for a, b in pairs)


def measured(plan: nn.Module, args: tuple[Tensor, ...], peak_bytes: int, own: Any = None) -> Found:
    """The peak of a step, beside the predicted one."""
    held = [one for state in (own.state.values() if own else ()) for one in state.values()]
    tensors = [*plan.parameters(), *plan.buffers(), *args, *held]
    resident_bytes = storage_bytes([local(one) for one in tensors])
    found_bytes = resident_bytes + lowest_peak(plan, args, peak_bytes - resident_bytes)
    return {"measured_bytes": found_bytes, "predicted_bytes": peak_bytes}


def blocks(
    made: Callable[[], tuple[nn.Module, Batches]], budget: str, wrap: Wrap = shard_blocks,
    kind: Any = "fsdp2", **levers: Any,
) -> tuple[nn.Module, nn.Module, Batches, Any]:  # fmt: skip
    """Eager and planned, both wrapped; their batches; the plan."""
    model, batches = made()
    eager = copy.deepcopy(model)
    if "optimizer_in_backward" in levers:
        levers["optimizer_in_backward"].add_param_group({"params": list(model.parameters())})
    fast = remat.rematerialize(
        model, batches[0], blocks="layers.*", budget=budget, check=False, verbose=False,
        sharding=sharding(kind), group=dist.group.WORLD, **levers,
    )  # fmt: skip
    return wrap(eager), wrap(fast), batches, planned_blocks(fast)


def sizes_of_ddp() -> Found:
    model, batches = varying()
    eager = DistributedDataParallel(copy.deepcopy(model))
    fast = remat.rematerialize(
        model, batches[0], budget="75%", solver="cut", check=False, verbose=False, dynamic=DYNAMIC,
        sharding=sharding("ddp"), group=dist.group.WORLD,
    )  # fmt: skip
    family = type(fast).family
    same = trained_alike(eager, DistributedDataParallel(fast), batches)
    return {"same": same, "members": len(family.members), "plan": family.to_json().decode()}


def sizes_without_a_batch(kind: Any, wrap: Wrap) -> Found:
    model, batches = varying()
    eager = wrap(copy.deepcopy(model))
    fast = remat.rematerialize(
        model, budget="75%", solver="cut", check=False, verbose=False, dynamic="auto",
        sharding=sharding(kind), group=dist.group.WORLD,
    )  # fmt: skip
    same = trained_alike(eager, wrap(fast), batches)
    ranges = [str(type(plan).family.symbols) for plan in planned_modules(fast)]
    return {"same": same, "plan": ranges}


def sizes_of_blocks() -> Found:
    eager, plan, batches, known = blocks(varying, "75%", dynamic=DYNAMIC)
    members = known.family.members
    same = trained_alike(eager, plan, batches)
    smallest = members[0]
    args = (torch.randn(smallest.corners[0]["rows"], WIDTH),)
    return {
        **measured(plan, args, smallest.peak_bytes),
        "same": same, "members": len(members), "plan": known.family.to_json().decode(),
    }  # fmt: skip


def head_of_blocks() -> Found:
    eager, plan, batches, known = blocks(words, "45%", split="exact")
    same = trained_alike(eager, plan, batches)
    found = measured(plan, batches[0], known.result.peak_bytes)
    return {**found, "same": same, "chunks": known.head.chunks}


def head_of_ddp() -> Found:
    model, batches = words()
    eager = DistributedDataParallel(copy.deepcopy(model))
    fast = remat.rematerialize(
        model, batches[0], budget="60%", split="exact", check=False, verbose=False,
        sharding=sharding("ddp"), group=dist.group.WORLD,
    )  # fmt: skip
    chunks = [one.chunks for one in fast.schedule.chunks]
    same = trained_alike(eager, DistributedDataParallel(fast), batches)
    return {"same": same, "chunks": chunks[0], "plan": fast.schedule.to_json().decode()}


def updates_of_blocks() -> Found:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.empty(0))])
    eager, plan, batches, known = blocks(stack, "80%", optimizer_in_backward=optimizer)
    same = trained_alike(eager, plan, batches, optimizer)
    found = measured(plan, batches[0], known.result.peak_bytes, optimizer)
    return {**found, "same": same, "states": len(optimizer.state)}


def host_of_blocks() -> Found:
    eager, plan, batches, known = blocks(stack, "min", host="64MiB")
    same = trained_alike(eager, plan, batches)
    found = measured(plan, batches[0], known.result.peak_bytes)
    copies = sum(isinstance(one, Offload) for one in known.result.schedule.steps)
    return {**found, "same": same, "copies": copies}


def numbers_of_blocks() -> Found:
    names = [f"layers.{i}.p" for i in range(4)]
    eager, plan, batches, _ = blocks(stack, "80%", float_inputs=names)

    def other_rate(number: int) -> None:
        for layer in (*eager.get_submodule("layers"), *plan.get_submodule("layers")):
            layer.p = 0.1 + number / 8

    return {"same": trained_alike(eager, plan, batches, before=other_rate)}


def pins_of_blocks() -> Found:
    eager, plan, batches, known = blocks(stack, "80%", keep="*.up", recompute="layers.1.norm")
    ran = {path: one.computations() for path, one in known.schedules.items()}
    return {
        "same": trained_alike(eager, plan, batches),
        "kept": max(one["addmm"] for one in ran.values()),
        "again": ran["layers.1"]["native_layer_norm"],
    }


def updates_of_ddp() -> Found:
    model, batches = stack()
    optimizer = torch.optim.AdamW(model.parameters())
    return refused(
        lambda: remat.rematerialize(
            model, batches[0], budget="80%", optimizer_in_backward=optimizer,
            sharding=sharding("ddp"), group=dist.group.WORLD,
        )
    )  # fmt: skip


CASES: dict[str, Callable[[], Found]] = {
    "sizes_of_ddp": sizes_of_ddp,
    "ddp_without_a_batch": lambda: sizes_without_a_batch("ddp", DistributedDataParallel),
    "fsdp2_without_a_batch": lambda: sizes_without_a_batch("fsdp2", shard_whole),
    "sizes_of_blocks": sizes_of_blocks,
    "head_of_blocks": head_of_blocks,
    "head_of_ddp": head_of_ddp,
    "updates_of_blocks": updates_of_blocks,
    "host_of_blocks": host_of_blocks,
    "numbers_of_blocks": numbers_of_blocks,
    "pins_of_blocks": pins_of_blocks,
    "updates_of_ddp": updates_of_ddp,
}


def shard_whole(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


def main(folder: Path, names: list[str]) -> None:
    join()
    leave(folder, {name: CASES[name]() for name in names or CASES})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
