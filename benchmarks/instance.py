"""Solves an instance file: `python -m benchmarks.instance FILE.json --budget BYTES`.

Prints one JSON object and nothing else to standard output; costs are in the file's unit.
`benchmarks/cells/instance_format.py` says what a file holds. `--out` writes the sequence of node
ids in the order computed, recomputations included; each result is freed after its last use.

Ends with status 0 if a schedule was found within the budget, with 3 if none was. If the request
cannot be read, ends with status 2 and one line on standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from benchmarks.cells.instance_format import (
    Id,
    Instance,
    Number,
    graph_of,
    op_name,
    read_instance,
)
from remat.graph_capture.errors import GraphError, RematError
from remat.graph_capture.files import write_contents
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Schedule
from remat.solver import Progress, Result, make_solver, option_names

WRONG, NOTHING_FITS = 2, 3
ORDERS = ("fixed", "free")
LEAST_GAP = 1e-6
"""Costs are exact here, not measured, so a solve goes on while this much may be gained."""
PASSED_ON = ("order", "workers", "seed", "gap")
PROOF_SLACK = 1e-6
"""Relative error that a bound may have; it is allowed for before rounding up to a whole cost."""


class _Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"{self.prog}: {message}\n")


@dataclass
class History:
    """Listens to a solver and notes what was known when, in the file's unit of cost."""

    instance: Instance
    base: float
    rows: list[tuple[float, Number | None, Number]] = field(
        default_factory=list[tuple[float, Number | None, Number]]
    )

    def __call__(self, progress: Progress) -> None:
        """Add a row if the schedule or the bound is better than in the last one."""
        best, base = progress.best_overhead, self.base or 1.0
        cost = None if best is None else self.base + best * base
        self.add(progress.seconds, cost, self.base + progress.bound_overhead * base)

    def add(self, seconds: float, cost: float | None, bound: float) -> None:
        """Add a row if it says anything new."""
        whole = self.instance.costs_are_whole
        shown = round(cost) if whole and cost is not None else cost
        row = (round(seconds, 4), shown, rounded_bound(bound, shown, whole=whole))
        if not self.rows or row[1:] != self.rows[-1][1:]:
            self.rows.append(row)

    @property
    def first_feasible_seconds(self) -> float | None:
        """When the first schedule within the budget was known."""
        return next((seconds for seconds, cost, _ in self.rows if cost is not None), None)


def closing_gap(instance: Instance) -> float:
    """The gap at which a solve ends. If costs are whole, half a unit is a proof."""
    base = sum(node.cost for node in instance.nodes)
    return 0.5 / base if instance.costs_are_whole and base else LEAST_GAP


def rounded_bound(bound: float, cost: Number | None, *, whole: bool) -> Number:
    """The bound as it is shown: rounded up if costs are whole, and never above `cost`."""
    if whole:
        up = math.ceil(bound - PROOF_SLACK * max(1.0, abs(bound)))
        bound = up if up >= bound * (1 - PROOF_SLACK) and up >= math.floor(bound) else bound
    return bound if cost is None else min(bound, cost)


def sequence_of(instance: Instance, schedule: Schedule) -> list[Id]:
    """Ids of the nodes in the order computed, recomputations included."""
    ids = {op_name(i): node.id for i, node in enumerate(instance.nodes)}
    return [ids[step.op] for step in schedule.steps if isinstance(step, Compute)]


def options_for(solver: str, asked: argparse.Namespace, instance: Instance) -> dict[str, object]:
    """The options that were asked for and that the solver has.

    Raises
    ------
    SolverError : unknown solver.
    """
    known = ["order", *option_names(solver)]
    given = {name: getattr(asked, name) for name in PASSED_ON}
    for name, value in given.items():
        if value is not None and name not in known:
            print(f"benchmarks.instance: {solver} has no option {name}", file=sys.stderr)
    options = {name: value for name, value in given.items() if value is not None and name in known}
    return {"gap": closing_gap(instance), **options} if "gap" in known else options


def solved(
    instance: Instance, budget_bytes: int, solver: str, **options: object
) -> tuple[dict[str, Any], list[Id]]:
    """What is printed for one solve, and the sequence; empty where nothing fits.

    Raises
    ------
    SolverError : unknown solver or option, or a free order from one that keeps the given one.
    """
    graph = graph_of(instance)
    history = History(instance, graph.time_us)
    made = make_solver(solver, progress=history, **options)
    result = made.solve(graph, budget_bytes)
    sequence = [] if result.schedule is None else sequence_of(instance, result.schedule)
    return _described(instance, graph, result, history, sequence), sequence


