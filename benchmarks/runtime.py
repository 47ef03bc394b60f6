"""What the rewritten step costs beyond its recomputation: `python -m benchmarks.runtime`.

There are five measurements. Each runs its steps in turn in one process, so that drift hits all,
and the allocator keeps freed memory, so that no step pays for what another gave back:

- the runtime's overhead for each op: the step that keeps everything against eager's, on a GPT so
  small that its kernels take next to no time;
- the step that keeps everything against eager's, on a GPT of width 256 with 6 layers;
- the guards before each step, on a GPT of twelve layers and on a thousand modules
  (`benchmarks.running.guards`);
- audits, which run the model's own forward at some steps (`benchmarks.running.audits`);
- overheads of plans at falling budgets, against the step that keeps everything, beside the
  planned ones.

`--out FILE` keeps the figures as JSON, `--device cuda` measures there.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import remat
from benchmarks import GAP_OF_FIGURES
from benchmarks.running.audits import audits_row, audits_text
from benchmarks.running.guards import guards_rows, guards_text
from benchmarks.running.kept_memory import restart_keeping_memory
from examples.gpt import GPT, Sizes
from remat.graph_capture.devices.meter import cpu_title
from remat.graph_capture.graph import TrainingGraph
from remat.ranks.same_order import agreed_rewrite
from remat.schedules.outcome import Result

SMALL = Sizes(layers=6, width=16, heads=2, seq=8, batch=1, vocab=32, dropout=0.0)
WIDE = Sizes(layers=6, width=256, heads=4, seq=256, batch=8, vocab=1024, dropout=0.0)
PERCENTS = (80, 60, 40)


def model_and_batch(sizes: Sizes, device: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A GPT of these sizes and one batch of random tokens."""
    torch.manual_seed(0)
    model = GPT(sizes).to(device)
    tokens = torch.randint(sizes.vocab, (sizes.batch, sizes.seq + 1), device=device)
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def step_of(module: nn.Module, args: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """One training step without an optimizer; gradients are dropped first."""
    parameters = list(module.parameters())
    is_cuda = parameters[0].is_cuda

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        module(*args).backward()
        if is_cuda:
            torch.cuda.synchronize()

    return step


def times_us(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Times of each step, `rounds` times in turn after a warm-up."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for step in (*steps.values(), *steps.values()):
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            found[name].append(1e6 * (time.perf_counter() - start))
    return found


def ratio(found: dict[str, list[float]], name: str, base: str) -> float:
    """Median over rounds of one step's time over another's in the same round."""
    return statistics.median(a / b for a, b in zip(found[name], found[base], strict=True))


def rewritten(
    sizes: Sizes, device: str, budgets: dict[str, str], time_limit_s: float
) -> tuple[TrainingGraph, dict[str, Result], dict[str, Callable[[], None]]]:
    """The graph, the results and the steps of plans by name; ``eager`` beside them."""
    model, args = model_and_batch(sizes, device)
    graph = remat.capture(model, args, device=device, split="none")
    results = {"keep all": remat.solve(graph, 2**62, "store_all")}
    for name, budget in budgets.items():
        results[name] = remat.solve(graph, budget, time_limit_s=time_limit_s, gap=GAP_OF_FIGURES)
    steps = {"eager": step_of(model, args)}
    for name, result in results.items():
        assert result.schedule is not None, result.message
        steps[name] = step_of(agreed_rewrite(model, result.schedule), args)
    return graph, results, steps


def per_op(device: str, rounds: int) -> dict[str, Any]:
    """The microseconds that the runtime takes beyond eager, for each op."""
    graph, _, steps = rewritten(SMALL, device, {}, 0.0)
    found = times_us(steps, 20 * rounds)
    eager_us, plan_us = (statistics.median(found[name]) for name in ("eager", "keep all"))
    ops = len(graph.ops)
    return {
        "ops": ops,
        "eager_us": eager_us,
        "keep_all_us": plan_us,
        "overhead_us_per_op": (plan_us - eager_us) / ops,
    }


def plans(device: str, rounds: int, time_limit_s: float) -> list[dict[str, Any]]:
    """One row for each plan of the wide GPT: planned and measured overhead."""
    budgets = {f"{percent} %": f"{percent}%" for percent in PERCENTS}
    _, results, steps = rewritten(WIDE, device, budgets, time_limit_s)
    found = times_us(steps, rounds)
    base_us = statistics.median(found["eager"])
    rows: list[dict[str, Any]] = [
        {
            "plan": "keep all",
            "over_eager": ratio(found, "keep all", "eager") - 1,
            "eager_us": base_us,
        }
    ]
    for name in budgets:
        measured = ratio(found, name, "keep all") - 1
        rows.append(
            {
                "plan": name,
                "planned_overhead": results[name].overhead,
                "measured_overhead": measured,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and keep what was found."""
    restart_keeping_memory("benchmarks.runtime")
    parser = argparse.ArgumentParser(prog="benchmarks.runtime", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--only-guards", action="store_true", help="measure nothing else")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    guards = guards_rows(5 * asked.rounds)
    for row in guards:
        print(guards_text(row))
    audits = audits_row()
    print(audits_text(audits))
    if asked.only_guards:
        return 0
    small = per_op(asked.device, asked.rounds)
    print(
        f"runtime: {small['overhead_us_per_op']:.2f} us an op over eager "
        f"({small['ops']} ops, {small['eager_us']:.0f} us eager, {small['keep_all_us']:.0f} us)"
    )
    rows = plans(asked.device, asked.rounds, asked.time_limit)
    print(f"keep all: {100 * rows[0]['over_eager']:+.1f} % of eager's {rows[0]['eager_us']:.0f} us")
    for one in rows[1:]:
        print(
            f"{one['plan']}: planned {100 * one['planned_overhead']:.1f} %, "
            f"measured {100 * one['measured_overhead']:.1f} %"
        )
    if asked.out:
        on = torch.cuda.get_device_name() if asked.device != "cpu" else cpu_title()
        facts = {"device": on, "torch": str(torch.__version__), "python": platform.python_version()}
        asked.out.write_text(
            json.dumps(
                {**facts, "guards": guards, "audits": audits, "per_op": small, "plans": rows},
                indent=1,
            )
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
