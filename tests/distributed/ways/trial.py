"""One way of training under one wrapper, planned and plain: bits, and the peak as predicted."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.graph_capture.devices.memory_events import measure_rank_peak
from remat.graph_capture.distributed.dtensors import local_part
from remat.graph_capture.errors import RematError
from remat.graph_capture.tracing.resident import storage_bytes
from tests.block_models import Stack, rows
from tests.distributed.ways.outcome import Outcome

COLUMNS = {
    "D": "DDP", "d": "DDP, no batch", "B": "DDP, blocks",
    "F": "FSDP2", "f": "FSDP2, no batch", "Z": "FSDP2, blocks",
    "P": "parallelize, shard 2", "Q": "parallelize, pp 2",
}  # fmt: skip
PARTS = "PQ"  # columns of `parallelize`
BUDGETS = {"D": "75%", "d": "85%", "B": "80%", "F": "90%", "f": "90%", "Z": "80%"}
STEPS, LR, OFF = 3, 1e-2, 0.01
_ROUNDS, _RUNS = 40, 4  # of measured steps: gloo's threads free what the profiler does not see


@dataclass
class Side:
    """The planned module, or plain torch's, under the wrapper of a column."""

    column: str
    is_planned: bool
    inner: nn.Module  # not wrapped
    model: nn.Module  # wrapped
    x: Tensor
    optimizer: torch.optim.Optimizer
    seen: list[Tensor] = field(default_factory=list[Tensor])  # what both sides must have alike

    @property
    def is_fsdp(self) -> bool:
        return self.column in "FfZ"

    def forward(self, seed: int = 0, x: Tensor | None = None) -> Tensor:
        torch.manual_seed(seed + 100 * dist.get_rank())
        return self.model(self.x if x is None else x)

    def backward(self, seed: int = 0, x: Tensor | None = None) -> None:
        loss = self.forward(seed, x)
        loss.backward()
        self.seen.append(loss.detach())

    def note(self, model: nn.Module | None = None) -> None:
        """Gradients as they are now."""
        found = (p.grad for p in (model or self.model).parameters())
        self.seen.extend(local_part(g).detach().clone() for g in found if g is not None)

    def update(self) -> None:
        self.note()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def unsynced(self) -> Any:
        """All batches of a step but the last."""
        if not self.is_fsdp:
            with self.model.no_sync():  # pyright: ignore
                yield
            return
        self.model.set_requires_gradient_sync(False)  # pyright: ignore
        yield
        self.model.set_requires_gradient_sync(True)  # pyright: ignore


def steps(side: Side) -> None:
    for seed in range(STEPS):
        side.backward(seed)
        side.update()


def one_step(side: Side) -> None:
    side.backward()


Asked = dict[str, Any]


def _nothing(_: str) -> Asked:
    return {}


def _same(model: nn.Module) -> nn.Module:
    return model


@dataclass(frozen=True)
class Way:
    """A way of training, and under which columns; functions of a column give what is asked."""

    name: str
    columns: str
    train: Callable[[Side], None] = steps
    step: Callable[[Side], None] | None = one_step  # whose peak is measured
    made: Callable[[], nn.Module] = Stack
    how: Callable[[str], Asked] = _nothing  # of the wrapper
    told: Callable[[str], Asked] = _nothing  # of `remat.Sharding`
    asked: Callable[[str], Asked] = _nothing  # of `remat.rematerialize`
    before: Callable[[nn.Module], nn.Module] = _same  # a change of the model before the plan
    first: Callable[[nn.Module], nn.Module] = _same  # a wrapper before the plan
    between: Callable[[nn.Module], nn.Module] = _same  # of the planned module before the wrapper
    wrap: Callable[[str, nn.Module], nn.Module] | None = None
    n_ranks: int = 2
    of_part: Callable[[str], Outcome] | None = None  # under the columns of `parallelize`
    tolerance: float = 0.0


