"""What a block, or an end of the model, takes on a rank: the units of a stage's peak."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockBytes:
    """Of one block: saved for each open microbatch, needed beside that, and gradients."""

    saved: int
    need: int
    gradients: int


NO_BYTES = BlockBytes(0, 0, 0)
BEFORE = "before the blocks"
