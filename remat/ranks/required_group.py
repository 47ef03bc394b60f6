"""Models with collectives: all ranks that take part must plan together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import fx

from remat.graph_capture.errors import AgreementError
from remat.graph_capture.joint.nodes import Places, target_name
from remat.graph_capture.over_ranks.collectives import collectives_in, groups_of
from remat.graph_capture.over_ranks.fake_group import is_fake

PASS_A_GROUP = (
    "pass a group that has them all, such as group=torch.distributed.group.WORLD, and call on each "
    "of them"
)
ONE_RANK = "{what} is for one rank. Use remat.rematerialize(model, args, budget=..., group=...)"


def require_group(
    joint: fx.GraphModule, group: dist.ProcessGroup | None, way: str = PASS_A_GROUP
) -> None:
    """Refuse a step whose collectives need ranks that do not plan with this one.

    By itself, a rank cannot tell the others that it has failed or runs no check, and they would
    wait for it in the first collective.

    Parameters
    ----------
    way : what to do.

    Raises
    ------
    AgreementError : names the collective, its place, and the group to pass.
    """
    together = set() if group is None else set(dist.get_process_group_ranks(group))
    for node in collectives_in(joint):
        ranks = ranks_of(groups_of([node]))
        if len(ranks) > 1 and not together.issuperset(ranks):
            module, line = Places(joint.graph).of(node)
            raise AgreementError(
                f"{target_name(node)} of module {module or '(root)'} ({line or 'unknown line'}) "
                f"needs ranks {', '.join(map(str, ranks))}, which must plan together, or some "
                f"would wait for others that have failed: {way}"
            )


def refuse_fake(group: dist.ProcessGroup | None) -> None:
    """Raise `AgreementError` for torch's fake group, in which there are no other ranks."""
    if group is not None and is_fake(group):
        raise AgreementError(
            "the group is torch's fake one, whose collectives move nothing, so nothing can be "
            "trained or checked: plan there by remat.capture and remat.solve, and rewrite on ranks"
        )


def ranks_of(groups: tuple[Any, ...]) -> list[int]:
    """All ranks of some groups, which are given by name or as they are."""
    found = [dist.get_process_group_ranks(resolved(group)) for group in groups]
    return sorted(set().union(*found))


def resolved(group: Any) -> dist.ProcessGroup:
    """A group as it is, or by its name."""
    named: Any = dist.distributed_c10d
    return named._resolve_process_group(group) if isinstance(group, str) else group
