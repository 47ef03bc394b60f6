"""Each way to train by a plan, at a small size: gradients beside eager's, and the predicted peak.

Nothing is timed here; what a lever costs shows in the table.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

import remat
from benchmarks.comparison.bench import SEED
from benchmarks.comparison.methods import Variant
from benchmarks.gpu.carried import effort_of
from benchmarks.gpu.measuring import (
    Bench,
    beside_eager,
    equal_to,
    generate_no_kernels,
    settled,
)
from benchmarks.gpu.models import lever_entry
from benchmarks.gpu.rows import Row
from benchmarks.gpu.scheduler import Desk, Measure, Unit
from remat.graph_capture.devices.cuda import clocks

LIMIT_S = 5.0
UPDATES = 3


class _Levers:
    """What they have in common. `desk` says the device and the folder for files."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.rehearse = desk, desk.settings.rehearse
        if self.rehearse:
            generate_no_kernels()

    def __call__(self, unit: Unit) -> Row:
        """The row of a lever, which is the last part of the unit's key."""
        with self.desk.gpu():
            row = LEVERS_BY_NAME[unit.key.rpartition("/")[2]](self)
            settled()
            return row | {"clocks": clocks(self.desk.settings.device)}

    @property
    def budget_of_code(self) -> str:
        """For Inductor's code, which needs more without kernels of its own."""
        return "200%" if self.rehearse else "80%"

    def bench(self, name: str, *, draws: bool = True, kind: type[Bench] = Bench) -> Bench:
        entry = lever_entry(name, rehearse=self.rehearse)
        return kind(entry, self.desk.settings.device, draws=draws)

    def planned(
        self, bench: Bench, budget: str = "60%", *, batch: bool = True, **options: Any
    ) -> nn.Module:
        effort = effort_of(LIMIT_S, rehearse=self.rehearse)
        args = bench.trainee.args if batch else None
        with bench.autocast():
            return remat.rematerialize(
                bench.trainee.model, args, budget=budget, check=False, verbose=False,
                **{"audit": False, "split": "none", **effort, **options},
            )  # fmt: skip

    def row(self, name: str, budget: str = "60%", **options: Any) -> Row:
        """Of a plan with these options."""
        bench = self.bench(name)
        return _of_plan(bench, self.planned(bench, budget, **options))


def _of_plan(bench: Bench, module: nn.Module) -> Row:
    row = beside_eager(bench, Variant(module))
    plan = remat.plans(module)[-1]
    return row | {"predicted_peak_bytes": plan.peak_bytes, "planned_overhead": plan.overhead}


def _bfloat16(levers: _Levers) -> Row:
    return levers.row("gpt")


