"""The part of docs/benchmarks.md on how the cost of a plan grows, made from a results file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PARTS = {"capture": "capture", "price": "costs", "solve": "solve", "rewrite": "rewrite"}
"""Keys of a results file, and their titles."""
MIB = 2**20


def scaling(kept: dict[str, Any]) -> Iterator[str]:
    """What was measured, size by size, and the fitted exponents."""
    sizes = ", ".join(f"{key} {value}" for key, value in kept["sizes"].items())
    yield (
        f"`python -m benchmarks.scaling --out FILE`: a GPT ({sizes}) of more and more layers,\n"
        f"planned for {kept['budget']} of its peak with no cost known before, each size in a\n"
        f"process of its own. {kept['device']}; torch {kept['torch']}, Python {kept['python']}; "
        f"{kept['date']}.\n"
    )
    titles = " | ".join(f"{title} s" for title in PARTS.values())
    yield f"| layers | ops | {titles} | process MiB | gap |"
    yield "|--:|--:|" + "--:|" * (len(PARTS) + 2)
    for row in kept["rows"]:
        seconds = " | ".join(f"{row[f'{part}_s']:.1f}" for part in PARTS)
        mib = row["process_peak_bytes"] / MIB
        gap = f"{100 * row['gap']:.1f} %"
        yield f"| {row['layers']} | {row['ops']} | {seconds} | {mib:.0f} | {gap} |"
    each = ", ".join(f"{title} {kept['exponents'][part]:.2f}" for part, title in PARTS.items())
    yield f"\nSeconds grow as ops to the power of {kept['exponent']:.2f} ({each}).\n"
