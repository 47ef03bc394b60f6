"""Ranks that rewrite a model with collectives by themselves: their plans must run these alike.

By `Plan.apply` each follows its own plan: orders are compared before a step can wait for ever.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import fx, nn

from remat.graph_capture.distributed.collectives import (
    collectives_in,
    groups_of,
    is_fake,
    resolved_group,
)
from remat.graph_capture.errors import AgreementError
from remat.graph_capture.joint.nodes import NodeOrigins, target_name
from remat.ranks.collective_call import CollectiveCall
from remat.rewriter.plans import loading
from remat.rewriter.rewriting import rewrite as rewrite_alone
from remat.rewriter.user_module.module import RematModule

_Told = TypeVar("_Told")
_PASS_A_GROUP = (
    "pass a group of all these ranks, such as group=torch.distributed.group.WORLD, and call on each"
)
ONE_RANK = "use remat.rematerialize(model, args, budget=..., group=...), as {what} is for one rank"


def require_group(
    joint: fx.GraphModule, group: dist.ProcessGroup | None, way: str = _PASS_A_GROUP
) -> None:
    """`AgreementError` for a step whose collectives need ranks that do not plan with this one."""
    together = set() if group is None else set(dist.get_process_group_ranks(group))
    for node in collectives_in(joint):
        groups = map(resolved_group, groups_of([node]))
        ranks = sorted(set[int]().union(*map(dist.get_process_group_ranks, groups)))
        # A rank alone cannot say that it failed: others would wait in the first collective.
        if len(ranks) > 1 and not together.issuperset(ranks):
            module, line = NodeOrigins(joint.graph).of(node)
            raise AgreementError(
                f"{way}: {target_name(node)} of module {module or '(root)'} "
                f"({line or 'unknown line'}) needs ranks {', '.join(map(str, ranks))}, which must "
                "plan together, or some would wait for others that have failed"
            )


def refuse_fake(group: dist.ProcessGroup | None) -> None:
    """Raise `AgreementError` for torch's fake group, in which there are no other ranks."""
    if group is not None and is_fake(group):
        raise AgreementError(
            "plan with remat.capture and remat.solve, and rewrite on real ranks: this is torch's "
            "fake group, whose collectives move nothing, so nothing can be trained or checked"
        )


def any_of(group: dist.ProcessGroup, said: bool, model: nn.Module) -> bool:
    """Whether any rank says so; every rank must call. The host waits for one number."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    flag = torch.tensor(said, dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def gathered(group: dist.ProcessGroup, mine: _Told) -> list[_Told]:
    """What each rank tells, in their order; every rank must call."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def _agreed(make: Callable[_Given, _Made], what: str) -> Callable[_Given, _Made]:
    @functools.wraps(make)
    def compared(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        made = make(*args, **kwargs)
        module: Any = made
        if isinstance(module, RematModule):
            run = [*collectives_in(module.forward_module), *collectives_in(module.backward_module)]
            # Nodes of one trace have the same names on each rank, whatever schedule it follows.
            order = hashlib.sha256(" ".join(f"{node.name}" for node in run).encode()).hexdigest()
            for group in dict.fromkeys(map(resolved_group, groups_of(run))):
                if group.size() > 1 and not is_fake(group):
                    with CollectiveCall(group, what) as ranks:
                        ranks.require_same_order(order)
        return made

    return compared


agreed_rewrite = _agreed(rewrite_alone, "Plan.apply")
agreed_load = _agreed(loading.load_plan, "Plan.apply")


def agree_on_audits(ranks: CollectiveCall, modules: Iterable[nn.Module]) -> None:
    """Let ranks audit steps in which they meet, if all of them are to; else let none of them."""
    audits = [type(m)._remat_audit for m in modules if isinstance(m, RematModule)]
    # Ranks of one plan run it equally often, so they agree once. One alone would wait in an audit.
    is_agreed = ranks.all_agree("audit", all(audit is not None for audit in audits))
    for audit in filter(None, audits):
        audit.is_agreed = is_agreed
