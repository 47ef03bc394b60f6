"""Many measured steps of a planned model under DistributedDataParallel, with and without copies.

Run as ``torchrun --nproc-per-node 2 tests/distributed/measured/worker.py FOLDER STEPS``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[3]))
import remat
from remat.graph_capture.devices.memory_events import measure_peak
from remat.graph_capture.spill_files import HOST_FOLDER
from tests.distributed.launch import join, leave
from tests.fixed_costs import REPLACED, patched

WIDTH, LAYERS = 64, 6


def main(folder: Path, steps: int) -> None:
    """What was measured at the last step of each."""
    join()
    os.environ[HOST_FOLDER] = str(folder)
    peaks = {"kept": 0, "copied": 0}
    for name, host in (("kept", None), ("copied", "64MiB")):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        planned = remat.rematerialize(
            nn.Sequential(*layers), budget="80%", host=host, group=dist.group.WORLD
        )
        model = DistributedDataParallel(planned, bucket_cap_mb=0.03)
        x = torch.randn(256, WIDTH)

        def step(model: nn.Module = model, x: torch.Tensor = x) -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        step()
        for _ in range(steps // 2):
            peaks[name] = measure_peak(step)
    leave(folder, peaks)


if __name__ == "__main__":
    with patched(REPLACED):
        main(Path(sys.argv[1]), int(sys.argv[2]))
