"""The screens of `inspect`: tables that fit 60 columns, and say more where there is room."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from remat.formats import bytes_text, fine_time_text, percent_text, time_text
from remat.job.screen import plain_table
from remat.questions.inspect import Inspection
from remat.schedules.verdicts.folding import FoldedRow
from remat.schedules.verdicts.grouping import Group as Sums
from remat.schedules.verdicts.index_ranges import DASH
from remat.schedules.verdicts.peak_holders import PeakHolders

WIDE = 110
"""Columns from which each fact has a column of its own."""
ROOMY = 76
"""Columns from which the runs of a group are counted too."""
LONGEST = 36
"""Letters of a folded path before its ranges are cut short."""
HOLDERS = 8
TOP = 20


def rendered(screen: RenderableType, width: int = 100) -> str:
    """A screen as plain text of that many columns."""
    text = StringIO()
    Console(file=text, width=width, highlight=False, color_system=None).print(screen)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def inspection_screen(found: Inspection, top: int = TOP, width: int = 100) -> RenderableType:
    """What the step holds, largest first; who holds the peak where there is a plan."""
    parts: list[RenderableType] = [_headline(found), Text()]
    if found.by == "value":
        parts += [values_table(found.rows[:top], width), _marked(found)]
        parts += [_left_out(len(found.rows), top)]
    else:
        parts += [groups_table(found, top, width), _left_out(len(found.groups), top)]
    return Group(*parts)


def _headline(found: Inspection) -> Text:
    line = Text.assemble((found.model, "bold"), f", {found.prices} on {found.device}")
    if found.at_peak is None:
        return line.append(f", {time_text(found.time_us)} a step with nothing recomputed")
    budget = f" of {bytes_text(found.budget_bytes)}" if found.budget_bytes else ""
    line.append(
        f": peak {bytes_text(found.peak_bytes)}{budget}, {time_text(found.time_us)} a step, "
        f"{percent_text(found.overhead)} overhead"
    )
    return line


def _marked(found: Inspection) -> Text:
    return Text("* live at the peak" if found.at_peak else "", style="dim")


def _left_out(count: int, top: int) -> Text:
    more = f"{count - top} smaller rows left out: --top {count}" if count > top else ""
    return Text(more, style="dim")


def values_table(rows: Iterable[FoldedRow], width: int) -> Table:
    """One line a folded row; in a narrow terminal three, with fewer columns."""
    return _wide_values(rows) if width >= WIDE else _narrow_values(rows)


def _wide_values(rows: Iterable[FoldedRow]) -> Table:
    table = plain_table("op", "layers", "verdict", "bytes", "one run", "dtype", "module", "line")
    for i in (2, 5, 6, 7):
        table.columns[i].justify = "left"
    for row in rows:
        table.add_row(
            Text(short_target(row.first.target)),
            f"x{row.count}" if row.count > 1 else "",
            verdict_text(row),
            bytes_text(row.size_bytes),
            price_text(row),
            Text(tensor_text(row)),
            Text(short_path(row.module)),
            Text(short_line(row.first.source)),
        )
    return table


def _narrow_values(rows: Iterable[FoldedRow]) -> Table:
    table = plain_table("op, module, tensor", "verdict", "bytes", "one run")
    table.columns[1].justify = "left"
    for row in rows:
        count = f" x{row.count}" if row.count > 1 else ""
        lines = [short_target(row.first.target) + count]
        place = " ".join(
            part for part in (short_path(row.module), short_line(row.first.source)) if part
        )
        lines += [f"  {line}" for line in (place, tensor_text(row)) if line]
        cell = Text("\n").join([Text(lines[0]), *(Text(line, style="dim") for line in lines[1:])])
        table.add_row(cell, verdict_text(row), bytes_text(row.size_bytes), price_text(row))
    return table


def groups_table(found: Inspection, top: int, width: int) -> Table:
    """One line a group; without a plan only sizes and prices."""
    if found.at_peak is None:
        table = plain_table(found.by, "values", "bytes", "time")
        for group in found.groups[:top]:
            table.add_row(_group_name(group), str(group.values), *_sizes(group))
        return table
    runs = ("runs again",) if width >= ROOMY else ()
    table = plain_table(found.by, "at peak", "kept", "again", *runs, "time again")
    for group in found.groups[:top]:
        figures = (group.at_peak_bytes, group.kept_bytes, group.recomputed_bytes)
        table.add_row(
            _group_name(group),
            *(bytes_text(size) if size else "-" for size in figures),
            *((str(group.runs_again) if group.runs_again else "-",) if runs else ()),
            fine_time_text(group.recomputed_us) if group.runs_again else "-",
        )
    return table


def _sizes(group: Sums) -> tuple[str, str]:
    return bytes_text(group.size_bytes), fine_time_text(group.cost_us)


def _group_name(group: Sums) -> Text:
    return Text(
        short_path(short_line(group.name)) + (f" x{group.count}" if group.count > 1 else "")
    )


def holders_table(held: PeakHolders, top: int = HOLDERS) -> Table:
    """Who holds the peak, with shares; the rows sum to it."""
    parts = [(f"resident: {name}", size) for name, size in held.resident.items()]
    parts += [(_holder_name(row), row.size_bytes) for row in held.values[:top]]
    rest = held.values[top:]
    if rest:
        count = sum(row.count for row in rest)
        parts.append((f"{count} more values", sum(row.size_bytes for row in rest)))
    if held.workspace_bytes:
        parts.append((f"workspace of {short_target(held.target)}", held.workspace_bytes))
    if held.copies_bytes:
        parts.append(("second copies that it makes", held.copies_bytes))
    table = plain_table("held at the peak by", "bytes", "share")
    for name, size in parts:
        table.add_row(Text(name), bytes_text(size), percent_text(size / held.peak_bytes))
    return table


def _holder_name(row: FoldedRow) -> str:
    count = f" x{row.count}" if row.count > 1 else ""
    place = f" of {short_path(row.module)}" if row.module else ""
    return f"{short_target(row.first.target)}{place}{count}"


def verdict_text(row: FoldedRow) -> str:
    """``keep``, ``recompute x2``, with a mark where it is live at the peak."""
    return row.first.verdict_text + (" *" if row.first.at_peak else "")


def price_text(row: FoldedRow) -> str:
    """What one run of one layer's op costs; guessed prices say so."""
    cost_us = row.cost_us / row.count
    said = fine_time_text(cost_us)
    return said if row.first.price != "estimated" else f"{said} (guessed)"


def tensor_text(row: FoldedRow) -> str:
    """``float32 [4, 256, 384]``."""
    return f"{row.first.dtype} {list(row.first.shape)}" if row.first.dtype else ""


def short_target(target: str) -> str:
    """``aten.mm`` of ``aten.mm.default``."""
    return target.removesuffix(".default")


def short_line(source: str) -> str:
    """``gpt.py:55`` of a whole path."""
    return source.rpartition("/")[2]


def short_path(path: str) -> str:
    """A folded path whose long ranges are cut: ``blocks.0,3,12,...,97.mlp``."""
    if len(path) <= LONGEST:
        return path
    parts = [_short_ranges(part) for part in path.split(".")]
    return ".".join(parts)


def _short_ranges(part: str) -> str:
    runs = part.split(",")
    if len(runs) <= 4 or not runs[0].replace(DASH, "").isdecimal():
        return part
    return ",".join([*runs[:2], "...", runs[-1]])
