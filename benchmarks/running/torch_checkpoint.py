"""What torch's own checkpointing reaches if it keeps what a plan keeps: peaks on a small GPT.

``python -m benchmarks.running.torch_checkpoint`` prints the table of `docs/files.md`. Below it are
the peaks of plain checkpoints around every n-th block. Bytes leave out what is resident.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from benchmarks import GAP_OF_FIGURES
from remat.analysis.plan_figures import candidates
from remat.graph_capture.devices.memory_events import measure_peak
from remat.job.factory import load_model
from remat.rewriter.checkpoint_policy import checkpoint_policy
from remat.schedules.simulate import simulate

SIZES = {"WIDTH": "64", "HEADS": "2", "SEQ": "128", "BATCH": "8", "VOCAB": "64", "DROPOUT": "0"}
GPT = f"{Path(__file__).parents[2] / 'examples' / 'gpt.py'}:factory"
BUDGETS = "60%", "30%"
MB = 1e6


def measured_mb(model: nn.Module, step: Callable[[], Any], contexts: dict[str, Any]) -> float:
    """Peak of a step with a checkpoint around each module of `contexts`."""
    wrapped = [(model.get_submodule(path), given) for path, given in contexts.items()]
    for module, given in wrapped:
        options = {} if given is None else {"context_fn": given}
        module.forward = functools.partial(
            checkpoint, module.forward, use_reentrant=False, **options
        )
    try:
        model.zero_grad()
        step()
        model.zero_grad()
        return measure_peak(step) / MB
    finally:
        for module, _ in wrapped:
            del module.forward


def rows() -> Iterable[tuple[str, ...]]:
    """The rows of both tables."""
    loaded = load_model(GPT)
    model, batch = loaded.model, loaded.args

    def step() -> None:
        output = model(*batch)
        loss = output if loaded.loss_fn is None else loaded.loss_fn(output, loaded.target)
        loss.backward()

    graph = remat.capture(model, batch, loss_fn=loaded.loss_fn, target=loaded.target, split="none")
    resident_bytes = graph.resident.total_bytes
    yield "budget", "plan MB", "policies on its blocks MB"
    yield "100%", f"{measured_mb(model, step, {}):.1f}", "-"
    for budget in BUDGETS:
        schedule = remat.solve(graph, budget, gap=GAP_OF_FIGURES).schedule
        assert schedule is not None
        plan_mb = (simulate(graph, schedule).peak_bytes - resident_bytes) / MB
        paths = [f"blocks.{i}" for i in range(len(model.get_submodule("blocks")))]
        contexts = {path: checkpoint_policy(graph, schedule, path).contexts for path in paths}
        yield budget, f"{plan_mb:.1f}", f"{measured_mb(model, step, contexts):.1f}"
    yield "every n", "predicted MB", "measured MB"
    for one in candidates(graph, graph.time_us):
        found_mb = measured_mb(model, step, dict.fromkeys(one.layers))
        yield str(one.n), f"{(one.peak_bytes - resident_bytes) / MB:.2f}", f"{found_mb:.2f}"


def main() -> None:
    """Print the tables."""
    for name, value in SIZES.items():
        os.environ.setdefault(f"GPT_{name}", value)
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}")
    for row in rows():
        print("  ".join(cell.ljust(12) for cell in row))


if __name__ == "__main__":
    main()
