"""Simulated annealing over orders of the ops: one op at a time goes to another place.

Paper: S. Kirkpatrick et al., "Optimization by Simulated Annealing", 1983,
https://doi.org/10.1126/science.220.4598.671. The energy is the bytes over the limit, summed over
the ops, plus `weight` times the most at any op.
Cost: some 40,000 moves a second if ops move by up to a hundred places.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np

from remat.solver.clock import Clock
from remat.solver.orders.live_curve import LiveCurve, OrderMove

CHECKS_EVERY = 1000
"""Moves between two looks at the clock."""
FULL_EVERY, FULL_SHARE = 100, 0.7
"""Every how many moves to look which places are over the limit; share of moves from one."""


@dataclass(frozen=True, slots=True)
class Cooling:
    """How to anneal.

    Attributes
    ----------
    moves : tried in all. hottest_bytes, coldest_bytes : first and last temperature; it
        falls geometrically in between. weight : of the peak, in the energy.
    """

    moves: int
    hottest_bytes: float
    coldest_bytes: float
    weight: int = 5


def anneal(
    curve: LiveCurve, cooling: Cooling, source: random.Random, time_limit_s: float
) -> tuple[int, ...]:
    """Anneal `curve`, in place; return the order of least energy seen.

    Deterministic for a state of `source`, unless `time_limit_s` ends it early.
    """
    clock = Clock(time_limit_s)
    n_ops = len(curve.order) - 1
    energy = curve.overload_bytes + cooling.weight * curve.worst_bytes
    best, best_energy = curve.ops(), energy
    if not n_ops or cooling.moves < 1:
        return best
    full: list[int] = []
    temperature = cooling.hottest_bytes
    factor = (cooling.coldest_bytes / cooling.hottest_bytes) ** (1 / cooling.moves)
    for tried in range(cooling.moves):
        if best_energy == 0 or (tried % CHECKS_EVERY == 0 and clock.left_s < 0):
            break
        temperature *= factor
        if tried % FULL_EVERY == 0:
            full = np.flatnonzero(curve.over_bytes).tolist()
        op = _op_to_move(curve, full, source)
        move = None if op == n_ops else _draw(curve, op, source)
        if move is None:
            continue
        reached = move.overload_bytes + cooling.weight * move.worst_bytes
        if reached > energy and source.random() >= math.exp((energy - reached) / temperature):
            continue
        curve.apply(move)
        energy = reached
        if energy < best_energy:
            best, best_energy = curve.ops(), energy
    return best


def _op_to_move(curve: LiveCurve, full: list[int], source: random.Random) -> int:
    """Mostly an op at a place over the limit; sometimes any op."""
    if full and source.random() < FULL_SHARE:
        return curve.order[full[int(source.random() * len(full))]]
    return int(source.random() * (len(curve.order) - 1))


def _draw(curve: LiveCurve, op: int, source: random.Random) -> OrderMove | None:
    """Move `op` to a random place of its span, near ones more often; None if it has no other."""
    first, last = curve.span(op)
    place = curve.place[op]
    back, onward = place - first, last - place
    if not back + onward:
        return None
    is_onward = source.random() * (back + onward) >= back
    room = onward if is_onward else back
    distance = int((room + 1) ** source.random())
    return curve.moved(op, place + distance if is_onward else place - distance)
