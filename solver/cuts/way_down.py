"""Ways down to the least peak known, for where nothing fits the budget.

Source: greedy repair (`repair`) under a limit that is lowered by 2 % again and again, from the
schedule that keeps everything, from cuts that aim near the largest working set, and on large
graphs from blocks that keep the least.
Cost: some seconds on a thousand ops. Shortcomings: the least peak found, not the least.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from remat.solver.blocks.hierarchical import Hierarchical
from remat.solver.bounds.cut_program import CutProgram, expand
from remat.solver.bounds.floor import prove_nothing_fits
from remat.solver.local_search.repair import Repair, fill
from remat.solver.problem import largest_working_set_bytes
from remat.solver.search import Search
from remat.solver.state import State
from remat.solver.stopping import RELAXED

LEAST_TARGETS = (0.05, 0.2)
"""Parts of the room between the largest working set and the peak that cuts aim for."""
LEAST_POWERS = (0.6, 1.0)


def take_least_peak(search: Search, plain: State) -> None:
    """Name the least peak known, or take its schedule if it fits after all.

    The ways down start from the graph alone, not from the budget. So a solve for the
    budget that an infeasible result names finds this schedule again, in any process. A search
    near another budget may come across a lower peak by chance; that one is not named.
    """
    if search.is_large:
        search.offer_least(plain)
    prove_nothing_fits(search)
    if search.out_of_time():
        return
    search.say("looking for the least peak")
    for start in least_starts(search, plain):
        for power in LEAST_POWERS:
            _repair_ever_lower(search, start.copy(), power)
    if search.best_state is not None:
        state = search.best_state.copy()
        fill(state, search.budget_bytes, search)
        search.offer(state)


def least_starts(search: Search, plain: State) -> Iterator[State]:
    """Schedules to go down from: the one that keeps all, and cuts near the least peak.

    On large graphs, whose way down is long, first those whose repeated blocks keep the least.
    """
    if search.is_large:
        yield from Hierarchical().least_states(search)
    yield plain
    problem = search.problem
    least_bytes = largest_working_set_bytes(problem)
    peak_bytes = plain.peak_bytes
    place = int(np.argmax(peak_bytes[: problem.n_ops]))
    room = int(peak_bytes[place]) - problem.resident_bytes - least_bytes
    for part in LEAST_TARGETS:
        if search.out_of_time():
            return
        target_bytes = problem.resident_bytes + least_bytes + int(part * room)
        program = CutProgram(problem, (place,), target_bytes)
        solution = program.relaxed(RELAXED.of(search.left_s))
        if solution.values is not None:
            yield State.from_recomputed(problem, expand(solution))


def _repair_ever_lower(search: Search, state: State, power: float) -> None:
    """Lower the limit by 2 % as long as repair can follow."""
    while not search.out_of_time():
        peak_bytes = int(state.peak_bytes.max())
        search.offer_least(state)
        limit_bytes = peak_bytes - max(peak_bytes // 50, 1)
        if not Repair(state, limit_bytes, power, search).run():
            search.offer_least(state)
            return
