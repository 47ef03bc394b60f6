"""What every solver promises, and what it may take for granted."""

from __future__ import annotations

from typing import Protocol

from remat.graph_capture.graph import TrainingGraph
from remat.solver.result import Result


class Solver(Protocol):
    """What every class named in `TABLE` is: a frozen dataclass of options with one method.

    `tests/solver/test_contract.py` and the tests beside it hold every solver of the table to
    what follows. A `Search` (`remat.solver.search`) keeps most of it for its user: it takes the
    options and the limit from the solver, judges, remembers the best, hears Ctrl-C and makes
    the `Result`.

    Budget
        A schedule that is returned has a true peak, that of `simulate`, resident bytes
        included, of at most `budget_bytes`. A model of memory may guide the search; it never
        decides what is returned. `status` is ``optimal`` exactly where time equals the bound.
    Bound
        No schedule within the budget, with first computations in the order of the graph as it
        is given and any number of recomputations, takes less than `lower_bound_us`. With the
        option ``order="free"``, none in any order does. What is proved for fewer schedules, as
        for those that run no op three times, is said in `message` and nowhere else. A solver
        that proves nothing gives the time of every op once.
    Time limit
        `time_limit_s` is wall clock. Where it ends the search, the best schedule found is
        returned, with status ``time limit`` unless it is proved optimal. Overruns are those
        of one step that cannot be divided, a second or two. A limit of 0 is allowed.
    Ctrl-C
        A `KeyboardInterrupt` ends the search as the time limit does, at once: the best found
        is returned, and `message` begins with ``interrupted``. Calls into C++, which would
        keep Ctrl-C waiting, run in a `Task` or by `run_apart` (`remat.solver.backends`).
    Determinism
        The same graph, budget, options, seed and number of workers give the same schedule in
        any process, unless the limit or Ctrl-C ended the search. So efforts are counted in
        what no clock moves (`remat.solver.stopping`), and nothing iterates over a set of
        objects. `retention` with several workers is the one exception.
    Options
        They are the fields of the dataclass, each with a default: numbers, texts or bools.
        They are keyword arguments of `remat.solver.solve`. `Schedule.options` records every
        one, so that the same can be asked again.
        ``__post_init__`` refuses a value without meaning by a `SolverError` that says which
        values have one. Some fields are no options of a plan: `time_limit_s`, in seconds;
        `progress`, which is called with a `Progress` now and then; and `known_us` of a solver
        that can end where it is proved to find nothing better than that.
    What does not fit
        That nothing fits is a `Result`, no error: without a schedule, with status
        ``infeasible``, the least budget known to be feasible and the schedule for it. That
        budget does not depend on the one that was asked for, so a solve at it finds a schedule.
        Where the clock ended the search before anything was found, the status is
        ``time limit``: nothing is then said about the budget.
    """

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The best schedule found whose true peak is within `budget_bytes`, and a bound.

        Parameters
        ----------
        graph : TrainingGraph
            One training step. Its order of ops is the order of first computations.
        budget_bytes : int
            On the peak, resident bytes included. Any int; what is below what is resident is
            infeasible.

        Raises
        ------
        SolverError : the solver refuses the graph, as `exhaustive` refuses large ones.
        """
        ...
