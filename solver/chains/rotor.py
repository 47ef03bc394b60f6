"""The optimal schedule of a heterogeneous chain, by dynamic programming over memory.

Also called: rotor, optimal persistent checkpointing; its ancestor for one memory a step is
revolve.
Paper: O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal
checkpointing for heterogeneous chains: how to train deep neural networks with limited
memory", 2019, https://arxiv.org/abs/1911.13214.
Solves: least time of a chain of stages with any times and sizes, where a value that was
stored stays until backward has passed it (persistent), and a stage saves all that its
backward reads or nothing. The graph is cut into stages at its articulation points; what the
program finds is expanded to real ops, judged, and filled with what still fits.
Optimal: on chains, among persistent schedules, where the sizes of stages are whole slots.
Cost: O(stages³ · slots), vectorised: some seconds for 128 stages.
Shortcomings: takes chains only; cuts longer ones coarser; rounds sizes up to slots, which
limits beyond the budget make up for in part; not optimal at tight budgets with mixed sizes,
where it can pay to drop a stored value and make it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.solver.chains.binomial import binomial_actions
from remat.solver.chains.chain import Chain
from remat.solver.chains.rotor_table import ChainModel, RotorTable, solve_rotor
from remat.solver.chains.tries import ChainSearch, chain_or_done
from remat.solver.result import Result
from remat.solver.search import Listener, Search

BEYOND = 1.25
"""The model's limit goes up to this multiple of the budget.

The model counts more bytes than are live. A schedule that it puts beyond the budget may fit,
and the judge says so.
"""
LEAST_TRIES = 3
"""Schedules of least memory that are judged where nothing else fits."""


@dataclass(frozen=True)
class Rotor:
    """Solver for chains.

    Attributes
    ----------
    slots : units that the memory is divided into. stages : the most stages.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    slots: int = 500
    stages: int = 128
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise SolverError(f"slots must be 1 or more, not {self.slots}")
        if self.stages < 2:
            raise SolverError(f"stages must be 2 or more, not {self.stages}")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The best chain schedule within `budget_bytes`; no bound beyond every op once."""
        search = Search.of(self, "rotor", graph, budget_bytes)
        with search.until_interrupted():
            chain = chain_or_done(search, self.stages)
            if chain is not None:
                self._solve_chain(search, chain)
        return search.result()

    def _solve_chain(self, search: Search, chain: Chain) -> None:
        tries = ChainSearch(search, chain)
        model = ChainModel.of(chain)
        enough_bytes = model.enough_bytes()
        room_bytes = int((search.budget_bytes - chain.base_bytes) * BEYOND)
        if room_bytes > 0:
            self._try_table(tries, model, min(room_bytes, enough_bytes))
        if search.best is None and not search.out_of_time():
            search.say("looking for the least peak")
            self._try_least(tries, model, enough_bytes)
        tries.fill_best()

    def _try_table(self, tries: ChainSearch, model: ChainModel, limit_bytes: int) -> None:
        tries.search.say(f"chain of {len(model.entry_bytes)} stages")
        table = solve_rotor(model, limit_bytes, self.slots, tries.search.out_of_time)
        if table is not None:
            steps = _breakpoints(table)
            tries.try_rising(lambda choice: table.actions(steps[choice]), len(steps))

    def _try_least(self, tries: ChainSearch, model: ChainModel, limit_bytes: int) -> None:
        """Try schedules of the least memory; none of them depends on the budget.

        Schedules of a uniform chain with few states are among them. They may need less memory
        than the model says, since it counts more than is live.
        """
        table = solve_rotor(model, limit_bytes, self.slots, tries.search.out_of_time)
        if table is not None:
            for slots in _breakpoints(table)[:LEAST_TRIES]:
                tries.fits(table.actions(slots))
            for slots in range(1, LEAST_TRIES + 1):
                tries.fits(binomial_actions(len(model.entry_bytes), slots))


def _breakpoints(table: RotorTable) -> list[int]:
    """The numbers of slots at which the time of the whole chain falls, the least first."""
    whole_us = table.whole_us
    falls = np.concatenate((np.isfinite(whole_us[:1]), whole_us[1:] < whole_us[:-1]))
    return [int(slots) for slots in np.flatnonzero(falls)]
