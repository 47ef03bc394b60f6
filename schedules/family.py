"""A family of schedules for one range of sizes: the size of a batch picks the one that runs.

Small sizes need no recomputation, the largest ones need most. All members are schedules of one
trace. Each has the corners that it was judged at: it serves every size that is not above one of
them in any direction, since no value takes more bytes there than at the corner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from remat.formats import bytes_text, percent_text
from remat.graph_capture.shapes.ranges import Sizes, Symbol, corner, require_in_range
from remat.schedules.schedule import Schedule

FAMILY_VERSION = 1
SHOWN = 2
"""Corners of a member that a family's text shows."""
Certificate = Literal["largest sizes", "bounds of parts"]


class Member(msgspec.Struct, frozen=True):
    """One schedule of a family.

    Attributes
    ----------
    schedule : made at `sizes`. corners : it serves each size that is at most one of these.
    peak_bytes : no size that it serves needs more; the judge said so at the corners.
    overhead : at `sizes`, as a fraction. lower_overhead : what no schedule is proved to beat there.
    """

    schedule: Schedule
    sizes: dict[str, int]
    corners: tuple[dict[str, int], ...]
    peak_bytes: int
    overhead: float
    lower_overhead: float

    def serves(self, sizes: Sizes) -> bool:
        """Whether its peak is proved to be within the budget at these sizes."""
        return any(all(sizes[name] <= at for name, at in one.items()) for one in self.corners)


class Family(msgspec.Struct, frozen=True, dict=True):
    """Schedules of one trace whose peaks are within a budget, one for each part of a range.

    Attributes
    ----------
    model : its class. symbols : the range. budget_bytes : on the peak, at every size.
    members : the one with least recomputation first; the last one serves the whole range.
    certificate : why a corner bounds the sizes below it. ``largest sizes``: no value takes fewer
        bytes where a size grows. ``bounds of parts``: some may, and each was judged at the most
        that it can take at any size below the corner.
    prices_error : how far fitted prices of the step are from the measured ones at the middle.
    traced_hash : of the trace, by which it is traced again.
    """

    model: str
    symbols: tuple[Symbol, ...]
    budget_bytes: int
    members: tuple[Member, ...]
    certificate: Certificate = "largest sizes"
    prices_error: float = 0.0
    traced_hash: str = ""
    schema_version: int = FAMILY_VERSION

    @property
    def top(self) -> Member:
        """The member that serves all sizes."""
        return self.members[-1]

    @property
    def peak_bytes(self) -> int:
        """No size of the range needs more with the member that serves it."""
        return max(member.peak_bytes for member in self.members)

    def number_at(self, **sizes: int) -> int:
        """Which of the members serves these sizes: the first one that does.

        Raises
        ------
        SignatureError : a size is missing, unknown or out of the range.
        """
        point = require_in_range(self.symbols, sizes)
        return next(i for i, member in enumerate(self.members) if member.serves(point))

    def at(self, **sizes: int) -> Member:
        """The member that serves these sizes; errors as of `number_at`."""
        return self.members[self.number_at(**sizes)]

    def compiled_pick(self) -> Callable[..., int]:
        """A function from sizes, in the order of `symbols`, to the number of a member.

        Of sizes out of the range it says nothing.
        """
        lines = [f"def pick({', '.join(symbol.name for symbol in self.symbols)}):"]
        for i, member in enumerate(self.members[:-1]):
            lines.append(f"    if {_condition(member.corners)}:\n        return {i}")
        lines.append(f"    return {len(self.members) - 1}\n")
        space: dict[str, Any] = {}
        exec(compile("\n".join(lines), "<remat family>", "exec"), space)
        return space["pick"]

    def __str__(self) -> str:
        rows = [_member_row(member, self.symbols) for member in self.members]
        return "\n".join([repr(self), *rows])

    def __repr__(self) -> str:
        ranges = ", ".join(map(str, self.symbols))
        return (
            f"Family({self.model}: {ranges}; {len(self.members)} schedules, peak "
            f"{bytes_text(self.peak_bytes)} of {bytes_text(self.budget_bytes)} at every size, by "
            f"the {self.certificate}; prices at the middle {percent_text(self.prices_error)} off)"
        )


def _condition(corners: Sequence[Sizes]) -> str:
    boxes = (" and ".join(f"{name} <= {at}" for name, at in one.items()) for one in corners)
    return " or ".join(f"({box})" for box in boxes)


def _member_row(member: Member, symbols: Sequence[Symbol]) -> str:
    if member.corners == (corner(symbols, "high"),):
        up_to = "all"
    else:
        up_to = " or ".join(sizes_text(one) for one in member.corners[:SHOWN])
        if len(member.corners) > SHOWN:
            up_to = f"{up_to} and {len(member.corners) - SHOWN} more corners"
    counts = member.schedule.computations()
    again = sum(counts.values()) - len(counts)
    return (
        f"  up to {up_to}: overhead {percent_text(member.overhead)} at {sizes_text(member.sizes)}, "
        f"bound {percent_text(member.lower_overhead)}, {again} ops again, "
        f"peak {bytes_text(member.peak_bytes)}"
    )


def sizes_text(sizes: Sizes) -> str:
    """``batch 4, seq 512``."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
