"""From a kept plan to a module that trains, in a process that solves nothing."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.pt2_archive import PT2ArchiveWriter

from remat.graph_capture.devices.placement import resolved_device
from remat.graph_capture.errors import ArchiveError, CaptureError, PlanError, SignatureError
from remat.graph_capture.files import (
    atomic_write,
    read_archive_member,
    read_contents,
    write_contents,
)
from remat.graph_capture.refusals import refuse_module
from remat.graph_capture.sizes.at_sizes import ranged_graph_of
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.sizes.ranged_signature import RangedSignature
from remat.graph_capture.sizes.symbols import Place, as_symbol
from remat.graph_capture.torch_private.core import FakeTensorMode, pytree
from remat.graph_capture.tracing.recipe import Recipe, keep_recipe, require_switches
from remat.graph_capture.tracing.step_module import LossFunction
from remat.graph_capture.tracing.trace import trace_recipe
from remat.rewriter.checking.audit import of_steps
from remat.rewriter.plans.facts import (
    make_plan,
    recipe_from,
    require_fit,
    signature_from,
    under_autocast,
)
from remat.rewriter.rewriting import (
    code_by_size,
    require_bits_over,
    rewrite,
    trace_of_schedule,
)
from remat.rewriter.user_module.module import RematModule, SharedState
from remat.rewriter.user_module.ranged import RangedModule, make_ranged
from remat.schedules.family import Family, resized_schedule
from remat.schedules.plan import (
    MAKE_PLAN_AGAIN,
    PlanFile,
    RangeFacts,
    evaluate_family,
    evaluate_plan,
)

_ARCHIVE = ".pt2"
EXTRA_FILE = "remat_plan.json"  # the plan's name among the `extra_files` of `torch.export.save`
_RECORD = f"extra/{EXTRA_FILE}"


class _Deferring(io.RawIOBase):
    """A file that raises what a write raised when it is asked, not when it is written to."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self._lost: OSError | ValueError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self._lost is None:
            try:
                self._file.write(data)
            # A C++ error in torch's destructor ends the process: a full disk, a closed file.
            except (OSError, ValueError) as error:  # a closed file is a ValueError
                self._lost = error
        return len(data)

    def seekable(self) -> bool:
        return True  # torch asks for it, for its one call of `seek`

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset  # torch rewinds once all is written, and a pipe has no way back

    def raise_lost(self) -> None:
        if self._lost is not None:
            raise self._lost


def save_plan(plan: PlanFile, path: str | Path, program: ExportedProgram | None = None) -> None:
    path = Path(path)
    if path.suffix != _ARCHIVE:
        if program is not None:
            raise PlanError(f"{path} holds no program: name the file with {_ARCHIVE} to keep both")
        write_contents(path, plan.to_json() + b"\n")
    elif program is not None:
        with atomic_write(path) as out:
            deferring: Any = _Deferring(out)  # torch declares less than it takes
            torch.export.save(program, deferring, extra_files={EXTRA_FILE: plan.to_json().decode()})
            deferring.raise_lost()
    else:
        packed = io.BytesIO()
        with PT2ArchiveWriter(packed) as archive:
            archive.write_bytes(_RECORD, plan.to_json())
        write_contents(path, packed.getvalue())


def read_plan(path: str | Path) -> PlanFile:
    path = Path(path)
    data = read_contents(path) if path.suffix != _ARCHIVE else _from_archive(path)
    return PlanFile.from_json(data, str(path))


def _from_archive(path: Path) -> bytes:
    try:
        found = read_archive_member(path, _RECORD)
    except ArchiveError as error:
        raise PlanError(
            f"{MAKE_PLAN_AGAIN}: {path} is not a {_ARCHIVE} archive, or is cut short ({error})"
        ) from error
    if found is None:
        raise PlanError(
            "put a plan there with plan.save(path, program), or torch.export.save(program, path, "
            f"extra_files={{{EXTRA_FILE!r}: ...}}): {path} holds none"
        )
    return found


def _plan_over_range(kind: type[RangedModule]) -> PlanFile:
    members, family, graph = kind._remat_members, kind._remat_family, kind._remat_graph
    if graph is None:
        raise PlanError(
            "apply a plan that has its step, remat.solve(step, budget).apply(model): this one of "
            f"{family.model} does not"
        )
    recipe, places = members.first._remat_guards.recipe, members.signature.places
    return plan_of_family(kind._remat_original_module, recipe, places, family, graph)


def plan_of_family(
    model: nn.Module, recipe: Recipe, places: tuple[Place, ...], family: Family, graph: RangedGraph
) -> PlanFile:
    top = graph.bounding(graph.symbols)
    plan = make_plan(model, recipe, resized_schedule(family.top.schedule, top), None, top)
    return msgspec.structs.replace(plan, over=RangeFacts(places, family, graph))


