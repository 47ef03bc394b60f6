"""Why another's row beats ours, from what was measured of both.

A step of ours takes what its unplanned form takes over the unmodified step, times what the plan
adds, times what the plan takes longer than planned. The largest of the three is the cause.
"""

from __future__ import annotations

from benchmarks.comparison.fronts import Row


def cause(theirs: Row, ours: Row | None, least_bytes: int | None) -> str:
    """The cause in a few words.

    Parameters
    ----------
    ours : our fastest row within their peak, if there is one.
    least_bytes : the least peak that was measured of ours; None if nothing was.
    """
    if not theirs.is_right:
        return "its gradients are wrong"
    if ours is None:
        least = f", the least is {least_bytes / 1e6:.1f} MB" if least_bytes else ""
        return f"none of ours is so low{least}"
    if "measured_overhead" not in ours.kept:
        return "what our step takes without a plan was not measured"
    planned, measured = (ours.kept[f"{name}_overhead"] for name in ("planned", "measured"))
    before = (1 + ours.over_eager) / (1 + measured) - 1
    said = {
        f"{before:+.1%} before recomputation": before,
        f"this peak costs ours {planned:+.1%}, as planned; gap {ours.kept['gap']:.1%}": planned,
        f"{measured - planned:+.1%} more than planned": measured - planned,
    }
    return max(said, key=lambda text: said[text])
