"""Ways in which files go wrong: by accident, by hand, and on purpose. Each draws from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Damage = Callable[[bytes, random.Random], bytes]

DEEP = 3000
MARKUP = "</script><img src=x onerror=alert(1)><!--"
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, -1.5, 1 << 62, 1 << 63, 10**30, 10**400, 1e308, 5e-324, "", "x", "0",
    MARKUP, "\u2028\u0000\x1b[2J[/red]", "x" * 5000, [], {}, [[]], [None], {"": {}},
)  # fmt: skip
RAW = (
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 10_000,
    b"[" * DEEP + b"]" * DEEP,
    b"\xff",
    b"\\ud800",
)


def cut(data: bytes, draw: random.Random) -> bytes:
    """Cut short, at either end."""
    place = draw.randrange(len(data))
    return draw.choice((data[:place], data[place:]))


def flip(data: bytes, draw: random.Random) -> bytes:
    """Some bits the other way round."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 8))):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def move(data: bytes, draw: random.Random) -> bytes:
    """A piece that is missing, twice there, or from elsewhere."""
    begin, end = sorted(draw.randrange(len(data)) for _ in range(2))
    end = min(end, begin + draw.choice((1, 10, 1000)))
    piece = draw.choice((b"", data[begin:end] * 2, data[: end - begin], draw.randbytes(3)))
    return data[:begin] + piece + data[end:]


def overwrite(data: bytes, draw: random.Random) -> bytes:
    """A number that is none, or nesting, in place of a byte or a digit."""
    digits = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
    place = draw.choice(digits)
    return data[:place] + draw.choice(RAW) + data[place + 1 :]


def recode(data: bytes, draw: random.Random) -> bytes:
    """Another encoding, or a mark at the front."""
    text = data.decode("latin-1")
    marked = b"\xef\xbb\xbf" + data
    return draw.choice((marked, text.encode("utf-16"), text.encode("utf-32"), b"", b" \n", b"null"))


def edit(data: bytes, draw: random.Random) -> bytes:
    """A value of another type or size, somewhere in the JSON; or a name that is new or gone."""
    root = json.loads(data)
    for _ in range(draw.choice((1, 1, 2))):
        holder, key = draw.choice(list(_places(root)))
        what = draw.randrange(10)
        if what == 0 and isinstance(holder, dict):
            holder[draw.choice(("kind", "nodes", "steps", MARKUP))] = holder.pop(key)
        elif what == 1:
            del holder[key]
        elif what == 2 and isinstance(holder, list):
            holder.insert(draw.randrange(len(holder)), holder[key])
        else:
            holder[key] = draw.choice(STRANGE)
    return json.dumps(root).encode()


def nudge(data: bytes, draw: random.Random) -> bytes:
    """A number a little larger, smaller or negative."""
    root = json.loads(data)
    numbers = [(h, k) for h, k in _places(root) if type(h[k]) in (int, float)]
    for holder, key in draw.sample(numbers, min(len(numbers), 2)):
        holder[key] = draw.choice(
            (holder[key] + 1, -holder[key], holder[key] * 1e6, holder[key] / 2)
        )
    return json.dumps(root).encode()


def _places(root: Any) -> list[tuple[Any, Any]]:
    """Every entry of a JSON value, with what holds it."""
    found: list[tuple[Any, Any]] = []
    waiting = [root]
    while waiting:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one))
        found += [(one, key) for key in keys]
        waiting += [one[key] for key in keys if isinstance(one[key], dict | list)]
    return found


TO_BYTES: tuple[Damage, ...] = (cut, flip, flip, move, overwrite, recode)
TO_JSON: tuple[Damage, ...] = (*TO_BYTES, edit, edit, edit, nudge)
