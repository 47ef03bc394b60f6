"""The schedule of a whole step, cut into what a microbatch's code does and what is done between.

The code of a microbatch runs from one moment to the next at which anything else happens: another
microbatch goes on, a gradient is added, a parameter moves or is updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.optimizer_step.op_by_op import ADD, FORWARD_ENDS, STEP, OpByOp
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step


@dataclass(frozen=True)
class Segment:
    """A part of one microbatch's code.

    Attributes
    ----------
    steps : in names of the captured graph. ends_forward : whether results are handed out at its
        end. gradients : the parameters whose gradients are.
    """

    steps: tuple[Step, ...]
    ends_forward: bool = False
    gradients: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resume:
    """Run the next segment of a microbatch once these values, which have homes, have arrived."""

    microbatch: int
    segment: Segment
    reads: tuple[str, ...]


@dataclass(frozen=True)
class Add:
    """Add a microbatch's gradient of a parameter to the sum."""

    parameter: str
    microbatch: int


@dataclass(frozen=True)
class StepOf:
    """Take the optimizer's step for a parameter, and let go of its gradient."""

    parameter: str


Action = Resume | Add | StepOf | Fetch | Offload | Free


@dataclass
class _Cut:
    """Cuts one schedule."""

    parts: OpByOp
    graph: TrainingGraph
    open: int = -1
    steps: list[Step] = field(default_factory=list[Step])
    reads: dict[str, None] = field(default_factory=dict[str, None])

    def __post_init__(self) -> None:
        captured = self.parts.captured
        numbers = range(self.parts.count)
        self.own = {
            self.parts.value(v.name, i): (v.name, i)
            for v in captured.values if v.producer for i in numbers
        }  # fmt: skip
        self.moving = {v.name for v in self.graph.values if v.home is not None}

    def actions(self, steps: Iterable[Step]) -> Iterator[Action]:
        """All actions in order."""
        for step in steps:
            if isinstance(step, Compute):
                yield from self._compute(step)
            elif step.value.startswith("G:") or step.value in self.moving:
                yield from self._closed()
                yield step
            else:
                name, i = self.own[step.value]
                yield from self._opened(i)
                self.steps.append(_renamed(step, name))
        yield from self._closed()

    def _compute(self, step: Compute) -> Iterator[Action]:
        op = self.graph.ops[self.graph.op_index[step.op]]
        if op.target == STEP:
            yield from self._closed()
            yield StepOf(step.op.partition(":")[2])
            return
        rest, i = step.op.rsplit(".", 1)
        if op.target == ADD:
            yield from self._closed()
            yield Add(rest.partition(":")[2], int(i))
            return
        yield from self._opened(int(i))
        self.steps.append(Compute(rest))
        self.reads.update(dict.fromkeys(v for v in op.inputs if v in self.moving))
        gradients = tuple(self.parts.finished_by.get(rest, ()))
        if op.target == FORWARD_ENDS or gradients:
            yield from self._closed(op.target == FORWARD_ENDS, gradients)

    def _opened(self, i: int) -> Iterator[Action]:
        if self.open != i:
            yield from self._closed()
            self.open = i

    def _closed(self, ends: bool = False, gradients: tuple[str, ...] = ()) -> Iterator[Action]:
        if self.open >= 0:
            segment = Segment(tuple(self.steps), ends, gradients)
            yield Resume(self.open, segment, tuple(self.reads))
        self.open = -1
        self.steps.clear()
        self.reads.clear()


def actions_of(parts: OpByOp, graph: TrainingGraph, schedule: Schedule) -> list[Action]:
    """What a whole step does, in order."""
    return list(_Cut(parts, graph).actions(schedule.steps))


def _renamed(step: Free | Fetch | Offload, value: str) -> Step:
    if isinstance(step, Free):
        return Free(value, step.at)
    return Fetch(value, step.to) if isinstance(step, Fetch) else Offload(value, step.to)
