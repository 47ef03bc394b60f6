"""Runs an online eviction policy over a captured graph and records what it does as a plan.

Missing inputs of an op are made again, then values evicted until its outputs and workspace fit.
Never evicted is what an op in progress reads, the caller holds, or cannot be made again. A policy
is told of the future only what reference counting knows: more, and it would not be the published
one. So a value that no later op reads goes at once. One that cannot be made again is given up if
that frees at least what it pins, or when nothing is left to evict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.solver.local_search.repair import offer_filled
from remat.solver.policies.eviction import Policy, ValueStatistics, links
from remat.solver.problem import Problem, least_needed_bytes
from remat.solver.search import Listener, Search
from remat.solver.state import recomputed_in, state_of, store_all_state
from remat.solver.stopping import LEAST_PEAK_TRIES

_Status = Literal["unmade", "live", "evicted", "lost"]
_Stack = list[tuple[int, tuple[int, ...]]]
_THRASHING = 30  # a policy that has run so many times the graph's ops is given up


class NoRoomError(Exception):
    """The policy cannot run the graph in this room, or time is up."""


class OnlineRun:
    """One run of `policy` over the graph of `problem`; `run` gives the sequence of ops."""

    def __init__(
        self, problem: Problem, policy: Policy, is_over: Callable[[], bool] | None = None,
        most_runs: int = _THRASHING,
    ) -> None:  # fmt: skip
        self.problem, self.policy = problem, policy
        self.is_over, self.most_runs = is_over or (lambda: False), most_runs * problem.n_ops
        self.books = ValueStatistics(problem)
        self.sequence: list[int] = []
        self.status: list[_Status] = ["unmade"] * problem.n_values  # lost ones cannot be made again
        self._stage = 0
        self._live = bytearray(problem.n_values)
        self._fixed = bytearray(problem.n_values)
        self._locks = [0] * problem.n_values
        self._stages_left = [0] * problem.n_values  # stages to come that need the value
        self._awaited = [0] * problem.n_values  # recomputations of this stage that will read it
        self._planned: set[int] = set()
        self._spare: dict[int, None] = {}  # read by no later op, kept to make others again
        self._above = links(problem)[1]
        for needs in problem.needs:
            for v in needs:
                self._stages_left[v] += 1

    def run(self) -> list[int]:
        """NoRoomError: no room, the policy thrashes, or `is_over` says so."""
        for t in range(self.problem.n_ops + 1):
            self._stage = t
            for op in recomputed_in(self.problem, self._live, (), t):  # what they read lives
                self._planned.add(op)
                for v in self.problem.inputs[op]:
                    self._awaited[v] += 1
            self._run_with_inputs(t)
            if t < self.problem.n_ops:
                self._leave(t)
        return self.sequence

    def _leave(self, t: int) -> None:
        for v in self.problem.needs[t]:
            self._stages_left[v] -= 1
        # The caller holds these from now on.
        for v in sorted(self.problem.held) if t == self.problem.n_forward - 1 else ():
            self._fixed[v] = 1
            self._mark(v)
        for v in (*self.problem.needs[t], *self.problem.outputs[t]):
            self._free_if_dead(v)

    def _run_with_inputs(self, t: int) -> None:
        """Run op t, after the ops that make its missing inputs again, depth first."""
        stack: _Stack = []  # no recursion: missing inputs may be as deep as the graph
        self._open(t, self.problem.needs[t], stack)
        while stack:
            op, reads = stack[-1]
            if (missing := next((v for v in reads if not self._live[v]), None)) is not None:
                again = self.problem.producer[missing]
                self._open(again, self.problem.inputs[again], stack)
                continue
            if op < self.problem.n_ops:
                self._execute(op)
            stack.pop()
            self._close(op, reads)

    def _open(self, op: int, reads: tuple[int, ...], stack: _Stack) -> None:
        stack.append((op, reads))
        for v in reads:
            self._locks[v] += 1  # an op in progress reads it
            self._mark(v)

    def _close(self, op: int, reads: tuple[int, ...]) -> None:
        was_planned = op in self._planned
        self._planned.discard(op)
        for v in reads:
            self._locks[v] -= 1
            self._awaited[v] -= was_planned
            self._mark(v)
        if op < self._stage:  # else `_leave` does this
            for v in (*reads, *self.problem.outputs[op]):
                self._free_if_dead(v)

    def _execute(self, op: int) -> None:
        """Run `op`. Live outputs are replaced, unless the caller holds them."""
        if self.is_over() or len(self.sequence) > self.most_runs:
            raise NoRoomError
        books, outputs = self.books, self.problem.outputs[op]
        copied_bytes = 0
        for v in outputs:
            if not self._live[v]:
                continue
            if self._fixed[v]:
                copied_bytes += books.size_bytes[v]  # it stays, and the run's copy is dropped
            else:
                self._take_away(v, "unmade")
        made = [v for v in outputs if not self._live[v]]
        for v in made:
            self._place(v, self.problem.size_bytes[v], op)
        # The workspace is one more block.
        self._place(self.problem.n_values, self.problem.workspace_bytes[op] + int(copied_bytes), op)
        self.policy.memory.release(self.problem.n_values)
        self._stamp(op, made)

    def _stamp(self, op: int, made: list[int]) -> None:
        self.sequence.append(op)
        books = self.books
        for v in self.problem.inputs[op]:
            books.used_us[v] = books.clock_us
        books.clock_us += self.problem.cost_us[op] or 1.0
        for v in made:
            if self.status[v] == "evicted":
                self.policy.returned(v)
            self.status[v] = "live"
            self._live[v] = 1
            self._fixed[v] |= self.problem.no_recompute[op]
            books.used_us[v] = books.clock_us
            books.reruns[v] += op < self._stage
            self._mark(v)

    def _place(self, block: int, size_bytes: int, op: int) -> None:
        while not self.policy.place(block, size_bytes, op):
            victims = self.policy.victims(self.books, size_bytes)
            for v in victims:
                self._evict(v)
            if not victims and not self._give_up_spare():
                raise NoRoomError

    def _evict(self, v: int) -> None:
        self._take_away(v, "evicted")
        self.policy.evicted(v)

    def _take_away(self, v: int, status: _Status) -> None:
        self.policy.memory.release(v)
        self.status[v] = status
        self._live[v] = 0
        self._mark(v)

    def _mark(self, v: int) -> None:
        can_go = self._live[v] and not self._fixed[v] and not self._locks[v]
        # Without bytes it makes no room.
        self.books.evictable[v] = 1 if can_go and self.problem.size_bytes[v] else 0

    def _is_dead(self, v: int) -> bool:
        return not (self._stages_left[v] or self._locks[v] or self._awaited[v])

    def _free_if_dead(self, v: int) -> None:
        is_spent = self._live[v] and self._is_dead(v)
        if is_spent and not self._fixed[v]:
            self._evict(v)
        elif is_spent and not self._lose(v, self.problem.size_bytes[v]):
            self._spare[v] = None

    def _give_up_spare(self) -> bool:
        """Give up a value that only others need to be made; returns whether one was."""
        for v in list(self._spare):
            is_spare = self._live[v] and self._is_dead(v) and self.problem.size_bytes[v]
            if is_spare and self._lose(v, 1 << 62):
                del self._spare[v]
                return True
        return False

    def _lose(self, source: int, most_bytes: int) -> bool:
        """Let go of a value for good; returns whether that was allowed."""
        lost, bound, waiting = dict[int, None](), dict[int, None](), [source]
        while waiting:
            for u in self._above[waiting.pop()]:
                if self._live[u] and not self._fixed[u]:
                    bound[u] = None  # once its source is gone it cannot be made again, so it stays
                elif self.status[u] == "evicted" and u not in lost:
                    if not self._is_dead(u):
                        return False  # it is needed
                    lost[u] = None  # nobody needs it
                    waiting.append(u)
        # That would pin more than it frees.
        if sum(self.problem.size_bytes[u] for u in bound) > most_bytes:
            return False
        for u in lost:
            self.policy.returned(u)
            self.status[u] = "lost"
        self._take_away(source, "lost")
        for u in bound:
            self._fixed[u] = 1
            self._mark(u)
        return True


# `prune` turns runs into retention bits filled with what fits, which drops needless recomputations.

_MakePolicy = Callable[[Problem, int], Policy]  # from room in bytes beside what is resident


@dataclass(frozen=True)
class PolicyPlanner:
    """A solver that plans what one policy does; `prune` also offers it without superfluous runs."""

    name: ClassVar[str]
    policy: ClassVar[type[Policy]]

    prune: bool = True
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        search = Search.of(self, self.name, graph, budget_bytes)
        return plan_online(search, self.policy, prune=self.prune)


def plan_online(search: Search, make: _MakePolicy, *, prune: bool) -> Result:
    """Run the policy at the search's budget; if it fails, look for its least peak."""
    with search.until_interrupted():
        plain = store_all_state(search.problem)
        if not search.offer_least(plain):
            _plan(search, make, prune, int(plain.peak_bytes.max()))
    return search.result()


