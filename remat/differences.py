"""What a failed check says: what differs from eager, by how much, where, and what to do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remat.rewriter.checking.check import Check

SHOWN = 5
"""Differences that are named; the rest are counted."""
ALONE = (
    "remat.rematerialize_blocks(model, pattern) plans the modules that a pattern names, and leaves "
    "all others to eager"
)


def differences_text(check: Check) -> str:
    """The differences, each with the largest distance from eager's."""
    pairs = list(zip(check.differences, check.distances, strict=False))
    known = dict(pairs)
    said = [name + _by(known.get(name)) for name in check.differences[:SHOWN]]
    more = len(check.differences) - SHOWN
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")


def cause_text(check: Check) -> str:
    """Why such a difference comes about, where, and the way out."""
    unsteady = [name for name in check.differences if name in check.unsteady]
    if unsteady:
        return (
            f"Eager itself gives another {unsteady[0]} each time that it runs the same step: "
            "forward or the loss reads what is neither an argument, nor the model's state, nor "
            "torch's random stream, such as a clock, a file or a generator of its own. Pass it as "
            "an argument, as a tensor"
        )
    if check.rounding == "inductor":
        return (
            f"Inductor's code may be off by {check.tolerance:g} of a result's norm: leave out "
            "compile=True, which gives eager's bits"
        )
    if check.rounding == "pieces":
        return (
            f"Pieces that sum in another order may be off by {check.tolerance:g} of a result's "
            "norm: ask for eager's bits with split='exact' (--split exact)"
        )
    if check.other_line:
        return (
            f"The first op that eager runs and the plan does not is at {check.other_line}: code "
            "there does something else while it is traced, as where it asks whether it is compiled "
            f"or looks at a tensor's type. Change that, or leave that module out: {ALONE}"
        )
    if check.other_line is None:
        return (
            "Code does something else while it is traced, as where it asks whether it is compiled "
            "or looks at a tensor's type. remat.check of the whole model, on one rank, names the "
            f"line. Change that, or leave its module out: {ALONE}"
        )
    return (
        "Eager runs no op that the plan does not, so one of them gives something else when it is "
        "traced: a tensor that is read where torch does not see it, or an op with a registered "
        f"fake or backward unlike what it runs. Leave the module that has it out: {ALONE}"
    )


def _by(distance: float | None) -> str:
    if distance is None or math.isnan(distance):
        return ""
    return f" (off by up to {distance:.2g})"
