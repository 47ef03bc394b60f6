"""A plan whose code keeps to the budget, where Inductor makes the code.

The peak of Inductor's code is known once it is generated, and can be above that of the schedule.
So the solver's target is lowered by what the code takes too much, until it fits.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, SupportsIndex

from torch import nn

from remat.budgets import parse_budget
from remat.formats import bytes_text
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.tracing.trace import Trace
from remat.rewriter.inductor.compiler import code_peak_bytes
from remat.rewriter.inductor.lowering import ReplayError
from remat.rewriter.rewriting import module_for, rewrite
from remat.rewriter.user_module.module import RematModule

if TYPE_CHECKING:
    from remat.solved import Solved

_LOG = logging.getLogger("remat")
TRIES = 6
"""Most plans whose code is generated; each takes some seconds."""
STEP = 0.998
"""Part of the peak that did not fit to which the next target falls at least."""


def compiled_within(
    model: nn.Module,
    traced: Trace,
    solve: Callable[[int], Solved],
    first: Solved,
    budget: str | SupportsIndex,
) -> tuple[RematModule, bool]:
    """The model by Inductor's code, and whether that is bound by the budget.

    Where the least peak is asked for, the plan of the least peak is compiled, and a warning says
    by how much its code is above.

    Parameters
    ----------
    solve : for a target in bytes. first : what was solved for `budget`, feasible.

    Raises
    ------
    BudgetError : the code of no plan that was tried keeps to the budget.
    """
    from remat.solved import facts_of

    is_bound = parse_budget(budget).kind != "min"
    found = plan_for_code(traced, solve, first) if is_bound else first
    schedule, facts = found.result.schedule, facts_of(found)
    assert schedule is not None
    if is_bound:
        return module_for(model, schedule, traced, **facts, by_inductor=True), True
    return rewrite(model, schedule, trace=traced, **facts, compile=True), False


def plan_for_code(traced: Trace, solve: Callable[[int], Solved], first: Solved) -> Solved:
    """The first result found whose code keeps to the budget of `first`.

    Parameters
    ----------
    solve : for a target in bytes. first : feasible, for the budget that counts.

    Raises
    ------
    BudgetError : the code of none that was tried does.
    """
    limit_bytes, found = first.result.budget_bytes, first
    peaks: list[int] = []
    while (result := found.result).schedule is not None and len(peaks) < TRIES:
        try:
            peaks.append(code_peak_bytes(traced.joint, result.schedule))
        except ReplayError as error:
            warnings.warn(f"{error}: the compiled peak is not known", stacklevel=3)
            return found
        _LOG.debug("schedule of %d bytes: %d in code", result.peak_bytes, peaks[-1])
        if peaks[-1] <= limit_bytes:
            return found
        excess_bytes = peaks[-1] - limit_bytes
        target = min(result.peak_bytes - excess_bytes, int(STEP * result.peak_bytes))
        found = solve(max(1, target))
    least_mib = -(-min(peaks) // 2**20)
    raise BudgetError(
        f"compiled, no plan was found that keeps to {bytes_text(limit_bytes)}: the lowest peak of "
        f"Inductor's code for {len(peaks)} plans is {bytes_text(min(peaks))}. Give "
        f'budget="{least_mib}MiB", or leave out compile=True, where the schedule\'s peak is kept'
    )
