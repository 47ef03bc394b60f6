"""The job behind ``--dynamic``: capture over a range, price, solve for a family, rewrite, check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remat.checks import Batch, failures, unless_short, why_unchecked
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.shapes.ranged_graph import RangedGraph
from remat.graph_capture.shapes.ranges import Dynamic
from remat.job.factory import Loaded
from remat.job.pipeline import compare_with_eager, price_trace, trace_loaded
from remat.job.request import Request
from remat.ranges.curve import Curve, overheads_over
from remat.ranges.solving import solve_over
from remat.schedules.family import Family
from remat.schedules.plan import Plan
from remat.screen.stages import Stopwatch
from remat.solver.interrupts import is_interrupted
from remat.solver.result import INTERRUPTED

if TYPE_CHECKING:
    from remat.graph_capture.tracing.one_trace import Trace
    from remat.rewriter.checking.check import Check


@dataclass(frozen=True)
class RangeReport:
    """All that a verb with ``--dynamic`` found out.

    Attributes
    ----------
    curve : of overheads over the range. sizes : of the factory's batch; None if out of the range.
    check : of one step at these sizes. unchecked : why none was run.
    """

    graph: RangedGraph
    family: Family
    curve: Curve
    seconds: dict[str, float]
    sizes: dict[str, int] | None = None
    check: Check | None = None
    unchecked: str = ""

    @property
    def failures(self) -> list[str]:
        """What fails the check; empty where nothing does, or none was run."""
        return failures(self.check, self.family.budget_bytes) if self.check else []


def plan_over(
    loaded: Loaded,
    request: Request,
    dynamic: Dynamic,
    stopwatch: Stopwatch,
    planned: Callable[[Plan], None] = lambda _: None,
    *,
    is_run: bool = False,
    check: bool = False,
) -> RangeReport:
    """Plan for a range, and with `is_run` run one step of the factory's batch beside eager.

    Parameters
    ----------
    planned : is called with the plan before a step is run. check : run that step even where memory
        is short.

    Raises
    ------
    TooLargeError : nothing fits at the largest sizes.
    CaptureError : sizes cannot vary so; names the place and a way out.
    """
    with stopwatch.stage("capture", "tracing the training step"):
        traced = trace_loaded(loaded, request, dynamic)
    graph = _ranged_graph(traced, request, stopwatch)
    with stopwatch.stage("solve", f"solving for {request.budget}"):
        family = solve_over(
            graph, request.budget, request.solver, request.time_limit_s,
            **request.solving,
        )  # fmt: skip
    planned(_plan_of(loaded, traced, family, graph))
    report = RangeReport(graph, family, overheads_over(graph, family), stopwatch.seconds)
    report = dataclasses.replace(report, sizes=_batch_sizes(loaded, traced, request))
    if not is_run or not request.is_run_here:
        return report
    return _checked(report, loaded, traced, request, stopwatch, check=check)


def _ranged_graph(traced: Trace, request: Request, stopwatch: Stopwatch) -> RangedGraph:
    from remat.graph_capture.capturing import workspaces_by
    from remat.graph_capture.shapes.at_sizes import ranged_graph_of

    def priced(one: Trace) -> TrainingGraph:
        return price_trace(one, request, stopwatch)

    workspaces = workspaces_by(traced, request.read_profile())
    return ranged_graph_of(traced, priced, workspaces)


def _plan_of(loaded: Loaded, traced: Trace, family: Family, graph: RangedGraph) -> Plan:
    from remat.graph_capture.shapes.signature import RangedSignature
    from remat.rewriter.plans.over_range import plan_of_family

    signature = traced.recipe.signature
    assert isinstance(signature, RangedSignature)
    return plan_of_family(loaded.model, traced.recipe, signature.places, family, graph)


def _batch_sizes(loaded: Loaded, traced: Trace, request: Request) -> dict[str, int] | None:
    """The sizes of the factory's batch; None if they are out of the range."""
    from remat.ranges.rematerialized import sizes_within

    batch = Batch(
        loaded.args, loaded.kwargs, loaded.loss_fn, loaded.target,
        request.optimizer, request.accumulate,
    )  # fmt: skip
    return sizes_within(traced, batch)


def _checked(
    report: RangeReport, loaded: Loaded, traced: Trace, request: Request, stopwatch: Stopwatch,
    *, check: bool,
) -> RangeReport:  # fmt: skip
    """The report with a step of the factory's batch compared with eager, or why it was not."""
    from remat.rewriter.user_module.ranged import make_ranged

    if report.sizes is None:
        return dataclasses.replace(report, unchecked="the factory's batch is out of the range")
    if is_interrupted():
        return dataclasses.replace(report, unchecked=INTERRUPTED)
    reason = "" if check else why_unchecked(report.graph.at(**report.sizes))
    if reason:
        return dataclasses.replace(report, unchecked=f"{reason}; --check runs it anyway")
    said = list[str]()

    def compared() -> Check:
        number = report.family.number_at(**report.sizes or {})
        module = make_ranged(loaded.model, report.family, traced, report.graph, number)
        return compare_with_eager(loaded, module, request)

    with stopwatch.stage("check", "checking the plan against eager"):
        found = unless_short(compared, said.append)
    return dataclasses.replace(report, check=found, unchecked="".join(said))


def refuse_beside_dynamic(request: Request, **given: bool) -> None:
    """Raise `CaptureError` for an option that a verb does not take beside ``--dynamic``."""
    options = {
        **given, "--update-at-once": request.update_at_once, "--host": bool(request.host)
    }  # fmt: skip
    if named := next((name for name, is_given in options.items() if is_given), ""):
        raise CaptureError(
            f"{named} is for a plan of one size: leave it out beside --dynamic, or leave out "
            "--dynamic to plan for the factory's batch alone"
        )