def offer_policy(search: Search, make: _MakePolicy, most_runs: int) -> None:
    """Offer what the policy does at the budget; it may run the ops so many times on average."""
    if (sequence := _run_at(search, make, search.budget_bytes, most_runs)) is not None:
        _offer_run(search, sequence, prune=True)


def _offer_run(search: Search, sequence: Sequence[int], *, prune: bool) -> None:
    search.offer_sequence(sequence)
    if prune:
        search.say("carrying what fits instead of recomputing it")
        offer_filled(search, state_of(search.problem, sequence))


def _plan(search: Search, make: _MakePolicy, prune: bool, plain_bytes: int) -> None:
    least_bytes = least_needed_bytes(search.problem)
    if search.budget_bytes < least_bytes:
        search.proved_infeasible = True
        search.message = f"one op alone needs {least_bytes} bytes with its inputs and outputs"
    else:
        search.say("running the policy at the budget")
        if (sequence := _run_at(search, make, search.budget_bytes)) is not None:
            _offer_run(search, sequence, prune=prune)
    if search.best is None:
        _bisect_least_peak(search, make, prune, (least_bytes, plain_bytes))


def _run_at(
    search: Search, make: _MakePolicy, budget_bytes: int, most_runs: int = _THRASHING
) -> list[int] | None:
    """The ops that the policy runs; None if it finds no room, or no time."""
    problem = search.problem
    policy = make(problem, budget_bytes - problem.resident_bytes)
    try:
        return OnlineRun(problem, policy, search.out_of_time, most_runs).run()
    except NoRoomError:
        return None


def _bisect_least_peak(
    search: Search, make: _MakePolicy, prune: bool, range_bytes: tuple[int, int]
) -> None:
    low_bytes, high_bytes = range_bytes
    # From the graph alone: a solve for the budget that is named finds this schedule again.
    for _ in range(LEAST_PEAK_TRIES.most):
        middle_bytes = (low_bytes + high_bytes) // 2
        if middle_bytes in (low_bytes, high_bytes) or search.out_of_time():
            break
        search.say(f"trying the policy at {middle_bytes} bytes")
        if (sequence := _run_at(search, make, middle_bytes)) is None:
            low_bytes = middle_bytes
        else:
            high_bytes = middle_bytes
            search.offer_sequence(sequence, or_least=True)
            if prune:
                search.offer_least(state_of(search.problem, sequence))
    if search.best is not None:
        search.message = "does not fit at this budget; this is the policy's plan at another one"
