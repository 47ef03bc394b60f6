"""What an arena does to a step on a CPU: `python -m benchmarks.arena [EXAMPLE ...]`.

Each example is planned once and rewritten twice; one of both gets an arena. Their steps run in
turn in one process, so that drift hits both, and their losses and gradients are compared to the
bit. Times are of the process on its cores and not of the clock, and page faults are minor ones.
"""

from __future__ import annotations

import argparse
import resource
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import remat
from remat.formats import bytes_text, percent_text

EXAMPLES = ("gpt", "resnet", "unet")
FOLDER = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True)
class Run:
    """CPU seconds and minor page faults of one step, forward and backward, and its loss."""

    cpu_s: float
    faults: int
    loss: Tensor


def step_of(module: nn.Module, case: dict[str, Any]) -> Callable[[], Run]:
    """A step that drops the gradients of the last one."""
    given = {"target": case["target"]} if "loss_fn" in case else {}

    def step() -> Run:
        torch.manual_seed(0)
        faults, start = _faults(), time.process_time()
        module.zero_grad()
        loss = module(*case["args"], **given)
        loss.backward()
        return Run(time.process_time() - start, _faults() - faults, loss.detach())

    return step


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def gradients(module: nn.Module) -> list[Tensor]:
    """Copies of them."""
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def row(example: str, budget: str, rounds: int) -> str:
    """One line of the table."""
    case = runpy.run_path(str(FOLDER / f"{example}.py"))["factory"]()
    given = {name: case[name] for name in ("loss_fn", "target") if name in case}
    graph = remat.capture(case["model"], case["args"], **given)
    schedule = remat.solve(graph, budget).schedule
    assert schedule is not None, f"no plan of {example} fits {budget}"
    plain, served = (remat.rewrite(case["model"], schedule) for _ in range(2))
    arena = remat.use_arena(served, case["args"], target=case.get("target"))
    steps = {"plain": step_of(plain, case), "arena": step_of(served, case)}
    runs: dict[str, list[Run]] = {name: [] for name in steps}
    found: dict[str, list[Tensor]] = {}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            runs[name].append(step())
            found[name] = [runs[name][-1].loss, *gradients(served)]
    equal = all(map(torch.equal, found["plain"], found["arena"]))
    runs = {name: each[1:] for name, each in runs.items()}
    pairs = zip(runs["arena"], runs["plain"], strict=True)
    change = statistics.median(a.cpu_s / b.cpu_s for a, b in pairs) - 1
    plain_faults, arena_faults = (
        f"{statistics.median(run.faults for run in runs[name]):,.0f}" for name in steps
    )
    cells = (
        example, budget, f"{len(arena.layout.offsets_bytes)}", bytes_text(arena.arena_bytes),
        percent_text(arena.layout.gap), f"{arena.counts.misses}", plain_faults, arena_faults,
        f"{100 * change:+.1f} %", "equal" if equal else "DIFFERENT",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


HEAD = """\
| step | budget | requests | arena | above its load | misses | faults | in the arena | time | bits |
|---|---|---|---|---|---|---|---|---|---|"""


def main(argv: list[str]) -> None:
    """Print the table, a line as it is found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("examples", nargs="*", metavar="EXAMPLE", help=", ".join(EXAMPLES))
    parser.add_argument("--budget", action="append", help="may be given several times")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args(argv)
    print(HEAD)
    for example in asked.examples or EXAMPLES:
        for budget in asked.budget or ["100%", "60%"]:
            print(row(example, budget, asked.rounds), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
