"""The actions that torch's own pipeline schedules run on each rank, for the judge of pipelines.

Torch makes them in the constructors of its schedules, out of a few facts of a stage. They are asked
with a stage that has those facts and no module, so no rank is needed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from remat.graph_capture.errors import ScheduleError
from remat.schedules.pipeline.actions import RankOrder, parse_order

ONE_STAGE = ("GPipe", "1F1B")
"""Schedules with one stage a rank; the others have several."""


def torch_order(name: str, ranks: int, microbatches: int, chunks: int = 1) -> tuple[RankOrder, ...]:
    """What each rank runs.

    Parameters
    ----------
    name : as `get_schedule_class` of torch knows it, such as ``1F1B`` or ``Interleaved1F1B``.
    chunks : stages of a rank.

    Raises
    ------
    ScheduleError : torch has no such schedule, or it does not take these numbers.
    """
    try:
        kind: Any = torch_schedules.get_schedule_class(name)
        made = (
            kind(_stage(0, 0, ranks, ranks), microbatches)
            if name in ONE_STAGE
            else kind([_stage(0, i, ranks, ranks * chunks) for i in range(chunks)], microbatches)
        )
    except (ValueError, AssertionError) as error:
        raise ScheduleError(
            f"torch's schedule {name} does not take {microbatches} microbatches on {ranks} ranks "
            f"with {chunks} stages each: {error}"
        ) from error
    order = made.pipeline_order
    read = parse_order(
        [None if action is None else str(action) for action in order[rank]]
        for rank in sorted(order)
    )
    return tuple(map(_from_0, read)) if name == "1F1B" else read


def _from_0(rank: RankOrder) -> RankOrder:
    """With forwards numbered from 0 on.

    Torch's list of 1F1B begins with microbatch 1 on the last rank, which has no forward before the
    first pair. What torch runs there begins with 0.
    """
    forwards = [a.microbatch for together in rank for a in together if a.kind == "F"]
    shift = min(forwards, default=0)
    return tuple(
        tuple(a._replace(microbatch=a.microbatch - shift * (a.kind == "F")) for a in together)
        for together in rank
    )


def _stage(rank: int, index: int, ranks: int, stages: int) -> Any:
    """What the constructors read of a stage."""
    return SimpleNamespace(
        num_stages=stages, group_size=ranks, group_rank=rank, stage_index=index, submod=None,
        stage_index_to_group_rank={}, is_first=index == 0, is_last=index == stages - 1,
        has_backward=True, device="cpu",
    )  # fmt: skip
