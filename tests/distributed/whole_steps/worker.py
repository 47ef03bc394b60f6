"""Whole steps over ranks beside one process that has all batches, with the peak of each tier.

Run as ``torchrun --nproc-per-node N tests/distributed/whole_steps/worker.py FOLDER CASE...``.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3]))
import remat
from remat.graph_capture.devices.memory_events import measure_rank_peak
from remat.graph_capture.spill_files import HOST_FOLDER, File
from remat.whole_step.running import WholeStep
from tests.distributed.launch import join, leave, refused
from tests.fixed_costs import REPLACED, patched
from tests.remat.whole_step.loops import Training, chain, gpt, momentum, same

FOLDER = Path(sys.argv[1])
STEPS, MEASURED = 3, 2
Found = dict[str, Any]


class LiveFiles:
    """The most bytes that values had in files of each tier at once, since `reset`."""

    def __init__(self) -> None:
        self.now, self.most = dict[str, int](), dict[str, int]()
        self._lock, self._make = threading.Lock(), File.__init__

    def made(self, file: File, folder: Any, size_bytes: int) -> None:
        self._make(file, folder, size_bytes)
        self._add(folder.tier, size_bytes)
        weakref.finalize(file, self._add, folder.tier, -size_bytes)

    def reset(self) -> None:
        self.most = dict(self.now)

    def _add(self, tier: str, size_bytes: int) -> None:
        with self._lock:
            self.now[tier] = self.now.get(tier, 0) + size_bytes
            self.most[tier] = max(self.most.get(tier, 0), self.now[tier])


FILES = LiveFiles()


def calls_of(training: Training, rank: int, at: int) -> Any:
    """The microbatches of a rank in one step."""
    n = dist.get_world_size() * training.count
    first = n * at + rank * training.count
    return training.calls[first : first + training.count]


def averaged_step(training: Training, at: int) -> list[float]:
    """One step of one process: gradients of each microbatch are means over ranks, then added."""
    n = dist.get_world_size()
    model, parameters = training.model, [p for p in training.model.parameters() if p.requires_grad]
    found, losses = list[list[Any]](), list[float]()
    for rank in range(n):
        torch.manual_seed(10 * at + rank)
        found.append([])
        for args, target in calls_of(training, rank, at):
            out = model(*args)
            loss = out if training.loss_fn is None else training.loss_fn(out, target)
            found[-1].append(torch.autograd.grad(loss, parameters))
            losses += [loss.item()] if rank == dist.get_rank() else []
    for place, parameter in enumerate(parameters):
        for i in range(training.count):
            mean = sum(found[rank][i][place] for rank in range(n)) / n
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
    training.optimizer.step()
    training.optimizer.zero_grad()
    return losses


def whole_step(training: Training, step: WholeStep, at: int) -> list[float]:
    torch.manual_seed(10 * at + dist.get_rank())
    calls = calls_of(training, dist.get_rank(), at)
    targets = None if training.loss_fn is None else [target for _, target in calls]
    return [loss.item() for loss in step([args for args, _ in calls], targets=targets)]


def trained(
    make: Callable[..., Training], count: int, *, reshard: bool | None = None, **asked: Any
) -> Found:
    ranks = dist.get_world_size()
    training = make(count, ranks * STEPS)
    other = training.twin()
    sharding = remat.Sharding("fsdp2", ranks, reshard_after_forward=reshard)
    step = training.planned(sharding=sharding, **asked)
    losses, equal = list[bool](), list[bool]()
    for at in range(STEPS):
        losses.append(whole_step(training, step, at) == averaged_step(other, at))
        if at != 1:  # the second step begins whole, the third from what is below
            step.bring_back(whole=True)
            equal.append(same(training, other))
    found = peaks(training, step)
    step.bring_back()
    numbers = sum(one.numel() for one in training.model.parameters())
    return {
        **found, "losses": losses, "equal": equal, "steps": hash_of(step),
        "share": numbers / sum(one.numel() for one in other.model.parameters()),
        "homes": sorted({v.home for v in step.graph.values if v.home is not None}),
        "forward": refused(lambda: training.model(*training.calls[0][0])),
    }  # fmt: skip


def hash_of(step: WholeStep) -> str:
    return hashlib.sha256(repr(step.schedule.steps).encode()).hexdigest()


def peaks(training: Training, step: WholeStep) -> Found:
    """Of the device above what rests there, and of the files below it."""
    whole_step(training, step, 0)
    FILES.reset()
    measured = measure_rank_peak(
        lambda: whole_step(training, step, 1), training.optimizer.zero_grad, MEASURED
    )
    judged = step.simulation
    return {
        "device": [judged.peak_bytes - step.resting_bytes, measured],
        "host": [judged.host_peak_bytes, FILES.most.get("host", 0)],
        "nvme": [judged.nvme_peak_bytes, FILES.most.get("nvme", 0)],
    }


def frozen(count: int, steps: int) -> Training:
    training = chain(count, steps)
    training.model[1].requires_grad_(False)
    return training


def closed() -> Found:
    """After `close` the model is whole, and trains on as the twin of one process does."""
    training = chain(1, 2 * dist.get_world_size())
    other = training.twin()
    step = training.planned(sharding=remat.Sharding("fsdp2", dist.get_world_size()),
                            budget=120_000, host="64MiB")  # fmt: skip
    whole_step(training, step, 0)
    averaged_step(other, 0)
    step.close()
    equal = same(training, other)
    averaged_step(training, 1)
    averaged_step(other, 1)
    return {"equal": equal, "after": same(training, other)}


def differing() -> Found:
    """What ranks are asked for, each in its own way; and with too little room, in the same."""
    rank, sharding = dist.get_rank(), remat.Sharding("fsdp2", dist.get_world_size())

    def asked(training: Training, budget: int = 120_000) -> Found:
        return refused(lambda: training.planned(sharding=sharding, budget=budget, host="64MiB"))

    other, slower = chain(1, 2), chain(1, 2)
    slower.optimizer.param_groups[0]["lr"] *= 1 + rank
    with torch.no_grad():
        next(other.model.parameters()).add_(rank)
    return {
        "budget, host and nvme": asked(chain(1, 2), 120_000 + rank),
        "microbatches": asked(chain(1 + rank, 2)), "optimizer": asked(slower),
        "initial parameters": asked(other), "": asked(chain(1, 2), 10_000),
    }  # fmt: skip


def batch_of_one() -> Found:
    """The last rank refuses a batch; all go on with the next, as if there had been none."""
    n, last = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
    training = chain(1, 2 * n)
    other = training.twin()
    step = training.planned(
        sharding=remat.Sharding("fsdp2", n), budget=120_000, host="64MiB"
    )  # fmt: skip
    whole_step(training, step, 0)
    averaged_step(other, 0)
    [(args, target)] = calls_of(training, dist.get_rank(), 1)
    short = tuple(one[1:] if last else one for one in args)
    found = refused(lambda: step([short], targets=[target]))
    held = refused(training.model.state_dict), refused(training.optimizer.state_dict)
    whole_step(training, step, 1)
    averaged_step(other, 1)
    step.bring_back(whole=True)
    return {**found, "held": held, "equal": same(training, other)}


def alone() -> Found:
    """A sharding over other ranks than there are."""
    training = chain(1, 2)
    return refused(
        lambda: training.planned(sharding=remat.Sharding("fsdp2", 4), budget="1MiB", host="1MiB")
    )


class Transposed(nn.Module):
    """A parameter whose gradient is made transposed, and laid out as the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.T.contiguous())


