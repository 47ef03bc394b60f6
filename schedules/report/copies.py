"""The picture of copies on the page, an SVG that needs no script: a lane a link, a band a tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from remat.formats import bytes_text, fine_time_text, time_text
from remat.graph_capture.links import LINK_NAMES, LINK_TITLES
from remat.schedules.report.facts import Facts
from remat.schedules.simulate import simulate
from remat.schedules.simulation import Simulation
from remat.schedules.views.palette import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION

WIDTH, LANE, BAND, GAP = 2000, 46, 150, 24
"""Units of the picture, which are whole numbers: what is narrower than one is drawn as one."""
TICKS = 5
COLOURS = {"d2h": BLUE, "h2d": SKY, "write": PURPLE, "read": GREEN}
WAITS, WAITS_COLOUR = "device waits", VERMILLION
TIERS = {"host": "on the host", "nvme": "on NVMe"}


class Bar(NamedTuple):
    """One copy, or one wait: where it is in its lane, and what it is, in words."""

    x: int
    width: int
    title: str


class CopyLane(NamedTuple):
    """The copies over a link, or the waits for them; `y` is its upper edge."""

    name: str
    colour: str
    y: int
    bars: tuple[Bar, ...]


class TierBand(NamedTuple):
    """Bytes in a lower tier through the step, as a filled path; `y` is the upper edge."""

    name: str
    colour: str
    y: int
    path: str
    most: str


class TimeTick(NamedTuple):
    """A mark at the axis of time."""

    x: int
    text: str


class CopiesPicture(NamedTuple):
    """What the page draws of a plan that copies; `says` has its figures in words."""

    lanes: tuple[CopyLane, ...]
    bands: tuple[TierBand, ...]
    ticks: tuple[TimeTick, ...]
    says: str
    height: int
    width: int = WIDTH
    lane: int = LANE
    band: int = BAND


def copies_picture(facts: Facts) -> CopiesPicture | None:
    """The picture; None where nothing is copied.

    Raises
    ------
    ScheduleError : the schedule is invalid.
    """
    if not facts.schedule.moves:
        return None
    found = simulate(facts.graph, facts.schedule)
    lanes = _lanes(found)
    top = len(lanes) * (LANE + GAP)
    bands = tuple(
        _band(found, tier, there, top + i * (BAND + GAP))
        for i, (tier, there) in enumerate(found.below_bytes.items())
    )
    ticks = [
        TimeTick(WIDTH * i // TICKS, time_text(found.time_us * i / TICKS)) for i in range(TICKS)
    ]
    height = top + len(bands) * (BAND + GAP)
    return CopiesPicture(lanes, bands, tuple(ticks), _copies_said(found), height)


def _x(found: Simulation, at_us: float) -> int:
    return round(WIDTH * at_us / found.time_us) if found.time_us else 0


def _bar(found: Simulation, start_us: float, end_us: float, title: str) -> Bar:
    x = _x(found, start_us)
    return Bar(x, max(_x(found, end_us) - x, 1), title)


def _lanes(found: Simulation) -> tuple[CopyLane, ...]:
    """The links that copy anything, and the waits of the device where there are some."""
    bars: list[tuple[str, str, tuple[Bar, ...]]] = []
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
        bars.append((LINK_TITLES[link], COLOURS[link], copies))
    bars.append((WAITS, WAITS_COLOUR, _waits(found)))
    used = [lane for lane in bars if lane[2]]
    return tuple(
        CopyLane(name, colour, i * (LANE + GAP), each)
        for i, (name, colour, each) in enumerate(used)
    )


def _waits(found: Simulation) -> tuple[Bar, ...]:
    """Stalls of a step follow one another, from the clock before it on."""
    bars: list[Bar] = []
    ends: dict[int, float] = {}
    for stall in found.stalls:
        before_us = found.clock_us[stall.step - 1] if stall.step else 0.0
        start_us = ends.get(stall.step, before_us)
        ends[stall.step] = start_us + stall.us
        title = f"{fine_time_text(stall.us)} for {stall.value}"
        bars.append(_bar(found, start_us, ends[stall.step], title))
    return tuple(bars)


def _band(found: Simulation, tier: str, there: Sequence[int], y: int) -> TierBand:
    most_bytes, bottom = max(there), y + BAND
    path, before = f"M0 {bottom}", 0
    for at_us, size_bytes in zip(found.clock_us, there, strict=True):
        if size_bytes != before:
            path += f"H{_x(found, at_us)}V{bottom - round(BAND * size_bytes / most_bytes)}"
        before = size_bytes
    return TierBand(TIERS[tier], ORANGE, y, f"{path}H{WIDTH}V{bottom}Z", bytes_text(most_bytes))


def _copies_said(found: Simulation) -> str:
    moved = ", ".join(
        f"{bytes_text(size_bytes)} {LINK_TITLES[link]}"
        for link in LINK_NAMES
        if (size_bytes := found.moved_bytes.get(link, 0))
    )
    waits = f"waits {fine_time_text(found.stall_us)} for them" if found.stalls else "never waits"
    return f"{len(found.copies)} copies: {moved}; the device {waits}"
