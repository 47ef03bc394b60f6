"""What the device reaches at best: a product, a copy, its links to the host; and profiles of it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import remat
from benchmarks.gpu.measuring import facts
from benchmarks.gpu.rows import Row
from benchmarks.gpu.scheduler import Desk, Measure, Unit
from remat.graph_capture.devices import pinned_memory
from remat.graph_capture.devices.cuda import clocks
from remat.job.factory import load_model

EXAMPLES = Path(__file__).parents[2] / "examples"
WIDTH, COPIED_BYTES, BESIDE_BYTES = 8192, 4 << 30, 256 << 20
REHEARSED_WIDTH, REHEARSED_BYTES = 64, 1 << 20
REPEATS, PRODUCTS, BESIDE_COPIES = 10, 40, 6


class _Device:
    """Sizes for it, and its clock."""

    def __init__(self, device: str) -> None:
        self.name, self.is_cuda = device, device.startswith("cuda")
        self.width = WIDTH if self.is_cuda else REHEARSED_WIDTH
        self.copied_bytes = COPIED_BYTES if self.is_cuda else REHEARSED_BYTES
        self.beside_bytes = BESIDE_BYTES if self.is_cuda else REHEARSED_BYTES

    def seconds(self, run: Callable[[], Any]) -> float:
        """Of one run, on a device that was idle before."""
        self._wait()
        began_s = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - began_s

    def best_of(self, run: Callable[[], Any]) -> float:
        """Median seconds, after three runs that warm up."""
        return statistics.median([self.seconds(run) for _ in range(REPEATS + 3)][3:])

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.name)

    def factor(self) -> Tensor:
        """A square matrix of random numbers: products of zeros would be faster."""
        return torch.randn(self.width, self.width, device=self.name, dtype=torch.bfloat16)

    def side(self) -> contextlib.AbstractContextManager[Any]:
        """Another stream than that of products."""
        return torch.cuda.stream(torch.cuda.Stream()) if self.is_cuda else contextlib.nullcontext()


def product(device: _Device) -> Row:
    """A bfloat16 product."""
    x = device.factor()
    taken_s = device.best_of(lambda: x @ x)
    return {"width": device.width, "tflop_s": 2 * device.width**3 / taken_s / 1e12}


def copy(device: _Device) -> Row:
    """A copy on the device: bytes that are read and written."""
    source = torch.ones(device.copied_bytes, dtype=torch.uint8, device=device.name)
    target = torch.empty_like(source)
    taken_s = device.best_of(lambda: target.copy_(source))
    return {"bytes": device.copied_bytes, "gb_s": 2 * device.copied_bytes / taken_s / 1e9}


def links(device: _Device) -> Row:
    """Copies to the host and back by size, and what they cost the products beside them."""
    sizes = pinned_memory.SIZES if device.is_cuda else ()
    row: Row = {"copies": [_copies(device.name, size_bytes) for size_bytes in sizes]}
    x = device.factor()
    below = torch.empty(device.beside_bytes, dtype=torch.uint8, pin_memory=device.is_cuda)
    above = torch.empty(device.beside_bytes, dtype=torch.uint8, device=device.name)

    def products(copied: tuple[Tensor, Tensor] | None) -> None:
        if copied:
            with device.side():
                for _ in range(BESIDE_COPIES):
                    copied[0].copy_(copied[1], non_blocking=True)
        for _ in range(PRODUCTS):
            x @ x

    cases = {"alone_ms": None, "beside_d2h_ms": (below, above), "beside_h2d_ms": (above, below)}
    products(None)
    taken = {name: 1e3 * device.seconds(partial(products, case)) for name, case in cases.items()}
    return row | {"products": taken}


def _copies(device: str, size_bytes: int) -> Row:
    row = pinned_memory.copies_us(device, size_bytes)
    return {
        "bytes": size_bytes, "d2h_us": row.down, "h2d_us": row.up,
        "both_d2h_us": row.both_down, "both_h2d_us": row.both_up,
        "pageable_d2h_us": row.pageable,
    }  # fmt: skip


CEILINGS = {"product": product, "copy": copy, "links": links}
PROFILED = ("gpt", "resnet")


def begin_ceilings(desk: Desk) -> Measure:
    """Ceilings; a row of the visit comes first."""
    device = _Device(desk.settings.device)

    def measure(unit: Unit) -> Row:
        with desk.gpu():
            name = unit.key.rpartition("/")[2]
            row = CEILINGS[name](device) if name in CEILINGS else facts(device.name)
            return row | {"clocks": clocks(device.name)}

    return measure


def begin_profiles(desk: Desk) -> Measure:
    """Profiles of examples, for plans elsewhere: `remat run --device h200 --profile FILE`."""

    def measure(unit: Unit) -> Row:
        name = unit.key.rpartition("/")[2]
        loaded = load_model(f"{EXAMPLES / name}.py:factory").on(desk.settings.device)
        with desk.gpu():
            found = remat.profile(
                loaded.model, loaded.args, loaded.kwargs, loss_fn=loaded.loss_fn,
                target=loaded.target,
            )  # fmt: skip
        path = desk.settings.folder / f"profile_{name}.json"
        path.write_bytes(found.to_json())
        return {"ops": len(found.ops), "file": path.name}

    return measure
