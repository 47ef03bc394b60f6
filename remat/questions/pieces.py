"""What runs in pieces under a plan, and what that takes in place of what it took whole."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from remat.formats import bytes_text, percent_text
from remat.graph_capture.graph import Op, PartKind, TrainingGraph
from remat.schedules.as_planned import as_planned, choice_of
from remat.schedules.schedule import Schedule


class InPieces(msgspec.Struct, frozen=True):
    """A region that runs in pieces.

    Attributes
    ----------
    region : its name. module : of its first op. pieces : their number. kinds : what it consists of.
    exact : whether they give eager's bits.
    whole_bytes, pieces_bytes : the most that its ops hold of their own, whole and in pieces.
    extra : time of each of its ops once, beyond that of the captured ones, as a part of the step.
    """

    region: str
    module: str
    pieces: int
    exact: bool
    whole_bytes: int
    pieces_bytes: int
    extra: float
    kinds: tuple[PartKind, ...] = ("head",)

    @property
    def name(self) -> str:
        """``head and its loss in 8 pieces``, ``MLPs in 8 pieces``."""
        what = f"{self.module or self.region} and its loss"
        if "mlp" in self.kinds:
            what = "MLPs" if self.kinds == ("mlp",) else "MLPs, and heads with their losses,"
        return f"{what} in {self.pieces} pieces"

    def __str__(self) -> str:
        bits = "to eager's bits" if self.exact else "with sums in another order"
        return (
            f"{self.name}, {bits}: "
            f"{bytes_text(self.pieces_bytes)} in place of {bytes_text(self.whole_bytes)}, for "
            f"{percent_text(self.extra)} of the step"
        )


def pieces_of(graph: TrainingGraph, schedule: Schedule | None) -> tuple[InPieces, ...]:
    """Each region that `schedule` runs in pieces; `graph` is the captured one."""
    if schedule is None or not graph.regions:
        return ()
    planned = as_planned(graph, schedule)
    regions = {region.name: region for region in graph.regions}
    found: list[InPieces] = []
    for one in schedule.pieces:
        names = set(regions[one.region].ops)
        whole = [op for op in graph.ops if op.name in names]
        ours = [op for _, op in choice_of(graph, one).ops]
        extra_us = sum(op.cost_us for op in ours) - sum(op.cost_us for op in whole)
        found.append(
            InPieces(
                one.region, whole[0].module, one.pieces, one.exact,
                _own_bytes(graph, whole), _own_bytes(planned, ours), extra_us / graph.time_us,
                regions[one.region].kinds,
            )
        )  # fmt: skip
    return tuple(found)


def _own_bytes(graph: TrainingGraph, ops: Sequence[Op]) -> int:
    """The most that one of `ops` has live of what they make and of its workspace."""
    size = {name: graph.value_by_name[name].size_bytes for op in ops for name in op.outputs}
    return max(
        op.workspace_bytes + sum(size.get(name, 0) for name in {*op.inputs, *op.outputs})
        for op in ops
    )
