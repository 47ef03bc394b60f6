"""What a block, or an end of the model, takes on a rank: the units of a stage's peak."""

from __future__ import annotations

from dataclasses import dataclass

from remat.rewriter.split_backward.live_bytes import SplitBytes


@dataclass(frozen=True)
class BlockBytes:
    """Of one block: saved for each open microbatch, needed beside that, and gradients.

    Attributes
    ----------
    split : where gradients of weights are made apart, what the parts of backward have live.
    unsummed : gradients of one microbatch that wait for the end of its backward, beside the sum of
        those before it.
    """

    saved: int
    need: int
    gradients: int
    split: SplitBytes | None = None
    unsummed: int = 0

    @property
    def held(self) -> int:
        """What one microbatch holds until the gradients of weights."""
        return 0 if self.split is None else self.split.held


NO_BYTES = BlockBytes(0, 0, 0)
BEFORE = "before the blocks"
