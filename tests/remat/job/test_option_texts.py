"""``--dynamic``: what it says, and what is no range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.graph_capture.errors import CaptureError
from remat.job.dynamic import parse_dynamic


def test_what_the_options_say() -> None:
    texts = ["tokens:1=seq:16:512", "tokens:0=batch", "1:1=seq:16:512", "target:0=side:64:256:32"]
    assert parse_dynamic(texts) == {
        "tokens": {1: ("seq", 16, 512), 0: ("batch",)},
        1: {1: ("seq", 16, 512)},
        "target": {0: ("side", 64, 256, 32)},
    }


@given(
    st.from_regex(r"[a-z_][a-z0-9_]{0,9}", fullmatch=True),
    st.integers(0, 9),
    st.integers(2, 99),
    st.integers(1, 999),
)
def test_any_range_is_read_as_it_is_written(name: str, dim: int, low: int, more: int) -> None:
    entry = (name, low, low + more)
    assert parse_dynamic([f"x:{dim}={name}:{low}:{low + more}"]) == {"x": {dim: entry}}


REFUSED = {
    "tokens": "cannot be read: give ARG:DIM=NAME:LEAST:MOST, such as tokens:1=seq:16:512",
    "tokens:one=seq:2:4": "cannot be read: give",
    "tokens:1=seq:2": "cannot be read: give",
    "tokens:1=seq:2:4:2:2": "cannot be read: give",
    "tokens:1=2seq:2:4": "cannot be read: give",
    "tokens:1=seq:two:4": "its sizes must be whole numbers",
    "tokens:1=seq:-2:4": "its sizes must be whole numbers",
    "tokens:1=seq:2.5:4": "its sizes must be whole numbers",
    "tokens:1=seq:1:4": "a range begins at 2",
    "tokens:1=seq:0:4": "a range begins at 2",
    "tokens:1=seq:8:4": "which is no range of sizes",
    "tokens:1=seq:4:4": "which is no range of sizes",
    "tokens:1=seq:16:100:16": "both ends must be multiples of 16",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_range_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(CaptureError) as caught:
        parse_dynamic([text])
    assert REFUSED[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_place_and_a_name_have_one_range() -> None:
    with pytest.raises(CaptureError, match="names dimension 1 of x twice"):
        parse_dynamic(["x:1=a:2:4", "x:1=b:2:4"])
    with pytest.raises(CaptureError, match="a from 2 to 4 and a from 2 to 8: give one range"):
        parse_dynamic(["x:1=a:2:4", "y:1=a:2:8"])
