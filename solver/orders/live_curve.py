"""Live bytes of the step that runs every op once, op by op, as its order changes.

What is live depends on the set of ops that have run, not on their order. So when one op moves, only
the places in between change, which makes a try cheap. A place of no op between the phases reads
what forward returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from remat.solver.problem import Problem, inverted, predecessors
from remat.solver.state import Bytes


class ValueLifetime(NamedTuple):
    size_bytes: int
    producer: int
    readers: tuple[int, ...]
    is_wanted: bool


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What an order needs to know of the ops 0..n-1, and of n, the end of forward."""

    before: list[list[int]]  # must first run before an op
    after: list[list[int]]  # must first run after it
    own_bytes: list[int]  # outputs and workspace
    lasting_bytes: list[int]  # outputs that something reads, or that are live at the end
    # By op, of values that it reads and that die with their last reader: bytes, other readers.
    spendable: list[list[tuple[int, tuple[int, ...]]]]
    n_forward: int  # ops before the end of forward
    resident_bytes: int

    @classmethod
    def of(cls, problem: Problem) -> OpFacts:
        n = problem.n_ops
        before = with_end_of_forward(predecessors(problem.graph), problem.n_forward)
        # Op n, the end of forward, reads what it returns.
        readers = inverted((*problem.inputs, problem.forward_outputs), problem.n_values)
        wanted = frozenset(problem.needs[n])
        values = [
            ValueLifetime(size_bytes, problem.producer[v], tuple(readers[v]), v in wanted)
            for v, size_bytes in enumerate(problem.size_bytes)
        ]
        own_bytes = list(problem.own_bytes)
        return cls.made(before, own_bytes, values, problem.n_forward, problem.resident_bytes)

    @classmethod
    def made(
        cls, before: list[list[int]], own_bytes: list[int], values: Sequence[ValueLifetime],
        n_forward: int, resident_bytes: int,
    ) -> OpFacts:  # fmt: skip
        n = len(before)
        after = inverted(before, n)
        lasting_bytes = [0] * n
        spendable: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(n)]
        for size_bytes, producer, readers, is_wanted in values:
            if readers or is_wanted:
                lasting_bytes[producer] += size_bytes
            for op in () if is_wanted else readers:
                spendable[op].append((size_bytes, tuple(other for other in readers if other != op)))
        return cls(before, after, own_bytes, lasting_bytes, spendable, n_forward, resident_bytes)


def with_end_of_forward(before: list[list[int]], n_forward: int) -> list[list[int]]:
    end = len(before)  # a few edges in place of quadratically many
    joined = [list(dict.fromkeys(ops)) for ops in before]
    for op in range(n_forward, end):
        joined[op].append(end)
    joined.append(list(range(n_forward)))
    return joined


class OrderMove(NamedTuple):
    """The op at place `start` goes to `stop`; the figures are of the places in between."""

    start: int
    stop: int
    first: int
    entry_bytes: Bytes
    own_bytes: Bytes
    over_bytes: Bytes
    overload_bytes: int
    worst_bytes: int


