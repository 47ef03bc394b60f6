"""The table of levers, and what a schedule says of those that changed which ops run.

A machine that trains imports no solver, and a plan file names rows, never code.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from remat.graph_capture.eager_step import changes_between, with_ops_replaced
from remat.graph_capture.graph import Op, TrainingGraph, Value


class Lever(NamedTuple):
    """Where the halves of a lever are, each as ``module:name``."""

    reduction: str = ""  # a `Reduction`, which changes the question; empty where `change` is there
    # From graph and value of `option` to the changed graph, and what the emitter is told. Ops that
    # stay as they are must stay in their order.
    change: str = ""
    emitter: str = ""  # changes the joint fx graph alike; empty where the ops stay as they are
    option: str = ""  # of `remat.solve`, which asks for `change`
    tolerance: float = 0.0  # of a result from eager's, as a part of its norm; 0 for eager's bits


REDUCTIONS: dict[str, Lever] = {
    "whole regions": Lever("remat.solver.reductions.chunked_regions:WholeRegions"),
    "chunks": Lever(
        "remat.solver.reductions.chunked_regions:ChunkedRegions",
        emitter="remat.graph_capture.chunking.replace:chunk_parts",
    ),
    "updates": Lever("remat.solver.reductions.updates:UpdatePlacement"),
    "without copies": Lever("remat.solver.reductions.other_answers:WithoutCopies"),
    "simple rules": Lever("remat.solver.reductions.other_answers:SimpleRules"),
    "pins": Lever("remat.solver.reductions.pins:PinnedOps"),
}
"""Outermost first: the emitter of the first of two levers runs first. Those that are `AppliedLever`
stand before the chunks; a schedule has them or chunks."""


def attribute_at(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


class AppliedLever(msgspec.Struct, frozen=True):
    """A lever that changed which ops run, and how.

    Attributes
    ----------
    lever : its name in `REDUCTIONS`. told : what its emitter is told, such as names of values.
    dropped : ops of the graph that it replaces.
    ops : those that run in their place: each after the name of the op before which it stands;
        empty for the end. values : those that these ops make.
    tolerance : how far a result may be from eager's, as a part of its norm; 0 for eager's bits.
    """

    lever: str
    told: tuple[str, ...]
    dropped: tuple[str, ...]
    ops: tuple[tuple[str, Op], ...]
    values: tuple[Value, ...]
    tolerance: float = 0.0

    @classmethod
    def between(
        cls, lever: str, before: TrainingGraph, after: TrainingGraph, told: Iterable[str],
        tolerance: float = 0.0,
    ) -> AppliedLever:  # fmt: skip
        dropped, ops = changes_between(before, after)
        made = {name for _, op in ops for name in op.outputs}
        values = tuple(value for value in after.values if value.name in made)
        return cls(lever, tuple(told), dropped, ops, values, tolerance)

    def on(self, graph: TrainingGraph) -> TrainingGraph:
        return with_ops_replaced(graph, self.dropped, self.ops, self.values)
