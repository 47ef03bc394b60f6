"""Units of axes. A picture has one unit, chosen by its largest figure."""

from __future__ import annotations


def scale_of(largest_bytes: float) -> tuple[float, str]:
    """How many bytes the unit has, and its name: GiB, MiB or KiB."""
    for power, name in ((30, "GiB"), (20, "MiB")):
        if largest_bytes >= 2**power:
            return 2.0**power, name
    return 2.0**10, "KiB"
