"""Which stages a rank has under a schedule of torch's, and what that does with microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from remat.cluster.pipeline_replay import StageCosts, replay_pipeline
from remat.cluster.replayed_plan import torch_order
from remat.cluster.stepping import ring_size

_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""The first rank has the first stage and the last one, and so on inwards."""
ZERO_BUBBLE = ("InterleavedZeroBubble", *_V_SHAPED)
"""Gradients of weights are made apart from those of inputs."""
_LEAST_GRADIENTS = 2
"""Receive buffers: a gradient may still be on its way while the next one arrives."""


def stages_of_rank(name: str, rank: int, ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """In the order of the model."""
    if name in _V_SHAPED:
        return rank, 2 * ranks - 1 - rank
    return tuple(rank + virtual_stage * ranks for virtual_stage in range(virtual_stages))


def forwards_open(name: str, ranks: int, microbatches: int, virtual_stages: int) -> tuple[int, ...]:
    order = torch_order(name, ranks, microbatches, virtual_stages)
    # A rank's own order decides how many are open, so any times do.
    replay = replay_pipeline(order, [StageCosts(1.0, 1.0, 1.0)] * (ranks * virtual_stages))
    return tuple(rank.most_open for rank in replay.ranks)


def one_stage_rings(name: str, stage: int, stages: int, microbatches: int) -> tuple[int, int]:
    """Receive buffers for inputs and for gradients, of a schedule with one stage a rank."""
    # GPipe runs all forwards first; under 1F1B as many are open as stages are left to the end.
    in_flight = microbatches if name == "GPipe" else min(microbatches, stages - stage)
    return in_flight, min(microbatches, _LEAST_GRADIENTS)


def rings_of(
    actions: Sequence[Any], stage: int, microbatches: int, *, keeps_inputs: bool
) -> tuple[int, int]:
    """The same of a rank's actions, transfers included (torch's `pipeline_order_with_comms`)."""
    flat = [action for one in actions for action in (one.sub_actions or (one,))]
    inputs = _spans(flat, stage, microbatches, ("RECV_F", "F"))
    gradients = _spans(flat, stage, microbatches, ("RECV_B", "B", "I"))
    sizes = ring_size(inputs), max(ring_size(gradients), _LEAST_GRADIENTS)
    # Where torch makes a gradient of inputs apart, it adds it to what is there, so inputs stay with
    # their microbatch.
    return (microbatches if keeps_inputs else sizes[0]), min(sizes[1], microbatches)


def _spans(
    actions: Sequence[Any], stage: int, microbatches: int, begins: tuple[str, ...]
) -> Iterable[tuple[int, int]]:
    """From what first touches a microbatch's buffer to the last action that may read it."""
    for microbatch in range(microbatches):
        at = {
            action.computation_type.value: i
            for i, action in enumerate(actions)
            if (action.stage_index, action.microbatch_index) == (stage, microbatch)
        }
        first = min(at[kind] for kind in begins if kind in at)
        last = max(at[kind] for kind in ("B", "I", "W", "SEND_B") if kind in at)
        yield first, last
