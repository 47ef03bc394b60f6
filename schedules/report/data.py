"""The data of the page, made of what is known of a plan. Its form is in `columns`."""

from __future__ import annotations

from collections.abc import Iterable

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.plots.live_bytes import band_colours
from remat.schedules.report.columns import (
    Band,
    Curve,
    Ops,
    Page,
    RibbonRows,
    Runs,
    Stays,
    Summary,
    Texts,
    Values,
)
from remat.schedules.report.facts import Facts
from remat.schedules.simulate import gap_of
from remat.schedules.views.live_bands import By, live_bands
from remat.schedules.views.palette import KINDS, ROLES, cycled
from remat.schedules.views.ribbon import Span, ribbon
from remat.schedules.views.timeline import Floats, Timeline, timeline

DIGITS = 6
"""Digits of times in ms after the point, which is to the nanosecond."""


def page_data(facts: Facts) -> Page:
    """The data of the page of a plan.

    Raises
    ------
    ScheduleError : a schedule was not made for its graph, or is invalid.
    """
    line = timeline(facts.graph, facts.schedule)
    eager = timeline(facts.unmodified_graph, facts.unmodified_schedule)
    colours = cycled([name for name, _ in facts.fronts])
    return Page(
        model=facts.graph.name,
        axis=line.axis_title,
        summary=summary_of(facts, line, eager),
        peak_run=line.peak_run,
        forward_runs=line.forward_runs,
        ops=_ops(facts.graph),
        values=_values(facts.graph),
        runs=_runs(line),
        stays=_stays(line),
        bands={by: _bands(line, by) for by in ("kind", "module")},
        unmodified=Curve(_rounded(eager.edges), eager.live_bytes.tolist()),
        measured=_measured(facts, line),
        ribbon=_ribbon(line),
        rules=list(facts.rules),
        fronts={name: list(points) for name, points in facts.fronts},
        colours=ROLES | {f"front {name}": colour for name, colour in colours.items()},
        bound_name=facts.bound_name,
    )


def summary_of(facts: Facts, line: Timeline, eager: Timeline) -> Summary:
    """The figures of the plan."""
    found, bound_us = line.simulation, facts.lower_bound_us
    return Summary(
        peak_bytes=found.peak_bytes,
        time_us=found.time_us,
        overhead=found.overhead,
        budget_bytes=facts.budget_bytes,
        lower_bound_us=bound_us,
        gap=gap_of(found.time_us, bound_us),
        unmodified_peak_bytes=eager.simulation.peak_bytes,
        unmodified_time_us=eager.simulation.time_us,
        resident_bytes=facts.graph.resident.total_bytes,
        workspace_at_peak_bytes=found.workspace_at_peak_bytes,
        runs=len(line),
        runs_again=int(line.again.sum()),
        again_us=found.time_us - found.stall_us - facts.graph.time_us,
        stall_us=found.stall_us,
        measured_peak_bytes=facts.measured.peak_bytes if facts.measured else None,
        measured_time_us=facts.measured.time_us if facts.measured else None,
    )


def _texts(texts: Iterable[str]) -> Texts:
    places: dict[str, int] = {}
    index = [places.setdefault(text, len(places)) for text in texts]
    return Texts(list(places), index)


def _ops(graph: TrainingGraph) -> Ops:
    return Ops(
        name=[op.name for op in graph.ops],
        target=_texts(op.target for op in graph.ops),
        module=_texts(op.module for op in graph.ops),
        source=_texts(op.source for op in graph.ops),
        cost_us=[round(op.cost_us, 3) for op in graph.ops],
        backward=[int(op.phase == "backward") for op in graph.ops],
    )


def _values(graph: TrainingGraph) -> Values:
    made = [value for value in graph.values if value.producer]
    return Values(
        name=[value.name for value in made],
        size_bytes=[value.size_bytes for value in made],
        producer=[graph.op_index[value.producer] for value in made],
        kind=_texts(value.kind for value in made),
        shape=_texts(f"{value.dtype}{list(value.shape)}" for value in made),
    )


def _rounded(edges: Floats) -> list[float]:
    return [round(edge, DIGITS) for edge in edges.tolist()]


def _runs(line: Timeline) -> Runs:
    return Runs(
        op=line.ops.tolist(),
        edges=_rounded(line.edges),
        live_bytes=line.live_bytes.tolist(),
        again=[int(again) for again in line.again],
    )


def _stays(line: Timeline) -> Stays:
    made = [value.name for value in line.graph.values if value.producer]
    place = {name: i for i, name in enumerate(made)}
    stays = line.residences
    return Stays(
        value=[place[stay.value] for stay in stays],
        begin=[stay.begin for stay in stays],
        end=[stay.end for stay in stays],
    )


def _bands(line: Timeline, by: By) -> list[Band]:
    bands = {name: curve for name, curve in live_bands(line, by).items() if curve.any()}
    colours = band_colours(list(bands), by)
    return [
        Band(name, colours.get(name, KINDS["resident"]), _changes(curve.tolist()))
        for name, curve in bands.items()
    ]


def _changes(curve: list[int]) -> list[int]:
    return [after - before for before, after in zip([0, *curve], curve, strict=False)]


def _measured(facts: Facts, line: Timeline) -> Curve | None:
    """The measured curve, over the length of the predicted step."""
    step = facts.measured
    if step is None or not len(step.moments):
        return None
    moments = step.moments * (line.edges[-1] / step.moments[-1])
    return Curve(_rounded(moments), step.live_bytes.tolist())


def _ribbon(line: Timeline) -> RibbonRows:
    picture = ribbon(line)
    kinds = ("holds", "holds_most", "forward", "backward", "recompute")
    return RibbonRows(list(picture.titles), {kind: _flat(getattr(picture, kind)) for kind in kinds})


def _flat(spans: tuple[Span, ...]) -> list[int]:
    return [number for span in spans for number in (span.row, span.begin, span.end)]
