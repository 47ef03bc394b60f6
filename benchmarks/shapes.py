"""What one plan for a range of lengths costs, and gives: `python -m benchmarks.shapes --out FILE`.

A GPT of 12 layers with dropout, at lengths from 16 to 512, within 60 % of the unmodified peak at
the longest. Printed are

- the seconds to plan the family, beside those to plan the longest alone, with no cost known;
- what is done before a step at a length that was never seen, beyond what a plan for that one length
  does, in microseconds;
- the overhead at ten lengths, beside plans for each alone;
- a run over random lengths by `rematerialize(dynamic="auto", upto=...)`: plans, seconds, peaks; and
  its first batches by `rematerialize` as it is without. Costs of the range are known by then.

Ends with status 1 unless the family costs at most 4 plans, the pick at most 50 us, the overhead at
most 1 point more than planned alone, and the run one trace and no peak above the budget.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import remat
from benchmarks import GAP_OF_FIGURES
from benchmarks.cells.cell import cpu_name
from examples.gpt import GPT, Sizes
from remat.caches.per_shape_plans import PlanCache
from remat.graph_capture.devices.memory_events import measure_live
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.ranges.curve import overheads_over, solve_over
from remat.ranks.same_order import agreed_rewrite
from remat.schedules.family import Family

SIZES = Sizes(layers=12, width=64, heads=4, seq=512, batch=4, vocab=256, dropout=0.1)
SEQ = {1: ("seq", 16, SIZES.seq)}
BUDGET = "60%"
MOST_PLANS, MOST_PICK_US, MOST_POINTS = 4.0, 50.0, 1.0
BURSTS, CALLS = 200, 5


def model() -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return GPT(SIZES)


def batch(length: int) -> tuple[Tensor, Tensor]:
    """Random tokens and targets of a length."""
    tokens = torch.randint(SIZES.vocab, (SIZES.batch, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@contextlib.contextmanager
def no_costs() -> Generator[None]:
    """Costs that are kept are another process's meanwhile: none."""
    before = os.environ.get("REMAT_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REMAT_CACHE"] = folder
        yield
    if before is None:
        del os.environ["REMAT_CACHE"]
    else:
        os.environ["REMAT_CACHE"] = before


def names() -> tuple[str, str]:
    """Of the two arguments."""
    first, second = GPT.forward.__code__.co_varnames[1:3]
    return first, second


def planning() -> dict[str, Any]:
    """Seconds of one plan for the longest, and of the family; the family's figures."""
    one, dynamic = model(), dict.fromkeys(names(), SEQ)
    start = time.perf_counter()
    with no_costs():
        longest = remat.capture(one, batch(SIZES.seq), split="none")
    alone = remat.solve(longest, BUDGET, gap=GAP_OF_FIGURES)
    marks = [time.perf_counter() - start]
    print(f"one plan for the longest: {marks[0]:.1f} s, {alone}", flush=True)
    start = time.perf_counter()
    graph = remat.capture(one, batch(100), dynamic=dynamic)
    marks.append(time.perf_counter() - start)
    family = solve_over(graph, BUDGET, gap=GAP_OF_FIGURES)
    marks.append(time.perf_counter() - start)
    print(family)
    curve = overheads_over(graph, family, alone=True)
    print(curve)
    pairs = ((p.overhead, p.alone_overhead) for p in curve.points)
    above_alone = max((own - alone for own, alone in pairs if alone is not None), default=0.0)
    return {
        "one_plan_s": marks[0], "range_capture_s": marks[1], "family_s": marks[2],
        "plans": marks[2] / marks[0], "members": len(family.members),
        "alone_overhead": alone.overhead, "prices_error": family.cost_error,
        "points_above_alone": 100 * above_alone,
        "curve": [
            [p.sizes["seq"], p.member, p.peak_bytes, p.overhead, p.alone_overhead]
            for p in curve.points
        ],
        "budget_bytes": family.budget_bytes,
    } | picking(one, graph, family)  # fmt: skip


def picking(one: nn.Module, graph: RangedGraph, family: Family) -> dict[str, float]:
    """Microseconds before a step at a new length, and beyond those of a plan for one length."""
    fast = agreed_rewrite(one, family, over=graph)
    members = type(fast)._remat_members
    for member in family.members:  # their code is made once
        members.running((batch(member.corners[0]["seq"]), {}, None))
    batches = itertools.cycle([(batch(17 + n), {}, None) for n in range(490)])
    found = {"pick_us": _quickest_us(lambda: members.running(next(batches)))}
    guards = members.running(((batch(99)), {}, None))._remat_guards
    at_hand = (batch(99), {}, None)
    found["range_guards_us"] = _quickest_us(lambda: guards.require(at_hand))
    single = remat.rematerialize(model(), batch(99), budget="100%", solver="store_all", check=False)
    its = type(single)._remat_guards
    found["one_length_guards_us"] = _quickest_us(lambda: its.require(at_hand))
    beyond = found["pick_us"] + found["range_guards_us"] - found["one_length_guards_us"]
    return found | {"beyond_us": beyond}


