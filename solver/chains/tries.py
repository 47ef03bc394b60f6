"""What the chain solvers share: try schedules of a chain on the real graph, fill the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.solver.chains.chain import Action, Chain, find_chain, ops_of_actions
from remat.solver.local_search.repair import fill
from remat.solver.search import Search
from remat.solver.sequence import recomputed_by_stage, schedule_of
from remat.solver.state import State
from remat.solver.store_all import store_all_state

NEIGHBOURS = 3
"""Choices tried above the greatest that fits, since a peak may fall from one to the next."""
FEW = 10000
"""All choices are tried if choices times ops are at most this many; else bisection."""
FILLED = 3
"""How many of the fastest schedules are filled, beside the slowest, which leaves most room."""


def chain_or_done(search: Search, most_stages: int) -> Chain | None:
    """The chain of the graph; None if keeping all fits, or if the graph is no chain.

    The search has a schedule then, or a message and the least peak known.
    """
    search.offer_least(store_all_state(search.problem))
    if search.best is not None:
        return None
    search.say("looking for a chain of stages")
    chain = find_chain(search.problem, most_stages)
    if not chain.stages:
        search.message = chain.why_not
    return chain if chain.stages else None


class ChainSearch:
    """Tries chain schedules in one search; remembers the ops of those that fit.

    `change`, if any, turns a schedule made from actions into the one to be judged.
    """

    def __init__(
        self,
        search: Search,
        chain: Chain,
        change: Callable[[Schedule, Sequence[Action]], Schedule] | None = None,
    ) -> None:
        self.search, self.chain, self.change = search, chain, change
        self.found: dict[tuple[int, ...], float] = {}

    def fits(self, actions: Sequence[Action]) -> bool:
        """Judge the schedule of `actions` and take it if it is the best; return whether it fits."""
        search = self.search
        sequence = tuple(op for run in ops_of_actions(self.chain, actions) for op in run)
        made = schedule_of(search.problem, sequence)
        if self.change is not None:
            made = self.change(made, actions)
        found = simulate(search.graph, made)
        if not search.offer_judged(made, found, or_least=True):
            return False
        self.found[sequence] = found.time_us
        return True

    def try_rising(self, actions_of: Callable[[int], Sequence[Action]], count: int) -> None:
        """Find the greatest choice in 0..count - 1 that fits, by bisection if there are many.

        A greater choice takes more memory and less time.
        """
        if count * self.search.problem.n_ops <= FEW:
            self._try_each(actions_of, range(count))
            return
        low, high = 1, count - 1 if self.fits(actions_of(0)) else 0
        while low <= high and not self.search.out_of_time():
            middle = (low + high) // 2
            if self.fits(actions_of(middle)):
                low = middle + 1
            else:
                high = middle - 1
        self._try_each(actions_of, range(low, min(low + NEIGHBOURS, count)))

    def _try_each(self, actions_of: Callable[[int], Sequence[Action]], choices: range) -> None:
        for choice in choices:
            if self.search.out_of_time():
                return
            self.fits(actions_of(choice))

    def fill_best(self) -> None:
        """Carry what still fits beside the fastest schedules, and beside the slowest."""
        search = self.search
        search.say("carrying what still fits")
        ranked = sorted(self.found, key=lambda sequence: self.found[sequence])
        chosen = [*ranked[:FILLED], *ranked[FILLED:][-1:]]
        # On a large graph a fill takes seconds, so the fastest schedule alone is filled.
        for sequence in chosen[:1] if search.is_large else chosen:
            if search.out_of_time():
                return
            recomputed = recomputed_by_stage(search.problem, sequence)
            state = State.from_recomputed(search.problem, recomputed)
            if search.offer(state):
                fill(state, search.budget_bytes, search)
                search.offer(state)
