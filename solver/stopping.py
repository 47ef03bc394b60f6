"""When to stop: the rules that end a part of a search, each with the reason for its figure.

All but `Seconds` count what no clock moves, so the same graph, budget and options give the same
schedule on every machine. Plain numbers are branch-and-bound nodes of a mixed-integer program, or
counted time: about seconds, in simplex iterations and CP-SAT's deterministic time. Where `Seconds`
end something, two runs may differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

_NO_LIMIT = 1 << 62

EXACT_OPS, _EXACT_GAP = 32, 1e-9  # graphs of so few ops are solved to this gap: it takes no time
DEFAULT_GAP = 0.01  # ends a search at a schedule proved this close: costs are no more exact


def gap_for(n_ops: int, gap: float) -> float:
    return _EXACT_GAP if n_ops <= EXACT_OPS else gap


@dataclass(frozen=True, slots=True)
class WorkLimit:
    """Ends a search over moves once it has weighed `most` of them, as `Search.work` counts."""

    most: int

    def from_now(self, work: int) -> int:
        return work + self.most


@dataclass(frozen=True, slots=True)
class Seconds:
    """Ends a step after part of the time left."""

    most_s: float = math.inf  # at the latest
    part: float = 1.0  # of the time left
    least_s: float = 0.0  # in any case, unless the whole time limit is less

    def of(self, left_s: float, limit_s: float = math.inf) -> float:
        return max(min(self.most_s, self.part * left_s), min(self.least_s, limit_s))

    def longer(self, factor: float) -> Seconds:
        return replace(self, most_s=factor * self.most_s)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Ends a loop after so many rounds, or rounds in a row that do not help."""

    most: int = _NO_LIMIT  # whatever the graph
    times_ops: int = _NO_LIMIT  # rounds times ops, where a round takes time in proportion to them
    least: int = 0  # that even the largest graph has

    def at(self, n_ops: int) -> int:
        return max(min(self.most, self.times_ops // max(n_ops, 1)), self.least)


@dataclass(frozen=True, slots=True)
class SlowRound:
    """Ends rounds, where the gap is below `narrow`, after one that leaves `part` of it."""

    narrow: float
    part: float

    def is_last(self, gap: float, gap_before: float) -> bool:
        return self.narrow > gap > self.part * gap_before


# ---- programs of cuts (`cuts`, `auto`, `bounds`)

CUT_NODES = 500  # a program of cuts, which the next cut replaces anyway
# Relaxed programs that choose the first cuts of a program of several: about a second.
RELAXED_CUTS, RELAXED_ITERATIONS = 5, 5000
RELAXED_REPAIRS = WorkLimit(30_000)  # of the start of each of these
FIRST_CUT_NODES = 50  # the program of one cut: starts that come after it are often better
LARGE_CUT_NODES = 20  # a program of a large graph, whose nodes are slow
JOINT_NODES = 20  # cuts with copies: nearly all of the gap is closed at the root
ANY_ORDER_NODES = 100  # the one integer program of the bound for every order
BEST_CUT = Seconds(least_s=1.0)  # each program that chooses the first cut: no bound without one
RELAXED = Seconds(least_s=0.1)  # each linear program that gives a start, or a bound for every order
# Several cuts beside neighbourhoods. The status does not say that this clock ended a program.
CUTS = Seconds(most_s=25.0)
LARGE_CUTS = Seconds(most_s=4.0)  # the same on large graphs, where one cut says nearly all
STALLED_CUTS = Rounds(3)  # rounds in a row that raise no bound, after which cuts are given up
FIRST_ROUND, ROUND = 0.5, 3.0  # counted time of cuts and neighbourhoods, doubling
LAST_LARGE_ROUND = SlowRound(narrow=0.01, part=0.9)  # with a wider gap the time limit ends rounds

BUDGET_CONTINUATION = Seconds(part=0.7)  # the way down from the peak, where nothing fits yet
CONTINUATION_REPAIR = WorkLimit(30_000)  # one repair on that way: else a smaller step is quicker
# Neighbourhoods at one budget of that way: at first, and after doubling where the least step is too
# long, on a way that is to end soon or may be hard. .5 throughout took 34 s, not 26.
FIRST_DESCENT, SOON_DESCENT, LAST_DESCENT = 0.25, 0.5, 2.0

CLIMBED = Rounds(most=400, times_ops=60_000, least=20)  # sets of hosted ops, a repair or two each
REORDERED = Rounds(most=60, times_ops=12_000, least=4)  # orders of copies down tried for a state

# ---- repair and exchange (`local_search`, `cuts`)

# Before other starts than those of one cut: on an unrolled LSTM of 819 ops the first repair went
# round in circles for 40 s, or came to 170 % of overhead in 6 s; segments had 33 % in 0.7 s.
FIRST_REPAIRS = WorkLimit(100_000)
REPAIRS_OF_A_START = WorkLimit(20_000)  # with one power after another, once there is a schedule
VAIN_MOVES = WorkLimit(60_000)  # at one stage: each takes long where ops run a long way back again
EXCHANGES = WorkLimit(300_000)  # exchanges of what is kept
VAIN_EXCHANGES = Rounds(times_ops=100_000, least=20)  # each costs about as much as there are ops

# ---- neighbourhoods solved by CP-SAT (`local_search`)

NEIGHBOURHOOD = 0.7  # counted time; sets of ops that take longer are made smaller
OTHER_START = 0.5  # polishing another start: nearly all of what there is to win
LEAST_NEIGHBOURHOOD = 1.0  # the same on the way to the least peak, where each is the last

# ---- bounds on the least peak (`bounds`)

REGRESSION = Rounds(2000, times_ops=4_000_000)  # sets of values for the least peak: about a second

# ---- the portfolio (`auto`)

TINY = Seconds(part=0.5)  # exhaustive search; the rest is for what finds a schedule sooner
EXACT = Seconds(most_s=10.0)  # the exact program that ends a solve of a small graph
ALONE = Seconds(part=0.75)  # recomputation alone, where a graph has links
START = Seconds(part=0.2)  # another solver that gives a start: a policy, or segments

# ---- pins (`pins`)

TIGHTER = Rounds(4)  # budgets, each lower, until the schedule fits with the runs that are put in
FIRST_PINNED = Seconds(part=0.6)  # the first of these solves, and often the last
PINNED_SOLVE = Seconds(least_s=0.5)  # each of these solves, and the one that names the least budget
PINNED_BOUND = Seconds(most_s=5.0)  # the bound of the graph with `keep` alone
LEFT_OUT = Rounds(times_ops=200_000, least=20)  # runs; a trial costs about as much as there are ops

# ---- many budgets (`budgets`)

NAMING = Seconds(part=1 / 6)  # the search for the least peak, from which a sweep spreads budgets
ONE_BUDGET = Seconds(part=1.5)  # in equal parts of the time left; most budgets take less
FIRST_SOLVE, SECOND_SOLVE = Seconds(part=0.75), Seconds(least_s=0.5)  # naming the least peak; at it
# Until a plan reserves no more than it may: the first, and each for less. Near the least peak a
# solve may search for long, and what it would find is of little use.
UNLOWERED_SOLVE, LOWERED_SOLVE = Seconds(part=0.5), Seconds(most_s=5.0, part=0.5)

# ---- orders (`orders`), chosen on layered graphs

FIRST_LOOK = Seconds(part=0.3)  # the first look at the given order, of the whole limit
ANY_ORDER_BOUND = Seconds(most_s=10.0, part=0.1)  # the bound for every order, of the whole limit
OTHER_ORDER = Seconds(part=0.3)  # half to find it, half for a first look at it
# Before others: where there is a schedule, and where there is none.
FULL_SOLVE, FULL_SOLVE_IN_NEED = Seconds(part=0.2), Seconds(part=0.75)
REFINED_ORDER = Seconds(part=0.05)  # the solve in a refined order, of the whole limit
LEAST_SOLVE_S = 0.2  # seconds left below which no further solve is begun
VAIN_ORDERS = Rounds(12)  # refined orders in a row that do not help
DROPPED_RUNS = Rounds(12)  # repeated runs that are tried to be left out of an order

# ---- other solvers (`blocks`, `exact`, `policies`)

BLOCK_NODES = 200  # a program that makes an option of a block
CUT_FIRST = Seconds(part=1 / 3)  # `cut`, from which `retention` starts
POLICY_RUNS = 4  # of the graph's ops, by a policy that gives a start: one of more found none
LEAST_PEAK_TRIES = Rounds(10)  # budgets for a policy's least peak; each halves the range
