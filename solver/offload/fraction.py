"""One fraction of each layer goes to the host; norms and activation functions are made again.

Also called: pipeline-parallel-aware offloading with compute-memory balanced checkpointing.
Paper: T. Yuan, Y. Liu, X. Ye, S. Zhang, J. Tan, B. Chen, C. Song, D. Zhang, "Accelerating the
Training of Large Language Models using Efficient Activation Rematerialization and Optimal Hybrid
Parallelism", 2024, https://www.usenix.org/conference/atc24/presentation/yuan.
Solves: no stated problem. Of each layer but the last, the largest values are sent while they fill
no more than the fraction; cheap elementwise results are always made again. The fraction is tried
in equal steps, and the fastest schedule whose true peak fits is taken.
Unlike the paper: whole values are sent, of one stage; there is no pipeline.
Optimal: where the step fits as it is. Cost: O(steps · copies · ops).
Shortcomings: the same fraction early and late, although late layers have little time to leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from remat.solver.offload.policy import SteppedPolicy
from remat.solver.offload.released import Choice, Saved

CHEAP = ("norm", "gelu", "silu", "rsqrt", "mul", "pow", "mean")
"""In the names of ops that norms and activation functions are made of."""


@dataclass(frozen=True)
class Fraction(SteppedPolicy):
    """Solver that hosts a fraction of each layer.

    Attributes
    ----------
    steps : fractions tried, 0 and 1 included.
    least_bytes : smaller values stay.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    name: ClassVar[str] = "fraction"

    steps: int = 25

    def choices(self, saved: Saved) -> Iterator[Choice]:
        """A choice for each fraction, from 0 on; none where backward reads nothing large."""
        kept = [v for v in saved.values if not is_cheap(saved, v)]
        large = frozenset(saved.large)
        layers = list(saved.in_layers(v for v in kept if v in large).values())
        for i in range(self.steps if saved.large else 0):
            part = i / (self.steps - 1)
            hosted = [v for layer in layers[:-1] for v in largest_of(saved, layer, part)]
            yield saved.released(hosted, kept)


def is_cheap(saved: Saved, v: int) -> bool:
    """Whether the op that makes `v` is one of a norm or an activation function."""
    op = saved.problem.graph.ops[saved.problem.producer[v]]
    return not op.pinned and any(word in op.target for word in CHEAP)


def largest_of(saved: Saved, layer: list[int], part: float) -> list[int]:
    """The largest values of `layer`, as long as they fill no more than that part of its bytes."""
    size_bytes = saved.problem.size_bytes
    room_bytes = int(part * sum(size_bytes[v] for v in layer))
    found: list[int] = []
    for v in sorted(layer, key=lambda v: -size_bytes[v]):
        if size_bytes[v] <= room_bytes:
            found.append(v)
            room_bytes -= size_bytes[v]
    return found