def _described(
    instance: Instance,
    graph: TrainingGraph,
    result: Result,
    history: History,
    sequence: list[Id],
) -> dict[str, Any]:
    costs = {node.id: node.cost for node in instance.nodes}
    cost = sum(costs[node] for node in sequence) if sequence else None
    whole = instance.costs_are_whole
    bound = rounded_bound(max(result.lower_bound_us, graph.time_us), cost, whole=whole)
    history.add(result.wall_s, cost, bound)
    is_proved = cost is not None and (result.status == "optimal" or bound == cost)
    base = sum(costs.values())
    return {
        "status": "optimal" if is_proved else result.status,
        "cost": cost,
        "overhead": None if cost is None else (cost / base - 1 if base else 0.0),
        "peak": None if cost is None else result.peak_bytes,
        "bound": cost if is_proved else bound,
        "gap": None if cost is None else (cost / bound - 1 if bound and not is_proved else 0.0),
        "seconds": round(result.wall_s, 4),
        "first_feasible_seconds": None if cost is None else history.first_feasible_seconds,
        "history": history.rows,
        "solver": result.solver,
        "budget": result.budget_bytes,
        "least_feasible": result.least_feasible_bytes or None,
        "least_bound": result.least_bound_bytes or None,
        "floor": result.floor.size_bytes if result.floor else None,
        "message": result.message,
    }


def _reader(
    kind: Callable[[str], float], allowed: Callable[[float], bool], rule: str
) -> Callable[[str], Any]:
    """A reader of one number that answers anything else with `rule`."""

    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not allowed(number):
            raise argparse.ArgumentTypeError(f"{rule}, found {text!r}")
        return number

    return read


_budget = _reader(int, lambda n: n > 0, "budgets must be positive bytes")
_seconds = _reader(float, lambda n: 0 < n < math.inf, "must be a positive number of seconds")
_count = _reader(int, lambda n: n >= 1, "must be a whole number from 1 on")
_fraction = _reader(float, lambda n: 0 <= n < math.inf, "must be zero or a positive fraction")
_seed = _reader(int, lambda n: n >= 0, "must be a whole number from 0 on")


def _parser() -> _Parser:
    parser = _Parser(prog="benchmarks.instance", description=__doc__)
    parser.add_argument("instance", type=Path, help="JSON file")
    parser.add_argument("--budget", type=_budget, required=True, help="bytes")
    parser.add_argument("--order", choices=ORDERS, default="fixed", help="of first computations")
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--time-limit", type=_seconds, default=60.0, help="seconds")
    parser.add_argument("--workers", type=_count, help="threads or processes")
    parser.add_argument("--gap", type=_fraction, help="stop within this fraction of the optimum")
    parser.add_argument("--seed", type=_seed)
    parser.add_argument(
        "--constants",
        choices=("resident", "apart"),
        default="apart",
        # Budgets that come with such graphs are parts of the peak of their values alone.
        help="whether the file's constant_bytes count towards the budget",
    )
    parser.add_argument("--out", type=Path, help="JSON file for the sequence of node ids")
    return parser


def main() -> int:
    """Read, solve, print."""
    parser = _parser()
    asked = parser.parse_args()
    if asked.out and not asked.out.absolute().parent.is_dir():
        parser.error(f"cannot write {asked.out}: no folder {asked.out.absolute().parent}")
    try:
        instance = read_instance(asked.instance)
        if asked.constants == "apart":
            instance = msgspec.structs.replace(instance, constant_bytes=0)
        options = {**options_for(asked.solver, asked, instance), "time_limit_s": asked.time_limit}
        found, sequence = solved(instance, asked.budget, asked.solver, **options)
        if asked.out and sequence:
            write_contents(asked.out, json.dumps(sequence).encode() + b"\n")
    except GraphError as error:
        parser.error(f"{asked.instance}: {error}")
    except (RematError, OSError) as error:
        parser.error(str(error))
    print(json.dumps(found))
    return 0 if sequence else NOTHING_FITS


if __name__ == "__main__":
    sys.exit(main())
