"""Exhaustive search over what is computed and what is live, in the fixed or a free order.

Also called: state-space search; weighted red pebbling.
Paper: dynamic programming over sets of computed ops, for least memory and without
recomputation, is C. W. Kessler, "Scheduling expression DAGs for minimal register need", 1998,
https://doi.org/10.1016/S0096-0551(98)00002-2, and B. H. Ahn et al., "Ordering Chaos:
Memory-Aware Scheduling of Irregularly Wired Neural Networks for Edge Devices", 2020,
https://arxiv.org/abs/2003.02369. Here a state also says what is live, and time is minimised.
Solves: least time under a budget on the true peak, any number of recomputations, first runs
in captured order (``fixed``) or in any order that the graph allows (``free``).
Optimal: always, with proof, if it ends. If time cuts it short, its bound still holds. It also
proves that nothing fits, and then finds the least feasible budget exactly, by bisection.
Cost: exponential, up to 3^n states for n ops. 14 ops take below a second as a rule, and 5 s on a
wide graph on which nothing fits.
Shortcomings: the cost. Larger graphs than `most_ops` are refused unless everything fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.simulate import simulate
from remat.solver.problem import Problem, predecessors
from remat.solver.search import Listener, Search, check_least
from remat.solver.state import schedule_of, store_all_state

# Of the moves that `simulate` allows, those that may help: a value goes if nothing can read it, or
# to make room, no more than needed. An op runs again only for something of use that is not live.

OrderOption = Literal["fixed", "free"]


@dataclass(frozen=True, slots=True)
class _StateSpace:
    """Moves between states, a state being two sets as bits: ops computed, values live."""

    problem: Problem
    before: tuple[int, ...]  # by op, those that must first run before it
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    forward: int  # all forward ops
    returned: int  # live when forward ends
    wanted: int  # live when the step ends
    useful: dict[int, int] = field(default_factory=dict[int, int])  # found by `useful_after`

    @classmethod
    def of(cls, problem: Problem, order: OrderOption) -> _StateSpace:
        n, forward = problem.n_ops, (1 << problem.n_forward) - 1
        if order == "fixed":
            before = [(1 << op) - 1 for op in range(n)]
        else:
            before = [_bits(ops) for ops in predecessors(problem.graph)]
            before[problem.n_forward :] = [b | forward for b in before[problem.n_forward :]]
        reads, writes = tuple(map(_bits, problem.inputs)), tuple(map(_bits, problem.outputs))
        returned, wanted = _bits(problem.forward_outputs), _bits(problem.needs[n])
        return cls(problem, tuple(before), reads, writes, forward, returned, wanted)

    def size_bytes(self, live: int) -> int:
        return sum(self.problem.size_bytes[v] for v in _members(live))

    def useful_after(self, computed: int) -> int:
        """Values that some schedule may still read once `computed` has run."""
        if computed not in self.useful:
            found = self.wanted
            if self.forward & ~computed:
                found |= self.returned
            for op in reversed(range(self.problem.n_ops)):
                is_done = computed >> op & 1
                # What only feeds ops that never run again is dead.
                may_rerun = not self.problem.no_recompute[op] and self.writes[op] & found
                if not is_done or may_rerun:
                    found |= self.reads[op]
            self.useful[computed] = found
        return self.useful[computed]

    def moves(self, computed: int, live: int, room_bytes: int) -> Iterator[tuple[int, int, int]]:
        for op in range(self.problem.n_ops):
            is_first = not computed >> op & 1
            if is_first and self.before[op] & ~computed:
                continue
            lost = self.writes[op] & ~live & self.useful_after(computed)
            # A second run must make something of use.
            if not is_first and (self.problem.no_recompute[op] or not lost):
                continue
            after = computed | 1 << op
            for kept in self._kept(op, computed, live, room_bytes):
                yield op, after, (kept | self.writes[op]) & self.useful_after(after)

    def _kept(self, op: int, computed: int, live: int, room_bytes: int) -> Iterator[int]:
        needed, held = self.reads[op], 0
        if not self.forward & ~computed:
            held = self.returned & self.wanted & live  # in the caller's hands
        elif not self.forward & ~(computed | 1 << op):
            needed |= self.returned & ~self.writes[op]  # forward ends with this op
        if needed & ~live:
            return
        kept = live & ~(self.writes[op] & ~held)
        excess = self.size_bytes(kept) + self.problem.own_bytes[op] - room_bytes
        # Dropping an empty value makes no room.
        droppable = [v for v in _members(kept & ~(needed | held)) if self.problem.size_bytes[v]]
        droppable.sort(key=lambda v: -self.problem.size_bytes[v])
        # The largest that leave room: keeping more never hurts.
        for dropped in _least_drops(droppable, self.problem.size_bytes, excess):
            yield kept & ~dropped


def _least_drops(values: list[int], size_bytes: tuple[int, ...], excess: int) -> Iterator[int]:
    """Sets of `values` of `excess` bytes or more, none to spare, the largest first."""
    stack = [(0, 0, 0)]
    while stack:
        start, chosen, freed = stack.pop()
        if freed >= excess:
            yield chosen
            continue
        for i in range(start, len(values)):
            v = values[i]
            stack.append((i + 1, chosen | 1 << v, freed + size_bytes[v]))


def _bits(indices: list[int] | tuple[int, ...]) -> int:
    return sum(1 << i for i in set(indices))


def _members(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


_CHECKS_EVERY = 256  # states between two looks at the clock


@dataclass(frozen=True)
class Exhaustive:
    """Solver of tiny graphs.

    Attributes
    ----------
    order : first runs in captured order (``fixed``) or in any (``free``).
    most_ops : refuse larger graphs.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    order: OrderOption = "fixed"
    most_ops: int = 14
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        if self.order not in get_args(OrderOption):
            raise SolverError(f"order must be fixed or free, not '{self.order}'")
        check_least(1, most_ops=self.most_ops)

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        return Search.of(self, "exhaustive", graph, budget_bytes).result_of(self.run)

    def run(self, search: Search) -> None:
        if search.offer(store_all_state(search.problem)):
            return
        n_ops = search.problem.n_ops
        if n_ops > self.most_ops:
            raise SolverError(
                "use solver auto, or raise most_ops and be patient: exhaustive search takes at "
                f"most {self.most_ops} ops (most_ops), and this graph has {n_ops}"
            )
        search.say(f"every state, {self.order} order")
        space = _StateSpace.of(search.problem, self.order)
        walk = _fastest(space, search.budget_bytes, search)
        search.raise_bound(walk.time_us)
        if walk.sequence is not None:
            fits = search.offer_sequence(walk.sequence)
            assert fits, "a sequence needs more than the states it came from"
        elif not search.cut_short:
            search.proved_infeasible = True
            _find_least_budget(search, space)


