"""Options whose texts have a form of their own: ``--dynamic`` and ``--sharding``."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterable
from typing import Any

from remat.graph_capture.distributed.sharding import NO_SHARDING, Sharding
from remat.graph_capture.errors import CaptureError, DeviceError, TextError
from remat.graph_capture.files import decode_json, read_contents
from remat.graph_capture.sizes.symbols import Dynamic, as_symbol, require_one_range

# Ranges of sizes: ``--dynamic tokens:1=seq:16:512``.


DYNAMIC_METAVAR = "ARG:DIM=NAME:LEAST:MOST"
_FORM = re.compile(r"(?P<argument>[^:=]+):(?P<dim>\d+)=(?P<name>[^\W\d]\w*)(?P<sizes>(:[^:]*)*)")


def parse_dynamic(texts: Iterable[str]) -> Dynamic:
    """What `remat.rematerialize` takes as ``dynamic``, of the options of a command.

    Each is ``ARGUMENT:DIMENSION=NAME:LEAST:LARGEST``, or with ``:MULTIPLE`` behind. The argument is
    a name of forward's, a position, or ``target``. A name alone stands for 2 up to the batch at
    hand.

    Raises
    ------
    CaptureError : one of them is no such text, holds 0 or 1, or ends before it begins; or a place
        or a name has two ranges.
    """
    found: dict[str | int, dict[int, Any]] = {}
    ranges = list[Any]()
    for text in texts:
        argument, dim, entry = _read_range(text)
        dims = found.setdefault(argument, {})
        if dim in dims:
            raise CaptureError(f"--dynamic names dimension {dim} of {argument} twice")
        dims[dim] = entry
        if len(entry) > 1:
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
    place = int(argument) if argument.isdecimal() else argument
    return place, int(form["dim"]), (form["name"], *numbers)


# How a step is spread over ranks: ``--sharding kind=fsdp2,world=8`` or a file of the same keys.


_WORLD = "world"
"""What people call `Sharding.world_size`; every other key is the name of its field."""
SHARDING_KEYS = tuple(
    _WORLD if field.name == "world_size" else field.name for field in dataclasses.fields(Sharding)
)
_FORM_OF_SHARDING = "give kind=fsdp2,world=8, or a JSON or TOML file, with any of the keys " + (
    ", ".join(SHARDING_KEYS)
)
_TRUTHS = {"yes": True, "true": True, "no": False, "false": False}


def parse_sharding(text: str) -> Sharding:
    """What ``--sharding`` says: pairs of a key and a value, or the name of a file that has them.

    Raises
    ------
    DeviceError : a key or a value is none that there is, or they do not go together.
    FileError : the file cannot be read.
    """
    if not text:
        return NO_SHARDING
    given = _of_file(text) if text.endswith((".json", ".toml")) else _of_pairs(text)
    for key in given:
        if key not in SHARDING_KEYS:
            raise DeviceError(f"--sharding: there is no key {key!r}; {_FORM_OF_SHARDING}")
    if "kind" not in given:
        raise DeviceError(f"--sharding {text} names no kind; {_FORM_OF_SHARDING}")
    values = {key: _READ.get(key, _word)(key, value) for key, value in given.items()}
    if _WORLD in values:
        values["world_size"] = values.pop(_WORLD)
    return Sharding(**values)


def _of_pairs(text: str) -> dict[str, Any]:
    pairs = [part.partition("=") for part in text.split(",")]
    keys = [key.strip() for key, _, _ in pairs]
    if not all(equals for _, equals, _ in pairs) or len(set(keys)) < len(keys):
        raise DeviceError(f"--sharding {text} is not one value a key; {_FORM_OF_SHARDING}")
    return {key: value.strip() for key, (_, _, value) in zip(keys, pairs, strict=True)}


def _of_file(name: str) -> dict[str, Any]:
    data = read_contents(name)
    try:
        if name.endswith(".json"):
            return decode_json(data, dict[str, Any])
        return tomllib.loads(data.decode())
    except (TextError, ValueError) as error:
        raise DeviceError(f"{name} cannot be read: {error}; {_FORM_OF_SHARDING}") from error


def _word(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DeviceError(f"--sharding: {key}={value} is no word; {_FORM_OF_SHARDING}")
    return value


def _number(key: str, value: Any) -> int:
    if isinstance(value, bool) or not str(value).isdecimal():
        raise DeviceError(f"--sharding: {key}={value} is no whole number; {_FORM_OF_SHARDING}")
    return int(value)


def _truth(key: str, value: Any) -> bool:
    if (found := _TRUTHS.get(str(value).lower())) is None:
        raise DeviceError(f"--sharding: {key}={value} is neither yes nor no; {_FORM_OF_SHARDING}")
    return found


def _resharding(key: str, value: Any) -> bool | int:
    """What `fully_shard` takes: a truth, or a number of ranks."""
    if not isinstance(value, bool) and str(value).isdecimal():
        return int(value)
    if str(value).lower() in _TRUTHS:
        return _truth(key, value)
    raise DeviceError(
        f"--sharding: {key}={value} is neither yes, no nor a number of ranks; leave it out for "
        "what fully_shard does"
    )


_READ: dict[str, Callable[[str, Any], Any]] = {
    _WORLD: _number, "replicas": _number, "states_over": _number, "bucket_views": _truth,
    "cpu_offload": _truth, "reshard_after_forward": _resharding,
}  # fmt: skip
