"""JSON of files, decoded to the kind that is wanted, or refused in one line.

Files come from anywhere: cut short, edited, of another kind, or made to do harm. So all decoding of
files goes through here, and no error of the decoder goes further.
"""

from __future__ import annotations

import codecs
from typing import TypeVar

import msgspec

from remat.graph_capture.errors import ShapeError, TextError

Kind = TypeVar("Kind")

MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decoded(data: bytes | str, kind: type[Kind]) -> Kind:
    """The value in a JSON text.

    Raises
    ------
    TextError : it is not JSON, or too deep to be read. ShapeError : it is JSON of another kind.
    RematError : what the kind itself raises of its fields.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise ShapeError(str(error)) from error
    except msgspec.DecodeError as error:
        raise TextError(_cause(data, str(error))) from error
    except UnicodeError as error:
        raise TextError(_cause(data, f"it is not UTF-8: {error}")) from error
    except RecursionError as error:
        raise TextError("it is nested too deeply to be read") from error


def _cause(data: bytes | str, said: str) -> str:
    """What the decoder said, or what a person would call it."""
    start = data[:3].encode("utf-8", "replace") if isinstance(data, str) else data[:3]
    if not data.strip():
        return f"{said}: it is empty"
    if start.startswith(MARKS):
        return "it begins with a byte order mark: save it as UTF-8 without one"
    return said
