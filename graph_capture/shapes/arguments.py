"""Numbers that ops of a trace take and that follow from the sizes of the batch.

In a joint graph at given sizes they are plain numbers, which know how to be computed again.
"""

from __future__ import annotations

from typing import Any


class SizeArgument(int):
    """A whole number. `text` says how it follows from the sizes, see `shapes/expressions.py`."""

    text: str

    # With a default, as copies are made from the number alone.
    def __new__(cls, value: int, text: str = "") -> SizeArgument:
        """`value`, which is what `text` gives."""
        made = super().__new__(cls, value)
        made.text = text
        return made


class FloatOfSizes(float):
    """A float. `text` is Python of sizes and of the functions that are `bound` to its names.

    It does what the model's code did, operation by operation, so that its bits are eager's.
    """

    text: str
    bound: dict[str, Any]

    def __new__(
        cls, value: float, text: str = "", bound: dict[str, Any] | None = None
    ) -> FloatOfSizes:
        """`value`, which is what `text` gives."""
        made = super().__new__(cls, value)
        made.text, made.bound = text, bound or {}
        return made
