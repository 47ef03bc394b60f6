"""The actions of a pipeline's ranks, in the text form of `torch.distributed.pipelining`.

Torch writes an action as stage, kind and microbatch: ``2F0``; two that run together as
``(0F1;3B2)OVERLAP_F_B``. Kinds are F for forward, B for a whole backward, I for the gradients of a
stage's input, and W for those of its weights. What moves data or shards has no place here: a
neighbour's result is waited for, and costs its way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, cast

from remat.graph_capture.errors import ScheduleError

ActionKind = Literal["F", "B", "I", "W"]
_ONE = re.compile(r"(\d+)([A-Z_]+?)(\d*)")
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")
_OTHERS = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B")


class PipelineAction(NamedTuple):
    """One computation of a stage with one microbatch."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Together = tuple[PipelineAction, ...]
"""Actions that a rank begins at once; mostly one."""
RankOrder = tuple[Together, ...]
"""What one rank runs, in order."""


def parse_order(texts: Iterable[Iterable[str | None]]) -> tuple[RankOrder, ...]:
    """The order of each rank, from torch's text; empty texts are steps without an action.

    Raises
    ------
    ScheduleError : a text is no action.
    """
    return tuple(
        tuple(found for text in rank if text for found in (_parsed(text),) if found)
        for rank in texts
    )


def _parsed(text: str) -> Together:
    together = _TOGETHER.fullmatch(text)
    parts = together[1].split(";") if together else [text]
    return tuple(action for part in parts if (action := _parsed_one(part)) is not None)


def _parsed_one(text: str) -> PipelineAction | None:
    match = _ONE.fullmatch(text.strip())
    if match is not None and match[2] in _OTHERS:
        return None
    if match is None or match[2] not in ("F", "B", "I", "W") or not match[3]:
        raise ScheduleError(f"{text!r} is no action of a pipeline: write it like 2F0")
    return PipelineAction(int(match[1]), cast("ActionKind", match[2]), int(match[3]))
