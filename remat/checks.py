"""What a check found that is no failure, with what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat.formats import bytes_text

if TYPE_CHECKING:
    from remat.rewriter.checking.check import Check

FRAGMENTED = 0.10
"""Share of the peak that an allocator holds beside it, above which that is worth a word."""
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def advice_of(check: Check, budget_bytes: int | None) -> tuple[str, ...]:
    """On memory that is held without use, and on bits that eager does not repeat."""
    said: list[str] = []
    over_bytes = check.plan_peak_bytes - (budget_bytes or 0)
    if budget_bytes and over_bytes > 0 and not check.exceeds(budget_bytes):
        said.append(
            f"the allocator gives out {bytes_text(over_bytes)} more than the budget, in blocks "
            f"that are larger than what is asked for: start with {EXPANDABLE}"
        )
    reserved_bytes = check.plan_reserved_bytes or 0
    if reserved_bytes > (1 + FRAGMENTED) * check.plan_peak_bytes:
        said.append(
            f"the allocator reserves {bytes_text(reserved_bytes)} for a peak of "
            f"{bytes_text(check.plan_peak_bytes)}: start with {EXPANDABLE}"
        )
    if check.unsteady:
        said.append(
            f"eager itself does not repeat {len(check.unsteady)} results to the last bit, such as "
            f"{check.unsteady[0]}; the plan's are as near to eager's as eager's are to each other. "
            "With torch.use_deterministic_algorithms(True) both repeat"
        )
    return tuple(said)
