"""The form of the page's data: columns of plain numbers and names, each text once.

The page's charts are drawn from one JSON object of this form. Tests compare it with `simulate`.
"""

from __future__ import annotations

import msgspec

from remat.schedules.report.facts import Alternative


class Summary(msgspec.Struct, frozen=True):
    """The figures of the plan, each from `simulate`, and of the step that it replaces."""

    peak_bytes: int
    time_us: float
    overhead: float
    budget_bytes: int
    lower_bound_us: float
    gap: float | None
    unmodified_peak_bytes: int
    unmodified_time_us: float
    resident_bytes: int
    workspace_at_peak_bytes: int
    runs: int
    runs_again: int
    again_us: float
    measured_peak_bytes: int | None = None
    measured_time_us: float | None = None
    stall_us: float = 0.0


class Texts(msgspec.Struct, frozen=True):
    """Each text once, and where it is used."""

    texts: list[str]
    index: list[int]


class Ops(msgspec.Struct, frozen=True):
    """Ops in captured order, a column a fact; `backward` is 0 or 1."""

    name: list[str]
    target: Texts
    module: Texts
    source: Texts
    cost_us: list[float]
    backward: list[int]


class Values(msgspec.Struct, frozen=True):
    """Values that ops make; `producer` is an index into the ops."""

    name: list[str]
    size_bytes: list[int]
    producer: list[int]
    kind: Texts
    shape: Texts


class Runs(msgspec.Struct, frozen=True):
    """Runs in order: which op, and what is live meanwhile. `again` is 1 if the op ran before.

    `edges` are where runs begin, and where the last one ends: one entry more than there are runs.
    """

    op: list[int]
    edges: list[float]
    live_bytes: list[int]
    again: list[int]


class Stays(msgspec.Struct, frozen=True):
    """Value `value` is live from run `begin` to before run `end`."""

    value: list[int]
    begin: list[int]
    end: list[int]


class Band(msgspec.Struct, frozen=True):
    """One band of the timeline. Its bytes at a run are the sum of `changes` up to that run.

    Changes are mostly 0, which is short: the page of a step of 6,000 ops has 1.9 MB.
    """

    name: str
    colour: str
    changes: list[int]


class Curve(msgspec.Struct, frozen=True):
    """Bytes live from each moment on."""

    edges: list[float]
    live_bytes: list[int]


class RibbonRows(msgspec.Struct, frozen=True):
    """Titles of rows, and spans in them, each as three numbers: row, begin, end."""

    titles: list[str]
    spans: dict[str, list[int]]


class Page(msgspec.Struct, frozen=True):
    """All that the page's script draws; `bound_name` says whose bounds the fronts have."""

    model: str
    axis: str
    summary: Summary
    peak_run: int
    forward_runs: int
    ops: Ops
    values: Values
    runs: Runs
    stays: Stays
    bands: dict[str, list[Band]]
    unmodified: Curve
    measured: Curve | None
    ribbon: RibbonRows
    rules: list[Alternative]
    fronts: dict[str, list[Alternative]]
    colours: dict[str, str]
    bound_name: str = "bound"
