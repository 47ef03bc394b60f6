"""Live bytes through the step, taken apart: by what the bytes are for, or by module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.views.module_groups import place_of
from remat.schedules.views.timeline import Ints, Timeline

By = Literal["kind", "module"]

RESIDENT, WORKSPACE, OTHERS = "resident", "workspace", "others"
MOST = 6
"""How many modules have a band of their own: as many as the palette has colours for."""


def live_bands(line: Timeline, by: By = "kind") -> dict[str, Ints]:
    """Bytes live during each run, [runs], by name; at each run they sum to `line.live_bytes`.

    ``resident`` comes first: no schedule changes it. ``workspace`` comes last: what the op takes
    while it runs, and the second copy of a value that it makes again. Between them are the kinds
    of values, or the modules that make them, largest first.
    """
    groups = _groups(line.graph, by)
    curves = _curves(line, groups)
    resident = np.full(len(line), line.graph.resident.total_bytes, dtype=np.int64)
    held = sum(curves.values(), resident)
    ranked = sorted(curves, key=lambda name: -int(curves[name].sum()))
    bands = {RESIDENT: resident} | {name: curves[name] for name in ranked[:MOST]}
    if ranked[MOST:]:
        bands[OTHERS] = sum((curves[name] for name in ranked[MOST:]), np.zeros_like(resident))
    # The workspace is what no value accounts for, so the bands cannot but sum to the simulator's.
    return bands | {WORKSPACE: line.live_bytes - held}


def _groups(graph: TrainingGraph, by: By) -> Mapping[str, str]:
    """The group of each value that an op makes."""
    made = [value for value in graph.values if value.producer]
    if by == "kind":
        return {value.name: value.kind for value in made}
    module = {op.name: op.module for op in graph.ops}
    return {value.name: place_of(module[value.producer]) for value in made}


def _curves(line: Timeline, groups: Mapping[str, str]) -> dict[str, Ints]:
    changes: dict[str, Ints] = {}
    for stay in line.residences:
        group = groups[stay.value]
        change = changes.setdefault(group, np.zeros(len(line) + 1, dtype=np.int64))
        size_bytes = line.graph.value_by_name[stay.value].size_bytes
        change[stay.begin] += size_bytes
        change[stay.end] -= size_bytes
    return {group: np.cumsum(change)[:-1] for group, change in changes.items()}
