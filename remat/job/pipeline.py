"""The main job in one piece: capture, time, solve, rewrite, check, each timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

import remat.solver as solvers
from remat.analysis.plan_figures import (
    EveryNth,
    compiled_text,
    every_n_layers,
    reserved_beside,
    shortage_text,
)
from remat.budgets import UNBOUNDED_BYTES, budget_again, parse_budget, unmodified_step
from remat.checks import Batch, failures, unless_short, why_unchecked
from remat.graph_capture.distributed.sharded_step import local_step
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.sizes.symbols import Dynamic
from remat.job.factory import Loaded
from remat.job.request import Request
from remat.levers.chunks_at_need import may_wait, solved_at_need
from remat.levers.optimizer_in_backward import planned_optimizer_in_backward
from remat.progress import Stopwatch, solver_shown
from remat.ranges.curve import Curve, overheads_over, solve_over
from remat.schedules.derived import unchunked
from remat.schedules.family import Family
from remat.schedules.outcome import FAR_OFF, Check, Result
from remat.schedules.plan import PlanFile
from remat.schedules.reserved import Reserved
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import Simulation, simulate
from remat.solver.recompute_summary import OpKind, kinds_of
from remat.solver.result import INTERRUPTED
from remat.solver.search import is_interrupted

if TYPE_CHECKING:
    from torch import nn

    from remat.graph_capture.tracing.recipe import Recipe
    from remat.graph_capture.tracing.traced_step import Trace


_EXACT = 1e-9  # of a step: times that differ by less are the same sum in another order


class Row(msgspec.Struct, frozen=True):
    """One schedule: as predicted and, where it was run, as measured; with the keys of JSON."""

    name: str
    peak_bytes: int = msgspec.field(name="predicted_peak_bytes")
    time_us: float = msgspec.field(name="predicted_step_us")
    overhead: float  # over the unmodified step, whose own checkpoints take time too
    # Predicted for a CUDA allocator; None on a CPU.
    reserved: Reserved | None = msgspec.field(default=None, name="predicted_reserved")
    measured_peak_bytes: int | None = None
    measured_step_us: float | None = None
    measured_overhead: float | None = None
    reserved_bytes: int | None = None  # as measured


def _predicted_row(graph: TrainingGraph, name: str, result: Result, base_us: float) -> Row:
    reserved = reserved_beside(graph, result)
    # It is below zero where the plan is faster than the user's own checkpoints.
    is_same = abs(result.time_us - base_us) <= _EXACT * base_us
    overhead = 0.0 if is_same else result.time_us / base_us - 1
    return Row(name, result.peak_bytes, result.time_us, overhead, reserved)


def rows_as_run(rows: Sequence[Row], check: Check, of_chen: Check | None) -> tuple[Row, ...]:
    base, chen, plan = rows

    def as_run(row: Row, of: Check, which: str, overhead: float) -> Row:
        return msgspec.structs.replace(
            row, measured_peak_bytes=getattr(of, f"{which}_peak_bytes"),
            # Unmodified steps timed beside plans vary: steps and overheads agree on the first's.
            measured_step_us=check.baseline_step_us * (1 + overhead), measured_overhead=overhead,
            reserved_bytes=getattr(of, f"{which}_reserved_bytes"),
        )  # fmt: skip

    ran = as_run(chen, of_chen, "plan", of_chen.overhead) if of_chen else chen
    return as_run(base, check, "baseline", 0.0), ran, as_run(plan, check, "plan", check.overhead)


@dataclass(frozen=True)
class Report:
    graph: TrainingGraph
    result: Result
    rows: tuple[Row, ...]
    seconds: dict[str, float]
    kinds: tuple[OpKind, ...]  # that run again, most time first; empty without a plan
    simpler: EveryNth | None  # every n-th layer, where that is within 1 % of the plan
    simulation: Simulation | None = None
    check: Check | None = None
    recipe: Recipe | None = None
    unchecked: str = ""  # why a plan for this machine was not run
    shortage: str = ""  # what becomes of a plan that would reserve more than the device has
    compiled: str = ""  # what is known of compiled code, and how to compare
    unmodified_reserved_bytes: int = 0  # of the unmodified step, where the budget bounds these

    @property
    def failures(self) -> list[str]:
        return failures(self.check, self.result.budget_bytes) if self.check else []


def trace_loaded(loaded: Loaded, request: Request, dynamic: Dynamic | None = None) -> Trace:
    from remat.graph_capture.distributed.dtensors import parameters_cast
    from remat.graph_capture.tracing.trace import trace

    gradient_release = None
    if request.optimizer_in_backward:
        gradient_release = planned_optimizer_in_backward(
            loaded.model, request.optimizer, request.device,
            loss_fn=loaded.loss_fn, accumulate=request.accumulate,
        )  # fmt: skip
    # Forward of a sharded step sees parameters in the dtype of its mixed precision policy.
    with parameters_cast(loaded.model, request.sharding):
        return trace(
            loaded.model, loaded.args, loaded.kwargs, loss_fn=loaded.loss_fn, target=loaded.target,
            optimizer=request.optimizer, accumulate=request.accumulate, device=request.device,
            sharding=request.sharding, split=request.split, gradient_release=gradient_release,
            dynamic=dynamic, outputs=request.outputs_of_trace,
        )  # fmt: skip


def graph_with_costs(
    traced: Trace, request: Request, stopwatch: Stopwatch, *, chunks: bool = True
) -> TrainingGraph:
    """The graph of a trace with costs, on one rank if it is sharded; `chunks` as of `add_costs`."""
    from remat.graph_capture.capture_api import add_costs

    recipe = traced.recipe
    doing = f"modelling ops on {recipe.device}" if recipe.is_modelled else "timing ops"
    with stopwatch.stage("profile", doing) as progress:
        graph = add_costs(
            traced, progress=progress, profile=request.read_profile(),
            measure_again=request.measure_again, tiers=request.tiers(), chunks=chunks,
        )  # fmt: skip
    return local_step(graph, request.sharding)


def solve_request(
    graph: TrainingGraph, request: Request, stopwatch: Stopwatch, *, at_hand: Result | None = None
) -> Result:
    known = {} if at_hand is None else {"at_hand": at_hand}
    with stopwatch.stage("solve", f"solving for {request.budget}") as progress:
        return parse_budget(request.budget).solve(
            graph, request.solver, time_limit_s=request.time_limit_s,
            progress=solver_shown(progress, request.budget), **known, **request.solving,
        )  # fmt: skip


def check_schedule(
    loaded: Loaded, traced: Trace, schedule: Schedule, request: Request,
    costed: TrainingGraph | None = None,
) -> Check:  # fmt: skip
    """`costed` is the graph with links, which say where a schedule may copy values to."""
    from remat.rewriter.rewriting import rewrite

    module = rewrite(loaded.model, schedule, trace=traced, costed=costed)
    return compare_with_eager(loaded, module, request)


def compare_with_eager(loaded: Loaded, module: nn.Module, request: Request) -> Check:
    from remat.rewriter.checking.check import check

    return check(
        loaded.model, module, loaded.args, loaded.kwargs,
        loss_fn=loaded.loss_fn, target=loaded.target,
        optimizer=request.optimizer, accumulate=request.accumulate,
    )  # fmt: skip


def run_job(
    loaded: Loaded, request: Request, stopwatch: Stopwatch, *, check: bool | None = None,
    compare: bool = False, planned: Callable[[Report], None] = lambda _: None,
) -> Report:  # fmt: skip
    """Capture, time, solve, rewrite and check; `planned` gets what is known before a step runs."""
    report, traced, chen = _before_the_check(loaded, request, stopwatch)
    planned(report)  # kept before a step, which may run out of memory
    graph, result = report.graph, report.result
    if result.schedule is None or not request.is_run_here or check is False:
        return report
    if why := _why_not_run(lambda: graph, check):
        return replace(report, unchecked=why)
    said = list[str]()

    def checked_to(schedule: Schedule) -> Check | None:
        return unless_short(
            lambda: check_schedule(loaded, traced, schedule, request, graph), said.append
        )

    with stopwatch.stage("check", "checking the plan against eager"):
        checked = checked_to(result.schedule)
    if checked is None:
        return replace(report, unchecked="".join(said))
    compared = None
    if compare and chen.schedule:
        with stopwatch.stage("compare", "measuring square-root checkpointing"):
            compared = checked_to(chen.schedule)
    rows = rows_as_run(report.rows, checked, compared)
    # Costs of a profile are used as given, and are not ours to measure anew.
    if request.profile is None and FAR_OFF * checked.baseline_step_us < rows[0].time_us:
        from remat.graph_capture.costs.op_costs import doubt_costs

        doubt_costs(traced)  # measured in a busy time: the next run measures anew
    return replace(report, rows=rows, check=checked, unchecked="".join(said))


def _why_not_run(graph: Callable[[], TrainingGraph], check: bool | None) -> str:
    if is_interrupted():  # Ctrl-C ended the solve with the best so far, which is told and kept
        return INTERRUPTED
    reason = "" if check else why_unchecked(graph())
    return f"{reason}; --check runs it anyway" if reason else ""


def _before_the_check(
    loaded: Loaded, request: Request, stopwatch: Stopwatch
) -> tuple[Report, Trace, Result]:
    with stopwatch.stage("capture", "tracing the training step"):
        traced = trace_loaded(loaded, request)
    graph, result = _solved_in_turn(traced, request, stopwatch)
    report, chen = planned_report(graph, request, stopwatch, result)
    if report.simulation is not None:  # something fits, so there is no way out to name
        return replace(report, recipe=traced.recipe), traced, chen
    from remat.levers.chunks_at_need import naming_tolerance

    # In bytes: `auto` or per cents could be others for the graph with chunks.
    within = replace(request, budget=budget_again(report.result))
    named = naming_tolerance(  # what a head in chunks would need by tolerance
        report.result, traced, graph, lambda one: graph_with_costs(one, request, stopwatch),
        lambda graph: solve_request(graph, within, stopwatch),
    )  # fmt: skip
    return replace(report, result=named), traced, chen


def _solved_in_turn(
    traced: Trace, request: Request, stopwatch: Stopwatch
) -> tuple[TrainingGraph, Result | None]:
    """The graph with costs, and its outcome where that had to be known to decide on chunks."""
    if not may_wait(traced, parse_budget(request.budget)):
        return graph_with_costs(traced, request, stopwatch), None

    def with_measured(graph: TrainingGraph) -> TrainingGraph:
        from remat.graph_capture.costs.op_costs import with_measured_chunks

        with stopwatch.stage("profile", "timing large layers in chunks") as shown:
            return with_measured_chunks(traced, graph, shown, measure_again=request.measure_again)

    def solve_for(graph: TrainingGraph, /, *, at_hand: Result | None = None) -> Result:
        return solve_request(graph, request, stopwatch, at_hand=at_hand)

    # Chunks take long to time, so only if they may help.
    graph = graph_with_costs(traced, request, stopwatch, chunks=False)
    found = solved_at_need(traced, graph, solve_for, with_measured, stopwatch)
    return found.graph, found.result


def planned_report(
    graph: TrainingGraph, request: Request, stopwatch: Stopwatch, result: Result | None = None
) -> tuple[Report, Result]:
    """What is known without a step, of `result` if it is there; and the plan of ``chen_sqrt``."""
    result = result or solve_request(graph, request, stopwatch)
    with stopwatch.stage("rules", "comparing with simpler rules"):
        # As published: without chunks, and with as much memory as it takes.
        chen = solvers.solve_within(unchunked(graph), UNBOUNDED_BYTES, solver="chen_sqrt")
        eager = unmodified_step(graph)
        base_us = eager.result.time_us
        rows = (
            _predicted_row(eager.graph, "unmodified", eager.result, base_us),
            _predicted_row(graph, "chen_sqrt", chen, base_us),
        )
        assert eager.result.schedule is not None
        reserved_bytes = 0
        if result.reserved_bytes:
            asked = parse_budget(request.budget)
            reserved_bytes = asked.reserved_bytes(eager.graph, eager.result.schedule)
        kinds = kinds_of(graph, result.schedule) if result.schedule else ()
        simpler = every_n_layers(graph, result)
        report = Report(
            graph, result, rows, stopwatch.seconds, kinds, simpler,
            unmodified_reserved_bytes=reserved_bytes,
        )  # fmt: skip
        if result.schedule is None:
            return report, chen
        report = replace(
            report, rows=(*rows, _predicted_row(graph, "this plan", result, base_us)),
            simulation=simulate(graph, result.schedule),
            shortage=shortage_text(graph, result.schedule),
            compiled="" if request.is_eager_alone else compiled_text(graph, request.budget),
        )  # fmt: skip
    return report, chen


@dataclass(frozen=True)
class RangeReport:
    graph: RangedGraph
    family: Family
    curve: Curve
    seconds: dict[str, float]
    sizes: dict[str, int] | None = None  # of the factory's batch; None if out of the range
    check: Check | None = None  # of one step at these sizes
    unchecked: str = ""  # why none was run

    @property
    def failures(self) -> list[str]:
        return failures(self.check, self.family.budget_bytes) if self.check else []


def plan_over(
    loaded: Loaded, request: Request, dynamic: Dynamic, stopwatch: Stopwatch,
    planned: Callable[[PlanFile], None] = lambda _: None, *, check: bool | None = None,
) -> RangeReport:  # fmt: skip
    """Plan for a range, and run one step of the factory's batch; arguments as of `run_job`."""
    from remat.graph_capture.capture_api import workspaces_by
    from remat.graph_capture.sizes.at_sizes import ranged_graph_of
    from remat.graph_capture.sizes.ranged_signature import RangedSignature
    from remat.ranges.ranged_call import chunked_at_need, sizes_within
    from remat.rewriter.plans.loading import plan_of_family

    with stopwatch.stage("capture", "tracing the training step"):
        traced = trace_loaded(loaded, request, dynamic)
    workspaces = workspaces_by(traced, request.read_profile())
    costed = partial(graph_with_costs, request=request, stopwatch=stopwatch)
    graph = ranged_graph_of(traced, costed, workspaces)
    asked: dict[str, Any] = {
        "solver": request.solver,
        "time_limit_s": request.time_limit_s,
        **request.solving,
    }
    graph, top = chunked_at_need(traced, graph, lambda one: one, request.budget, stopwatch, **asked)
    with stopwatch.stage("solve", f"solving for {request.budget}"):
        family = solve_over(graph, request.budget, top=top, **asked)
    signature = traced.recipe.signature
    assert isinstance(signature, RangedSignature)
    planned(plan_of_family(loaded.model, traced.recipe, signature.places, family, graph))
    batch = Batch(
        loaded.args, loaded.kwargs, loaded.loss_fn, loaded.target,
        request.optimizer, request.accumulate,
    )  # fmt: skip
    curve, sizes = overheads_over(graph, family), sizes_within(traced, batch)
    report = RangeReport(graph, family, curve, stopwatch.seconds, sizes)
    if check is False or not request.is_run_here:
        return report
    return _checked(report, loaded, traced, request, stopwatch, check)