def wrapped(column: str, model: nn.Module, **how: Any) -> nn.Module:
    if column in "DdB":
        return DistributedDataParallel(model, **how)
    if column == "Z":
        for layer in model.get_submodule("layers").children():
            fully_shard(layer, **how)
    return fully_shard(model, **how)


def planned(way: Way, column: str, model: nn.Module, x: Tensor) -> nn.Module:
    given: Asked = {"budget": BUDGETS[column], "verbose": False, "check": False}
    if column in "DF":
        given["solver"] = "cut"
    if column not in "df":
        kind: Any = "ddp" if column in "DB" else "fsdp2"
        told = remat.Sharding(kind, dist.get_world_size(), **way.told(column))
        given |= {"args": (x,), "sharding": told, "group": dist.group.WORLD}
    if column in "BZ":
        given["blocks"] = "layers.*"
    return remat.rematerialize(model, **{**given, **way.asked(column)})


def outcome(way: Way, column: str) -> Outcome:
    try:
        if column in PARTS:
            assert way.of_part is not None
            return way.of_part(column)
        return _tried(way, column)
    except RematError as error:
        return Outcome("refused", _line(error))
    except Exception as error:  # noqa: BLE001  whatever it is, it is a fault to be listed
        return Outcome("fails", f"{type(error).__name__}: {_line(error)}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _tried(way: Way, column: str) -> Outcome:
    torch.manual_seed(0)
    eager = way.before(way.made())
    model = copy.deepcopy(eager)
    torch.manual_seed(1 + dist.get_rank())
    x = rows()
    wrap = way.wrap or (lambda c, m: wrapped(c, m, **way.how(c)))
    fast = way.between(planned(way, column, way.first(model), x))
    sides: list[Side] = []
    for is_planned, inner in ((False, way.between(eager)), (True, fast)):
        outer = wrap(column, inner)
        optimizer = torch.optim.SGD(outer.parameters(), lr=LR)
        sides.append(Side(column, is_planned, inner, outer, x, optimizer))
    for side in sides:
        way.train(side)
    expected, found = (side.seen for side in sides)
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, _compared(expected, found, way.tolerance))
    verdict, text = max(each, key=lambda one: one[0] == "differs")
    if verdict == "differs" or way.step is None:
        return Outcome(verdict, text)
    ratio = _ratio(way.step, sides[1])
    return Outcome("over" if ratio > 1 + OFF else verdict, "", ratio)


def _compared(expected: Sequence[Tensor], found: Sequence[Tensor], far: float) -> tuple[str, str]:
    if len(expected) != len(found):
        return "differs", f"{len(expected)} losses and gradients, and {len(found)}"
    if all(map(torch.equal, expected, found)):
        return "exact", ""
    pairs = zip(expected, found, strict=True)
    off = max(float((a - b).norm() / a.norm().clamp(min=1e-30)) for a, b in pairs)
    return ("within", "") if far and off <= far else ("differs", f"off by {off:.1g}")


def _ratio(step: Callable[[Side], None], side: Side) -> float:
    """The peak of a step of the planned side over the predicted, the lowest of a few steps."""
    predicted = max(plan.peak_bytes for plan in remat.plans(side.inner))
    tensors = [*side.model.parameters(), *side.model.buffers(), side.x]
    held = storage_bytes(tensors)
    if not side.is_fsdp:
        held += sum(p.nbytes for p in side.model.parameters() if p.requires_grad)
    lowest = math.inf
    for _ in range(_ROUNDS):

        def run() -> None:
            step(side)
            side.seen.clear()

        peak = held + measure_rank_peak(run, side.model.zero_grad, _RUNS)
        lowest = min(lowest, peak / predicted)
        settled = torch.tensor(lowest <= 1 + OFF, dtype=torch.int32)
        dist.all_reduce(settled, dist.ReduceOp.MIN)
        if settled.item():
            break
    return round(lowest, 3)
