"""Ranks that rewrite a model with collectives by themselves: their plans must run these alike."""

from __future__ import annotations

import hashlib

import torch.distributed as dist
from torch import fx

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.over_ranks.collectives import (
    collectives_in,
    groups_of,
    is_collective_target,
)
from remat.ranks.required_group import resolved
from remat.ranks.together import Together, are_together
from remat.schedules.schedule import Compute, Schedule


def require_same_order(joint: fx.GraphModule, graph: TrainingGraph, schedule: Schedule) -> None:
    """Refuse a plan whose collectives are run in another order, or as often, on other ranks.

    Ranks that are in one call already have one plan. Others come together here: each rank of the
    groups must rewrite the model, in the same order as the others.

    Raises
    ------
    AgreementError : their orders differ, or a rank does not come within the group's timeout.
    """
    groups = tuple(dict.fromkeys(map(resolved, groups_of(collectives_in(joint)))))
    several = [group for group in groups if group.size() > 1 and dist.get_backend(group) != "fake"]
    if not several or are_together():
        return
    known = {op.name for op in graph.ops if is_collective_target(op.target)}
    runs = [s.op for s in schedule.steps if isinstance(s, Compute) and s.op in known]
    order = hashlib.sha256(" ".join(runs).encode()).hexdigest()
    for group in several:
        with Together(group, "remat.rewrite") as ranks:
            ranks.require_same_order(order)
