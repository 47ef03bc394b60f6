"""The judge of pipelines: replays each rank's actions for time and for bytes that are live.

A rank runs its actions in order. A forward waits for the forward of the stage before it, a backward
for the input gradients of the stage behind it, each with the way between ranks. A stage's saved
bytes are live from its forward until its gradients of inputs are done; what the gradients of
weights still need, until those are done. While an action runs, what it needs beside is live too.

It is a list scheduler in one pass, and knows no planner. `tests/remat/cluster` gives it the lists
of seven schedules of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from remat.graph_capture.errors import ScheduleError

_ActionKind = Literal["F", "B", "I", "W"]
"""Forward, a whole backward, gradients of a stage's input, and those of its weights."""
ACTION_KINDS: tuple[_ActionKind, ...] = ("F", "B", "I", "W")


class PipelineAction(NamedTuple):
    stage: int
    kind: _ActionKind
    microbatch: int

    def __str__(self) -> str:
        """As torch writes it."""
        return f"{self.stage}{self.kind}{self.microbatch}"


_Together = tuple[PipelineAction, ...]  # actions that a rank begins at once; mostly one
RankOrder = tuple[_Together, ...]  # what one rank runs, in order
_Done = dict[PipelineAction, float]  # when each action has ended


class StageCosts(msgspec.Struct, frozen=True):
    """What one stage takes for one microbatch.

    `saved_bytes` : from F to I. `for_weights_bytes` : of those, what is live until W.
    `need_bytes` : beside what is saved, while an action runs.
    """

    forward_us: float
    input_us: float
    weight_us: float = 0.0
    saved_bytes: int = 0
    for_weights_bytes: int = 0
    need_bytes: int = 0

    def us(self, kind: _ActionKind) -> float:
        # A whole backward makes gradients of inputs and of weights.
        whole = self.input_us + self.weight_us
        return {"F": self.forward_us, "I": self.input_us, "W": self.weight_us, "B": whole}[kind]


class ActionSpan(NamedTuple):
    """When an action of a rank runs, and what its microbatches hold meanwhile and after."""

    action: PipelineAction
    begin_us: float
    end_us: float
    saved_bytes: int
    need_bytes: int
    after_bytes: int


