"""What `remat.largest_batch` found: the largest size that fits, the next, and all tried."""

from __future__ import annotations

from typing import Literal

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from remat.formats import Answer, bytes_text, percent_text, plain_table
from remat.solved import budget_said


class SizeTried(msgspec.Struct, frozen=True):
    size: int
    fits: bool  # within the budget, at no more than the overhead asked for
    status: str
    peak_bytes: int  # 0 where no plan fits, as the times below
    time_us: float
    overhead: float
    lower_overhead: float
    unmodified_bytes: int  # peak of the step that keeps everything
    least_bytes: int  # where nothing fits, the least budget known to do; 0 where none is
    says: str  # why not; empty where it fits
    seconds: float


class Fit(Answer, frozen=True):
    """The largest size that fits, the one after it that does not, and all that were tried."""

    model: str
    device: str
    vary: str
    size: int  # 0 where none fits
    budget_bytes: int
    max_overhead: float
    # Of `next`: no plan fits, the fastest is too slow, it was not to be tried, or Ctrl-C came.
    limited_by: Literal["memory", "overhead", "most", "interrupt"]
    answer: SizeTried | None
    next: SizeTried | None
    tried: tuple[SizeTried, ...]
    without_plan: int  # the largest without a plan, as two captures predict
    measured_peak_bytes: int | None = None  # of the answer; None where it was not run

    def screen(self, width: int = 100) -> RenderableType:
        table = plain_table(self.vary, "unmodified", "plan", "overhead", "fits")
        for one in self.tried:
            figures = bytes_text(one.peak_bytes), percent_text(one.overhead)
            table.add_row(
                str(one.size), bytes_text(one.unmodified_bytes),
                *(figures if one.peak_bytes else ("-", "-")), "yes" if one.fits else "no",
            )  # fmt: skip
        return Group(*(Text(line) for line in _answer_lines(self)), Text(), table)


def _answer_lines(found: Fit) -> list[str]:
    budget = budget_said(found.budget_bytes, found.device)
    limit = percent_text(found.max_overhead)
    if found.answer is None:
        return [
            f"{found.model}: no {found.vary} fits {budget} at {limit} overhead or less; "
            f"{found.tried[0].says}"
        ]
    answer = found.answer
    lines = [
        f"{found.model}: {found.vary} {found.size} is the largest that fits {budget} at {limit} "
        f"overhead or less: peak {bytes_text(answer.peak_bytes)}, "
        f"{percent_text(answer.overhead)} overhead"
    ]
    if found.measured_peak_bytes is not None:
        lines.append(f"when run, its peak is {bytes_text(found.measured_peak_bytes)}")
    if found.next is not None:
        # A plan may be slow because none better was found, or because none can be.
        proved = found.next.lower_overhead > found.max_overhead
        by = ", which is proved" if found.limited_by == "overhead" and proved else ""
        lines.append(f"{found.vary} {found.next.size} does not: {found.next.says}{by}")
    else:
        more = "interrupted before a larger" if found.limited_by == "interrupt" else "no larger"
        lines.append(f"{more} {found.vary} was tried")
    if found.without_plan:  # "About", as it is read off a line through two captures
        lines.append(f"without a plan, about {found.without_plan} would fit")
    return lines
