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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remat.graph_capture.graph import Floats, TrainingGraph
from remat.schedules.outcome import Result
from remat.solver.search import Listener, Search, check_least
from remat.solver.segments.chain import (
    Chain,
    ChainAction,
    ChainSearch,
    ChainStage,
    find_chain,
    solve_on_chain,
)
from remat.solver.segments.revolve import binomial_actions

# Sub-chain (i, j) with memory m runs stages i..j forward and backward. The value that enters
# stage i is stored outside m. There are two ways on. Either stage i saves what its backward
# reads; or the stages before some k drop it, and the value that enters k is stored. Sizes are
# rounded up to whole slots, so a schedule never takes more than the table says.


_Choices = npt.NDArray[np.int16]
_Slots = npt.NDArray[np.int64]


_Stages = Sequence[ChainStage]


def _grain_bytes(stages: _Stages) -> int:
    # Rounding loses nothing if all sizes are multiples of a slot.
    own = (
        size for s in stages
        for size in (s.entry_bytes, s.saved_bytes, s.pending_bytes, s.backward_peak_bytes)
    )  # fmt: skip
    peaks = (run.peak_bytes for s in stages for run in (*s.first, *s.again))
    return max(math.gcd(*own, *peaks), 1)


@dataclass(frozen=True, slots=True)
class _RotorTable:
    """Least time (infinite: impossible) of sub-chain [i, j] with m slots, and the choice."""

    stages: _Stages
    slot_bytes: int
    time_us: Floats
    choice: _Choices  # 0: stage i saves; k > i: the value that enters stage k is stored

    @property
    def whole_us(self) -> Floats:
        return self.time_us[0, -1]

    def actions(self, slots: int) -> list[ChainAction]:
        found: list[ChainAction] = []
        waiting = [(0, len(self.stages) - 1, slots)]
        while waiting:
            i, j, left = waiting.pop()
            # j < i marks the backward of stage i, which follows the stages after it.
            if j < i:
                found.append(ChainAction("backward", i))
            elif (k := int(self.choice[i, j, left])) == 0:
                found.append(ChainAction("save", i))
                waiting.append((i, -1, 0))
                if i < j:
                    waiting.append((i + 1, j, left - self.slots_of(self.stages[i].saved_bytes)))
            else:
                found += [ChainAction("forward", stage) for stage in range(i, k)]
                # A stack: the right part is popped first, since backward starts there.
                waiting.append((i, k - 1, left))
                waiting.append((k, j, left - self.slots_of(self.stages[k].entry_bytes)))
        return found

    def slots_of(self, size_bytes: int) -> int:
        return -(-size_bytes // self.slot_bytes)


def solve_rotor(
    stages: _Stages, limit_bytes: int, slots: int, stopped: Callable[[], bool] | None = None
) -> _RotorTable | None:
    """The table of all sub-chains for 0..`slots` slots, `limit_bytes` in all; None if `stopped`."""
    # Where all sizes are multiples of a larger unit, it is exact, and needs fewer slots.
    slot_bytes = max(-(-limit_bytes // slots), 1, _grain_bytes(stages))
    count, length = max(limit_bytes, 0) // slot_bytes, len(stages)
    shape = length, length, count + 1
    table = _RotorTable(stages, slot_bytes, np.full(shape, np.inf), np.zeros(shape, np.int16))
    for j in range(length):
        if stopped is not None and stopped():
            return None
        _Column(table, j).fill()
    return table


class _Column:
    def __init__(self, table: _RotorTable, j: int) -> None:
        self.table, self.stages, self.j = table, table.stages, j
        # Only sub-chains that end with the last stage contain first runs.
        is_first = j == len(table.stages) - 1
        self.runs = [stage.first if is_first else stage.again for stage in table.stages]
        self.drop_us = np.array([runs.drop.cost_us for runs in self.runs])
        dropped = zip(self.runs, table.stages, strict=True)
        self.beside_bytes = np.array([r.drop.peak_bytes + s.entry_bytes for r, s in dropped])
        self.slots: _Slots = np.arange(table.time_us.shape[2], dtype=np.int64)
        self.stored = np.full((j + 1, self.slots.size), np.inf)
        """Row k: time of (k, j) if the value that enters k is stored in the same memory."""

    def fill(self) -> None:
        time_us, choice = self.table.time_us, self.table.choice
        for i in range(self.j, -1, -1):
            best = self._saving(i)
            if i < self.j:
                storing = self._storing(i)
                k = storing.argmin(axis=0)
                least = storing[k, self.slots]
                better = least < best
                choice[i, self.j, better] = (k[better] + i + 1).astype(np.int16)
                best = np.minimum(best, least)
            time_us[i, self.j] = best
            self.stored[i] = self._delayed(best, self.stages[i].entry_bytes)

    def _saving(self, i: int) -> Floats:
        stages, j = self.stages, self.j
        run = self.runs[i].leaf if i == j else self.runs[i].save
        # Forward of i runs while backward values wait for stage j.
        need_bytes = max(stages[j].pending_bytes + run.peak_bytes, stages[i].backward_peak_bytes)
        own = np.where(self.slots >= self.table.slots_of(need_bytes), 0.0, np.inf)
        own += run.cost_us + stages[i].backward_us
        if i == j:
            return own
        return own + self._delayed(self.table.time_us[i + 1, j], stages[i].saved_bytes)

    def _storing(self, i: int) -> Floats:
        """Rows k = i + 1..j: time if stages i..k - 1 drop and the value that enters k is stored."""
        # A later stage runs beside its entry; the entry of stage i is stored elsewhere.
        peaks = self.beside_bytes[i : self.j].copy()
        peaks[0] -= self.stages[i].entry_bytes
        need_bytes = np.maximum.accumulate(peaks) + self.stages[self.j].pending_bytes
        need = -(-need_bytes // self.table.slot_bytes)
        run_us = np.cumsum(self.drop_us[i : self.j])
        total: Floats = self.stored[i + 1 :] + self.table.time_us[i, i : self.j]
        total += run_us[:, None]
        total[self.slots < need[:, None]] = np.inf
        return total

    def _delayed(self, row: Floats, size_bytes: int) -> Floats:
        moved = np.full_like(row, np.inf)
        # With less memory, the row shifts by as many slots.
        count = self.table.slots_of(size_bytes)
        if count < row.size:
            moved[count:] = row[: row.size - count]
        return moved


_BEYOND = 1.25
"""The model's limit goes up to this multiple of the budget. The model counts more bytes than are
live: a schedule that it puts beyond the budget may fit, and the simulator says so."""
_QUICK_OPS = 128  # on graphs of so many ops a fill takes up to half a second
_LEAST_TRIES = 3  # schedules of least memory that are judged where nothing else fits


@dataclass(frozen=True)
class Rotor:
    """Solver for chains.

    Attributes
    ----------
    slots : units that the memory is divided into. stages : the most stages.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    slots: int = 500
    stages: int = 128
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        check_least(1, slots=self.slots)
        check_least(2, stages=self.stages)

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        search = Search.of(self, "rotor", graph, budget_bytes)
        return solve_on_chain(search, self.stages, self._solve_chain)

    def _solve_chain(self, search: Search, chain: Chain) -> None:
        tries = ChainSearch(search, chain)
        enough_bytes = _enough_bytes(chain)
        _try_table(tries, enough_bytes, self.slots)
        # If nothing fits, report the least peak.
        if search.best is None and not search.out_of_time():
            search.say("looking for the least peak")
            self._try_least(tries, enough_bytes)
        tries.fill_best()

    def _try_least(self, tries: ChainSearch, limit_bytes: int) -> None:
        # None of these depends on the budget.
        stages = tries.chain.stages
        table = solve_rotor(stages, limit_bytes, self.slots, tries.search.out_of_time)
        if table is not None:
            for slots in _breakpoints(table)[:_LEAST_TRIES]:
                tries.fits(table.actions(slots))
            for slots in range(1, _LEAST_TRIES + 1):
                # Uniform schedules with few states may need less than the model says.
                tries.fits(binomial_actions(len(stages), slots))


def offer_chain(search: Search) -> None:
    """Offer the fastest that fits of the graph's chain, if it is one."""
    chain = find_chain(search.problem, Rotor.stages)
    if chain.stages:
        tries = ChainSearch(search, chain)
        _try_table(tries, _enough_bytes(chain), Rotor.slots)
        tries.fill_best(_QUICK_OPS)


def _enough_bytes(chain: Chain) -> int:
    """Where every stage saves all that its backward reads, nothing reruns."""
    return sum(s.saved_bytes for s in chain.stages) + max(
        max(s.pending_bytes + s.first.save.peak_bytes, s.backward_peak_bytes) for s in chain.stages
    )


def _try_table(tries: ChainSearch, enough_bytes: int, slots: int) -> None:
    search, chain = tries.search, tries.chain
    # The model overestimates memory: a schedule that it puts above the budget may fit.
    room_bytes = int((search.budget_bytes - chain.base_bytes) * _BEYOND)
    if room_bytes <= 0:
        return
    search.say(f"chain of {len(chain.stages)} stages")
    limit_bytes = min(room_bytes, enough_bytes)
    table = solve_rotor(chain.stages, limit_bytes, slots, search.out_of_time)
    if table is not None:
        steps = _breakpoints(table)
        tries.try_rising(lambda choice: table.actions(steps[choice]), len(steps))


def _breakpoints(table: _RotorTable) -> list[int]:
    """The numbers of slots at which the time of the whole chain falls, the least first."""
    whole_us = table.whole_us
    falls = np.concatenate((np.isfinite(whole_us[:1]), whole_us[1:] < whole_us[:-1]))
    return [int(slots) for slots in np.flatnonzero(falls)]
