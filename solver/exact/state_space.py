"""States of a step under way: which ops have run and which values are live, as bits.

The moves are those that `simulate` allows, without those that cannot help. A value is dropped
only if nothing can read it any more, or to make room for the next op, and then no more values
than needed. An op runs again only if it makes something of use that is not live.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from remat.solver.ordering import predecessors
from remat.solver.problem import Problem

OrderOption = Literal["fixed", "free"]


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Moves between states, a state being two sets as bits: ops computed, values live.

    Attributes
    ----------
    before : for each op the ops that must first run before it.
    reads, writes : for each op the values. own_bytes : outputs and workspace of each op.
    forward : all forward ops. handed_over, wanted : values that must be live when forward
        ends, and when the step ends.
    useful : what `useful_after` has found so far.
    """

    problem: Problem
    before: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    own_bytes: tuple[int, ...]
    forward: int
    handed_over: int
    wanted: int
    useful: dict[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def of(cls, problem: Problem, order: OrderOption) -> StateSpace:
        """The space of `problem` with first runs in that order."""
        n, forward = problem.n_ops, (1 << problem.n_forward) - 1
        if order == "fixed":
            before = [(1 << op) - 1 for op in range(n)]
        else:
            before = [_bits(ops) for ops in predecessors(problem.graph)]
            before[problem.n_forward :] = [b | forward for b in before[problem.n_forward :]]
        own = zip(problem.output_bytes, problem.workspace_bytes, strict=True)
        return cls(
            problem=problem,
            before=tuple(before),
            reads=tuple(_bits(values) for values in problem.inputs),
            writes=tuple(_bits(values) for values in problem.outputs),
            own_bytes=tuple(outputs + workspace for outputs, workspace in own),
            forward=forward,
            handed_over=_bits(problem.forward_outputs),
            wanted=_bits(problem.needs[n]),
        )

    def size_bytes(self, live: int) -> int:
        """Bytes of a set of values."""
        return sum(self.problem.size_bytes[v] for v in _members(live))

    def useful_after(self, computed: int) -> int:
        """Values that some schedule may still read once `computed` has run.

        A value is dead if it only feeds ops that will never run again, because nothing reads
        their results. Keeping it never helps.
        """
        if computed not in self.useful:
            found = self.wanted
            if self.forward & ~computed:
                found |= self.handed_over
            for op in reversed(range(self.problem.n_ops)):
                is_done = computed >> op & 1
                may_rerun = not self.problem.pinned[op] and self.writes[op] & found
                if not is_done or may_rerun:
                    found |= self.reads[op]
            self.useful[computed] = found
        return self.useful[computed]

    def moves(self, computed: int, live: int, room_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Each op that can run next, with the states after it; see `_kept`."""
        for op in range(self.problem.n_ops):
            is_first = not computed >> op & 1
            if is_first and self.before[op] & ~computed:
                continue
            lost = self.writes[op] & ~live & self.useful_after(computed)
            if not is_first and (self.problem.pinned[op] or not lost):
                continue
            after = computed | 1 << op
            for kept in self._kept(op, computed, live, room_bytes):
                yield op, after, (kept | self.writes[op]) & self.useful_after(after)

    def _kept(self, op: int, computed: int, live: int, room_bytes: int) -> Iterator[int]:
        """The largest parts of `live` beside which `op` can run, as keeping more never hurts."""
        needed, held = self.reads[op], 0
        if not self.forward & ~computed:
            held = self.handed_over & self.wanted & live
        elif not self.forward & ~(computed | 1 << op):
            needed |= self.handed_over & ~self.writes[op]
        if needed & ~live:
            return
        kept = live & ~(self.writes[op] & ~held)
        excess = self.size_bytes(kept) + self.own_bytes[op] - room_bytes
        droppable = [v for v in _members(kept & ~(needed | held)) if self.problem.size_bytes[v]]
        droppable.sort(key=lambda v: -self.problem.size_bytes[v])
        for dropped in _least_drops(droppable, self.problem.size_bytes, excess):
            yield kept & ~dropped


def _least_drops(values: list[int], size_bytes: tuple[int, ...], excess: int) -> Iterator[int]:
    """Sets of `values`, largest first, of `excess` bytes or more, of which none can be spared."""
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
