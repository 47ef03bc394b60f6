"""Keep, recompute or copy below the device: one program of cuts, copies placed by construction.

Also called: joint offloading and recomputation, hybrid swapping.
Source: Checkmate's program (Jain et al. 2020, https://arxiv.org/abs/1910.02653) restricted to
cuts, with variables for copies and windows of the links. For chains, both are combined by
Beaumont, Eyraud-Dubois, Shilova 2021
(https://papers.nips.cc/paper/2021/hash/c8461bf13fca8a2b9912ab2eb1668e4b-Abstract.html); POET (Patil
et al. 2022, https://arxiv.org/abs/2207.07697) writes one program over all stages.
Solves: least time under a budget on the device's peak and rooms below it, with any recomputations
and copies, first runs in captured order. The program of `joint_cut` decides for each value whether
it is kept, computed again or copied, and proves a bound on the time of any such schedule. Its point
is expanded and repaired like that of `cut`, with hosted values that arrive in place of ops that run
again. `place_copies` then places each copy, as early down and as late up as the links allow.
Where a gap stays, cuts follow where peak and bytes in flight exceed the budget, and a climb from
the best schedule over the sets of hosted ops.
Optimal: where bound and schedule meet; on transformers they are apart by .2 % or less.
Never worse than recomputation alone by more than `gap`: either its bound is above what was found,
or it is solved and offered.
Cost: some MILPs of two binaries a value that crosses the cut; near-linear up to 5,000 ops.
Shortcomings: the order of first runs is given; values are copied whole; the bound does not know
that a copy needs room while it is in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import ClassVar

import msgspec
import numpy as np

from remat.graph_capture.graph import Links, TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.schedule import Compute, Fetch, Offload, Schedule, fetched_value
from remat.solver.backends.mip import Limits
from remat.solver.bounds.cut_program import COST_SCALE, CutProgram, CutSolution, expand
from remat.solver.bounds.lazy_cuts import crowding
from remat.solver.cuts.cut import best_cut
from remat.solver.offload.fetch_as_recompute import movable, require_no_homes, with_fetches
from remat.solver.offload.joint_cut import JointCut
from remat.solver.offload.with_copies import WEIGHINGS, Hosted, Weighing, flight_of, offer_state
from remat.solver.problem import Problem, can_copy, largest_working_set_bytes, without_links
from remat.solver.result import INTERRUPTED, renamed
from remat.solver.search import Listener, Search
from remat.solver.state import Bytes, State, UnreachableError, store_all_state
from remat.solver.stopping import ALONE, CLIMBED, DEFAULT_GAP, JOINT_NODES, RELAXED
from remat.solver.table import make_solver, options_of

# A climb over the sets of hosted ops. Where one cut says little, as on convolutional nets, its
# point hosts the wrong values. From the runs of the best schedule one more op arrives, or one less,
# or one for another, and what comes of it is repaired and placed. The first faster one is taken.

_ADDED, _CHANGED = 25, 6  # ops to host as well; of those and of the hosted, to change

_Ops = frozenset[int]


@dataclass(slots=True)
class _Climb:
    search: Search
    links: Links
    gap: float
    can_move: list[bool]
    trials: int = 0

    def run(self) -> None:
        while self.search.is_open(self.gap) and self._step():
            pass

    def _step(self) -> bool:
        """The first trial that is faster than the best schedule; False where none is."""
        best, before_us = self.search.best, self.search.best_key[0]
        assert best is not None
        runs = arrivals_and_runs(self.search.problem, best)
        hosted = hosted_ops(self.search)
        spilled = frozenset(
            step.value for step in best.steps if isinstance(step, Offload) and step.to == "nvme"
        )
        for one, ops in product(WEIGHINGS, list(self._near(hosted, runs))):
            if self.trials >= CLIMBED.at(self.search.problem.n_ops) or self.search.out_of_time():
                return False
            self.trials += 1
            self._try(Hosted(ops, spilled), runs, one)
            if self.search.best_key[0] < before_us:
                return True
        return False

    def _try(self, hosted: Hosted, runs: list[list[int]], one: Weighing) -> None:
        search, factor = self.search, one.cost_factor
        problem = with_fetches(search.problem, hosted.ops, self.links, cost_factor=factor)
        try:
            state = State.from_recomputed(problem, runs)
        except UnreachableError:  # an op that must run once arrives no longer
            return
        offer_state(search, state, hosted, self.links, one.power)

    def _near(self, hosted: _Ops, runs: list[list[int]]) -> Iterator[_Ops]:
        """Sets to try: one op more, one less, one for another; what saves most a byte first."""
        more, less = self._worth_hosting(hosted, runs), sorted(hosted)
        yield from (hosted | {op} for op in more[:_ADDED])
        yield from (hosted - {op} for op in less)
        for op in less[:_CHANGED]:
            yield from (hosted - {op} | {other} for other in more[:_CHANGED])

    def _worth_hosting(self, hosted: _Ops, runs: list[list[int]]) -> list[int]:
        problem, again_us = self.search.problem, dict[int, float]()
        for op in (op for stage in runs for op in stage):
            again_us[op] = again_us.get(op, 0.0) + problem.cost_us[op]
        can = [
            op for op in again_us
            if op not in hosted and problem.output_bytes[op]
            and all(self.can_move[v] for v in problem.outputs[op])
        ]  # fmt: skip
        return sorted(can, key=lambda op: (-again_us[op] / problem.output_bytes[op], op))


def climb_hosted(search: Search, links: Links, gap: float) -> None:
    """Offer what a climb from the best schedule comes to; there must be one."""
    search.say("other values below the device")
    _Climb(search, links, gap, movable(search.problem)).run()


def hosted_ops(search: Search) -> _Ops:
    assert search.best is not None
    producer = dict(zip(search.problem.names, search.problem.producer, strict=True))
    fetched = map(fetched_value, search.best.steps)
    return frozenset(producer[name] for name in fetched if name)


def arrivals_and_runs(problem: Problem, schedule: Schedule) -> list[list[int]]:
    """By stage the ops that run again, and those whose values are first read after a fetch."""
    index = problem.graph.op_index
    producer = dict(zip(problem.names, problem.producer, strict=True))
    stages: list[list[int]] = [[] for _ in range(problem.n_ops + 1)]
    following, waiting = 0, dict[str, None]()
    for step in schedule.steps:
        if isinstance(step, Fetch) and step.to == "device":
            waiting[step.value] = None
        elif isinstance(step, Compute):
            op = index[step.op]
            # When it must have arrived is what counts.
            arrived = [v for v in problem.graph.ops[op].inputs if v in waiting]
            for v in arrived:
                del waiting[v]
            stages[following] += [producer[v] for v in arrived]
            if op == following:
                following += 1
            else:
                stages[following].append(op)
    stages[problem.n_ops] += [producer[v] for v in waiting]  # the end alone reads these
    return [list(dict.fromkeys(stage)) for stage in stages]


# The first cut is the one whose relaxed program says most. Programs of less room give more starts,
# since one cut does not see other stages. A further cut goes where peak and bytes in flight exceed
# the budget most: the peak alone hardly ever asks for one.

_LEAST_SHARE = 4096  # of the peak: copying less takes longer to begin than to copy
_PARTS = (1.0, 0.98, 0.95, 0.9, 0.85, 0.75)  # of the room above the largest working set, for starts
_HOST_PARTS = (1.0, 0.9, 0.75)  # of the host's room for what stays: transit to NVMe needs some


@dataclass(slots=True)
class _JointSearch:
    search: Search
    plain: State  # keeps all
    links: Links
    gap: float
    cuts: list[int] = field(default_factory=list[int])  # in order of addition
    # By stage, the last start's bytes over the budget with those in flight; None before one.
    crowded: Bytes | None = None
    least_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.least_bytes = int(self.plain.peak_bytes.max(initial=0)) // _LEAST_SHARE

    def begin(self) -> bool:
        """Choose the first cut; False where what must be live somewhere exceeds the budget."""
        self.search.say("choosing where to cut")
        place = best_cut(self.search, self.plain, lambda t: self._program((t,)))
        self.cuts = [] if place is None else [place]
        return place is not None

    def solve(self) -> None:
        """The bound of the cuts as they are, and starts of them."""
        self._prove()
        self._take_starts()

    def _prove(self) -> None:
        last = self.search.graph.ops[self.cuts[-1]].name
        self.search.say(f"{len(self.cuts)} cuts, the last at {last}")
        found = self._program(tuple(sorted(self.cuts))).solve(self._limits())
        if found.bound_us == float("inf"):
            self.search.proved_infeasible = True
        else:
            self.search.raise_bound(found.bound_us)

    def _take_starts(self) -> None:
        is_first = len(self.cuts) == 1
        parts = _PARTS if is_first else _PARTS[: 1 if self.search.is_large else 2]
        ways = [self.links]
        if self.links.nvme_bytes:  # NVMe may be too slow for the program's point
            ways.append(msgspec.structs.replace(self.links, write=None, read=None, nvme_bytes=0))
        for links, part in product(ways, parts):
            if self.search.is_open(self.gap):
                self._take_start(part, links)

    def add_cut(self) -> bool:
        """Cut where it is most crowded; returns whether there was such a place."""
        if self.crowded is None:
            return False
        over = crowding(self.crowded[: self.search.problem.n_ops], self.cuts)
        place = int(np.argmax(over))
        if over[place] <= 0 or place in self.cuts:
            return False
        self.cuts.append(place)
        return True

    def _take_start(self, part: float, links: Links) -> None:
        search = self.search
        search.say(f"a start for {part:.0%} of the room")
        made = self._program(tuple(sorted(self.cuts)), part, links)
        if (found := made.solve(self._limits())).values is None:
            return
        ops = frozenset(search.problem.producer[v] for v in made.copied(found.values, made.fetched))
        if part == _PARTS[0] and links is self.links:
            state = self._state(found, ops, WEIGHINGS[0])
            if state is not None:  # in all the room: the next cut is for the real budget
                over = state.peak_bytes - search.budget_bytes
                self.crowded = over + flight_of(state, ops, self.links)
        if not self._offer(found, ops, links):
            # What the program carries past the cut may be too much elsewhere.
            self._offer(found, ops | self._pinned(), links)

    def _offer(self, found: CutSolution, ops: frozenset[int], links: Links) -> bool:
        """Whether a point in which `ops` arrive was repaired; offers what it comes to."""
        is_repaired = False
        for one in WEIGHINGS[:1] if self.search.is_large else WEIGHINGS:
            if (state := self._state(found, ops, one)) is None:
                continue
            for spilled in self._spilled(ops, links):
                done = offer_state(self.search, state, Hosted(ops, spilled), links, one.power)
                is_repaired = is_repaired or done
        return is_repaired

    def _spilled(self, ops: frozenset[int], links: Links) -> Iterator[frozenset[str]]:
        """Ways to share what `ops` make between host and NVMe."""
        problem, room_bytes = self.search.problem, links.nvme_bytes
        # Made first, needed last: the longest time to go down and up.
        values = [v for op in sorted(ops) for v in problem.outputs[op]]
        seen: set[int] = set()
        for part in _HOST_PARTS:
            over_bytes = sum(problem.size_bytes[v] for v in values)
            over_bytes -= int(part * links.host_bytes)
            ends = np.cumsum([problem.size_bytes[v] for v in values])
            count = int(np.searchsorted(ends, over_bytes)) + 1 if over_bytes > 0 else 0
            count = min(count, int(np.searchsorted(ends, room_bytes, side="right")))
            if count not in seen:
                seen.add(count)
                yield frozenset(problem.names[v] for v in values[:count])

    def _pinned(self) -> set[int]:
        """Ops that must run once, and whose values may leave."""
        problem, can_move = self.search.problem, movable(self.search.problem)
        return {
            op
            for op in range(problem.n_ops)
            if problem.no_recompute[op]
            and problem.output_bytes[op] >= max(self.least_bytes, 1)
            and all(can_move[v] for v in problem.outputs[op])
        }

    def _state(self, found: CutSolution, ops: frozenset[int], one: Weighing) -> State | None:
        problem = with_fetches(self.search.problem, ops, self.links, cost_factor=one.cost_factor)
        try:
            return State.from_recomputed(problem, expand(found, problem))
        except UnreachableError:  # a fraction of a value whose op must run once
            return None

    def _program(
        self, cuts: tuple[int, ...], part: float = 1.0, starting: Links | None = None
    ) -> JointCut:
        """A bound; or, over the links `starting`, a start in part of the room."""
        search, budget_bytes = self.search, self.search.budget_bytes
        if starting is not None:
            least_bytes = largest_working_set_bytes(search.problem) + search.problem.resident_bytes
            budget_bytes = least_bytes + int(part * max(budget_bytes - least_bytes, 0))
        return JointCut(
            search.problem, cuts, budget_bytes, links=starting or self.links,
            is_start=starting is not None, least_bytes=max(self.least_bytes, 1),
        )  # fmt: skip

    def _limits(self) -> Limits:
        # Nodes, so that the point is the same on every machine.
        limit_s, gap = RELAXED.of(self.search.left_s), self.gap / 4 * COST_SCALE
        return Limits(limit_s, absolute_gap=gap, node_limit=JOINT_NODES)


# On more ops hosted sets are climbed over for a wide gap alone: tens of repairs, a second each.
_FEW_OPS, _WIDE = 300, 5e-3


@dataclass(frozen=True)
class JointOffload:
    """Solver for graphs with links; without them that of `auto`.

    Attributes
    ----------
    gap : stop once time is proved within this fraction of the best.
    cuts : most cuts in one program.
    seed, workers : of the search for what recomputation alone comes to.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    copies: ClassVar[bool] = True

    gap: float = DEFAULT_GAP
    cuts: int = 3
    seed: int = 0
    workers: int = 2
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        if not can_copy(graph):
            found = self._alone(graph, budget_bytes, self.time_limit_s)
            return renamed(found, "joint", options_of(self))
        require_no_homes(graph, "joint")
        search = Search.of(self, "joint", graph, budget_bytes)
        assert graph.links is not None
        with search.until_interrupted():
            self._run(search, graph.links)
        return search.result()

    def _run(self, search: Search, links: Links) -> None:
        plain = store_all_state(search.problem)
        if search.offer(plain):
            return
        if search.has_room() and not search.out_of_time():
            self._close_gap(search, _JointSearch(search, plain, links, self.gap))
        if search.best is None:
            self._take_alone(search)

    def _close_gap(self, search: Search, joint: _JointSearch) -> None:
        if not joint.begin():
            return
        joint.solve()
        # One cut does not see where else memory is full: two may fit where none of its starts did.
        if search.best is None and self.cuts > 1 and joint.add_cut():
            joint.solve()
        # Never worse than recomputation alone by more than the gap.
        if search.is_open(self.gap) and not self._beats_alone(search, joint.cuts[0]):
            self._take_alone(search)
        while search.is_open(self.gap) and len(joint.cuts) < self.cuts and joint.add_cut():
            joint.solve()
        gap = self.gap if search.problem.n_ops <= _FEW_OPS else max(_WIDE, self.gap)
        if search.best is not None and search.is_open(gap):
            climb_hosted(search, joint.links, self.gap)

    def _beats_alone(self, search: Search, t: int) -> bool:
        """Whether no schedule without copies is proved faster than the best one found."""
        if search.best is None:
            return False
        search.say("finding the least that recomputation alone needs")
        program = CutProgram(search.problem, (t,), search.budget_bytes)
        return program.relaxed(RELAXED.of(search.left_s)).bound_us >= search.best_key[0]

    def _take_alone(self, search: Search) -> None:
        if search.out_of_time():
            return
        search.say("recomputation alone")
        # Its bound does not hold with copies.
        found = self._alone(search.graph, search.budget_bytes, ALONE.of(search.left_s))
        if found.schedule is not None:
            search.offer_schedule(found.schedule)
        elif found.least_schedule is not None:
            search.offer_schedule(found.least_schedule, or_least=True)
        if found.schedule is None and found.status == "time limit":
            search.cut_short = True
        if found.message.startswith(INTERRUPTED):  # the inner search took Ctrl-C as its own end
            raise KeyboardInterrupt

    def _alone(self, graph: TrainingGraph, budget_bytes: int, limit_s: float) -> Result:
        made = make_solver(  # its bounds do not hold with copies
            "auto", gap=self.gap, seed=self.seed, workers=self.workers, time_limit_s=limit_s,
            progress=None if can_copy(graph) else self.progress,
        )  # fmt: skip
        return made.solve(without_links(graph), budget_bytes)
