"""Predicted requests against recorded ones: `python -m benchmarks.reserved.recorded [NAME ...]`.

Steps of the examples run on this CPU, unmodified and by a plan at 60 %, and the profiler records
each allocation with its address. The replay then reserves for what was recorded, and for what the
graph predicts. The difference is what the graph does not know: into how many requests a workspace
falls, and when they come. Ops of a GPU have other workspaces, so it is an indication.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

import remat
from benchmarks import GAP_OF_FIGURES
from benchmarks.cells.cell import cpu_name, versions
from benchmarks.reserved.table import DOCS, write_recorded
from examples import gpt, resnet, unet
from remat.budgets import unmodified_step
from remat.graph_capture.devices.memory_events import without_garbage
from remat.ranks.same_order import agreed_rewrite
from remat.schedules.layout import Buffers, buffers_of
from remat.schedules.reserved import DEFAULT, EXPANDABLE, N_STEPS, allocator_peak, serve_trace

OUT = Path(__file__).parents[1] / "results" / "reserved-recorded.json"
EXAMPLES: dict[str, Callable[[], dict[str, Any]]] = {
    "gpt": gpt.factory, "resnet": resnet.factory, "unet": unet.factory,
}  # fmt: skip
BUDGET = "60%"
SETTINGS = {"default": DEFAULT, "expandable": EXPANDABLE}


def recorded(run: Callable[[], Any]) -> list[int]:
    """The trace of one run, as the replay takes it; what is left in the end is freed then."""
    with without_garbage(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = run()
    del kept
    trace, number, n_requests = list[int](), dict[int, int](), 0
    for address, size_bytes in _allocations(seen):
        if size_bytes > 0:
            trace.append(size_bytes)
            number[address] = n_requests
            n_requests += 1
        elif address in number:  # else it was allocated before the run
            trace.append(~number.pop(address))
    return trace + [~i for i in number.values()]


def _allocations(seen: profile) -> list[tuple[int, int]]:
    """Address and bytes of each allocation, and of each free with a minus, by time."""
    assert seen.profiler is not None
    waiting = list(seen.profiler.kineto_results.experimental_event_tree())
    found: list[tuple[int, int, int]] = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.typed[0] == _EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(address, size_bytes) for _, address, size_bytes in sorted(found)]


def several(trace: list[int], n_steps: int) -> list[int]:
    """The trace of so many equal steps."""
    n = sum(event > 0 for event in trace)
    return [e if e > 0 else e - step * n for step in range(n_steps) for e in trace]


def rows(name: str) -> list[dict[str, Any]]:
    """Predicted and recorded, of the unmodified step and of a plan."""
    made = EXAMPLES[name]()
    model, args = made.pop("model"), made.pop("args")
    graph = remat.capture(model, args, split="none", **made)
    found = remat.solve(graph, BUDGET, time_limit_s=20, gap=GAP_OF_FIGURES)
    plain = unmodified_step(graph)
    assert found.schedule is not None
    assert plain.result.schedule is not None
    fast = agreed_rewrite(model, found.schedule)
    loss_fn, target = made.get("loss_fn"), made.get("target")

    def eager() -> None:
        out = model(*args)
        (out if loss_fn is None else loss_fn(out, target)).backward()

    def planned() -> None:
        (fast(*args) if loss_fn is None else fast(*args, target=target)).backward()

    steps = (("unmodified", eager, buffers_of(plain.graph, plain.result.schedule)),
             (BUDGET, planned, buffers_of(graph, found.schedule)))  # fmt: skip
    return [row_of(name, what, model, run, buffers) for what, run, buffers in steps]


def row_of(
    name: str, what: str, model: nn.Module, run: Callable[[], None], buffers: Buffers
) -> dict[str, Any]:
    """Bytes beyond what is resident: live at most, and reserved in both settings."""
    for _ in range(2):  # the second run has its caches filled
        model.zero_grad(set_to_none=True)
        trace = recorded(run)
    model.zero_grad(set_to_none=True)
    said: dict[str, Any] = {"step": name, "plan": what}
    said["live"] = {"predicted": buffers.load_bytes, "recorded": _most_live(trace)}
    for setting, settings in SETTINGS.items():
        predicted = allocator_peak(buffers, settings).reserved_bytes - buffers.resident_bytes
        seen = serve_trace(several(trace, N_STEPS), settings).peak_reserved_bytes
        said[setting] = {"predicted": predicted, "recorded": seen}
    print(said, flush=True)
    return said


def _most_live(trace: list[int]) -> int:
    sizes = [event for event in trace if event > 0]
    live = most = 0
    for event in trace:
        live += event if event > 0 else -sizes[~event]
        most = max(most, live)
    return most


def main() -> int:
    """Record all steps, keep the figures, and write the table of docs/reserved.md."""
    parser = argparse.ArgumentParser(prog="benchmarks.reserved.recorded", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(EXAMPLES)}")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--docs", type=Path, default=DOCS)
    asked = parser.parse_args()
    torch.manual_seed(0)
    found = [row for name in asked.names or EXAMPLES for row in rows(name)]
    made = {"cpu": cpu_name(), "versions": versions(), "date": time.strftime("%Y-%m-%d")}
    asked.out.write_text(json.dumps({**made, "rows": found}, indent=1) + "\n")
    write_recorded(found, made, asked.docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