def transposed(count: int, steps: int) -> Training:
    return chain(count, steps, optimizer=momentum, layer=Transposed)


HOST: dict[str, Any] = {"host": "64MiB"}  # of both ranks together
NVME: dict[str, Any] = {"host": 1_000_000, "nvme": f"{FOLDER}:64MiB"}
CASES: dict[str, Callable[[], Found]] = {
    "gpt": lambda: trained(gpt, 2, budget=450_000, **HOST),
    "nvme": lambda: trained(gpt, 2, budget=450_000, **NVME),
    "one": lambda: trained(chain, 1, budget=120_000, **HOST),
    "whole": lambda: trained(chain, 2, reshard=False, budget=200_000, **HOST),
    "momentum": lambda: trained(transposed, 3, budget=32_000, **HOST),
    "frozen": lambda: trained(frozen, 2, budget=160_000, **HOST),
    "closed": closed,
    "differing": differing,
    "batch of one": batch_of_one,
    "alone": alone,
}


if __name__ == "__main__":
    join()
    os.environ[HOST_FOLDER] = str(FOLDER)
    made = FILES.made
    with patched(REPLACED), mock.patch.object(File, "__init__", lambda *given: made(*given)):
        results = {case: CASES[case]() for case in sys.argv[2:] or CASES}
    leave(FOLDER, results)
