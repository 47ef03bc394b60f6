"""``torch.compile(model, backend="remat", options={"budget": ...})``.

An entry point registers it, so nothing need be imported. Dynamo traces and guards as ever, and
Inductor makes the code. In between, Inductor hands its joint graph to our partitioner, which cuts
it into forward and backward by a plan under the budget. So guards, graph breaks, views and mutated
buffers stay dynamo's and AOTAutograd's; with an export of our own the guards would be ours. Where
no gradients are asked for, Inductor runs as it is.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._guards import CompileContext
from torch._inductor.compile_fx import compile_fx

from remat.budgets import auto_bytes
from remat.compile.agreed import Choice, plan_key, require_within
from remat.compile.one_shape import of_one_shape
from remat.compile.options import CompileOptions, read_options
from remat.compile.pieces import handing_out
from remat.compile.piecewise import planned_pieces
from remat.compile.report import CompiledPlan, remember
from remat.compile.search import Candidate, PlanSearch
from remat.compile.shared_budget import SharedBudget, forget_graphs, shared_budget, watched
from remat.compile.whole_model import WholeModel, whole_model
from remat.formats import bytes_text
from remat.graph_capture.errors import BudgetError, DeviceError
from remat.ranks.compiling import CompiledLater, compiled_alike
from remat.ranks.one_plan import one_plan
from remat.rewriter.guards.compiled_autograd import refuse_compiled_autograd
from remat.rewriter.inductor.partition import FusedStep, Pair, Partitioner, planned
from remat.rewriter.inductor.subgraphs import refuse_regions
from remat.solver.clock import Clock


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """Compile one graph of dynamo's.

    Raises
    ------
    BudgetError : no budget, one that cannot be read, or, when the graph is first run, one
        that no plan fits.
    SolverError : an unknown option or solver.
    DeviceError : the model is not on a CPU.
    CaptureError : symbolic shapes were asked for, a shape depends on data, compiled autograd is on,
        or forward has a part of which torch's own gradients are wrong.
    AgreementError : another rank has failed to compile the same graph.
    """
    with compiled_alike(gm, example_inputs) as later:
        return _compiled(gm, example_inputs, options, mode, later)


def _compiled(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any] | None,
    mode: str | None,
    later: CompiledLater,
) -> Any:
    asked = read_options(options, mode=mode)
    _require_cpu(example_inputs)
    if torch.is_grad_enabled():
        refuse_compiled_autograd()
        refuse_regions(gm.graph)
    shared = shared_budget(options)
    cut = handing_out()
    pieces = None if cut is None else planned_pieces(cut, asked, shared, _frame())
    whole = functools.partial(_planned, asked, shared, whole_model())
    plan = whole if pieces is None else pieces.plan
    inputs = of_one_shape(gm, example_inputs)
    outputs = gm.graph.find_nodes(op="output")[0].args
    partitioner = Partitioner(plan, len(pytree.tree_leaves(outputs)))
    with planned(partitioner) as patches:
        compiler = later.alike(partitioner.compile_inner)
        call: Any = compile_fx(gm, inputs, compiler, config_patches=patches)
    if _frame() not in shared.noted:
        return call
    if pieces is None:
        return watched(call, shared, _frame())
    run = watched(call, shared, _frame(), is_first=pieces.is_first, is_last=pieces.is_last)
    pieces.at += 1
    return run


backend.reset = forget_graphs  # pyright: ignore[reportFunctionMemberAccess]


def _require_cpu(example_inputs: Sequence[Any]) -> None:
    kinds = {t.device.type for t in example_inputs if isinstance(t, torch.Tensor)}
    others = sorted(kinds - {"cpu"})
    if others:
        raise DeviceError(
            f'backend "remat" measures the workspaces of calls on a CPU, and this model is on '
            f"{others[0]}, where its peaks would be guesses. Use remat.rematerialize, or compile "
            "without a budget"
        )


def _planned(
    asked: CompileOptions, shared: SharedBudget, whole: WholeModel, step: FusedStep
) -> Pair:
    """Choose what Inductor compiles, and keep what was chosen for `compiled_plans`."""
    clock, frame = Clock(), _frame()
    if whole.around and not shared.forwards.graphs():
        warnings.warn(_part_text(whole.around), stacklevel=2)
    step.modules = shared.modules_ahead(whole, frame)
    step.calls = max(asked.calls, step.modules)
    step.awaited_gradient_bytes = shared.expect(whole, frame, step.gradient_bytes, step.modules)
    search = PlanSearch(step, asked)
    stock = search.stock()
    held_bytes = shared.held_bytes(frame, step.static_bytes, step.dynamic_bytes)
    base_bytes = shared.base_bytes(frame, step, stock.replay, held_bytes)
    given_bytes = shared.given_to_other_shapes_bytes(frame)
    with one_plan(plan_key(asked, [step])) as one:
        if one.is_made_here:
            budget_bytes, found = _chosen(asked, search, stock, held_bytes, base_bytes, given_bytes)
            one.post(Choice.of(budget_bytes, [found]))
        else:
            choice = one.theirs(Choice)
            budget_bytes, found = choice.budget_bytes, search.of(*choice.of_piece(0))
            require_within(one, asked, budget_bytes, held_bytes + found.code_peak_bytes, held_bytes)
    is_bound = asked.parsed.kind != "min"
    shared.note(frame, step, found.replay, stock.replay, budget_bytes, is_bound=is_bound)
    remember(
        CompiledPlan(
            frame=f"{frame[0]}/{frame[1]}",
            budget_bytes=budget_bytes,
            peak_bytes=held_bytes + found.replay.peak_bytes,
            baseline_peak_bytes=held_bytes + stock.replay.peak_bytes,
            held_bytes=held_bytes,
            saved_bytes=found.replay.saved_bytes,
            overhead=found.overhead,
            gap=found.gap,
            recomputed=found.recomputed,
            replays=1 + len(search.tried),
            seconds=clock.elapsed_s,
            schedule=found.schedule,
        )
    )
    return found.pair


def _part_text(around: str) -> str:
    return (
        f"what is compiled is a part of {around}, whose parameters and gradients count. What "
        f"{around} runs beside its compiled parts does not, and per cents are without it: for a "
        f"budget on the whole step, compile {around}, with the loss inside"
    )


def _frame() -> tuple[int, int]:
    """Dynamo's number of the frame that is compiled, and that of its compilation."""
    compiled = CompileContext.current_compile_id()
    if compiled is None:
        return 0, 0
    return compiled.frame_id or 0, compiled.frame_compile_id or 0