def _quickest_us(call: Callable[[], Any]) -> float:
    """The median over bursts: a machine that others share is slow at times."""
    bursts: list[float] = []
    for _ in range(BURSTS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        bursts.append((time.perf_counter() - start) / CALLS)
    return 1e6 * statistics.median(bursts)


def run(cache: PlanCache, lengths: list[int], budget_bytes: int, resident: int) -> dict[str, Any]:
    """Steps over lengths: seconds, plans made, peaks above the budget, refusals."""
    made, refused, above, peak = 0, 0, 0, 0
    known: set[int] = set()
    seconds: list[float] = []
    for length in lengths:
        x = batch(length)
        start = time.perf_counter()
        try:
            live = _step(cache, x)
        except BudgetError:
            refused += 1
            continue
        finally:
            seconds.append(time.perf_counter() - start)
        plans = {id(plan) for plan in type(cache)._remat_plans.values()}
        made += len(plans - known)
        known |= plans
        total = live + resident + sum(t.nbytes for t in x)
        peak, above = max(peak, total), above + (total > budget_bytes)
    return {
        "batches": len(lengths), "plans": made, "refused": refused, "peaks_above": above,
        "peak_bytes": peak, "seconds": sum(seconds), "longest_step_s": max(seconds, default=0),
        "median_step_s": statistics.median(seconds or [0]),
    }  # fmt: skip


def _step(cache: PlanCache, x: tuple[Tensor, Tensor]) -> int:
    """The most bytes live in a step, above what was live before; plans are made before it."""
    cache.zero_grad()
    if type(cache)._remat_sizes is None or not type(cache)._remat_plans:
        cache(*x).backward()
        cache.zero_grad()

    def step() -> None:
        cache(*x).backward()

    return max(measure_live(step)[1])


def runs(budget_bytes: int, batches: int, plain_batches: int) -> dict[str, Any]:
    """A run over random lengths with one plan for the range, and its beginning without."""
    drawn = random.Random(0)
    lengths = [drawn.randint(16, SIZES.seq) for _ in range(batches)]
    resident = sum(t.nbytes for t in (*model().parameters(), *model().buffers()))
    most = {1: SIZES.seq}
    found: dict[str, Any] = {}
    for name, count, options in (
        ("dynamic", batches, {"dynamic": "auto", "upto": dict.fromkeys(names(), most)}),
        ("plain", plain_batches, {}),
    ):
        cache = remat.rematerialize(
            model(), budget=budget_bytes, check=False, split="none", **options
        )
        found[name] = run(cache, lengths[:count], budget_bytes, resident)
        print(name, found[name], flush=True)
    return {name: of for name, of in found.items() if of["batches"]}


def failures(found: dict[str, Any]) -> list[str]:
    """What misses its aim."""
    said = {
        f"the family takes {found['plans']:.1f} plans": found["plans"] <= MOST_PLANS,
        f"a new length takes {found['beyond_us']:.0f} us": found["beyond_us"] <= MOST_PICK_US,
        f"{found['points_above_alone']:.2f} points above alone": (
            found["points_above_alone"] <= MOST_POINTS
        ),
    }
    if dynamic := found.get("dynamic"):
        said["the run makes more than one plan"] = dynamic["plans"] == 1
        said["a peak is above the budget"] = not dynamic["peaks_above"]
        said["a batch is refused"] = not dynamic["refused"]
    return [text for text, holds in said.items() if not holds]


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.shapes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--plain-batches", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    asked = parser.parse_args()
    with no_costs():
        found = planning()
        print({name: value for name, value in found.items() if name != "curve"}, flush=True)
        found |= runs(found["budget_bytes"], asked.batches, asked.plain_batches)
    for text in (missed := failures(found)):
        print("MISSED:", text)
    if asked.out:
        facts = {
            "device": cpu_name(), "torch": str(torch.__version__),
            "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip
        kept = {**facts, "budget": BUDGET, "layers": SIZES.layers, "width": SIZES.width, **found}
        asked.out.write_text(json.dumps(kept, indent=1) + "\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
