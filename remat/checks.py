"""Checks against eager: whether one is run, what fails it, and what to do about the rest."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from remat.budgets import auto_bytes, saved_elsewhere, unmodified
from remat.formats import bytes_text
from remat.graph_capture.devices.known_devices import is_cuda
from remat.graph_capture.devices.memory import free_bytes, is_out_of_memory
from remat.graph_capture.errors import BudgetError, CheckError, NotComparedError, RewriteError
from remat.graph_capture.graph import Optimizer, TrainingGraph
from remat.graph_capture.spill_files import free_on_drive_bytes, host_folder
from remat.schedules.outcome import CHECKED, Check
from remat.schedules.reserved import EXPANDABLE_CONF
from remat.solver.result import INTERRUPTED
from remat.solver.search import is_interrupted, note_interrupt

if TYPE_CHECKING:
    from torch import nn


# What a failed check says: what differs from eager, by how much, where, and what to do.

_SHOWN = 5  # differences that are named; the rest are counted
_ALONE = (
    "remat.rematerialize(model, args, blocks=pattern) plans the modules that match a pattern, and "
    "leaves the others to eager"
)


def _differences_text(check: Check) -> str:
    known = dict(zip(check.differences, check.distances, strict=False))
    shown = [(name, known.get(name, math.nan)) for name in check.differences[:_SHOWN]]
    said = [f"{one} (off by up to {by:.2g})" if not math.isnan(by) else one for one, by in shown]
    more = len(check.differences) - _SHOWN
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")


def cause_text(check: Check) -> str:
    unsteady = [name for name in check.differences if name in check.unsteady]
    if unsteady:
        return (
            "Pass what changes as an argument, as a tensor: eager itself gives another "
            f"{unsteady[0]} each time it runs the same step, as forward or the loss reads "
            "something else, such as a clock, a file or its own generator"
        )
    if check.rounding == "inductor":
        return (
            "Leave out compile=True for eager's bits: Inductor's code may be off by "
            f"{check.tolerance:g} of a result's norm"
        )
    if check.rounding == "chunks":
        return (
            "Ask for eager's bits with split='exact' (--split exact): chunks that sum in another "
            f"order may be off by {check.tolerance:g} of a result's norm"
        )
    if check.rounding == "levers":
        return (
            "Leave out the levers for eager's bits: this plan's may be off by "
            f"{check.tolerance:g} of a result's norm"
        )
    if check.diverges_at:
        return (
            f"Change the code at {check.diverges_at}, the first op that eager runs and the plan "
            "does not: it does something else while traced, such as asking whether it is compiled "
            "or looking at a tensor's type.\n"
            f"Or leave its module out: {_ALONE}"
        )
    if check.diverges_at is None:
        return (
            "Change code that does something else while traced, such as asking whether it is "
            "compiled or looking at a tensor's type: remat.check of the whole model, on one rank, "
            "names the line.\n"
            f"Or leave its module out: {_ALONE}"
        )
    return (
        f"Leave out the module with the op that gives something else when traced: {_ALONE}.\n"
        "It may read a tensor where torch does not see it, or have an inexact registered fake or "
        "backward"
    )


_T = TypeVar("_T")
_NO_ROOM = "memory ran out"  # why a check was not run that had to be given up
_UNCHECKED = "the plan is not checked against the unmodified step"
_FRAGMENTED = 0.10  # share of the peak that an allocator may hold beside it before the user is told
_LITTLE, _ALLOCATOR_BLOCK_BYTES = 0.001, 2 * 2**20  # beyond a budget, and an allocator's block


@dataclass(frozen=True)
class Batch:
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None
    loss_fn: Callable[..., Any] | None
    target: Any
    optimizer: Optimizer
    accumulate: bool


def is_checked(
    graph: TrainingGraph, check: bool | None, reference: Reference | None = None
) -> bool:
    """Whether to run the unmodified step too: as asked, else if it fits into free memory.

    And as `reference` into the plan's budget. Where it does not, a warning takes the check's place.
    """
    if check is not None:
        return check
    reason = why_unchecked(graph)
    if reference and not reason and (why := reference.why_not()):
        reason = f"{_UNCHECKED}, {why}"
    if reason:
        warnings.warn(f"{reason}; pass check=True to run it anyway", stacklevel=3)
    return not reason


def why_unchecked(graph: TrainingGraph) -> str:
    """Why the unmodified step had better not run here; empty where it fits into free memory."""
    need_bytes = unmodified(graph).peak_bytes - graph.resident.total_bytes
    try:
        if need_bytes <= auto_bytes(graph.device):
            return ""
    except BudgetError:
        need = bytes_text(need_bytes)
        return f"{_UNCHECKED}: it needs {need}, and this system does not say whether they are free"
    need = bytes_text(need_bytes)
    return f"{_UNCHECKED}, which needs {need} more than is allocated now"


def _say_unchecked(reason: str) -> None:
    warnings.warn(f"{_UNCHECKED}: {reason}", stacklevel=4)


def unless_short(run: Callable[[], _T], told: Callable[[str], None] = _say_unchecked) -> _T | None:
    """What `run` returns; where memory runs out, or at Ctrl-C, `told` hears why it did not."""
    try:
        return run()
    except NotComparedError as error:
        told(str(error))
    except KeyboardInterrupt:
        note_interrupt()
        if not is_interrupted():  # outside of a job, whoever called is to know
            raise
        told(INTERRUPTED)
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        told(_NO_ROOM)
    return None


def require_equal(
    model: nn.Module, module: nn.Module, batch: Batch, budget_bytes: int | None,
    reference: Reference | None = None,
) -> Check:  # fmt: skip
    """Run a step of both and compare them; compare the peak too, unless the budget is None.

    `CheckError`: they differ. `RewriteError`: the peak is above. `NotComparedError`: it cannot run.
    """
    from remat.rewriter.checking.check import check

    found = check(
        model, module, batch.args, batch.kwargs, loss_fn=batch.loss_fn, target=batch.target,
        optimizer=batch.optimizer, accumulate=batch.accumulate, steps=0,
        results_elsewhere=reference is not None and not reference.keeps_results,
        saved_elsewhere=reference.room_bytes if reference else None,
    )  # fmt: skip
    if found.differences:
        raise CheckError(
            f"do not train with it: the rewritten {type(model).__name__} differs from eager in "
            f"{_differences_text(found)}. {cause_text(found)}"
        )
    if budget_bytes is not None and found.exceeds(budget_bytes):
        text = f"{_exceeding(found, budget_bytes)}. {_less(found, budget_bytes)}"
        # Allocators themselves take as little more or less, from run to run.
        little_bytes = min(_LITTLE * budget_bytes, _ALLOCATOR_BLOCK_BYTES)
        if _beyond_bytes(found, budget_bytes) >= little_bytes:
            raise RewriteError(text)
        warnings.warn(text, stacklevel=3)
    for advice in advice_of(found, budget_bytes):
        warnings.warn(advice, stacklevel=3)
    return found


def failures(check: Check, budget_bytes: int) -> list[str]:
    found = [
        f"{name} differ from eager's" for name in CHECKED if not getattr(check, f"{name}_equal")
    ]
    if check.differences:
        found.append(f"{_differences_text(check)}. {cause_text(check)}")
    if budget_bytes and check.exceeds(budget_bytes):
        found.append(_exceeding(check, budget_bytes))
    return found


def _exceeding(check: Check, budget_bytes: int) -> str:
    return (
        f"the measured peak, {bytes_text(check.plan_peak_bytes)}, exceeds the budget of "
        f"{bytes_text(budget_bytes)}"
    )


def _beyond_bytes(check: Check, budget_bytes: int) -> int:
    return check.plan_peak_bytes - check.plan_rounding_bytes - budget_bytes


def _less(check: Check, budget_bytes: int) -> str:
    """The way out of a peak above the budget: a budget that is smaller by what is beyond."""
    beyond_bytes = _beyond_bytes(check, budget_bytes)
    return (
        f"Give a smaller budget, {max(0, budget_bytes - beyond_bytes)} bytes: something in the "
        "step that the trace does not see, such as an extension's op or a hook, takes "
        f"{bytes_text(beyond_bytes)}"
    )


def advice_of(check: Check, budget_bytes: int | None) -> tuple[str, ...]:
    said: list[str] = []
    over_bytes = check.plan_peak_bytes - (budget_bytes or 0)
    # The budget bounds requests. Larger blocks are the allocator's choice, so no failure.
    if budget_bytes and over_bytes > 0 and not check.exceeds(budget_bytes):
        said.append(
            f"start with {EXPANDABLE_CONF}: the allocator hands out {bytes_text(over_bytes)} more "
            "than the budget, in blocks larger than requested"
        )
    reserved_bytes = check.plan_reserved_bytes or 0
    if reserved_bytes > (1 + _FRAGMENTED) * check.plan_peak_bytes:
        said.append(
            f"start with {EXPANDABLE_CONF}: the allocator reserves {bytes_text(reserved_bytes)} "
            f"for a peak of {bytes_text(check.plan_peak_bytes)}"
        )
    if check.in_one_order:
        said.append(
            "threads add float32 sums by index in no fixed order, in eager too: both were compared "
            "in one order, as torch.use_deterministic_algorithms(True) makes it for every step"
        )
    if check.unsteady:
        said.append(
            f"eager itself does not repeat {len(check.unsteady)} results to the last bit, such as "
            f"{check.unsteady[0]}; the plan's are as close to eager's as eager's are to each "
            "other. Both repeat with torch.use_deterministic_algorithms(True)"
        )
    return tuple(said)


@dataclass(frozen=True)
class Reference:
    """The unmodified step beside a plan; what it holds moves to files, or from CUDA to the host."""

    graph: TrainingGraph
    budget_bytes: int
    beside_bytes: int = 0  # gradients of earlier batches, beside which a check makes its own

    @property
    def keeps_results(self) -> bool:
        peak_bytes = unmodified(self.graph).peak_bytes + self._results_bytes + self.beside_bytes
        return peak_bytes <= self.budget_bytes

    @property
    def keeps_saved(self) -> bool:
        return unmodified(self.graph).peak_bytes <= self.budget_bytes

    @property
    def room_bytes(self) -> float | None:
        """The most that may be on the device at once of what eager saves; None if it all stays."""
        if self.keeps_saved:
            return None
        fits = saved_elsewhere(self.graph)[0] <= self.budget_bytes
        return self.budget_bytes - self.graph.resident.total_bytes if fits else math.inf

    def why_not(self) -> str:
        """Why it cannot run within the budget; empty where it can."""
        if self.keeps_results:
            return ""
        if self.beside_bytes:
            return "which makes gradients on top of those of earlier batches, more than the budget"
        need_bytes, moved_bytes = saved_elsewhere(self.graph)
        if self.keeps_saved:
            moved_bytes = 0
        elif need_bytes > self.budget_bytes:
            return (
                f"which needs {bytes_text(need_bytes)} even when what it saves for backward is "
                f"kept {self._where}, and the budget is {bytes_text(self.budget_bytes)}"
            )
        moved_bytes += 2 * self._results_bytes
        is_on_host = is_cuda(self.graph.device)
        if moved_bytes > (free_bytes() if is_on_host else free_on_drive_bytes(host_folder())):
            return f"of which {bytes_text(moved_bytes)} would have to be kept {self._where}"
        return ""

    @property
    def _results_bytes(self) -> int:
        """What is copied before the steps, and what eager's leaves for the comparison."""
        graph, resident = self.graph, self.graph.resident
        before_bytes = resident.batch_bytes + resident.buffers_bytes
        if is_cuda(graph.device):  # results are on the host in any case
            return before_bytes
        left = {*graph.outputs, *graph.forward_outputs}
        made = sum(value.size_bytes for value in graph.values if value.name in left)
        return before_bytes + resident.buffers_bytes + made

    @property
    def _where(self) -> str:
        return "in the host's memory" if is_cuda(self.graph.device) else f"in {host_folder()}"


def reference_of(
    graph: TrainingGraph, budget_bytes: int, model: nn.Module, batch: Batch
) -> Reference:
    """Beside a plan of `model`, whose gradients of other batches stay where they are summed."""
    from remat.graph_capture.tracing.resident import storage_bytes

    there = (p.grad for p in model.parameters())
    return Reference(graph, budget_bytes, storage_bytes(there) if batch.accumulate else 0)
