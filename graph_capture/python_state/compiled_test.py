"""Many small comparisons as one function, of which Python runs each in some tens of nanoseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

PART = 200
"""Terms in one expression. The compiler's stack is not made for one of 10,000."""


class ObjectNames:
    """ObjectNames for objects, in the space that a compiled test reads them from."""

    def __init__(self) -> None:
        self.space: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def __call__(self, value: Any) -> str:
        """The name of that very object."""
        if id(value) not in self._known:
            self._known[id(value)] = f"v{len(self._known)}"
            self.space[self._known[id(value)]] = value
        return self._known[id(value)]


def compiled_test(terms: Iterable[str], names: ObjectNames) -> Callable[[], bool]:
    """One function that is true while every term, an expression of `names`, is."""
    terms = list(terms)
    parts = [terms[i : i + PART] for i in range(0, len(terms), PART)]
    lines = [f"    if not ({' and '.join(part)}): return False" for part in parts]
    exec("\n".join(["def test():", *lines, "    return True"]), names.space)
    return names.space["test"]
