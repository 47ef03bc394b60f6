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
again. `placing` then places each copy, as early down and as late up as the links allow.
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

from dataclasses import dataclass
from typing import ClassVar

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.links import Links
from remat.solver.bounds.cut_program import CutProgram
from remat.solver.offload.climbing import climb_hosted
from remat.solver.offload.joint_search import JointSearch
from remat.solver.offload.scope import can_copy, require_no_homes, without_links
from remat.solver.options import options_of
from remat.solver.result import INTERRUPTED, Result, renamed
from remat.solver.search import Listener, Search
from remat.solver.stopping import ALONE, DEFAULT_GAP, RELAXED
from remat.solver.store_all import store_all_state
from remat.solver.table import make_solver

FEW_OPS, WIDE = 300, 5e-3
"""On graphs of more ops, hosted sets are climbed over for a gap above this alone: that takes tens
of repairs, of a second each on thousands of ops."""


@dataclass(frozen=True)
class Joint:
    """Solver for graphs with links; without them that of `auto`.

    Attributes
    ----------
    gap : stop once time is proved within this fraction of the best.
    cuts : most cuts in one program.
    seed, workers : of the search for what recomputation alone comes to.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    copies: ClassVar[bool] = True

    gap: float = DEFAULT_GAP
    cuts: int = 3
    seed: int = 0
    workers: int = 2
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The best schedule found within `budget_bytes`, and a bound for any with copies.

        Raises
        ------
        SolverError : the graph has values that live on the host or on NVMe between steps.
        """
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
        if not search.has_room():
            search.proved_infeasible = True
        elif not search.out_of_time():
            self._close_gap(search, JointSearch(search, plain, links, self.gap))
        if search.best is None:
            self._take_alone(search)

    def _close_gap(self, search: Search, joint: JointSearch) -> None:
        if not joint.begin():
            return
        joint.prove()
        joint.take_starts()
        if search.is_open(self.gap) and not self._beats_alone(search, joint.cuts[0]):
            self._take_alone(search)
        while search.is_open(self.gap) and len(joint.cuts) < self.cuts and joint.add_cut():
            joint.prove()
            joint.take_starts()
        gap = self.gap if search.problem.n_ops <= FEW_OPS else max(WIDE, self.gap)
        if search.best is not None and search.is_open(gap):
            climb_hosted(search, joint.links, self.gap)

    def _beats_alone(self, search: Search, t: int) -> bool:
        """Whether no schedule without copies is proved faster than the best one found."""
        if search.best is None:
            return False
        search.say("what recomputation alone takes at least")
        program = CutProgram(search.problem, (t,), search.budget_bytes)
        return program.relaxed(RELAXED.of(search.left_s)).bound_us >= search.best_key[0]

    def _take_alone(self, search: Search) -> None:
        """Offer what recomputation alone comes to; its bound does not hold here."""
        if search.out_of_time():
            return
        search.say("recomputation alone")
        found = self._alone(search.graph, search.budget_bytes, ALONE.of(search.left_s))
        if found.schedule is not None:
            search.offer_schedule(found.schedule)
        elif found.least_schedule is not None:
            search.offer_schedule(found.least_schedule, or_least=True)
        if found.schedule is None and found.status == "time limit":
            search.cut_short = True
        if found.message.startswith(INTERRUPTED):
            raise KeyboardInterrupt

    def _alone(self, graph: TrainingGraph, budget_bytes: int, limit_s: float) -> Result:
        made = make_solver(
            "auto", gap=self.gap, seed=self.seed, workers=self.workers, time_limit_s=limit_s,
            progress=None if can_copy(graph) else self.progress,
        )  # fmt: skip
        return made.solve(without_links(graph), budget_bytes)
