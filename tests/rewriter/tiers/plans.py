"""A small model with dropout, its plan with copies, and what a step of it leaves behind."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remat.graph_capture import capture
from remat.graph_capture.graph import TrainingGraph
from remat.rewriter.rewriting import rewrite
from remat.rewriter.tiers.file_tier import link_thread
from remat.rewriter.user_module.module import RematModule
from remat.schedules.schedule import Schedule
from tests.links import with_links
from tests.models import BATCH, WIDTH, make
from tests.rewriter.tiers.copied import out_at_once
from tests.steps import schedule_of

CLOSED_S = 30.0
"""A thread closes files; on a busy machine it waits for its turn."""
LARGE_BYTES = 4 * BATCH * WIDTH


@dataclass
class Copied:
    """A model and a plan that copies values of it."""

    model: nn.Module
    args: tuple[Any, ...]
    graph: TrainingGraph
    plain: Schedule
    schedule: Schedule

    def module(self) -> RematModule:
        return rewrite(self.model, self.schedule, self.args, costed=self.graph)


def copied(name: str = "dropout", kind: str = "store_all") -> Copied:
    """The model of that name, all of whose large activations go out and come back."""
    model, args, *_ = make(name)
    graph = with_links(capture(model, args))
    plain = schedule_of(graph, kind)
    return Copied(model, args, graph, plain, out_at_once(graph, plain, large(graph)))


def large(graph: TrainingGraph) -> list[str]:
    """What forward makes that is as large as the batch."""
    made = {name for op in graph.ops[: graph.n_forward] for name in op.outputs}
    return [v.name for v in graph.values if v.name in made and v.size_bytes >= LARGE_BYTES]


def step(module: Callable[..., Any], args: tuple[Any, ...], seed: int = 3) -> list[Tensor]:
    """Loss, gradients and the random stream of one step."""
    torch.manual_seed(seed)
    loss = module(*args)
    return after_backward(module, loss)


def after_backward(module: Any, loss: Tensor, **options: Any) -> list[Tensor]:
    """What `step` returns, of a loss that is there."""
    module.zero_grad()
    loss.backward(**options)
    gradients = [p.grad.clone() for p in module.parameters()]
    return [loss.detach(), *gradients, torch.get_rng_state()]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def settled() -> None:
    """All copies that were begun have ended."""
    for name in ("d2h", "h2d", "write", "read"):
        link_thread(name).begin(lambda: None, []).settle()


def open_files(folder: Path) -> int:
    """Files of a folder that this process has open, with a name or without."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder.resolve()}/")
        except FileNotFoundError:  # that of the listing itself
            continue
    return found


def is_closed(folder: Path) -> bool:
    """Whether all files of a folder get closed once all copies have ended."""
    settled()
    end = time.monotonic() + CLOSED_S
    while open_files(folder) and time.monotonic() < end:
        time.sleep(0.01)
    return open_files(folder) == 0


def is_clean(folder: Path) -> bool:
    """Whether nothing is left in a folder: no name and no open file."""
    gc.collect()
    gc.freeze()  # What is alive now is not walked again by the test after this one.
    return is_closed(folder) and not list(folder.iterdir())
