"""What came of a way of training under one wrapper."""

from __future__ import annotations

import msgspec


class Outcome(msgspec.Struct, frozen=True):
    """`verdict`: exact, within (the tolerance), refused, over (the predicted peak), differs or
    fails, with what was said; `ratio` of the measured peak and the predicted one, 0 for none."""

    verdict: str
    text: str = ""
    ratio: float = 0.0
