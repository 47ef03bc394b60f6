"""What is cheapest to bring back leaves first, each by the cheaper of the two ways.

Also called: DELTA, dynamic tensor offload and recomputation.
Paper: Y. Tang, C. Wang, Y. Zhang, Y. Liu, X. Zhang, L. Qiao, Z. Lai, D. Li, "DELTA: Dynamically
Optimizing GPU Memory beyond Tensor Recomputation", 2022, https://arxiv.org/abs/2203.15980.
Solves: a knapsack of bytes to release, by ratio. The price of a value is the lesser of making it
again and of what its copies take beyond the time in which nobody reads it. A released value is
hosted if the link can take it out before forward ends, and bring it in before its use beside those
hosted so far; else it is made again. The bytes to release are tried in equal steps, and the
fastest schedule whose true peak fits is taken.
Unlike the paper: its filter and director run online; here they choose for the whole step.
Optimal: where the step fits as it is. Cost: O(steps · copies · (copies + ops)).
Shortcomings: a price does not know what else is released, neither the chains behind a value that
is made again, nor the queue on the link.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from remat.solver.offload.policy import SteppedPolicy
from remat.solver.offload.released import Choice, Saved


@dataclass(frozen=True)
class Delta(SteppedPolicy):
    """Solver that releases by price.

    Attributes
    ----------
    steps : shares of the bytes tried, none and all included.
    least_bytes : smaller values stay.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    name: ClassVar[str] = "delta"

    def choices(self, saved: Saved) -> Iterator[Choice]:
        """A choice for each share of bytes to release; none where nothing is large enough."""
        size_bytes = saved.problem.size_bytes
        ranked = sorted(saved.large, key=lambda v: price(saved, v))
        for i in range(1, self.steps if ranked else 0):
            short_bytes = saved.total_bytes * i // (self.steps - 1)
            released: list[int] = []
            for v in ranked:
                if short_bytes <= 0:
                    break
                released.append(v)
                short_bytes -= size_bytes[v]
            hosted = hidden(saved, released)
            yield Choice(hosted, frozenset(released) - hosted)


def price(saved: Saved, v: int) -> tuple[float, float]:
    """What it costs for each byte to be without `v`; the second entry decides between equals."""
    size_bytes, again_us = saved.problem.size_bytes[v], saved.again_us[v]
    unread_us = saved.begin_us[saved.first_read[v]] - saved.begin_us[saved.last_read[v] + 1]
    copies_us = saved.links.d2h.us(size_bytes) + saved.links.h2d.us(size_bytes)
    exposed_us = max(0.0, copies_us - float(unread_us))
    return min(again_us, exposed_us) / size_bytes, again_us / size_bytes


def hidden(saved: Saved, released: Sequence[int]) -> frozenset[int]:
    """Those of `released` to host: copies that hide, and what no op may make again."""
    links, size_bytes = saved.links, saved.problem.size_bytes
    free_us, hosted = 0.0, list[int]()
    for v in sorted(released, key=lambda v: saved.problem.producer[v]):
        made_us = float(saved.begin_us[saved.problem.producer[v] + 1])
        out_us = max(free_us, made_us) + links.d2h.us(size_bytes[v])
        first = saved.first_read[v]
        sooner = [u for u in hosted if saved.first_read[u] <= first]
        back_us = sum(links.h2d.us(size_bytes[u]) for u in (*sooner, v))
        hides = out_us <= saved.forward_us
        hides = hides and back_us <= saved.begin_us[first] - saved.forward_us
        if hides or math.isinf(saved.again_us[v]):
            free_us = out_us
            hosted.append(v)
    return frozenset(hosted)
