"""The links of a CUDA device to the host: `python -m benchmarks.gpu.links --out FILE`.

Copies each way, pinned, alone and with the other way busy, and pageable; what a copy costs the ops
that run beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device import facts, keep
from remat.graph_capture.devices.cuda import SIZES, copies_us

PRODUCTS, WIDTH, SMALL_WIDTH = 40, 8192, 64
"""The small one is for a rehearsal on a CPU."""
BESIDE_COPIES = 6


def row_of(device: str, size_bytes: int) -> dict[str, float]:
    """Copies of one size."""
    row = copies_us(device, size_bytes)
    return {
        "bytes": size_bytes, "d2h_us": row.down, "h2d_us": row.up,
        "both_d2h_us": row.both_down, "both_h2d_us": row.both_up,
        "pageable_d2h_us": row.pageable,
    }  # fmt: skip


def beside(device: str) -> dict[str, float]:
    """Milliseconds of products alone, and with a copy each way beside them."""
    width = WIDTH if device.startswith("cuda") else SMALL_WIDTH
    x = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    on_device = torch.empty(SIZES[-1], dtype=torch.uint8, device=device)
    pinned = torch.empty(SIZES[-1], dtype=torch.uint8, pin_memory=True)
    side = torch.cuda.Stream()

    def products_ms(copied: tuple[Tensor, Tensor] | None) -> float:
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if copied:
            with torch.cuda.stream(side):
                for _ in range(BESIDE_COPIES):
                    copied[0].copy_(copied[1], non_blocking=True)
        start.record()
        for _ in range(PRODUCTS):
            x @ x
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    products_ms(None)
    cases: dict[str, Callable[[], float]] = {
        "alone_ms": lambda: products_ms(None),
        "beside_d2h_ms": lambda: products_ms((pinned, on_device)),
        "beside_h2d_ms": lambda: products_ms((on_device, pinned)),
    }
    return {name: measure() for name, measure in cases.items()}


def main() -> int:
    """Measure, print a line a size, and keep the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.links", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    device: str = asked.device
    kept: dict[str, Any] = {**facts(device), "copies": [row_of(device, n) for n in SIZES]}
    for row in kept["copies"]:
        rates = {k: round(row["bytes"] / 1e3 / us, 1) for k, us in row.items() if k != "bytes"}
        print(f"{row['bytes']:>10} bytes, GB/s: {rates}")
    kept["products"] = beside(device)
    print(f"products: {kept['products']}")
    keep(asked.out, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