class PipelineReplay(msgspec.Struct, frozen=True):
    time_us: float
    ranks: tuple[RankReplay, ...]

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait."""
        busy_us = sum(rank.busy_us for rank in self.ranks)
        return 1 - busy_us / (self.time_us * len(self.ranks)) if self.time_us else 0.0


def in_order(costs: Sequence[Sequence[StageCosts]]) -> list[StageCosts]:
    """By rank and virtual stage, to the order in which a pipeline numbers its stages."""
    # The first virtual stage of each rank comes first, then the second, and so on.
    return [cost for virtual_stage in zip(*costs, strict=True) for cost in virtual_stage]


def replay_pipeline(
    order: Sequence[RankOrder], costs: Sequence[StageCosts], hop_us: float = 0.0
) -> PipelineReplay:
    """Replay what each rank runs; `costs` by stage, `hop_us` from a rank to another.

    `ScheduleError` : an action is done twice, is missing, or is waited for for ever.
    """
    ranks = tuple(map(RankReplay, order))
    rank_of = {a.stage: i for i, rank in enumerate(ranks) for one in rank.actions for a in one}
    if sorted(rank_of) != list(range(len(costs))):
        raise ScheduleError(f"the pipeline has stages {sorted(rank_of)}, and {len(costs)} costs")
    done: _Done = {}
    ready_us = partial(_ready_us, done, rank_of, hop_us)
    while waiting := [rank for rank in ranks if rank.at < len(rank.actions)]:
        # A round in which no rank gets on: each waits for another.
        if not sum(rank.run(costs, ready_us, done) for rank in waiting):
            stuck = ", ".join(str(rank.actions[rank.at][0]) for rank in waiting)
            raise ScheduleError(f"these actions of the pipeline wait forever: {stuck}")
    _check_complete(done, len(costs))
    return PipelineReplay(max((rank.clock_us for rank in ranks), default=0.0), ranks)


_Needs = tuple[tuple[int, tuple[_ActionKind, ...]], ...]
# The stage behind makes the gradient in a whole backward, or apart from its weights.
_OF_BACKWARD: _Needs = (0, ("F",)), (1, ("B", "I"))
_NEEDS: dict[_ActionKind, _Needs] = {
    "F": ((-1, ("F",)),), "B": _OF_BACKWARD, "I": _OF_BACKWARD, "W": ((0, ("I",)),)
}  # fmt: skip
"""What an action waits for: how many stages behind its own, and kinds of which one is enough."""


def _ready_us(
    done: _Done, rank_of: dict[int, int], hop_us: float, action: PipelineAction
) -> float | None:
    """When what the action reads is there; None while something is missing."""
    stage, kind, microbatch = action
    latest = 0.0
    for other, kinds in ((stage + far, kinds) for far, kinds in _NEEDS[kind]):
        if other not in rank_of:
            continue
        found = [a for k in kinds if (a := PipelineAction(other, k, microbatch)) in done]
        if not found:
            return None
        way_us = hop_us * (rank_of[other] != rank_of[stage])
        latest = max(latest, *(done[a] + way_us for a in found))
    return latest


@dataclass
class RankReplay:
    """`peak_bytes` of its microbatches; `most_open` forwards whose backward has not ended."""

    actions: RankOrder
    at: int = 0
    clock_us: float = 0.0
    busy_us: float = 0.0
    live_bytes: int = 0
    peak_bytes: int = 0
    most_open: int = 0
    open: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    spans: list[ActionSpan] = field(default_factory=list[ActionSpan])

    def run(
        self, costs: Sequence[StageCosts], ready_us: Callable[[PipelineAction], float | None],
        done: _Done,
    ) -> int:  # fmt: skip
        """Run on until something is missing; how many steps that were."""
        began = self.at
        while self.at < len(self.actions):
            together = self.actions[self.at]
            ready = list(map(ready_us, together))
            known = [one for one in ready if one is not None]
            if len(known) < len(ready):
                break
            self.clock_us = max(self.clock_us, *known)
            for action in together:
                self._do(action, costs[action.stage], done)
            # Only now: actions that run together hold their bytes until all have ended.
            self._end(together, costs)
            self.at += 1
        return self.at - began

    def _do(self, action: PipelineAction, cost: StageCosts, done: _Done) -> None:
        if action in done:
            raise ScheduleError(f"action {action} of the pipeline runs twice")
        spent_us, began_us = cost.us(action.kind), self.clock_us
        self.clock_us += spent_us
        self.busy_us += spent_us
        done[action] = self.clock_us
        if action.kind == "F":
            self.live_bytes += cost.saved_bytes
            self.open.add((action.stage, action.microbatch))
        self.most_open = max(self.most_open, len(self.open))
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + cost.need_bytes)
        live, need = self.live_bytes, cost.need_bytes
        self.spans.append(ActionSpan(action, began_us, self.clock_us, live, need, live))

    def _end(self, together: _Together, costs: Sequence[StageCosts]) -> None:
        for stage, kind, microbatch in together:
            cost = costs[stage]
            if kind in ("B", "I"):
                self.live_bytes += cost.for_weights_bytes * (kind == "I") - cost.saved_bytes
                self.open.discard((stage, microbatch))
            if kind == "W":
                self.live_bytes -= cost.for_weights_bytes
        self.spans[-1] = self.spans[-1]._replace(after_bytes=self.live_bytes)


def _check_complete(done: _Done, stages: int) -> None:
    microbatches = 1 + max((action.microbatch for action in done), default=-1)
    for stage in range(stages):
        for i in range(microbatches):
            kinds = "".join(k for k in ACTION_KINDS if PipelineAction(stage, k, i) in done)
            if kinds not in ("FB", "FIW"):
                raise ScheduleError(
                    f"microbatch {i} of the pipeline has actions {kinds or 'none'} on stage "
                    f"{stage}, but must go forward once and backward once"
                )


STATES, PARAMETERS, GRADIENTS = "optimizer states and masters", "parameters", "gradients"
_BORDERS = "borders"
SAVED_ACTIVATIONS = "saved activations"
FOR_WEIGHTS = "for gradients of weights"  # what waits for them, where a schedule makes them apart
RUNNING = "while a block runs"
STANDING = STATES, PARAMETERS, GRADIENTS, _BORDERS  # live throughout the step
HOLDERS = *STANDING, SAVED_ACTIVATIONS, FOR_WEIGHTS, RUNNING


def holders_in(stages: Iterable[Mapping[str, int]]) -> list[str]:
    """Those to show: what waits for gradients of weights only if a stage has it."""
    has_waiting = any(FOR_WEIGHTS in held for held in stages)
    return [name for name in HOLDERS if name != FOR_WEIGHTS or has_waiting]
