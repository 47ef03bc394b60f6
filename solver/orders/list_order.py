"""Orders by list scheduling: always the op that lets memory grow least.

Also called: greedy topological ordering for memory, register-pressure list scheduling.
Paper: J. R. Goodman, W.-C. Hsu, "Code scheduling and register allocation in large basic
blocks", 1988, https://doi.org/10.1145/55364.55407, schedules by the registers an op frees; here by
bytes, from the first op on, and once more from the last one back. Ties: the captured order.
Optimal: never surely. Cost: O(ops · ops that are ready). Shortcomings: looks one op ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from remat.solver.orders.live_curve import OpFacts


def list_orders(facts: OpFacts) -> Iterator[tuple[int, ...]]:
    """Two orders: one made onward, one made backward."""
    yield _onward(facts)
    yield _backward(facts)


def _onward(facts: OpFacts) -> tuple[int, ...]:
    has_run = bytearray(len(facts.before))

    def growth_bytes(op: int) -> int:
        spent = (s for s, others in facts.spendable[op] if all(has_run[o] for o in others))
        return facts.lasting_bytes[op] - sum(spent)

    picked = _ops_by_growth(facts.before, facts.after, has_run, growth_bytes, 1)
    return tuple(op for op in picked if op != len(facts.before) - 1)


def _backward(facts: OpFacts) -> tuple[int, ...]:
    """Choose the last op first: going back, results vanish and operands appear."""
    is_placed = bytearray(len(facts.before))

    def growth_bytes(op: int) -> int:
        begun = (s for s, others in facts.spendable[op] if not any(is_placed[o] for o in others))
        return sum(begun) - facts.lasting_bytes[op]

    picked = _ops_by_growth(facts.after, facts.before, is_placed, growth_bytes, -1)
    return tuple(op for op in picked[::-1] if op != len(facts.before) - 1)


def _ops_by_growth(
    needed: list[list[int]],
    enabled: list[list[int]],
    is_done: bytearray,
    growth_bytes: Callable[[int], int],
    sign: int,
) -> list[int]:
    """Ops one by one, always the ready one of least growth."""
    missing = [len(ops) for ops in needed]
    ready = dict.fromkeys(op for op in range(len(needed)) if not missing[op])
    picked: list[int] = []
    while ready:
        op = min(ready, key=lambda op: (growth_bytes(op), sign * op))
        del ready[op]
        is_done[op] = 1
        picked.append(op)
        for other in enabled[op]:
            missing[other] -= 1
            if not missing[other]:
                ready[other] = None
    return picked
