"""The picture of a layout on the page: an SVG of addresses against time, which needs no script."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from remat.formats import bytes_text, percent_text
from remat.schedules.report.facts import Facts
from remat.schedules.views.addresses import Addresses, Box, addresses
from remat.schedules.views.palette import DARK_GREY, GREY, KINDS

WIDTH, HEIGHT = 2000, 700
"""Units of the picture: whole numbers keep the page small."""
NAMED = 150
"""Boxes that say what they are when pointed at, the largest."""
TICKS = 5


class Shape(NamedTuple):
    """Rectangles of one colour as the path of an SVG; `title` is empty for those without a name."""

    name: str
    colour: str
    path: str
    title: str = ""


class Tick(NamedTuple):
    """A mark at the axis of addresses."""

    y: float
    text: str


class ArenaPicture(NamedTuple):
    """What the page draws of a layout.

    Attributes
    ----------
    shapes : rectangles, in the order in which they are drawn. legend : names with colours.
    live : the path of the bytes live at each time. load_y : where the most of them are.
    says : the sizes, in words.
    """

    shapes: tuple[Shape, ...]
    legend: tuple[tuple[str, str], ...]
    live: str
    load_y: int
    ticks: tuple[Tick, ...]
    says: str
    width: int = WIDTH
    height: int = HEIGHT


def arena_picture(facts: Facts) -> ArenaPicture | None:
    """The picture; None where there is no layout, or nothing in its arena.

    Raises
    ------
    LayoutError : the layout is of another step, or invalid.
    """
    if facts.layout is None:
        return None
    found = addresses(facts.graph, facts.schedule, facts.layout)
    if not found.layout.arena_bytes:
        return None
    scale = _Scale(found)
    named, others = found.boxes[:NAMED], found.boxes[NAMED:]
    small = Shape(SMALL, GREY, "".join(scale.path(*one) for one in found.merged))
    kinds = [kind for kind in KINDS if any(box.kind == kind for box in found.boxes)]
    legend = [(kind, _colour(kind)) for kind in kinds]
    return ArenaPicture(
        shapes=(
            *([small] if found.merged else []),
            *_of_kinds(scale, kinds, others),
            *(_named(scale, box) for box in named),
        ),
        legend=(*legend, *([(SMALL, GREY)] if found.merged else [])),
        live=_live_path(scale, found),
        load_y=scale.y(found.layout.load_bytes),
        ticks=_ticks(scale, found.layout.arena_bytes),
        says=_says(found),
    )


SMALL = "small, merged"


def _colour(kind: str) -> str:
    # What is merged is grey; so is nothing else in an arena, where nothing is resident.
    return KINDS.get(kind, DARK_GREY)


class _Scale:
    """From times and bytes to units of the picture; addresses grow upwards."""

    def __init__(self, of: Addresses) -> None:
        self.n_times, self.arena_bytes = of.buffers.n_times, of.layout.arena_bytes

    def x(self, time: float) -> int:
        return round(time * WIDTH / self.n_times)

    def y(self, address: float) -> int:
        return HEIGHT - round(address * HEIGHT / self.arena_bytes)

    def path(self, start: float, end: float, low: float, high: float) -> str:
        """One rectangle, of a unit at least."""
        x, y = self.x(start), self.y(high)
        width, height = max(self.x(end) - x, 1), max(self.y(low) - y, 1)
        return f"M{x} {y}h{width}v{height}h-{width}z"


def _of_kinds(scale: _Scale, kinds: Iterable[str], boxes: Iterable[Box]) -> Iterable[Shape]:
    """The boxes of each kind as one shape."""
    paths: dict[str, list[str]] = {kind: [] for kind in kinds}
    for box in boxes:
        paths[box.kind].append(scale.path(box.start, box.end, box.low, box.high))
    return [Shape(kind, _colour(kind), "".join(path)) for kind, path in paths.items() if path]


def _named(scale: _Scale, box: Box) -> Shape:
    title = (
        f"{box.name}, {box.kind}, {bytes_text(box.high - box.low)} at {bytes_text(box.low)}, "
        f"runs {box.start + 1} to {box.end}"
    )
    path = scale.path(box.start, box.end, box.low, box.high)
    return Shape(box.kind, _colour(box.kind), path, title)


def _live_path(scale: _Scale, of: Addresses) -> str:
    """Steps along the most bytes that are live at the times of each unit of width."""
    live = of.buffers.live_bytes
    at = np.array([scale.x(time) for time in range(len(live))])
    firsts = np.flatnonzero(np.diff(at, prepend=-1))
    tops = np.maximum.reduceat(live, firsts)
    return "".join(
        f"{'L' if i else 'M'}{at[first]} {scale.y(int(top))}H{end}"
        for i, (first, top, end) in enumerate(
            zip(firsts, tops, [*at[firsts[1:]], WIDTH], strict=True)
        )
    )


def _ticks(scale: _Scale, arena_bytes: int) -> tuple[Tick, ...]:
    marks = [arena_bytes * i // (TICKS - 1) for i in range(TICKS)]
    return tuple(Tick(scale.y(mark), bytes_text(mark) if mark else "0") for mark in marks)


def _says(of: Addresses) -> str:
    layout = of.layout
    return (
        f"{len(of.buffers)} buffers in an arena of {bytes_text(layout.arena_bytes)}, "
        f"{percent_text(layout.gap)} above the most live bytes, {bytes_text(layout.load_bytes)}; "
        f"what is resident, {bytes_text(of.buffers.resident_bytes)}, is not in it"
    )
