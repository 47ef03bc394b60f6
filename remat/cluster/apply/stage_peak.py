"""The peak of a rank of a pipeline, from what its blocks save and need in torch's own order.

Live at once, beside parameters and receive buffers: what each open microbatch saves; the block that
runs; gradients, from when a stage's first backward makes them; a gradient that is being sent. What
a block saves and needs is what the simulator finds for it (`simulate`). Where gradients of
weights are made apart, each part of backward has live what its code does, and what is between them
is held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import add

from remat.cluster.apply.stage_parts import BEFORE, NO_BYTES, BlockBytes, RankParts
from remat.cluster.pipeline_replay import PipelineAction
from remat.cluster.replayed_plan import ONE_STAGE, torch_order
from remat.cluster.stepping import RingStage
from remat.graph_capture.distributed.dtensors import local_part


@dataclass(frozen=True)
class _StageBytes:
    """Of one stage: its blocks between the ends of the model, which are `NO_BYTES` elsewhere.

    `held` : of each open microbatch beside what blocks save. `keeps_all` : whether all that was
    sent is held to the end of the step.
    """

    parts: tuple[BlockBytes, ...]
    held: int
    sent: int
    keeps_all: bool

    @property
    def saved(self) -> int:
        """Of one open microbatch between its forward and its backward."""
        return sum(block.saved for block in self.parts) + self.held

    @property
    def for_weights(self) -> int:
        """Of one microbatch that waits for its gradients of weights."""
        return sum(part.held for part in self.parts)

    def gradients(self, *, apart: bool) -> int:
        """Of the parts whose gradients of weights are made apart, or of the others."""
        return sum(p.gradients for p in self.parts if (p.split is not None) == apart)

    def forward(self) -> int:
        """The most that one microbatch has live in its forward here."""
        saved = accumulate(part.saved for part in self.parts)
        return max(map(add, saved, (part.need for part in self.parts))) + self.held

    def backward(self, *, makes_gradients: bool) -> int:
        """The same in its backward, or in the gradients of its inputs."""
        peak = saved = 0
        # Backward goes from last to first: with each part, those behind have made their gradients.
        made = self.gradients(apart=False) if makes_gradients else self.parts[-1].unsummed
        later = self.for_weights
        for part in self.parts:
            made -= 0 if makes_gradients else part.unsummed
            later -= part.held
            if part.split is None:
                made -= part.gradients * makes_gradients
                runs = part.saved + part.need
            else:
                runs = part.split.inputs
            peak = max(peak, saved + runs + made + later)
            saved += part.saved
        return peak + self.held

    def weights(self, *, makes_gradients: bool) -> int:
        """The same in its gradients of weights, which come from the last block to the first."""
        peak = made = 0
        later = self.for_weights
        for part in reversed(self.parts):
            if part.split is not None:
                later -= part.held
                peak = max(peak, later + part.split.weights + made)
                made += part.gradients * makes_gradients
        return peak


@dataclass
class _Live:
    """Where microbatches are; `finished` ones have their gradients of weights."""

    stages: dict[int, _StageBytes]
    open_ones: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    done: Counter[int] = field(default_factory=Counter[int])
    finished: Counter[int] = field(default_factory=Counter[int])

    def during(self, action: PipelineAction) -> int:
        number, kind, microbatch = action
        stage = self.stages[number]
        # It counts below, in what the action itself has live.
        self.open_ones.discard((number, microbatch))
        live = sum(self.stages[s].saved for s, _ in self.open_ones)
        live += sum(self._left(s, one) for s, one in self.stages.items())
        if kind == "F":
            live += stage.forward()
            self.open_ones.add((number, microbatch))
        elif kind == "W":
            # Its own waiting is in what it runs with.
            live += stage.weights(makes_gradients=not self.finished[number]) - stage.for_weights
        else:
            live += stage.backward(makes_gradients=not self.done[number])
        self.done[number] += kind in ("B", "I")
        self.finished[number] += kind in ("B", "W")
        return live

    def _left(self, number: int, stage: _StageBytes) -> int:
        done, finished = self.done[number], self.finished[number]
        gradients = stage.gradients(apart=False) if done else 0
        gradients += stage.gradients(apart=True) if finished else 0
        sent = stage.sent * (done if stage.keeps_all else min(done, 1))
        return gradients + sent + stage.for_weights * (done - finished)


def peak_of_rank(parts: RankParts, of_torch: Sequence[RingStage]) -> int:
    """The predicted peak, in bytes."""
    asked, plan = parts.asked, parts.asked.plan
    pp = plan.parallelism.pipeline_parallel_degree
    border = local_part(parts.given.border)
    b = border.numel() * border.element_size()
    count = pp * plan.virtual_stages
    stages: dict[int, _StageBytes] = {}
    state = (t for module in parts.modules for t in (*module.parameters(), *module.buffers()))
    held = {id(t): local_part(t) for t in state}
    fixed = sum(t.numel() * t.element_size() for t in held.values()) + parts.bytes.gathered
    for one in of_torch:
        index, inputs, gradients = one.stage_index, one.input_buffers, one.gradient_buffers
        is_first, is_last = index == 0, index == count - 1
        stages[index] = _stage_bytes(parts, one, b, is_first=is_first, is_last=is_last)
        fixed += b * inputs * (not is_first) + b * gradients * (not is_last)
        # Torch's loop keeps a result of its warm-up, which it has sent, to the end.
        is_warm = asked.schedule == "1F1B" and 2 <= inputs < plan.microbatches
        fixed += b * (is_warm and not is_last)
    order = torch_order(asked.schedule, pp, plan.microbatches, plan.virtual_stages)[asked.rank]
    live = _Live(stages)
    return fixed + max((live.during(one) for together in order for one in together), default=0)


def _stage_bytes(
    parts: RankParts, one: RingStage, border: int, *, is_first: bool, is_last: bool
) -> _StageBytes:
    chosen = [(p, parts.chosen.options[p]) for p in parts.asked.layers[one.stage_index]]
    gradients = parts.bytes.gradients
    blocks = [
        BlockBytes(option.saved_bytes, option.need_bytes, gradients[path], one.split.get(path))
        for path, option in chosen
    ]
    if not is_last:
        # The gradient that the last block reads is a receive buffer.
        *others, end = blocks
        split = end.split and replace(end.split, inputs=end.split.inputs - border)
        blocks = [*others, replace(end, need=end.need - border, split=split)]
    # What the first block saves of its input is a receive buffer; a result waits for backward.
    held = border * (not is_last) - border * (not is_first)
    of_first = gradients[BEFORE]
    first = BlockBytes(0, parts.bytes.arriving + of_first, of_first) if is_first else NO_BYTES
    last = parts.bytes.behind if is_last else NO_BYTES
    # Torch's runtime of several stages waits for what it sends when the step ends.
    keeps_all = parts.asked.schedule not in ONE_STAGE
    sent = border * (not is_first) + border * (keeps_all and not is_last)
    return _StageBytes((first, *blocks, last), held, sent, keeps_all)