def _chosen(
    asked: CompileOptions, search: PlanSearch, stock: Candidate,
    held_bytes: int, base_bytes: int, given_bytes: int,
) -> tuple[int, Candidate]:  # fmt: skip
    """The budget in bytes, and the candidate chosen under it.

    A part of a small shape's own peak can be too little for its parameters, as with the last batch
    of an epoch. Then it may take what a larger shape was given, as the run has that room.
    """
    budget = asked.parsed
    if budget.kind == "min":
        least = search.least() or stock
        return held_bytes + least.replay.peak_bytes, least
    budget_bytes = budget.size_bytes
    if budget.kind == "share":
        budget_bytes = int(budget.share * base_bytes)
    elif budget.kind == "auto":
        budget_bytes = auto_bytes() + held_bytes
    found = search.within(budget_bytes - held_bytes, stock)
    if found is None and budget.kind == "share" and given_bytes > budget_bytes:
        budget_bytes = given_bytes
        found = search.within(budget_bytes - held_bytes, stock)
    if found is None:
        raise BudgetError(_too_small(search, stock, budget_bytes, held_bytes))
    return budget_bytes, found


def _too_small(search: PlanSearch, stock: Candidate, budget_bytes: int, held_bytes: int) -> str:
    candidates = [stock, *search.tried.values()]
    least = held_bytes + min(c.replay.peak_bytes for c in candidates)
    return (
        f"budget {bytes_text(budget_bytes)} is below {bytes_text(least)}, the lowest peak of "
        f"{len(candidates)} compiled plans that were replayed; "
        f"{bytes_text(held_bytes)} of it are parameters, buffers, inputs and what earlier graphs "
        f'hold. Give options={{"budget": "{-(-least // 2**20)}MiB"}}, a smaller batch, '
        '"budget": "min", or a larger "replays" to look further'
    )
