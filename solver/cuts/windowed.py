"""Windows of cuts instead of one cut, where memory is full in several places of the step.

On narrow layered graphs one cut says little, and repairs of its point have most of the work still
to do. The windows (`remat.solver.bounds.windows`) are each solved once; they are kept if their
bound is the higher one.
"""

from __future__ import annotations

from dataclasses import replace

from remat.solver.bounds.lazy_cuts import LazyCuts
from remat.solver.bounds.windows import Windows, windows_of
from remat.solver.cuts.cut import (
    TARGETS,
    begin,
    limits_of,
    repair_from,
    take_climbed,
    take_targets,
    targets,
)
from remat.solver.cuts.starts import take_first
from remat.solver.search import Search
from remat.solver.state import State
from remat.solver.stopping import CUTS, FIRST_CUT_NODES, FIRST_REPAIRS, RELAXED

NEARLY_ALL = 0.9
"""Part of what all windows say together."""


def begin_windows(
    search: Search, plain: State, gap: float, *, has_start: bool = False
) -> Windows | None:
    """As `begin`; then windows if they say more than its cut, else that cut as the only one.

    Starts of the single cut are left out where windows give some: repairs of them take long, and
    found none on narrow graphs.
    """
    windows = windows_of(search.problem, search.budget_bytes, plain.peak_bytes)
    has_several = len(windows.parts) > 1 and not search.is_large
    has_others = has_start or has_several
    lazy = begin(search, plain, gap, has_start=has_others, with_policies=True)
    if lazy is None:
        return None
    is_best = has_several and _say_more(search, windows, lazy, gap)
    if is_best:
        _take_relaxed(search, windows, gap)
    if has_several and search.best is None:
        take_first(search, plain, is_patient=True)
    if is_best:
        return windows
    if has_several and not has_start:
        take_targets(search, lazy.cuts[0], gap)
    return Windows(search.problem, [lazy], bound_us=lazy.bound_us)


def _say_more(search: Search, windows: Windows, lazy: LazyCuts, gap: float) -> bool:
    """Climb each of the windows once; whether their bound is above that of `lazy`.

    They are not climbed where one says nearly all by its linear relaxation: the cut is better then,
    to which others are added as they are needed.
    """
    if not search.is_open(gap):
        return False
    relaxed_us = windows.relaxed_us(RELAXED.of(search.left_s))
    if max(relaxed_us) >= NEARLY_ALL * sum(relaxed_us):
        return False
    for _ in range(len(windows.parts)):
        if not search.is_open(gap):
            return False
        search.say(f"{len(windows.parts)} windows of cuts")
        limits = limits_of(search, windows, gap, search.gap, FIRST_CUT_NODES)
        climbed = windows.climb(replace(limits, time_limit_s=CUTS.of(search.left_s)))
        take_climbed(search, climbed, FIRST_REPAIRS.from_now(search.work))
    return windows.bound_us > lazy.bound_us


def _take_relaxed(search: Search, windows: Windows, gap: float) -> None:
    """Repair what the windows' linear relaxations come to below the budget, until one fits."""
    for target_bytes in targets(search, TARGETS):
        if search.best is not None or not search.is_open(gap):
            return
        search.say(f"start of windows for {target_bytes} bytes")
        start = windows.relaxed_start(target_bytes, RELAXED.of(search.left_s))
        if start is not None:
            repair_from(search, start, FIRST_REPAIRS.from_now(search.work))
