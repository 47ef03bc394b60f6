"""Options whose texts have a form of their own: ``--dynamic`` and ``--sharding``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, get_args

import msgspec

from remat.graph_capture.distributed.sharding import NO_SHARDING, Sharding, ShardingKind
from remat.graph_capture.errors import CaptureError, DeviceError, TextError
from remat.graph_capture.files import decode_json, read_contents
from remat.graph_capture.sizes.symbols import Dynamic, as_symbol, require_one_range

DYNAMIC_METAVAR = "ARG:DIM=NAME:LEAST:MOST"
_FORM = re.compile(r"(?P<argument>[^:=]+):(?P<dim>\d+)=(?P<name>[^\W\d]\w*)(?P<sizes>(:[^:]*)*)")


def parse_dynamic(texts: Iterable[str]) -> Dynamic:
    """Each text is ``ARGUMENT:DIMENSION=NAME[:LEAST:LARGEST[:MULTIPLE]]``."""
    found: dict[str | int, dict[int, Any]] = {}
    ranges = list[Any]()
    for text in texts:
        argument, dim, entry = _read_range(text)
        dims = found.setdefault(argument, {})
        # A dict would keep the second in silence.
        if dim in dims:
            raise CaptureError(f"--dynamic names dimension {dim} of {argument} twice")
        dims[dim] = entry
        if len(entry) > 1:  # a name alone states no range
            ranges.append(as_symbol(entry, f"dimension {dim} of {argument}", 0))
    require_one_range(ranges)
    return found


def _read_range(text: str) -> tuple[str | int, int, tuple[Any, ...]]:
    form = _FORM.fullmatch(text.strip())
    sizes = form["sizes"].split(":")[1:] if form else []
    if form is None or len(sizes) not in (0, 2, 3):
        raise CaptureError(
            f"--dynamic {text!r} cannot be read: give {DYNAMIC_METAVAR}, such as "
            "tokens:1=seq:16:512, or seq:64:512:64 for multiples of 64"
        )
    numbers = [int(size) if re.fullmatch(r"\d+", size) else None for size in sizes]
    if None in numbers:
        raise CaptureError(f"--dynamic {text!r} cannot be read: its sizes must be whole numbers")
    argument = form["argument"]
    # An int is a position among the arguments of forward, as in Python's dynamic=.
    place = int(argument) if argument.isdecimal() else argument
    return place, int(form["dim"]), (form["name"], *numbers)


_WORLD = "world"
_FIELDS = {_WORLD: "world_size"}
"""Fields of `Sharding` whose key has another name."""
SHARDING_KEYS = ("kind", _WORLD, *(field.name for field in dataclasses.fields(Sharding)[2:]))
_FORM_OF_SHARDING = (
    f"give kind={'|'.join(get_args(ShardingKind)[1:])},world=8, or a JSON or TOML file, with any "
    f"of the keys {', '.join(SHARDING_KEYS)}"
)
_TRUTHS = {"yes": True, "no": False}


def parse_sharding(text: str) -> Sharding:
    """Pairs of a key and a value, or the name of a JSON or TOML file that has them."""
    if not text:
        return NO_SHARDING
    given = _of_file(text) if text.endswith((".json", ".toml")) else _of_pairs(text)
    if wrong := [key for key in given if key not in SHARDING_KEYS]:
        raise DeviceError(f"--sharding: there is no key {wrong[0]!r}; {_FORM_OF_SHARDING}")
    values = {_FIELDS.get(key, key): _TRUTHS.get(str(value), value) for key, value in given.items()}
    try:
        # Not strict: on the command line numbers are text.
        return msgspec.convert(values, Sharding, strict=False)
    except msgspec.ValidationError as error:
        # msgspec names its own path; a person wrote the key.
        said = str(error).replace("$.world_size", _WORLD).replace("$.", "")
        raise DeviceError(f"--sharding: {said}; {_FORM_OF_SHARDING}") from error


def _of_pairs(text: str) -> dict[str, Any]:
    pairs = [part.partition("=") for part in text.split(",")]
    found = {key.strip(): value.strip() for key, _, value in pairs}
    if not all(equals for _, equals, _ in pairs) or len(found) < len(pairs):
        raise DeviceError(f"--sharding {text} is not one value a key; {_FORM_OF_SHARDING}")
    return found


def _of_file(name: str) -> dict[str, Any]:
    data = read_contents(name)
    try:
        if name.endswith(".json"):
            return decode_json(data, dict[str, Any])
        import tomllib  # few need it, and all would wait for it

        return tomllib.loads(data.decode())
    except (TextError, ValueError) as error:
        raise DeviceError(f"{name} cannot be read: {error}; {_FORM_OF_SHARDING}") from error
