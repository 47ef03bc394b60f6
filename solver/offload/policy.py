"""Fixed policies of offloading: choices tried in turn, their copies placed, all of them judged.

A policy names what is kept, hosted and made again, with a knob. Each gets the recomputation just
in time and the placing of copies of `placing`, which is more than most have where they come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from remat.graph_capture.errors import SolverError, option
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.links import Links
from remat.solver.offload.arrivals import Base
from remat.solver.offload.placing import place_copies
from remat.solver.offload.released import Choice, Saved
from remat.solver.offload.scope import require_no_homes
from remat.solver.result import Result
from remat.solver.search import Listener, Search

LEAST_BYTES = 1 << 20
"""Smaller values stay, unless a policy is told otherwise."""
NOTHING_LARGE = "backward reads nothing of forward that is large enough to leave the device"
NO_ROOM = "the host has no room for what the policy sends there"

Choices = Callable[[Saved], Iterable[Choice]]


def links_of(graph: TrainingGraph, solver: str) -> Links:
    """The links of `graph`.

    Raises
    ------
    SolverError : there are none, or values that are resident elsewhere are to be moved.
    """
    if graph.links is None:
        raise SolverError(
            f"solver '{solver}' needs a link to the host: capture with "
            f"{option('host', '64GiB')}, or take solver auto"
        )
    require_no_homes(graph, solver)
    return graph.links


@dataclass(frozen=True)
class SteppedPolicy(ABC):
    """A policy with a knob, of which some settings are tried.

    Attributes
    ----------
    name : in the table of solvers. steps : settings tried, both ends included.
    least_bytes : smaller values stay.
    time_limit_s, progress : as in `remat.solver.solve`.
    """

    copies: ClassVar[bool] = True
    name: ClassVar[str]

    steps: int = 49
    least_bytes: int = LEAST_BYTES
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        check_knobs(self.least_bytes, self.steps)

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The unmodified step if it fits, else the fastest setting that does.

        Raises
        ------
        SolverError : the graph has no links.
        """
        return solve_choices(self, self.name, graph, budget_bytes, self.choices)

    @abstractmethod
    def choices(self, saved: Saved) -> Iterator[Choice]:
        """A choice for each setting."""


def check_knobs(least_bytes: int, steps: int = 2) -> None:
    """Raise `SolverError` unless they are a number of bytes, and of settings to try."""
    if least_bytes < 1:
        raise SolverError(f"least_bytes must be 1 or more, not {least_bytes}")
    if steps < 2:
        raise SolverError(f"steps must be 2 (all and nothing) or more, not {steps}")


def solve_choices(
    solver: Any, name: str, graph: TrainingGraph, budget_bytes: int, choices: Choices
) -> Result:
    """The fastest that fits of the unmodified step and of `choices`, all of them tried.

    Parameters
    ----------
    solver : the policy, with the option `least_bytes`. name : its name in the table.
    choices : gives the choices; none where the policy does not apply.

    Raises
    ------
    SolverError : the graph has no links, or moves more than activations.
    """
    links = links_of(graph, name)
    search = Search.of(solver, name, graph, budget_bytes)
    with search.until_interrupted():
        if not search.offer_sequence(range(search.problem.n_ops), or_least=True):
            _try_choices(search, Saved(search.problem, links, solver.least_bytes), choices)
    return search.result()


def _try_choices(search: Search, saved: Saved, choices: Choices) -> None:
    search.message = NOTHING_LARGE
    over: list[Base] = []
    seen: set[Choice] = set()
    for choice in choices(saved):
        search.message = ""
        base = None if choice in seen else saved.base(choice)
        seen.add(choice)
        if base is not None and not _take(search, saved.links, base, search.budget_bytes):
            over.append(base)
        search.say("the next setting of the policy")
        if search.out_of_time():
            return
    if search.best is None:
        _take_least(search, saved.links, over)


def _take_least(search: Search, links: Links, over: list[Base]) -> None:
    """Name the least budget that a choice fits: no copy needs room beside its base."""
    for base in sorted(over, key=lambda one: one.peak_bytes):
        if base.peak_bytes >= search.lowest_bytes or _take(search, links, base, base.peak_bytes):
            return
        search.message = NO_ROOM


def _take(search: Search, links: Links, base: Base, budget_bytes: int) -> bool:
    """Offer `base` with its copies placed within `budget_bytes`; whether there is room."""
    placed = place_copies(search.graph, base, budget_bytes, links)
    if placed is not None:
        search.offer_judged(placed.schedule, placed.found, or_least=True)
    return placed is not None