def _load_over_range(
    plan: PlanFile, over: RangeFacts, model: nn.Module, batch: Any, loss_fn: LossFunction | None,
    **how: Any,
) -> RangedModule:  # fmt: skip
    evaluate_family(over)  # the file may have been edited: each member is judged anew
    signature = _ranged(plan, over)
    if batch is not None:
        try:
            signature.require(*pytree.tree_flatten(batch), plan.model)
        except SignatureError as error:
            raise PlanError(f"the plan does not fit: {error}") from error
    with under_autocast(plan.autocast):
        recipe = recipe_from(plan, loss_fn, resolved_device(None, model))
        traced = trace_recipe(model, dataclasses.replace(recipe, signature=signature))
        found = ranged_graph_of(traced, lambda one: one.graph)
    known = over.graph
    # The schedules were judged with the sizes in the file.
    if (found.extents, found.batch_bytes) != (known.extents, known.batch_bytes):
        raise PlanError(
            "make the plan again with remat.rematerialize(..., dynamic=...): values of "
            f"{plan.model} have other sizes than the plan was made for"
        )
    require_bits_over(traced, over.family)
    keep_recipe(model, over.family.traced_hash, traced.recipe)  # `rewrite` looks it up by this hash
    return make_ranged(model, over.family, traced, over.graph, **how)


def _ranged(plan: PlanFile, over: RangeFacts) -> RangedSignature:
    batch = signature_from(plan.batch).example(FakeTensorMode())
    leaves = pytree.tree_leaves(batch)
    try:
        given = [(s.name, s.low, s.high, s.multiple) for s in over.family.symbols]
        symbols = tuple(as_symbol(one, "the range", 0) for one in given)
        sizes = {one.symbol: leaves[one.leaf].shape[one.dim] for one in over.places}
        hints = {symbol.name: sizes[symbol.name] for symbol in symbols}
        return RangedSignature(batch, symbols, over.places, hints)
    # The places in the file are not those of its batch.
    except (IndexError, AttributeError, KeyError, CaptureError) as error:
        raise PlanError(f"cannot read the range in the plan file: {error}") from error


def followed(module: nn.Module) -> type[RematModule] | type[RangedModule]:
    """The class of the rewritten module that a module follows, of a cache the one used last."""
    kind = type(module)._remat_last_used() if isinstance(module, SharedState) else None
    if hasattr(kind, "modules_again"):
        raise PlanError(
            "call remat.rematerialize in each process: a plan in parts, of a model that is no one "
            "graph, is kept in no file"
        )
    if kind is None or not issubclass(kind, RematModule | RangedModule):
        raise PlanError(
            f"pass what remat.rematerialize or Plan.apply returned: a {type(module).__name__} "
            "follows no plan"
        )
    return kind


def plan_of(module: nn.Module) -> PlanFile:
    """What a file keeps of the plan that a module follows; `PlanError` if there is none to keep."""
    kind = followed(module)
    if issubclass(kind, RangedModule):
        return _plan_over_range(kind)
    if isinstance(kind._remat_guards.recipe.signature, RangedSignature):
        raise PlanError(
            "keep a family of schedules, remat.solve(step, budget).apply(model): this "
            f"{type(module).__name__} runs one schedule over a range of sizes, which no file holds"
        )
    return make_plan(
        kind._remat_original_module, kind._remat_guards.recipe, kind._remat_schedule,
        kind._remat_prediction, kind._remat_costed, kind._remat_check,
    )  # fmt: skip


def load_plan(
    plan: PlanFile | str | Path, model: nn.Module, args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None, *, loss_fn: LossFunction | None = None,
    target: Any = None, compile: bool = False, audit: bool = True,
) -> RematModule | RangedModule:  # fmt: skip
    """Rewrite `model` to a kept plan. Nothing is measured and nothing is solved."""
    require_switches(compile=compile, audit=audit)
    kept = plan if isinstance(plan, PlanFile) else read_plan(plan)
    if kept.graph is not None:
        evaluate_plan(kept, "the plan" if isinstance(plan, PlanFile) else str(plan))
    if kept.schedule.updates:
        raise PlanError(
            "make the plan again with remat.rematerialize(model, args, "
            "optimizer_in_backward=...): it updates parameters during backward, and a file holds "
            "no optimizer"
        )
    refuse_module(model, kept.device)
    is_given = any(part is not None for part in (args, kwargs, target))
    batch = (tuple(args or ()), dict(kwargs or {}), target) if is_given else None
    # A batch of a range is compared with the range.
    require_fit(kept, model, None if kept.over is not None else batch, loss_fn)
    if kept.over is not None:
        how: Any = {"audit": of_steps(audit), "code": code_by_size(compile)}
        return _load_over_range(kept, kept.over, model, batch, loss_fn, **how)
    with under_autocast(kept.autocast):
        recipe = recipe_from(kept, loss_fn, resolved_device(None, model))
        traced = trace_of_schedule(model, recipe, kept.schedule)
    # Without the graph behind them, figures are what somebody says.
    prediction = kept.prediction if kept.graph is not None else None
    known: dict[str, Any] = {"prediction": prediction, "costed": kept.graph}
    return rewrite(model, kept.schedule, trace=traced, compile=compile, audit=audit, **known)
