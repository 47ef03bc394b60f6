"""Parts that several screens share: tables that fit 60 columns, and words for their cells."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from remat.formats import bytes_text, fine_time_text, percent_text
from remat.graph_capture.derived.sharding import UNTIMED
from remat.graph_capture.devices.device_table import is_in_table, modelled_device
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.verdicts.folding import FoldedRow
from remat.schedules.verdicts.index_ranges import DASH
from remat.schedules.verdicts.peak_holders import PeakHolders

LONGEST = 36
"""Letters that a folded path may have before its ranges are cut short."""
HOLDERS = 8
"""Values that are named as holders of the peak; the rest is one row."""


def rendered(screen: RenderableType, width: int = 100) -> str:
    """A screen as plain text of that many columns."""
    text = StringIO()
    # Names of a file are neither markup nor emoji.
    plain = Console(file=text, width=width, highlight=False, markup=False, emoji=False)
    plain.print(screen)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


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


def run_price_text(row: FoldedRow) -> str:
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


def plain_table(*headers: str) -> Table:
    """A table without lines, narrow enough for 60 columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i == 0 else "right", overflow="fold")
    return table


def prices_text(graph: TrainingGraph) -> str:
    """Which prices are modelled, and how far off the model was seen to be."""
    said = list(graph.notes)
    if is_in_table(graph.device):
        title = modelled_device(graph.device).title
        said.insert(0, f"for {title}, at peak rates as its maker states them; nothing was run")
        if all(note == UNTIMED for note in graph.notes):
            said.append(
                "each is modelled, at assumed shares of these rates, which nobody has compared "
                "with a measured step"
            )
    return "; ".join(said)
