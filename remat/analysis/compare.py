"""`remat.sweep`: solves at each budget with each solver and simple rule, and shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, SupportsIndex

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from remat.analysis.budget_sweep import Budgets, BudgetSlider, in_bytes
from remat.analysis.plan_figures import place as place_buffers
from remat.budgets import unmodified_step
from remat.formats import Answer, bytes_text, percent_text, plain_table, time_text
from remat.graph_capture.errors import BudgetError, SolverError, option
from remat.graph_capture.graph import TrainingGraph
from remat.plan import Plan
from remat.schedules.derived import fastest_us
from remat.schedules.outcome import Result
from remat.schedules.simulate import overhead_of
from remat.schedules.value_report.globs import as_globs
from remat.solved import Solved
from remat.solver import solver_class
from remat.solver.budgets.front import Front
from remat.solver.budgets.sweep import PINS, check_jobs, sweep_budgets
from remat.solver.result import INTERRUPTED
from remat.solver.search import Clock, is_interrupted, one_job
from remat.solver.stopping import NAMING
from remat.solver.table import check_number

UNMODIFIED = "unmodified"
THIS_PLAN = "this plan"

_NAME_COLUMNS = 24
_CELL_COLUMNS = 13  # columns of the screen that a solver's name takes, and a cell


class _Cell(msgspec.Struct, frozen=True):
    """One solver at one budget; figures are 0 where it found nothing that fits."""

    budget_bytes: int
    fits: bool
    status: str
    peak_bytes: int
    time_us: float
    overhead: float
    over_bound: float  # time over the best bound at that budget, minus one
    wall_s: float
    arena_bytes: int = 0  # of its buffers, without what is resident; 0 where not placed


class _Compared(msgspec.Struct, frozen=True):
    solver: str
    cells: tuple[_Cell, ...]
    wall_s: float
    refused: str = ""  # why it does not take this graph; there are no cells then


class _Bound(msgspec.Struct, frozen=True):
    """The best proven bound at a budget, in captured order, and who proved it."""

    budget_bytes: int
    overhead: float
    lower_bound_us: float
    solver: str


class Sweep(Answer, frozen=True):
    """Outcomes at several budgets, of one solver or several, with the bound at each budget.

    Iterating goes over the plans of the first solver, that of the smallest budget first.

    Attributes
    ----------
    step : that was solved.
    base_us, unmodified_bytes : time of every op once, and peak of the unmodified step.
    asked : the budgets as they were written.
    rows : one a solver, in the order asked; the unmodified step, and the plan at hand, come first.
    fronts : by solver, all that it found; without those that refuse this graph.
    """

    step: TrainingGraph
    model: str
    device: str
    cost_origin: str = msgspec.field(name="prices")  # the key of older releases
    base_us: float
    unmodified_bytes: int
    asked: tuple[str, ...]
    bounds: tuple[_Bound, ...]
    rows: tuple[_Compared, ...]
    fronts: dict[str, Front]

    @property
    def front(self) -> Front:
        """What the first solver found."""
        return next(iter(self.fronts.values()))

    def __iter__(self) -> Iterator[Plan]:
        return (Plan.from_result(point.result, step=self.step) for point in self.front)

    def __len__(self) -> int:
        return len(self.front)

    def best_within(self, budget_bytes: int) -> Plan | None:
        """The fastest plan of any solver whose peak is within `budget_bytes`; None without one."""
        fit = [one.best_within(budget_bytes) for one in self.fronts.values()]
        known = [result for result in fit if result is not None]
        best = min(known, key=lambda result: (result.time_us, result.peak_bytes), default=None)
        return None if best is None else Plan.from_result(best, step=self.step)

    def slider(self, time_limit_s: float = 5.0, **options: Any) -> BudgetSlider:
        return BudgetSlider(self.step, self.front.solver, time_limit_s, **options)

    def best(self, i: int) -> tuple[str, ...]:
        found = [row for row in self.rows if row.cells and row.cells[i].fits]
        least_us = min((row.cells[i].time_us for row in found), default=0.0)
        # The slack is for sums in another order: equal plans are all the best.
        return tuple(row.solver for row in found if row.cells[i].time_us <= least_us * (1 + 1e-9))

    def as_json(self) -> dict[str, Any]:
        best = [self.best(i) for i in range(len(self.bounds))]
        fields = [one for one in msgspec.structs.fields(self) if one.name != "step"]
        plain = {one.encode_name: msgspec.to_builtins(getattr(self, one.name)) for one in fields}
        return {**plain, "best": best}

    def screen(self, width: int = 100) -> RenderableType:
        head = (
            f", {self.cost_origin} on {self.device}: unmodified "
            f"{bytes_text(self.unmodified_bytes)}, {time_text(self.base_us)} a step; overhead of "
            "each solver's plan"
        )
        most = max((width - _NAME_COLUMNS) // _CELL_COLUMNS, 1)
        parts: list[RenderableType] = [Text.assemble((self.model, "bold"), head)]
        count = len(self.bounds)
        for first in range(0, count, most):  # budgets that do not fit go into a table below
            parts += [Text(), _table(self, range(first, min(first + most, count)))]
        refused = [row for row in self.rows if row.refused]
        parts += [Text(), Text("* the fastest found at this budget; - no plan fits")]
        parts += [Text(f"{row.solver}: {row.refused}", style="dim") for row in refused]
        return Group(*parts)


def _table(found: Sweep, columns: range) -> Table:
    table = plain_table("budget", *(bytes_text(found.bounds[i].budget_bytes) for i in columns))
    if any(found.asked):
        # A row says already which plan that is.
        asked = ("" if found.asked[i] == THIS_PLAN else found.asked[i] for i in columns)
        table.add_row("", *(Text(text, style="dim") for text in asked))
    best = {i: found.best(i) for i in columns}
    for row in found.rows:
        if not row.refused:
            shown = ((row.cells[i], " *" if row.solver in best[i] else "") for i in columns)
            texts = (f"{percent_text(c.overhead)}{star}" if c.fits else "-" for c, star in shown)
            table.add_row(row.solver, *texts)
            if any(row.cells[i].arena_bytes for i in columns):
                sizes = [row.cells[i].arena_bytes for i in columns]
                arenas = (Text(bytes_text(size) if size else "", style="dim") for size in sizes)
                table.add_row("  arena", *arenas)
    table.add_row("bound", *(percent_text(found.bounds[i].overhead) for i in columns))
    return table


DEFAULT_BUDGETS = ("80%", "60%", "45%")
DEFAULT_SOLVERS = (  # the best of each kind that answers in seconds, and what people write by hand
    "auto", "cut", "hierarchical", "msps", "dtr", "rotor", "chen_sqrt", "every_n_layers",
    "keep_attention_output", "selective", "full", "torch_knapsack",
)  # fmt: skip


def sweep(
    step: TrainingGraph,
    budgets: Budgets | Iterable[str | SupportsIndex] = None,
    solvers: str | Iterable[str] = ("auto",),
    *,
    plan: Result | None = None,
    time_limit_s: float = 60.0,
    jobs: int = 1,
    layouts: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Sweep:
    """The time of the step against its peak: solve at each budget with each solver.

    Parameters
    ----------
    step : of `remat.capture`, for one size.
    budgets : how many, spread from the least peak known to the unmodified one (12 if left
        out), or a list of budgets as `remat.solve` takes them.
    solvers : names of the table.
    plan : to set beside them; its budget is one of those compared.
    time_limit_s : in seconds, for all budgets of one solver together.
    jobs : how many solves run at once; -1 for as many as there are cores. Inside
        ``joblib.parallel_config(backend="dask")`` they run on that cluster.
    layouts : also place the buffers of each plan in one arena (`Plan.layout`).
    progress : called with a solver's name, how many solves are done, and of how many.
    **options : as of `remat.solve`, `keep` and `recompute` too.

    Raises
    ------
    BudgetError : a budget cannot be read. SolverError : an unknown solver, or none takes this
        graph; of several, one that does not has a row that says so.
    """
    if not isinstance(step, TrainingGraph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SolverError(
            "pass what remat.capture returned, or step.top, the largest sizes of a range: a sweep "
            f"is of a step of one size, and this is {type(step).__name__}"
        )
    # Each once, in the order asked: results are by name.
    names = tuple(dict.fromkeys((solvers,) if isinstance(solvers, str) else solvers))
    for name in names:
        solver_class(name)
    check_jobs(jobs)
    check_number("time_limit_s", time_limit_s)
    options |= {name: as_globs(options[name]) for name in PINS if name in options}
    plan = plan and plan.of_tensors
    eager, clock = unmodified_step(step), Clock(time_limit_s)
    with one_job():
        asked, at_hand = _budgets(step, budgets, plan, time_limit_s, options)
        shared: dict[str, Any] = {  # naming the least budget took a part
            "time_limit_s": max(clock.left_s, 0.0), "jobs": jobs, "at_hand": at_hand,
            "unmodified_bytes": eager.result.peak_bytes, **options,
        }  # fmt: skip
        fronts: dict[str, Front | SolverError] = {}

        def tell(name: str, before: int, done: int, _: int) -> None:
            if progress is not None and not is_interrupted():
                progress(name, before + done, len(names) * len(asked))

        for i, name in enumerate(names):
            told = partial(tell, name, i * len(asked))
            told(0, 0)
            if fronts and is_interrupted():
                fronts[name] = SolverError(f"{INTERRUPTED} before {name} was tried")
                continue
            try:
                fronts[name] = sweep_budgets(step, sorted(asked), name, progress=told, **shared)
            except SolverError as error:
                fronts[name] = error
    refusals = [one for one in fronts.values() if isinstance(one, SolverError)]
    # Where none has an answer, rows would only repeat what the first solver says.
    if plan is None and refusals and len(refusals) == len(fronts):
        raise refusals[0]
    is_fixed = options.get("order", "fixed") == "fixed"  # its bound says nothing of free orders
    if plan is not None and plan.schedule is not None:  # a bound also holds at smaller budgets
        is_fixed &= plan.schedule.options.get("order", "fixed") == "fixed"
    bounding = plan if is_fixed else None
    bounds = tuple(_bound(step, size_bytes, fronts, bounding) for size_bytes in asked)
    return _compared_with(step, eager, asked, fronts, bounds, plan, is_placed=layouts)


def _compared_with(
    graph: TrainingGraph, eager: Solved, asked: Mapping[int, str],
    fronts: Mapping[str, Front | SolverError], bounds: tuple[_Bound, ...], plan: Result | None,
    *, is_placed: bool,
) -> Sweep:  # fmt: skip
    arena = partial(_arena_bytes, graph if is_placed else None)
    # The unmodified step has buffers of its own graph, as eager has its sizes.
    of_eager = _arena_bytes(eager.graph if is_placed else None, eager.result)
    rows = [_at_hand(UNMODIFIED, eager.result, bounds, of_eager)]
    rows += [_at_hand(THIS_PLAN, plan, bounds, arena(plan))] if plan is not None else []
    rows += [_compared(name, front, bounds, arena) for name, front in fronts.items()]
    return Sweep(
        step=graph, model=graph.name, device=graph.device, cost_origin=graph.cost_origin,
        base_us=graph.time_us, unmodified_bytes=eager.result.peak_bytes,
        asked=tuple(asked.values()), bounds=bounds, rows=tuple(rows),
        fronts={name: front for name, front in fronts.items() if isinstance(front, Front)},
    )  # fmt: skip


def _arena_bytes(graph: TrainingGraph | None, result: Result) -> int:
    if graph is None or result.schedule is None:
        return 0
    return place_buffers(graph, result.schedule).arena_bytes


def _budgets(
    graph: TrainingGraph, budgets: Any, plan: Result | None, time_limit_s: float,
    options: Mapping[str, Any],
) -> tuple[dict[int, str], list[Result]]:  # fmt: skip
    named: dict[int, str] = {}
    if plan is not None and plan.schedule is not None:
        named[plan.budget_bytes] = THIS_PLAN
    texts = None if budgets is None or isinstance(budgets, int | str) else tuple(budgets)
    pins = {name: options[name] for name in PINS if name in options}
    wanted = budgets if texts is None else texts
    sizes, at_hand = in_bytes(graph, wanted, NAMING.of(time_limit_s), pins)
    for i, size_bytes in enumerate(sizes):
        named.setdefault(size_bytes, "" if texts is None else str(texts[i]))
    return dict(sorted(named.items(), reverse=True)), at_hand


def _bound(
    graph: TrainingGraph, budget_bytes: int, fronts: Mapping[str, Front | SolverError],
    plan: Result | None,
) -> _Bound:  # fmt: skip
    best = _Bound(budget_bytes, 0.0, fastest_us(graph), "")  # no plan is faster than every op once
    proved = [(THIS_PLAN, plan)] if plan and budget_bytes <= plan.budget_bytes else []
    for name, front in fronts.items():
        points = () if isinstance(front, SolverError) else front.points
        at_budget = [one.result for one in points if one.budget_bytes == budget_bytes][:1]
        proved += [(name, result) for result in at_budget if result.schedule is not None]
    for name, result in proved:
        if result.lower_bound_us > best.lower_bound_us:
            overhead = overhead_of(result.lower_bound_us, graph.time_us)
            best = _Bound(budget_bytes, overhead, result.lower_bound_us, name)
    return best


def _compared(
    name: str,
    front: Front | SolverError,
    bounds: tuple[_Bound, ...],
    arena: Callable[[Result], int],
) -> _Compared:
    if isinstance(front, SolverError):
        return _Compared(name, (), 0.0, str(front))
    results = {point.budget_bytes: point.result for point in front.points}
    pairs = [(results[bound.budget_bytes], bound) for bound in bounds]
    cells = tuple(_solved_cell(result, bound, arena(result)) for result, bound in pairs)
    return _Compared(name, cells, sum(result.wall_s for result in results.values()))


def _at_hand(name: str, result: Result, bounds: tuple[_Bound, ...], arena_bytes: int) -> _Compared:
    cells = [
        _solved_cell(result, bound, arena_bytes)
        if result.peak_bytes <= bound.budget_bytes
        else _Cell(bound.budget_bytes, False, "none found", 0, 0.0, 0.0, 0.0, 0.0)
        for bound in bounds
    ]
    return _Compared(name, tuple(cells), 0.0)


def _solved_cell(result: Result, bound: _Bound, arena_bytes: int) -> _Cell:
    fits = result.schedule is not None
    over = result.time_us / bound.lower_bound_us - 1 if fits and bound.lower_bound_us else 0.0
    return _Cell(  # less than the bound can only be rounding
        bound.budget_bytes, fits, result.status, result.peak_bytes, result.time_us,
        result.overhead, max(over, 0.0), result.wall_s, arena_bytes,
    )  # fmt: skip


def sweep_hosts(
    graph: TrainingGraph, hosts: Mapping[str, int], budgets: Budgets, solvers: Iterable[str],
    **options: Any,
) -> dict[str, Front]:  # fmt: skip
    """Fronts by solver and host; `hosts` has bytes by name, 0 for nothing off the device."""
    alone = msgspec.structs.replace(graph, links=None)  # spread as without a host: the same for all
    pins = {name: as_globs(options[name]) for name in PINS if name in options}
    asked, _ = in_bytes(alone, budgets, NAMING.of(options.get("time_limit_s", 60.0)), pins)
    names, fronts = tuple(solvers), dict[str, Front]()
    for text, host_bytes in hosts.items():
        with_host = alone
        if host_bytes:
            if graph.links is None:
                raise BudgetError(
                    f"this graph has no links to a host: capture it with {option('host', '64GiB')}"
                )
            links = msgspec.structs.replace(graph.links, host_bytes=host_bytes)
            with_host = msgspec.structs.replace(graph, links=links)
        for name in names:
            fronts[f"{name}, host {text}"] = sweep(with_host, asked, name, **options).front
    return fronts
