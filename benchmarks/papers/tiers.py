"""Whole steps of published systems beside ours: `python -m benchmarks.papers.tiers [CASE ...]`.

Each case is a machine and a model of a paper, of which whole steps are planned: that of the system
itself, and the fastest found. Nothing runs, and all times are the model's. A case that is named is
planned anew and kept, with the load of this machine, in benchmarks/results/published/tiers.json;
without a name those that are not kept yet. TFLOPS count 6 operations for each parameter and token.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells.cell import commit_here, versions
from benchmarks.solver_table import head, row
from examples.gpt import GPT, Sizes
from remat.budgets import parse_budget
from remat.formats import GIB, bytes_text
from remat.graph_capture.capture_api import capture
from remat.graph_capture.devices.known_devices import device_table, modelled_device, shares_of
from remat.graph_capture.files import write_contents
from remat.graph_capture.graph import TrainingGraph
from remat.whole_step.layers import microbatch_of
from remat.whole_step.microbatch import Update
from remat.whole_step.planned_step import PlannedStep, Short, StepTask
from remat.whole_step.step_planning import StepPlan, StepRequest, fastest_plan, planned_from

RESULTS = Path(__file__).parents[1] / "results" / "published" / "tiers.json"
FLOPS = 6
"""Operations for each parameter and token: two forward, four backward, none computed again."""


@dataclass(frozen=True)
class Case:
    """A machine and a model.

    Attributes
    ----------
    device : of the table. layers, width, vocab, seq : of a GPT in `dtype`, heads of 128.
    batch : sequences of a microbatch. microbatches : of a step. host, nvme : as of `remat run`.
    state : of the optimizer, as of `--state`. drives : with a processor each that updates what it
        stores; 0 for none.
    """

    device: str
    layers: int
    width: int
    batch: int
    microbatches: int
    host: str
    nvme: str | None = None
    nvme_gb_s: float | None = None
    dtype: torch.dtype = torch.float16
    state: Any = "float32"
    vocab: int = 50304
    seq: int = 1024
    drives: int = 0


_V100 = Case("v100", 50, 4096, 8, 4, "1400GiB")
_RTX4090 = Case(
    "rtx4090", 40, 5120, 32, 1, "64GiB", "/tmp:4TiB", 12.0, dtype=torch.bfloat16
)  # fmt: skip
CASES = {
    "10B on a V100": _V100,
    "13B on a V100": dataclasses.replace(_V100, layers=40, width=5120, batch=1, microbatches=1),
    "13B on a 4090": _RTX4090,
    "13B on a 4090, half the batch": dataclasses.replace(_RTX4090, batch=16),
    "13B on a 4090, drives that update": dataclasses.replace(
        _RTX4090, batch=16, host="4TiB", nvme=None, nvme_gb_s=None, drives=10
    ),
    "50B on a V100 of 16 GB": Case(
        "v100-16gb", 62, 8192, 1, 4, "512GiB", state="parameter"
    ),
    "175B on a 4090": dataclasses.replace(
        _RTX4090, layers=96, width=12288, seq=2048, batch=2, microbatches=4, host="700GiB"
    ),
}  # fmt: skip
"""Sizes that a paper does not state are ours: tokens of a step, and the host of the V100."""


@dataclass(frozen=True)
class Published:
    """A figure as its source prints it, and the case beside it; `system` of `NAMED_SYSTEMS`."""

    title: str
    source: str
    figure: str
    case: str
    system: str = ""
    note: str = ""


_ARXIV = "https://arxiv.org/abs/"
PUBLISHED = (
    Published(
        "ZeRO-Offload", f"{_ARXIV}2101.06840", "10B, one V100: 40 TFLOPS", "10B on a V100",
        "zero-offload",
    ),
    Published(
        "ZeRO-Offload", f"{_ARXIV}2101.06840", "13B on one V100 fits", "13B on a V100",
        "zero-offload", "one sequence",
    ),
    Published(
        "ZeRO-Infinity", f"{_ARXIV}2403.06504", "13B, one 4090: 45 TFLOPS, by Fuyou's authors",
        "13B on a 4090, half the batch", "zero-infinity",
    ),
    Published(
        "Fuyou", f"{_ARXIV}2403.06504", "13B, one 4090: 156 TFLOPS", "13B on a 4090",
        note="counting operations that run again ours has {ran:.0f}, of {products:.0f} that "
        "products alone reach in the model and {peak:.0f} of the card",
    ),
    Published(
        "Fuyou", f"{_ARXIV}2403.06504", "175B on one 4090 fits", "175B on a 4090",
    ),
    Published(
        "STRONGHOLD", "https://doi.org/10.1109/SC41404.2022.00076",
        "1.2 to 3.7 times other offloading", "10B on a V100", "stronghold", "window {window}",
    ),
    Published(
        "L2L", f"{_ARXIV}2002.05645", "50B, V100 of 16 GB, host 512 GB fits",
        "50B on a V100 of 16 GB", "l2l", "state in float16",
    ),
    Published(
        "PatrickStar", f"{_ARXIV}2108.05818", "larger models than DeepSpeed: 2.27 times",
        "10B on a V100", "patrickstar",
    ),
    Published(
        "Elixir", f"{_ARXIV}2212.05339", "up to 3.4 times other systems", "10B on a V100",
        "patrickstar", "on one GPU PatrickStar's choice",
    ),
    Published(
        "Angel-PTM", f"{_ARXIV}2303.02868", "up to 1.89 times other systems",
        "13B on a 4090, half the batch", note="values move whole, not in pages",
    ),
    Published(
        "Smart-Infinity", f"{_ARXIV}2403.06664", "no figure read",
        "13B on a 4090, drives that update", "zero-infinity",
        "ten drives of the table update, at their rates",
    ),
    Published(
        "MoESys", f"{_ARXIV}2205.10034", "1.33 times DeepSpeed, 48 A100", "",
        note="refused: which experts a batch asks for is not known when it is planned",
    ),
)  # fmt: skip


def planned(case: Case) -> tuple[StepPlan, int]:
    """The plan of a case, and how many parameters the model has."""
    heads = case.width // 128
    sizes = Sizes(case.layers, case.width, heads, case.seq, case.batch, case.vocab, dropout=0.0)
    with torch.device("meta"):
        model = GPT(sizes).to(case.dtype)
    tokens = torch.zeros(sizes.batch, sizes.seq, dtype=torch.long)
    below: dict[str, Any] = {"host": case.host, "nvme": case.nvme}
    graph = capture(model, (tokens, tokens.clone()), device=case.device, **below)
    request = StepRequest(
        case.device, case.microbatches, "adamw", state=case.state, nvme_gb_s=case.nvme_gb_s, **below
    )
    numbers = sum(one.numel() for one in model.parameters())
    if case.drives:
        return _by_drives(graph, request, case.drives), numbers
    return planned_from(graph, request), numbers


def _by_drives(graph: TrainingGraph, request: StepRequest, drives: int) -> StepPlan:
    """Of drives that update: a host that holds all state, and reads and writes it as they do."""
    budget_bytes = parse_budget(request.budget).bytes_for(graph)
    one = device_table().nvme
    gb_s = drives * 2 / (1 / one.write_gb_s + 1 / one.read_gb_s)
    update = Update.on(request.device, request.optimizer, request.state, gb_s)

    def task_of(one: TrainingGraph) -> StepTask:
        assert graph.links is not None
        return StepTask(microbatch_of(one), update, graph.links, budget_bytes)

    return fastest_plan(graph, task_of, request)


def kept_of(case: Case) -> dict[str, Any]:
    """What is kept of a case."""
    began_s = time.monotonic()
    plan, numbers = planned(case)
    tokens = case.microbatches * case.batch * case.seq
    outcomes = {"ours": plan.found.plan or plan.found.short, **plan.found.systems}
    return {
        "parameters": numbers, "tokens": tokens,
        "bound_tflops": FLOPS * numbers * tokens / plan.found.lower_bound_us / 1e6,
        "steps": {name: _step(case, plan, one, numbers) for name, one in outcomes.items()},
        "chunks": {one.region: one.chunks for one in plan.chunks},
        "seconds": round(time.monotonic() - began_s, 1), "load": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"), "commit": commit_here(), "versions": versions(),
    }  # fmt: skip


def _step(case: Case, plan: StepPlan, one: Any, numbers: int) -> dict[str, Any]:
    if not isinstance(one, PlannedStep):
        needs = f"{one.tier} {bytes_text(one.need_bytes)}" if isinstance(one, Short) else str(one)
        return {"needs": needs}
    found, layers = one.simulation, plan.task.microbatch.layers
    again_us = sum(
        group.microbatches * layer.options[at].extra_us
        for group in one.config.passes
        for layer, at in zip(layers, group.options, strict=True)
    )
    least_us = case.microbatches * plan.task.microbatch.least_us
    flops = FLOPS * numbers * case.microbatches * case.batch * case.seq
    return {
        "time_us": found.time_us, "tflops": flops / found.time_us / 1e6,
        "ran_tflops": flops * (1 + again_us / least_us) / found.time_us / 1e6,
        "peak_bytes": found.peak_bytes, "host_peak_bytes": found.host_peak_bytes,
        "nvme_peak_bytes": found.nvme_peak_bytes, "window": one.config.window,
    }  # fmt: skip


def kept_cases() -> dict[str, Any]:
    """What was planned, by case."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def lines(kept: dict[str, Any]) -> Iterator[str]:
    """The table."""
    titles = ["system", "published", "its schedule here", "our plan", "bound", "note"]
    yield from head(titles)
    for one in PUBLISHED:
        case = kept.get(one.case)
        steps = case["steps"] if case else {}
        own, best = steps.get(one.system), steps.get("ours")
        bound = f"{case['bound_tflops']:.0f} TFLOPS" if case else "-"
        facts = {"window": (own or {}).get("window"), "ran": (best or {}).get("ran_tflops", 0)}
        note = one.note.format(**facts, **_card(one.case)) if case else one.note
        title = f"[{one.title}]({one.source})"
        yield row([title, one.figure, step_text(own), step_text(best), bound, note or "-"])


