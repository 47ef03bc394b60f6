"""Plans from an online policy: what it does at a budget, with and without needless runs.

A policy evicts before it knows what will be read, so some of its recomputations turn out not to
be needed. Its runs over a captured graph are a sequence of ops, which is offered as it is. With
`prune`, the sequence also becomes retention bits, filled with what still fits. That drops the
needless recomputations, and the outcome is offered too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from remat.graph_capture.graph import TrainingGraph
from remat.solver.local_search.repair import fill
from remat.solver.policies.eviction import Policy
from remat.solver.policies.online import NoRoomError, OnlineRun
from remat.solver.problem import Problem, least_needed_bytes
from remat.solver.result import Result
from remat.solver.search import Listener, Search
from remat.solver.sequence import recomputed_by_stage
from remat.solver.state import State
from remat.solver.stopping import LEAST_PEAK_TRIES
from remat.solver.store_all import store_all_state

MakePolicy = Callable[[Problem, int], Policy]
"""From the graph and the bytes of room beside what is resident."""


@dataclass(frozen=True)
class PolicyPlanner:
    """A solver that plans what one policy does; each names itself and its policy.

    Attributes
    ----------
    prune : offer the sequence without its superfluous recomputations too.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    name: ClassVar[str]
    policy: ClassVar[type[Policy]]

    prune: bool = True
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """What the policy does within `budget_bytes`; no bound beyond every op once."""
        search = Search.of(self, self.name, graph, budget_bytes)
        return plan_online(search, self.policy, prune=self.prune)


def plan_online(search: Search, make: MakePolicy, *, prune: bool) -> Result:
    """Run the policy at the search's budget; if it fails, look for its least peak.

    The step that keeps everything is offered first: if it fits, a policy evicts nothing.
    """
    with search.until_interrupted():
        plain = store_all_state(search.problem)
        search.offer_least(plain)
        if search.best is None:
            _plan(search, make, prune, int(plain.peak_bytes.max()))
    return search.result()


def _plan(search: Search, make: MakePolicy, prune: bool, plain_bytes: int) -> None:
    least_bytes = least_needed_bytes(search.problem)
    if search.budget_bytes < least_bytes:
        search.proved_infeasible = True
        search.message = f"one op alone needs {least_bytes} bytes with its inputs and outputs"
    else:
        search.say("running the policy at the budget")
        sequence = run_at(search, make, search.budget_bytes)
        if sequence is not None:
            _offer(search, sequence, prune)
    if search.best is None:
        _bisect_least_peak(search, make, prune, (least_bytes, plain_bytes))


def run_at(search: Search, make: MakePolicy, budget_bytes: int) -> list[int] | None:
    """The ops that the policy runs at `budget_bytes`; None if it finds no room, or no time."""
    problem = search.problem
    policy = make(problem, budget_bytes - problem.resident_bytes)
    try:
        return OnlineRun(problem, policy, search.out_of_time).run()
    except NoRoomError:
        return None


def _offer(search: Search, sequence: Sequence[int], prune: bool) -> None:
    search.offer_sequence(sequence)
    if prune:
        search.say("carrying what fits instead of recomputing it")
        state = _state_of(search.problem, sequence)
        if search.offer(state):
            fill(state, search.budget_bytes, search)
            search.offer(state)


def _state_of(problem: Problem, sequence: Sequence[int]) -> State:
    return State.from_recomputed(problem, recomputed_by_stage(problem, sequence))


def _bisect_least_peak(
    search: Search, make: MakePolicy, prune: bool, range_bytes: tuple[int, int]
) -> None:
    """Bisect for the least budget at which the policy succeeds, and name that peak.

    The tries start from the graph alone, not from the budget. So a solve for the budget
    that an infeasible result names finds this schedule again.
    """
    low_bytes, high_bytes = range_bytes
    for _ in range(LEAST_PEAK_TRIES.most):
        middle_bytes = (low_bytes + high_bytes) // 2
        if middle_bytes in (low_bytes, high_bytes) or search.out_of_time():
            break
        search.say(f"trying the policy at {middle_bytes} bytes")
        sequence = run_at(search, make, middle_bytes)
        if sequence is None:
            low_bytes = middle_bytes
        else:
            high_bytes = middle_bytes
            _offer_least(search, sequence, prune)
    if search.best is not None:
        search.message = "no room at the budget itself; this is what the policy does at another"


def _offer_least(search: Search, sequence: Sequence[int], prune: bool) -> None:
    """Take what the policy did if it fits after all or has the least peak yet."""
    search.offer_sequence(sequence, or_least=True)
    if prune:
        search.offer_least(_state_of(search.problem, sequence))
