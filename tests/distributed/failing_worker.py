"""Ranks of which one fails, and models with collectives: what each rank found, in its own file.

Run as ``torchrun --nproc-per-node 2 tests/distributed/failing_worker.py FOLDER CASE...``.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))
import remat
from remat.compile import backend
from remat.graph_capture.costs import op_costs
from remat.graph_capture.devices.memory_events import measure_rank_peak
from remat.graph_capture.errors import BudgetError, RewriteError
from remat.graph_capture.tracing.resident import storage_bytes
from tests.distributed.launch import join, leave

Found = dict[str, Any]
STEPS = 100
"""Of which one is looked for whose frees were all seen; on a busy machine few are."""
TIMEOUT_S = 600
"""So long that a busy machine does not come near half of it."""


class Reduced(nn.Module):
    """Layers whose results are added up over all ranks, with a loss."""

    def __init__(self, together: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.together = together

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.together(torch.tanh(layer(x)))
        return x.square().mean()


def all_reduced(x: Tensor) -> Tensor:
    return x + functional.all_reduce(x.sin(), "sum", dist.group.WORLD)


def gathered(x: Tensor) -> Tensor:
    whole = functional.all_gather_tensor_autograd(x.sin(), 0, dist.group.WORLD)
    return functional.reduce_scatter_tensor_autograd(whole.tanh(), "sum", 0, dist.group.WORLD)


def coalesced(x: Tensor) -> Tensor:
    first, second = functional.all_reduce_coalesced([x.sin(), x.cos()], "sum", dist.group.WORLD)
    return first.sin() * second


def plain() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    layers = [module for _ in range(3) for module in (nn.Linear(32, 32), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(256, 32),)


def reduced(together: Callable[[Tensor], Tensor]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = Reduced(together)
    torch.manual_seed(1 + dist.get_rank())
    return model, (torch.randn(512, 32),)


def said(act: Callable[[], Any]) -> Found:
    """The error of `act`, and how long it took to come."""
    start = time.monotonic()
    found: Found = {"error": "", "text": ""}
    try:
        act()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - what any rank raises is the finding
        found = {"error": type(error).__name__, "text": str(error)}
    return {**found, "seconds": time.monotonic() - start}


def planned(model: nn.Module, args: tuple[Tensor, ...], **how: Any) -> nn.Module:
    asked = {"budget": "75%", "solver": "cut", "group": dist.group.WORLD, **how}
    return remat.rematerialize(model, args, **asked)


def failing_costs(error: BaseException) -> Found:
    """The first rank fails as it times ops; the second waits for its plan."""

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    model, args = plain()
    with mock.patch.object(op_costs, "measure_costs", fails):
        return said(lambda: planned(model, args, check=False))


def failing_forward() -> Found:
    """The second rank fails in the user's forward, while it is traced."""
    model, args = plain()
    if dist.get_rank() == 1:
        model.forward = lambda x: {}["no such key"]  # type: ignore[method-assign]
    return said(lambda: planned(model, args))


def failing_check() -> Found:
    """The second rank finds its step wrong, the first finds nothing."""

    def wrong(*_: Any, **__: Any) -> Any:
        raise RewriteError("it differs here")

    model, args = plain()
    fails = mock.patch("remat.step_planner.require_equal", wrong)
    if dist.get_rank() == 0:
        return said(lambda: planned(model, args, check=True))
    with fails:
        return said(lambda: planned(model, args, check=True))


def one_does_not_check() -> Found:
    """A rank without free memory would run no check, and leave the other in its collectives."""
    model, args = reduced(all_reduced)
    with mock.patch("remat.step_planner.is_checked", return_value=dist.get_rank() == 0):
        found = said(lambda: planned(model, args))
    return {**found, **trained(model, planned(model, args, check=False), args)}


