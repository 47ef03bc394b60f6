"""The layout of a step's buffers in one arena, and the judge of layouts.

A layout gives each buffer an offset. Two buffers that are live at the same time share no byte.
`check_layout` is to layouts what `simulate` is to schedules: short, slow enough to be obviously
right, and without knowledge of what made the layout. No layout leaves `solver/layout/` unjudged.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import msgspec

from remat.graph_capture.devices.device_table import ALLOCATION_BYTES, CPU
from remat.graph_capture.errors import LayoutError, ShapeError, TextError
from remat.graph_capture.files.json_text import decoded
from remat.graph_capture.graph_rules import MOST_BYTES
from remat.schedules.buffers import Buffers

SCHEMA_VERSION = 1
CPU_ALIGNMENT_BYTES = 64
"""torch's allocator for the CPU aligns to it (`c10/core/alignment.h`)."""


class Layout(msgspec.Struct, frozen=True):
    """Where each buffer lies in an arena.

    Attributes
    ----------
    offsets_bytes : of each buffer, in the order of `Buffers`, from the start of the arena.
    arena_bytes : bytes from the start of the arena to the end of the buffer that ends last.
    load_bytes : the most bytes live at once: no arena is smaller.
    alignment_bytes : a power of two that divides each offset.
    buffers_hash : `Buffers.hash` of what it is a layout of.
    placed_by : what found it.
    """

    offsets_bytes: tuple[int, ...]
    arena_bytes: int
    load_bytes: int
    alignment_bytes: int
    buffers_hash: str
    placed_by: str = ""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise LayoutError(
                f"layout file has schema version {self.schema_version}, "
                f"this release reads {SCHEMA_VERSION}: place again"
            )
        check_alignment(self.alignment_bytes)
        if not 0 <= self.load_bytes <= self.arena_bytes < MOST_BYTES:
            raise LayoutError(
                f"an arena of {self.arena_bytes} bytes cannot hold {self.load_bytes} live ones"
            )

    @property
    def gap(self) -> float:
        """Bytes of the arena over the most live bytes, minus one."""
        return self.arena_bytes / self.load_bytes - 1 if self.load_bytes else 0.0

    def check_made_for(self, buffers: Buffers) -> None:
        """Raise `LayoutError` unless this is a layout of exactly these buffers."""
        if self.buffers_hash == buffers.hash:
            return
        raise LayoutError(
            f"this layout was made for another step: {len(self.offsets_bytes)} buffers, at most "
            f"{self.load_bytes} bytes live; this step has {len(buffers)}, at most "
            f"{buffers.load_bytes}, with sizes and times of its own. Place the buffers of this one"
        )

    def to_json(self) -> bytes:
        """Encode as JSON; `from_json` reads it back to an equal layout."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str, name: str = "the file") -> Layout:
        """Read a layout written by `to_json`.

        Raises
        ------
        LayoutError : the text is no layout, or of another schema version.
        """
        try:
            return decoded(data, cls)
        except ShapeError as error:
            raise LayoutError(f"{name}: not a layout file of this release: {error}") from error
        except TextError as error:
            raise LayoutError(f"{name}: not a JSON layout file: {error}") from error
        except LayoutError as error:
            raise LayoutError(f"{name}: {error}") from error

    def __repr__(self) -> str:
        return (
            f"Layout({len(self.offsets_bytes)} buffers in {self.arena_bytes} bytes, "
            f"{100 * self.gap:.3f} % above the most live bytes, by {self.placed_by or 'hand'})"
        )


def check_alignment(alignment_bytes: int) -> None:
    """Raise `LayoutError` unless `alignment_bytes` is a power of two."""
    is_whole = isinstance(alignment_bytes, int)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_whole or alignment_bytes <= 0 or alignment_bytes & (alignment_bytes - 1):
        raise LayoutError(
            f"an alignment of {alignment_bytes!r} bytes is none: take a power of two, such as "
            f"{CPU_ALIGNMENT_BYTES} for a CPU or {ALLOCATION_BYTES} for CUDA"
        )


def alignment_on(device: str) -> int:
    """The alignment in bytes of what torch's allocator gives out on `device`."""
    return CPU_ALIGNMENT_BYTES if device == CPU else ALLOCATION_BYTES


def check_layout(buffers: Buffers, layout: Layout) -> None:
    """Go through time with what is live by address, and check every rule.

    Raises
    ------
    LayoutError : the layout is of other buffers, a buffer is not aligned or not in the arena, or
        two that are live at the same time overlap. The message names them and the time.
    """
    layout.check_made_for(buffers)
    if len(layout.offsets_bytes) != len(buffers):
        raise LayoutError(
            f"the layout has {len(layout.offsets_bytes)} offsets for {len(buffers)} buffers"
        )
    if layout.load_bytes != buffers.load_bytes:
        raise LayoutError(
            f"the layout says that at most {layout.load_bytes} bytes are live, but "
            f"{buffers.load_bytes} are"
        )
    for i, offset in enumerate(layout.offsets_bytes):
        _check_place(buffers, layout, i, offset)
    _sweep(buffers, layout.offsets_bytes)


def _check_place(buffers: Buffers, layout: Layout, i: int, offset: int) -> None:
    top = offset + int(buffers.size_bytes[i])
    if offset % layout.alignment_bytes:
        raise LayoutError(
            f"invalid layout: {buffers.names[i]} (buffer {i}) lies at {offset}, which is no "
            f"multiple of {layout.alignment_bytes}"
        )
    if offset < 0 or top > layout.arena_bytes:
        raise LayoutError(
            f"invalid layout: {buffers.names[i]} (buffer {i}) takes bytes {offset} to {top} of an "
            f"arena of {layout.arena_bytes}"
        )


def _sweep(buffers: Buffers, offsets: tuple[int, ...]) -> None:
    """Keep what is live sorted by address: a newcomer can only overlap its two neighbours."""
    sizes = buffers.size_bytes.tolist()
    live: list[tuple[int, int, int]] = []
    for time, starts, i in _events(buffers):
        here = (offsets[i], offsets[i] + sizes[i], i)
        at = bisect.bisect_left(live, here)
        if not starts:
            del live[at]
            continue
        for other in live[max(at - 1, 0) : at + 1]:
            if other[0] < here[1] and here[0] < other[1]:
                raise LayoutError(
                    f"invalid layout: {buffers.names[i]} (buffer {i}, bytes {here[0]} to "
                    f"{here[1]}) overlaps {buffers.names[other[2]]} (buffer {other[2]}, bytes "
                    f"{other[0]} to {other[1]}), which is live at time {time} too"
                )
        live.insert(at, here)


def _events(buffers: Buffers) -> Iterable[tuple[int, bool, int]]:
    """(time, whether it starts, buffer), by time; what ends makes room for what starts."""
    starts = ((int(time), True, i) for i, time in enumerate(buffers.start))
    ends = ((int(time), False, i) for i, time in enumerate(buffers.end))
    return sorted((*starts, *ends))
