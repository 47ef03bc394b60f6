"""Whether checkpointing every n-th layer, as torch does it, would do as well as a plan."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from remat.formats import bytes_text, percent_text
from remat.graph_capture.eager_step import with_eager_sizes
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.simulate import simulate
from remat.solver.policies.template import module_blocks, nth_blocks, template_sequence
from remat.solver.problem import Problem
from remat.solver.state import schedule_of

SAME_SPEED = 0.01  # how much slower than the plan, as a fraction, still counts as the same


class EveryNth(msgspec.Struct, frozen=True):
    """Checkpointing layers 0, n, 2n, … of each list of layers, and keeping the others."""

    n: int  # 1 checkpoints every layer
    layers: tuple[str, ...]  # module paths to wrap in `torch.utils.checkpoint.checkpoint`
    containers: tuple[str, ...]  # the lists that they are entries of
    peak_bytes: int
    time_us: float
    overhead: float
    slower: float  # than the plan, as a fraction; below 0 where it is faster

    @property
    def which(self) -> str:
        return "every layer" if self.n == 1 else f"every {_ordinal(self.n)} layer"

    @property
    def where(self) -> str:
        return ", ".join(f"{name}.*" for name in self.containers)

    def __str__(self) -> str:
        return (
            f"checkpointing {self.which} of {self.where} comes within 1 % of this plan: "
            f"{percent_text(self.overhead)} overhead, peak {bytes_text(self.peak_bytes)}"
        )


def every_n_layers(graph: TrainingGraph, result: Result) -> EveryNth | None:
    """The fastest way to checkpoint every n-th layer, if it is within 1 % of the result's time."""
    if result.schedule is None or result.time_us <= graph.time_us:
        return None
    fitting = [
        one for one in candidates(graph, result.time_us) if one.peak_bytes <= result.budget_bytes
    ]
    close = [one for one in fitting if one.slower <= SAME_SPEED]
    return min(close, key=lambda one: (one.time_us, one.peak_bytes), default=None)


def candidates(graph: TrainingGraph, plan_us: float) -> Iterator[EveryNth]:
    """Each n that checkpoints fewer layers than the n before, compared with a plan of `plan_us`."""
    eager = with_eager_sizes(graph)  # such a model runs its ops as eager does
    problem, blocks = Problem.of(eager), module_blocks(eager)
    fewest = len(blocks.names) + 1
    for n in range(1, max(blocks.rank, default=-1) + 2):  # the largest takes only each list's first
        ranked = zip(blocks.names, blocks.rank, strict=True)
        layers = tuple(name for name, rank in ranked if rank % n == 0)
        if len(layers) == fewest:
            continue
        fewest = len(layers)
        sequence = template_sequence(problem, nth_blocks(problem, blocks, n))
        found = simulate(eager, schedule_of(problem, sequence))
        containers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in layers))
        slower = found.time_us / plan_us - 1
        figures = found.peak_bytes, found.time_us, found.overhead, slower
        yield EveryNth(n, layers, containers, *figures)


def _ordinal(n: int) -> str:
    # 11th, 12th and 13th are the exceptions.
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"
