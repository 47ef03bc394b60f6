"""What a solve and a check come to, and the verdict on a plan: one line for screens and pages.

It stands here and not in the solver, so that a plan which is only followed imports no solver.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from remat.formats import (
    NO_BOUND,
    bytes_text,
    figures_html,
    gap_text,
    percent_text,
    proved_text,
    time_text,
)
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import bound_of, gap_of

Status = Literal["optimal", "feasible", "infeasible", "none found", "time limit"]


class Attention(msgspec.Struct, frozen=True):
    """How many attention outputs backward needs, and how many of them are computed again."""

    outputs: int
    recomputed: int

    def __str__(self) -> str:
        if self.recomputed:
            return f"recomputes {self.recomputed} of {_outputs(self.outputs)}"
        return f"keeps {'all ' if self.outputs > 1 else ''}{_outputs(self.outputs)}"


def _outputs(count: int) -> str:
    return f"{count} attention output" + ("s" if count != 1 else "")


class Holding(msgspec.Struct, frozen=True):
    """One entry of what holds the memory at a peak."""

    name: str
    size_bytes: int
    module: str = ""


class Result(msgspec.Struct, frozen=True):
    """Outcome of one solve.

    Attributes
    ----------
    status : ``optimal`` (proved), ``feasible``, ``infeasible`` (proved), ``none found`` (another
        solver may find one), or ``time limit`` (the search was cut short; `schedule` is the best
        found, None if none was).
    schedule : a schedule whose simulated peak is within the budget, or None.
    peak_bytes, time_us, overhead : of `schedule`, from `simulate`; 0 where there is none.
    lower_bound_us : no schedule of this budget, in the captured order of first
        computations, takes less time; with the option `order` free, none in any order. 0 where
        nothing is proved.
    solver, wall_s : who solved it, and how long that took.
    least_feasible_bytes : without a schedule, the least budget known to be feasible.
    least_schedule : without a schedule, one whose peak is that budget, if it is at hand.
    held_at_peak : without a schedule, what holds the memory at that schedule's peak.
    least_bound_bytes : without a schedule, none has a lower peak; 0 where not sought.
    floor : None unless the budget is below it. What any schedule in captured order needs that
        never computes an output of the step again: the op that sets it, and the bytes.
    otherwise : without a schedule, what else lowers the peak, in words; empty where not sought.
    attention : where something runs again, how much of attention does; None without any.
    message : what to say to the user beyond the figures.
    reserved_bytes : what a CUDA allocator is predicted to reserve for the schedule, where the
        budget bounds that; where infeasible, for the one of least peak. Else 0.
    """

    status: Status
    solver: str
    budget_bytes: int
    schedule: Schedule | None = None
    peak_bytes: int = 0
    time_us: float = 0.0
    overhead: float = 0.0
    lower_bound_us: float = 0.0
    wall_s: float = 0.0
    least_feasible_bytes: int = 0
    least_schedule: Schedule | None = None
    held_at_peak: tuple[Holding, ...] = ()
    least_bound_bytes: int = 0
    floor: Holding | None = None
    otherwise: str = ""
    attention: Attention | None = None
    message: str = ""
    reserved_bytes: int = 0

    @property
    def gap(self) -> float | None:
        """How far the schedule may be from the best: time over bound, minus one.

        None where there is no schedule or no bound.
        """
        return gap_of(self.time_us, self.lower_bound_us) if self.schedule is not None else None

    @property
    def of_tensors(self) -> Result:
        """With the budget of allocated bytes that its schedule was made for."""
        if self.schedule is None or not self.reserved_bytes:
            return self
        own_bytes = self.schedule.budget_bytes
        return msgspec.structs.replace(self, budget_bytes=own_bytes, reserved_bytes=0)

    def _repr_html_(self) -> str:
        figures = [("status", f"{self.status}, by {self.solver or 'hand'} in {self.wall_s:.1f} s")]
        figures.append(("budget", bytes_text(self.budget_bytes)))
        if self.schedule is not None:
            figures += [
                ("peak", bytes_text(self.peak_bytes)),
                ("reserved", bytes_text(self.reserved_bytes) if self.reserved_bytes else ""),
                ("step", time_text(self.time_us)),
                ("overhead", percent_text(self.overhead)),
                ("gap", proved_text(self.gap)),
                ("attention", str(self.attention or "")),
            ]
        elif self.least_feasible_bytes:
            figures.append(("least budget known", bytes_text(self.least_feasible_bytes)))
        return figures_html(type(self).__name__, [*figures, ("note", self.message)])

    def __repr__(self) -> str:
        name = type(self).__name__
        if self.schedule is None:
            return f"{name}({self.status}, {self.solver}, budget {self.budget_bytes} bytes)"
        gap = "no bound" if self.gap is None else f"gap {100 * self.gap:.2f} %"
        return (
            f"{name}({self.status}, {self.solver or 'by hand'}: peak {self.peak_bytes} of "
            f"{self.budget_bytes} bytes, overhead {100 * self.overhead:.2f} %, "
            f"{gap}, {self.wall_s:.1f} s" + (f", {self.attention})" if self.attention else ")")
        )


Rounding = Literal["", "inductor", "chunks", "levers"]  # what rounds unlike eager; empty for none


class Check(msgspec.Struct, frozen=True):
    """What `check` found.

    Attributes
    ----------
    outputs_equal, gradients_equal, buffers_equal, rng_equal : against eager, bit for bit where
        `tolerance` is 0.
    gradients, gradients_total : how many gradients are equal in that sense, of how many.
    baseline_peak_bytes, plan_peak_bytes : measured peak of the unmodified and of the
        rewritten step, resident bytes included.
    baseline_step_us, plan_step_us : median time of a step.
    differences : names of what differs.
    unsteady : names of what eager itself does not repeat to the last bit, such as sums by atomic
        additions on a CUDA device. Of these, `differences` names those that are further from eager
        than runs of eager are from each other; on a CPU, where eager repeats itself, all of them.
    in_one_order : whether sums that threads add in no fixed order had one while bits were compared.
    plan_rounding_bytes : the part of the plan's peak that the allocator gave without being asked.
    baseline_reserved_bytes, plan_reserved_bytes : the peak, and what the allocator held beside it;
        None on a CPU, whose allocator holds nothing.
    distances : how far from eager's each of `differences` is at most; NaN for what is no tensor.
    diverges_at : the first ``file:line`` at which eager runs an op that the plan does not; empty
        where all are the plan's, None where that was not looked at.
    tolerance : how far from eager's a result may be, as a part of its norm; 0 for equal bits.
    largest_error : how far off the worst result is; 0 if bits were compared.
    rounding : what rounds otherwise than eager, ``inductor`` or ``chunks``; empty for nothing.
    """

    outputs_equal: bool
    gradients_equal: bool
    buffers_equal: bool
    rng_equal: bool
    gradients: int
    gradients_total: int
    baseline_peak_bytes: int
    plan_peak_bytes: int
    baseline_step_us: float
    plan_step_us: float
    differences: tuple[str, ...] = ()
    unsteady: tuple[str, ...] = ()
    in_one_order: bool = False
    plan_rounding_bytes: int = 0
    baseline_reserved_bytes: int | None = None
    plan_reserved_bytes: int | None = None
    tolerance: float = 0.0
    largest_error: float = 0.0
    distances: tuple[float, ...] = ()
    diverges_at: str | None = None
    rounding: Rounding = ""

    @property
    def equal(self) -> bool:
        return not self.differences

    def exceeds(self, budget_bytes: int) -> bool:
        """Whether the plan asks for more than a budget; what the allocator adds does not count."""
        return self.plan_peak_bytes - self.plan_rounding_bytes > budget_bytes

    def as_kept(self) -> Check:
        """Without what JSON cannot hold: 0 stands for a time that was not measured."""
        floats = ("baseline_step_us", "plan_step_us", "largest_error")
        unknown = {name: 0.0 for name in floats if not math.isfinite(getattr(self, name))}
        return msgspec.structs.replace(self, distances=(), **unknown)

    @property
    def overhead(self) -> float:
        return self.plan_step_us / self.baseline_step_us - 1


CHECKED = ("outputs", "gradients", "buffers", "rng")  # what has to be equal to eager's, to the bit
FAR_OFF = 1.25  # a measured step that is longer or shorter than the predicted one by this is told
_LITTLE = 5e-5  # a share below it reads 0.00 %


def verdict(
    graph: TrainingGraph, unmodified_us: float, found: Result, check: Check | None = None
) -> str:
    """Whether a plan of `graph` fits, what it costs, what is proved and what is equal, as known."""
    budget, pace = bytes_text(found.budget_bytes), _pace_text(unmodified_us, found.time_us)
    proof = _proof_text(graph, found)
    if check is None:
        said = ", ".join(filter(None, (f"Predicted to fit {budget}", pace, proof)))
        return f"{said}. {'Modelled, not' if graph.cost_origin == 'modelled' else 'Not'} run."
    fits = f"Fits {budget}"
    if check.exceeds(found.budget_bytes):
        fits = f"Takes {bytes_text(check.plan_peak_bytes)}, above the budget of {budget}"
    if pace and check.baseline_step_us > 0:
        is_near = 1 / FAR_OFF < check.baseline_step_us / unmodified_us < FAR_OFF
        busy = "" if is_near else ", on a busy machine"
        pace += f" (measured: {percent_text(check.overhead)}{busy})"
    costs = ", ".join(filter(None, (pace, proof)))
    said = (fits, costs[:1].upper() + costs[1:], _equality_text(check))
    return "".join(f"{one}. " for one in said if one).rstrip()


def _pace_text(unmodified_us: float, time_us: float) -> str:
    if not unmodified_us:  # without costs nothing is known
        return ""
    more = time_us / unmodified_us - 1
    if abs(more) < _LITTLE:
        return "as fast as unmodified"
    return f"{percent_text(abs(more))} {'slower' if more > 0 else 'faster'} than unmodified"


def _proof_text(graph: TrainingGraph, found: Result) -> str:
    gap, bound = found.gap, bound_of(found.lower_bound_us, graph.base_us)
    if gap is not None and gap < _LITTLE:
        return "proved to be the best plan"
    # That every op runs at least once is no proof of a plan.
    return f"proved within {percent_text(gap)} of the best plan" if gap and bound else ""


def _equality_text(check: Check) -> str:
    how = f"within {check.tolerance:g} of unmodified" if check.tolerance else "equal"
    said = f"{check.gradients} of {check.gradients_total} gradients {how}"
    differing = [name for name in CHECKED if not getattr(check, f"{name}_equal")]
    if differing:
        return f"{said}, {' and '.join(differing)} differ: do not train with it"
    return f"{said}, the others as near as unmodified repeats itself" if check.unsteady else said


def bound_text(graph: TrainingGraph, found: Result) -> str:
    bound = bound_of(found.lower_bound_us, graph.base_us)
    if bound is None or found.gap is None:
        return NO_BOUND
    is_proved = found.status == "optimal"
    # That every op runs once holds without a proof, and must not look like one.
    of = "overhead at this budget" if bound or is_proved else "overhead (nothing computed twice)"
    return f"{percent_text(bound)} {of}; {gap_text(found.gap)}{', proved' if is_proved else ''}"


def equal_text(check: Check) -> str:
    said = f"{check.gradients} of {check.gradients_total} gradients bit-identical"
    for name in CHECKED:
        if name != "gradients":
            said += f", {name} {'equal' if getattr(check, f'{name}_equal') else 'differ'}"
    return said
