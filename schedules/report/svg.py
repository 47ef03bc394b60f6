"""Pictures on the page, of a layout and of copies: SVGs, which need no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from remat.formats import bytes_text, fine_time_text, percent_text, time_text
from remat.graph_capture.graph import LINK_NAMES, LINK_TITLES, Ints, TrainingGraph
from remat.schedules import palette
from remat.schedules.derived import graph_of_schedule
from remat.schedules.layout import Buffers, Layout, buffers_of, check_layout, kinds_of_buffers
from remat.schedules.report.page_facts import PageFacts
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import Simulation, simulate
from remat.schedules.timeline import Timeline


class _Box(NamedTuple):
    """One buffer: bytes low..high - 1 of the arena, live in [start, end)."""

    name: str
    kind: str
    start: int
    end: int
    low: int
    high: int


@dataclass(frozen=True, eq=False)
class Addresses:
    layout: Layout
    buffers: Buffers
    boxes: tuple[_Box, ...]  # the largest areas first


def addresses(graph: TrainingGraph, schedule: Schedule, layout: Layout) -> Addresses:
    buffers = buffers_of(graph, schedule)
    check_layout(buffers, layout)
    area = buffers.size_bytes.astype(np.float64) * (buffers.end - buffers.start)
    kinds = kinds_of_buffers(graph_of_schedule(graph, schedule), buffers)
    boxes = tuple(
        _Box(
            buffers.names[i], kinds[i], int(buffers.start[i]), int(buffers.end[i]),
            layout.offsets_bytes[i], layout.offsets_bytes[i] + int(buffers.size_bytes[i]),
        )
        for i in np.argsort(-area, kind="stable").tolist()
    )  # fmt: skip
    return Addresses(layout, buffers, boxes)


WIDTH, HEIGHT = 2000, 700  # units of the picture: whole numbers keep the page small
_NAMED = 150  # boxes that say what they are when pointed at, the largest
_TICKS = 5


class _Shape(NamedTuple):
    """Rectangles of one colour as the path of an SVG; `title` is what pointing at them shows."""

    name: str
    colour: str
    path: str
    title: str = ""


class _Tick(NamedTuple):
    at: int
    text: str


class _ArenaPicture(NamedTuple):
    """`shapes` in the order in which they are drawn; `live` is the path of live bytes."""

    shapes: tuple[_Shape, ...]
    legend: tuple[tuple[str, str], ...]
    live: str
    load_y: int
    ticks: tuple[_Tick, ...]
    says: str
    width: int = WIDTH
    height: int = HEIGHT


def arena_picture(facts: PageFacts) -> _ArenaPicture | None:
    """None where there is no layout, or nothing in its arena."""
    if facts.layout is None:
        return None
    found = addresses(facts.graph, facts.schedule, facts.layout)
    if not found.layout.arena_bytes:
        return None
    scale = _Scale(found)
    named, others = found.boxes[:_NAMED], found.boxes[_NAMED:]
    kinds = [kind for kind in palette.KINDS if any(box.kind == kind for box in found.boxes)]
    legend = [(kind, _colour(kind)) for kind in kinds]
    shapes = [*_of_kinds(scale, kinds, others), *(_named(scale, box) for box in named)]
    marks = [found.layout.arena_bytes * i // (_TICKS - 1) for i in range(_TICKS)]
    ticks = tuple(_Tick(scale.y(mark), bytes_text(mark) if mark else "0") for mark in marks)
    live, load_y = _live_path(scale, found), scale.y(found.layout.load_bytes)
    return _ArenaPicture(tuple(shapes), tuple(legend), live, load_y, ticks, _says(found))


def _colour(kind: str) -> str:
    return palette.KINDS.get(kind, palette.DARK_GREY)  # resident values, grey, are not here


class _Scale:
    def __init__(self, of: Addresses) -> None:
        self.n_times, self.arena_bytes = of.buffers.n_times, of.layout.arena_bytes

    def x(self, time: float) -> int:
        return round(time * WIDTH / self.n_times)

    def y(self, address: float) -> int:
        return HEIGHT - round(address * HEIGHT / self.arena_bytes)  # SVG's y grows downwards

    def path(self, start: float, end: float, low: float, high: float) -> str:
        x, y = self.x(start), self.y(high)
        # At least one unit, so that everything stays visible.
        width, height = max(self.x(end) - x, 1), max(self.y(low) - y, 1)
        return f"M{x} {y}h{width}v{height}h-{width}z"


def _of_kinds(scale: _Scale, kinds: Iterable[str], boxes: Iterable[_Box]) -> Iterable[_Shape]:
    paths: dict[str, dict[str, None]] = {kind: {} for kind in kinds}
    for box in boxes:  # of tens of thousands of small ones many are the same rectangle
        paths[box.kind][scale.path(box.start, box.end, box.low, box.high)] = None
    return [_Shape(kind, _colour(kind), "".join(path)) for kind, path in paths.items() if path]


def _named(scale: _Scale, box: _Box) -> _Shape:
    title = (
        f"{box.name}, {box.kind}, {bytes_text(box.high - box.low)} at {bytes_text(box.low)}, "
        f"runs {box.start + 1} to {box.end}"
    )
    path = scale.path(box.start, box.end, box.low, box.high)
    return _Shape(box.kind, _colour(box.kind), path, title)


def _live_path(scale: _Scale, of: Addresses) -> str:
    live = of.buffers.live_bytes
    at = np.array([scale.x(time) for time in range(len(live))])
    return "".join(
        f"{'L' if i else 'M'}{x} {scale.y(top)}H{end}"
        for i, (x, top, end) in enumerate(_stairs(at, live, WIDTH))
    )


def _stairs(at: Ints, sizes: Ints, end: int) -> Iterable[tuple[int, int, int]]:
    """Where each stair begins, its height and where it ends; of those in one unit the highest."""
    firsts = np.flatnonzero(np.diff(at, prepend=-1))
    tops = np.maximum.reduceat(sizes, firsts)
    begins = at[firsts].tolist()
    return zip(begins, tops.tolist(), [*begins[1:], end], strict=True)


def _says(of: Addresses) -> str:
    layout = of.layout
    return (
        f"{len(of.buffers)} buffers in an arena of {bytes_text(layout.arena_bytes)}, "
        f"{percent_text(layout.gap)} above the most live bytes, {bytes_text(layout.load_bytes)}; "
        f"what is resident, {bytes_text(of.buffers.resident_bytes)}, is not in it"
    )


_STEP_HEIGHT, _AIR = 1000, 1.08  # units of a picture that is stretched to its place; room above
_FAR = 1.3  # times the highest peak: a budget above it would flatten the picture


def step_picture(facts: PageFacts) -> dict[str, Any]:
    """Memory through a step with the plan and without, as areas, and the budget as a line."""
    lines = {"unmodified": facts.unmodified_line, "plan": facts.line}
    peaks = {name: line.simulation.peak_bytes for name, line in lines.items()}
    times = [time_text(line.simulation.time_us) for line in lines.values()]
    most_bytes, budget_bytes = max(peaks.values()), facts.budget_bytes
    is_far = budget_bytes > _FAR * most_bytes
    top_bytes = _AIR * (most_bytes if is_far else max(most_bytes, budget_bytes)) or 1.0
    last = max(float(line.edges[-1]) for line in lines.values()) or 1.0

    def path(line: Timeline) -> str:
        at = np.floor(line.edges * (WIDTH / last)).astype(np.int64)
        stairs = _stairs(at[:-1], line.live_bytes, int(at[-1]))
        tops = ((round(_STEP_HEIGHT * (1 - top / top_bytes)), end) for _, top, end in stairs)
        return f"M0 {_STEP_HEIGHT}{''.join(f'V{y}H{end}' for y, end in tops)}V{_STEP_HEIGHT}z"

    return {
        "areas": [(name, bytes_text(peaks[name]), path(line)) for name, line in lines.items()],
        "budget": bytes_text(budget_bytes) if budget_bytes else "", "is_far": is_far,
        "budget_y": round(100 * (1 - budget_bytes / top_bytes), 2), "name": facts.graph.name,
        "times": times if facts.line.is_timed else (), "width": WIDTH, "height": _STEP_HEIGHT,
    }  # fmt: skip


COPIES_WIDTH, LANE, _BAND, _GAP = 2000, 46, 150, 24  # whole units
_COLOURS = {
    "d2h": palette.BLUE, "h2d": palette.SKY, "write": palette.PURPLE, "read": palette.GREEN
}  # fmt: skip
_WAITS, _WAITS_COLOUR = "device waits", palette.VERMILLION
_TIERS = {"host": "on the host", "nvme": "on NVMe"}


class _Bar(NamedTuple):
    x: int
    width: int
    title: str


class _CopyLane(NamedTuple):
    name: str
    colour: str
    y: int
    bars: tuple[_Bar, ...]


class _TierBand(NamedTuple):
    name: str
    colour: str
    y: int
    path: str
    most: str


class _CopiesPicture(NamedTuple):
    lanes: tuple[_CopyLane, ...]
    bands: tuple[_TierBand, ...]
    ticks: tuple[_Tick, ...]
    says: str
    height: int
    width: int = COPIES_WIDTH
    lane: int = LANE
    band: int = _BAND


def copies_picture(facts: PageFacts) -> _CopiesPicture | None:
    """None where nothing is copied."""
    if not facts.schedule.moves:
        return None
    found = simulate(facts.graph, facts.schedule)
    lanes = _lanes(found)
    top = len(lanes) * (LANE + _GAP)
    bands = tuple(
        _band(found, tier, there, top + i * (_BAND + _GAP))
        for i, (tier, there) in enumerate(found.below_bytes.items())
    )
    ticks = [
        _Tick(COPIES_WIDTH * i // _TICKS, time_text(found.time_us * i / _TICKS))
        for i in range(_TICKS)
    ]
    height = top + len(bands) * (_BAND + _GAP)
    return _CopiesPicture(lanes, bands, tuple(ticks), _copies_said(found), height)


def _x(found: Simulation, at_us: float) -> int:
    return round(COPIES_WIDTH * at_us / found.time_us) if found.time_us else 0


def _bar(found: Simulation, start_us: float, end_us: float, title: str) -> _Bar:
    x = _x(found, start_us)
    return _Bar(x, max(_x(found, end_us) - x, 1), title)  # one unit at least is visible


def _lanes(found: Simulation) -> tuple[_CopyLane, ...]:
    bars: list[tuple[str, str, tuple[_Bar, ...]]] = []
    for link in LINK_NAMES:
        copies = tuple(
            _bar(
                found, copy.start_us, copy.end_us,
                f"{copy.value}, {bytes_text(copy.size_bytes)} in "
                f"{fine_time_text(copy.end_us - copy.start_us)}",
            )
            for copy in found.copies
            if copy.link == link
        )  # fmt: skip
        bars.append((LINK_TITLES[link], _COLOURS[link], copies))
    bars.append((_WAITS, _WAITS_COLOUR, _waits(found)))
    used = [lane for lane in bars if lane[2]]  # links that copy nothing get no lane
    return tuple(
        _CopyLane(name, colour, i * (LANE + _GAP), each)
        for i, (name, colour, each) in enumerate(used)
    )


def _waits(found: Simulation) -> tuple[_Bar, ...]:
    bars: list[_Bar] = []
    ends: dict[int, float] = {}
    for stall in found.stalls:
        # Stalls of a step follow one another from the clock before.
        start_us = ends.get(stall.step, found.clock_us[stall.step - 1] if stall.step else 0.0)
        ends[stall.step] = start_us + stall.us
        title = f"{fine_time_text(stall.us)} for {stall.value}"
        bars.append(_bar(found, start_us, ends[stall.step], title))
    return tuple(bars)


def _band(found: Simulation, tier: str, there: Sequence[int], y: int) -> _TierBand:
    most_bytes, bottom = max(there), y + _BAND
    path, before = f"M0 {bottom}", 0
    for at_us, size_bytes in zip(found.clock_us, there, strict=True):
        if size_bytes != before:  # most steps move nothing: leave them out, to keep the page small
            path += f"H{_x(found, at_us)}V{bottom - round(_BAND * size_bytes / most_bytes)}"
        before = size_bytes
    path = f"{path}H{COPIES_WIDTH}V{bottom}Z"
    return _TierBand(_TIERS[tier], palette.ORANGE, y, path, bytes_text(most_bytes))


def _copies_said(found: Simulation) -> str:
    moved = ", ".join(
        f"{bytes_text(size_bytes)} {LINK_TITLES[link]}"
        for link in LINK_NAMES
        if (size_bytes := found.moved_bytes.get(link, 0))
    )
    waits = f"waits {fine_time_text(found.stall_us)} for them" if found.stalls else "never waits"
    return f"{len(found.copies)} copies: {moved}; the device {waits}"
