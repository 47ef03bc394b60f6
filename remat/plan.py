"""`remat.Plan`: a schedule of a step with what is known of it, and the questions to ask of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from remat.graph_capture.graph import TrainingStep
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.plan_facts import PlanFacts, of_one_size
from remat.schedules.family import RangePeak, peak_over, resized_schedule
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import Simulation, simulate

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

    from remat.analysis.explanation import Explanation
    from remat.analysis.inspect import InspectBy, Inspection
    from remat.analysis.plan_figures import EveryNth
    from remat.ranges.curve import Curve
    from remat.rewriter.arena.arena import Arena
    from remat.rewriter.checkpoint_policy import OccurrencePolicy
    from remat.schedules.layout import Layout
    from remat.schedules.report.page_facts import MeasuredStep
    from remat.schedules.reserved import Reserved
    from remat.solver.budgets.front import Front, GibPrice


class Plan(PlanFacts, frozen=True):
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

        graph = of_one_size(step)
        schedule = schedule if graph is step else resized_schedule(schedule, graph)
        budget_bytes = budget_bytes or schedule.budget_bytes or simulate(graph, schedule).peak_bytes
        result = evaluate_schedule(graph, schedule, budget_bytes=budget_bytes, lower_bound_us=0.0)
        return cls.from_result(result, step=step)

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
            return agreed_rewrite(model, self.family or self._scheduled(), **known)
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
