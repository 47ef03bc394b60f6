"""Local search over retention gaps: bring a state under a budget, then fill what fits.

A gap is the time between two touches of a value. Dropping it frees bytes and costs a recomputation
at its end. `repair` drops by least extra time over (overload removed)^power; `fill` by most saved.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from remat.solver.search import Search
from remat.solver.state import Bytes, Stage, State, UnreachableError, closure_cost_us
from remat.solver.stopping import EXCHANGES, VAIN_EXCHANGES, VAIN_MOVES

_TRIALS = 12  # moves replayed exactly in each round; the others are only estimated
_TRIAL_WORK, _OPS_A_WORK = 4, 25  # what a replayed move counts as; replayed ops that count as one


class GapMove(NamedTuple):
    """Carry a value (bit 1) or not (bit 0) between its touches at two stages."""

    v: int
    before: int
    stage: int
    bit: int


class _Trial(NamedTuple):
    cost_us: float
    overload_bytes: int
    at_before: Stage
    at_stage: Stage


@dataclass(slots=True)
class Repair:
    """Brings `state` under `limit_bytes`, changing it in place."""

    state: State
    limit_bytes: int
    power: float  # of the overload that a drop removes, in its score
    search: Search
    spared: tuple[int, int] | None = None  # a value, and the stage that ends a gap of it that stays
    most_work: float = float("inf")  # that `search.work` may come to

    def run(self) -> bool:
        """Drop and carry until nothing is over the limit; returns whether that was reached."""
        while True:
            over = np.maximum(self.state.peak_bytes - self.limit_bytes, 0)
            if not over.any():
                return True
            if self.search.work > self.most_work or self.search.out_of_time():
                return False
            if (move := self._best_move(over)) is None:
                return False
            apply(self.state, move)

    def _best_move(self, over: Bytes) -> GapMove | None:
        stages = np.flatnonzero(over)
        for worst in stages[np.argsort(-over[stages], kind="stable")][:4]:
            if (move := self._best_at(int(worst), over)) is not None:
                return move
        return None

    def _best_at(self, worst: int, over: Bytes) -> GapMove | None:
        most_work = VAIN_MOVES.from_now(self.search.work)
        for ranked in self._rankings(worst, over):
            if self.search.work > most_work or self.search.out_of_time():
                return None
            best: tuple[float, GapMove] | None = None
            for _, move in ranked:
                trial = _try_move(self.state, move, over, self.limit_bytes)
                self.search.work += _work_of(trial)
                if trial is not None and trial.overload_bytes < 0:
                    score = self._score(trial.cost_us, -trial.overload_bytes)
                    if best is None or (score, move) < best:
                        best = (score, move)
            if best is not None:
                return best[1]
        return None

    def _rankings(self, worst: int, over: Bytes) -> Iterator[list[tuple[float, GapMove]]]:
        """The `_TRIALS` moves of least score; if none of them helps, the next ones, and so on."""
        yield sorted(self._estimates(worst, over, _TRIALS))[:_TRIALS]
        ranked = sorted(self._estimates(worst, over))  # only where the first do not help
        for first in range(_TRIALS, len(ranked), _TRIALS):
            yield ranked[first : first + _TRIALS]

    def _score(self, cost_us: float, relief_bytes: int) -> float:
        if cost_us <= 0:  # without cost relief counts; the tiny term tells such moves apart
            return cost_us * relief_bytes - relief_bytes / (1 << 50)
        return cost_us / relief_bytes**self.power

    def _estimates(
        self, worst: int, over: Bytes, wanted: int | None = None
    ) -> list[tuple[float, GapMove]]:
        """Moves with an estimate of their score; of drops only the `wanted` of least score."""
        moves = _moves_at(self.state, worst)
        self.search.work += len(moves)
        found = [(-1.0, move) for move in moves if move.bit]
        least: list[float] = [-1.0 for _ in found]
        for move, relief_bytes in self._reliefs([m for m in moves if not m.bit], worst, over):
            most_us = float("inf")
            if wanted is not None and len(least) >= wanted:
                # Above this the drop is not wanted: its closure need not be followed.
                most_us = max(sorted(least)[wanted - 1], 0.0) * relief_bytes**self.power
                most_us *= 1 + 1e-9
            if (cost_us := _drop_cost_us(self.state, move, most_us)) is not None:
                found.append((self._score(cost_us, relief_bytes), move))
                least.append(found[-1][0])
        return found

    def _reliefs(
        self, drops: Sequence[GapMove], worst: int, over: Bytes
    ) -> Iterator[tuple[GapMove, int]]:
        """About how many bytes of overload each drop removes."""
        total = np.concatenate(([0], np.cumsum(over)))
        highest_bytes = int(over.max())
        for move in drops:
            if (move.v, move.stage) == self.spared:
                continue
            size_bytes = self.state.problem.size_bytes[move.v]
            # Not less than any overload, it removes all that it spans: a difference of two sums.
            if size_bytes >= highest_bytes:
                relief_bytes = int(total[move.stage + 1] - total[move.before + 1])
            else:
                covered = over[move.before + 1 : move.stage + 1]
                relief_bytes = int(np.minimum(covered, size_bytes).sum())
            yield move, max(relief_bytes, min(size_bytes, int(over[worst])), 1)


def _moves_at(state: State, worst: int) -> list[GapMove]:
    """Gaps over stage `worst` that may be dropped, and those into it that may be carried."""
    problem = state.problem
    row_in, row_on = state.kept[worst], state.kept[worst + 1]
    moves: list[GapMove] = []
    for v in np.flatnonzero(row_in | row_on).tolist():
        touches = state.touches[v]
        i = bisect_left(touches, worst)
        for stage_position in (i, i + 1) if i < len(touches) and touches[i] == worst else (i,):
            if not 0 < stage_position < len(touches):
                continue
            before, stage = touches[stage_position - 1], touches[stage_position]
            is_held = v in problem.held and stage >= problem.n_forward  # the caller's by then
            may_drop = not problem.no_recompute[problem.producer[v]] and not is_held
            if may_drop and state.rows[stage][v]:
                moves.append(GapMove(v, before, stage, 0))
    return [*moves, *_carriages(state, (worst,))]


def _carriages(state: State, stages: Iterable[int]) -> Iterator[GapMove]:
    """Carriages into `stages` of what they make again."""
    for stage in stages:
        for op in state.stages[stage].recomputed:
            for v, before in carriable(state, op, stage):
                yield GapMove(v, before, stage, 1)


def carriable(state: State, op: int, stage: int) -> list[tuple[int, int]]:
    """Values that `op`, run again in `stage`, need not make if carried, with the touch before."""
    found: list[tuple[int, int]] = []
    for v in state.problem.outputs[op]:
        touches = state.touches[v]
        i = bisect_left(touches, stage)
        if 0 < i < len(touches) and touches[i] == stage and not state.rows[stage][v]:
            found.append((v, touches[i - 1]))
    return found


def _drop_cost_us(state: State, move: GapMove, most_us: float) -> float | None:
    """What the drop makes its stage run again; None if pinned, or more than `most_us`."""
    row = state.rows[move.stage]
    row[move.v] = 0  # put back below: no copy of the row
    try:
        return closure_cost_us(
            state.problem, row, move.v, move.stage, state.stages[move.stage].recomputed, most_us
        )
    finally:
        row[move.v] = 1


def _try_move(state: State, move: GapMove, over: Bytes, limit_bytes: int) -> _Trial | None:
    """What `move` would do, None where a pinned op forbids it; `state` stays."""
    v, before, stage, bit = move
    old_before, old_stage = state.stages[before], state.stages[stage]
    state.change(v, before, stage, bit)
    try:
        new_before, new_stage = state.replay(before), state.replay(stage)
        state.rise_bytes[before] = new_before.rise_bytes
        state.rise_bytes[stage] = new_stage.rise_bytes
        part = slice(before, stage + 1)  # outside of the gap nothing changes
        now = state.entry_bytes[part] + state.rise_bytes[part]
        limit = limit_bytes - state.problem.resident_bytes
        overload = int(np.maximum(now - limit, 0).sum() - over[part].sum())
    except UnreachableError:
        return None
    finally:
        state.change(v, before, stage, 1 - bit)
        state.rise_bytes[before] = old_before.rise_bytes
        state.rise_bytes[stage] = old_stage.rise_bytes
    cost_us = new_before.cost_us + new_stage.cost_us - old_before.cost_us - old_stage.cost_us
    return _Trial(cost_us, overload, new_before, new_stage)


def _work_of(trial: _Trial | None) -> int:
    """What it took to try a move, in estimated moves."""
    replayed = () if trial is None else (trial.at_before, trial.at_stage)
    return _TRIAL_WORK + sum(len(stage.recomputed) for stage in replayed) // _OPS_A_WORK


def apply(state: State, move: GapMove) -> None:
    state.change(move.v, move.before, move.stage, move.bit)
    state.settle((move.before, move.stage))


def offer_filled(search: Search, state: State) -> None:
    if search.offer(state):
        fill(state, search.budget_bytes, search)
        search.offer(state)


def fill(state: State, limit_bytes: int, search: Search) -> None:
    """Carry what fits, the greatest saving first, until nothing more saves time."""
    over = np.zeros_like(state.entry_bytes)
    while not search.out_of_time():
        best: tuple[float, int, GapMove] | None = None
        savings = sorted(_savings(state, limit_bytes), reverse=True)
        search.work += len(savings)
        for saving_us, move in savings:
            if best is not None and saving_us <= best[0]:  # savings are upper estimates
                break
            trial = _try_move(state, move, over, limit_bytes)
            search.work += _work_of(trial)
            if trial is not None and trial.overload_bytes <= 0 and trial.cost_us < 0:
                size_bytes = state.problem.size_bytes[move.v]
                best = max(best or (0.0, 0, move), (-trial.cost_us, -size_bytes, move))
        if best is None:
            return
        apply(state, best[2])


def _savings(state: State, limit_bytes: int) -> list[tuple[float, GapMove]]:
    """Gaps with room all the way; the saving is an upper estimate."""
    room = limit_bytes - state.peak_bytes
    found: list[tuple[float, GapMove]] = []
    for move in _carriages(state, range(len(state.stages))):
        inner = room[move.before + 1 : move.stage]
        if not inner.size or int(inner.min()) >= state.problem.size_bytes[move.v]:
            found.append((state.stages[move.stage].cost_us, move))
    return found


# Exchanges: carry what does not fit, and repair elsewhere, while that pays.


def offer_exchanges(search: Search) -> None:
    if search.best_state is None:
        return
    search.say("exchanging what is kept")
    exchange(search.best_state, search)


def exchange(state: State, search: Search) -> State:
    """The best that exchanges make of `state`; each better schedule is offered to `search`."""
    limit_bytes = search.budget_bytes
    most_vain = VAIN_EXCHANGES.at(search.problem.n_ops)
    most_work = EXCHANGES.from_now(search.work)
    waiting, in_vain = _worth_carrying(state, search), 0
    while waiting and in_vain < most_vain and search.work < most_work:
        if search.out_of_time():
            break
        _, move = heapq.heappop(waiting)
        copied = state.copy()
        apply(copied, move)
        in_vain += 1
        # Dropping the same gap would exchange nothing.
        if not Repair(copied, limit_bytes, 1.0, search, (move.v, move.stage)).run():
            continue
        fill(copied, limit_bytes, search)
        if copied.cost_us < state.cost_us * (1 - 1e-9):
            search.offer(copied)
            # After a success all are ranked anew.
            state, waiting, in_vain = copied, _worth_carrying(copied, search), 0
    return state


def _worth_carrying(state: State, search: Search) -> list[tuple[float, GapMove]]:
    """Gaps whose carrying saves time, as a heap by time saved for their bytes."""
    nothing = np.zeros_like(state.entry_bytes)
    found: list[tuple[float, GapMove]] = []
    for move in _carriages(state, range(len(state.stages))):
        trial = _try_move(state, move, nothing, 1 << 60)  # the repair sees to what does not fit
        search.work += _work_of(trial)
        if trial is not None and trial.cost_us < 0:
            found.append((trial.cost_us / max(state.problem.size_bytes[move.v], 1), move))
    heapq.heapify(found)
    return found
