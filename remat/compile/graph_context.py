"""What is asked of a graph, where it stands in its model, and what budget that leaves it."""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from remat.budgets import Budget, auto_bytes, parse_budget
from remat.compile.shared_budget import Frame, SharedBudget, WholeModel
from remat.formats import bytes_text
from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.errors import BudgetError, SolverError
from remat.progress import stopwatch_of_call
from remat.rewriter.inductor.replay import ReplayedMemory, StepBytes
from remat.schedules.schedule import Schedule
from remat.schedules.value_report.globs import Globs
from remat.solved import budget_said
from remat.solver import solver_class
from remat.solver.stopping import DEFAULT_GAP
from remat.solver.table import check_number


@dataclass(frozen=True)
class CompileOptions:
    """What is asked of a compiled step; what is not said here is as of `remat.rematerialize`."""

    budget: Any  # of its peak; ``%`` is of that of torch's own code
    solver: str = "auto"
    gap: float = DEFAULT_GAP  # proved to this part of the best, where the solver can
    time_limit_s: float = 10.0
    replays: int = 8  # most candidates to generate; each takes a solve
    calls: int = 1  # forwards of each graph before the first backward
    keep: Globs = ()
    recompute: Globs = ()
    warm: bool = True  # whether a kept plan is taken, and this one's is kept
    verbose: bool = True

    @property
    def parsed(self) -> Budget:
        return parse_budget(self.budget)


def read_options(given: Mapping[str, Any] | None, **others: Any) -> CompileOptions:
    if unknown := [name for name, value in others.items() if value is not None]:
        raise SolverError(
            f"give options=dict(budget=...): torch.compile(backend='remat') takes no {unknown[0]}"
        )
    asked = dict(given or {})
    names = [field.name for field in dataclasses.fields(CompileOptions)]
    for name in asked:
        if name in ("host", "nvme"):  # a hint of the nearest name would not explain these
            raise SolverError(
                f"leave out {name}, or use remat.rematerialize(model, ..., host=...), which runs "
                "eager's kernels: with backend 'remat', Inductor's code copies nothing to the host"
            )
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise SolverError(
                f"backend 'remat' has no option {name!r}: {hint}its options are {', '.join(names)}"
            )
    if "budget" not in asked:
        raise BudgetError(
            'backend "remat" needs a budget: torch.compile(model, backend="remat", '
            'options={"budget": "8GiB"}); or "60%", "auto", "min", or bytes'
        )
    options = CompileOptions(**asked)
    _check(options)
    return options


def _check(options: CompileOptions) -> None:
    parse_budget(options.budget)
    solver_class(options.solver)
    check_number("time_limit_s", options.time_limit_s)
    check_number("gap", options.gap)
    for name in ("warm", "verbose"):
        is_on: Any = getattr(options, name)
        if not isinstance(is_on, bool):
            raise SolverError(f"{name} must be True or False, not {is_on!r}")
    for name in ("replays", "calls"):
        count: Any = getattr(options, name)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:  # True is an int
            raise SolverError(f"{name} must be 1 or more, not {count!r}")


_MOST_KEPT = 64  # plans; the oldest go first
_plans: deque[CompiledPlan] = deque(maxlen=_MOST_KEPT)


class CompiledPlan(msgspec.Struct, frozen=True):
    frame: str  # dynamo's number of the graph, of its compilation, and ours of a size
    budget_bytes: int
    peak_bytes: int  # of its code, replayed, with `held_bytes`
    baseline_peak_bytes: int  # the same without a budget
    held_bytes: int  # parameters, buffers, inputs, and what earlier graphs hold
    saved_bytes: int  # what forward leaves for backward
    overhead: float  # over each kernel once; 0 where torch's own cut fits
    gap: float | None  # from the best, at its target; None where nothing is proved
    recomputed: int  # kernels and calls that run again
    replays: int  # candidates replayed; 0 for a kept plan
    seconds: float  # that the search took
    schedule: Schedule | None = None  # None where torch's own cut fits
    sizes: str = ""  # by dimension, where the graph serves several
    device: str = CPU

    def __repr__(self) -> str:
        at = f" at {self.sizes}" if self.sizes else ""
        is_stock = self.schedule is None and self.baseline_peak_bytes <= self.budget_bytes
        fits = ", which fits without a plan" * is_stock
        return (
            f"CompiledPlan(graph {self.frame}{at}: peak {bytes_text(self.peak_bytes)} of "
            f"{budget_said(self.budget_bytes, self.device)}, as torch compiles it "
            f"{bytes_text(self.baseline_peak_bytes)}{fits}; {self.recomputed} computed again, "
            f"overhead {100 * self.overhead:.1f} %, {self.replays} replays, {self.seconds:.1f} s)"
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
        """The same in each process, before the graph is traced."""
        return f"{self.whole} {self.shared.others_text(self.frame)}"

    def set_beside(self, step: StepBytes) -> None:
        step.modules = self.shared.modules_ahead(self.whole, self.frame)
        step.calls = max(self.asked.calls, step.modules)  # further modules are further calls
        own = step.gradient_bytes, step.modules
        step.awaited_gradient_bytes = self.shared.expect(self.whole, self.frame, *own)

    def held_bytes(self, step: StepBytes) -> int:
        return self.shared.held_bytes(self.frame, step.static_bytes, step.dynamic_bytes)

    def budgets_bytes(self, step: StepBytes, stock: ReplayedMemory) -> list[int]:
        """The budgets to try in turn; none for ``"min"``."""
        budget, held_bytes = self.asked.parsed, self.held_bytes(step)
        base_bytes = self.shared.base_bytes(self.frame, step, stock, held_bytes)
        if budget.kind == "min":
            return []
        if budget.kind == "auto":
            return [auto_bytes(self.shared.device) + held_bytes]  # what the graph holds is not free
        if budget.kind != "share":
            return [budget.size_bytes]
        # A share of a small last batch can be too little; the run has a larger shape's room.
        given_bytes = self.shared.given_to_other_shapes_bytes(self.frame)
        own_bytes = int(budget.share * base_bytes)
        return [own_bytes, given_bytes] if given_bytes > own_bytes else [own_bytes]

    def warn_of_part(self) -> None:
        around = self.whole.around
        if around and not self.shared.forwards.graphs():  # said with the first graph alone
            warnings.warn(
                f"compile {around} with the loss inside for a budget on the whole step: only a "
                "part of it is compiled, whose parameters and gradients count.\n"
                f"What {around} runs outside its compiled parts does not count, and percentages "
                "leave it out",
                stacklevel=2,
            )

    def note(self, step: StepBytes, taken: ChosenPlan, budget_bytes: int, seconds: float) -> None:
        held_bytes, is_bound = self.held_bytes(step), self.asked.parsed.kind != "min"
        figures = taken.chosen, taken.stock, budget_bytes
        self.shared.note(self.frame, step, *figures, is_bound=is_bound)
        remember(
            CompiledPlan(
                frame="/".join(map(str, self.frame)), sizes=self.sizes, budget_bytes=budget_bytes,
                peak_bytes=held_bytes + taken.chosen.peak_bytes,
                baseline_peak_bytes=held_bytes + taken.stock.peak_bytes, held_bytes=held_bytes,
                saved_bytes=taken.chosen.saved_bytes, overhead=taken.overhead, gap=taken.gap,
                recomputed=n_run_again(taken.schedule), replays=taken.replays, seconds=seconds,
                schedule=taken.schedule, device=self.shared.device,
            ),
            verbose=self.asked.verbose,
        )  # fmt: skip
