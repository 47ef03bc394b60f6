"""The screen of `fit`: the answer in a sentence, and each size that was captured."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from remat.formats import bytes_text, percent_text
from remat.job.fitted import Fit
from remat.job.screen import plain_table


def fit_screen(found: Fit) -> RenderableType:
    """The answer, why no more, and a line for each capture."""
    return Group(*(Text(line) for line in answer_lines(found)), Text(), _table(found))


def answer_lines(found: Fit) -> list[str]:
    """Sentences: the largest size, what it takes, what stops the next."""
    budget, limit = bytes_text(found.budget_bytes), percent_text(found.max_overhead)
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
        proved = found.next.lower_overhead > found.max_overhead
        by = ", as is proved" if found.limited_by == "overhead" and proved else ""
        lines.append(f"{found.vary} {found.next.size} does not: {found.next.says}{by}")
    else:
        lines.append(f"no larger {found.vary} was to be tried")
    if found.without_plan:
        lines.append(f"without a plan, about {found.without_plan} would fit")
    return lines


def _table(found: Fit) -> Table:
    table = plain_table(found.vary, "unmodified", "plan", "overhead", "fits")
    for one in found.tried:
        has_plan = one.peak_bytes > 0
        table.add_row(
            str(one.size),
            bytes_text(one.unmodified_bytes),
            bytes_text(one.peak_bytes) if has_plan else "-",
            percent_text(one.overhead) if has_plan else "-",
            "yes" if one.fits else "no",
        )
    return table