class _Walk(NamedTuple):
    """Ops in the order in which they run, None if none was found, and a proven least time."""

    sequence: list[int] | None
    time_us: float


def _fastest(space: _StateSpace, budget_bytes: int, search: Search) -> _Walk:
    """Best-first search: least recomputation first, then most ops computed."""
    problem = space.problem
    room_bytes = budget_bytes - problem.resident_bytes
    done = (1 << problem.n_ops) - 1
    seen: dict[int, list[int]] = {}
    parents: list[tuple[int, int]] = [(-1, -1)]
    queue: list[tuple[float, int, int, int, int]] = [(0.0, 0, 0, 0, 0)]
    pops = 0
    while queue:
        extra_us, _, node, computed, live = heapq.heappop(queue)
        pops += 1
        if pops % _CHECKS_EVERY == 0 and search.out_of_time():
            return _Walk(None, problem.graph.time_us + extra_us)  # no open state is better: a bound
        # Recomputation alone ranks states: the first complete one is optimal.
        if computed == done and not space.wanted & ~live:
            return _Walk(_path(parents, node), problem.graph.time_us + extra_us)
        if not _is_new(seen.setdefault(computed, []), live):
            continue
        for op, after, kept in space.moves(computed, live, room_bytes):
            again_us = problem.cost_us[op] if after == computed else 0.0
            parents.append((node, op))
            left = problem.n_ops - after.bit_count()
            heapq.heappush(queue, (extra_us + again_us, left, len(parents) - 1, after, kept))
    return _Walk(None, problem.graph.time_us)


def _is_new(seen: list[int], live: int) -> bool:
    """Record `live` unless a state seen before, no slower, had all of it live."""
    if any(not live & ~other for other in seen):
        return False
    seen.append(live)
    return True


def _path(parents: list[tuple[int, int]], node: int) -> list[int]:
    ops: list[int] = []
    while node:
        node, op = parents[node]
        ops.append(op)
    return ops[::-1]


def _find_least_budget(search: Search, space: _StateSpace) -> None:
    search.say("looking for the least peak")
    search.offer_least(store_all_state(search.problem))
    low = search.budget_bytes + 1
    while low < search.lowest_bytes:
        middle = (low + search.lowest_bytes) // 2
        if (walk := _fastest(space, middle, search)).sequence is not None:
            search.lowest = made = schedule_of(search.problem, walk.sequence, solver=search.solver)
            # Its own peak may be lower than the budget.
            search.lowest_bytes = simulate(search.graph, made).peak_bytes
        elif search.cut_short:
            return
        else:
            low = middle + 1
    search.least_bound_bytes = search.lowest_bytes
