"""Where a graph stands among the graphs of its model, and what budget that leaves it."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass

import msgspec

from remat.budgets import auto_bytes
from remat.compile.compile_options import CompileOptions
from remat.compile.shared_budget import Frame, SharedBudget, WholeModel
from remat.formats import bytes_text
from remat.progress import stopwatch_of_call
from remat.rewriter.inductor.replay import ReplayedMemory, StepBytes
from remat.schedules.schedule import Schedule

_MOST_KEPT = 64
"""Plans; the oldest go first."""
_plans: deque[CompiledPlan] = deque(maxlen=_MOST_KEPT)


class CompiledPlan(msgspec.Struct, frozen=True):
    """One compiled training graph.

    Attributes
    ----------
    frame : dynamo's number of the graph, of its compilation, and, where that serves several sizes,
        that of the size. sizes : these, by dimension; empty where it serves one.
    budget_bytes : what it was planned for. peak_bytes : of its code, replayed, with `held_bytes`.
    baseline_peak_bytes : the same for the code that torch makes without a budget.
    held_bytes : of parameters, buffers, inputs, and what earlier graphs hold.
    saved_bytes : what forward leaves for backward.
    overhead : over computing each kernel once, by the costs of kernels; 0 where torch's own cut
        fits. gap : how far that can be from the best, at the target that was solved for; None where
        nothing is proved.
    recomputed : kernels and calls that run again. replays : candidates whose code was replayed; 0
        for a plan that an earlier process has kept.
    seconds : that the search took. schedule : None where torch's own cut fits.
    """

    frame: str
    budget_bytes: int
    peak_bytes: int
    baseline_peak_bytes: int
    held_bytes: int
    saved_bytes: int
    overhead: float
    gap: float | None
    recomputed: int
    replays: int
    seconds: float
    schedule: Schedule | None = None
    sizes: str = ""

    def __repr__(self) -> str:
        at = f" at {self.sizes}" if self.sizes else ""
        return (
            f"CompiledPlan(graph {self.frame}{at}: peak {bytes_text(self.peak_bytes)} of "
            f"{bytes_text(self.budget_bytes)}, as torch compiles it "
            f"{bytes_text(self.baseline_peak_bytes)}; {self.recomputed} computed again, overhead "
            f"{100 * self.overhead:.1f} %, {self.replays} replays, {self.seconds:.1f} s)"
        )


def remember(plan: CompiledPlan, *, verbose: bool) -> None:
    _plans.append(plan)
    stopwatch_of_call(verbose=verbose).say(f"remat: {plan!r}")


def compiled_plans() -> tuple[CompiledPlan, ...]:
    """Plans of graphs that torch.compile has compiled here, the oldest first; 64 are kept."""
    return tuple(_plans)


@dataclass(frozen=True)
class ChosenPlan:
    """`stock` is as torch makes the code; `schedule` None where that is taken."""

    stock: ReplayedMemory
    chosen: ReplayedMemory
    schedule: Schedule | None = None
    overhead: float = 0.0
    gap: float | None = 0.0
    replays: int = 0


def n_run_again(schedule: Schedule | None) -> int:
    """How many runs of a schedule are not an op's first; 0 without one."""
    counts = schedule.computations() if schedule else {}
    return sum(count - 1 for count in counts.values())


@dataclass(frozen=True)
class GraphContext:
    """One graph of dynamo's; `sizes`, as text, where it is one of several sizes."""

    asked: CompileOptions
    shared: SharedBudget
    whole: WholeModel
    frame: Frame
    sizes: str = ""

    def text(self) -> str:
        """Known before the graph is traced; the same in each process."""
        others = self.shared.others_text(self.frame)
        return f"{self.whole} {others}"

    def set_beside(self, step: StepBytes) -> None:
        step.modules = self.shared.modules_ahead(self.whole, self.frame)
        # Each further module like this one is a call that runs before the first backward.
        step.calls = max(self.asked.calls, step.modules)
        step.awaited_gradient_bytes = self.shared.expect(
            self.whole, self.frame, step.gradient_bytes, step.modules
        )

    def held_bytes(self, step: StepBytes) -> int:
        return self.shared.held_bytes(self.frame, step.static_bytes, step.dynamic_bytes)

    def budgets_bytes(self, step: StepBytes, stock: ReplayedMemory) -> list[int]:
        """The budgets to try in turn; none for ``"min"``."""
        budget, held_bytes = self.asked.parsed, self.held_bytes(step)
        base_bytes = self.shared.base_bytes(self.frame, step, stock, held_bytes)
        if budget.kind == "min":
            return []
        if budget.kind == "auto":
            # What the graph holds is allocated already, so it is no part of what is free.
            return [auto_bytes(self.shared.device) + held_bytes]
        if budget.kind != "share":
            return [budget.size_bytes]
        # A share of a small shape's own peak, as of the last batch of an epoch, can be less than
        # its parameters. The run has the room that a larger shape was given.
        given_bytes = self.shared.given_to_other_shapes_bytes(self.frame)
        own_bytes = int(budget.share * base_bytes)
        return [own_bytes, given_bytes] if given_bytes > own_bytes else [own_bytes]

    def warn_of_part(self) -> None:
        around = self.whole.around
        # Said with the first graph alone.
        if around and not self.shared.forwards.graphs():
            warnings.warn(
                f"what is compiled is a part of {around}, whose parameters and gradients count. "
                f"What {around} runs beside its compiled parts does not, and per cents are without "
                f"it: for a budget on the whole step, compile {around}, with the loss inside",
                stacklevel=2,
            )

    def note(self, step: StepBytes, taken: ChosenPlan, budget_bytes: int, seconds: float) -> None:
        held_bytes = self.held_bytes(step)
        is_bound = self.asked.parsed.kind != "min"
        self.shared.note(
            self.frame, step, taken.chosen, taken.stock, budget_bytes, is_bound=is_bound
        )
        remember(
            CompiledPlan(
                frame="/".join(map(str, self.frame)),
                sizes=self.sizes,
                budget_bytes=budget_bytes,
                peak_bytes=held_bytes + taken.chosen.peak_bytes,
                baseline_peak_bytes=held_bytes + taken.stock.peak_bytes,
                held_bytes=held_bytes,
                saved_bytes=taken.chosen.saved_bytes,
                overhead=taken.overhead,
                gap=taken.gap,
                recomputed=n_run_again(taken.schedule),
                replays=taken.replays,
                seconds=seconds,
                schedule=taken.schedule,
            ),
            verbose=self.asked.verbose,
        )
