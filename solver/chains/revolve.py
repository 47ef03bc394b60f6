"""Binomial checkpointing on the stages of a chain, as if all were alike.

Also called: revolve, treeverse, multistage checkpointing (with `disk_slots`), mixed
checkpointing (with `mixed`).
Paper: A. Griewank, A. Walther, "Algorithm 799: Revolve", 2000,
https://doi.org/10.1145/347837.347846; P. Stumm, A. Walther, "MultiStage Approaches for
Optimal Offline Checkpointing", 2009, https://doi.org/10.1137/080718036; J. R. Maddison,
"Step-based checkpointing with high-level algorithmic differentiation", 2024,
https://arxiv.org/abs/2305.09568.
Solves: fewest forward runs of stages on a uniform chain with a number of slots for states.
The graph is cut into stages at its articulation points. The greatest number of slots whose
schedule fits is found by bisection; the fastest schedule is filled with what still fits.
Optimal: on chains whose stages are alike in time and bytes (`binomial` counts the runs).
Cost: O(stages · repetitions); `mixed` O(stages² · slots).
Shortcomings: takes chains only; blind to times and sizes; runs a stage's forward again right
before its backward even where there is room, unless the fill carries its values.
With `disk_slots` each state leaves right after its last use and comes right before its next, so
the device waits for every copy, and nothing is filled: `joint` places copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat.graph_capture.errors import SolverError, option
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.solver.chains.binomial import binomial_actions, mixed_actions
from remat.solver.chains.chain import Action, Chain
from remat.solver.chains.disk import with_disk
from remat.solver.chains.tries import ChainSearch, chain_or_done
from remat.solver.result import Result
from remat.solver.search import Listener, Search


@dataclass(frozen=True)
class Revolve:
    """Solver for chains of stages that are alike.

    Attributes
    ----------
    slots : how many states are stored (0: as many as fit).
    disk_slots : how many of those wait in host memory; the least read ones do.
    mixed : a slot may hold what backward reads of a stage instead of a state.
    stages : the most stages.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    slots: int = 0
    disk_slots: int = 0
    mixed: bool = False
    stages: int = 128
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        if self.slots < 0:
            raise SolverError(f"slots must be 0 (chosen for you) or more, not {self.slots}")
        if self.disk_slots < 0:
            raise SolverError(f"disk_slots must be 0 or more, not {self.disk_slots}")
        if self.stages < 2:
            raise SolverError(f"stages must be 2 or more, not {self.stages}")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The best such schedule within `budget_bytes`; no bound beyond every op once.

        Raises
        ------
        SolverError : states wait on the host, and the graph has no links.
        """
        if self.disk_slots and graph.links is None:
            raise SolverError(
                f"disk_slots needs a link to the host: capture with {option('host', '64GiB')}"
            )
        search = Search.of(self, "revolve", graph, budget_bytes)
        with search.until_interrupted():
            chain = chain_or_done(search, self.stages)
            if chain is not None:
                self._solve_chain(search, chain)
        return search.result()

    def _solve_chain(self, search: Search, chain: Chain) -> None:
        length = len(chain.stages)

        def change(made: Schedule, actions: Sequence[Action]) -> Schedule:
            return with_disk(search.problem, chain, made, actions, self.disk_slots)

        tries = ChainSearch(search, chain, change if self.disk_slots else None)
        search.say(f"chain of {length} stages")
        if self.slots:
            tries.fits(self._actions(length, min(self.slots, length)))
        else:
            tries.try_rising(lambda choice: self._actions(length, choice + 1), length)
        if not self.disk_slots:
            tries.fill_best()

    def _actions(self, length: int, slots: int) -> list[Action]:
        return (mixed_actions if self.mixed else binomial_actions)(length, slots)