class _Scaled(Bench):
    """Trains in float16, with scaled gradients."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **{**how, "dtype": torch.float16})
        self.scaler = torch.amp.GradScaler(torch.device(self.device).type)

    def step(self, variant: Variant) -> None:
        """One step; the gradients stay scaled."""
        self.trainee.model.zero_grad()
        with self.autocast():
            loss = variant.call(*self.trainee.args)
        self.scaler.scale(loss).backward()


def _float16(levers: _Levers) -> Row:
    bench = levers.bench("gpt", kind=_Scaled)
    return _of_plan(bench, levers.planned(bench))


@contextlib.contextmanager
def _cudnn_benchmark(enabled: bool) -> Iterator[None]:
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, enabled
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _resnet(levers: _Levers, *, benchmark: bool = False) -> Row:
    with _cudnn_benchmark(benchmark):
        return levers.row("resnet", "80%")


class _Losses(list[Tensor]):
    """Of forwards in flight, each with its own backward: a plan refuses one through both."""

    def backward(self) -> None:
        for loss in self:
            loss.backward()


def _twice(module: nn.Module) -> Variant:
    """Two forwards before their backwards."""
    return Variant(lambda *args: _Losses(module(*args) for _ in range(2)))


def _offloaded(levers: _Levers, **below: str) -> Row:
    """What a plan copies, run with two forwards in flight; its peak is of one."""
    bench = levers.bench("gpt")
    module = levers.planned(bench, host="1GiB", keep="*", **below)
    row = _of_plan(bench, module)
    expected = bench.gradients(_twice(bench.trainee.model))
    two = equal_to(expected, bench.gradients(_twice(module)))
    moved = remat.plans(module)[-1].simulate().moved_bytes
    return row | {"moved_bytes": moved, "two_in_flight": two}


def _nvme(levers: _Levers) -> Row:
    return _offloaded(levers, nvme=f"{levers.desk.settings.folder}:1GiB")


def _in_pieces(levers: _Levers, name: str) -> Row:
    bench = levers.bench(name, draws=False)
    module = levers.planned(bench, "min", split="exact")
    chunks = remat.plans(module)[-1].schedule.chunks  # pyright: ignore[reportOptionalMemberAccess]
    return _of_plan(bench, module) | {"regions_in_chunks": len(chunks)}


def _updates(levers: _Levers, **kind: bool) -> Row:
    """Parameters after updates in backward, beside those of a plain loop."""
    bench = levers.bench("gpt")
    other = copy.deepcopy(bench.trainee.model)
    expected = _trained(bench, other, AdamW(other.parameters(), **kind))
    own = AdamW(bench.trainee.model.parameters(), **kind)
    module = levers.planned(bench, optimizer_in_backward=own)
    row = equal_to(expected, _trained(bench, module, own))
    return row | {"predicted_peak_bytes": remat.plans(module)[-1].peak_bytes}


def _trained(bench: Bench, module: nn.Module, optimizer: AdamW) -> list[Tensor]:
    torch.manual_seed(SEED)
    for _ in range(UPDATES):
        with bench.autocast():
            loss = module(*bench.trainee.args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for group in optimizer.param_groups for p in group["params"]]


def _at_sizes(bench: Bench, module: nn.Module, sizes: tuple[int, ...]) -> Row:
    """Gradients of batches of these sizes beside eager's."""
    equal = total = 0
    for size in sizes:
        given = tuple(arg[:size] for arg in bench.trainee.args)
        calls = (bench.trainee.model, module)
        eager, found = (Variant(lambda *_, one=one, given=given: one(*given)) for one in calls)
        row = equal_to(bench.gradients(eager), bench.gradients(found))
        equal, total = equal + row["gradients_equal"], total + row["gradients"]
    return {"gradients_equal": equal, "gradients": total, "sizes": sizes}


def _two_shapes(levers: _Levers) -> Row:
    bench = levers.bench("gpt")
    module = levers.planned(bench, batch=False)
    most = len(bench.trainee.args[0])
    row = _at_sizes(bench, module, (most, most // 2))
    return row | {"plans": len(remat.plans(module))}


def _range(levers: _Levers) -> Row:
    bench = levers.bench("gpt", draws=False)
    most = len(bench.trainee.args[0])
    sizes = {0: ("batch", 2, most)}
    module = levers.planned(bench, dynamic={"tokens": sizes, "targets": sizes})
    row = _at_sizes(bench, module, (most, most - 1, 2)) | bench.memory(Variant(module))
    return row | {"predicted_peak_bytes": remat.plans(module)[-1].peak_bytes}


def _by_inductor(levers: _Levers) -> Row:
    bench = levers.bench("gpt", draws=False)
    return _of_plan(bench, levers.planned(bench, levers.budget_of_code, compile=True))


def _backend(levers: _Levers) -> Row:
    bench = levers.bench("gpt", draws=False)
    options = {"budget": levers.budget_of_code, "warm": False}
    step = torch.compile(bench.trainee.model, backend="remat", options=options)
    return beside_eager(bench, Variant(step)) | {
        "predicted_peak_bytes": remat.plans()[-1].peak_bytes
    }


LEVERS_BY_NAME: dict[str, Callable[[_Levers], Row]] = {
    "bfloat16 autocast, dropout, SDPA": _bfloat16,
    "float16, GradScaler": _float16,
    "ResNet": _resnet,
    "ResNet, cudnn.benchmark": lambda levers: _resnet(levers, benchmark=True),
    "U-Net": lambda levers: levers.row("unet", "80%"),
    "host, two forwards in flight": _offloaded,
    "NVMe": _nvme,
    "head in pieces": lambda levers: _in_pieces(levers, "head"),
    "MLP in pieces": lambda levers: _in_pieces(levers, "mlp"),
    "updates in backward, fused": lambda levers: _updates(levers, fused=True),
    "updates in backward, foreach": lambda levers: _updates(levers, foreach=True),
    "plans for two shapes": _two_shapes,
    "a range of sizes": _range,
    "compile=True": _by_inductor,
    'backend="remat"': _backend,
}


def begin_levers(desk: Desk) -> Measure:
    """All of them in one process, on models that take no time."""
    return _Levers(desk)
