"""A solve: levers, in the order of `REDUCTIONS`, around a solver that knows of none of them.

Each lever that accepts a question changes it, asks those behind it, and changes the answer back:

    chunks( updates( copies( fallback( pins( solver )))))

The order is part of what each relies on. Regions are chosen first, as each choice is another graph
for all others. Updates ask for several budgets, each of which all that is behind must keep. What a
solver without copies proves is weakened last, behind the rules that may replace its schedule. Pins
are next to the solver: the rules that stand in for it keep none.
"""

from __future__ import annotations

import functools
from typing import Any

from remat.schedules.levers import REDUCTIONS, attribute_at
from remat.solver.reductions.legal_step import (
    is_checked,
    require_legal_answer,
    require_legal_change,
)
from remat.solver.reductions.pairs import refuse_pairs
from remat.solver.reductions.reduction import Question, Reduction, Rest, solve_alone
from remat.solver.result import Result, with_time_limit_message
from remat.solver.search import one_job


def solve_question(question: Question) -> Result:
    """Ask the chain of levers; SolverError for two things that no plan keeps together."""
    refuse_pairs(question)
    # Levers ask several times: Ctrl-C in one solve leaves no time to the next.
    with one_job():
        levers = tuple(_reduction(lever.reduction) for lever in REDUCTIONS.values())
        return with_time_limit_message(fold(question, levers), question.time_limit_s)


def fold(question: Question, levers: tuple[Reduction[Any], ...]) -> Result:
    """The answer of the first lever that accepts, with those behind it as its rest."""
    for i, lever in enumerate(levers):
        if lever.accepts(question):
            rest = functools.partial(fold, levers=levers[i + 1 :])
            return _checked(lever, question, rest) if is_checked() else lever.solve(question, rest)
    found = solve_alone(question)
    if is_checked():
        require_legal_answer(question, found, question.solver)
    return found


def _checked(lever: Reduction[Any], question: Question, rest: Rest) -> Result:
    """The answer of a lever, held to the rules on the way in and on the way out."""
    name = type(lever).__name__

    def held(changed: Question) -> Result:
        require_legal_change(question, changed, name)
        return rest(changed)

    answer = lever.solve(question, held)
    require_legal_answer(question, answer, name)
    return answer


@functools.cache
def _reduction(path: str) -> Reduction[Any]:
    return attribute_at(path)()
