"""The judge of layouts, against one that compares all pairs, and the file of a layout."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph_capture.errors import LayoutError
from remat.schedules.layout import Buffers, Layout, alignment_on, check_layout

BUFFERS = Buffers.of_arrays([4, 8, 4, 6], [0, 0, 2, 3], [2, 4, 4, 5])
"""Two live from the start; the third takes the room of the first, the fourth is on its own at 4."""
OFFSETS = (8, 0, 8, 16)


def layout_of(buffers: Buffers, offsets: tuple[int, ...], **changed: object) -> Layout:
    sizes = buffers.size_bytes.tolist()
    fields: dict[str, object] = {
        "offsets_bytes": offsets,
        "arena_bytes": max((o + s for o, s in zip(offsets, sizes, strict=True)), default=0),
        "load_bytes": buffers.load_bytes,
        "alignment_bytes": 1,
        "buffers_hash": buffers.hash,
    }
    return Layout(**fields | changed)  # type: ignore[arg-type]


def overlap_by_pairs(buffers: Buffers, offsets: tuple[int, ...]) -> bool:
    rows = list(zip(offsets, buffers.size_bytes, buffers.start, buffers.end, strict=True))
    return any(
        a[0] < b[0] + b[1] and b[0] < a[0] + a[1] and a[2] < b[3] and b[2] < a[3]
        for i, a in enumerate(rows)
        for b in rows[:i]
    )


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 30))
def test_the_sweep_finds_what_all_pairs_find(seed: int) -> None:
    source = random.Random(seed)
    n = source.randint(1, 7)
    start = [source.randint(0, 6) for _ in range(n)]
    buffers = Buffers.of_arrays(
        [source.randint(1, 5) for _ in range(n)], start, [s + source.randint(1, 4) for s in start]
    )
    offsets = tuple(source.randint(0, 20) for _ in range(n))
    layout = layout_of(buffers, offsets, arena_bytes=100)
    if overlap_by_pairs(buffers, offsets):
        with pytest.raises(LayoutError, match="overlaps"):
            check_layout(buffers, layout)
    else:
        check_layout(buffers, layout)


def test_a_right_layout_passes() -> None:
    layout = layout_of(BUFFERS, OFFSETS, alignment_bytes=8)
    check_layout(BUFFERS, layout)
    assert (layout.arena_bytes, layout.load_bytes) == (22, 18)
    assert layout.gap == pytest.approx(22 / 18 - 1)


def test_a_planted_overlap_is_found() -> None:
    said = r"b3 \(buffer 3, bytes 10 to 16\) overlaps b2 \(buffer 2, bytes 8 to 12\)"
    with pytest.raises(LayoutError, match=said):
        check_layout(BUFFERS, layout_of(BUFFERS, (8, 0, 8, 10), arena_bytes=18))


def test_a_large_buffer_over_several_small_ones_is_found() -> None:
    buffers = Buffers.of_arrays([2, 2, 9], [0, 0, 0], [1, 1, 1])
    for offsets in [(0, 4, 0), (4, 6, 3), (4, 20, 0), (0, 2, 1)]:
        with pytest.raises(LayoutError, match="overlaps"):
            check_layout(buffers, layout_of(buffers, offsets, arena_bytes=30))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"alignment_bytes": 16}, r"b0 \(buffer 0\) lies at 8, which is not a multiple of 16"),
        ({"arena_bytes": 21}, r"b3 \(buffer 3\) takes bytes 16 to 22 of an arena of 21"),
        ({"offsets_bytes": (8, -8, 8, 16)}, r"b1 \(buffer 1\) takes bytes -8 to 0"),
        ({"offsets_bytes": (8, 0, 8)}, "3 offsets for 4 buffers"),
        ({"load_bytes": 17}, "at most 17 bytes are live, but 18 are"),
        ({"buffers_hash": "other"}, "made for another one with 4 buffers, at most 18 bytes live"),
    ],
)
def test_a_broken_rule_is_named(changed: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message) as raised:
        check_layout(BUFFERS, msgspec.structs.replace(layout_of(BUFFERS, OFFSETS), **changed))
    assert "\n" not in str(raised.value)


def test_a_layout_of_other_buffers_is_refused_in_one_line() -> None:
    other = Buffers.of_arrays([4, 8, 4, 6], [0, 0, 2, 3], [2, 4, 4, 6])
    with pytest.raises(LayoutError, match="place the buffers of this step") as raised:
        check_layout(other, layout_of(BUFFERS, OFFSETS))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("alignment_bytes", [0, -8, 3, 96])
def test_an_alignment_that_no_offset_can_keep_is_refused(alignment_bytes: int) -> None:
    with pytest.raises(
        LayoutError, match="give a power of two as alignment, such as 64 for a CPU or 512"
    ):
        layout_of(BUFFERS, OFFSETS, alignment_bytes=alignment_bytes)


def test_an_arena_below_the_load_is_refused() -> None:
    with pytest.raises(LayoutError, match="an arena of 10 bytes cannot hold 18 live bytes"):
        layout_of(BUFFERS, OFFSETS, arena_bytes=10)


def test_nothing_has_a_layout() -> None:
    nothing = Buffers.of_arrays([], [], [])
    check_layout(nothing, layout := layout_of(nothing, ()))
    assert (layout.arena_bytes, layout.gap) == (0, 0.0)


def test_a_file_reads_back() -> None:
    layout = layout_of(BUFFERS, OFFSETS, placed_by="first fit, size")
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "l.json is not a layout of this release .*it is empty"),
        (b'{"steps": []}', "l.json is not a layout of this release .*offsets_bytes"),
        (b"[1]", "l.json is not a layout of this release .Expected `object`"),
        (
            b"VERSION",
            "^make it again with .*: l.json has schema version 2, and this release rea",
        ),
        (b"ALIGNMENT", "l.json is not a layout of this release .give a power of two as alignment"),
    ],
)
def test_a_file_that_is_no_layout_is_refused(data: bytes, message: str) -> None:
    right = layout_of(BUFFERS, OFFSETS).to_json()
    if data == b"VERSION":
        data = right.replace(b'"schema_version":1', b'"schema_version":2')
    if data == b"ALIGNMENT":
        data = right.replace(b'"alignment_bytes":1', b'"alignment_bytes":0')
    with pytest.raises(LayoutError, match=message) as raised:
        Layout.from_json(data, "l.json")
    assert "\n" not in str(raised.value)


def test_alignments_are_those_of_torchs_allocators() -> None:
    assert [alignment_on(name) for name in ("cpu", "cuda:1", "h100")] == [64, 512, 512]