class LiveCurve:
    """An order of the ops, and how far each is over a limit."""

    def __init__(self, facts: OpFacts, order: Sequence[int], limit_bytes: int) -> None:
        n, middle = len(order), facts.n_forward
        self.facts = facts
        self.order = [*order[:middle], n, *order[middle:]]
        self.place = [0] * (n + 1)
        for i, op in enumerate(self.order):
            self.place[op] = i
        self.own_bytes: Bytes = np.array([facts.own_bytes[op] for op in self.order], np.int64)
        change = [facts.lasting_bytes[op] for op in self.order]
        for i, op in enumerate(self.order):
            for size_bytes, others in facts.spendable[op]:
                if all(self.place[other] < i for other in others):
                    change[i] -= size_bytes
        # Before each place.
        self.entry_bytes: Bytes = np.concatenate(([0], np.cumsum(np.array(change, np.int64))))
        self.limit(limit_bytes)

    def limit(self, limit_bytes: int) -> None:
        """Resident bytes included."""
        self.room_bytes = limit_bytes - self.facts.resident_bytes
        running = self.entry_bytes[:-1] + self.own_bytes
        self.over_bytes: Bytes = np.maximum(running - self.room_bytes, 0)
        self.overload_bytes = int(self.over_bytes.sum())
        self.worst_bytes = int(self.over_bytes.max(initial=0))

    @property
    def peak_bytes(self) -> int:
        """Of the step in this order, resident bytes included."""
        running = self.entry_bytes[:-1] + self.own_bytes
        return int(running.max(initial=0)) + self.facts.resident_bytes

    def ops(self) -> tuple[int, ...]:
        """The order, without the end of forward."""
        end = len(self.order) - 1
        return tuple(op for op in self.order if op != end)

    def span(self, op: int) -> tuple[int, int]:
        """First and last place to which `op` can go while the others keep theirs."""
        place = self.place
        first = max((place[b] for b in self.facts.before[op]), default=-1) + 1
        last = min((place[a] for a in self.facts.after[op]), default=len(place)) - 1
        return first, last

    def moved(self, op: int, stop: int) -> OrderMove:
        """The move of `op` to place `stop`; nothing is changed yet."""
        start = self.place[op]
        if start < stop:
            entry = self._entries_if_later(op, start, stop)
            own = np.append(self.own_bytes[start + 1 : stop + 1], self.own_bytes[start])
        else:
            entry = self._entries_if_earlier(op, start, stop)
            own = np.append(self.own_bytes[start], self.own_bytes[stop:start])
        first, last = min(start, stop), max(start, stop)
        over = own - self.room_bytes
        over[0] += self.entry_bytes[first]
        over[1:] += entry
        np.maximum(over, 0, out=over)
        old = self.over_bytes[first : last + 1]
        overload_bytes = self.overload_bytes + int(over.sum()) - int(old.sum())
        worst_bytes = int(over.max())
        if worst_bytes < self.worst_bytes:  # if it was in between, one outside may be it
            worst_bytes = max(worst_bytes, self._worst_outside(first, last, old))
        return OrderMove(start, stop, first, entry, own, over, overload_bytes, worst_bytes)

    def _worst_outside(self, first: int, last: int, old: Bytes) -> int:
        if int(old.max()) < self.worst_bytes:
            return self.worst_bytes
        below = int(self.over_bytes[:first].max(initial=0))
        return max(below, int(self.over_bytes[last + 1 :].max(initial=0)))

    def _entries_if_later(self, op: int, start: int, stop: int) -> Bytes:
        """Bytes before places start + 1 .. stop once `op` runs at `stop`."""
        entry = self.entry_bytes[start + 2 : stop + 2] - self.facts.lasting_bytes[op]
        place = self.place
        for size_bytes, others in self.facts.spendable[op]:
            # Behind its other readers, `op` keeps the value.
            if (spent := max((place[other] for other in others), default=-1)) <= stop:
                entry[max(spent - 1 - start, 0) :] += size_bytes
        return entry

    def _entries_if_earlier(self, op: int, start: int, stop: int) -> Bytes:
        """Bytes before places stop + 1 .. start once `op` runs at `stop`."""
        entry = self.entry_bytes[stop:start] + self.facts.lasting_bytes[op]
        place = self.place
        for size_bytes, others in self.facts.spendable[op]:
            # The value now dies once `op` and the others have run.
            if (spent := max((place[other] for other in others), default=-1)) < start:
                entry[max(spent + 1 - stop, 0) :] -= size_bytes
        return entry

    def apply(self, move: OrderMove) -> None:
        self.order.insert(move.stop, self.order.pop(move.start))
        last = max(move.start, move.stop)
        for i in range(move.first, last + 1):
            self.place[self.order[i]] = i
        self.entry_bytes[move.first + 1 : last + 1] = move.entry_bytes
        self.own_bytes[move.first : last + 1] = move.own_bytes
        self.over_bytes[move.first : last + 1] = move.over_bytes
        self.overload_bytes, self.worst_bytes = move.overload_bytes, move.worst_bytes
