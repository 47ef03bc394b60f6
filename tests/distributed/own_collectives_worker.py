"""Models with collectives of their own inside forward: what each rank found, in its own file.

Run as ``torchrun --nproc-per-node 2 tests/distributed/own_collectives_worker.py FOLDER CASE...``.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
import remat
from remat.graph_capture.devices.placement import meter_of
from remat.graph_capture.distributed.collective_costs import measured_rank_links
from tests.distributed.context_models import GatheredKeys, Rotated, Ulysses, stacked
from tests.distributed.failing_worker import Found, Reduced, run_cases, said, worst
from tests.distributed.parallel_models import same, trained

BUDGETS = ("100%", "70%", "min")


def summed_by_function(x: Tensor) -> Tensor:
    return x + torch.distributed.nn.functional.all_reduce(x.sin())


def summed_in_place(x: Tensor) -> Tensor:
    total = x.sin()
    dist.all_reduce(total)
    return x + total


def centred(x: Tensor) -> Tensor:
    """Less a mean over all ranks that is not differentiated."""
    mean = x.detach().mean(0)
    dist.all_reduce(mean, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
    return x - mean / dist.get_world_size()


def reduced(together: Callable[[Tensor], Tensor]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = Reduced(together)
    torch.manual_seed(1 + dist.get_rank())
    return model, (torch.randn(256, 32),)


def planned(make: Callable[[], tuple[nn.Module, Any]]) -> Found:
    """Two optimizer steps at each budget."""
    eager, args = make()
    expected = trained(eager, args)
    found: Found = {"n": len(expected)}
    for budget in BUDGETS:
        fast = remat.rematerialize(
            make()[0], args, budget=budget, solver="cut", group=dist.group.WORLD
        )
        found[budget] = same(expected, trained(fast, args))
    return found


class Configured(nn.Module):
    """Multiplies by a number in a database, whose memory no guard looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.base = Reduced(summed_by_function), sqlite3.connect(":memory:")
        self.set_scale(1)

    def __deepcopy__(self, _: Any) -> Configured:
        copied = Configured()
        copied.load_state_dict(self.state_dict())
        copied.set_scale(self.scale())
        return copied

    def set_scale(self, scale: int) -> None:
        self.base.execute(f"PRAGMA user_version = {scale}")

    def scale(self) -> int:
        return self.base.execute("PRAGMA user_version").fetchone()[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale()


def audited() -> Found:
    """The last rank's model changes; without an agreement none is audited."""
    torch.manual_seed(0)
    model, x = Configured(), torch.randn(256, 32)
    options: Any = {"budget": "100%", "solver": "cut", "group": dist.group.WORLD}
    fast = remat.rematerialize(model, (x,), **options)
    apart = remat.rematerialize(model, (x,), audit=dist.get_rank() > 0, **options)
    for _ in range(3):
        fast(x).backward()
        apart(x).backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        model.set_scale(2)
    found = said(lambda: fast(x).backward())
    return {**found, "audit": repr(fast.audit), "apart": repr(apart.audit)}


def compiled(make: Callable[[], tuple[nn.Module, Any]]) -> Found:
    """A step by Inductor, whose forward may be several graphs; what it says where torch refuses."""
    torch._dynamo.reset()
    model, args = make()
    model(*args).backward()
    right = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    options = {"budget": "100%", "solver": "cut", "replays": 3}
    step = torch.compile(model, backend="remat", options=options)
    found = said(lambda: step(*args).backward())
    return found if found["error"] else {**found, "off": worst(model, right)}


def measured() -> Found:
    links = measured_rank_links(dist.group.WORLD, "cpu", meter_of("cpu").title)
    return {"gb_s": links.inside_gb_s, "start_us": links.inside_us, "source": links.source}


CASES: dict[str, Callable[[], Found]] = {
    "audited": audited,
    "function": lambda: planned(lambda: reduced(summed_by_function)),
    "centred": lambda: planned(lambda: reduced(centred)),
    "in_place": lambda: said(lambda: planned(lambda: reduced(summed_in_place))),
    "keys": lambda: planned(lambda: stacked(GatheredKeys)),
    "ulysses": lambda: planned(lambda: stacked(Ulysses)),
    "rotated": lambda: planned(lambda: stacked(Rotated)),
    "compiled_function": lambda: compiled(lambda: reduced(summed_by_function)),
    "compiled_centred": lambda: compiled(lambda: reduced(centred)),
    "compiled_in_place": lambda: compiled(lambda: reduced(summed_in_place)),
    "compiled_keys": lambda: compiled(lambda: stacked(GatheredKeys)),
    "measured": measured,
}

if __name__ == "__main__":
    run_cases(CASES, Path(sys.argv[1]), sys.argv[2:])
