"""The kinds of regions that may run in pieces: heads with their losses, and MLPs."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch import fx

from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.splitting.finding_mlps import find_mlps
from remat.graph_capture.splitting.heads import Head, find_heads
from remat.graph_capture.splitting.mlps import Mlp
from remat.graph_capture.splitting.replaced_head import replace_head
from remat.graph_capture.splitting.replaced_mlp import replace_mlp

Part = Head | Mlp
"""What runs in pieces by itself. A region has one or more, which run in the same number."""


def find_parts(graph: fx.Graph, names: Container[str] | None = None) -> list[Part]:
    """The parts of these names, or all; heads first. An MLP that ends in a head is none."""
    heads = find_heads(graph)[0]
    of_heads = {node for head in heads for node in (*head.forward, *head.backward)}
    mlps = [one for one in find_mlps(graph) if of_heads.isdisjoint((*one.forward, *one.backward))]
    return [one for one in (*heads, *mlps) if names is None or one.name in names]


def replace_part(part: Part, pieces: int, is_exact: bool) -> list[fx.Node]:
    """Put ops that run in `pieces` in the place of `part`; returns them, forward first."""
    if isinstance(part, Head):
        return replace_head(part, pieces, is_exact)
    return replace_mlp(part, pieces)


def split_parts(graph: fx.Graph, pieces: Iterable[tuple[str, int, bool]]) -> None:
    """Let parts run in pieces: those of these names, how many, and whether exactly.

    Raises
    ------
    ScheduleError : the step has no part of such a name.
    """
    wanted = {name: (count, is_exact) for name, count, is_exact in pieces}
    for part in find_parts(graph, frozenset(wanted)) if wanted else []:
        replace_part(part, *wanted.pop(part.name))
    if wanted:
        raise ScheduleError(
            f"this plan runs {', '.join(wanted)} in pieces, and the step has no linear head with "
            "its loss, and no MLP, of that name any more: plan again"
        )
