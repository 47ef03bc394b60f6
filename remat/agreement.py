"""One plan for all ranks: the first rank makes it, after all have compared their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from remat.graph_capture import errors
from remat.graph_capture.errors import AgreementError, RematError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Plan = TypeVar("Plan")


def agreed(
    make: Callable[[], Plan], kind: type[Plan], graph_hash: str, group: ProcessGroup | None
) -> Plan:
    """What `make` returns on the first rank of `group`; without a group, what it returns here.

    Each rank times ops by itself, so plans that ranks made by themselves would differ. Nothing is
    exchanged without a group: ranks of a pipeline have different models and must not wait.

    Parameters
    ----------
    make : called on the first rank only. kind : the msgspec struct that it returns.
    graph_hash : of the step on this rank.

    Raises
    ------
    AgreementError : ranks have another step than the first; names them.
    RematError : what `make` raised on the first rank, on every rank.
    """
    if group is None:
        return make()
    _require_same_step(graph_hash, group)
    import torch.distributed as dist

    said: list[Any] = [None]
    if dist.get_rank(group) == 0:
        said = [_outcome(make)]
    dist.broadcast_object_list(said, group=group, group_src=0)
    name, text = said[0]
    if name:
        raise getattr(errors, name)(text)
    return msgspec.json.decode(text, type=kind)


def _outcome(make: Callable[[], Any]) -> tuple[str, Any]:
    """The plan as JSON, or the name and text of the error; the others wait for either."""
    try:
        return "", msgspec.json.encode(make())
    except RematError as error:
        return type(error).__name__, str(error)


def _require_same_step(graph_hash: str, group: ProcessGroup) -> None:
    import torch.distributed as dist

    hashes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hashes, graph_hash, group=group)
    others = [str(rank) for rank, found in enumerate(hashes) if found != hashes[0]]
    if others:
        raise AgreementError(
            f"the step captured on rank {', '.join(others)} is not that of rank 0, so no plan can "
            "serve both: build the same model, and pass a batch of the same shapes, on all ranks"
        )
