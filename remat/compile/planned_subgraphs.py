"""Plans for the subgraphs of a model under DDP: made with the first, then taken one by one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import fx

from remat.compile.graph_context import CompiledPlan, GraphContext, n_run_again, remember
from remat.compile.plan_search import AgreedPlan, Candidate, plan_key, require_within
from remat.compile.specialize import specialized, with_notes
from remat.compile.subgraph_choice import SubgraphOption, SubgraphSearch, option_of, peak_of
from remat.compile.subgraphs import Whole, whole_of
from remat.formats import budget_text, bytes_text
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.torch_private.aot import SubmodCompiler
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.torch_private.inductor import compile_fx
from remat.ranks.one_plan import one_plan
from remat.rewriter.inductor.partition import FusedStep, Pair, Partitioner, planned
from remat.rewriter.inductor.replay import ReplayedMemory, StepBytes
from remat.solver.search import Clock

_known: weakref.WeakKeyDictionary[fx.GraphModule, PlannedSubgraphs] = weakref.WeakKeyDictionary()


def planned_subgraphs(compiler: SubmodCompiler, context: GraphContext) -> PlannedSubgraphs:
    """`BudgetError` where no choice of plans fits."""
    if compiler.module not in _known:  # made when the first one comes, before any runs
        whole = whole_of(compiler, _traced_step)
        _known[compiler.module] = PlannedSubgraphs(whole, context)
    return _known[compiler.module]


class PlannedSubgraphs:
    """`at` is the number of subgraphs that have been compiled."""

    def __init__(self, whole: Whole, context: GraphContext) -> None:
        clock, asked = Clock(), context.asked
        self.at = 0
        self._whole, self._context, self._calls = whole, context, asked.calls
        self._search = SubgraphSearch(whole, asked)
        steps = [subgraph.step for subgraph in whole.subgraphs if subgraph.step is not None]
        gradient_bytes = sum(step.gradient_bytes for step in steps)
        own_bytes = whole.static_bytes, whole.dynamic_bytes, gradient_bytes
        self._as_one = _AsOne(*own_bytes, asked.calls)
        self._held_bytes = context.held_bytes(self._as_one)
        self._stock_bytes = self._held_bytes + self._search.stock_peak_bytes
        chosen = self._agreed()
        self._chosen_options = list(chosen)
        self._seconds = clock.elapsed_s
        context.shared.note(
            context.frame, self._as_one, self._replay(chosen), self._replay(self._search.stock),
            self._budget_bytes, is_bound=asked.parsed.kind != "min",
        )  # fmt: skip

    @property
    def is_first(self) -> bool:
        return self.at == 0

    @property
    def is_last(self) -> bool:
        return self.at == len(self._whole.subgraphs) - 1

    def plan(self, step: FusedStep) -> Pair:
        option, subgraph = self._chosen_options[self.at], self._whole.subgraphs[self.at]
        schedule = option.candidate.schedule if option.candidate else None
        step.calls = 1  # calls count once, for all subgraphs together
        step.holds_outputs = subgraph.step is None or subgraph.step.holds_outputs
        pair = step.emit(schedule) if schedule else step.stock()
        replay = step.replay(pair)
        self._chosen_options[self.at] = option_of(subgraph, Candidate(pair, replay, schedule))
        peak_bytes = self._held_bytes + peak_of(self._chosen_options, self._calls - 1)
        if peak_bytes > self._budget_bytes:
            raise BudgetError(self._too_small(peak_bytes))
        self._remember(option, replay, peak_bytes)
        return pair

    def _agreed(self) -> tuple[SubgraphOption, ...]:
        asked, steps = self._context.asked, [one.step for one in self._whole.subgraphs]
        with one_plan(plan_key(asked, steps)) as one:
            if one.is_made_here:
                self._budget_bytes, chosen = self._chosen()
                one.post(AgreedPlan.of(self._budget_bytes, [option.candidate for option in chosen]))
                return chosen
            choice = one.theirs(AgreedPlan)
            self._budget_bytes = choice.budget_bytes
            chosen = self._search.followed(map(choice.of_subgraph, range(len(steps))))
            peak_bytes = self._held_bytes + peak_of(chosen, self._calls - 1)
            taken = choice.budget_bytes, peak_bytes, self._held_bytes
            require_within(one, asked, self._context.shared.device, *taken)
            return chosen

    def _chosen(self) -> tuple[int, tuple[SubgraphOption, ...]]:
        stock = self._replay(self._search.stock)
        if not (budgets_bytes := self._context.budgets_bytes(self._as_one, stock)):
            least = self._search.least()
            return self._held_bytes + peak_of(least, self._calls - 1), least
        budget_bytes = budgets_bytes[0]  # its own: subgraphs are planned for one shape
        found = self._search.within(budget_bytes - self._held_bytes)
        if found:
            return budget_bytes, found
        # Looked for anew: the others' plans were for other rooms.
        self._search = SubgraphSearch(self._whole, self._context.asked)
        least = self._search.least()
        least_bytes = self._held_bytes + peak_of(least, self._calls - 1)
        if least_bytes > budget_bytes:
            self._budget_bytes = budget_bytes
            raise BudgetError(self._too_small(least_bytes))
        return budget_bytes, least

    def _too_small(self, least_bytes: int) -> str:
        held_once = (
            "; with DistributedDataParallel(..., gradient_as_bucket_view=True) gradients go "
            "straight into its buckets, which the budget does not count"
        ) * self._whole.holds_twice
        return (
            f'give options={{"budget": "{budget_text(least_bytes)}"}}, a smaller batch, "budget": '
            '"min", or a larger "replays" to search further.\n'
            f"Or set torch._dynamo.config.optimize_ddp = False, which cuts nothing{held_once}.\n"
            f"The budget of {bytes_text(self._budget_bytes)} is below {bytes_text(least_bytes)}, "
            f"the lowest peak of {self._search.tried} compiled plans for the "
            f"{len(self._whole.subgraphs)} subgraphs into which DDP's buckets cut the model; "
            f"{bytes_text(self._held_bytes)} of it are parameters, buffers, inputs and what "
            "earlier graphs hold, and gradients of later subgraphs count while an earlier one runs"
        )

    def _replay(self, chosen: Sequence[SubgraphOption]) -> ReplayedMemory:
        peak_bytes = peak_of(chosen, self._calls - 1)
        return ReplayedMemory(peak_bytes, peak_bytes, sum(option.left_bytes for option in chosen))

    def _remember(self, option: SubgraphOption, replay: ReplayedMemory, peak_bytes: int) -> None:
        found = option.candidate
        schedule = found.schedule if found else None
        self._seconds, seconds = 0.0, self._seconds  # one search for all: told with the first
        of_all, frame = (
            f"subgraph {self.at + 1} of {len(self._whole.subgraphs)}",
            self._context.frame,
        )
        remember(
            CompiledPlan(
                frame=f"{frame[0]}/{frame[1]} {of_all}",
                budget_bytes=self._budget_bytes, peak_bytes=peak_bytes,
                baseline_peak_bytes=self._stock_bytes, held_bytes=self._held_bytes,
                saved_bytes=replay.saved_bytes, overhead=found.overhead if found else 0.0,
                gap=found.gap if found else 0.0, recomputed=n_run_again(schedule),
                replays=self._search.replays_of(self.at), seconds=seconds, schedule=schedule,
            ),
            verbose=self._search.asked.verbose,
        )  # fmt: skip


class _AsOne(StepBytes):
    def alone(self, found: ReplayedMemory) -> ReplayedMemory:
        left_bytes = (self.calls - 1) * (found.saved_bytes + self.dynamic_bytes)
        return found.raised(-left_bytes, -left_bytes)


class _Traced(Exception):  # noqa: N818
    """Raised to leave Inductor where its code would be made."""

    def __init__(self, step: FusedStep | None) -> None:
        super().__init__()
        self.step = step


def _traced_step(gm: fx.GraphModule, inputs: Sequence[Any]) -> FusedStep | None:
    """The step that Inductor would plan of a graph; None for one without gradients."""
    graph, n_visible = _copied(gm)  # Dynamo compiles `gm` itself afterwards
    partitioner = Partitioner(_stop, n_visible)
    try:
        with planned(partitioner) as patches:
            fixed = specialized(graph, inputs)
            compile_fx(graph, fixed, lambda *_args, **_kwargs: _stop(None), config_patches=patches)
    except _Traced as traced:
        return traced.step
    raise AssertionError("Inductor has made code without asking for a compiler")


def _stop(step: FusedStep | None) -> Any:
    raise _Traced(step)


def _copied(gm: fx.GraphModule) -> tuple[fx.GraphModule, int]:
    """A copy of a subgraph that returns a tuple, as dynamo's do, and the number of results."""
    graph = with_notes(gm)
    end = graph.graph.output_node()
    if not isinstance(end.args[0], (tuple, list)):
        end.args = ((end.args[0],),)
        graph.recompile()
    return graph, len(pytree.tree_leaves(end.args[0]))