def _checked(
    report: RangeReport, loaded: Loaded, traced: Trace, request: Request, stopwatch: Stopwatch,
    check: bool | None,
) -> RangeReport:  # fmt: skip
    from remat.rewriter.user_module.ranged import make_ranged

    sizes, said = report.sizes, list[str]()
    if sizes is None:
        return replace(report, unchecked="the factory's batch is out of the range")
    if why := _why_not_run(lambda: report.graph.at(**sizes), check):
        return replace(report, unchecked=why)

    def compared() -> Check:
        number = report.family.number_at(**sizes)
        module = make_ranged(loaded.model, report.family, traced, report.graph, number)
        return compare_with_eager(loaded, module, request)

    with stopwatch.stage("check", "checking the plan against eager"):
        found = unless_short(compared, said.append)
    return replace(report, check=found, unchecked="".join(said))


def refuse_beside_dynamic(request: Request, **given: bool) -> None:
    """Refuse options that a verb does not take beside ``--dynamic``; `given` has the verb's own."""
    options = {**given, "--optimizer-in-backward": request.optimizer_in_backward}
    if named := next((name for name, is_given in options.items() if is_given), ""):
        raise CaptureError(
            f"leave out {named}, or leave out --dynamic to plan only for the factory's batch: "
            f"{named} needs a plan of one size"
        )
