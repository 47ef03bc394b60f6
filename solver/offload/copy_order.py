"""Better orders of copies down, where the device waits for the end of one.

In the order of their making, a value for which there would be room for long goes down before one
that must leave at once. Least lateness on one machine with release times is hard already (Lenstra,
Rinnooy Kan, Brucker 1977, https://doi.org/10.1016/S0167-5060(08)70743-X), and a due time is not
known before all copies are placed. So the order changes step by step: where a value is waited for,
it goes before others that are copied while it is there, or one of them goes after it. What comes of
that is placed and judged, and the first that is faster is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from remat.schedules.schedule import Free
from remat.schedules.simulation import Copy
from remat.solver.offload.placing import Placed
from remat.solver.search import Search
from remat.solver.stopping import REORDERED

Order = tuple[str, ...]


def in_better_order(
    search: Search, placed: Placed, order: Order, place: Callable[[Order], Placed | None]
) -> Placed:
    """The fastest placement found from `placed`, whose copies down are in `order`.

    Parameters
    ----------
    place : what comes of another order; None where that is not possible.
    """
    left = REORDERED.at(search.problem.n_ops)
    others = _others(placed, order)
    while left > 0 and not search.out_of_time():
        other = next(others, None)
        if other is None:
            break
        left -= 1
        found = place(other)
        if found is not None and found.found.time_us < placed.found.time_us:
            placed, order = found, other
            others = _others(placed, order)
    return placed


def _others(placed: Placed, order: Order) -> Iterator[Order]:
    """Orders in which a value that is waited for goes down earlier; the longest wait first."""
    down = {copy.value: copy for copy in placed.found.copies if copy.link == "d2h"}
    for name in _waited_for(placed, down):
        issued_us = placed.found.clock_us[down[name].step]
        i = order.index(name)
        for j in reversed(range(i)):
            before = down.get(order[j])
            if before is None:
                continue
            yield (*order[:j], *order[j + 1 : i + 1], order[j], *order[i + 1 :])
            if before.start_us < issued_us:  # the link is idle until there is `name`
                break
            if j < i - 1:
                yield (*order[:j], name, *order[j:i], *order[i + 1 :])


def _waited_for(placed: Placed, down: dict[str, Copy]) -> list[str]:
    """Values the end of whose copy down is waited for: to be freed, or to come back."""
    waits: dict[str, float] = {}
    back = {(copy.value, copy.start_us) for copy in placed.found.copies if copy.link == "h2d"}
    for stall in placed.found.stalls:
        copy = down.get(stall.value)
        if copy is None:
            continue
        is_freed = isinstance(placed.schedule.steps[stall.step], Free)
        if is_freed or (copy.value, copy.end_us) in back:
            waits[copy.value] = waits.get(copy.value, 0.0) + stall.us
    return sorted(waits, key=lambda name: (-waits[name], name))
