"""`remat.Plan`: a schedule of a step with what is known of it, and the questions to ask of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from remat.graph_capture.errors import BudgetError, PlanError
from remat.graph_capture.graph import TrainingGraph, TrainingStep
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.schedules.family import Family, RangePeak, peak_over, resized_schedule
from remat.schedules.outcome import Check, Result
from remat.schedules.plan import PlanFile, Prediction, evaluate_plan
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import Simulation, simulate

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

    from remat.analysis.explanation import Explanation
    from remat.analysis.inspect import InspectBy, Inspection
    from remat.analysis.plan_figures import EveryNth
    from remat.compile.graph_context import CompiledPlan
    from remat.ranges.curve import Curve
    from remat.rewriter.arena.arena import Arena
    from remat.rewriter.checkpoint_policy import OccurrencePolicy
    from remat.schedules.layout import Layout
    from remat.schedules.report.page_facts import MeasuredStep
    from remat.schedules.reserved import Reserved
    from remat.solver.budgets.front import Front, GibPrice


class Plan(Result, frozen=True):
    """A schedule, what simulating it and the proofs say of it, and where it came from.

    What nothing fits is a plan too: its `schedule` is None.

    Attributes
    ----------
    status : as in `remat.Result`.
    schedule : what runs when; over a range of sizes, at the largest. None where nothing fits, and
        of `torch.compile` where torch's own cut does.
    peak_bytes, time_us, overhead : of the schedule. lower_bound_us : of any schedule.
    gap : time over bound, minus one.
    step : of `remat.capture`, that it was made for; None where it is not at hand.
    family : of a plan for a range of sizes, its schedules. None else.
    source : the module that follows it, or what a file said; None of a plan that was just solved.
    code : of a graph that `torch.compile` compiled, the figures of its code. None else.
    check : what a step of the plan showed beside an unmodified one; None if none was run.
    """

    step: TrainingGraph | RangedGraph | None = None
    family: Family | None = None
    source: Any = None
    code: Any = None
    check: Check | None = None

    @classmethod
    def of(cls, step: TrainingStep, schedule: Schedule, budget_bytes: int = 0) -> Self:
        """The plan of a schedule at hand, such as one of a solver of yours.

        Parameters
        ----------
        budget_bytes : 0 for that of the schedule, or its own peak where it has none.

        Raises
        ------
        PlanError : it is of another step, or breaks a rule.
        """
        from remat.solver.result import evaluate_schedule

        graph = _of_one_size(step)
        schedule = schedule if graph is step else resized_schedule(schedule, graph)
        budget_bytes = budget_bytes or schedule.budget_bytes or simulate(graph, schedule).peak_bytes
        result = evaluate_schedule(graph, schedule, budget_bytes=budget_bytes, lower_bound_us=0.0)
        return cls.from_result(result, step=step)

    @classmethod
    def from_result(cls, result: Result, **known: Any) -> Self:
        """The plan of what a solver returned; `known` are the other fields."""
        # Of a result that is a plan, as one at hand is, what it says of another step is left out.
        return cls(**{name: getattr(result, name) for name in Result.__struct_fields__}, **known)

    @classmethod
    def from_family(cls, family: Family, step: RangedGraph | None, source: Any = None) -> Self:
        """The plan of a family; figures are of the largest sizes, the peak that of any size."""
        schedule = family.top.schedule
        figures: dict[str, Any] = {"overhead": family.top.overhead}
        if step is not None:
            graph = _of_one_size(step)
            schedule = resized_schedule(schedule, graph)
            figures["time_us"] = simulate(graph, schedule).time_us
            figures["lower_bound_us"] = graph.time_us * (1 + family.top.lower_overhead)
        return cls(
            status="feasible", solver=schedule.solver, budget_bytes=family.budget_bytes,
            schedule=schedule, peak_bytes=family.peak_bytes, step=step, family=family,
            source=source, **figures,
        )  # fmt: skip

    @staticmethod
    def from_file(file: PlanFile) -> Plan:
        """The plan that a file keeps; with figures, where it keeps the graph behind them."""
        if file.over is not None:
            return Plan.from_family(file.over.family, file.over.graph, file)
        return _with_figures(file.schedule, file.prediction, file.graph, file.check, source=file)

    # From the plan to a module, and to a file.

    def apply(
        self,
        model: nn.Module,
        args: tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        target: Any = None,
        compile: bool = False,
        cuda_graphs: bool = False,
        audit: bool = True,
    ) -> nn.Module:
        """A module that trains as `model` does, by this plan. Nothing is measured or solved.

        Parameters
        ----------
        model : that was captured; or, of a plan of `load`, one of the class and shapes that it was
            made for, in training mode.
        args, kwargs, loss_fn, target : as given to `remat.capture`. In the process that captured
            `model` they are not needed. A plan of `load` needs the loss function, if it has one; a
            batch is compared with the plan's, now or at the first step.
        compile, cuda_graphs, audit : as of `remat.rematerialize`.

        Raises
        ------
        BudgetError : nothing fits, so there is no schedule.
        PlanError : the plan was made for another model, batch, loss, torch or device, was edited,
            or breaks a rule of the step. The message names the first difference.
        CaptureError : the model has changed, and cannot be captured any more.
        """
        from remat.ranks.same_order import agreed_load, agreed_rewrite

        if cuda_graphs:
            from remat.rewriter.arena.captured import capture_steps

            how: dict[str, Any] = {"compile": compile, "audit": audit}
            made = self.apply(model, args, kwargs, loss_fn=loss_fn, target=target, **how)
            capture_steps(made)
            return made
        batch: dict[str, Any] = {"loss_fn": loss_fn, "target": target, "audit": audit}
        if self.source is not None or self.code is not None:
            return agreed_load(self._file(), model, args, kwargs, compile=compile, **batch)
        if isinstance(self.step, RangedGraph):
            known: dict[str, Any] = {"over": self.step, "compile": compile, "audit": audit}
            if self.family is not None:
                return agreed_rewrite(model, self.family, **known)
            return agreed_rewrite(model, self._scheduled(), **known)
        from remat.solved import Solved, facts_of  # not above: a kept plan imports no solver

        schedule, facts = self._scheduled(), facts_of(Solved(self._graph(), self))
        return agreed_rewrite(model, schedule, args, kwargs, compile=compile, **batch, **facts)

    def save(self, path: str | Path, program: ExportedProgram | None = None) -> None:
        """Keep the plan as a file, for `remat.load` in any process.

        Parameters
        ----------
        path : a name that ends in ``.pt2`` gets an archive, any other name JSON.
        program : of `torch.export.export`, to be kept in the same archive.

        Raises
        ------
        PlanError : a file keeps the model's parts and the batch too, and they are not known yet; or
            a program is given for a file that is no archive.
        RematError : the file cannot be written; an old one is as it was.
        """
        from remat.rewriter.plans.loading import save_plan

        save_plan(self._file(), path, program)

    # What the plan is, and why.

    def simulate(self) -> Simulation:
        """The peak and the time of the schedule, and what is live at each moment of it."""
        return simulate(self._graph(), self._scheduled())

    def values(
        self, *, by: InspectBy = "value", only: str | Iterable[str] = (), at_peak: bool = False
    ) -> Inspection:
        """What becomes of each value: kept, recomputed, copied to the host, or freed.

        Parameters
        ----------
        by : also sum the values by module, by op or by source line.
        only : globs over module paths, values, ops and source lines.
        at_peak : only values that are live at the peak.

        Raises
        ------
        RematError : a glob matches nothing.
        """
        from remat.analysis.inspect import inspect

        return inspect(self._graph(), self._scheduled(), by=by, only=only, at_peak=at_peak)

    def explain(
        self,
        *,
        why_of: str | Iterable[str] = (),
        each_s: float = 10.0,
        progress: Callable[[str], None] | None = None,
    ) -> Explanation:
        """Who holds the peak, the least budget, what memory is worth, what each lever brings.

        Parameters
        ----------
        why_of : globs over modules, values, ops and lines, of which up to three forward ops that
            match are asked about, by a solve each in which the op is pinned the other way.
        each_s : seconds that each further solve may take.
        progress : called with the name of each part before it begins.

        Raises
        ------
        BudgetError : nothing fits. RematError : a glob matches nothing.
        KeyboardInterrupt : Ctrl-C came. An explanation without some of its parts would mislead.
        """
        from remat.analysis.explanation import explain

        return explain(self._graph(), self, why_of=why_of, each_s=each_s, progress=progress)

    def report(
        self,
        path: str | Path | None = None,
        *,
        fronts: Mapping[str, Front] | None = None,
        measured: MeasuredStep | None = None,
        layout: Layout | None = None,
    ) -> str:
        """One HTML page of the plan, written to `path` if one is given.

        Parameters
        ----------
        fronts : those of `remat.sweep`, to be drawn beside it. measured : of `Plan.measure`.
        layout : of `Plan.layout`.

        Raises
        ------
        PlanError : there is no schedule; or the layout is of another plan.
        RematError : the file cannot be written; an old one is as it was.
        """
        from remat.analysis.plan_report import report

        asked: dict[str, Any] = {"fronts": fronts, "measured": measured, "layout": layout}
        return report(self._graph(), self, path, check=self.check, **asked)

    def price_of(
        self, step_bytes: int = 0, *, solver: str = "auto", time_limit_s: float = 60.0,
        **options: Any,
    ) -> GibPrice:  # fmt: skip
        """What so many bytes more would save of the step, and as many fewer would cost.

        Parameters
        ----------
        step_bytes : 0 for one GiB, or 5 % of the peak if that is less.
        solver, time_limit_s, **options : as of `remat.solve`, for each of two solves.

        Raises
        ------
        SolverError : there is no schedule; a negative `step_bytes`.
        """
        from remat.solver.budgets.sweep import price_of_gib

        limits: dict[str, Any] = {"solver": solver, "time_limit_s": time_limit_s, **options}
        return price_of_gib(self._graph(), self, step_bytes=step_bytes, **limits)

    # Memory beside the peak: addresses, and what an allocator reserves.

    def layout(self, *, alignment_bytes: int | None = None) -> Layout:
        """Offsets for all buffers in one arena, near the most live bytes.

        Parameters
        ----------
        alignment_bytes : a power of two that divides each offset; None takes that of torch's
            allocator for the device of the step, 512 for CUDA and 64 for a CPU.

        Raises
        ------
        PlanError : there is no schedule; or the alignment is no power of two.
        """
        from remat.analysis.plan_figures import place

        return place(self._graph(), self._scheduled(), alignment_bytes=alignment_bytes)

    def reserved(self) -> Reserved:
        """What torch's CUDA caching allocator takes from the device for three steps.

        Nothing runs: the allocator is replayed, as it is and with expandable segments.

        Raises
        ------
        CaptureError : the step is of a device without that allocator. BudgetError : nothing fits.
        """
        from remat.analysis.plan_figures import predict_reserved

        return predict_reserved(self._graph(), self)

    # The schedule in other hands.

    def as_checkpoint_policy(self, module: str = "") -> OccurrencePolicy:
        """What the schedule keeps in a module, for torch's own selective checkpointing.

        ``checkpoint(block, x, use_reentrant=False, context_fn=policy.contexts)`` gives eager's
        gradients. All of `module` is recomputed at once, so the peak may be above the plan's: name
        each block rather than the whole model.

        Parameters
        ----------
        module : path of the module that is checkpointed; empty for the whole model.

        Raises
        ------
        PlanError : the step does what torch would do again when it recomputes, or has no op in
            `module`; or the schedule does what torch's checkpointing cannot.
        """
        from remat.rewriter.checkpoint_policy import checkpoint_policy

        return checkpoint_policy(self._graph(), self._scheduled(), module)

    def every_n_layers(self) -> EveryNth | None:
        """The fastest way to checkpoint every n-th layer, if it is within 1 % of the plan's time.

        None where nothing is recomputed, no layer repeats, or no n that fits comes that close.
        """
        from remat.analysis.plan_figures import every_n_layers

        return every_n_layers(self._graph(), self)

    # The plan at work. Of a plan of `remat.plans`.

    def use_arena(
        self,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        target: Any = None,
    ) -> Arena:
        """Serve the training steps of the module that follows this plan, on a CPU, from one arena.

        Two steps run, of which the second is recorded; gradients, buffers, the batch and the random
        streams are put back. Each training step from then on is served from the places that its
        requests were given. Bits are the same, page faults end. What is not as recorded is served
        by torch's allocator, and counted (`Arena.counts`). That allocator is wrapped for the rest
        of the process, which changes nothing for other tensors; the first call compiles the wrapper
        into the cache folder, in a few seconds.

        Parameters
        ----------
        args, kwargs, target : a batch, as the module is called with.
        loss_fn : where the module returns no loss, the one that you apply to what it returns.

        Returns
        -------
        Arena : to look at what it serves, and to close. The module holds it too.

        Raises
        ------
        PlanError : no module follows this plan; no C++ compiler is found; there is no step to
            record. CaptureError : the module is not on a CPU.
        """
        from remat.analysis.plan_figures import use_arena
        from remat.graph_capture.tracing.option_pairs import require_compatible

        is_of_blocks = self.solver == "blocks"  # a module of several that follow plans
        require_compatible(use_arena=True, dynamic=self.family, blocks=is_of_blocks)
        return use_arena(self._module(), args, kwargs, loss_fn=loss_fn, target=target)

    def measure(
        self,
        model: nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        target: Any = None,
    ) -> MeasuredStep:
        """What real steps of the module that follows this plan have live, and how long they take.

        Parameters
        ----------
        model : the original. args, kwargs, loss_fn, target : as given to `remat.capture`.

        Raises
        ------
        PlanError : no module follows this plan. CaptureError : the model is not on a CPU, where
            alone allocations can be seen one by one.
        """
        from remat.rewriter.checking.measured_step import measured_step

        return measured_step(model, self._module(), args, kwargs, loss_fn=loss_fn, target=target)

    # A plan over a range of sizes.

    def overheads(
        self,
        sizes: int | Sequence[Mapping[str, int]] = 10,
        *,
        alone: bool = False,
        time_limit_s: float = 60.0,
        **options: Any,
    ) -> Curve:
        """What the plan costs at sizes of its range: a curve that can be printed.

        Parameters
        ----------
        sizes : which ones, such as ``[{"seq": 512}]``; or how many, from smallest to largest.
        alone : also plan for each of these sizes alone, within the same budget, each with
            `time_limit_s`.

        Raises
        ------
        PlanError : it is for one size; or a size is out of range.
        """
        from remat.ranges.curve import overheads_over

        limits: dict[str, Any] = {"alone": alone, "time_limit_s": time_limit_s, **options}
        return overheads_over(self._ranged(), self._members(), sizes, **limits)

    def peaks(self) -> tuple[RangePeak, ...]:
        """For each schedule, the most bytes that it needs at any size of the range, proved.

        Raises
        ------
        PlanError : it is for one size, or its step is not at hand; or sizes that are not the
            largest may need more, and there are too many to judge each.
        """
        ranged = self._ranged()
        members = self.family.members if self.family is not None else ()
        schedules = [one.schedule for one in members] or [self._scheduled()]
        return tuple(peak_over(ranged, one) for one in schedules)

    # What the questions are asked of, or why they cannot be.

    def _graph(self) -> TrainingGraph:
        if self.step is None:
            raise PlanError(
                "ask the plan that remat.solve made of what remat.capture returned: the step "
                "behind this plan is not available"
            )
        return _of_one_size(self.step)

    def _scheduled(self) -> Schedule:
        if self.schedule is None:
            from remat.solved import infeasible_text

            raise BudgetError(infeasible_text(self))
        return self.schedule

    def _ranged(self) -> RangedGraph:
        if not isinstance(self.step, RangedGraph):
            raise PlanError(
                "capture a range with remat.capture(..., dynamic=...), and solve that: this plan "
                "is for one size, or its step is not available"
            )
        return self.step

    def _members(self) -> Family:
        if self.family is None:
            raise PlanError(
                "solve the range again with remat.solve, for one schedule for each part of it: "
                "this plan has one schedule for the whole range"
            )
        return self.family

    def _module(self) -> nn.Module:
        if self.source is None or isinstance(self.source, PlanFile):
            raise PlanError(
                "apply it, and ask the plan of the module, remat.plans(plan.apply(model))[0]: no "
                "module follows this plan"
            )
        return self.source

    def _file(self) -> PlanFile:
        if self.code is not None:
            raise PlanError(
                "use remat.rematerialize for a plan that a file can hold: torch.compile keeps the "
                "plans of its graphs itself, with the code"
            )
        if isinstance(self.source, PlanFile):
            return self.source
        if self.source is None:
            raise PlanError(
                "apply the plan, and save that, remat.plans(plan.apply(model))[0].save(path): a "
                "file needs to know the model and its batch, and this plan does not"
            )
        from remat.rewriter.plans.loading import plan_of

        return plan_of(self.source)

    def _repr_html_(self) -> str:
        if self.schedule is None or self.step is None:  # without its step nothing can be drawn
            return super()._repr_html_()
        from remat.analysis.plan_report import plan_card

        return plan_card(self._graph(), self, self.check)

    def __str__(self) -> str:
        return str(self.family or self.code or repr(self))

    def __repr__(self) -> str:
        if self.code is not None:
            return repr(self.code)
        if self.family is not None:
            return repr(self.family)
        if self.schedule is not None and not self.peak_bytes:
            return f"Plan({self.solver}, within {self.budget_bytes} bytes; its costs are not known)"
        return Result.__repr__(self)


def _of_one_size(step: TrainingStep) -> TrainingGraph:
    """The step itself; of a range that of its largest sizes, with bytes that bound all others."""
    graph = step.bounding(step.symbols) if isinstance(step, RangedGraph) else step
    assert isinstance(graph, TrainingGraph)
    return graph


_FIGURES = ("peak_bytes", "time_us", "overhead", "lower_bound_us")
"""What a file says of its schedule, under the names that a plan has them by."""


def load(path: str | Path) -> Plan:
    """Read a plan that `Plan.save` or ``remat run -o`` kept; `Plan.apply` trains by it.

    Parameters
    ----------
    path : a JSON file, or a ``.pt2`` archive.

    Raises
    ------
    PlanError : the file is no plan, is cut short or was edited, or the archive holds none.
    RematError : the file cannot be read.
    """
    if not isinstance(path, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            "pass the file's path: a plan is read from a file, and this is "
            f"{type(path).__name__}. What a module follows is remat.plans(module)"
        )
    from remat.rewriter.plans.loading import read_plan

    file = read_plan(path)
    if file.graph is not None:
        evaluate_plan(file, str(path))
    return Plan.from_file(file)


def plans(model: Any = None) -> list[Plan]:
    """The plans that a module follows, the one that was used last at the end.

    Parameters
    ----------
    model : what `remat.rematerialize` or `Plan.apply` returned: one plan, one for each shape that
        came so far, or with `blocks` that of the whole step. None for the graphs that
        ``torch.compile(backend="remat")`` has compiled in this process, of which 64 are kept.

    Raises
    ------
    PlanError : the module follows no plan.
    """
    # What torch.compile returned holds what it compiled; its graphs are not told apart by model.
    if model is None or hasattr(model, "_orig_mod") or hasattr(model, "_torchdynamo_orig_callable"):
        from remat.compile.graph_context import compiled_plans

        return [_of_code(one) for one in compiled_plans()]
    from torch import nn

    from remat.blocks.rematerialized import planned_blocks
    from remat.caches.per_shape_plans import PlanCache, planned_modules

    if not isinstance(model, nn.Module):
        raise PlanError(
            "pass what remat.rematerialize or Plan.apply returned: a module follows plans, and "
            f"this is {type(model).__name__}"
        )
    if isinstance(model, PlanCache):
        return [_of_module(one) for one in planned_modules(model)]
    blocks = planned_blocks(model)
    return [Plan.from_result(blocks.result)] if blocks is not None else [_of_module(model)]


def _of_code(code: CompiledPlan) -> Plan:
    return Plan(
        status="feasible", solver="auto", budget_bytes=code.budget_bytes, schedule=code.schedule,
        peak_bytes=code.peak_bytes, overhead=code.overhead, wall_s=code.seconds, code=code,
    )  # fmt: skip


def _of_module(module: nn.Module) -> Plan:
    from remat.rewriter.plans.loading import followed  # not the file: a batch may not fit in one
    from remat.rewriter.user_module.ranged import RangedModule

    kind: Any = type(module)
    if not hasattr(kind, "modules_again"):  # in parts, the plan is of a coarse graph
        kind = followed(module)
    if issubclass(kind, RangedModule):
        return Plan.from_family(kind._remat_family, kind._remat_graph, module)
    known = (kind._remat_prediction, kind._remat_costed, kind._remat_check)
    return _with_figures(kind._remat_schedule, *known, source=module)


def _with_figures(
    schedule: Schedule, said: Prediction | None, graph: TrainingGraph | None,
    check: Check | None, source: Any,
) -> Plan:  # fmt: skip
    """The plan of a schedule, with what was predicted of it where that is known."""
    figures = {name: getattr(said, name) for name in _FIGURES if said is not None}
    status = "optimal" if said is not None and said.gap == 0 else "feasible"
    return Plan(
        status=(said and said.status) or status, solver=schedule.solver,
        budget_bytes=schedule.budget_bytes, schedule=schedule, step=graph, source=source,
        check=check, **figures,
    )  # fmt: skip
