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
from benchmarks import GAP_OF_FIGURES
from remat.analysis.plan_figures import use_arena
from remat.formats import bytes_text, percent_text
from remat.ranks.same_order import agreed_rewrite
from remat.rewriter.arena.arena import Arena

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


@dataclass(frozen=True)
class Row:
    """One plan with an arena and without.

    Attributes
    ----------
    faults : medians of minor page faults of a step, without the arena and in it.
    change : of CPU time, as its fraction, the median of pairs.
    """

    example: str
    budget: str
    arena: Arena
    faults: tuple[float, float]
    change: float
    is_equal: bool

    def __str__(self) -> str:
        layout = self.arena.layout
        cells = (
            self.example, self.budget, f"{len(layout.offsets_bytes)}",
            bytes_text(layout.arena_bytes), percent_text(layout.gap),
            f"{self.arena.counts.misses}", *(f"{faults:,.0f}" for faults in self.faults),
            f"{100 * self.change:+.1f} %", "equal" if self.is_equal else "DIFFERENT",
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


def measured(example: str, budget: str, rounds: int, **of_solve: Any) -> Row:
    """Steps of an example's plan, `rounds` of each kind after one that is not counted."""
    case = runpy.run_path(str(FOLDER / f"{example}.py"))["factory"]()
    given = {name: case[name] for name in ("loss_fn", "target") if name in case}
    graph = remat.capture(case["model"], case["args"], split="none", **given)
    schedule = remat.solve(graph, budget, **of_solve).schedule
    assert schedule is not None, f"no plan of {example} fits {budget}"
    plain, served = (agreed_rewrite(case["model"], schedule) for _ in range(2))
    arena = use_arena(served, case["args"], target=case.get("target"))
    steps = {"plain": step_of(plain, case), "arena": step_of(served, case)}
    runs: dict[str, list[Run]] = {name: [] for name in steps}
    found: dict[str, list[Tensor]] = {}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            runs[name].append(step())
            found[name] = [runs[name][-1].loss, *gradients(served)]
    pairs = list(zip(runs["plain"][1:], runs["arena"][1:], strict=True))
    faults = (statistics.median(one.faults for one in each) for each in zip(*pairs, strict=True))
    return Row(
        example, budget, arena,
        faults=(next(faults), next(faults)),
        change=statistics.median(b.cpu_s / a.cpu_s for a, b in pairs) - 1,
        is_equal=all(map(torch.equal, found["plain"], found["arena"])),
    )  # fmt: skip


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
            print(measured(example, budget, asked.rounds, gap=GAP_OF_FIGURES), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