def trained(model: nn.Module, fast: nn.Module, args: tuple[Tensor, ...]) -> Found:
    """Whether two steps of both modules have the same bits."""
    losses: list[Tensor] = []
    gradients: list[list[Tensor]] = []
    for module in (model, fast, fast):
        model.zero_grad()
        losses.append(module(*args))
        losses[-1].backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    same = all(torch.equal(losses[0], loss) for loss in losses)
    same = same and all(
        torch.equal(a, b) for found in gradients for a, b in zip(gradients[0], found, strict=True)
    )
    return {"same": same, "n": len(gradients[0])}


def collectives(together: Callable[[Tensor], Tensor], budget: str) -> Found:
    """Costs are measured at the first plan. At the second only the first rank has them."""
    model, args = reduced(together)
    fast = planned(model, args, budget=budget)
    found = trained(model, fast, args)
    cache = Path(os.environ["REMAT_CACHE"])
    if dist.get_rank() == 1:
        for file in cache.glob("*"):
            file.unlink()
    again = trained(model, planned(model, args, budget=budget), args)
    resident_bytes = storage_bytes([*model.parameters(), *args])
    peak_bytes = measure_rank_peak(lambda: fast(*args).backward(), model.zero_grad, STEPS)
    return {
        "same": found["same"] and again["same"],
        "n": found["n"],
        "peak_bytes": resident_bytes + peak_bytes,
        "budget_bytes": fast.schedule.budget_bytes,
        "recomputed": sum(n > 1 for n in fast.schedule.computations().values()),
    }


def no_group() -> Found:
    model, args = reduced(all_reduced)
    return said(lambda: planned(model, args, group=None))


def by_inductor() -> Found:
    """Inductor's code, of one plan for all ranks."""
    model, args = reduced(all_reduced)
    fast = planned(model, args, compile=True, budget="90%")
    model(*args).backward()
    right = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    fast(*args).backward()
    return {"error": worst(model, right)}


def worst(model: nn.Module, right: list[Tensor]) -> float:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))


def compiled() -> Found:
    model, args = reduced(all_reduced)
    model(*args).backward()
    right = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    options = {"budget": "85%", "solver": "cut", "replays": 3}
    torch.compile(model, backend="remat", options=options)(*args).backward()
    return {"error": worst(model, right)}


def one_cannot_compile(wrap: Callable[[nn.Module], nn.Module], make: Any) -> Found:
    """Nothing fits on the second rank; the first would wait for it in the next collective."""
    torch._dynamo.reset()
    model, args = make()
    options = {"budget": "100%", "solver": "cut", "replays": 1}

    def too_small(*_: Any, **__: Any) -> Any:
        raise BudgetError("nothing fits here")

    step = wrap(torch.compile(model, backend="remat", options=options))
    with mock.patch.object(backend, "read_options", too_small if dist.get_rank() else READ):
        return said(lambda: step(*args).sum().backward())


READ = backend.read_options


CASES: dict[str, Callable[[], Found]] = {
    "type_error": lambda: failing_costs(TypeError("a number is no glob")),
    "interrupt": lambda: failing_costs(KeyboardInterrupt()),
    "forward": failing_forward,
    "check": failing_check,
    "one_does_not_check": one_does_not_check,
    "no_group": no_group,
    "all_reduce": lambda: collectives(all_reduced, "75%"),
    "gather": lambda: collectives(gathered, "90%"),
    "coalesced": lambda: collectives(coalesced, "80%"),
    "by_inductor": by_inductor,
    "compiled": compiled,
    "collective_not_compiled": lambda: one_cannot_compile(
        lambda model: model, lambda: reduced(all_reduced)
    ),
    "ddp_not_compiled": lambda: one_cannot_compile(DistributedDataParallel, plain),
}


def run_cases(
    cases: Mapping[str, Callable[[], object]], folder: Path, names: list[str]
) -> NoReturn:
    """Run cases on this rank, all of them if none is named, and leave what they found."""
    # Ranks measure by themselves: what one has in its cache, the other may lack.
    os.environ["REMAT_CACHE"] = str(folder / f"prices-{os.environ['RANK']}")
    join(datetime.timedelta(seconds=TIMEOUT_S))
    leave(folder, {name: cases[name]() for name in names or cases})


if __name__ == "__main__":
    run_cases(CASES, Path(sys.argv[1]), sys.argv[2:])
