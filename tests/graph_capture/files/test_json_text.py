"""What decoding refuses, and in which words."""

from __future__ import annotations

import sys

import msgspec
import pytest

from remat.graph_capture.errors import ShapeError, TextError
from remat.graph_capture.files import decode_json


class Sample(msgspec.Struct):
    size: int = 0
    share: float = 0.0
    name: str = ""


DEEP = 100_000
NOT_JSON = {
    "empty": (b"", "it is empty"),
    "blank": (b" \n", "it is empty"),
    "cut short": (b'{"size": 1', "truncated"),
    "nested": (b'{"other": ' + b"[" * DEEP + b"]" * DEEP + b"}", "nested too deeply"),
    "nested objects": (b'{"a": ' * DEEP, "nested too deeply"),
    "UTF-8 with a mark": (b"\xef\xbb\xbf{}", "begins with a byte order mark: save it as UTF-8"),
    "UTF-16": ("{}".encode("utf-16"), "begins with a byte order mark"),
    "Latin-1": ('{"name": "ü"}'.encode("latin-1"), "it is not UTF-8"),
    "half a pair": ('{"name": "\ud800"}', "it is not UTF-8"),
    "undefined": (b'{"share": NaN}', "invalid character"),
    "infinite": (b'{"share": -Infinity}', "invalid"),
    "two": (b"{} {}", "trailing characters"),
}
OTHER_KIND = {
    "list": (b"[]", "Expected `object`, got `array`"),
    "too large": (b'{"share": 1e999}', "out of range"),
    "too many digits": (b'{"size": ' + b"9" * 10_000 + b"}", "out of range"),
    "text": (b'{"size": "1"}', r"Expected `int`, got `str` - at `\$\.size`"),
    "flag": (b'{"size": true}', "Expected `int`, got `bool`"),
    "nothing": (b'{"name": null}', "Expected `str`, got `null`"),
}


@pytest.mark.parametrize(("data", "says"), NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_not_json(data: bytes | str, says: str) -> None:
    with pytest.raises(TextError, match=says) as caught:
        decode_json(data, Sample)
    assert not isinstance(caught.value, ShapeError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("data", "says"), OTHER_KIND.values(), ids=OTHER_KIND)
def test_what_is_json_of_another_kind(data: bytes, says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        decode_json(data, Sample)


def test_nesting_is_refused_wherever_it_is_read_from() -> None:
    """Near the end of Python's stack less nesting is too deep; it is the same error."""

    def from_depth(depth: int) -> None:
        if depth:
            return from_depth(depth - 1)
        with pytest.raises(TextError, match="nested too deeply"):
            decode_json(b"[" * DEEP, object)
        return None

    from_depth(sys.getrecursionlimit() // 2)


def test_what_is_right_is_decoded() -> None:
    assert decode_json(b'{"size": 3, "other": [[[1]]]}', Sample) == Sample(3)
    assert decode_json('{"name": "\\u2028"}', Sample) == Sample(name="\u2028")