def _card(case: str) -> dict[str, float]:
    device = modelled_device(CASES[case].device)
    peak = device.tflops["float16"]
    return {"peak": peak, "products": peak * shares_of(device)["matmul"].rate}


def step_text(step: dict[str, Any] | None) -> str:
    """What a step reaches, and the peak of the device."""
    if step is None:
        return "-"
    if "needs" in step:
        return f"needs {step['needs']}"
    return f"{step['tflops']:.0f} TFLOPS, {step['peak_bytes'] / GIB:.1f} GiB"


def main(arguments: list[str]) -> None:
    """Plan what was asked for, and print the table."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.papers.tiers", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("cases", nargs="*", metavar="CASE", help="; ".join(CASES))
    asked = parser.parse_args(arguments).cases
    if unknown := sorted(set(asked) - set(CASES)):
        parser.error(f"no case {', '.join(unknown)}: choose of {'; '.join(CASES)}")
    kept = kept_cases()
    for name in asked or [name for name in CASES if name not in kept]:
        kept[name] = kept_of(CASES[name])
        ordered = {name: kept[name] for name in CASES if name in kept}
        write_contents(RESULTS, json.dumps(ordered, indent=1).encode() + b"\n")
        print(f"{name}: {step_text(kept[name]['steps']['ours'])}", file=sys.stderr, flush=True)
    print(*lines(kept), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
