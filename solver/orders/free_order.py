"""Least time under a budget, first computations in any order: orders, each solved as given.

Source: the reordering of OLLA (https://arxiv.org/abs/2210.12924) before rematerialization. A first
look at the given order and at better ones; a full solve in the best; then, in turn, an order with
more room for the runs of the best schedule and a solve in it. Nothing but a solve says how much an
order must compute again. Optimal: where the bound for every order is met, as on transformers, or
where nothing is computed again. Never worse than the given order in its share of the time. Cost:
some seconds of annealing and a look for each order, then the time limit. Shortcomings: order and
recomputation are chosen in turn; the bound is weak on wide graphs; parts of the time limit end by
the clock, so two runs may differ. Figures below were chosen on layered graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from remat.formats import exact_bytes_text
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import overhead_of
from remat.solver import stopping
from remat.solver.bounds.any_order_cut import free_bound_us, free_least_peak_bound_bytes
from remat.solver.bounds.least_peak import LEAST_BOUND, floor_above, floor_text
from remat.solver.orders import reorder
from remat.solver.problem import Order, Problem, reordered
from remat.solver.result import INTERRUPTED, KNOWN, evaluate_schedule, status_without
from remat.solver.search import Clock, Listener, Progress, note_interrupt


class Share(NamedTuple):
    time_limit_s: float
    progress: Listener | None = None
    start: Schedule | None = None  # to begin from
    is_look: bool = False  # after first schedules; "time limit" if there was more to do


_SolveFixed = Callable[[TrainingGraph, int, Share], Result]  # with a bound for the graph's order


class _Attempt(NamedTuple):
    name: str  # for people
    order: Order
    is_repeatable: bool  # a solve for any other budget tries that order too
    result: Result

    @property
    def rank(self) -> tuple[float, int]:
        """Less is better: time, then peak; without a schedule the least budget known."""
        result = self.result
        if result.schedule is None:
            return float("inf"), result.least_feasible_bytes or 1 << 62
        return result.time_us, result.peak_bytes


@dataclass(slots=True)
class _Attempts:
    """All solves of `graph`, the first one in its own order, and what is proved for any order."""

    graph: TrainingGraph
    budget_bytes: int
    made: list[_Attempt] = field(default_factory=list[_Attempt])
    bound_us: float = 0.0  # no schedule takes less
    least_bound_bytes: int = 0  # none has a lower peak
    is_infeasible: bool = False  # proved
    cut_short: bool = False
    is_interrupted: bool = False

    @property
    def best(self) -> _Attempt:
        """The best yet, even if none has a schedule."""
        return min(self.made, key=lambda attempt: attempt.rank)

    @property
    def latest(self) -> dict[Order, Result]:
        """The last Result of each order, the given one first."""
        return {attempt.order: attempt.result for attempt in self.made}

    @property
    def has_schedule(self) -> bool:
        return bool(self.made) and self.best.result.schedule is not None

    def is_proved(self, gap: float) -> bool:
        return self.has_schedule and self.best.result.time_us <= self.bound_us * (1 + gap)

    def result(self, wall_s: float) -> Result:
        said = [f"{INTERRUPTED}: this is the best found until then"] if self.is_interrupted else []
        best = self.best
        if (schedule := best.result.schedule) is None:
            return self._without_schedule(said, wall_s)
        floor = floor_above(Problem.of(self.graph), self.budget_bytes)
        if best.order != self.made[0].order:
            said.append("First computations are not in the captured order")
        if floor is not None:
            said.append(floor_text(self.graph, floor, schedule))
        found = evaluate_schedule(
            self.graph, schedule.with_steps(self.graph, schedule.steps),
            budget_bytes=self.budget_bytes, wall_s=wall_s, cut_short=self.cut_short,
            lower_bound_us=min(self.bound_us, best.result.time_us), message=". ".join(said),
        )  # fmt: skip
        return msgspec.structs.replace(found, floor=floor)

    def _without_schedule(self, said: Sequence[str], wall_s: float) -> Result:
        given = self.latest[self.made[0].order]
        # Only orders that any other solve tries: a budget that is named must be found again.
        found = min((a for a in self.made if a.is_repeatable), key=lambda a: a.rank).result
        least = found.least_schedule
        return msgspec.structs.replace(
            found, least_schedule=least and least.with_steps(self.graph, least.steps),
            status=status_without(is_proved=self.is_infeasible, is_late=self.cut_short),
            lower_bound_us=self.bound_us,
            least_bound_bytes=self.least_bound_bytes, floor=given.floor, wall_s=wall_s,
            message=". ".join([*said, *self._refusal(found.least_feasible_bytes)]),
        )  # fmt: skip

    def _refusal(self, least_bytes: int) -> list[str]:
        room = exact_bytes_text(self.budget_bytes)
        if self.is_infeasible:
            text = f"no schedule fits {room} in any order of first computations"
        else:
            count = len(self.latest) - 1
            others = {0: "no better one was found", 1: "1 other was tried"}
            text = (
                f"no schedule found that fits {room} in the given order of "
                f"first computations; {others.get(count, f'{count} others were tried')}"
            )
        if least_bytes:
            text = f"{text}; {least_bytes} {KNOWN}"
        bound = f"{LEAST_BOUND} {self.least_bound_bytes} bytes in any order"
        said = self.latest[self.made[0].order].message
        return [
            text,
            *([bound] if self.least_bound_bytes else []),
            *([f"In the given order: {said}"] if said else []),
        ]


_AIMS = (1.0, 0.9, 0.0)  # of the budget: below 1 leaves room to recompute; 0 is the lowest peak
_FEW_OPS = 300  # beyond, refining one other order is a better use of the time than more
_TIGHTNESS = (0.98, 0.97, 0.99, 0.96)  # parts of the budget that refined orders aim for, in turn
_GIVEN, _LOWEST = "the given order", "the order of lowest peak"
# They do not depend on the budget, so a solve for a least budget named from these tries them too.
_REPEATABLE = (_GIVEN, _LOWEST)


@dataclass(slots=True)
class FreeOrder:
    graph: TrainingGraph
    budget_bytes: int
    solve_fixed: _SolveFixed
    gap: float = 1e-9  # stop once time is proved within it
    seed: int = 0
    moves: int | None = None  # of annealing, for each order; None: as many as its size asks for
    clock: Clock = field(default_factory=Clock)
    progress: Listener | None = None
    attempts: _Attempts = field(init=False)

    def __post_init__(self) -> None:
        self.attempts = _Attempts(self.graph, self.budget_bytes, bound_us=self.graph.time_us)

    def solve(self) -> Result:
        """Never worse than the given order; the bound holds for every order."""
        try:
            self._run()
        except KeyboardInterrupt:
            if not self.attempts.made:  # nothing is there to return
                raise
            note_interrupt()
            self.attempts.is_interrupted = True
        is_unproved = not self.attempts.is_proved(self.gap)
        self.attempts.cut_short = is_unproved and (
            self.attempts.is_interrupted
            or self.clock.left_s <= stopping.LEAST_SOLVE_S
            or any(r.status == "time limit" for r in self.attempts.latest.values())
        )
        return self.attempts.result(self.clock.elapsed_s)

    def _run(self) -> None:
        given = tuple(range(len(self.graph.ops)))
        limit_s = stopping.FIRST_LOOK.of(self.clock.time_limit_s)
        self._attempt(_GIVEN, given, Share(limit_s, is_look=True))
        if self._is_open():
            self._prove()
        for aim in _AIMS:
            if self._is_open() and self._is_worth(aim):
                self._look_at_order(aim, stopping.OTHER_ORDER.of(self.clock.left_s))
        self._solve_in_full()

    def _is_worth(self, aim: float) -> bool:
        if not aim:
            return not self.attempts.has_schedule  # only to name a least budget
        return not self.attempts.is_infeasible and (aim == 1.0 or len(self.graph.ops) <= _FEW_OPS)

    def _is_open(self) -> bool:
        return not self.attempts.is_proved(self.gap) and self.clock.left_s > stopping.LEAST_SOLVE_S

    def _attempt(self, name: str, order: Order, share: Share) -> None:
        share = share._replace(progress=self._listener(name))
        result = self.solve_fixed(reordered(self.graph, order), self.budget_bytes, share)
        self.attempts.made.append(_Attempt(name, order, name in _REPEATABLE, result))
        if result.message.startswith(INTERRUPTED):  # the inner solve took Ctrl-C as its own end
            raise KeyboardInterrupt

    def _prove(self) -> None:
        known = self.attempts
        self._tell("proving a bound for every order")
        if not known.has_schedule:
            known.least_bound_bytes = free_least_peak_bound_bytes(self.graph)
            known.is_infeasible = known.least_bound_bytes > self.budget_bytes
        limit_s = stopping.ANY_ORDER_BOUND.of(self.clock.time_limit_s)
        bound_us = free_bound_us(
            self.graph, self.budget_bytes, time_limit_s=min(limit_s, self.clock.left_s),
            enough_us=known.best.rank[0] / (1 + self.gap),
        )  # fmt: skip
        if bound_us == float("inf"):
            known.is_infeasible = True
        else:
            known.bound_us = max(known.bound_us, bound_us)

    def _look_at_order(self, aim: float, limit_s: float) -> None:
        """Find an order and look at it, in half of `limit_s` each."""
        self._tell("looking for another order")
        name = f"an order for {aim:.0%} of the budget" if aim else _LOWEST
        order = self._order(aim, limit_s / 2)
        if order is not None and order not in [a.order for a in self.attempts.made]:
            self._attempt(name, order, Share(limit_s / 2, is_look=True))

    def _order(self, aim: float, limit_s: float) -> Order | None:
        within = partial(reorder.better_order, budget_bytes=int(aim * self.budget_bytes))
        find = within if aim else reorder.lowest_order
        return find(self.graph, seed=self.seed, moves=self.moves, time_limit_s=limit_s)

    def _solve_in_full(self) -> None:
        """Solve the best look in full and refine it, then other looks, then the best again."""
        for i, look in enumerate(sorted(self.attempts.made, key=lambda attempt: attempt.rank)):
            if self._is_open() and self._may_be_better(look):
                limit = stopping.FULL_SOLVE if look.result.schedule else stopping.FULL_SOLVE_IN_NEED
                self._take_further(look, limit)
            if not i:
                self._refine()
        best = self.attempts.best
        if self._is_open() and best.result.status == "time limit":
            self._take_further(best, stopping.Seconds())

    def _take_further(self, attempt: _Attempt, limit: stopping.Seconds) -> None:
        share = Share(limit.of(self.clock.left_s), start=attempt.result.schedule)
        self._attempt(attempt.name, attempt.order, share)

    def _may_be_better(self, look: _Attempt) -> bool:
        """Whether the look ended early, in an order that is not proved worse than the best."""
        if look.result.status != "time limit":
            # Where nothing fits, repeatable orders are solved to name their least peak.
            return look.is_repeatable and not self.attempts.has_schedule
        return look.result.lower_bound_us < self.attempts.best.rank[0] * (1 - self.gap)

    def _refine(self) -> None:
        in_vain, tried, most = 0, 0, stopping.VAIN_ORDERS.most
        while self.attempts.has_schedule and self._is_open() and in_vain < most:
            best = self.attempts.best
            limit_s = min(stopping.REFINED_ORDER.of(self.clock.time_limit_s), self.clock.left_s)
            self._tell("looking for an order with more room")
            found = self._roomier(best.result, tried, limit_s)
            tried += 1
            if found is not None:
                share = Share(min(limit_s, self.clock.left_s), start=found.schedule)
                self._attempt("a refined order", found.order, share)
            is_better = self.attempts.best.rank[0] < best.rank[0] * (1 - self.gap / 10)
            in_vain = 0 if is_better else in_vain + 1

    def _roomier(self, best: Result, tried: int, limit_s: float) -> reorder.Roomier | None:
        """A start from `best` in another order: in turn with more room, with fewer runs."""
        seed = self.seed + tried  # else annealing would repeat itself
        if tried % 2:
            return reorder.cheaper_start(self.graph, best, seed=seed, time_limit_s=limit_s)
        tightness = _TIGHTNESS[tried // 2 % len(_TIGHTNESS)]
        return reorder.roomier_start(self.graph, best, tightness, seed=seed, time_limit_s=limit_s)

    def _listener(self, name: str) -> Listener | None:
        if self.progress is None:
            return None
        # The bound is of one order.
        return lambda state: self._tell(f"{name}: {state.doing}", state.best_overhead)

    def _tell(self, doing: str, overhead: float | None = None) -> None:
        if self.progress is None:
            return
        known = [a.result.overhead for a in self.attempts.made if a.result.schedule is not None]
        known += [] if overhead is None else [overhead]
        best = min(known) if known else None
        bound = overhead_of(self.attempts.bound_us, self.graph.time_us)
        self.progress(Progress(self.clock.elapsed_s, best, bound, doing))
