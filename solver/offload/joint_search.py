"""Bounds and starts from programs of cuts with copies, cut by cut.

The first cut is the one whose relaxed program says most. Its program gives a bound, and its point a
start; programs of less room give more starts, since one cut does not see how full the other stages
are. A further cut goes where the stage's peak and the bytes in flight there exceed the budget most:
the peak alone, of a schedule whose copies take no time, hardly ever asks for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import msgspec
import numpy as np

from remat.graph_capture.links import Links
from remat.solver.backends.mip import Limits
from remat.solver.bounds.cut_program import COST_SCALE, CutSolution, expand
from remat.solver.bounds.lazy_cuts import AT_A_CUT, FAR
from remat.solver.cuts.cut import candidate_cuts
from remat.solver.offload.arrivals import hosting, movable
from remat.solver.offload.joint_cut import JointCut
from remat.solver.offload.with_copies import (
    WEIGHINGS,
    Hosted,
    Weighing,
    flight_of,
    offer_state,
)
from remat.solver.problem import largest_working_set_bytes
from remat.solver.search import Search
from remat.solver.stage import UnreachableError
from remat.solver.state import State
from remat.solver.stopping import BEST_CUT, JOINT_NODES, RELAXED

LEAST_SHARE = 4096
"""A start copies no value below this part of the peak: 1 MiB of 4 GiB takes longer to begin than to
copy, and thousands of small copies shorten no step."""
PARTS = (1.0, 0.98, 0.95, 0.9, 0.85, 0.75)
"""Parts of the room above the largest working set at which the program is solved for starts."""
HOST_PARTS = (1.0, 0.9, 0.75)
"""Parts of the host's room that are filled with what stays there, where NVMe takes the rest: what
is on its way to NVMe or back needs room too."""


@dataclass(slots=True)
class JointSearch:
    """Raises the bound of `search` and offers it schedules.

    Attributes
    ----------
    plain : the state that keeps all. gap : of `search`, to which to work.
    cuts : ops at which there is a cut, in order of addition.
    crowded : by stage, bytes over the budget, with those in flight, of the last start in all the
        room; None before there was one.
    """

    search: Search
    plain: State
    links: Links
    gap: float
    cuts: list[int] = field(default_factory=list[int])
    crowded: np.ndarray | None = None
    least_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.least_bytes = int(self.plain.peak_bytes.max(initial=0)) // LEAST_SHARE

    def begin(self) -> bool:
        """Choose the first cut; False where what must be live somewhere exceeds the budget."""
        self.search.say("choosing where to cut")
        best: tuple[float, int] | None = None
        for t in candidate_cuts(self.search, self.plain):
            if best is not None and self.search.out_of_time():
                break
            found = self._program((t,)).relaxed(BEST_CUT.of(self.search.left_s))
            if found.bound_us == float("inf"):
                self.search.proved_infeasible = True
                self.search.message = f"what must be live while {self._name(t)} runs is more"
                return False
            self.search.raise_bound(found.bound_us)
            if best is None or found.bound_us > best[0]:
                best = found.bound_us, t
        assert best is not None
        self.cuts = [best[1]]
        return True

    def prove(self) -> None:
        """Raise the bound by the program of all cuts so far."""
        self.search.say(f"{len(self.cuts)} cuts, the last at {self._name(self.cuts[-1])}")
        found = self._program(tuple(sorted(self.cuts))).solve(self._limits())
        if found.bound_us == float("inf"):
            self.search.proved_infeasible = True
        else:
            self.search.raise_bound(found.bound_us)

    def take_starts(self) -> None:
        """Offer schedules from the program at less and less room.

        NVMe may be too slow for what the program brings there: starts without it follow.
        """
        is_first = len(self.cuts) == 1
        parts = PARTS if is_first else PARTS[: 1 if self.search.is_large else 2]
        for links, part in product(self._ways_down(), parts):
            if self.search.is_open(self.gap):
                self._take_start(part, links)

    def add_cut(self) -> bool:
        """Cut where it is most crowded; return whether there was such a place."""
        if self.crowded is None:
            return False
        n_ops = self.search.problem.n_ops
        distance = np.abs(np.arange(n_ops)[:, None] - np.array(self.cuts)[None, :]).min(axis=1)
        over = self.crowded[:n_ops].astype(float)
        over = np.where(over > 0, over * np.clip(distance, AT_A_CUT, FAR), over)
        place = int(np.argmax(over))
        if over[place] <= 0 or place in self.cuts:
            return False
        self.cuts.append(place)
        return True

    def _ways_down(self) -> Iterator[Links]:
        yield self.links
        if self.links.nvme_bytes:
            yield msgspec.structs.replace(self.links, write=None, read=None, nvme_bytes=0)

    def _take_start(self, part: float, links: Links) -> None:
        search = self.search
        search.say(f"a start for {part:.0%} of the room")
        made = self._program(tuple(sorted(self.cuts)), part, links)
        found = made.solve(self._limits())
        if found.values is None:
            return
        producer = search.problem.producer
        ops = frozenset(producer[v] for v in made.copied(found.values, made.fetched))
        if part == PARTS[0] and links is self.links:
            self._note_crowded(found, ops)
        if not self._offer(found, ops, links):
            # What must run once, and the program carries past the cut, may be too much elsewhere.
            self._offer(found, ops | self._pinned(), links)

    def _note_crowded(self, found: CutSolution, ops: frozenset[int]) -> None:
        state = self._state(found, ops, WEIGHINGS[0])
        if state is not None:
            over = state.peak_bytes - self.search.budget_bytes
            self.crowded = over + flight_of(state, ops, self.links)

    def _offer(self, found: CutSolution, ops: frozenset[int], links: Links) -> bool:
        """Whether a point in which `ops` arrive was repaired; offers what it comes to."""
        is_repaired = False
        for one in WEIGHINGS[:1] if self.search.is_large else WEIGHINGS:
            state = self._state(found, ops, one)
            if state is None:
                continue
            for spilled in self._spilled(ops, links):
                done = offer_state(self.search, state, Hosted(ops, spilled), links, one.power)
                is_repaired = is_repaired or done
        return is_repaired

    def _spilled(self, ops: frozenset[int], links: Links) -> Iterator[frozenset[str]]:
        """Ways to share what `ops` make between host and NVMe.

        What is made first is needed last: it has the longest time to go down and to come up.
        """
        problem, room_bytes = self.search.problem, links.nvme_bytes
        values = [v for op in sorted(ops) for v in problem.outputs[op]]
        seen: set[int] = set()
        for part in HOST_PARTS:
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
            if problem.pinned[op]
            and problem.output_bytes[op] >= max(self.least_bytes, 1)
            and all(can_move[v] for v in problem.outputs[op])
        }

    def _state(self, found: CutSolution, ops: frozenset[int], one: Weighing) -> State | None:
        """The point of a program as a state in which `ops` arrive."""
        problem = hosting(self.search.problem, ops, self.links, price=one.price)
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
        """Node limits alone, so that the same program gives the same point on every machine."""
        return Limits(
            time_limit_s=RELAXED.of(self.search.left_s),
            absolute_gap=self.gap / 4 * COST_SCALE,
            node_limit=JOINT_NODES.most,
        )

    def _name(self, t: int) -> str:
        return self.search.graph.ops[t].name
