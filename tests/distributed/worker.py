"""What each rank runs: every case once, with what it found in a file of its own.

Run as ``torchrun --nproc-per-node N tests/distributed/worker.py FOLDER CASE...``.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.blocks.rematerialized import planned_blocks
from remat.graph_capture.devices.memory_events import RUNS, measure_rank_peak
from remat.graph_capture.tracing.resident import storage_bytes
from remat.ranks.collective_call import CollectiveCall

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.block_models import Stack, rows
from tests.distributed.launch import join, leave, refused

Found = dict[str, Any]
N_STEPS = 3
ROUND = 8
"""Steps that are measured before the ranks agree on whether to measure more."""


def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The same model on all ranks, and a batch of this rank's own."""
    torch.manual_seed(0)
    model = Stack()
    torch.manual_seed(1 + dist.get_rank())
    return model, (rows(),)


def sharding(kind: Any, **how: str) -> remat.Sharding:
    return remat.Sharding(kind, dist.get_world_size(), **how)


def step(model: nn.Module, args: tuple[Tensor, ...], seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    loss: Tensor = model(*args)
    loss.backward()
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {name: getattr(g, "_local_tensor", g).detach().clone() for name, g in found.items()}


def compared(
    eager: nn.Module, plan: nn.Module, args: tuple[Tensor, ...], predicted_bytes: int
) -> Found:
    """Losses and gradients of a few steps of both, and the measured peak of the plan's."""
    same = True
    for seed in range(N_STEPS):
        losses = [step(model, args, seed).item() for model in (eager, plan)]
        expected, found = gradients(eager), gradients(plan)
        same = same and losses[0] == losses[1] and expected.keys() == found.keys()
        same = same and all(torch.equal(expected[name], found[name]) for name in expected)
        for model in (eager, plan):
            model.zero_grad()
    resident_bytes = storage_bytes([*plan.parameters(), *plan.buffers(), *args])
    if isinstance(plan, DistributedDataParallel):
        resident_bytes += sum(p.numel() * p.element_size() for p in plan.parameters())
    peak_bytes = lowest_peak(plan, args, predicted_bytes - resident_bytes)
    return {"same": same, "n": len(expected), "measured_bytes": resident_bytes + peak_bytes}


def lowest_peak(plan: nn.Module, args: tuple[Tensor, ...], predicted_bytes: int) -> int:
    """The lowest peak of `RUNS` steps, or of fewer that leave no rank in doubt.

    That is when eight steps have had the lowest of the eight before, and not above the prediction.
    """
    lowest: list[int] = []
    for _ in range(RUNS // ROUND):
        lowest.append(measure_rank_peak(lambda: step(plan, args), plan.zero_grad, ROUND))
        is_settled = lowest[-1:] == lowest[-2:-1] and min(lowest) <= 1.01 * predicted_bytes
        agreed = torch.tensor(is_settled, dtype=torch.int32)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        if agreed.item():
            break
    return min(lowest)


def whole(kind: Any, wrap: Callable[[nn.Module], nn.Module]) -> Found:
    model, args = made()
    eager = wrap(copy.deepcopy(model))
    results: list[Any] = []

    from_first = CollectiveCall.from_first

    def kept(self: CollectiveCall, *given: Any) -> Any:
        results.append(from_first(self, *given))
        return results[-1]

    with mock.patch.object(CollectiveCall, "from_first", kept):
        fast = remat.rematerialize(
            model, args, budget="75%", solver="cut", check=False,
            sharding=sharding(kind), group=dist.group.WORLD,
        )  # fmt: skip
    plan = results[0].result
    found = compared(eager, wrap(fast), args, plan.peak_bytes)
    said = {"predicted_bytes": plan.peak_bytes, "plan": fast.schedule.to_json().decode()}
    return {**found, **said, "overhead": plan.overhead}


def blocks(kind: Any, wrap: Callable[[nn.Module], nn.Module], budget: str = "80%") -> Found:
    model, args = made()
    eager = wrap(copy.deepcopy(model))
    fast = remat.rematerialize(
        model, args, blocks="layers.*", budget=budget, check=False,
        sharding=sharding(kind), group=dist.group.WORLD,
    )  # fmt: skip
    plan = planned_blocks(fast)
    found = compared(eager, wrap(fast), args, plan.result.peak_bytes)
    said = {"predicted_bytes": plan.result.peak_bytes, "overhead": plan.result.overhead}
    schedules = {path: one.to_json().decode() for path, one in plan.schedules.items()}
    return {**found, **said, "plan": json.dumps(schedules)}


def shard_blocks(model: nn.Module) -> nn.Module:
    for layer in model.get_submodule("layers").children():
        fully_shard(layer)
    return fully_shard(model)


def another_step() -> Found:
    """The last rank has a shorter batch."""
    model, (x,) = made()
    if dist.get_rank() == dist.get_world_size() - 1:
        x = x[:32]
    return refused(lambda: remat.rematerialize(model, (x,), budget="75%", group=dist.group.WORLD))


def too_little() -> Found:
    """What the first rank raises is raised on all."""
    model, args = made()
    return refused(
        lambda: remat.rematerialize(
            model, args, blocks="layers.*", budget="10KiB", group=dist.group.WORLD
        )
    )


def sharded_first() -> Found:
    model, args = made()
    return refused(lambda: remat.rematerialize(shard_blocks(model), args, budget="75%"))


def ddp_first() -> Found:
    """Its gradients would be reduced in the first step alone."""
    model, args = made()
    return refused(lambda: remat.rematerialize(DistributedDataParallel(model), budget="75%")(*args))


def sharded_inside() -> Found:
    """A module within a rewritten block is sharded, and the block is not."""
    model, args = made()
    fast = remat.rematerialize(model, args, blocks="layers.*", budget="80%", check=False)
    fully_shard(fast.get_submodule("layers.0.up"))
    return refused(lambda: fast(*args))


def cast_later() -> Found:
    """FSDP2 casts what is planned for float32."""
    model, args = made()
    fast = remat.rematerialize(model, args, blocks="layers.*", budget="80%", check=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in fast.get_submodule("layers").children():
        fully_shard(block, mp_policy=policy)
    fully_shard(fast, mp_policy=policy)
    return refused(lambda: fast(*args))


def in_lower_precision() -> Found:
    """What is refused above, in the way that its message names: within autocast."""
    lower, found = partial(torch.autocast, "cpu", torch.bfloat16), list[dict[str, Tensor]]()
    model, args = made()
    eager = copy.deepcopy(model)
    with lower():
        fast = remat.rematerialize(
            model, args, blocks="layers.*", budget="80%", check=False,
            sharding=sharding("fsdp2"), group=dist.group.WORLD,
        )  # fmt: skip
    for sharded in map(shard_blocks, (eager, fast)):
        torch.manual_seed(0)
        with lower():
            loss = sharded(*args)
        loss.backward()
        found.append({**gradients(sharded), "loss": loss.detach()})
    same = all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    return {"same": same, "n": len(found[0]) - 1}


CASES: dict[str, Callable[[], Found]] = {
    "ddp": lambda: whole("ddp", DistributedDataParallel),
    "ddp_blocks": lambda: blocks("ddp", DistributedDataParallel),
    "fsdp2": lambda: whole("fsdp2", fully_shard),
    "fsdp2_blocks_min": lambda: blocks("fsdp2", shard_blocks, "min"),
    "another_step": another_step,
    "too_little": too_little,
    "sharded_first": sharded_first,
    "ddp_first": ddp_first,
    "sharded_inside": sharded_inside,
    "cast_later": cast_later,
    "in_lower_precision": in_lower_precision,
}


def main(folder: Path, names: list[str]) -> None:
    join()
    leave(folder, {name: CASES[name]() for name in names or CASES})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
